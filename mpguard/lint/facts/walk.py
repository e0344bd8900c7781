"""The one walk over libcst's tree: scopes, bindings, calls, uses of names, `with` blocks.

What it records is raw and in order; nothing is resolved here. Each record knows its *guard* (the
flag conditions under which it happens), the `with` items and loops around it, and its scope.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any as Anything
from typing import Literal

import libcst as cst
from libcst._nodes.internal import CodegenState

from mpguard.lint.facts.guard import ALWAYS, MOST_FLAGS, All, Any, Condition, Fixed, Flag, Guard, negated
from mpguard.lint.source import Chunk

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
    """Something in the file: its node, scope, order of evaluation, guard, enclosing `with` items and loops."""

    node: cst.CSTNode
    scope: Scope
    order: int
    guard: Guard
    withs: tuple[With, ...]
    loops: tuple[cst.CSTNode, ...]
    chunk: Chunk

    @property
    def span(self) -> tuple[int, int]:
        """Where it stands in `Source.text`."""
        return self.chunk.span(self.node)

    def __repr__(self) -> str:
        line = self.chunk.source.position(self.span[0])[0]
        return f"<{type(self).__name__.lower()} at {self.chunk.source.path}:{line}>"


@dataclasses.dataclass(eq=False, repr=False)
class Binding(Record):
    """A name (`x`, `self.x`, `args.dtype`) gets a value.

    value: the expression; of an `element` it is unpacked, at `index`. For imports `target` is the
    module and `name` what is taken from it.
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
    """A name or dotted name is read: the longest chain, such as `out.loss.backward`."""

    path: str


@dataclasses.dataclass(eq=False, repr=False)
class With(Record):
    """One item of a `with` statement (or what `enter_context` enters); `last` is the order at its end."""

    expr: cst.BaseExpression
    last: int = 1 << 60


@dataclasses.dataclass(eq=False, repr=False)
class Return(Record):
    """`return value`, or `yield value`."""

    value: cst.BaseExpression | None
    yields: bool = False


@dataclasses.dataclass(eq=False, repr=False)
class Exit(Record):
    """`continue`, `break` or `raise`: the node's type says which."""


@dataclasses.dataclass(eq=False, repr=False)
class Call(Record):
    """A call. `name`: the last name of what is called; `path`: all of it where it is a dotted name;
    `receiver`: what stands before the last dot; `statement`: the small statement it stands in,
    `line` the whole line or compound header."""

    node: cst.Call
    name: str
    path: str
    receiver: cst.BaseExpression | None
    statement: cst.CSTNode
    line: cst.CSTNode

    @property
    def func(self) -> cst.BaseExpression:
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
    def keywords(self) -> dict[str, cst.BaseExpression]:
        return {arg.keyword.value: arg.value for arg in self.node.args if arg.keyword is not None}

    @property
    def is_statement(self) -> bool:
        """Whether the call is a whole statement: `model.half()`."""
        return isinstance(self.statement, cst.Expr) and self.statement.value is self.node

    @property
    def starred(self) -> bool:
        """Whether arguments come from `*args` or `**kwargs`."""
        return any(arg.star for arg in self.node.args)

    def argument(self, position: int | None, *names: str) -> cst.BaseExpression | None:
        """An argument by position or one of its names; None where it is not given."""
        for name in names:
            if name in self.keywords:
                return self.keywords[name]
        if position is not None and position < len(self.positional):
            return self.positional[position]
        return None


@dataclasses.dataclass(eq=False, repr=False)
class Param:
    name: str
    default: cst.BaseExpression | None
    annotation: cst.BaseExpression | None
    kind: Literal["plain", "keyword", "star", "double"] = "plain"


_Place = tuple[Anything, "Scope", int, Guard, tuple[With, ...], tuple[cst.CSTNode, ...], Chunk]


