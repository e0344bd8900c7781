from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Call,
    Diagnostic,
    Facts,
    Note,
    Rule,
    any_of,
    bridge_configs,
    dotted,
    errors,
    schemas,
    validation,
)

#: Fields of `MixedPrecisionConfig` that exclude each other, and what happens.
_PAIRS = (("bf16", "fp16", "Megatron Bridge does not check it, and the model has both"),)
_PACKAGE = "megatron.bridge"


class MegatronBridgePrecision(Rule, form_of="MPG849"):
    """Precision in Megatron Bridge code that contradicts itself, or names what Megatron Bridge does not have.

    With both modes the model has both switches on. An unknown `fp8_recipe` or recipe name stops the run, after the data
    were prepared. What `mixed_precision` overwrites in the model, optimizer and DDP configs is logged at debug level
    only, so that nobody sees it.

    Names are not reported in a file that registers recipes of its own. Values that are not literals are unknown.
    """

    message = "{what}"
    help = "name one recipe in `mixed_precision`, and set no precision elsewhere"
    triggers = (
        any_of(b"megatron.bridge"),
        any_of(b"MixedPrecisionConfig", b"mixed_precision"),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call in facts.calls.get("MixedPrecisionConfig", ()):
            if facts.called_path(call).startswith(_PACKAGE):
                yield from self._fields(call, facts)
        for call in facts.calls.get("ConfigContainer", ()):
            recipe = self._literal(call.keywords.get("mixed_precision"), call, facts)
            if facts.called_path(call).startswith(_PACKAGE) and isinstance(recipe, str):
                yield from self._overwritten(call, recipe, facts)
        registers = "register" in facts.calls or "@register" in facts.file_text
        for document in bridge_configs.documents(facts):
            for problem in validation.problems(document):
                entry = document.entry(problem.key)
                if entry is None or (registers and problem.key == "mixed_precision"):
                    continue
                what = problem.reason if problem.key == "mixed_precision" else f"`{entry.key}`: {problem.reason}"
                yield self.at(entry.value_span, what=what, help="write a value that Megatron Bridge has")

    def _fields(self, call: Call, facts: Facts) -> Iterator[Diagnostic]:
        for one, other, why in _PAIRS:
            nodes = call.keywords.get(one), call.keywords.get(other)
            if nodes[0] is None or nodes[1] is None:
                continue
            if self._literal(nodes[0], call, facts) and self._literal(nodes[1], call, facts):
                notes = (Note("the other argument", facts.span(nodes[0], call)),)
                yield self.at(
                    facts.span(nodes[1], call), notes=notes, what=f"`{one}` and `{other}` are both set: {why}"
                )
        node = call.keywords.get("fp8_recipe")
        recipe = self._literal(node, call, facts)
        if node is not None and isinstance(recipe, str) and recipe not in schemas.megatron_bridge.FP8_RECIPES:
            hint = errors.did_you_mean(recipe, schemas.megatron_bridge.FP8_RECIPES)
            yield self.at(
                facts.span(node, call), what=f"`fp8_recipe` is `{recipe}`, which Megatron does not have{hint}"
            )

    def _overwritten(self, call: Call, recipe: str, facts: Facts) -> Iterator[Diagnostic]:
        """Yield the switches of the model config that the recipe overwrites with another value."""
        model = dotted(call.keywords.get("model"))
        low = next((name for name in ("bf16", "fp16") if name in recipe.replace("-", "_").split("_")), None)
        if not model or low is None:
            return
        for name in ("bf16", "fp16"):
            bindings = facts.bindings(f"{model}.{name}", call)
            values = {self._literal(each.value, each, facts) for each in bindings}
            if len(bindings) == 1 and values == {name != low}:
                node = call.keywords["mixed_precision"]
                notes = (Note("set here", bindings[0].span),)
                what = f"`mixed_precision` overwrites `{model}.{name}`, which is {name != low}, with {name == low}"
                yield self.at(facts.span(node, call), notes=notes, what=what, help="remove the assignment")

    def _literal(self, node: cst.CSTNode | None, at: object, facts: Facts) -> object:
        """Return the value of an expression if it is only one constant; else None."""
        values = [] if node is None else facts.constants(node, at)  # type: ignore[arg-type]
        return values[0] if len(values) == 1 else None
