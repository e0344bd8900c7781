"""Code that is reached only through a statement which raises whenever it runs, or from which no training follows.

Such a statement reads a name that nothing binds, or that its function binds further down only, imports what a package
or module of the project does not have, calls a function of the project with arguments that it does not take, or reads
an attribute of `self` or of a class that nothing sets, of a dict as if it were an object (`cfg.norm` with
`cfg = yaml.safe_load(file)`), or of parsed arguments whose parser does not define it. Only what is certain counts: a
name may come from `exec`, an attribute from `setattr`, a module that Git ignores may be there, and a decorator may
change a signature.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import libcst as cst

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program.lattice import Object
from mpguard.lint.reachability import executed, modules, namespaces
from mpguard.lint.reachability.executed import DefinitionNode, FunctionNode
from mpguard.lint.reachability.modules import ParsedModule
from mpguard.lint.source.files import MARKDOWN, NOTEBOOK

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView
    from mpguard.lint.facts.syntax.records import Record, Scope
    from mpguard.lint.reachability.untaken import UntakenBranches

#: How many calls and imports are followed to a statement that raises.
_DEPTH = 3
#: Names that every module has, that IPython, Databricks, profilers and gettext add, and those of Python 2.
_ALWAYS_BOUND = frozenset(dir(builtins)) | frozenset({
    "__file__", "__path__", "__class__", "WindowsError", "aiter", "anext", "ExceptionGroup", "BaseExceptionGroup",
    "get_ipython", "display", "In", "Out", "exit", "quit", "spark", "sc", "dbutils", "sqlContext", "snakemake",
    "profile", "_", "__", "___", "unicode", "xrange", "raw_input", "basestring", "reduce", "long", "unichr", "file",
    "cmp", "execfile", "reload",
})  # fmt: skip
#: Magics that bind names.
_BINDING_MAGIC = lazy_pattern(
    r"%(?:run|store|pylab|load|macro|rerun|env)\b|%%(?:cython|capture|sql|bigquery|R|local)\b"
)
#: Decorators that leave the signature as it is, and run the function.
_SAME_SIGNATURE = frozenset({
    "staticmethod", "classmethod", "no_grad", "enable_grad", "inference_mode", "abstractmethod", "override", "record",
})  # fmt: skip
#: Bases of a class with no attributes that a program reads.
_PLAIN_BASES = frozenset({"object", "ABC", "abc.ABC"})
#: Bases of a class whose call does not run its `__init__` alone.
_OTHER_CONSTRUCTORS = lazy_pattern(r"Enum|Flag|[Tt]uple|TypedDict|Meta|\(")
_DATACLASSES = frozenset({"dataclass", "dataclasses.dataclass"})
#: Functions of torch that are given to FSDP with `functools.partial`, and their first parameters, which are required.
_WRAP_POLICIES = frozenset({"size_based_auto_wrap_policy", "transformer_auto_wrap_policy"})
_OF_WRAP_POLICIES = ("module", "recurse", "nonwrapped_numel")
_LOADS = lazy_pattern(r"(?i)load|config|cfg")
_ENDS = frozenset({"sys.exit", "os._exit", "exit", "quit"})
_EXITS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
#: Names of functions in which a program may train.
_MAY_TRAIN = lazy_pattern(
    r"(?:^|_)(?:train|fit|run|step|backward|main|launch|spawn|learn|finetune|tune|optimi[sz]e|loop|epoch|start|eval"
    r"|evaluate|test|predict|generate|infer|process|work|worker|execute|solve|do)(?:_|$|[A-Z])"
    r"|training$|[a-z](?:Train|Step|Run|Fit|Epoch)"
)


class _Context(NamedTuple):
    """Where a statement is: its module, and the functions and classes around it, outermost first.

    given: the parameters of the innermost function that the call which is followed gives parsed arguments, and their
    options.
    """

    module: ParsedModule
    around: tuple[DefinitionNode, ...] = ()
    given: tuple[tuple[str, frozenset[str]], ...] = ()

    @property
    def method(self) -> tuple[ast.ClassDef, str] | None:
        """The class of the method that a statement is in, and the method's name for the object."""
        for place, (outer, inner) in enumerate(itertools.pairwise(self.around)):
            if isinstance(outer, ast.ClassDef) and isinstance(inner, FunctionNode) and inner.args.args:
                decorators, name = {_path(each) for each in inner.decorator_list}, inner.args.args[0].arg
                is_same = not any(name in modules.bound_in(each) for each in self.around[place + 2 :])
                if (
                    not decorators & {"staticmethod", "classmethod"}
                    and is_same
                    and len(modules.bound_in(inner)[name]) == 1
                ):
                    return outer, name
        return None