class Scope:
    """A module, class or function, with what happens in it."""

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
        #: The dotted names of the bases, as they are written; those of a statement that is not parsed too.
        self.base_names: list[str] = []
        self.bindings: dict[str, list[Binding]] = {}
        self.uses: dict[str, list[Use]] = {}
        self.calls: list[Call] = []
        self.withs: list[With] = []
        self.returns: list[Return] = []
        #: Matrix products that are written `a @ b`.
        self.products: list[Record] = []
        self.exits: list[Exit] = []
        self.children: list[Scope] = []
        self.guard: Guard = ALWAYS
        self.order = 0
        self.parsed = True
        #: Names that were set to a condition: `use_amp = args.fp16 and cuda`.
        self.conditions: dict[str, Condition] = {}
        self.globals: set[str] = set()

    @property
    def qualname(self) -> str:
        return f"{self.parent.qualname}.{self.name}".lstrip(".") if self.parent is not None else ""

    @property
    def owner(self) -> Scope | None:
        """The class whose method this is, or within whose method it is defined."""
        scope = self.parent
        while scope is not None and scope.kind != "class":
            scope = scope.parent
        return scope

    @property
    def is_method(self) -> bool:
        return self.kind == "function" and self.parent is not None and self.parent.kind == "class"

    @property
    def is_bound(self) -> bool:
        """Whether its first parameter is the object, or the class."""
        return self.is_method and not any(dotted(each) == "staticmethod" for each in self.decorators)

    def chain(self) -> Iterator[Scope]:
        """This scope and those around it, as names are looked up (classes only as the innermost)."""
        scope: Scope | None = self
        while scope is not None:
            if scope is self or scope.kind != "class":
                yield scope
            scope = scope.parent

    def within(self) -> Iterator[Scope]:
        """This scope and all those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def descendants(self) -> Iterator[Scope]:
        """This scope and all inside it."""
        yield self
        for child in self.children:
            yield from child.descendants()

    def method(self, name: str) -> Scope | None:
        return next((child for child in self.children if child.kind == "function" and child.name == name), None)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.qualname or 'module'}>"


def dotted(node: cst.CSTNode | None) -> str:
    """`a.b.c` of a chain of names; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return ""
    parts.append(node.value)
    return ".".join(reversed(parts))


class _Text(CodegenState):
    """Writes code and takes no notice of places, for which libcst makes a context manager at each node."""

    def record_syntactic_position(self, node: Anything, **_: Anything) -> Anything:  # noqa: ARG002
        return _NO_PLACE


_NO_PLACE = contextlib.nullcontext()


def text_of(node: cst.CSTNode) -> str:
    """The code of a node, without white space: what two equal conditions have in common."""
    state = _Text("    ", "\n")
    node._codegen(state)
    return "".join("".join(state.tokens).split())


def constant(node: cst.CSTNode | None) -> tuple[object] | None:
    """The value of a literal, in a tuple (None is one); None for anything else."""
    if isinstance(node, cst.Name):
        return {"True": (True,), "False": (False,), "None": (None,)}.get(node.value)
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        value = node.evaluated_value
        return (value,) if isinstance(value, str) else None
    if isinstance(node, (cst.Integer, cst.Float)):
        return (node.evaluated_value,)
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        inner = constant(node.expression)
        return (-inner[0],) if inner and isinstance(inner[0], (int, float)) else None
    return None


_SKIPPED = (
    "whitespace", "lpar", "rpar", "comma", "equal", "semicolon", "operator", "lbrace", "rbrace", "lbracket",
    "rbracket",
    "leading_lines", "trailing_whitespace", "header", "footer", "colon", "dot", "star", "annotation",
)  # fmt: skip


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """The fields of a node type that can hold expressions."""
    return tuple(f.name for f in dataclasses.fields(kind) if not f.name.startswith(_SKIPPED))


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for field in _fields(type(node)):
        value = getattr(node, field)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, (list, tuple)):
            for each in value:
                if isinstance(each, cst.CSTNode):
                    yield each


