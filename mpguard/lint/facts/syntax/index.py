"""The single pass over LibCST's tree that creates all records of statements and expressions, in order of evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.syntax.conditions import Conditions, subject
from mpguard.lint.facts.syntax.nodes import assigned, children, constant, dotted, ends_process
from mpguard.lint.facts.syntax.path_condition import ALWAYS, Condition, Flag, PathCondition, membership, negated
from mpguard.lint.facts.syntax.records import Binding, BindingKind, Call, Exit, Param, Record, Return, Scope, Use, With
from mpguard.lint.source.source import Chunk

_Place = tuple[Any, Scope, int, PathCondition, tuple[With, ...], tuple[cst.CSTNode, ...], Chunk]
#: The state that is restored at the end of a function or class.
_Saved = tuple[Scope, tuple[With, ...], tuple[cst.CSTNode, ...], cst.CSTNode, cst.CSTNode]


class _ExpressionIndexer:
    """The names and expressions of one file: bindings, uses, calls, and the conditions inside of an expression."""

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
        self.conditions = Conditions()
        self._saved: tuple[_Saved, ...] = ()

    def _place(self, node: cst.CSTNode) -> _Place:
        self.order += 1
        return node, self.scope, self.order, self.guard, self.withs, self.loops, self.current

    def _bind(self, key: str, kind: BindingKind, node: cst.CSTNode, **details: Any) -> Binding:
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

    def _condition(self, node: cst.CSTNode) -> Condition:
        return self.conditions.of(node, self.scope)

    def _target(
        self, target: cst.CSTNode, value: cst.BaseExpression | None, node: cst.CSTNode, index: tuple[int, ...] = ()
    ) -> None:
        if type(target) is cst.Tuple or type(target) is cst.List:
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

    def _loop_target(self, target: cst.CSTNode, value: cst.BaseExpression, index: tuple[int, ...] = ()) -> None:
        if type(target) is cst.Tuple or type(target) is cst.List:
            for place, element in enumerate(target.elements):
                self._loop_target(element.value, value, (*index, place))
        elif key := dotted(target):
            self._bind(key, "for", target, value=value, index=index)

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
            self._conditional(node)  # type: ignore[arg-type]
        elif kind is cst.BooleanOperation:
            self._boolean_operation(node)  # type: ignore[arg-type]
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
        if type(func) is cst.Attribute:
            name, receiver = func.attr.value, func.value
        else:
            name, receiver = func.value if type(func) is cst.Name else "", None
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

    def _conditional(self, node: cst.IfExp) -> None:
        self._expr(node.test, node)
        before, condition = self.guard, self._condition(node.test)
        self.guard = before.given(condition)
        self._expr(node.body, node)
        self.guard = before.given(negated(condition))
        self._expr(node.orelse, node)
        self.guard = before

    def _boolean_operation(self, node: cst.BooleanOperation) -> None:
        self._expr(node.left, node)
        before, condition = self.guard, self._condition(node.left)
        self.guard = before.given(condition if isinstance(node.operator, cst.And) else negated(condition))
        self._expr(node.right, node)
        self.guard = before

    def _comprehension(self, node: Any) -> None:
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


class Indexer(_ExpressionIndexer):
    """Indexes the chunks of one file into one module scope."""

    def chunk(self, chunk: Chunk) -> None:
        """Index one top-level statement (or the whole file) as the next of the module."""
        self.module.chunk = self.current = chunk
        tree = chunk.module
        for statement in tree.body:
            self._statement(statement)

    def stub(self, chunk: Chunk) -> None:
        """Bind the name of a definition that is not parsed, and record the bases of a class."""
        header = _HEADER.search(chunk.text)
        if header is None:
            return
        kind, name, bases = header.groups()
        scope = Scope("class" if kind == "class" else "function", name, cst.Pass(), self.module, chunk)
        scope.parsed = False
        scope.base_names = [base.strip() for base in (bases or "").split(",") if "=" not in base and base.strip()]
        self.module.children.append(scope)
        place = self._place(scope.node)
        self.module.bindings.setdefault(name, []).append(Binding(*place, key=name, kind="stub", defines=scope))

    # -- records ----------------------------------------------------------------------------------

    # -- statements -------------------------------------------------------------------------------

    def _block(self, body: Sequence[cst.CSTNode]) -> bool:
        """Index statements in order. True if the block is always left (return, raise, continue, break)."""
        before, ends = self.guard, False
        for statement in body:
            ends = self._statement(statement) or ends
        self.guard = before
        return ends

    def _suite(self, suite: cst.CSTNode) -> bool:
        if type(suite) is cst.SimpleStatementSuite:
            before = self.guard
            ends = self._small(suite.body, suite)
            self.guard = before
            return ends
        assert type(suite) is cst.IndentedBlock
        for statement in suite.body:
            self.parents[statement] = suite
        return self._block(suite.body)

    def _statement(self, node: cst.CSTNode) -> bool:
        self.line = self.statement = node
        if type(node) is cst.SimpleStatementLine:
            return self._small(node.body, node)
        handler = _COMPOUND.get(type(node))
        return handler(self, node) if handler else False

    def _small(self, body: Sequence[cst.CSTNode], line: cst.CSTNode) -> bool:
        ends = False
        for statement in body:
            self.statement, self.line = statement, line
            self.parents[statement] = line
            if type(statement) is cst.Expr:
                self._expr(statement.value, statement)
                ends = ends or ends_process(statement.value) or self._rejects_arguments(statement.value)
            elif type(statement) is cst.Assign:
                self._assign(statement)
            elif type(statement) is cst.AnnAssign:
                if statement.value is not None:
                    self._expr(statement.value, statement)
                if statement.value is not None or dotted(statement.target) not in self.scope.bindings:
                    self._target(statement.target, statement.value, statement)  # a later annotation alone binds nothing
            elif type(statement) is cst.AugAssign:
                self._expr(statement.value, statement)
                self._read(statement.target)
                key = dotted(statement.target)
                if key:
                    self._bind(key, "augmented", statement, value=statement.value)
                elif isinstance(statement.target, cst.Subscript) and (base := dotted(statement.target.value)):
                    self._bind(base, "item", statement, value=statement.value)
            elif type(statement) is cst.Return:
                if statement.value is not None:
                    self._expr(statement.value, statement)
                self.scope.returns.append(Return(*self._place(statement), value=statement.value))
                ends = True
            elif type(statement) in _EXITS:
                for child in children(statement):
                    self._expr(child, statement)
                self.scope.exits.append(Exit(*self._place(statement)))
                ends = True
            elif type(statement) is cst.Import:
                self._import(statement)
            elif type(statement) is cst.ImportFrom:
                self._import_from(statement)
            elif type(statement) is cst.Global:
                self.scope.globals.update(item.name.value for item in statement.names)
            elif type(statement) is cst.Assert:
                self._expr(statement.test, statement)
                self.guard = self.guard.given(self._condition(statement.test))
            elif type(statement) is cst.Del:
                key = dotted(statement.target)
                if key:
                    self._bind(key, "del", statement)
        return ends

    def _rejects_arguments(self, node: cst.CSTNode) -> bool:
        """True for `parser.error("...")` of an argparse parser, which ends the process."""
        call = self.call_of.get(node)
        parser = dotted(call.receiver) if call is not None and call.name == "error" else ""
        if not parser:
            return False
        bindings = next((found for scope in self.scope.chain() if (found := scope.bindings.get(parser))), [])
        made = (each.value for each in bindings if isinstance(each.value, cst.Call))
        return parser == "parser" or any(dotted(each.func).endswith("ArgumentParser") for each in made)

    def _assign(self, node: cst.Assign) -> None:
        self._expr(node.value, node)
        for target in node.targets:
            self._target(target.target, node.value, node)
        if len(node.targets) == 1:
            key = dotted(node.targets[0].target)
            holder = self._holder(key) if key else None
            if holder is not None:
                self.conditions.name(key, node.value, holder, self.scope)

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
        condition = self._condition(node.test)
        before = self.guard
        if PathCondition([condition]).flags() & assigned(node):
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
        flag = subject(node.subject) if dotted(node.subject) else ""
        earlier: list[Condition] = []
        for place, case in enumerate(node.cases):
            values = _values_of(case.pattern) if flag else ()
            matches = membership(flag, values) if values else Flag(arm, place + 1)
            conditions = map(negated, earlier) if earlier and _is_wildcard(case) else [matches]
            self.guard = before.given(*conditions)
            if case.guard is not None:
                self._expr(case.guard, case)
            elif values:
                earlier.append(matches)
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
        self._saved = (*self._saved, (self.scope, self.withs, self.loops, self.line, self.statement))
        self.scope = scope
        if kind == "function":
            self.withs, self.loops = (), ()
        return scope

    def _leave(self) -> None:
        *rest, (self.scope, self.withs, self.loops, self.line, self.statement) = self._saved
        self._saved = tuple(rest)

    # -- expressions ------------------------------------------------------------------------------


_HEADER = lazy_pattern(r"^(async[ \t]+def|def|class)[ \t]+(\w+)[ \t]*(?:\(([^()]*)\))?", re.MULTILINE)
_COMPREHENSIONS = frozenset({cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp})
_EXITS = frozenset({cst.Raise, cst.Continue, cst.Break})
_LEAVES = frozenset({cst.SimpleString, cst.Integer, cst.Float, cst.Imaginary, cst.Ellipsis})
_COMPOUND: dict[type, Any] = {
    cst.If: Indexer._if,
    cst.For: Indexer._for,
    cst.While: Indexer._while,
    cst.With: Indexer._with,
    cst.Try: Indexer._try,
    cst.TryStar: Indexer._try,
    cst.Match: Indexer._match,
    cst.FunctionDef: Indexer._function,
    cst.ClassDef: Indexer._class,
}


def _values_of(pattern: cst.MatchPattern) -> list[object]:
    """Return the constants that a pattern matches, those of `"fp16" | "half"` too; nothing for any other pattern."""
    parts = [each.pattern for each in pattern.patterns] if isinstance(pattern, cst.MatchOr) else [pattern]
    found: list[object] = []
    for part in parts:
        literal = constant(part.value) if isinstance(part, (cst.MatchValue, cst.MatchSingleton)) else None
        if literal is None:
            return []
        found.append(literal[0])
    return found


def _is_wildcard(case: cst.MatchCase) -> bool:
    """True for `case _:`."""
    return isinstance(case.pattern, cst.MatchAs) and case.pattern.pattern is None and case.guard is None


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
