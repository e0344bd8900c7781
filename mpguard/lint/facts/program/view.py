"""`ProgramView`: what the expressions of a file may be, and which functions call which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import libcst as cst

from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.dtypes import AnyDtype, PossibleDtypes
from mpguard.lint.facts.program.lattice import (
    Alternatives,
    Class,
    Constant,
    DtypeValue,
    Function,
    Object,
    Ref,
    constants_of,
)
from mpguard.lint.facts.syntax.nodes import dotted, iterated, text_of
from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition, compatible
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope
from mpguard.lint.facts.syntax.view import SyntaxView
from mpguard.lint.project.api import ProjectApi
from mpguard.lint.source.libcst_internals import Frames
from mpguard.lint.source.source import Source

View = TypeVar("View", bound="ProgramView")


class Evaluation(Protocol):
    """The evaluation of the expressions of a file, as the program layer uses it: `evaluate.Values`."""

    @property
    def is_active(self) -> bool: ...
    def known(self, node: cst.CSTNode | None) -> Alternatives | None: ...
    def evaluate(self, node: cst.CSTNode | None, scope: Scope, order: int = ...) -> Alternatives: ...
    def truth(self, test: cst.CSTNode, scope: Scope, order: int) -> bool | None: ...
    def item(self, owner: cst.CSTNode, key: cst.BaseExpression, scope: Scope, order: int) -> Alternatives: ...
    def attribute(self, owners: Alternatives, name: str) -> Alternatives: ...
    def share_search(self, other: Any) -> None: ...
    def lookup(self, path: str, scope: Scope, order: int) -> Alternatives: ...
    def bound(self, binding: Binding) -> Alternatives: ...
    def reaching(self, key: str, scope: Scope, order: int, guard: PathCondition = ...) -> list[Binding]: ...
    def given(self, call: Call, scope: Scope, name: str) -> cst.BaseExpression | None: ...


class ClassFacts(Protocol):
    """The classes of a file, as the program layer uses them: `classes.Classes`."""

    def attributes(self, cls: Scope) -> dict[str, list[Binding]]: ...
    def bases(self, cls: Scope) -> list[Class | str]: ...
    def ancestry(self, cls: Scope) -> Iterator[str]: ...
    def inherited(self, cls: Scope, name: str) -> Function | None: ...
    def set_above(self, cls: Scope, name: str) -> list[Binding]: ...
    def overriding(self, cls: Scope, name: str) -> tuple[list[tuple[Class, Binding]], bool]: ...
    def class_kind(self, cls: Scope) -> str: ...
    def base_unknown(self, cls: Scope | None) -> bool: ...


class Calls(Protocol):
    """The call graph of a file, as the program layer uses it: `callgraph.CallGraph`."""

    def calls_of(self, scope: Scope) -> list[Call]: ...
    def callers(self, scope: Scope) -> list[Call]: ...
    def all_calls(self, scope: Scope) -> list[Call] | None: ...
    def functions(self, call: Call) -> list[Function]: ...
    def escapes(self, scope: Scope) -> bool: ...
    def programs_of(self, scope: Scope, into: Callable[[Scope], bool] = ...) -> set[Scope]: ...
    def reachable(self, scope: Scope) -> set[Scope]: ...
    def guard_of(self, record: Record) -> PathCondition: ...


class ProgramView(SyntaxView, ABC):
    """The values and calls of one file."""

    values: Evaluation
    classes: ClassFacts
    graph: Calls

    def __init__(self, source: Source, project: ProjectApi | None = None, imported: bool = False) -> None:
        super().__init__(source, project, imported)
        self._imported: dict[str, Any] = {}
        self._users: dict[str, Any] = {}

    # -- values -------------------------------------------------------------------------------------

    def bindings(self, path: str, at: Record, guard: PathCondition = ALWAYS) -> list[Binding]:
        """Return the bindings of a name or a `self.` attribute that may have set its value at a record, latest first.

        guard: only those that are possible under this path condition.
        """
        return self.of(at).values.reaching(path, at.scope, at.order, guard)

    def bound_to(self, call: Call) -> Binding | None:
        """Return the binding of a name to the result of a call.

        Methods that return the same object may be between them.
        """
        parents = self.index.parents
        node: cst.CSTNode = call.node
        same = api_names.SAME - api_names.UPCASTS
        while isinstance(above := parents.get(node), cst.Attribute) and above.attr.value in same:
            node = parents[above]
        for key, bindings in call.scope.bindings.items():
            for binding in bindings:
                if binding.value is node and binding.kind == "assign" and key != "self":
                    return binding
        return None

    def argument_for(self, call: Call, param: Binding) -> cst.BaseExpression | None:
        """Return the argument that a call passes for a parameter, or its default; None if it is not visible."""
        return self.values.given(call, param.scope, param.key)

    def resolve(self, path: str, scope: Scope, order: int) -> Alternatives:
        """Return the abstract value of a dotted name in a scope, at a place in the order of evaluation."""
        return self.of(scope).values.lookup(path, scope, order)

    def evaluate(self, node: cst.CSTNode | None, at: Record) -> Alternatives:
        """Return the abstract value of an expression at a record: its alternatives, each with a path condition."""
        values = self.of(at).values
        known = values.known(node)
        if known is not None:
            return known
        with Frames():
            return values.evaluate(node, at.scope, at.order)

    def constants(self, node: cst.CSTNode | None, at: Record) -> list[object]:
        """Return the constants that an expression may be; empty without one, and if it may be anything else.

        A constant has no attribute `value`, but a member of an `Enum` has: `Precision.BF16.value`.
        """
        if node is None:
            return []
        found = constants_of(self.evaluate(node, at))
        if not found and isinstance(node, cst.Attribute) and node.attr.value == "value":
            members = constants_of(self.evaluate(node.value, at))
            found = members if all(isinstance(each, (str, int, float)) for each in members) else []
        return found

    def paths(self, call: Call) -> list[tuple[PathCondition, str]]:
        """Return the full dotted names of the library callables that a call may run, each with its path condition."""
        return [(each.guard, each.atom.path) for each in self.evaluate(call.func, call) if isinstance(each.atom, Ref)]

    def called_path(self, call: Call) -> str:
        """Return the first of `paths`, or an empty string."""
        return next((path for _, path in self.paths(call)), "")

    def dtypes(self, node: cst.CSTNode | None, at: Record, strings: bool = False) -> PossibleDtypes:
        """Return the dtypes that an expression may have, each with its path condition.

        None stands for an unknown dtype or none. strings: strings such as `"float16"` count as dtypes too.
        """
        found: list[tuple[PathCondition, AnyDtype | None]] = []
        for each in self.evaluate(node, at):
            dtype = each.atom.dtype if isinstance(each.atom, DtypeValue) else None
            if strings and isinstance(each.atom, Constant) and isinstance(each.atom.value, str):
                dtype = api_names.DTYPE_STRINGS.get(each.atom.value)
            found.append((each.guard, dtype))
        return tuple(found)

    def kinds(self, node: cst.CSTNode | None, at: Record) -> set[str]:
        """Return the kinds of object that an expression may be, with "" for an unknown one.

        A value that it has only under other conditions than those of the place does not count.
        """
        found = self.evaluate(node, at)
        here = [each for each in found if compatible(each.guard, at.guard)]
        return {each.atom.kind if isinstance(each.atom, Object) else "" for each in here or found}

    def from_outside(self, node: cst.CSTNode | None, at: Record, depth: int = 8) -> bool:
        """True if an object comes from a caller that is not in the file.

        It is a parameter, or an attribute set from one. The return value of an imported function does not count: from
        there on the object belongs to the script.
        """
        path = dotted(node)
        if (facts := self.of(at)) is not self:
            return facts.from_outside(node, at, depth)
        if isinstance(node, cst.Call):
            inner = self.index.call_of.get(node)
            if inner is not None and inner.receiver is not None and inner.name in api_names.SAME:
                return self.from_outside(inner.receiver, inner, depth - 1)
            return False
        if not path or depth < 0:
            return False
        bindings = self.values.reaching(path, at.scope, at.order, at.guard)
        if not bindings:
            root = path.split(".", 1)[0]
            return "." in path and (root == "self" or self.from_outside(cst.Name(root), at, depth - 1))
        for binding in bindings:
            if binding.kind == "param":
                callers = self.callers(binding.scope)
                if not callers:
                    return True
                given = [(self.values.given(call, binding.scope, binding.key), call) for call in callers]
                if any(each is None or self.from_outside(each, call, depth - 1) for each, call in given):
                    return True
            elif binding.kind in ("assign", "with") and binding.value is not None:
                if self.from_outside(binding.value, binding, depth - 1):
                    return True
            elif binding.kind == "for":
                return self.from_outside(iterated(binding.value), binding, depth - 1)
        return False

    # -- modules ------------------------------------------------------------------------------------

    def imported(self: View, module: str) -> View | None:
        """Return the facts of an imported module of the linted tree, or None if it is not in the tree."""
        if module.split(".", 1)[0] in api_names.LIBRARIES:
            return None
        if module not in self._imported:
            self._imported[module] = None  # within an import cycle the module is unknown
            other = self._imported[module] = self.project.source_of(module, self.path)
            if other is not None:
                other.values.share_search(self.values)
        found: View | None = self._imported[module]
        return found

    def imported_modules(self: View) -> list[View]:
        """Return the facts of the modules of the tree that this one imports from in a statement that is parsed."""
        bindings = (each for found in self.module.bindings.values() for each in found)
        found = (self.module_of(each) for each in bindings if each.kind in ("import", "from"))
        return [other for other in dict.fromkeys(found) if other is not None]

    def module_of(self: View, binding: Binding) -> View | None:
        """Return the facts of the module of the tree that an import binds a name of, or None."""
        module = binding.target
        found = self.imported(module)
        if binding.kind == "from" and (found is None or found.source.path.endswith("__init__.py")):
            inner = f"{module}{'' if module.endswith('.') else '.'}{binding.name}"
            atoms = [each.atom for each in self.values.bound(binding)] if found is not None else []
            homes = [self.of(atom.scope) for atom in atoms if isinstance(atom, (Function, Class))]
            return homes[0] if homes else self.imported(inner)
        return found

    def users(self: View, name: str) -> list[View] | None:
        """Return the facts of the modules of the tree that use a top-level name of this one, and may train.

        None if they are not all known.
        """
        if name not in self._users:
            found = self._users[name] = self.project.users_of(name, self.path)
            for other in found or ():
                other.values.share_search(self.values)
        users: list[View] | None = self._users[name]
        return users

    def exported(self, name: str) -> bool:
        """True if another module may import a top-level name of this one.

        It is in `__all__`, or some file of the tree imports it.
        """
        self.need("__all__")
        listed = (binding.value for binding in self.module.bindings.get("__all__", ()) if binding.value is not None)
        return any(f"'{name}'" in text_of(each).replace('"', "'") for each in listed) or (
            self.project.imported_elsewhere(self.path, name)
        )

    def derived_elsewhere(self, cls: Scope) -> bool:
        """True if a class of another file may derive from a class: it may replace any of its methods."""
        return self.project.derived_elsewhere(self.of(cls).path, cls.name)

    @abstractmethod
    def always_supports_bf16(self) -> bool:
        """True if `torch.cuda.is_bf16_supported()` is True on each GPU: the required torch counts emulation."""

    # -- functions and classes ----------------------------------------------------------------------

    def attributes(self, cls: Scope) -> dict[str, list[Binding]]:
        """Return the attributes that a class and its base classes in the file set, each with its bindings."""
        return self.of(cls).classes.attributes(cls)

    def ancestry(self, cls: Scope) -> Iterator[str]:
        """Yield the full names of the library classes that a class derives from; "" for an unknown one."""
        return self.of(cls).classes.ancestry(cls)

    def class_kind(self, cls: Scope) -> str:
        """Return the kind of a class's instances: `model`, `own_optimizer`, `trainer` ...

        It is `own` for a plain user class, and "" if unknown.
        """
        return self.of(cls).classes.class_kind(cls)

    def base_unknown(self, cls: Scope | None) -> bool:
        """True if a class has base classes outside the analysed files, which may add attributes and behaviour."""
        return cls is not None and self.of(cls).classes.base_unknown(cls)

    def callers(self, scope: Scope) -> list[Call]:
        """Return the calls of a function in the linted tree, those of its own file first."""
        return self.of(scope).graph.callers(scope)

    def all_calls(self, scope: Scope) -> list[Call] | None:
        """Return the calls of a function in all files of the project; None if there may be others."""
        return self.graph.all_calls(scope)

    def functions(self, call: Call) -> list[Function]:
        """Return the functions of the tree that a call may run.

        That is a function, the `forward` of a module, or the `__init__` of a class.
        """
        return self.of(call).graph.functions(call)

    def repeated(self, scope: Scope, depth: int = 4) -> bool:
        """True if a function is called in a loop, directly or through its callers: once per epoch, for example."""
        callers = self.callers(scope) if depth else []
        return any(call.loops or self.repeated(call.scope, depth - 1) for call in callers)

    def escapes(self, scope: Scope) -> bool:
        """True if a function is passed as a value, so that code outside the call graph may call it."""
        return self.of(scope).graph.escapes(scope)

    def programs_of(self, scope: Scope, into: Callable[[Scope], bool] = lambda _: True) -> set[Scope]:
        """Return the functions of the tree that run in a program that runs this one.

        into: True for a callee that is of interest, with what it calls.
        """
        return self.of(scope).graph.programs_of(scope, into)

    def reachable(self, scope: Scope) -> set[Scope]:
        """Return the functions of the tree connected with this one by calls, in either direction.

        Its class and module are included.
        """
        return self.graph.reachable(scope)

    def guard_of(self, record: Record) -> PathCondition:
        """Return a record's path condition, including the conditions under which its function is always called."""
        return self.of(record).graph.guard_of(record)
