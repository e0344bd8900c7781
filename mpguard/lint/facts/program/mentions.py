"""Names of a framework in one function: does the code there use it?"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program.lattice import Object
from mpguard.lint.facts.syntax.nodes import dotted, iterated
from mpguard.lint.facts.syntax.records import Call

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView
    from mpguard.lint.facts.syntax.records import Scope

_IMPORTS = ("from", "import")
_NO_USE = (*_IMPORTS, "def", "class")


def mentions(
    facts: ProgramView, scope: Scope, is_name: Callable[[str], object], model: Collection[Call] = frozenset()
) -> bool:
    """True if a scope uses, binds or calls something whose name is one; an import or a definition alone is no use.

    is_name: is called with a dotted name; the path of an import counts where its local name is used. model: the calls
    that create the object in question: what is called with another one, as `FSDP(teacher)`, does not concern it.
    """
    imported = {
        key.split(".", 1)[0]
        for place in facts.scopes
        for key, bindings in place.bindings.items()
        for binding in bindings
        if binding.kind in _IMPORTS and is_name(f"{binding.target}.{binding.name}.{key}")
    }
    named = [call for call in scope.calls if call.path.split(".", 1)[0] in imported or is_name(call.path)]
    others = {call.func for call in named if model and _is_about_other(facts, call, model)}
    return (
        any(
            (root in imported or is_name(use.path)) and use.node not in others
            for root, uses in scope.uses.items()
            for use in uses
        )
        or any(
            is_name(f"{binding.target}.{binding.name}.{key}")
            for key, bindings in scope.bindings.items()
            for binding in bindings
            if binding.kind not in _NO_USE
        )
        or any(call.func not in others for call in named)
        or any(any(map(is_name, call.keywords)) for call in scope.calls if call.func not in others)
    )


def _is_about_other(facts: ProgramView, call: Call, model: Collection[Call]) -> bool:
    """True if the first argument of a call is another object, or a part of one: the variable of a loop over it."""
    node = call.argument(0, "module", "model")
    root = dotted(iterated(node)).split(".", 1)[0]
    loop = next((each for each in facts.bindings(root, call) if each.kind == "for"), None) if root else None
    candidates = (node, iterated(node)) if loop is None else (iterated(loop.value),)
    return any(each is not None and _is_other(facts, each, call, model) for each in candidates)


def _is_other(facts: ProgramView, node: cst.CSTNode, at: Call, model: Collection[Call]) -> bool:
    """True if an expression is a model that other calls create."""
    atoms = [each.atom for each in facts.evaluate(node, at)]
    return bool(atoms) and all(
        isinstance(atom, Object) and atom.kind == "model" and atom.call is not None and atom.call not in model
        for atom in atoms
    )