class Raising:
    """The code of a file that is reached only through a statement which raises, or from which no training follows."""

    def __init__(self, facts: ProgramView, branches: UntakenBranches, cells: Sequence[int] = ()) -> None:
        """Create the facts of a file. cells: where the cells of a notebook begin; they run in any order."""
        self._facts, self._branches = facts, branches
        self._cells = [facts.source.position(each)[0] for each in cells]
        self._errors = CertainErrors(facts)

    def contain(self, place: int) -> bool:
        """True if an offset of the file is in such code."""
        with tracked_fs.recording_for(self._facts.path):
            if not modules.in_project(self._facts.path):
                return False
            return self._contain(self._facts, place, _DEPTH, True) or self._reads_dict_as_object(place)

    def _reads_dict_as_object(self, place: int) -> bool:
        """True if a call at an offset, or one before it, passes an attribute of a plain dict: `f(cfg.norm)`."""
        record = self._branches.record_at(place) if _LOADS.search(self._facts.file_text) else None
        if record is None:
            return False
        calls = (
            call
            for call in record.scope.calls
            if call.order <= record.order and not call.guard - record.guard and set(call.loops) <= set(record.loops)
        )
        return any(
            isinstance(given, cst.Attribute) and _is_plain_dict(given, call, self._facts)
            for call in calls
            for given in (*call.positional, *call.keywords.values())
        )

    def _contain(self, facts: ProgramView, place: int, depth: int, after: bool) -> bool:
        """True if a statement that raises is evaluated before an offset of a file is reached, from every caller.

        after: or if one is evaluated after it, before anything trains.
        """
        module = self._module_of(facts)
        if module is None:
            return False
        line = facts.source.position(place)[0]
        top = self._in_cell(module.tree.body, line) if facts.path.endswith(NOTEBOOK) else module.tree.body
        whole = executed.around(top, line)
        raises = functools.partial(self._errors.raises, depth=_DEPTH)
        bodies = [top, *(each.body for each in whole)]
        for count, body in enumerate(bodies):
            if any(raises(node, _Context(module, whole[:count])) for node in executed.before(body, line)):
                return True
        context = _Context(module, whole)
        if any(raises(node, context, quietly=True) for node in executed.at(bodies[-1], line)):
            return True
        if self._errors.object_cannot_be_made(context):
            return True
        if whole and top is module.tree.body and _raises_above(context, raises):
            return True
        returns = self._outcome(executed.following(bodies[-1], line), context) if after else None
        return returns is False or (
            depth > 0 and any(self._no_call(each, depth, bool(returns)) for each in _functions_at(facts, place))
        )

    def _module_of(self, facts: ProgramView) -> ParsedModule | None:
        """Return the tree of a file; None if names may come from elsewhere: a part of a text, magics of a notebook."""
        path = facts.path
        if path.endswith(MARKDOWN) or (path.endswith(NOTEBOOK) and _BINDING_MAGIC.search(modules.text_of(path))):
            return None
        return modules.parsed(path, facts.source.text)

    def _in_cell(self, body: Sequence[ast.stmt], line: int) -> Sequence[ast.stmt]:
        """Return the statements of a notebook that run together with a line: those of its cell."""
        last = bisect.bisect_right(self._cells, line)
        first = self._cells[last - 1] if last else 0
        end = self._cells[last] if last < len(self._cells) else sys.maxsize
        return [each for each in body if first <= each.lineno < end]

    def _outcome(self, statements: Iterator[ast.stmt | None], context: _Context) -> bool | None:
        """Return False if one of the statements raises, before anything trains; True if the function then returns.

        None if it may train before.
        """
        for statement in statements:
            if statement is None:
                return None
            for node in executed.executed(statement):
                if self._errors.raises(node, context, _DEPTH, quietly=True):
                    return False
                if isinstance(node, ast.Call) and _may_train(node):
                    return None
            if any(isinstance(each, ast.Call) and _may_train(each) for each in ast.walk(statement)):
                return None
            exits = [each for each in executed.nested(statement) if isinstance(each, _EXITS)]
            if exits:
                return True if any(isinstance(each, ast.Return) for each in exits) else None
        return True

    def _no_call(self, scope: Scope, depth: int, returns: bool) -> bool:
        """True if all calls of a function, or of the class of a method, are known and in such code."""
        owner = scope.owner
        made = owner.method("__init__") if owner is not None and scope.name != "__init__" else None
        for each in (scope, made):
            calls = self._facts.all_calls(each) if each is not None else None
            after = returns and each is scope
            if calls and all(self._contain(self._facts.of(call), call.span[0], depth - 1, after) for call in calls):
                return True
        return False


