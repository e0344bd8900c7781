"""Options and constants by which a script selects its precision: argparse, click, dataclass fields, plain names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.dtypes import AnyDtype, only_dtype
from mpguard.lint.facts.program.lattice import Constant, DtypeValue
from mpguard.lint.facts.program.mappings import is_changed
from mpguard.lint.facts.program.option_values import (
    ADD_OPTION,
    destination,
    literal_choices,
    option_defaults,
    option_names,
)
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import Flag, Not, PathCondition, holds
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.events import Event
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: Names of options that select the compute dtype of a run.
_DTYPE = lazy_pattern(
    r"(?i)(?:(?:amp|autocast|compute|mixed|mp|train|training|torch|model)_?)?(?:dtype|precision|mixed_precision)$"
)
#: A flag about precision: a branch under it may be the one for the other dtype.
_PRECISION_FLAG = lazy_pattern(r"(?i)dtype|fp16|float16|half|precision|bf16|bfloat16")


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """An option or constant, and its default.

    name: without dashes, as in `args.dtype`. dtype: of the default, None if it is none or unknown. constant: a name in
    the file that holds a torch dtype and can be used in its place.
    """

    name: str
    record: Record
    dtype: AnyDtype | None
    constant: bool = False
    span: tuple[int, int] = (0, 0)

    @property
    def guard(self) -> PathCondition:
        """The path condition under which it is defined."""
        return self.record.guard


def dtype_options(facts: BehaviourView) -> list[Option]:
    """Return the options and constants of a file that select its compute dtype."""
    return [option for option in _options(facts) if _DTYPE.fullmatch(option.name)]


def forgotten_dtypes(facts: BehaviourView) -> dict[Call, Option]:
    """Return the CUDA autocasts without a dtype (so FP16) in a file whose option or constant selects BF16.

    Each is returned with that option. In the backward of an `autograd.Function`, which has to use the dtype of the
    forward, the other autocasts of the file and the launch configs count as options.
    """
    found = [event.call for event in facts.events("autocast") if _default_fp16(event, facts)]
    options = dtype_options(facts) if found else []
    if options:
        return dict.fromkeys(found, options[0]) if all(each.dtype is Dtype.BF16 for each in options) else {}
    backwards = [call for call in found if _in_backward(call, facts)]
    region = _only_bfloat16(facts) if backwards else None
    return dict.fromkeys(backwards, region) if region is not None else {}


def is_default(guard: PathCondition, facts: BehaviourView) -> bool:
    """True if a path condition, which tests options, holds where none of them is given: by their defaults.

    False if a script, config or text of the project passes one of them. They are those of a file, of what it imports,
    and of its users if all are known.
    """
    values: dict[str, object] = {}
    places = [facts, *(facts.project.users_of("", facts.path) or ())]
    for name in guard.flags():
        found = {default for each in places for default in option_defaults(name, each)}
        if len(found) != 1 or (default := found.pop()) is None or facts.project.passes_option(facts.path, name):
            return False
        values[name] = default[0]
    return bool(values) and holds(guard, values)


def can_be_chosen(guard: PathCondition, program: Iterable[Scope]) -> bool:
    """Return False if a path condition asks for a value of an option that its `choices` in the program lack.

    Or if it excludes all of them.
    """
    wanted = {
        each.name.rsplit(".", 1)[-1]: each.equals
        for each in guard
        if isinstance(each, Flag) and isinstance(each.equals, str)
    }
    excluded: dict[str, set[object]] = {}
    for each in guard:
        if isinstance(each, Not) and isinstance(each.inner, Flag):
            excluded.setdefault(each.inner.name.rsplit(".", 1)[-1], set()).add(each.inner.equals)
    if not wanted and not excluded:
        return True
    offered: dict[str, set[str]] = {}
    for scope in program:
        for call in scope.calls:
            if call.name == "add_argument" and (found := literal_choices(call)) is not None:
                offered.setdefault(found[0], set()).update(found[1])
    is_left = all(not values or values - excluded.get(name, set()) for name, values in offered.items())
    return is_left and all(value in offered.get(name, {value}) for name, value in wanted.items())


def _in_backward(call: Call, facts: BehaviourView) -> bool:
    """True if a call is in the `backward` of an `autograd.Function`."""
    owner = call.scope.owner
    return call.scope.name == "backward" and owner is not None and "torch.autograd.Function" in facts.ancestry(owner)


def _only_bfloat16(facts: BehaviourView) -> Option | None:
    """Return the autocast of the file that is BF16, or the launch config, if no other is of another dtype."""
    regions = [event for event in facts.events("autocast") if event.call.argument(1, "dtype") is not None]
    if regions:
        only = all(only_dtype(each.dtypes) is Dtype.BF16 for each in regions)
        call = regions[0].call
        return Option(facts.short(call.node), call, Dtype.BF16, False, call.span) if only else None
    return None


def _default_fp16(event: Event, facts: BehaviourView) -> bool:
    call = event.call
    path = next((path for _, path in facts.paths(call) if path in api_names.AUTOCASTS), "")
    if call.argument(1, "dtype") is not None or call.starred or only_dtype(event.dtypes) is not Dtype.FP16:
        return False
    return facts.enabled(call, path).possible and not any(_PRECISION_FLAG.search(flag) for flag in event.guard.flags())


def _options(facts: BehaviourView) -> Iterator[Option]:
    for name in ADD_OPTION:
        for call in facts.calls.get(name, ()):
            names = option_names(call)
            if names and (default := call.keywords.get("default")) is not None:
                yield Option(max(names, key=len), call, _dtype(default, call, facts), False, call.span)
    for scope in facts.index.scopes:
        for key, bindings in scope.bindings.items():
            binding = bindings[0]
            if len(bindings) != 1 or binding.kind != "assign" or binding.value is None or binding.guard:
                continue
            value = binding.value
            if isinstance(value, cst.Dict):
                yield from _items(key, binding, value, facts)
                continue
            if isinstance(value, cst.Call) and dotted(value.func).rsplit(".", 1)[-1] in ("field", "Field"):
                field = facts.index.call_of.get(value)
                default = field.argument(0 if field.name == "Field" else None, "default") if field is not None else None
                if default is None:
                    continue
                value = default
            dtype = _dtype(value, binding, facts)
            if dtype is not None and (scope.kind in ("class", "module") or not isinstance(value, cst.Name)):
                is_dtype_object = constant(value) is None and scope.kind != "class"
                yield Option(key.rsplit(".", 1)[-1], binding, dtype, is_dtype_object, binding.span)


def _items(key: str, binding: Binding, table: cst.Dict, facts: BehaviourView) -> Iterator[Option]:
    """Yield the items of a dict, and of dicts in it, that select a dtype: `config["training"]["mixed_precision"]`.

    Only where the file reads them by their keys, and changes no item.
    """
    if is_changed(key, facts):
        return
    pending = [table]
    while pending:
        for each in pending.pop().elements:
            name = constant(each.key) if isinstance(each, cst.DictElement) else None
            if isinstance(each.value, cst.Dict):
                pending.append(each.value)
            elif name is not None and isinstance(name[0], str) and _DTYPE.fullmatch(name[0]):
                read = re.search(rf"""(?:\[|\.get\()\s*["']{re.escape(name[0])}["']""", facts.file_text)
                dtype = _dtype(each.value, binding, facts) if read else None
                if dtype is not None:
                    yield Option(name[0], binding, dtype, False, binding.span)


def _dtype(node: cst.BaseExpression, at: Record, facts: BehaviourView) -> AnyDtype | None:
    """Return the only dtype that an expression can have, as a torch dtype or by its name; None if it is unknown."""
    found: set[AnyDtype | None] = set()
    for each in facts.evaluate(node, at):
        atom = each.atom
        if isinstance(atom, DtypeValue):
            found.add(atom.dtype)
        elif isinstance(atom, Constant) and isinstance(atom.value, str):
            found.add(api_names.DTYPE_STRINGS.get(atom.value))
        else:
            found.add(None)
    return found.pop() if len(found) == 1 else None


def default_of(node: cst.CSTNode | None, facts: BehaviourView) -> object:
    """Return the one default of an option of argparse, as in `args.dtype`, that nothing else sets; None else."""
    root, _, name = dotted(node).rpartition(".")
    found = {constant(call.keywords.get("default")) for call in _definitions(name, facts)} if root else set()
    value = found.pop() if len(found) == 1 and not is_set_later(name, facts) else None
    return value[0] if value is not None else None


def is_set_later(name: str, facts: BehaviourView) -> bool:
    """True if code of a file, or of what it imports, may set an attribute of this name: `args.dtype = torch.half`."""
    files = (facts, *facts.imported_modules())
    keys = (key for other in files for scope in other.scopes for key in scope.bindings)
    return any(key.endswith(f".{name}") for key in keys) or any("setattr" in other.calls for other in files)


def is_text_option(path: str, at: Record, facts: BehaviourView) -> bool:
    """True if a name of a namespace is an option of argparse whose values are text: it has no other `type`."""
    root, _, name = path.rpartition(".")
    bound = [each.value for each in facts.bindings(root, at)]
    names = {dotted(each.func).rpartition(".")[2] if isinstance(each, cst.Call) else "" for each in bound}
    defined = _definitions(name, facts) if names in ({"parse_args"}, {"parse_known_args"}) else []
    return bool(defined) and all(map(_is_text, defined))


def _definitions(name: str, facts: BehaviourView) -> list[Call]:
    files = (facts, *facts.imported_modules())
    return [call for other in files for call in other.calls.get("add_argument", ()) if destination(call) == name]


def _is_text(option: Call) -> bool:
    default, given = constant(option.keywords.get("default")), option.keywords
    known = "default" not in given or (default is not None and isinstance(default[0], (str, type(None))))
    return known and given.keys().isdisjoint(("action", "nargs")) and dotted(given.get("type")) in ("", "str")
