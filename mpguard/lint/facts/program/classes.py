"""The classes of a file: their attributes, methods, bases and derived classes, in the file and across the tree."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program import project_words
from mpguard.lint.facts.program.lattice import NOTHING_KNOWN, Class, Function, Ref
from mpguard.lint.facts.syntax.records import Binding, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: Packages whose base classes neither train nor hold what trains; the standard library is none of them either.
_HARMLESS = ("torch.utils.", "torch.autograd.", "sklearn.", "overrides.", "pydantic.", "typing_extensions.", "object")
#: Libraries whose mixins load, save and configure models, and train nothing.
_MODELS = ("diffusers.", "transformers.", "huggingface_hub.")


class Classes:
    """The classes of one file."""

    def __init__(self, facts: ProgramView) -> None:
        self.facts = facts
        self._attributes: dict[Scope, dict[str, list[Binding]]] = {}
        self._derived: dict[Scope, list[Class]] = {}
        self._looked_up: set[Scope] = set()
        self._active: set[object] = set()

    def _classes_at(self, scope: Scope) -> Classes:
        """Return the classes of the file that contains a scope."""
        return self.facts.of(scope).part(Classes)

    def attributes(self, cls: Scope) -> dict[str, list[Binding]]:
        """Return the attributes that a class and its base classes in the file set, with their bindings.

        They are set by the body and the methods of a class.
        """
        if cls not in self._attributes:
            found: dict[str, list[Binding]] = {}
            self._attributes[cls] = found
            for scope in cls.descendants():
                for key, bindings in scope.bindings.items():
                    if key.startswith("self.") and key.count(".") == 1:
                        found.setdefault(key[5:], []).extend(b for b in bindings if b.kind not in ("item", "del"))
            for key, bindings in cls.bindings.items():
                found.setdefault(key, []).extend(bindings)
            for base in self.bases(cls):
                if isinstance(base, Class):
                    for key, bindings in self._classes_at(base.scope).attributes(base.scope).items():
                        if base.facts is self.facts and key not in found:
                            found[key] = bindings
        return self._attributes[cls]

    def inherited(self, cls: Scope, name: str) -> Function | None:
        """Return the method that a class inherits from a class in another file of the tree, or None.

        None, too, if it calls a method of its own class that the class, or one between them, has in its place.
        """
        below, pending = [cls], self.bases(cls)
        while pending:
            base = pending.pop(0)
            if not isinstance(base, Class) or base.scope in below:
                continue
            method = base.scope.method(name)
            if method is not None:
                return None if _is_overridden(method, base.scope, below) else Function(method, base.facts)
            below.append(base.scope)
            pending += self._classes_at(base.scope).bases(base.scope)
        return None

    def set_above(self, cls: Scope, name: str) -> list[Binding]:
        """Return the bindings of an attribute, no method, by the nearest base class of the tree that sets it."""
        seen, pending = {cls}, self.bases(cls)
        while pending:
            base = pending.pop(0)
            if isinstance(base, Class) and base.scope not in seen:
                seen.add(base.scope)
                above = self._classes_at(base.scope)
                if found := above.attributes(base.scope).get(name):
                    return found if all(each.defines is None for each in found) else []
                pending += above.bases(base.scope)
        return []

    def bases(self, cls: Scope) -> list[Class | str]:
        """Return the base classes: those of the tree, and the full names of the others ("" if unknown).

        Empty while they are being looked up: the name of a base's module may get an object of the class later.
        """
        if cls in self._looked_up:
            return []
        self._looked_up.add(cls)
        try:
            atoms = [
                each.atom
                for name in cls.base_names
                for each in (
                    self.facts.values.lookup(name, cls.parent or self.facts.module, 1 << 60) if name else NOTHING_KNOWN
                )
            ]
        finally:
            self._looked_up.discard(cls)
        found: list[Class | str] = []
        for atom in atoms:
            if isinstance(atom, Class) and atom.scope is not cls:
                found.append(atom)
            else:
                found.append(atom.path if isinstance(atom, Ref) else "")
        return found

    def derived(self, cls: Scope) -> list[Class]:
        """Return the classes that derive from a class of the file, directly or not, as far as they are known.

        They are in the file, or in another one of the tree that may train.
        """
        if cls not in self._derived:
            found = self._derived[cls] = [each for other in self._where_derived(cls) for each in other._derives(cls)]
            for each in tuple(found):
                found += [
                    further for further in self._classes_at(each.scope).derived(each.scope) if further not in found
                ]
        return self._derived[cls]

    def _where_derived(self, cls: Scope) -> list[Classes]:
        name = name_outside(cls)
        users = (self.facts.users(name) if name and self.facts.derived_elsewhere(cls) else None) or []
        for other in users:
            other.need_uses(name)
        return [self, *(other.part(Classes) for other in users)]

    def _derives(self, cls: Scope) -> list[Class]:
        """Return the classes of this file with a class as a base."""
        classes = (scope for scope in self.facts.index.scopes if scope.kind == "class" and scope.base_names)
        return [
            Class(scope, self.facts)
            for scope in classes
            if any(isinstance(base, Class) and base.scope is cls for base in self.bases(scope))
        ]

    def versions(self, owner: Scope, name: str) -> list[tuple[Function, list[Scope]]]:
        """Return the methods that `self.name()` in a class may run, each with the classes of the objects it runs for.

        These are the class and those that derive from it. One that is used only as a base class has no objects.
        """
        found: dict[Scope, tuple[Function, list[Scope]]] = {}
        for each in (Class(owner, self.facts), *self.derived(owner)):
            method = self._classes_at(each.scope).method(each.scope, name)
            if method is not None and self._classes_at(each.scope)._has_objects(each.scope):
                found.setdefault(method.scope, (method, []))[1].append(each.scope)
        return list(found.values())

    def overriding(self, cls: Scope, name: str) -> tuple[list[tuple[Class, Binding]], bool]:
        """Return the bindings by which derived classes override an attribute of a class.

        The second result is True if objects of the class itself, or of one that inherits the attribute, may exist.
        """
        found: list[tuple[Class, Binding]] = []
        is_used = self._has_objects(cls)
        inherited = self.attributes(cls).get(name, [])
        for each in self.derived(cls):
            own = [b for b in self._classes_at(each.scope).attributes(each.scope).get(name, ()) if b not in inherited]
            found += [(each, binding) for binding in own]
            is_used = is_used or (not own and self._classes_at(each.scope)._has_objects(each.scope))
        return found, is_used

    def method(self, cls: Scope, name: str, above: bool = False) -> Function | None:
        """Return a method of a class, which may be inherited from a class of the tree, or None.

        above: the one that `super().name()` runs.
        """
        seen: set[Scope] = set()
        pending = [Class(cls, self.facts)]
        while pending:
            current = pending.pop(0)
            if current.scope in seen:
                continue
            method = current.scope.method(name) if seen or not above else None
            if method is not None:
                return Function(method, current.facts)
            seen.add(current.scope)
            bases = self._classes_at(current.scope).bases(current.scope)
            pending = [*(base for base in bases if isinstance(base, Class)), *pending]
        return None

    def family(self, cls: Scope) -> str:
        """Return the name of the topmost class of the tree that a class derives from, by its first bases."""
        seen: set[Scope] = set()
        top: Class | None = Class(cls, self.facts)
        while top is not None and top.scope not in seen:
            seen.add(top.scope)
            cls, bases = top.scope, self._classes_at(top.scope).bases(top.scope)
            top = next((base for base in bases if isinstance(base, Class)), None)
        return cls.qualname

    def _has_objects(self, cls: Scope) -> bool:
        """True unless a class is used only as a base class."""
        if cls.decorators or not self.derived(cls):
            return True
        name = name_outside(cls)
        users = self.facts.users(name) if name else []
        return users is None or any(
            use.path == name and not isinstance(other.index.parents.get(use.node), cst.ClassDef)
            for other in (self.facts, *users)
            for scope in other.index.scopes
            for use in scope.uses.get(name, ())
        )

    def ancestry(self, cls: Scope) -> Iterator[str]:
        """Yield the full names of all library classes among the ancestors of a class; "" for an unknown one."""
        seen: set[Scope] = set()
        pending = [cls]
        while pending:
            scope = pending.pop()
            if scope in seen:
                continue
            seen.add(scope)
            for base in self._classes_at(scope).bases(scope):
                if isinstance(base, Class):
                    pending.append(base.scope)
                else:
                    yield base

    def class_kind(self, cls: Scope) -> str:
        """Return the kind of a class's instances: `model`, `own_optimizer`, `trainer` ...

        It is `own` for a plain user class, and "" if unknown.
        """
        if cls in self._active:
            return ""
        self._active.add(cls)
        try:
            bases = list(self.ancestry(cls))
        finally:
            self._active.discard(cls)
        for base in bases:
            last = base.rsplit(".", 1)[-1]
            if _is_harmless(base):
                continue
            if base.split(".", 1)[0] in project_words.FRAMEWORK_PACKAGES or last in project_words.FRAMEWORK_CLASSES:
                return "framework"
            if base.startswith("torch.nn.") or last in ("PreTrainedModel", "ModelMixin", "Module"):
                return "model"
            if ".lr_scheduler." in base or "scheduler" in last.lower():
                return "scheduler"
            if base.startswith("torch.optim.") or last == "Optimizer":
                return "own_optimizer"
            if "Scaler" in last:
                return "scaler"
            if last.endswith(("Trainer", "Callback")) or (last.endswith("Mixin") and not base.startswith(_MODELS)):
                return "trainer"
        if "" in bases or any("." in base and not _is_harmless(base) for base in bases):
            return ""
        return "own"

    def base_unknown(self, cls: Scope | None) -> bool:
        """True if a class has base classes outside the analysed files, which may add attributes and behaviour."""
        return cls is not None and self.class_kind(cls) in ("", "framework", "trainer")


def _is_harmless(base: str) -> bool:
    return base.startswith(_HARMLESS) or base.split(".", 1)[0] in sys.stdlib_module_names


def _is_overridden(method: Scope, cls: Scope, below: Collection[Scope]) -> bool:
    """True if a method leads to another one of its class that a class below has, too; one that only raises is none."""
    reached = [method]
    for each in reached:
        names = {use.path.split(".")[1] for use in each.uses.get("self", ()) if "." in use.path}
        for inner in filter(None, map(cls.method, sorted(names))):
            is_stub = {call.name for call in inner.calls} <= {"NotImplementedError"}
            if not is_stub and any(other.method(inner.name) for other in below):
                return True
            if inner not in reached:
                reached.append(inner)
    return False


def name_outside(scope: Scope) -> str:
    """Return the top-level name by which other modules get at a function or method; empty for an inner function."""
    home = scope.parent if scope.is_method else scope
    return home.name if home is not None and home.parent is not None and home.parent.kind == "module" else ""
