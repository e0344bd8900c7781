"""The functions of a file that run inside `torch.compile`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program.lattice import Function, Object
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.records import Call, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

_COMPILES = ("torch.compile", "torch.compiler.compile")
_DISABLES = ("torch.compiler.disable", "torch._dynamo.disable", "torch.compiler.allow_in_graph")


def compiled_scopes(facts: DomainView) -> dict[Scope, tuple[int, int]]:
    """Return the functions that are compiled, each with a span.

    It is that of the call or decorator that compiles the function or a caller of it.
    """
    found: dict[Scope, tuple[int, int]] = {}
    pending: list[tuple[Scope, tuple[int, int]]] = []
    for scope in facts.index.scopes:
        for decorator in scope.decorators:
            if _path(facts, decorator, scope).startswith(_COMPILES):
                pending.append((_entry(scope), scope.chunk.span(decorator)))
    for event in facts.events("compile"):
        subject = event.subject
        if any(path in _COMPILES for _, path in facts.paths(event.call)):
            subject = event.call.argument(0, "model")
        if subject is None or event.call.name not in ("compile", *facts.aliases("compile")):
            continue
        for each in facts.evaluate(subject, event.call):
            if isinstance(each.atom, Function) and each.atom.facts is facts:
                pending.append((each.atom.scope, event.span))
            elif isinstance(each.atom, Object) and each.atom.cls is not None and each.atom.facts is facts:
                pending.append((_entry(each.atom.cls), event.span))
    while pending:
        scope, place = pending.pop()
        if scope in found or scope.kind != "function":
            continue
        if any(_path(facts, decorator, scope) in _DISABLES for decorator in scope.decorators):
            continue
        found[scope] = place
        for call in scope.calls:
            if not _breaks(facts, call):
                pending += [(each.scope, place) for each in facts.functions(call) if each.facts is facts]
    return found


def _entry(scope: Scope) -> Scope:
    return (scope.method("forward") or scope) if scope.kind == "class" else scope


def _path(facts: DomainView, node: cst.BaseExpression, scope: Scope) -> str:
    """Return the full name of a decorator, called or not.

    Examples: `torch.compile(fullgraph=True)`, `partial(torch.compile, ...)`.
    """
    if isinstance(node, cst.Call):
        if dotted(node.func).endswith("partial") and node.args:
            return _path(facts, node.args[0].value, scope)
        node = node.func
    outer = scope.parent or facts.module
    for each in facts.values.evaluate(node, outer, scope.order):
        return str(getattr(each.atom, "path", ""))
    return ""


def _breaks(facts: DomainView, call: Call) -> bool:
    """True if a call inside a compiled function runs uncompiled."""
    return any(path in _DISABLES for _, path in facts.paths(call))


def launched_compiled(facts: DomainView) -> bool:
    """True if a launch config of the file enables compilation."""
    for config in facts.project.configs_for(facts.path):
        for key in ("dynamo_config.dynamo_backend", "dynamo_config.backend", "dynamo_backend"):
            entry = config.entry(key)
            if entry is not None and str(entry.value).upper() not in ("NO", "NONE", "FALSE"):
                return True
    return False