class Walker:
    """Walks chunks of one file into one module scope."""

    def __init__(self, module: Scope) -> None:
        self.module = module
        self.scopes: list[Scope] = [module]
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.call_of: dict[cst.CSTNode, Call] = {}
        self.scope, self.guard, self.current = module, ALWAYS, module.chunk
        self.withs: tuple[With, ...] = ()
        self.loops: tuple[cst.CSTNode, ...] = ()
        self.order = 0
        self.statement: cst.CSTNode = module.node
        self.line: cst.CSTNode = module.node
        #: Of `a and b or c ...`, which is asked for again at each of its operators; until a flag gets a new meaning.
        self._formulas: dict[cst.CSTNode, Condition] = {}

    def chunk(self, chunk: Chunk) -> None:
        """Walks one top-level statement (or the whole file) as the next of the module."""
        self.module.chunk = self.current = chunk
        tree = chunk.module
        for statement in tree.body:
            self._statement(statement)

    # -- records ----------------------------------------------------------------------------------

    def _place(self, node: cst.CSTNode) -> _Place:
        self.order += 1
        return node, self.scope, self.order, self.guard, self.withs, self.loops, self.current

    def _bind(self, key: str, kind: BindingKind, node: cst.CSTNode, **details: Anything) -> Binding:
        binding = Binding(*self._place(node), key=key, kind=kind, statement=self.statement, **details)
        owner = self.scope
        if key.split(".", 1)[0] in owner.globals:
            owner = self.module
        owner.bindings.setdefault(key, []).append(binding)
        self._forget(key)
        return binding

    def _forget(self, key: str) -> None:
        holder = self._holder(key)
        if holder is not None:
            holder.conditions.pop(key, None)

    def _holder(self, key: str) -> Scope | None:
        return self.scope.owner if key.startswith("self.") and self.scope.owner is not None else self.scope

    # -- statements -------------------------------------------------------------------------------

    def _block(self, body: Sequence[cst.CSTNode]) -> bool:
        """Walks statements in order; whether the block is always left (return, raise, continue, break)."""
        before, ends = self.guard, False
        for statement in body:
            ends = self._statement(statement) or ends
        self.guard = before
        return ends

    def _suite(self, suite: cst.CSTNode) -> bool:
        if isinstance(suite, cst.SimpleStatementSuite):
            before = self.guard
            ends = self._small(suite.body, suite)
            self.guard = before
            return ends
        assert isinstance(suite, cst.IndentedBlock)
        for statement in suite.body:
            self.parents[statement] = suite
        return self._block(suite.body)

    def _statement(self, node: cst.CSTNode) -> bool:
        self.line = self.statement = node
        if isinstance(node, cst.SimpleStatementLine):
            return self._small(node.body, node)
        handler = _COMPOUND.get(type(node))
        return handler(self, node) if handler else False

    def _small(self, body: Sequence[cst.CSTNode], line: cst.CSTNode) -> bool:
        ends = False
        for statement in body:
            self.statement, self.line = statement, line
            self.parents[statement] = line
            if isinstance(statement, cst.Expr):
                self._expr(statement.value, statement)
                ends = ends or _leaves(statement.value)
            elif isinstance(statement, cst.Assign):
                self._assign(statement)
            elif isinstance(statement, cst.AnnAssign):
                if statement.value is not None:
                    self._expr(statement.value, statement)
                self._target(statement.target, statement.value, statement)
            elif isinstance(statement, cst.AugAssign):
                self._expr(statement.value, statement)
                self._read(statement.target)
                key = dotted(statement.target)
                if key:
                    self._bind(key, "augmented", statement, value=statement.value)
            elif isinstance(statement, cst.Return):
                if statement.value is not None:
                    self._expr(statement.value, statement)
                self.scope.returns.append(Return(*self._place(statement), value=statement.value))
                ends = True
            elif isinstance(statement, (cst.Raise, cst.Continue, cst.Break)):
                for child in children(statement):
                    self._expr(child, statement)
                self.scope.exits.append(Exit(*self._place(statement)))
                ends = True
            elif isinstance(statement, cst.Import):
                self._import(statement)
            elif isinstance(statement, cst.ImportFrom):
                self._import_from(statement)
            elif isinstance(statement, (cst.Global, cst.Nonlocal)):
                if isinstance(statement, cst.Global):
                    self.scope.globals.update(item.name.value for item in statement.names)
            elif isinstance(statement, cst.Assert):
                self._expr(statement.test, statement)
                self.guard = self.guard.given(self.condition(statement.test))
            elif isinstance(statement, cst.Del):
                key = dotted(statement.target)
                if key:
                    self._bind(key, "del", statement)
        return ends

    def _assign(self, node: cst.Assign) -> None:
        self._expr(node.value, node)
        for target in node.targets:
            self._target(target.target, node.value, node)
        if len(node.targets) == 1:
            key = dotted(node.targets[0].target)
            holder = self._holder(key) if key else None
            if holder is not None and _is_formula(node.value):
                condition = self.condition(node.value)
                if key.rsplit(".", 1)[-1] not in Guard([condition]).flags():
                    holder.conditions[key] = condition
                    self._formulas.clear()

    def _target(
        self, target: cst.CSTNode, value: cst.BaseExpression | None, node: cst.CSTNode, index: tuple[int, ...] = ()
    ) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            for place, element in enumerate(target.elements):
                self._target(element.value, value, node, (*index, place))
            return
        key = dotted(target)
        if key:
            self._bind(key, "element" if index else "assign", target, value=value, index=index)
        elif isinstance(target, cst.Subscript):
            self._read(target)
            inner: cst.BaseExpression = target
            while isinstance(inner, cst.Subscript):
                inner = inner.value
            base = dotted(inner)
            if base:
                self._bind(base, "item", target, value=value, index=index)
        elif isinstance(target, cst.Attribute):
            self._read(target)

    def _read(self, node: cst.CSTNode) -> None:
        self._expr(node, self.statement)

    def _import(self, node: cst.Import) -> None:
        for alias in node.names:
            module = dotted(alias.name)
            if alias.asname is not None:
                self._bind(dotted(alias.asname.name), "import", alias, target=module)
            else:
                self._bind(module.split(".", 1)[0], "import", alias, target=module.split(".", 1)[0], name="")

    def _import_from(self, node: cst.ImportFrom) -> None:
        module = "." * len(node.relative) + dotted(node.module)
        if isinstance(node.names, cst.ImportStar):
            self._bind("*", "from", node, target=module, name="*")
            return
        for alias in node.names:
            name = dotted(alias.name)
            key = dotted(alias.asname.name) if alias.asname is not None else name
            self._bind(key, "from", alias, target=module, name=name)

    def _if(self, node: cst.If) -> bool:
        self._expr(node.test, node)
        condition = self.condition(node.test)
        before = self.guard
        if Guard([condition]).flags() & _assigned(node):
            condition = Flag(f"#{self._place(node)[2]}")
        self.guard = before.given(condition)
        ends = self._suite(node.body)
        self.guard = before.given(negated(condition))
        if isinstance(node.orelse, cst.Else):
            otherwise = self._suite(node.orelse.body)
        elif isinstance(node.orelse, cst.If):
            self.line = self.statement = node.orelse
            otherwise = self._if(node.orelse)
        else:
            otherwise = False
        self.guard = before
        if ends and not otherwise:
            self.guard = before.given(negated(condition))
        elif otherwise and not ends:
            self.guard = before.given(condition)
        return ends and otherwise

    def _for(self, node: cst.For) -> bool:
        self._expr(node.iter, node)
        before, self.loops = self.loops, (*self.loops, node)
        self._loop_target(node.target, node.iter)
        self._suite(node.body)
        self.loops = before
        if node.orelse is not None:
            self._suite(node.orelse.body)
        return False

    def _loop_target(self, target: cst.CSTNode, value: cst.BaseExpression, index: tuple[int, ...] = ()) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            for place, element in enumerate(target.elements):
                self._loop_target(element.value, value, (*index, place))
        elif key := dotted(target):
            self._bind(key, "for", target, value=value, index=index)

    def _while(self, node: cst.While) -> bool:
        before, self.loops = self.loops, (*self.loops, node)
        self._expr(node.test, node)
        self._suite(node.body)
        self.loops = before
        if node.orelse is not None:
            self._suite(node.orelse.body)
        return False

    def _with(self, node: cst.With) -> bool:
        before, entered = self.withs, []
        for item in node.items:
            self._expr(item.item, node)
            entered.append(With(*self._place(node), expr=item.item))
            self.scope.withs.append(entered[-1])
            self.withs = (*self.withs, entered[-1])
            if item.asname is not None:
                key = dotted(item.asname.name)
                if key:
                    self._bind(key, "with", item.asname, value=item.item)
        ends = self._suite(node.body)
        for each in entered:
            each.last = self.order
        self.withs = before
        return ends

    def _try(self, node: cst.Try | cst.TryStar) -> bool:
        before = self.guard
        worked = Flag(f"try#{self._place(node)[2]}")
        self.guard = before.given(worked) if node.handlers else before
        ends = self._suite(node.body)
        if node.orelse is not None:
            ends = self._suite(node.orelse.body) or ends
        handled: list[bool] = []
        handlers: Sequence[cst.ExceptHandler | cst.ExceptStarHandler] = node.handlers
        for place, handler in enumerate(handlers):
            self.guard = before.given(negated(worked), Flag(worked.name + ".arm", place + 1))
            if handler.name is not None and (key := dotted(handler.name.name)):
                self._bind(key, "except", handler)
            handled.append(self._suite(handler.body))
        self.guard = before
        if node.finalbody is not None:
            ends = self._suite(node.finalbody.body) or ends
        if node.handlers and all(handled) and not ends:
            self.guard = before.given(worked)
        return ends and all(handled)

    def _match(self, node: cst.Match) -> bool:
        self._expr(node.subject, node)
        before, arm = self.guard, f"match#{self._place(node)[2]}"
        subject = dotted(node.subject).rsplit(".", 1)[-1]
        for place, case in enumerate(node.cases):
            value = constant(case.pattern.value) if isinstance(case.pattern, cst.MatchValue) else None
            self.guard = before.given(Flag(subject, value[0]) if value and subject else Flag(arm, place + 1))
            if case.guard is not None:
                self._expr(case.guard, case)
            self._suite(case.body)
        self.guard = before
        return False

    def _function(self, node: cst.FunctionDef) -> bool:
        for decorator in node.decorators:
            self._expr(decorator.decorator, decorator)
        for param in _params(node.params):
            if param.default is not None:
                self._expr(param.default, node)
        scope = self._enter("function", node.name.value, node)
        scope.decorators = [decorator.decorator for decorator in node.decorators]
        for param in _params(node.params):
            scope.params.append(param)
            self._bind(param.name, "param", node, value=param.default)
        scope.order = self.order
        self._suite(node.body)
        self._leave()
        return False

    def _class(self, node: cst.ClassDef) -> bool:
        for decorator in node.decorators:
            self._expr(decorator.decorator, decorator)
        for arg in (*node.bases, *node.keywords):
            self._expr(arg.value, node)
        scope = self._enter("class", node.name.value, node)
        scope.decorators = [decorator.decorator for decorator in node.decorators]
        scope.bases = [arg.value for arg in node.bases]
        scope.base_names = [dotted(base.value if isinstance(base, cst.Subscript) else base) for base in scope.bases]
        self._suite(node.body)
        self._leave()
        return False

    def _enter(self, kind: Literal["class", "function"], name: str, node: cst.CSTNode) -> Scope:
        scope = Scope(kind, name, node, self.scope, self.scope.chunk)
        scope.guard = self.guard
        self._bind(name, "def" if kind == "function" else "class", node, defines=scope)
        scope.order = self.order
        self.scope.children.append(scope)
        self.scopes.append(scope)
        self._outside = (
            *getattr(self, "_outside", ()),
            (self.scope, self.withs, self.loops, self.line, self.statement),
        )
        self.scope = scope
        if kind == "function":
            self.withs, self.loops = (), ()
        return scope

    def _leave(self) -> None:
        *rest, (self.scope, self.withs, self.loops, self.line, self.statement) = self._outside
        self._outside = tuple(rest)

    # -- expressions ------------------------------------------------------------------------------

    def _expr(self, node: cst.CSTNode, parent: cst.CSTNode) -> None:
        self.parents[node] = parent
        kind = type(node)
        if kind is cst.Name:
            self._use(node, node.value)  # type: ignore[attr-defined]
        elif kind is cst.Attribute:
            path = dotted(node)
            if path:
                self._use(node, path)
            else:
                self._expr(node.value, node)  # type: ignore[attr-defined]
        elif kind is cst.Call:
            self._call(node)  # type: ignore[arg-type]
        elif kind is cst.IfExp:
            self._either(node)  # type: ignore[arg-type]
        elif kind is cst.BooleanOperation:
            self._shortcut(node)  # type: ignore[arg-type]
        elif kind in _COMPREHENSIONS:
            self._comprehension(node)
        elif kind is cst.Lambda:
            for param in _params(node.params):  # type: ignore[attr-defined]
                self._bind(param.name, "for", node)
            self._expr(node.body, node)  # type: ignore[attr-defined]
        elif kind is cst.NamedExpr:
            self._expr(node.value, node)  # type: ignore[attr-defined]
            self._target(node.target, node.value, node)  # type: ignore[attr-defined]
        elif kind in _LEAVES:
            pass
        else:
            for child in children(node):
                self._expr(child, node)
            if kind is cst.BinaryOperation and isinstance(node.operator, cst.MatrixMultiply):  # type: ignore[attr-defined]
                self.scope.products.append(Record(*self._place(node)))
            if kind is cst.Yield:
                value = node.value  # type: ignore[attr-defined]
                self.scope.returns.append(
                    Return(
                        *self._place(node), value=value if isinstance(value, cst.BaseExpression) else None, yields=True
                    )
                )

    def _use(self, node: cst.CSTNode, path: str) -> None:
        use = Use(*self._place(node), path=path)
        self.scope.uses.setdefault(path.split(".", 1)[0], []).append(use)

    def _call(self, node: cst.Call) -> None:
        func = node.func
        self._expr(func, node)
        for arg in node.args:
            self.parents[arg] = node
            self._expr(arg.value, arg)
        if isinstance(func, cst.Attribute):
            name, receiver = func.attr.value, func.value
        else:
            name, receiver = func.value if isinstance(func, cst.Name) else "", None
        call = Call(
            *self._place(node),
            name=name,
            path=dotted(func),
            receiver=receiver,
            statement=self.statement,
            line=self.line,
        )
        self.scope.calls.append(call)
        self.call_of[node] = call
        if name == "enter_context" and call.positional:
            entered = With(*self._place(node), expr=call.positional[0])
            self.scope.withs.append(entered)
            self.withs = (*self.withs, entered)

    def _either(self, node: cst.IfExp) -> None:
        self._expr(node.test, node)
        before, condition = self.guard, self.condition(node.test)
        self.guard = before.given(condition)
        self._expr(node.body, node)
        self.guard = before.given(negated(condition))
        self._expr(node.orelse, node)
        self.guard = before

    def _shortcut(self, node: cst.BooleanOperation) -> None:
        self._expr(node.left, node)
        before, condition = self.guard, self.condition(node.left)
        self.guard = before.given(condition if isinstance(node.operator, cst.And) else negated(condition))
        self._expr(node.right, node)
        self.guard = before

    def _comprehension(self, node: Anything) -> None:
        before, self.loops = self.loops, (*self.loops, node)
        part: cst.CompFor | None = node.for_in
        while part is not None:
            self._expr(part.iter, node)
            self._loop_target(part.target, part.iter)
            for condition in part.ifs:
                self._expr(condition.test, node)
            part = part.inner_for_in
        if isinstance(node, cst.DictComp):
            self._expr(node.key, node)
            self._expr(node.value, node)
        else:
            self._expr(node.elt, node)
        self.loops = before

    # -- conditions -------------------------------------------------------------------------------

    def condition(self, node: cst.CSTNode) -> Condition:
        """The formula that an expression's truth is."""
        known = constant(node)
        if known is not None:
            return Fixed(bool(known[0]))
        path = dotted(node)
        if path:
            for scope in self.scope.within():
                if path in scope.conditions:
                    return scope.conditions[path]
            return Flag(path.rsplit(".", 1)[-1])
        if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
            return negated(self.condition(node.expression))
        if isinstance(node, cst.BooleanOperation):
            if node not in self._formulas:
                self._formulas[node] = self._formula(node)
            return self._formulas[node]
        if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
            return self._comparison(node)
        if isinstance(node, cst.Call):
            name = dotted(node.func).rsplit(".", 1)[-1]
            args = [arg.value for arg in node.args]
            if name == "bool" and len(args) == 1:
                return self.condition(args[0])
            key = constant(args[1 if name == "getattr" else 0]) if len(args) > (name == "getattr") else None
            if name in ("getattr", "get") and key and isinstance(key[0], str):
                return Flag(key[0])
        return Flag(self._subject(node))

    def _formula(self, node: cst.BooleanOperation) -> Condition:
        parts = (self.condition(node.left), self.condition(node.right))
        if sum(part.leaves for part in parts) > MOST_FLAGS:
            return Flag(text_of(node))
        return All(parts) if isinstance(node.operator, cst.And) else Any(parts)

    def _comparison(self, node: cst.Comparison) -> Condition:
        operator, right = node.comparisons[0].operator, node.comparisons[0].comparator
        value = constant(right)
        subject = self._subject(node.left)
        if value is not None and isinstance(operator, (cst.Is, cst.IsNot, cst.Equal, cst.NotEqual)):
            if value[0] is None or value[0] is False:
                found = negated(self.condition(node.left))
            elif value[0] is True:
                found = self.condition(node.left)
            else:
                found = Flag(subject, value[0])
            return found if isinstance(operator, (cst.Is, cst.Equal)) else negated(found)
        if _member(right) and isinstance(operator, (cst.Is, cst.IsNot, cst.Equal, cst.NotEqual)):
            found = Flag(subject, _member(right)[0])
            return found if isinstance(operator, (cst.Is, cst.Equal)) else negated(found)
        if isinstance(operator, (cst.In, cst.NotIn)) and isinstance(right, (cst.Tuple, cst.List, cst.Set)):
            values = [constant(each.value) or _member(each.value) for each in right.elements]
            if all(values):
                found = Any(tuple(Flag(subject, each[0]) for each in values if each))
                return found if isinstance(operator, cst.In) else negated(found)
        return Flag(text_of(node))

    def _subject(self, node: cst.CSTNode) -> str:
        path = dotted(node)
        if path:
            return path.rsplit(".", 1)[-1]
        if isinstance(node, cst.Subscript) and len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index):
            key = constant(node.slice[0].slice.value)
            if key and isinstance(key[0], str):
                return key[0]
        return text_of(node)


