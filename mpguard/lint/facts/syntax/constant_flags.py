"""Constant flags: names that a file binds once, to a literal such as `HALF = False`.

Paths that contradict them are unreachable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst

from mpguard.lint.facts.syntax.index import Indexer
from mpguard.lint.facts.syntax.nodes import constant, text_of
from mpguard.lint.facts.syntax.path_condition import Fixed, Flag, PathCondition, negated
from mpguard.lint.facts.syntax.records import Record, Scope

#: The flag of what torch answers; a newer one counts emulation.
SUPPORTS_BF16 = "torch.cuda.is_bf16_supported()"


def apply_constant_flags(walker: Indexer, known: Mapping[str, bool]) -> None:
    """Make the path conditions that contradict a constant flag impossible. known: flags that are constant elsewhere."""
    flags = {**_constant_flags(walker.scopes), **known}
    contradictions = {negated(Flag(name)) if truth else Flag(name) for name, truth in flags.items()}
    if not contradictions:
        return
    impossible: dict[PathCondition, PathCondition] = {}
    for scope in walker.scopes:
        groups: list[Sequence[Record]] = [scope.calls, scope.withs, scope.returns, scope.exits]
        groups += scope.bindings.values()
        groups += scope.uses.values()
        for records in groups:
            for record in records:
                if record.guard & contradictions:
                    record.guard = impossible.setdefault(record.guard, record.guard.given(Fixed(False)))


def _constant_flags(scopes: list[Scope]) -> dict[str, bool]:
    """Return the names that are bound only to Boolean literals of one truth value.

    They are not an attribute or a parameter anywhere.
    """
    truths: dict[str, set[bool | None]] = {}
    for scope in scopes:
        for key, bindings in scope.bindings.items():
            found = truths.setdefault(key.rsplit(".", 1)[-1], set())
            for binding in bindings:
                literal = constant(binding.value) if binding.kind == "assign" and "." not in key else None
                plain = literal is not None and isinstance(literal[0], bool) and scope.kind != "class"
                found.add(bool(literal[0]) if plain and literal is not None else None)
        for uses in scope.uses.values():
            for use in uses:
                if "." in use.path:
                    truths.setdefault(use.path.rsplit(".", 1)[-1], set()).add(None)
    return {name: bool(next(iter(found))) for name, found in truths.items() if len(found) == 1 and None not in found}


def asks_for_bf16(test: cst.CSTNode) -> bool:
    """True for `torch.cuda.is_bf16_supported()`, also after `torch.cuda.is_available() and`."""
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return text_of(test.left) == "torch.cuda.is_available()" and asks_for_bf16(test.right)
    return isinstance(test, cst.Call) and text_of(test) == SUPPORTS_BF16
