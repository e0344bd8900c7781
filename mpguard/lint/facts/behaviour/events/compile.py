"""Events of compilation: `torch.compile`, `model.compile`, a dynamo option, a decorator or a launch config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events.event import Event, finds
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.view import aliases, called

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: The step of an optimizer: its compilation leaves the model as it is.
_OPTIMIZER_STEP = lazy_pattern(r"(?i)(?:^|[._])opt(?:im|imizer)?s?\.step$")
_COMPILE_OPTIONS = frozenset(
    {"dynamo_backend", "dynamo_plugin", "torch_compile", "torch_compile_backend", "torch_compile_mode"}
)


@finds("compile")
def _compiles(facts: BehaviourView) -> Iterator[Event]:
    """Yield calls that compile, and arguments that enable compilation."""
    for call in called(facts, "compile", "optimize", *aliases(facts, "compile")):
        if call.path in ("re.compile", "regex.compile", "builtins.compile", "sre.compile") or (
            call.receiver is None and call.name == "compile" and not facts.paths(call)
        ):
            continue
        paths = [path for _, path in facts.paths(call)]
        if call.is_statement and paths == ["torch.compile"] and call.node.args:
            continue  # the compiled model is dropped
        if _OPTIMIZER_STEP.search(dotted(call.argument(0, "model"))):
            continue
        if any(path.startswith(("torch.", "torch_xla.")) for path in paths) or (
            call.receiver is not None and not paths and call.name == "compile"
        ):
            yield Event("compile", call, facts, call.argument(0, "model") if paths else call.receiver)
    for calls in facts.calls.values():
        for call in calls:
            for keyword, value in call.keywords.items():
                if keyword in _COMPILE_OPTIONS and constant(value) not in ((False,), (None,), ("no",), ("NO",)):
                    yield Event("compile", call, facts, value)
                    break
