"""The classes of a model of the linted project: its own, and those of the modules that it creates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.lint.facts.program.lattice import Class, Object

if TYPE_CHECKING:
    import libcst as cst

    from mpguard.lint.facts.domain.view import DomainView
    from mpguard.lint.facts.syntax.records import Record, Scope

_MAX_CLASSES = 40


def class_of(node: cst.CSTNode | None, at: Record, facts: DomainView) -> Scope | None:
    """Return the class of the project that an expression is certain to be an object of, or None."""
    found = {each.atom.cls if isinstance(each.atom, Object) else None for each in facts.evaluate(node, at)}
    return found.pop() if len(found) == 1 else None


def classes_of(cls: Scope, facts: DomainView) -> list[Scope]:
    """Return a class of the project, its base classes, and the classes of which they create objects, in any file."""
    found = [cls]
    for each in found:  # which grows
        home = facts.of(each)
        atoms = [base for base in home.classes.bases(each) if isinstance(base, Class)]
        for call in (call for scope in each.descendants() for call in scope.calls):
            atoms += [made.atom for made in home.evaluate(call.func, call) if isinstance(made.atom, Class)]
        found += [atom.scope for atom in dict.fromkeys(atoms) if atom.scope not in found]
        if len(found) > _MAX_CLASSES:
            break
    return list(dict.fromkeys(found))