_COMPREHENSIONS = frozenset({cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp})
_LEAVES = frozenset({cst.SimpleString, cst.Integer, cst.Float, cst.Imaginary, cst.Ellipsis})
_COMPOUND: dict[type, Anything] = {
    cst.If: Walker._if,
    cst.For: Walker._for,
    cst.While: Walker._while,
    cst.With: Walker._with,
    cst.Try: Walker._try,
    cst.TryStar: Walker._try,
    cst.Match: Walker._match,
    cst.FunctionDef: Walker._function,
    cst.ClassDef: Walker._class,
}


def _params(node: cst.Parameters) -> list[Param]:
    def made(param: cst.Param, kind: Literal["plain", "keyword", "star", "double"]) -> Param:
        annotation = param.annotation.annotation if param.annotation is not None else None
        return Param(param.name.value, param.default, annotation, kind)

    found = [made(param, "plain") for param in (*node.posonly_params, *node.params)]
    if isinstance(node.star_arg, cst.Param):
        found.append(made(node.star_arg, "star"))
    found += [made(param, "keyword") for param in node.kwonly_params]
    if node.star_kwarg is not None:
        found.append(made(node.star_kwarg, "double"))
    return found


def _is_formula(node: cst.CSTNode) -> bool:
    """Whether an expression is a condition over flags, worth to be followed through a name."""
    if isinstance(node, cst.Comparison):
        return True
    if isinstance(node, cst.BooleanOperation):
        return _is_formula(node.left) or _is_formula(node.right) or bool(dotted(node.left))
    if isinstance(node, cst.UnaryOperation):
        return isinstance(node.operator, cst.Not)
    if isinstance(node, cst.Call):
        return dotted(node.func) in ("bool", "getattr")
    path = dotted(node)
    return bool(path) and constant(node) is None


