"""The precision that code gives to Megatron Bridge, as documents: `mixed_precision` of its `ConfigContainer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import libcst as cst

from mpguard.document import Document
from mpguard.document.nodes import Node, Pair
from mpguard.document.schemas.megatron_bridge import RECIPES
from mpguard.lint.facts.program.lattice import Constant, DtypeValue
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView
    from mpguard.lint.facts.syntax.records import Record

_PACKAGE, _KEY = "megatron.bridge", "mixed_precision"


def documents(facts: DomainView) -> list[Document]:
    """Return each value of `mixed_precision` as a document with this key, in the order of the file.

    It is the name of a recipe, or a section with the literal arguments of `MixedPrecisionConfig`; or with one field
    that is set later, whose name is the `attribute` of the document. Values that are not literals are left out.
    """
    if _PACKAGE not in facts.file_text:
        return []
    found = [*_names(facts), *_sections(facts)]
    return sorted(found, key=lambda document: document.root.start if document.root is not None else 0)


def _names(facts: DomainView) -> Iterator[Document]:
    """Yield the names of recipes: `ConfigContainer(mixed_precision=...)`, `config.mixed_precision = ...`."""
    given: list[tuple[cst.BaseExpression | None, Record]] = []
    for name, place, keyword in (("ConfigContainer", None, _KEY), ("get_mixed_precision_config", 0, "name")):
        for call in facts.calls.get(name, ()):
            if facts.called_path(call).startswith(_PACKAGE):
                given.append((call.argument(place, keyword), call))
    for binding in _assigned(facts, f".{_KEY}"):
        given.append((binding.value, binding))
    for node, at in given:
        made = facts.call_of(node)
        is_recipe = made is not None and made.name in RECIPES  # a recipe is a function of its name
        value = made.name if made is not None and is_recipe else _value(node, at, facts) if node is not None else None
        if node is not None and isinstance(value, str):
            yield _document(facts, Node("scalar", *facts.span(node, at), value))


def _sections(facts: DomainView) -> Iterator[Document]:
    """Yield the arguments of each `MixedPrecisionConfig`, and each field that is set: `config.mixed_precision.fp8`."""
    for call in facts.calls.get("MixedPrecisionConfig", ()):
        if facts.called_path(call).startswith(_PACKAGE):
            yield _document(facts, _mapping(call.keywords, call, facts))
    for binding in _assigned(facts, f".{_KEY}.", inside=True):
        field = binding.key.rpartition(".")[2]
        if binding.value is not None:
            yield _document(facts, _mapping({field: binding.value}, binding, facts), binding.key)


def _assigned(facts: DomainView, name: str, inside: bool = False) -> Iterator[Any]:
    """Yield the assignments to an attribute. inside: to one of an attribute with this name."""
    for scope in facts.scopes:
        for key, bindings in scope.bindings.items():
            if (name in key and key.count(".") > 1) if inside else key.endswith(name):
                yield from (each for each in bindings if each.kind == "assign")


def _mapping(values: Mapping[str, cst.BaseExpression], at: Record, facts: DomainView) -> Node:
    """Return the literals of keyword arguments as a node."""
    made = Node("mapping", *facts.span(next(iter(values.values()), at.node), at), flow=True)
    for name, node in values.items():
        value = _value(node, at, facts)
        if value is not ...:
            span = facts.span(node, at)
            pair = Pair(name, name, span, Node("scalar", *span, value))
            made.pairs.append(pair)
            made.members[name] = pair
    return made


def _value(node: cst.BaseExpression, at: Record, facts: DomainView) -> Any:
    """Return the only literal that an expression stands for, a dtype by its name; `...` for another expression."""
    atoms = [each.atom for each in facts.evaluate(node, at)]
    if len(atoms) != 1:
        return ...
    if isinstance(atoms[0], DtypeValue):
        return atoms[0].dtype.short if isinstance(atoms[0].dtype, Dtype) else atoms[0].dtype.torch_name
    return atoms[0].value if isinstance(atoms[0], Constant) else ...


def _document(facts: DomainView, value: Node, attribute: str = "") -> Document:
    root = Node("mapping", value.start, value.end, flow=True)
    pair = Pair(_KEY, _KEY, (value.start, value.end), value)
    root.pairs.append(pair)
    root.members[_KEY] = pair
    document = Document(facts.source.path, facts.source.text, "python", root, [], attribute=attribute)
    document.__dict__["kind"] = "megatron-bridge"  # a lone section could be another program's
    return document