class CertainErrors:
    """Statements and expressions of a project that raise whenever they are evaluated."""

    def __init__(self, facts: ProgramView) -> None:
        self._project = facts.project
        self._failing: dict[str, bool] = {}
        #: What is known of a node, with the parsed arguments in its function, how far calls are followed, and how.
        self._known: dict[tuple[ast.AST, object, int, bool], bool] = {}

    def raises(self, node: ast.AST, context: _Context, depth: int, quietly: bool = False) -> bool:
        """True if a node raises whenever it is evaluated. quietly: before a function that it calls trains."""
        key = node, context.given, depth, quietly
        if key not in self._known:
            self._known[key] = False  # while it is looked at: calls may be circular
            self._known[key] = self._raises(node, context, depth, quietly)
        return self._known[key]

    def _raises(self, node: ast.AST, context: _Context, depth: int, quietly: bool) -> bool:
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Name):
            return _is_unbound(node.id, context) or _is_bound_later(node, context)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self._import_fails(node, context.module, depth)
        if isinstance(node, ast.Attribute):
            return self._lacks_attribute(node, context)
        return isinstance(node, ast.Call) and self._call_fails(node, context, depth, quietly)

    def object_cannot_be_made(self, context: _Context) -> bool:
        """True in a method of a class whose `__init__` raises."""
        method = context.method
        if method is None or self._has_subclass(context.module, method[0]):
            return False
        made = self._method(context.module, method[0], "__init__")
        return made is not None and made[1] not in context.around and self._function_raises(*made, _DEPTH)

    # -- imports and attributes -----------------------------------------------------------------------

    def _import_fails(self, node: ast.Import | ast.ImportFrom, module: ParsedModule, depth: int) -> bool:
        if isinstance(node, ast.Import):
            return any(self._cannot_import(each.name, module, depth) for each in node.names)
        name = "." * node.level + (node.module or "")
        if self._cannot_import(name, module, depth):
            return True
        target = modules.find(name, module.path)
        return target is not None and any(_lacks(target, each.name) for each in node.names)

    def _cannot_import(self, name: str, module: ParsedModule, depth: int) -> bool:
        """True if a module of the project raises while it is imported, or a package of the project has none."""
        if modules.is_missing(name, module.path):
            return True
        target = modules.find(name, module.path)
        if target is None or target is module or not depth:
            return False
        if target.path not in self._failing:
            self._failing[target.path] = False  # while it is imported: imports may be circular
            self._failing[target.path] = self._body_raises(target.tree.body, _Context(target), depth - 1)
        return self._failing[target.path]

    def _lacks_attribute(self, node: ast.Attribute, context: _Context) -> bool:
        """True if nothing sets an attribute of `self`, of a module or class of the project, or of parsed arguments."""
        if not isinstance(node.value, ast.Name):
            return False
        name, method = node.value.id, context.method
        if method is not None and name == method[1]:
            return self._is_never_set(node.attr, context.module, method[0])
        if node.attr in context.module.attributes or hasattr(object, node.attr):
            return False
        options = _options(name, context)
        if options is not None:
            path = context.module.path
            return node.attr not in options and not self._project.attribute_set_elsewhere(path, node.attr)
        module = _module_named(name, context)
        if module is not None:
            return node.attr not in module.attributes and _lacks(module, node.attr)
        found = _defined(name, context)
        cls = found.around[-1] if found is not None else None
        if found is None or not isinstance(cls, ast.ClassDef) or hasattr(type, node.attr):
            return False
        return self._is_never_set(node.attr, found.module, cls)

    def _is_never_set(self, name: str, module: ParsedModule, cls: ast.ClassDef) -> bool:
        """True if nothing in the project may set an attribute of the objects of a class."""
        hierarchy = _hierarchy(module, cls)
        if hierarchy is None or hasattr(object, name) or name == "__dict__":
            return False
        if any(
            name in modules.bound_in(each) or name in home.attributes or not home.sets_all for home, each in hierarchy
        ):
            return False
        path = module.path
        return not self._has_subclass(module, cls) and not self._project.attribute_set_elsewhere(path, name)

    # -- calls ----------------------------------------------------------------------------------------

    def _call_fails(self, node: ast.Call, context: _Context, depth: int, quietly: bool) -> bool:
        """True if a call ends the program, does not fit the function's parameters, or runs one that raises."""
        if _path(node.func) in _ENDS:
            return True
        found = self._callee(node.func, context)
        if found is None:
            return _is_policy_call(node, context)
        target, is_bound = found
        function = target.around[-1]
        if isinstance(function, ast.ClassDef):
            made = self._method(target.module, function, "__init__")
            if made is None:
                return _is_unknown_field(node, function)
            return _misfits(node, made[1], True) or self._function_raises(*made, depth, quietly)
        target = target._replace(given=_given(node, function, is_bound, context))
        return _misfits(node, function, is_bound) or self._function_raises(target, function, depth, quietly)

    def _function_raises(self, home: _Context, function: FunctionNode, depth: int, quietly: bool = False) -> bool:
        """True if a function raises, whatever its arguments are."""
        if not depth or not _is_plain(function) or isinstance(function, ast.AsyncFunctionDef):
            return False
        if any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(function)):
            return False
        return self._body_raises(function.body, home, depth - 1, quietly)

    def _body_raises(self, body: Sequence[ast.stmt], context: _Context, depth: int, quietly: bool = False) -> bool:
        """True if a block raises before it may be left in another way; quietly: and before it may train."""
        for statement in body:
            if any(self.raises(node, context, depth, quietly) for node in executed.executed(statement)):
                return True
            if quietly and any(isinstance(each, ast.Call) and _may_train(each) for each in ast.walk(statement)):
                return False
            if any(isinstance(each, _EXITS) for each in executed.nested(statement)):
                return False
        return False

    def _callee(self, func: ast.expr, context: _Context) -> tuple[_Context, bool] | None:
        """Return the function or class of the project that a call runs, and True if it gets the object; or None."""
        if isinstance(func, ast.Name):
            found = _defined(func.id, context)
            return (found, False) if found is not None else None
        if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)):
            return None
        method = context.method
        if method is not None and func.value.id == method[1]:
            if self._has_subclass(context.module, method[0]):
                return None
            made = self._method(context.module, method[0], func.attr)
            return (made[0], not _is_static(made[1])) if made is not None else None
        module = _module_named(func.value.id, context)
        found = _in_module(func.attr, module) if module is not None else None
        return (found, False) if found is not None else None

    def _method(self, module: ParsedModule, cls: ast.ClassDef, name: str) -> tuple[_Context, FunctionNode] | None:
        """Return the method that a class has, its own or from a known base; None if it is unknown."""
        own = modules.bound_in(cls).get(name)
        if own is None:
            bases = (_hierarchy(module, cls) or ())[1:]
            return next(
                (self._method(home, each, name) for home, each in bases if name in modules.bound_in(each)), None
            )
        is_plain = not cls.decorator_list and not cls.keywords and "__new__" not in modules.bound_in(cls)
        is_replaced = len(own) > 1 or name in module.attributes
        if is_replaced or not is_plain or any(_OTHER_CONSTRUCTORS.search(ast.unparse(each)) for each in cls.bases):
            return None
        if not isinstance(own[0], FunctionNode):
            return None
        return _Context(module, executed.around(module.tree.body, own[0].body[0].lineno)), own[0]

    def _has_subclass(self, module: ParsedModule, cls: ast.ClassDef) -> bool:
        """True if a class may have subclasses, which may set its attributes and replace its methods."""
        inside = any(
            isinstance(each, ast.ClassDef)
            and any(cls.name in re.findall(r"\w+", ast.unparse(base)) for base in each.bases)
            for each in ast.walk(module.tree)
        )
        return inside or self._project.subclassed_elsewhere(module.path, cls.name)


