"""Records: what the index of a file contains.

These are scopes, and in them bindings, calls, uses of names, `with` items and returns. A record is syntactic and in
order of evaluation; no name is resolved. Each has its path condition (`guard`: the conditions over flags under which it
is executed), the enclosing `with` items and loops, and its scope.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Literal

import libcst as cst

from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import ALWAYS, Condition, PathCondition
from mpguard.lint.source.source import Chunk

#: The key by which records are sorted: their order of evaluation.
BY_ORDER = operator.attrgetter("order")

BindingKind = Literal[
    "assign",
    "element",
    "for",
    "with",
    "import",
    "from",
    "param",
    "augmented",
    "item",
    "def",
    "class",
    "stub",
    "del",
    "except",
]


@dataclasses.dataclass(eq=False, repr=False)
class Record:
    """A place in the file: its node, scope, order of evaluation, path condition, enclosing `with` items and loops."""

    node: cst.CSTNode
    scope: Scope
    order: int
    guard: PathCondition
    withs: tuple[With, ...]
    loops: tuple[cst.CSTNode, ...]
    chunk: Chunk

    @property
    def span(self) -> tuple[int, int]:
        """Start and end in `Source.text`."""
        return self.chunk.span(self.node)

    def __repr__(self) -> str:
        line = self.chunk.source.position(self.span[0])[0]
        return f"<{type(self).__name__.lower()} at {self.chunk.source.path}:{line}>"


@dataclasses.dataclass(eq=False, repr=False)
class Binding(Record):
    """A binding of a name or attribute (`x`, `self.x`, `args.dtype`) to a value.

    value: the bound expression; for an `element` the expression that is unpacked, at `index`. For imports `target` is
    the module and `name` the imported name.
    """

    key: str
    kind: BindingKind
    value: cst.BaseExpression | None = None
    index: tuple[int, ...] = ()
    target: str = ""
    name: str = ""
    defines: Scope | None = None
    statement: cst.CSTNode | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Use(Record):
    """A read of a name or dotted name: the longest chain, such as `out.loss.backward`."""

    path: str


@dataclasses.dataclass(eq=False, repr=False)
class With(Record):
    """One item of a `with` statement (or the argument of `enter_context`); `last` is the order at its end."""

    expr: cst.BaseExpression
    last: int = 1 << 60


@dataclasses.dataclass(eq=False, repr=False)
class Return(Record):
    """A `return value`, or `yield value` (`yields`)."""

    value: cst.BaseExpression | None
    yields: bool = False


@dataclasses.dataclass(eq=False, repr=False)
class Exit(Record):
    """A `continue`, `break` or `raise`, by the type of the node."""


@dataclasses.dataclass(eq=False, repr=False)
class Call(Record):
    """A call.

    name       the last name of the callee
    path       the callee where that is a dotted name, else ""
    receiver   the expression before the last dot
    statement  the simple statement that contains the call
    line       the whole line, or the header of the compound statement
    """

    node: cst.Call
    name: str
    path: str
    receiver: cst.BaseExpression | None
    statement: cst.CSTNode
    line: cst.CSTNode

    @property
    def func(self) -> cst.BaseExpression:
        """The callee."""
        return self.node.func

    @functools.cached_property
    def positional(self) -> list[cst.BaseExpression]:
        """The positional arguments up to the first `*args`."""
        found: list[cst.BaseExpression] = []
        for arg in self.node.args:
            if arg.star == "*":
                break
            if arg.keyword is None and not arg.star:
                found.append(arg.value)
        return found

    @functools.cached_property
    def _written(self) -> dict[str, cst.BaseExpression]:
        return {arg.keyword.value: arg.value for arg in self.node.args if arg.keyword is not None}

    @property
    def keywords(self) -> dict[str, cst.BaseExpression]:
        """The keyword arguments by name, with the items of each `**mapping` whose items are known."""
        items = self.chunk.source.items_of(self)[0] if self._unpacks else {}
        return {**items, **self._written} if items else self._written

    @functools.cached_property
    def _unpacks(self) -> bool:
        return any(arg.star == "**" for arg in self.node.args)

    @property
    def is_statement(self) -> bool:
        """True if the call is a whole statement: `model.half()`."""
        return isinstance(self.statement, cst.Expr) and self.statement.value is self.node

    @property
    def starred(self) -> bool:
        """True if arguments come from `*args`, or from a `**mapping` whose items are not all known."""
        if self._unpacks and not self.chunk.source.items_of(self)[1]:
            return True
        return any(arg.star == "*" for arg in self.node.args)

    def argument(self, position: int | None, *names: str) -> cst.BaseExpression | None:
        """Return an argument by position or by one of its names; None if it is not given."""
        for name in names:
            if name in self.keywords:
                return self.keywords[name]
        if position is not None and position < len(self.positional):
            return self.positional[position]
        return None


@dataclasses.dataclass(eq=False, repr=False)
class Param:
    """A parameter of a function."""

    name: str
    default: cst.BaseExpression | None
    annotation: cst.BaseExpression | None
    kind: Literal["plain", "keyword", "star", "double"] = "plain"


class Scope:
    """A module, class or function scope with its records."""

    def __init__(
        self,
        kind: Literal["module", "class", "function"],
        name: str,
        node: cst.CSTNode,
        parent: Scope | None,
        chunk: Chunk,
    ) -> None:
        self.kind, self.name, self.node, self.parent, self.chunk = kind, name, node, parent, chunk
        self.params: list[Param] = []
        self.decorators: list[cst.BaseExpression] = []
        self.bases: list[cst.BaseExpression] = []
        #: The dotted names of the bases as they are written; also for a class that is not parsed.
        self.base_names: list[str] = []
        self.bindings: dict[str, list[Binding]] = {}
        self.uses: dict[str, list[Use]] = {}
        self.calls: list[Call] = []
        self.withs: list[With] = []
        self.returns: list[Return] = []
        #: Matmuls that are written `a @ b`.
        self.products: list[Record] = []
        self.exits: list[Exit] = []
        self.children: list[Scope] = []
        self.guard: PathCondition = ALWAYS
        self.order = 0
        self.parsed = True
        #: Names bound to a condition: `use_amp = args.fp16 and cuda`.
        self.conditions: dict[str, Condition] = {}
        self.globals: set[str] = set()

    @property
    def qualname(self) -> str:
        """The dotted name of the scope within its module."""
        return f"{self.parent.qualname}.{self.name}".lstrip(".") if self.parent is not None else ""

    @property
    def owner(self) -> Scope | None:
        """The class that encloses this scope, or None."""
        scope = self.parent
        while scope is not None and scope.kind != "class":
            scope = scope.parent
        return scope

    @property
    def is_method(self) -> bool:
        """True if this is a function directly in a class."""
        return self.kind == "function" and self.parent is not None and self.parent.kind == "class"

    @property
    def is_bound(self) -> bool:
        """True if its first parameter is the object, or the class."""
        return self.is_method and not any(dotted(each) == "staticmethod" for each in self.decorators)

    def chain(self) -> Iterator[Scope]:
        """Yield this scope and the enclosing ones in order of name lookup (classes only as the innermost)."""
        scope: Scope | None = self
        while scope is not None:
            if scope is self or scope.kind != "class":
                yield scope
            scope = scope.parent

    def within(self) -> Iterator[Scope]:
        """Yield this scope and all enclosing ones, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def descendants(self) -> Iterator[Scope]:
        """Yield this scope and all nested ones."""
        yield self
        for child in self.children:
            yield from child.descendants()

    def method(self, name: str) -> Scope | None:
        """Return the method of a class, or None."""
        return next((child for child in self.children if child.kind == "function" and child.name == name), None)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.qualname or 'module'}>"
