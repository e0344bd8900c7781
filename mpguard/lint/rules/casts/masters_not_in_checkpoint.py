from __future__ import annotations

import re
from collections.abc import Iterator

from mpguard.lint import Binding, Diagnostic, Facts, Note, Rule, Scope, any_of, lazy_pattern, roles

#: Copies of parameters in FP32, made for each of them.
_COPIES = lazy_pattern(r"\.float\(\)|float32|\.clone\(\)\.to\(")


class MastersNotInCheckpoint(Rule, form_of="MPG208"):
    """An optimizer class keeps FP32 master weights, and its checkpoint contains only the state of the optimizer in it.

    On resume the masters are made from the weights in 16 bits: what had accumulated below their precision is lost, and
    the moments belong to other weights. DeepSpeed and Megatron store the masters for that reason.

    Reported where a class creates a list of FP32 copies, an optimizer of them, and copies them back in its `step`, and
    no method of it that saves names the list.
    """

    message = "the state of `{inner}` is saved without the FP32 master weights `{masters}`, which it updates"
    help = "add the master weights to the state, and restore them from it"
    triggers = (any_of(b"class "), any_of(b"float"), any_of(b".state_dict("), any_of(b"ptim"), any_of(b".copy_("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for scope in facts.scopes:
            init = scope.method("__init__") if scope.kind == "class" else None
            masters = _masters(init, facts) if init is not None else None
            if init is None or masters is None:
                continue
            own = re.compile(rf"optim[\w.]*\([^)]*{re.escape(masters.key)}\b")
            inner = [each for each, text in _bound(init, facts) if own.search(text)]
            others = [each for each in scope.descendants() if each.kind == "function" and each is not init]
            copied_back = any(each.name == "step" and _names(each, masters.key) for each in others)
            saving = [each for each in others if roles.STORES.search(each.name) and "load" not in each.name]
            if not inner or not copied_back or any(_names(each, masters.key) for each in saving):
                continue
            for call in (call for each in saving for call in each.calls if call.name == "state_dict"):
                if facts.short(call.receiver) == inner[0].key:
                    notes = (Note("the master weights", masters.span),)
                    yield self.at(call, inner=inner[0].key, masters=masters.key, notes=notes)
                    break


def _bound(scope: Scope, facts: Facts) -> list[tuple[Binding, str]]:
    """Return the attributes that a method sets, each with the text of its value."""
    bindings = (each for key, found in scope.bindings.items() for each in found if key.startswith("self."))
    return [(each, facts.text(each.value, each)) for each in bindings if each.value is not None]


def _masters(init: Scope, facts: Facts) -> Binding | None:
    """Return the attribute that is a list of FP32 copies of parameters."""
    return next((each for each, text in _bound(init, facts) if " for " in text and _COPIES.search(text)), None)


def _names(method: Scope, key: str) -> bool:
    """True if a method reads an attribute."""
    return any(f"{use.path}.".startswith(f"{key}.") for use in method.uses.get("self", ()))
