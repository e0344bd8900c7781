"""Regions: the contexts around code (`with` items, decorators), each with dtype, device and path condition."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program import api_names, keywords
from mpguard.lint.facts.program.dtypes import AnyDtype, PossibleDtypes, guards_of
from mpguard.lint.facts.program.lattice import (
    UNKNOWN,
    Alternative,
    Constant,
    DtypeValue,
    Function,
    Method,
    Object,
    Ref,
)
from mpguard.lint.facts.syntax.nodes import constant, dotted, text_of
from mpguard.lint.facts.syntax.path_condition import ALWAYS, Fixed, Flag, PathCondition, compatible, negated
from mpguard.lint.facts.syntax.records import Call, Record, Scope, With
from mpguard.lint.source.libcst_internals import node_code
from mpguard.lint.source.strip_comments import stripped
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

_REGIONS = frozenset({"autocast", "no_grad", "fp8_autocast", "accelerator_autocast"})
#: The dtype of an autocast that names none.
_DEFAULTS = {"cuda": Dtype.FP16, "cpu": Dtype.BF16}
#: Regions of callers that are followed.
_MAX_REGIONS = 32
#: Names of unknown contexts and decorators that may disable autocast.
_MAY_DISABLE = lazy_pattern(r"(?i)autocast|amp(?!le)|precision|float|fp32|custom_fwd|custom_bwd")


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """One context that is entered.

    kind: `autocast`, `no_grad`, `fp8_autocast`, `accelerator_autocast`, or "" if it is unknown. guard: the path
    condition under which it is active. dtypes: of an autocast, with None for unknown ones. device: "cuda", "cpu", or
    None if it is unknown.
    """

    kind: str
    guard: PathCondition
    call: Call | None
    facts: ProgramView
    dtypes: PossibleDtypes = ()
    device: str | None = None

    def may_be(self, dtype: AnyDtype | str) -> list[PathCondition]:
        """Return the path conditions under which the region definitely has that dtype."""
        return guards_of(dtype, self.dtypes, self.guard)


def enabled_argument(call: Call, path: str) -> cst.BaseExpression | None:
    """Return the `enabled` argument of an autocast or a scaler, whose position differs in the deprecated forms."""
    if path.startswith("transformer_engine."):
        return call.argument(0, "enabled")
    legacy = path.startswith(("torch.cuda.amp.", "torch.cpu.amp."))
    place = (0 if legacy else 2) if path in api_names.AUTOCASTS else (4 if legacy else 5)
    return call.argument(place, "enabled")


class Regions:
    """The regions of one file."""

    def __init__(self, facts: ProgramView) -> None:
        self.facts = facts
        self._regions: dict[With, tuple[Region, ...]] = {}
        self._around: dict[tuple[Scope, tuple[With, ...]], tuple[Region, ...]] = {}
        self._active = 0
        self._outer: dict[tuple[Scope, int], list[tuple[Region, PathCondition]]] = {}

    def around(self, record: Record) -> tuple[Region, ...]:
        """Return the contexts around a record, outermost first: decorators of its functions, and `with` items."""
        place = (record.scope, record.withs)
        if place in self._around:
            return self._around[place]
        found: list[Region] = []
        for scope in reversed(list(record.scope.within())):
            for decorator in scope.decorators:
                found += self._decorated(decorator, scope)
        for item in record.withs:
            found += self.entered(item)
        if not self._active:  # while a context is being evaluated its regions are unknown
            self._around[place] = tuple(found)
        return tuple(found)

    def autocasts(self, record: Record, depth: int = 3) -> list[tuple[Region, PathCondition]]:
        """Return the autocast regions that are active at a record, each with its path condition.

        An inner region replaces an outer one, even if it is disabled; a context that may be an autocast makes the
        result unknown. A function without regions of its own has those of its callers.
        """
        scopes = [scope for scope in record.scope.within() if scope.kind == "function"]
        around = [region for region in self.around(record) if region.kind == "autocast"]
        found: list[tuple[Region, PathCondition]] = []
        for place, region in enumerate(around):
            guard = region.guard.joined(record.guard)
            inner = (other.guard for other in around[place + 1 :])
            if guard.possible and not any(not g.possible or compatible(g, guard) for g in inner):
                found.append((region, guard))
        unclear = False
        for item in record.withs:
            kinds = {region.kind for region in self.entered(item)}
            if "autocast" in kinds or "" in kinds:
                unclear = "autocast" not in kinds and (unclear or bool(_MAY_DISABLE.search(text_of(item.expr))))
        decorated = any(_MAY_DISABLE.search(text_of(each)) for scope in scopes for each in scope.decorators)
        if unclear or around or decorated or depth <= 0 or record.scope.kind != "function":
            return found if not unclear else []
        return [
            (region, both)
            for region, guard in self._of_callers(record.scope, depth)
            if (both := guard.joined(record.guard)).possible
        ]

    def _of_callers(self, scope: Scope, depth: int) -> list[tuple[Region, PathCondition]]:
        """Return the autocast regions that are active at the calls of a function; of many calls, at the first ones."""
        if (scope, depth) not in self._outer:
            self._outer[scope, depth] = []
            found: list[tuple[Region, PathCondition]] = []
            for call in self.facts.callers(scope):
                found += self.facts.of(call).part(Regions).autocasts(call, depth - 1)
                if len(found) > _MAX_REGIONS:
                    break
            self._outer[scope, depth] = found
        return self._outer[scope, depth]

    def _decorated(self, decorator: cst.BaseExpression, scope: Scope) -> Iterable[Region]:
        outer = scope.parent or self.facts.module
        for each in self.facts.values.evaluate(decorator, outer, scope.order):
            if isinstance(each.atom, Object) and each.atom.kind in _REGIONS:
                yield self._region(each)
            elif isinstance(each.atom, Ref) and each.atom.path in api_names.NO_GRAD:
                yield Region("no_grad", each.guard, None, self.facts)
            elif isinstance(each.atom, Function):
                yield from self._of_own_decorator(each.atom)

    def _of_own_decorator(self, decorator: Function) -> Iterable[Region]:
        """Yield the `no_grad` regions in which the wrapper that a decorator of the project returns calls the function.

        def frozen(function):
            def wrapped(*args):
                with torch.no_grad():
                    return function(*args)
            return wrapped
        """
        scope = decorator.scope
        taken = {param.name for param in scope.params}
        for inner in scope.children:
            for call in inner.calls:
                if call.path in taken:
                    around = self.facts.of(call).part(Regions).around(call)
                    yield from (each for each in around if each.kind == "no_grad")

    def entered(self, item: With) -> tuple[Region, ...]:
        """Return the regions that a `with` item enters."""
        if item not in self._regions:
            self._regions[item] = ()
            self._active += 1
            found: list[Region] = []
            for each in self.facts.values.evaluate(item.expr, item.scope, item.order):
                atom = each.atom
                if (
                    isinstance(atom, Object)
                    and atom.kind == "context"
                    and atom.cls is not None
                    and atom.facts is not None
                ):
                    for given in atom.cls.returns:
                        facts = self.facts.of(given)
                        for own in facts.part(Regions).around(given):
                            path = facts.called_path(own.call) if own.call is not None else ""
                            region = self._pass_arguments(own, item, path)
                            found.append(dataclasses.replace(region, guard=region.guard.joined(item.guard, each.guard)))
                elif isinstance(atom, Object) and atom.kind in _REGIONS:
                    region = self._pass_arguments(self._region(each), item, atom.path)
                    found.append(dataclasses.replace(region, guard=region.guard.joined(item.guard)))
                elif atom is UNKNOWN or isinstance(atom, (Ref, Method)):
                    found.append(Region("", each.guard.joined(item.guard), None, self.facts))
            possible = [region for region in found if region.guard.possible]  # else the one of `enabled=False`
            self._regions[item] = tuple(possible or found)
            self._active -= 1
        return self._regions[item]

    def _region(self, each: Alternative) -> Region:
        assert isinstance(each.atom, Object)
        atom, guard = each.atom, each.guard
        call = atom.call
        if call is None:
            return Region(atom.kind, guard, None, self.facts)
        facts = self.facts.of(call)
        regions = facts.part(Regions)
        if atom.kind == "fp8_autocast":
            return Region(atom.kind, guard.joined(regions.enabled(call, atom.path)), call, facts)
        if atom.kind != "autocast":
            return Region(atom.kind, guard, call, facts)
        return dataclasses.replace(
            regions.autocast(call, atom.path), guard=guard.joined(regions.enabled(call, atom.path))
        )

    def _pass_arguments(self, region: Region, item: With, path: str) -> Region:
        """Return the region of a wrapper with the arguments that an item passes through it.

        Such a wrapper is `def autocast(**kwargs): return torch.autocast("cuda", **kwargs)`. The region is returned
        unchanged if the arguments cannot be derived.
        """
        inner = region.call
        outer = self.facts.index.call_of.get(item.expr) if isinstance(item.expr, cst.Call) else None
        if region.kind != "autocast" or inner is None or not inner.starred or outer is None or outer is inner:
            return region
        params = {param.name: param.kind for param in inner.scope.params}
        starred = [dotted(arg.value) for arg in inner.node.args if arg.star]
        if outer.starred or outer.positional or any(params.get(name) not in ("star", "double") for name in starred):
            return region
        if any(binding.kind != "param" for name in starred for binding in inner.scope.bindings.get(name, ())):
            return region
        passed = {name: value for name, value in outer.keywords.items() if name not in params}
        found = region.facts.part(Regions).autocast(inner, path, complete=True)
        dtypes = self.facts.dtypes(passed["dtype"], outer) if "dtype" in passed else found.dtypes
        enabled = ALWAYS.given(self.facts.condition(passed["enabled"], item.scope)) if "enabled" in passed else ALWAYS
        return dataclasses.replace(found, dtypes=dtypes, guard=region.guard.joined(enabled))

    def enabled(self, call: Call, path: str) -> PathCondition:
        """Return the path condition that `enabled=` of an autocast or a scaler stands for.

        It is an impossible one for `False`, and for a scaler whose arguments come from a mapping that may hold it.
        """
        given = enabled_argument(call, path)
        if given is None:
            off = path.endswith("GradScaler") and self._may_get_false(call)
            return PathCondition({Fixed(False)}) if off else ALWAYS
        known = self._truth(given, call)
        if known is None:
            return ALWAYS.given(self.facts.condition(given, call.scope))
        return ALWAYS if known else PathCondition({Fixed(False)})

    def _may_get_false(self, call: Call) -> bool:
        """True if `*args` or `**kwargs` of a call may hold an `enabled` that is not True."""
        if not call.starred:
            return False
        ways = keywords.passed(call, self.facts)
        return ways is None or any(
            each.atom != Constant(True) for way in ways if "enabled" in way for each in way["enabled"]()
        )

    def _truth(self, node: cst.BaseExpression, call: Call) -> bool | None:
        """Return what an expression of constants and their names is at a call: `not USE_BF16`; None if not known."""
        if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
            inner = self._truth(node.expression, call)
            return None if inner is None else not inner
        if isinstance(node, cst.BooleanOperation):
            decides = isinstance(node.operator, cst.Or)
            sides = {self._truth(node.left, call), self._truth(node.right, call)}
            return decides if decides in sides else None if None in sides else not decides
        if isinstance(node, cst.Comparison):
            return self.facts.values.truth(node, call.scope, call.order)
        known = set(self.facts.constants(node, call))
        return True if known == {True} else False if known == {False} else None

    def _dtypes_of_parameter(self, given: cst.BaseExpression, call: Call) -> PossibleDtypes:
        """Return FP16, if a parameter gives the dtype, and FP16 is its default or what its code compares it with.

        And else an unknown one. That is a parameter of the function, or one that `__init__` stores in an attribute. A
        default that is neither FP16 nor FP32 is what the code is for. Nothing in other cases.
        """
        scope, name = self._parameter(dotted(given), call)
        if scope is None or scope.parent is None:
            return ()
        default = next((param.default for param in scope.params if param.name == name), None)
        made = [each.atom for each in self.facts.values.evaluate(default, scope.parent, scope.order)] if default else []
        is_default = bool(made) and all(atom == DtypeValue(Dtype.FP16) for atom in made)
        is_open = all(atom in (DtypeValue(Dtype.FP32), Constant(None)) for atom in made)
        if not is_default and not (is_open and _is_compared_with_float16(dotted(given), name, scope)):
            return ()
        kept = Flag(name, "float16")
        return ((ALWAYS.given(kept), Dtype.FP16), (ALWAYS.given(negated(kept)), None))

    def _parameter(self, name: str, call: Call) -> tuple[Scope | None, str]:
        """Return the function and the name of the parameter that gives an argument of a call."""
        scope = call.scope
        if name.startswith("self.") and scope.owner is not None:
            bound = self.facts.attributes(scope.owner).get(name[5:], [])
            if len(bound) != 1:
                return None, ""
            name, scope = dotted(bound[0].value), bound[0].scope
        return (scope, name) if any(param.name == name for param in scope.params) else (None, "")

    def _default_dtypes(self, guard: PathCondition, device: str | None, call: Call) -> PossibleDtypes:
        """Return the dtype of an autocast that names none: of a device that is unknown, that of a GPU if it is one."""
        if device is not None:
            return ((guard, _DEFAULTS.get(device)),)
        given = call.argument(0, "device_type")
        if given is None or call.starred:
            return ((guard, None),)
        # The same flag as that of `device.type == "cuda"`.
        on_gpu = Flag(dotted(given).rsplit(".", 1)[-1] or text_of(given), "cuda")
        return ((guard.given(on_gpu), Dtype.FP16), (guard.given(negated(on_gpu)), None))

    def off_by_default(self, region: Region) -> bool:
        """True if `enabled` of the region is a parameter whose default is False, or an option that callers set so."""
        call = region.call
        given = enabled_argument(call, region.facts.called_path(call)) if call is not None else None
        if call is None or given is None:
            return False
        params = call.scope.params if isinstance(given, cst.Name) else []
        off = any(p.name == dotted(given) and constant(p.default) == (False,) for p in params)
        return off or self._set_off(dotted(given), call)

    def _set_off(self, option: str, call: Call, depth: int = 3) -> bool:
        """True if an attribute of an object that all callers pass is set to False: `opt.fp16 = False; Run(opt)`."""
        facts = self.facts.of(call)
        name, _, attribute = option.rpartition(".")
        scope, param = facts.part(Regions)._parameter(name, call) if name else (None, "")
        if scope is None or not depth:
            return False
        callers = facts.callers(scope)
        return bool(callers) and all(
            self._is_off(facts.values.given(each, scope, param), attribute, each, depth) for each in callers
        )

    def _is_off(self, given: cst.BaseExpression | None, attribute: str, call: Call, depth: int) -> bool:
        """True if an attribute of an object that a call passes is False there."""
        if given is None or not dotted(given):
            return False
        option = f"{dotted(given)}.{attribute}"
        found = self.facts.of(call).values.lookup(option, call.scope, call.order)
        off = bool(found) and all(each.atom == Constant(False) and not each.guard - call.guard for each in found)
        return off or self._set_off(option, call, depth - 1)

    def switched_off(self, region: Region, program: Collection[Scope]) -> bool:
        """True if `enabled` of the region is a parameter that no call in a program's files sets to anything but False.

        It is one of a function, or one that `__init__` stores in an attribute, with the default False. Functions in
        between may pass it on in `**kwargs`, so the keyword alone shows the calls.
        """
        param = self._switch(region)
        if param is None:
            return False
        scope, name, enabled = param
        direct = [(each, region.facts.values.given(each, scope, name)) for each in region.facts.callers(scope)]
        files = dict.fromkeys(map(self.facts.of, sorted(program, key=lambda each: each.chunk.source.path)))
        calls = (each for its in files for calls in its.calls.values() for each in calls)
        passed = [*direct, *((each, each.keywords[name]) for each in calls if name in each.keywords)]
        values = [constant(value) for call, value in passed if value is not None and not _passes_on(call, value, name)]
        if not values:
            is_named = enabled.rpartition(".")[2] == name  # the attribute that keeps it, too
            return is_named and bool(direct) and not self._may_be_passed(name, region.facts, files)
        return all(value == (False,) for value in values)

    def _may_be_passed(self, name: str, facts: ProgramView, files: Iterable[ProgramView]) -> bool:
        """True if something may give a parameter of a file's function a value that no call in a program's files shows.

        That is code in the folder of the program, a text or config of the project, a user of the library, or the file
        itself by an attribute or a dict.
        """
        sets = rf"(?<!\bself)\.{name}\s*=(?!=)|[\"']{name}[\"']|\b{name}\s*=(?!=|\s*(?:False|{name})\b)"
        return (
            facts.project.is_library(facts.path)
            or re.search(sets, stripped(facts.file_text)) is not None
            or facts.project.mentioned_beside(facts.path, name, [each.path for each in files])
            or facts.project.asks_for(facts.path, name)
        )

    def _switch(self, region: Region) -> tuple[Scope, str, str] | None:
        """Return the function and the name of the parameter that `enabled` of a region is, if its default is False.

        With the code of `enabled`, which may be the attribute that keeps the parameter.
        """
        call = region.call
        given = enabled_argument(call, region.facts.called_path(call)) if call is not None else None
        if call is None or given is None:
            return None
        scope, name = region.facts.part(Regions)._parameter(dotted(given), call)
        if scope is None:
            return None
        off = any(param.name == name and constant(param.default) == (False,) for param in scope.params)
        return (scope, name, dotted(given)) if off else None

    def autocast(self, call: Call, path: str, complete: bool = False) -> Region:
        """Return the region that a call of an autocast creates: its device and dtype, with torch's defaults.

        complete: the arguments in `**kwargs` are known, and contain no dtype.
        """
        legacy = path.startswith(("torch.cuda.amp.", "torch.cpu.amp."))
        if legacy:
            device: str | None = path.split(".")[1]
            devices = [(ALWAYS, device)]
        else:
            devices = [
                (each.guard, str(each.atom.value).split(":", 1)[0] if isinstance(each.atom, Constant) else None)
                for each in self.facts.evaluate(call.argument(int(call.name == "partial"), "device_type"), call)
            ]
            device = devices[0][1] if len({name for _, name in devices}) == 1 else None
        given = call.argument(1, "dtype")
        if given is not None and constant(given) != (None,):
            dtypes = _as_tested(given, self.facts.dtypes(given, call))
            if {dtype for _, dtype in dtypes} == {None}:
                dtypes = self._dtypes_of_parameter(given, call) or dtypes
        elif (
            (call.starred and not complete)
            or "set_autocast_gpu_dtype" in self.facts.calls
            or "set_autocast_dtype" in self.facts.calls
        ):
            dtypes = ((ALWAYS, None),)
        else:
            dtypes = tuple(each for guard, name in devices for each in self._default_dtypes(guard, name, call))
        return Region("autocast", ALWAYS, call, self.facts, dtypes, device)


def _as_tested(node: cst.CSTNode, dtypes: PossibleDtypes) -> PossibleDtypes:
    """Return the dtypes that conditions choose for a name, each under what a test of the name for it means as well."""
    name = dotted(node).rpartition(".")[2]
    if not name or not any(guard for guard, _ in dtypes):
        return dtypes
    return tuple(
        (guard if dtype is None else guard.given(Flag(name, dtype.torch_name)), dtype) for guard, dtype in dtypes
    )


def _passes_on(call: Call, value: cst.BaseExpression, name: str) -> bool:
    """True if an argument is the parameter of the same name of the function that contains the call."""
    return dotted(value) == name and any(param.name == name for param in call.scope.params)


def _is_compared_with_float16(given: str, name: str, scope: Scope) -> bool:
    """True if the code asks whether a parameter of a function is FP16, other than to raise.

    That is the function, and the methods that call it; of an attribute all methods. given: what an autocast gets.
    """
    places = [scope]
    if scope.owner is not None:
        passing = (each for each in scope.owner.children if any(call.name == scope.name for call in each.calls))
        places = list(scope.owner.children) if given.startswith("self.") else [scope, *passing]
    asked = rf"(?<![\w.])(?:self\.)?{re.escape(name)}[ \t]*(?:==|is)[ \t]*torch\.(?:float16|half)\b"
    refuses = re.compile(rf"\bif[ \t]+{asked}[ \t]*:\s*raise\b")
    return any(re.search(asked, refuses.sub("", stripped(node_code(each.node)))) for each in places)