# -- places -------------------------------------------------------------------------------------------


def _functions_at(facts: ProgramView, place: int) -> list[Scope]:
    """Return the functions around an offset of a file, outermost first."""
    found: list[Scope] = []
    for scope in facts.scopes:
        if scope.kind == "function" and scope.parsed:
            start, end = scope.chunk.span(scope.node)
            if start <= place < end:
                found.append(scope)
    return found


def _raises_above(context: _Context, raises: Callable[[ast.AST, _Context], bool]) -> bool:
    """True if the module raises before any of its functions may be called."""
    module = context.module
    names = {each.name for each in module.tree.body if isinstance(each, DefinitionNode)}
    for statement in module.tree.body:
        used = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
        if not isinstance(statement, FunctionNode) and used & names:
            return False
        if any(raises(node, _Context(module)) for node in executed.executed(statement)):
            return True
    return False


def _is_plain_dict(node: cst.Attribute, at: Record, facts: ProgramView) -> bool:
    """True if an attribute is read of a dict that is loaded from a file: not with `object_hook=`, for an object."""
    if hasattr(dict, node.attr.value):
        return False
    loaded = [each.atom for each in facts.evaluate(node.value, at)]
    return bool(loaded) and all(
        isinstance(each, Object)
        and each.kind == "plain_dict"
        and each.call is not None
        and not each.call.keywords
        and not each.call.starred
        for each in loaded
    )


