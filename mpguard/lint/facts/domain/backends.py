"""The switches of torch's backends that a file sets or reads: TF32, reductions in reduced precision."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program.lattice import Constant, Ref
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.records import Record

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

_ATTRIBUTES = frozenset({
    "allow_tf32", "fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Switch:
    """One assignment of a switch, or a read of it (`read`).

    path: the full name (`torch.backends.cudnn.allow_tf32`), or that of the function
    (`torch.set_float32_matmul_precision`). value: the assigned value, None if it is unknown.
    """

    path: str
    record: Record
    value: object = None
    read: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """Start and end in `Source.text`."""
        return self.record.span


def switches(facts: DomainView) -> list[Switch]:
    """Return all assignments and reads of switches in a file, in order."""
    facts.need_all()
    found: list[Switch] = []
    for scope in facts.index.scopes:
        for key, bindings in scope.bindings.items():
            if key.rsplit(".", 1)[-1] not in _ATTRIBUTES:
                continue
            for binding in bindings:
                path = _path(binding.node, binding, facts)
                if binding.kind == "assign" and path:
                    found.append(Switch(path, binding, _value(binding.value, binding, facts)))
        for uses in scope.uses.values():
            for use in uses:
                if use.path.rsplit(".", 1)[-1] in _ATTRIBUTES and (path := _path(use.node, use, facts)):
                    found.append(Switch(path, use, read=True))
    for name in ("set_float32_matmul_precision", "get_float32_matmul_precision"):
        for call in facts.calls.get(name, ()):
            if facts.called_path(call) == f"torch.{name}":
                read = name.startswith("get")
                given = None if read else call.argument(0, "precision")
                found.append(Switch(f"torch.{name}", call, _value(given, call, facts), read=read))
    return sorted(found, key=lambda each: each.record.order)


def _path(node: cst.CSTNode, at: Record, facts: DomainView) -> str:
    """Return the full name of an attribute of `torch.backends`, by whatever local name the file uses."""
    if not isinstance(node, cst.Attribute):
        return ""
    for each in facts.evaluate(node.value, at):
        if isinstance(each.atom, Ref) and each.atom.path.startswith("torch.backends"):
            return f"{each.atom.path}.{node.attr.value}"
    return dotted(node) if dotted(node).startswith("torch.backends.") else ""


def _value(node: cst.CSTNode | None, at: Record, facts: DomainView) -> object:
    atoms = [each.atom for each in facts.evaluate(node, at)] if node is not None else []
    return atoms[0].value if len(atoms) == 1 and isinstance(atoms[0], Constant) else None
