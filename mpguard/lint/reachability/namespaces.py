"""The options of the object that an argument parser returns, where all of the parser is in the code.

`args = parser.parse_args()` has the options that `parser.add_argument` defines, and raises for any other attribute.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.reachability import executed, modules
from mpguard.lint.reachability.executed import DefinitionNode, FunctionNode
from mpguard.lint.reachability.modules import ParsedModule

#: How many calls and names a namespace is followed through.
_DEPTH = 5
_PARSERS = frozenset({"argparse.ArgumentParser", "ArgumentParser"})
_PARSES = frozenset({"parse_args", "parse_known_args"})
_GROUPS = frozenset({"add_argument_group", "add_mutually_exclusive_group"})
#: Methods of a parser that define no option.
_DEFINES_NONE = frozenset({"print_help", "print_usage", "format_help", "error", "exit", "get_default"}) | _PARSES
#: Code that may give a namespace attributes whose names are not in it.
_ADDS = lazy_pattern(
    r"\bsetattr\(\s*\w+\s*,\s*[^\s\"']|\bvars\(\w+\)\s*(?:\[|\.(?:update|setdefault))|\bnamespace\s*="
    r"|\.__dict__\s*(?:\[|=|\.(?:update|setdefault))|\bNamespace\b|\b__getattr__\b|\bexec\("
)


def options(name: str, module: ParsedModule, around: tuple[DefinitionNode, ...]) -> frozenset[str] | None:
    """Return the options of the namespace that a name stands for in the innermost of some functions.

    None if it may stand for another object, or have other attributes.
    """
    return _named(name, module, around, _DEPTH)


@tracked_fs.cached_per_run
def _named(name: str, module: ParsedModule, around: tuple[DefinitionNode, ...], depth: int) -> frozenset[str] | None:
    for place in range(len(around), 0, -1):
        scope = around[place - 1]
        bound = modules.bound_in(scope).get(name) if isinstance(scope, FunctionNode) else None
        if bound is not None:
            return _bound(name, bound, module, around[:place], depth)
    return _bound(name, module.bound.get(name, []), module, (), depth)


def _bound(
    name: str, bound: list[ast.AST], module: ParsedModule, around: tuple[DefinitionNode, ...], depth: int
) -> frozenset[str] | None:
    if len(bound) != 1 or not depth or not _is_whole(module):
        return None
    (node,) = bound
    if isinstance(node, ast.arg):
        return _of_parameter(name, module, around, depth - 1)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target = node.targets[0]
    first = target.elts[0] if isinstance(target, ast.Tuple) else target
    if not isinstance(first, ast.Name) or first.id != name:
        return None
    is_known = isinstance(target, ast.Tuple)
    return _value(node.value, "parse_known_args" if is_known else "parse_args", module, around, depth - 1)


def _value(
    node: ast.expr | None, method: str, module: ParsedModule, around: tuple[DefinitionNode, ...], depth: int
) -> frozenset[str] | None:
    """Return the options of what an expression is: `parser.parse_args()`, or a call of a function that returns it."""
    if isinstance(node, ast.Name):
        return _named(node.id, module, around, depth) if depth else None
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr == method and isinstance(node.func.value, ast.Name):
        return _defined(node.func.value.id, module, around)
    if not isinstance(node.func, ast.Name) or method != "parse_args":
        return None
    home, function = _function(node.func.id, module)
    if home is None or function is None or function.decorator_list or not depth:
        return None
    own = itertools.chain.from_iterable(map(executed.nested, function.body))
    returns = [each for each in own if isinstance(each, ast.Return)]
    if len(returns) != 1:
        return None
    return _value(returns[0].value, method, home, (function,), depth - 1) if _is_whole(home) else None


def _of_parameter(
    name: str, module: ParsedModule, around: tuple[DefinitionNode, ...], depth: int
) -> frozenset[str] | None:
    """Return the options of a parameter of a function that only one call of its module runs."""
    function = around[-1]
    if len(around) != 1 or not isinstance(function, FunctionNode) or function.decorator_list:
        return None
    mentions = [each for each in ast.walk(module.tree) if isinstance(each, ast.Name) and each.id == function.name]
    calls = [*_calls(module.tree, ())]
    found = [(call, outer) for call, outer in calls if call.func in mentions]
    if len(mentions) != 1 or len(found) != 1 or module.bound.get(function.name) != [function]:
        return None
    call, outer = found[0]
    parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    keywords = {each.arg: each.value for each in call.keywords}
    value = keywords.get(name) or dict(zip(parameters, call.args, strict=False)).get(name)
    return _named(value.id, module, outer, depth) if isinstance(value, ast.Name) and depth else None


def _defined(name: str, module: ParsedModule, around: tuple[DefinitionNode, ...]) -> frozenset[str] | None:
    """Return the options that a parser defines; None if other code may define more."""
    scope: ast.AST = module.tree
    bound = module.bound.get(name, [])
    for each in reversed(around):
        if isinstance(each, FunctionNode) and name in modules.bound_in(each):
            scope, bound = each, modules.bound_in(each)[name]
            break
    made = bound[0].value if len(bound) == 1 and isinstance(bound[0], ast.Assign) else None
    if not isinstance(made, ast.Call) or ast.unparse(made.func) not in _PARSERS:
        return None
    if any(each.arg in (None, "parents", "argument_default") for each in made.keywords):
        return None
    return _options(scope, name)


@tracked_fs.cached_per_run
def _options(scope: ast.AST, name: str) -> frozenset[str] | None:
    parents = {child: node for node in ast.walk(scope) for child in ast.iter_child_nodes(node)}
    found, names = set[str](), {name}
    for node in ast.walk(scope):
        if not (isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)):
            continue
        inner: ast.AST = node
        while True:
            method, call = parents.get(inner), parents.get(parents.get(inner, inner))
            if not isinstance(method, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not method:
                return None
            if method.attr in _GROUPS:
                above = parents[call]
                if isinstance(above, ast.Attribute):
                    inner = call
                    continue
                target = above.targets[0] if isinstance(above, ast.Assign) and len(above.targets) == 1 else None
                if not isinstance(target, ast.Name):
                    return None
                names.add(target.id)
            elif method.attr in ("add_argument", "set_defaults"):
                more = _names(call) if method.attr == "add_argument" else {each.arg for each in call.keywords}
                if not more or None in more:
                    return None
                found |= {each for each in more if each is not None}
            elif method.attr not in _DEFINES_NONE:
                return None
            break
    return frozenset(found)


def _names(call: ast.Call) -> set[str | None]:
    """Return the names that the attribute of an option may have; none if they are not known."""
    keywords = {each.arg: each.value for each in call.keywords}
    given = [*call.args, *([keywords["dest"]] if "dest" in keywords else [])]
    words = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if len(words) != len(given) or None in keywords:
        return set()
    return {form for word in words for form in (word, word.lstrip("-").replace("-", "_"))}


@tracked_fs.cached_per_run
def _is_whole(module: ParsedModule) -> bool:
    """True if neither a module nor one that it imports may give a namespace attributes with computed names."""
    imported = (
        modules.find("." * each.level + (each.module or ""), module.path)
        if isinstance(each, ast.ImportFrom)
        else modules.find(each.names[0].name, module.path)
        for each in ast.walk(module.tree)
        if isinstance(each, (ast.Import, ast.ImportFrom))
    )
    return not any(_ADDS.search(each.text) for each in (module, *imported) if each is not None)


def _function(name: str, module: ParsedModule, depth: int = 3) -> tuple[ParsedModule | None, FunctionNode | None]:
    """Return the function that the only binding of a name in a module defines or imports, and its module."""
    bound = module.bound.get(name, [])
    if len(bound) == 1 and isinstance(bound[0], FunctionNode):
        return module, bound[0]
    if len(bound) == 1 and isinstance(bound[0], ast.ImportFrom) and depth:
        node = bound[0]
        home = modules.find("." * node.level + (node.module or ""), module.path)
        original = next(each.name for each in node.names if (each.asname or each.name) == name)
        return _function(original, home, depth - 1) if home is not None else (None, None)
    return None, None


def _calls(node: ast.AST, around: tuple[DefinitionNode, ...]) -> Iterator[tuple[ast.Call, tuple[DefinitionNode, ...]]]:
    """Yield the calls of a tree, each with the functions and classes around it."""
    inner = (*around, node) if isinstance(node, DefinitionNode) else around
    if isinstance(node, ast.Call):
        yield node, around
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, inner)