# -- names --------------------------------------------------------------------------------------------


def _is_unbound(name: str, context: _Context) -> bool:
    module = context.module
    if name in _ALWAYS_BOUND or name in module.bound or not module.is_whole:
        return False
    if module.path.endswith(NOTEBOOK) and name in sys.stdlib_module_names:  # imported by hand, in another cell
        return False
    return not any(name in modules.bound_in(each) for each in context.around) and modules.is_program(module)


def _is_bound_later(node: ast.Name, context: _Context) -> bool:
    """True if a function reads one of its variables before the only assignments to it: an UnboundLocalError."""
    function = context.around[-1] if context.around else None
    if not isinstance(function, FunctionNode) or not isinstance(node.ctx, ast.Load):
        return False
    bound = modules.bound_in(function).get(node.id, [])
    assigned = [each for each in bound if isinstance(each, ast.Assign) and _assigns(each, node.id)]
    if not assigned or len(assigned) < len(bound):
        return False
    first = min(assigned, key=lambda each: each.lineno)
    if first.lineno <= node.lineno and not any(each is node for each in ast.walk(first.value)):
        return False
    return not any(
        isinstance(each, (ast.Global, ast.Nonlocal)) and node.id in each.names for each in ast.walk(function)
    )


def _assigns(statement: ast.Assign, name: str) -> bool:
    """True if a statement binds a name by its targets, not in a comprehension, a lambda or by `:=`."""
    inner = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr)
    return not any(isinstance(each, inner) for each in ast.walk(statement)) and any(
        isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store)
        for target in statement.targets
        for each in ast.walk(target)
    )