def _member(node: cst.CSTNode) -> tuple[str, ...]:
    """The last name of what is compared with: an enum's member, a dtype; empty for an expression."""
    path = dotted(node)
    return (path.rsplit(".", 1)[-1],) if path else ()


def _leaves(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and dotted(node.func) in ("sys.exit", "exit", "quit", "os._exit", "os.abort")


def _assigned(node: cst.CSTNode) -> set[str]:
    """The last names of what is assigned in the arms of an `if`."""
    found: set[str] = set()
    stack: list[cst.CSTNode] = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, cst.SimpleStatementLine):
            for statement in current.body:
                targets = [t.target for t in statement.targets] if isinstance(statement, cst.Assign) else []
                if isinstance(statement, cst.AnnAssign):
                    targets = [statement.target]
                for target in targets:
                    elements = (
                        [e.value for e in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else [target]
                    )
                    found.update(dotted(each).rsplit(".", 1)[-1] for each in elements)
        elif isinstance(
            current,
            (cst.If, cst.For, cst.While, cst.With, cst.Try, cst.TryStar, cst.Else, cst.Finally, cst.ExceptHandler),
        ):
            stack.append(current.body)
            for field in ("orelse", "finalbody"):
                other = getattr(current, field, None)
                if other is not None:
                    stack.append(other)
            stack += getattr(current, "handlers", ())
        elif isinstance(current, cst.IndentedBlock):
            stack += current.body
    return found - {""}
