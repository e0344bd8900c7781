"""The call graph of one file: callers, callees, and the conditions that callers share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program.all_calls import all_calls
from mpguard.lint.facts.program.classes import name_outside
from mpguard.lint.facts.program.evaluate import DEPTH
from mpguard.lint.facts.program.lattice import UNKNOWN, Class, Function, Object
from mpguard.lint.facts.syntax.nodes import is_super
from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition
from mpguard.lint.facts.syntax.records import Call, Record, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

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
    """The callers and callees of the functions of one file."""

    def __init__(self, facts: ProgramView) -> None:
        self.facts = facts
        self._callers: dict[Scope, list[Call]] = {}
        self._all_calls: dict[Scope, list[Call] | None] = {}
        self._contexts: dict[Scope, PathCondition] = {}
        self._escapes: dict[Scope, bool] = {}
        self._passed_names: set[str] = set()
        self._passed_names_at = -1
        self._neighbours_of: dict[Scope, list[Scope]] = {}
        self._depth = 0
        self._named: dict[str, list[Scope]] = {}
        self._named_at = 0

    def _at(self, scope: Scope) -> CallGraph:
        """Return the call graph of the file that contains a scope."""
        return self.facts.of(scope).part(CallGraph)

    def callers(self, scope: Scope) -> list[Call]:
        """Return the calls of a function in the linted tree, those of its own file first."""
        if scope in self._callers:
            return self._callers[scope]
        self._callers[scope] = []
        if scope.kind != "function":
            return []
        self.facts.need_uses(name_outside(scope) or scope.name)
        graphs = [self, *(other.part(CallGraph) for other in self._callers_modules(scope))]
        if scope.name == "__init__" and scope.parent is not None:
            # What a class is given may decide what its attributes are, whose calls are asked below if they create one.
            named = [(each, call) for each in graphs for call in each.facts.calls.get(scope.parent.name, ())]
            self._callers[scope] = [call for each, call in named if each._resolves(call, scope)]
        found = self._callers[scope] = [call for each in graphs for call in each.calls_of(scope)]
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
            names = dict.fromkeys((name_outside(scope), *self.facts.aliases(name_outside(scope))))
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
        name = name_outside(scope)
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
        nearby = (near for other in found for near in (other, *other.imported_modules()))
        further = [near for near in nearby if b"autocast" in near.source.data]
        for near in further:
            near.need_all()
        return list(dict.fromkeys((*found, *further)))

    def _factories(self, cls: str) -> set[str]:
        """Return the functions of the file that create an object of a class: `build_model`."""
        places = {call.scope for call in self.facts.calls.get(cls, ())}
        return {name for place in places if place.kind == "function" and (name := name_outside(place))} - {cls}

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
        name = name_outside(scope)
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
        return [base.scope for base in self.facts.classes.bases(scope) if isinstance(base, Class)]

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


def _could_be_instance(call: Call) -> bool:
    return type(call.func) not in _NO_NAMES