def _lacks(module: ParsedModule, name: str) -> bool:
    """True if a module has no such name, and a package no such submodule."""
    return (
        module.is_whole
        and "__getattr__" not in module.bound
        and name != "*"
        and name not in module.bound
        and not (name.startswith("__") and name.endswith("__"))
        and not modules.has_submodule(module, name)
    )


def _defined(name: str, context: _Context) -> _Context | None:
    """Return the function or class that a name stands for, in the functions around or in the module."""
    for place in range(len(context.around), 0, -1):
        scope = context.around[place - 1]
        bound = modules.bound_in(scope).get(name)
        if bound is not None and not (isinstance(scope, ast.ClassDef) and place < len(context.around)):
            return _one(name, bound, _Context(context.module, context.around[:place]), _DEPTH)
    return _in_module(name, context.module)


def _in_module(name: str, module: ParsedModule, depth: int = _DEPTH) -> _Context | None:
    bound = module.bound.get(name)
    if bound is None or not depth or "*" in module.bound:
        return None
    return _one(name, bound, _Context(module), depth)


def _one(name: str, bound: list[ast.AST], home: _Context, depth: int) -> _Context | None:
    """Return the function or class that the only binding of a name defines, or imports."""
    if len(bound) != 1:
        return None
    (node,) = bound
    if isinstance(node, DefinitionNode):
        return _Context(home.module, (*home.around, node))
    if isinstance(node, ast.ImportFrom):
        target = modules.find("." * node.level + (node.module or ""), home.module.path)
        return _in_module(_imported(node, name).name, target, depth - 1) if target is not None else None
    return None


def _imported(node: ast.Import | ast.ImportFrom, name: str) -> ast.alias:
    """Return the part of an import that binds a name."""
    return next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)


def _module_named(name: str, context: _Context) -> ParsedModule | None:
    """Return the module of the project that a name stands for."""
    module = context.module
    bound = module.bound.get(name, ())
    if len(bound) != 1 or any(name in modules.bound_in(each) for each in context.around):
        return None
    (node,) = bound
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return None
    alias = _imported(node, name)
    if isinstance(node, ast.Import):
        return modules.find(alias.name, module.path) if alias.asname or "." not in alias.name else None
    package = "." * node.level + (node.module or "")
    home = modules.find(package, module.path)
    if home is not None and alias.name in home.bound:
        return None
    return modules.find(f"{package}{'' if package.endswith('.') else '.'}{alias.name}", module.path)


def _options(name: str, context: _Context) -> frozenset[str] | None:
    """Return the options that a name has, if it stands for parsed arguments."""
    found = dict(context.given).get(name)
    if found is None:
        return namespaces.options(name, context.module, context.around)
    return found if len(modules.bound_in(context.around[-1])[name]) == 1 else None


