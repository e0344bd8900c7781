"""The call graph of one file: classes, base classes, callers, callees, and the conditions that callers share."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program import project_words
from mpguard.lint.facts.program.all_calls import all_calls
from mpguard.lint.facts.program.evaluate import DEPTH
from mpguard.lint.facts.program.lattice import NOTHING_KNOWN, UNKNOWN, Class, Function, Object, Ref
from mpguard.lint.facts.syntax.nodes import is_super
from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: Packages whose base classes neither train nor hold what trains; the standard library is none of them either.
_HARMLESS = ("torch.utils.", "torch.autograd.", "sklearn.", "overrides.", "pydantic.", "typing_extensions.", "object")
#: Libraries whose mixins load, save and configure models, and train nothing.
_MODELS = ("diffusers.", "transformers.", "huggingface_hub.")
#: Method names that many classes have: on a receiver of unknown type they are not resolved by name alone.
_COMMON = frozenset({
    "step", "update", "forward", "to", "train", "eval", "run", "get", "add", "append", "items", "load", "save",
    "backward", "scale",
    "half", "type", "init", "build", "state_dict", "load_state_dict", "parameters", "prepare", "compile", "__call__",
    "__init__",
})  # fmt: skip


#: Callees that are not an instance with a name.
_NO_NAMES: frozenset[type] = frozenset({cst.Call, cst.Subscript, cst.Lambda})
#: The parents of a name that is passed to a call, or put into a list, as a value.
_PASSES: frozenset[type] = frozenset({cst.Arg, cst.DictElement, cst.Element})
#: Bindings that make a name neither a class of the file nor an instance of one.
_NO_CLASS = frozenset({"def", "import", "from"})


class CallGraph:
    """The callers and callees of the functions of one file, and the kinds of its classes."""

    def __init__(self, facts: ProgramView) -> None:
        self.facts = facts
        self._attributes: dict[Scope, dict[str, list[Binding]]] = {}
        self._callers: dict[Scope, list[Call]] = {}
        self._all_calls: dict[Scope, list[Call] | None] = {}
        self._contexts: dict[Scope, PathCondition] = {}
        self._active: set[object] = set()
        self._escapes: dict[Scope, bool] = {}
        self._passed_names: set[str] = set()
        self._passed_names_at = -1
        self._neighbours_of: dict[Scope, list[Scope]] = {}
        self._derived: dict[Scope, list[Class]] = {}
        self._looked_up: set[Scope] = set()
        self._depth = 0
        self._named: dict[str, list[Scope]] = {}
        self._named_at = 0

    def _at(self, scope: Scope) -> CallGraph:
        """Return the call graph of the file that contains a scope."""
        return self.facts.of(scope).part(CallGraph)

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
                    for key, bindings in self._at(base.scope).attributes(base.scope).items():
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
            pending += self._at(base.scope).bases(base.scope)
        return None

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
                found += [further for further in self._at(each.scope).derived(each.scope) if further not in found]
        return self._derived[cls]

    def _where_derived(self, cls: Scope) -> list[CallGraph]:
        name = _name_outside(cls)
        users = (self.facts.users(name) if name and self.facts.derived_elsewhere(cls) else None) or []
        for other in users:
            other.need_uses(name)
        return [self, *(other.part(CallGraph) for other in users)]

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
            method = self._at(each.scope).method(each.scope, name)
            if method is not None and self._at(each.scope)._has_objects(each.scope):
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
            own = [b for b in self._at(each.scope).attributes(each.scope).get(name, ()) if b not in inherited]
            found += [(each, binding) for binding in own]
            is_used = is_used or (not own and self._at(each.scope)._has_objects(each.scope))
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
            bases = self._at(current.scope).bases(current.scope)
            pending = [*(base for base in bases if isinstance(base, Class)), *pending]
        return None

    def family(self, cls: Scope) -> str:
        """Return the name of the topmost class of the tree that a class derives from, by its first bases."""
        seen: set[Scope] = set()
        top: Class | None = Class(cls, self.facts)
        while top is not None and top.scope not in seen:
            seen.add(top.scope)
            cls, bases = top.scope, self._at(top.scope).bases(top.scope)
            top = next((base for base in bases if isinstance(base, Class)), None)
        return cls.qualname

    def _has_objects(self, cls: Scope) -> bool:
        """True unless a class is used only as a base class."""
        if cls.decorators or not self.derived(cls):
            return True
        name = _name_outside(cls)
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
            for base in self._at(scope).bases(scope):
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

    def callers(self, scope: Scope) -> list[Call]:
        """Return the calls of a function in the linted tree, those of its own file first."""
        if scope in self._callers:
            return self._callers[scope]
        self._callers[scope] = []
        if scope.kind != "function":
            return []
        self.facts.need_uses(_name_outside(scope) or scope.name)
        found = self.calls_of(scope)
        for other in self._callers_modules(scope):
            found += other.part(CallGraph).calls_of(scope)
        self._callers[scope] = found
        return found

    def calls_of(self, scope: Scope) -> list[Call]:
        """Return the calls of a function, which may be that of another module, in the statements that are parsed."""
        wanted = scope.name
        candidates = list(self.facts.calls.get(wanted, ()))
        if scope.is_method and wanted in ("__init__", "forward", "__call__"):
            candidates = [
                call
                for name, calls in self.facts.calls.items()
                for call in calls
                if _could_be_instance(call) and (name == wanted or self._may_be_class_or_instance(call))
            ]
        if scope.chunk.source is not self.facts.source:
            names = dict.fromkeys((_name_outside(scope), *self.facts.aliases(_name_outside(scope))))
            candidates += [call for name in names if name != wanted for call in self.facts.calls.get(name, ())]
        return [call for call in candidates if self._resolves(call, scope)]

    def all_calls(self, scope: Scope) -> list[Call] | None:
        """Return all calls of a function, or of the class that it initializes; None if there may be others."""
        if scope not in self._all_calls:
            self._all_calls[scope] = None
            self._all_calls[scope] = all_calls(scope, self.facts)
        return self._all_calls[scope]

    def _callers_modules(self, scope: Scope) -> list[ProgramView]:
        """Return the other modules that may call a function, with what may call it parsed."""
        name = _name_outside(scope)
        found = self.facts.users(name) or [] if name else []
        for other in found:
            other.need_uses(name)
        if scope.name not in ("forward", "__call__"):
            return found
        for factory in self._factories(name):
            makers = self.facts.users(factory) or []
            for other in makers:
                other.need_uses(factory)
            found = list(dict.fromkeys((*found, *makers)))
        # A model is called where it is passed to: `train_one_epoch(model)` of a module that knows its users only.
        further = [near for other in found for near in other.imported_modules() if b"autocast" in near.source.data]
        for near in further:
            near.need_all()
        return list(dict.fromkeys((*found, *further)))

    def _factories(self, cls: str) -> set[str]:
        """Return the functions of the file that create an object of a class: `build_model`."""
        places = {call.scope for call in self.facts.calls.get(cls, ())}
        return {name for place in places if place.kind == "function" and (name := _name_outside(place))} - {cls}

    def _may_be_class_or_instance(self, call: Call) -> bool:
        """True if the callee may be a class of this file or an instance of one.

        No import and no `def` binds its name.
        """
        if call.receiver is not None:
            return self.facts.imported_module or call.name in self._attribute_names  # that one is parsed only in part
        return any(
            binding.kind not in _NO_CLASS
            for place in call.scope.chain()
            for binding in place.bindings.get(call.name, ())
        )

    @functools.cached_property
    def _attribute_names(self) -> set[str]:
        """The names of the attributes that the file sets, without methods."""
        return {
            key.rpartition(".")[2]
            for scope in self.facts.index.scopes
            for key, bindings in scope.bindings.items()
            if "." in key or (scope.kind == "class" and any(each.kind not in _NO_CLASS for each in bindings))
        }

    def _resolves(self, call: Call, scope: Scope) -> bool:
        """True if a call may run the function of a scope."""
        for each in self.facts.values.evaluate(call.func, call.scope, call.order):
            atom = each.atom
            if isinstance(atom, Function) and atom.scope is scope:
                return True
            if scope.name == "__init__" and isinstance(atom, Class) and atom.scope is scope.parent:
                return True
            if (
                scope.name in ("forward", "__call__")
                and isinstance(atom, Object)
                and atom.cls is scope.parent
                and atom.cls is not None
            ):
                return True
        if (
            scope.is_method
            and call.name == scope.name
            and call.receiver is not None
            and not scope.name.startswith("__")
        ):
            unknown = all(
                each.atom is UNKNOWN for each in self.facts.values.evaluate(call.receiver, call.scope, call.order)
            )
            same = self.named(scope.name)
            return unknown and len(same) == 1 and scope.name not in _COMMON and not is_super(call.receiver)
        return False

    def functions(self, call: Call) -> list[Function]:
        """Return the functions of the tree that a call may run.

        That is a function, the `forward` of a module, or the `__init__` of a class.
        """
        found = []
        for each in self.facts.evaluate(call.func, call):
            atom = each.atom
            if isinstance(atom, Function):
                found.append(atom)
            elif isinstance(atom, Class) and (init := atom.scope.method("__init__")):
                found.append(Function(init, atom.facts))
            elif isinstance(atom, Object) and atom.cls is not None and atom.facts is not None:
                method = atom.cls.method("forward") or atom.cls.method("__call__")
                if method is not None:
                    found.append(Function(method, atom.facts))
        if not found and call.receiver is not None and call.name not in _COMMON:
            found = [Function(s, self.facts) for s in self.named(call.name) if s.is_method and call in self.callers(s)]
        return found

    def named(self, name: str) -> list[Scope]:
        """Return the functions and methods of a name."""
        scopes = self.facts.index.scopes
        if self._named_at != len(scopes):
            self._named_at, self._named = len(scopes), {}
            for scope in scopes:
                if scope.kind == "function":
                    self._named.setdefault(scope.name, []).append(scope)
        return self._named.get(name, [])

    def escapes(self, scope: Scope) -> bool:
        """True if a function is passed as a value, so that code outside the call graph may call it."""
        if scope not in self._escapes:
            self._escapes[scope] = scope.parent is not None and self._passed_as_value(scope)
        return self._escapes[scope]

    def _passed_as_value(self, scope: Scope) -> bool:
        name = _name_outside(scope)
        users = self.facts.users(name) if name else []
        if users is None:
            return True
        for other in users:
            other.need_uses(name)
        return any(each.part(CallGraph)._passes(scope) for each in (self.facts, *users))

    def _passes(self, scope: Scope) -> bool:
        if self._passed_names_at != self.facts.parsed_bytes:
            parents = self.facts.index.parents
            self._passed_names_at = self.facts.parsed_bytes
            self._passed_names = {
                use.path
                for place in self.facts.index.scopes
                for uses in place.uses.values()
                for use in uses
                if type(parents.get(use.node)) in _PASSES
            }
        return (f"self.{scope.name}" if scope.is_method else scope.name) in self._passed_names

    # -- path conditions ---

    def guard_of(self, record: Record) -> PathCondition:
        """Return a record's path condition, including the conditions under which its function is always called."""
        joined = record.guard.joined(self.context(record.scope))
        return joined if joined.possible else record.guard

    def context(self, scope: Scope) -> PathCondition:
        """Return the conditions that all calls of a function have in common."""
        if scope.kind != "function":
            return ALWAYS
        if scope not in self._contexts:
            self._contexts[scope] = ALWAYS
            callers = self.callers(scope) if self._depth < DEPTH else []
            if callers and not self.escapes(scope):
                self._depth += 1
                guards = [self.facts.guard_of(call) for call in callers]
                self._depth -= 1
                self._contexts[scope] = PathCondition(frozenset.intersection(*map(frozenset, guards)))
            elif scope.parent is not None and scope.parent.kind == "function":
                self._contexts[scope] = self.context(scope.parent)
        return self._contexts[scope]

    def reachable(self, scope: Scope) -> set[Scope]:
        """Return the functions of the tree connected with this one by calls, in either direction.

        Its class and module are included.
        """
        return self._closure([scope], lambda each: self._at(each)._neighbours(each))

    def programs_of(self, scope: Scope, into: Callable[[Scope], bool] = lambda _: True) -> set[Scope]:
        """Return the functions of the tree that run in a program that runs this one.

        They are what calls it, directly or not, with its classes, and what these call. `reachable` contains the other
        users of its helpers as well. into: True for a callee that is of interest, with what it calls.
        """
        callers = self._closure([scope], lambda each: self._at(each)._runs_it(each))
        return self._closure(callers, lambda each: list(filter(into, self._at(each)._runs(each))))

    def _closure(self, start: Iterable[Scope], following: Callable[[Scope], list[Scope]]) -> set[Scope]:
        """Return some functions, and all that follow from them."""
        seen: set[Scope] = set()
        pending = list(start)
        while pending:
            current = pending.pop()
            if current not in seen:
                seen.add(current)
                pending += following(current)
        return seen

    def _runs_it(self, scope: Scope) -> list[Scope]:
        """Return the callers of a function, what it is defined in, and the methods and bases of a class."""
        if scope.kind == "class":
            return [*self._own_bases(scope), *(each for each in scope.children if each.kind == "function")]
        if scope.kind != "function":
            return []
        return [*(call.scope for call in self.callers(scope)), *([scope.parent] if scope.parent is not None else ())]

    def _runs(self, scope: Scope) -> list[Scope]:
        """Return the functions that a function or a module calls, those defined in a function, and its class."""
        if scope.kind == "class":
            return self._own_bases(scope)
        found = [each.scope for call in scope.calls if self._may_train(call) for each in self.functions(call)]
        if scope.kind == "function":
            found += [each for each in scope.children if each.kind == "function"]
            found += [scope.parent] if scope.parent is not None else []
        return found

    def _own_bases(self, scope: Scope) -> list[Scope]:
        """Return the base classes that are defined in the tree."""
        return [base.scope for base in self.bases(scope) if isinstance(base, Class)]

    def _neighbours(self, scope: Scope) -> list[Scope]:
        if scope not in self._neighbours_of:
            self._neighbours_of[scope] = self._find_neighbours(scope)
        return self._neighbours_of[scope]

    def _find_neighbours(self, scope: Scope) -> list[Scope]:
        found: list[Scope] = []
        if scope.kind == "class":
            found += scope.children
            found += self._own_bases(scope)
        elif scope.kind == "function":
            found += [call.scope for call in self.callers(scope)]
            found += scope.children
            if scope.parent is not None:
                found.append(scope.parent)
        for call in scope.calls:
            if self._may_train(call):
                found += [function.scope for function in self.functions(call)]
        return found

    def _may_train(self, call: Call) -> bool:
        """True if the callee is of this file, or of a module of the tree that may train."""
        root = call.path.split(".", 1)[0]
        bindings = self.facts.module.bindings.get(root, ()) if root not in call.scope.bindings else ()
        if not bindings or any(binding.kind not in ("import", "from") for binding in bindings):
            return True
        modules = (self.facts.module_of(binding) for binding in bindings)
        return any(module is not None and module.may_train for module in modules)


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


def _name_outside(scope: Scope) -> str:
    """Return the top-level name by which other modules get at a function or method; empty for an inner function."""
    home = scope.parent if scope.is_method else scope
    return home.name if home is not None and home.parent is not None and home.parent.kind == "module" else ""


def _could_be_instance(call: Call) -> bool:
    return type(call.func) not in _NO_NAMES
