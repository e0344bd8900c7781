"""What is evaluated for certain when a line of Python code is reached, and after it: of the tree of Python's parser."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence

from mpguard.core.lazy_pattern import lazy_pattern

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DefinitionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
#: Context managers that may suppress an error.
_SUPPRESSES = lazy_pattern(r"(?i)suppress|raises|ignor|catch|handle|except|assert")
_WITHS = (ast.With, ast.AsyncWith)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BRANCHES = (ast.If, *_LOOPS, ast.Match)
_WHOLE = (ast.Import, ast.ImportFrom, ast.Raise)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Statements of which nothing is certain: an assertion may be off.
_NOTHING = frozenset({"Global", "Nonlocal", "Assert", "TryStar", "TypeAlias"})


def around(body: Sequence[ast.stmt], line: int) -> tuple[DefinitionNode, ...]:
    """Return the functions and classes around a line, outermost first."""
    for statement in body:
        if contains(statement, line):
            if isinstance(statement, DefinitionNode):
                return (statement, *around(statement.body, line)) if line >= statement.body[0].lineno else ()
            return tuple(itertools.chain.from_iterable(around(block, line) for block in _blocks(statement)))
    return ()


def before(body: Sequence[ast.stmt], line: int) -> Iterator[ast.AST]:
    """Yield the nodes of a block that are evaluated before a line in it, up to a function or a class around it."""
    for place, statement in enumerate(body):
        if contains(statement, line):
            yield from itertools.chain.from_iterable(map(executed, body[:place]))
            yield from _header(statement) if isinstance(statement, (*_BRANCHES, *_WITHS)) else ()
            for block in () if isinstance(statement, DefinitionNode) else _blocks(statement):
                yield from before(block, line)


def at(body: Sequence[ast.stmt], line: int) -> Iterator[ast.AST]:
    """Yield the nodes of the simple statement at a line of a block that are always evaluated."""
    for statement in body:
        if contains(statement, line) and not isinstance(statement, DefinitionNode):
            yield from () if any(_blocks(statement)) else executed(statement)
            for block in _blocks(statement):
                yield from at(block, line)


def following(body: Sequence[ast.stmt], line: int) -> Iterator[ast.stmt | None]:
    """Yield the statements of a function that are executed after a line, in order; None where that is not known."""
    for place, statement in enumerate(body):
        if not contains(statement, line):
            continue
        for block in _blocks(statement):
            if any(contains(each, line) for each in block):
                if isinstance(statement, ast.Try) and statement.handlers and block is statement.body:
                    yield None
                yield from following(block, line)
        if isinstance(statement, (*_LOOPS, ast.Try)) or (isinstance(statement, _WITHS) and _may_suppress(statement)):
            yield None
        yield from body[place + 1 :]


def contains(statement: ast.stmt, line: int) -> bool:
    """True if a line is in a statement."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)]) <= line <= (statement.end_lineno or 0)


def nested(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement and those in it, without those of functions and classes."""
    yield statement
    if not isinstance(statement, DefinitionNode):
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                yield from nested(child)


def executed(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes that are evaluated whenever a statement is executed to its end, in order.

    These are the calls, the names and attributes that are read, imports and `raise`.
    """
    if isinstance(statement, _WHOLE):
        yield statement
    elif isinstance(statement, ast.ClassDef):
        yield from _all_of(statement.decorator_list, statement.bases)
    elif isinstance(statement, FunctionNode):
        yield from _all_of(statement.decorator_list, statement.args.defaults)
    elif isinstance(statement, (*_BRANCHES, *_WITHS)):
        yield from _header(statement)
        if isinstance(statement, _WITHS) and not _may_suppress(statement):
            yield from itertools.chain.from_iterable(map(executed, statement.body))
    elif isinstance(statement, ast.Try):
        body = [] if statement.handlers else statement.body
        yield from itertools.chain.from_iterable(map(executed, (*body, *statement.finalbody)))
    elif isinstance(statement, ast.AnnAssign):
        yield from _all_of([statement.value] if statement.value is not None else [])
    elif type(statement).__name__ not in _NOTHING:
        yield from _all_of(ast.iter_child_nodes(statement))


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, ())
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _header(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield what a compound statement evaluates before its body."""
    if isinstance(statement, (ast.If, ast.While)):
        return _evaluated(statement.test)
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return _evaluated(statement.iter)
    if isinstance(statement, _WITHS):
        return _all_of([each.context_expr for each in statement.items])
    return _evaluated(statement.subject) if isinstance(statement, ast.Match) else iter(())


def _may_suppress(statement: ast.With | ast.AsyncWith) -> bool:
    return any(_SUPPRESSES.search(ast.unparse(each.context_expr)) for each in statement.items)


def _all_of(*groups: Iterator[ast.AST] | Sequence[ast.AST]) -> Iterator[ast.AST]:
    for group in groups:
        for node in group:
            yield from _evaluated(node)


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are evaluated whenever an expression is."""
    if isinstance(node, ast.Lambda):
        yield from _all_of(node.args.defaults)
    elif isinstance(node, ast.BoolOp):
        yield from _evaluated(node.values[0])
    elif isinstance(node, ast.IfExp):
        yield from _evaluated(node.test)
    elif isinstance(node, ast.Compare):
        yield from _all_of([node.left, node.comparators[0]])
    elif isinstance(node, _COMPREHENSIONS):
        yield from _evaluated(node.generators[0].iter)
    else:
        yield from _all_of(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call) or (isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)):
        yield node
