"""Events of FP8: conversions, recipes and their settings, of torchao, Transformer Engine and accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint.facts.behaviour.events.event import Event, finds
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.syntax.view import aliases, called

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView
    from mpguard.lint.facts.syntax.records import Call


def _named(facts: BehaviourView, *wanted: str) -> Iterator[tuple[Call, str]]:
    """Yield the calls of objects with these original names, each with its full dotted name."""
    for name in wanted:
        for call in called(facts, name, *aliases(facts, name)):
            for _, path in facts.paths(call):
                if path.rsplit(".", 1)[-1] == name:
                    yield call, path
                    break


@finds("convert")
def _converts(facts: BehaviourView) -> Iterator[Event]:
    """Yield torchao's conversions."""
    for call, path in _named(facts, "convert_to_float8_training"):
        if path == "torchao.float8.convert_to_float8_training":
            yield Event("convert", call, facts, call.argument(0, "module"))


@finds("convert_accelerate")
def _converts_by_accelerate(facts: BehaviourView) -> Iterator[Event]:
    """Yield accelerate's conversion functions: to Transformer Engine's layers, and to torchao's."""
    for call, path in _named(facts, "convert_model", "convert_model_to_fp8_ao"):
        if path.startswith("accelerate.utils."):
            yield Event("convert_accelerate", call, facts, call.argument(0, "model"))


@finds("fp8_recipe")
def _recipes(facts: BehaviourView) -> Iterator[Event]:
    """Yield the calls that create a recipe of Transformer Engine."""
    for call, path in _named(facts, *api_names.FP8_RECIPES):
        if api_names.kind_of(path) == "fp8_recipe":
            yield Event("fp8_recipe", call, facts, call.node)


@finds("fp8_handler")
def _handlers(facts: BehaviourView) -> Iterator[Event]:
    """Yield accelerate's `AORecipeKwargs`, `TERecipeKwargs`, `FP8RecipeKwargs`."""
    for call, path in _named(facts, *sorted(api_names.FP8_HANDLERS)):
        if api_names.kind_of(path) == "fp8_handler":
            yield Event("fp8_handler", call, facts, call.node)


@finds("float8_config")
def _configs(facts: BehaviourView) -> Iterator[Event]:
    """Yield torchao's `Float8LinearConfig`, by its constructor or by a recipe's name."""
    for call, path in _named(facts, "Float8LinearConfig", "from_recipe_name"):
        if api_names.kind_of(path) == "float8_config":
            yield Event("float8_config", call, facts, call.node)