def _given(
    call: ast.Call, function: FunctionNode, is_bound: bool, context: _Context
) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the parameters of a function that get parsed arguments by a call, and their options."""
    if any(isinstance(each, ast.Starred) for each in call.args):
        return ()
    parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)][is_bound:]
    pairs = [*zip(parameters, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
    return tuple(
        (name, options)
        for name, value in pairs
        if name is not None and isinstance(value, ast.Name)
        if (options := _options(value.id, context)) is not None
    )


def _path(node: ast.AST) -> str:
    """Return a dotted name; empty for another expression."""
    if isinstance(node, ast.Attribute):
        base = _path(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


# -- classes and signatures ---------------------------------------------------------------------------


def _hierarchy(
    module: ParsedModule, cls: ast.ClassDef, depth: int = 5
) -> list[tuple[ParsedModule, ast.ClassDef]] | None:
    """Return a class with all its bases; None if one is unknown."""
    if not depth or any(_decorator(each) not in _DATACLASSES for each in cls.decorator_list):
        return None
    if any(_path(each.value).rpartition(".")[2] != "ABCMeta" for each in cls.keywords):
        return None
    found = [(module, cls)]
    for base in cls.bases:
        if _path(base) in _PLAIN_BASES:
            continue
        target = _defined(base.id, _Context(module)) if isinstance(base, ast.Name) else None
        inner = target.around[-1] if target is not None else None
        if target is None or not isinstance(inner, ast.ClassDef):
            return None
        above = _hierarchy(target.module, inner, depth - 1)
        if above is None:
            return None
        found += above
    return found


def _decorator(node: ast.expr) -> str:
    return _path(node.func if isinstance(node, ast.Call) else node)


def _is_static(function: FunctionNode) -> bool:
    return any(_path(each) == "staticmethod" for each in function.decorator_list)


def _is_plain(function: FunctionNode) -> bool:
    """True if the decorators of a function leave its signature as it is."""
    return all(_decorator(each).rpartition(".")[2] in _SAME_SIGNATURE for each in function.decorator_list)


def _may_train(call: ast.Call) -> bool:
    """True if a call may train, by its name; that of an unnamed function may."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else _path(call.func)
    return not name or _MAY_TRAIN.search(name) is not None


def _is_unknown_field(call: ast.Call, cls: ast.ClassDef) -> bool:
    """True if a call passes what is no field of a dataclass."""
    if cls.bases or not cls.decorator_list or "__init__" in modules.bound_in(cls):
        return False
    fields = {_path(each.target) for each in cls.body if isinstance(each, ast.AnnAssign)}
    passed = {each.arg for each in call.keywords if each.arg is not None}
    return bool(passed - fields) and all(_decorator(each) in _DATACLASSES for each in cls.decorator_list)


def _is_policy_call(call: ast.Call, context: _Context) -> bool:
    """True if a wrap policy of FSDP is called without the module: `functools.partial` is missing."""
    name = _path(call.func)
    scopes = (context.module.bound, *map(modules.bound_in, context.around)) if name in _WRAP_POLICIES else ()
    imported = [each for bound in scopes for each in bound.get(name, ())]
    return (
        bool(imported)
        and all(isinstance(each, ast.ImportFrom) and (each.module or "").startswith("torch.") for each in imported)
        and len(call.args) < len(_OF_WRAP_POLICIES)
        and not any(isinstance(each, ast.Starred) for each in call.args)
        and all(each.arg not in (None, *_OF_WRAP_POLICIES) for each in call.keywords)
    )


def _misfits(call: ast.Call, function: FunctionNode | ast.ClassDef, is_bound: bool) -> bool:
    """True if a function does not take the arguments of a call, or needs more."""
    if isinstance(function, ast.ClassDef) or not _is_plain(function):
        return False
    given = function.args
    plain = [each.arg for each in (*given.posonlyargs, *given.args)]
    if is_bound and not plain:
        return False
    parameters = plain[1:] if is_bound else plain
    named = {each.arg for each in call.keywords if each.arg is not None}
    positional = [each for each in call.args if not isinstance(each, ast.Starred)]
    if given.vararg is None and len(positional) > len(parameters):
        return True
    if given.kwarg is None and named - {each.arg for each in (*given.args, *given.kwonlyargs)}:
        return True
    if len(positional) < len(call.args) or any(each.arg is None for each in call.keywords):
        return False
    if named & set(parameters[: len(positional)]):
        return True
    required = parameters[: max(len(plain) - len(given.defaults) - is_bound, 0)]
    defaults = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return bool({*required[len(positional) :], *(each.arg for each, default in defaults if default is None)} - named)
