"""The wrappers of training frameworks: objects prepared by Accelerate, DeepSpeed or FSDP.

`WrapperFacts.of` returns, for an expression (`model`, `self.model`, `model.parameters()`, the argument of a helper),
the calls of `accelerator.prepare`, `deepspeed.initialize`, `FullyShardedDataParallel` or `fully_shard` that it passed
through, each under its path condition. An object from outside the file passed through none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour import options
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.keywords import alternatives_of
from mpguard.lint.facts.program.lattice import Class, Constant, Object
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import ALWAYS, Flag, PathCondition, compatible
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Return, Scope

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.lint.facts.behaviour.events import Event
    from mpguard.lint.facts.domain.view import DomainView

_MAX_DEPTH = 8
#: Expressions followed for one request, and bindings of one name.
_MAX_EXPRESSIONS = 200
_MAX_BINDINGS = 16
#: Classes of one model.
_MAX_CLASSES = 40
#: Functions whose `return` is not the result of calling the object.
_NO_RESULT = frozenset({"__init__", "forward", "__call__"})
#: Methods that return the object, or its parameters.
_SAME = api_names.SAME | {"parameters", "named_parameters", "module", "values"}
#: Functions that return their argument, or an object made of it.
_RETURNS_ARGUMENT = frozenset({
    "unwrap_model", "compile", "list", "tuple", "filter", "chain", api_names.ADDS_ADAPTERS,
    "DistributedDataParallel", "DDP", "extract_model_from_parallel", "iter", "sorted",
})  # fmt: skip
_PARAMETERS = ("parameters", "named_parameters")
#: Names of models, as opposed to other objects that are prepared: optimizers, loaders, schedulers.
_MODEL = lazy_pattern(r"(?i)(?:^|[._])(?:\w*model|\w*net|transformer|policy|generator|encoder|decoder|dit)$")
#: Names of functions that may shard a model.
_SHARDS = lazy_pattern(r"(?i)shard|fsdp|parallel|wrap")
#: Names of flags under which one of several frameworks may run the training loop; not `torch.backends`.
_FRAMEWORK_FLAG = lazy_pattern(
    r"(?i)accelerat|distributed_type|deepspeed|use_ds"
    r"|\b(?<!torch\.)(?:(?:train|dist|parallel|use)\w*_)?(?:backend|strategy)"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Wrap:
    """One wrapper that an object passed through: `kind` is `accelerate`, `deepspeed`, `fsdp1` or `fsdp2`.

    index: the object's position in the call's result; for `prepare` that of the argument, None for a single one.
    """

    kind: str
    call: Call
    facts: DomainView
    guard: PathCondition
    index: int | None = None


class WrapperFacts:
    """The wrapped objects of one file."""

    def __init__(self, facts: DomainView) -> None:
        self.facts = facts
        self._kinds: dict[Call, str] | None = None

    @property
    def calls(self) -> dict[Call, str]:
        """The calls that wrap, with their kinds."""
        if self._kinds is None:
            self._kinds = {}
            found = {event.call: "accelerate" for event in self.facts.events("prepare")}
            found |= {event.call: "deepspeed" for event in self.facts.events("initialize")}
            for event in self.facts.events("shard"):
                found[event.call] = api_names.kind_of(self.facts.called_path(event.call))
            self._kinds = found
        return self._kinds

    @cached_property
    def shards(self) -> list[Wrap]:
        """The calls of the file that shard a model by FSDP, in order."""
        calls = [(call, kind) for call, kind in self.calls.items() if kind in ("fsdp1", "fsdp2")]
        return [Wrap(kind, call, self.facts, self.facts.guard_of(call)) for call, kind in calls]

    @cached_property
    def may_shard_elsewhere(self) -> bool:
        """True if the file imports a function from another file that may shard a model, by its name."""
        return any(
            binding.kind == "from" and _SHARDS.search(binding.name) and self.facts.imported(binding.target) is not None
            for bindings in self.facts.module.bindings.values()
            for binding in bindings
        )

    def sharded_by(self, call: Call) -> Iterator[tuple[cst.BaseExpression | None, Wrap]]:
        """Yield the arguments of a call that its function shards, each with the call that does."""
        for function in self.facts.functions(call) if _SHARDS.search(call.name) else ():
            own = self.facts.of(function.scope).part(WrapperFacts)
            for inner, kind in own.calls.items():
                name = dotted(inner.positional[0]) if inner.positional else ""
                params = [each.name for each in inner.scope.params]
                if kind in ("fsdp1", "fsdp2") and inner.scope is function.scope and name in params:
                    given = self.facts.values.given(call, function.scope, name)
                    yield given, Wrap(kind, inner, own.facts, self.facts.guard_of(call))

    def of(self, node: cst.CSTNode | None, at: Record, kind: str = "", across: bool = False) -> list[Wrap]:
        """Return the wrappers that an expression passed through, at a record; of one kind, or all.

        across: also those in other files, if all callers of the function there give a wrapped object.
        """
        if node is None or not (self.calls or across or self.may_shard_elsewhere):
            return []
        found = _Search(self.facts, self.calls, across).start(node, at)
        return [wrap for wrap in found if wrap.kind.startswith(kind)]

    def forwards(self, kind: str = "") -> Iterator[tuple[Call, Wrap]]:
        """Yield the calls of wrapped models (`model(x)`), each with a wrapper, under compatible path conditions."""
        for calls in list(self.facts.calls.values()) if self.calls else ():
            for call in calls:
                if not call.path or call in self.calls or not self._may_be_model(call):
                    continue
                for wrap in self.of(call.func, call, kind):
                    if compatible(wrap.guard, self.facts.guard_of(call)):
                        yield call, wrap
                        break

    def _may_be_model(self, call: Call) -> bool:
        """True if the name of a callee is bound by something other than an import or a definition."""
        key = call.path
        if key.startswith("self."):
            owner = call.scope.owner
            return owner is not None and key[5:].split(".", 1)[0] in self.facts.classes.attributes(owner)
        bindings = self.facts.values.reaching(key.split(".", 1)[0], call.scope, call.order, call.guard)
        return any(binding.kind in ("assign", "element", "param", "with") for binding in bindings)

    def differentiated(
        self, loss: cst.CSTNode | None, at: Call, kind: str, across: bool = False
    ) -> Iterator[tuple[Call, Wrap]]:
        """Yield the calls of wrapped models that a loss is differentiated through.

        They are neither detached nor under `no_grad`. across: see `of`.
        """
        if loss is None or not (self.calls or across or self.may_shard_elsewhere):
            return
        records = [record for record in self._computed(loss, at) if isinstance(record, Call)]
        cut: set[Record] = set()
        for record in records:
            if record.name in ("detach", "detach_", "item") and record.receiver is not None:
                cut |= set(self.facts.flow.backward(record.receiver, record, depth=3))
        for record in records:
            if not record.path or record in cut or any(r.kind == "no_grad" for r in self.facts.regions(record)):
                continue
            wraps = self.of(record.func, record, kind, across)
            if record.scope is at.scope and record.name not in _RETURNS_ARGUMENT:  # compute_loss(model, batch)
                given = (each for each in record.positional if _MODEL.search(dotted(each)))
                wraps += [wrap for each in given for wrap in self.of(each, record, kind, across)]
            for wrap in wraps:
                if compatible(wrap.guard, self.facts.guard_of(record), self.facts.guard_of(at)):
                    yield record, wrap

    def _computed(self, loss: cst.CSTNode, at: Call) -> list[Record]:
        """Return the records that a loss is computed from: by the last values of its name, if it is a name."""
        found: list[Record] = []
        key = dotted(loss)
        bindings = self.facts.values.reaching(key, at.scope, at.order, at.guard) if key else []
        for binding in bindings:
            if binding.kind != "assign" or binding.value is None:
                return self.facts.flow.backward(loss, at, depth=3)
            found += self.facts.flow.backward(binding.value, binding, depth=3)
        return found if bindings else self.facts.flow.backward(loss, at, depth=3)

    def _same(self, key: str, one: Record, other: Record) -> bool:
        """True if a name may stand for one object at two places."""
        first, second = (set(self.facts.values.reaching(key, r.scope, r.order, r.guard)) for r in (one, other))
        return bool(first & second) or not (first or second)

    def of_argument(self, node: cst.CSTNode | None, at: Record, kind: str) -> list[Wrap]:
        """Return the wrappers whose call takes an object under the name that an expression uses for it.

        `params = model.parameters()` before `model = accelerator.prepare(model)` are the same parameters.
        """
        key, found = dotted(node), []
        if not key:
            return []
        scopes = set(at.scope.within())
        for call, each in self.calls.items():
            if not each.startswith(kind) or not (call.scope in scopes or key.startswith("self.")):
                continue
            if key.startswith("self.") and call.scope.owner is not at.scope.owner:
                continue
            given = [*call.positional, *call.keywords.values()]
            if any(dotted(value) == key for value in given) and self._same(key, at, call):
                found.append(Wrap(each, call, self.facts, self.facts.guard_of(call)))
        return found


class _Search:
    """Follows one expression back to the calls that wrap it."""

    def __init__(self, facts: DomainView, calls: dict[Call, str], across: bool) -> None:
        self.facts, self.calls, self.across = facts, calls, across
        self.found: list[Wrap] = []
        self.seen: set[object] = set()

    def start(self, node: cst.CSTNode, at: Record) -> list[Wrap]:
        """Return the wrappers of an expression at a record."""
        self.expression(node, at, ALWAYS, _MAX_DEPTH)
        return self.found

    def expression(self, node: cst.CSTNode | None, at: Record, guard: PathCondition, depth: int) -> None:
        """Follow an expression; guard: the conditions on the way from the requested place."""
        if node is None or depth < 0 or node in self.seen or len(self.seen) > _MAX_EXPRESSIONS:
            return
        self.seen.add(node)
        if isinstance(node, cst.Call):
            self.call(node, guard, depth)
        elif path := dotted(node):
            self.name(path, at, guard, depth)
        elif isinstance(node, (cst.Subscript, cst.NamedExpr)) or (
            isinstance(node, cst.Attribute) and node.attr.value == "module"
        ):
            self.expression(node.value, at, guard, depth)
        elif isinstance(node, cst.IfExp):
            self.expression(node.body, at, guard, depth)
            self.expression(node.orelse, at, guard, depth)
        elif isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            self.expression(node.for_in.iter, at, guard, depth)
        elif isinstance(node, (cst.List, cst.Tuple)):
            for element in node.elements:
                self.expression(element.value, at, guard, depth - 1)

    def call(self, node: cst.Call, guard: PathCondition, depth: int, index: int | None = None) -> None:
        """Follow a call; index: the position in its result, if that is unpacked."""
        call = self.facts.index.call_of.get(node)
        if call is None:
            return
        if call in self.calls:
            both = guard.joined(self.facts.guard_of(call))
            if both.possible:
                self.found.append(Wrap(self.calls[call], call, self.facts, both, index))
        elif call.receiver is not None and call.name in _SAME:
            self.expression(call.receiver, call, guard, depth - 1)
        elif call.name in _RETURNS_ARGUMENT:
            for value in call.positional:
                self.expression(value, call, guard, depth - 1)
        elif sharded := [wrap for _, wrap in self.facts.part(WrapperFacts).sharded_by(call)]:
            self.found += sharded
        else:
            for function in self.facts.functions(call):
                if function.facts is self.facts and function.scope.name not in _NO_RESULT:
                    for each in function.scope.returns:
                        self.returned(each, index, guard, depth)

    def returned(self, given: Return, index: int | None, guard: PathCondition, depth: int) -> None:
        """Follow a return value."""
        value: cst.CSTNode | None = given.value
        if isinstance(value, cst.Tuple) and index is not None:
            value = value.elements[index].value if index < len(value.elements) else None
        both = guard.joined(given.guard)
        if both.possible:
            self.expression(value, given, both, depth - 1)

    def name(self, path: str, at: Record, guard: PathCondition, depth: int) -> None:
        """Follow a dotted name to its bindings."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            key = ".".join(parts[:length])
            if self.sharded(key, at, guard):
                return
            bindings = self.facts.values.reaching(key, at.scope, at.order, at.guard)
            if bindings:
                if all(rest == "module" for rest in parts[length:]):
                    for binding in bindings[:_MAX_BINDINGS]:
                        self.binding(binding, guard, depth)
                else:
                    self.items(key, at, guard, depth)
                return

    def items(self, key: str, at: Record, guard: PathCondition, depth: int) -> None:
        """Follow the items of an object of which all are replaced in a loop: `for k in x: x[k] = wrapped(x[k])`."""
        for scope in at.scope.chain():
            for binding in scope.bindings.get(key, ()):
                if binding.kind == "item" and binding.loops and isinstance(binding.value, cst.Call):
                    self.call(binding.value, guard.joined(binding.guard), depth - 1)

    def added(self, binding: Binding, guard: PathCondition, depth: int) -> None:
        """Follow what is added to a list: `models.append(model)`, `params.extend(model.parameters())`."""
        for name in ("append", "extend"):
            for call in self.facts.calls.get(name, ()):
                if call.scope is binding.scope and call.positional and call.path == f"{binding.key}.{name}":
                    both = guard.joined(self.facts.guard_of(call))
                    if both.possible:
                        self.expression(call.positional[0], call, both, depth - 1)

    def sharded(self, key: str, at: Record, guard: PathCondition) -> bool:
        """True if an object was sharded in place before a record: `fully_shard(model)`."""
        found = False
        for call, kind in self.calls.items():
            if kind == "fsdp2" and call.positional and dotted(call.positional[0]) == key:
                same = (call.scope is at.scope and call.order < at.order) or (
                    key.startswith("self.") and call.scope.owner is at.scope.owner is not None
                )
                both = guard.joined(self.facts.guard_of(call))
                if same and both.possible:
                    self.found.append(Wrap(kind, call, self.facts, both))
                    found = True
        for call in at.scope.calls if not found else ():
            if call.is_statement and call.order < at.order and key in map(dotted, call.positional):
                given = self.facts.part(WrapperFacts).sharded_by(call)
                wraps = [wrap for each, wrap in given if dotted(each) == key and wrap.kind == "fsdp2"]
                self.found += wraps
                found = found or bool(wraps)
        return found

    def binding(self, binding: Binding, guard: PathCondition, depth: int) -> None:
        """Follow a binding to its value, and a parameter to the arguments of the callers."""
        guard = guard.joined(binding.guard)
        if binding in self.seen or not guard.possible:
            return
        self.seen.add(binding)
        value = binding.value
        if binding.kind == "element":
            index = binding.index[0]
            if isinstance(value, (cst.Tuple, cst.List)):
                value = value.elements[index].value if index < len(value.elements) else None
            if isinstance(value, cst.Call):
                self.call(value, guard, depth, index)
            else:
                self.expression(value, binding, guard, depth)
        elif binding.kind in ("assign", "with"):
            self.expression(value, binding, guard, depth)
            if isinstance(value, cst.List):
                self.added(binding, guard, depth)
        elif binding.kind == "for" and not binding.index and self.is_list(value, binding):
            self.expression(value, binding, guard, depth - 1)
        elif binding.kind == "param":
            callers = self.facts.callers(binding.scope)
            if self.across:
                self.found += self.given_elsewhere(binding, callers)
            for call in callers:
                given = self.facts.values.given(call, binding.scope, binding.key)
                both = guard.joined(call.guard)
                if given is not value and both.possible and call.chunk.source is self.facts.source:
                    self.expression(given, call, both, depth - 1)

    def given_elsewhere(self, binding: Binding, callers: list[Call]) -> list[Wrap]:
        """Return the wrappers of what callers in other files give for a parameter, if all of them give wrapped ones."""
        found: list[Wrap] = []
        for call in callers:
            there = self.facts.of(call)
            given = self.facts.values.given(call, binding.scope, binding.key)
            wraps = (
                there.part(WrapperFacts).of(given, call)
                if there is not self.facts and given is not binding.value
                else []
            )
            if not wraps:
                return []
            found += wraps
        return found

    def is_list(self, node: cst.CSTNode | None, at: Record) -> bool:
        """True for a list or tuple that the code writes down: unlike a loader, it has the parts that a loop gives."""
        if isinstance(node, (cst.List, cst.Tuple)):
            return True
        key = dotted(node)
        bindings = self.facts.values.reaching(key, at.scope, at.order, at.guard) if key else []
        return any(isinstance(binding.value, (cst.List, cst.Tuple)) for binding in bindings)


def class_of(node: cst.CSTNode | None, at: Record, facts: DomainView) -> Scope | None:
    """Return the class of the project that an expression is certain to be an object of, or None."""
    found = {each.atom.cls if isinstance(each.atom, Object) else None for each in facts.evaluate(node, at)}
    return found.pop() if len(found) == 1 else None


def classes_of(cls: Scope, facts: DomainView) -> list[Scope]:
    """Return a class of the project, its base classes, and the classes of which they create objects, in any file."""
    found = [cls]
    for each in found:  # which grows
        home = facts.of(each)
        atoms = [base for base in home.classes.bases(each) if isinstance(base, Class)]
        for call in (call for scope in each.descendants() for call in scope.calls):
            atoms += [made.atom for made in home.evaluate(call.func, call) if isinstance(made.atom, Class)]
        found += [atom.scope for atom in dict.fromkeys(atoms) if atom.scope not in found]
        if len(found) > _MAX_CLASSES:
            break
    return list(dict.fromkeys(found))


def policies_of(wrap: Wrap) -> list[tuple[Event, PathCondition]]:
    """Return the policies that a sharded model may have: the events that create them, each with its path condition."""
    found = []
    for each in alternatives_of(wrap.call, "mixed_precision" if wrap.kind == "fsdp1" else "mp_policy", wrap.facts):
        made = each.atom.call if isinstance(each.atom, Object) else None
        events = wrap.facts.of(made).events("policy") if made is not None else ()
        found += [(event, each.guard) for event in events if event.call is made]
    return found


def policy_of(wrap: Wrap) -> tuple[Call, str] | None:
    """Return the policy object of a sharded model: the call that creates it, and its kind; None if it is unknown."""
    given = wrap.call.argument(None, "mixed_precision" if wrap.kind == "fsdp1" else "mp_policy")
    atoms = [each.atom for each in wrap.facts.evaluate(given, wrap.call)] if given is not None else []
    if len(atoms) == 1 and isinstance(atoms[0], Object) and atoms[0].call is not None:
        return atoms[0].call, atoms[0].kind
    return None


def of_clipped(clip: Event, kind: str, facts: DomainView) -> Iterator[tuple[str, Wrap]]:
    """Yield the wrapped models whose parameters a call clips, each by its name, with the call that wraps it."""
    if clip.subject is None:
        return
    wrappers, (first, last) = facts.part(WrapperFacts), facts.span(clip.subject, clip.call)
    own = [call for name in _PARAMETERS for call in facts.calls.get(name, ()) if call.scope is clip.scope]
    calls = [call for call in own if first <= call.span[0] and call.span[1] <= last]
    if not calls:  # a name: follow it to the expression that it was assigned
        records = facts.flow.backward(clip.subject, clip.call, depth=2)
        calls = [record for record in records if isinstance(record, Call) and "param" in record.name]
    for call in calls:
        if call.receiver is not None:
            wraps = wrappers.of(call.receiver, call, kind, across=True)
            for wrap in wraps + wrappers.of_argument(call.receiver, call, kind):
                yield dotted(call.receiver) or facts.short(call.receiver), wrap
    for wrap in wrappers.of(clip.subject, clip.call, kind):  # a list of several models' parameters
        yield facts.short(clip.subject), wrap


def receiver_at(wrap: Wrap, at: Record, facts: DomainView) -> str | None:
    """Return the name of the wrapper's Accelerator or engine at a record; None if it has none there."""
    key = dotted(wrap.call.receiver)
    if not key or wrap.facts is not facts:
        return None
    root = key.split(".", 1)[0]
    if root == "self":
        return key if wrap.call.scope.owner is at.scope.owner is not None else None
    for scope in at.scope.chain():
        if root in scope.bindings:
            return key if scope in set(wrap.call.scope.chain()) else None
    return None


def other_way(guard: PathCondition, own: str) -> bool:
    """True if code under a path condition may belong to a run without `own` (`accelerat`, `deepspeed`).

    By the names of the flags: `if args.use_accelerate:` selects it, the `else` branch does not. What an object of it
    says selects nothing: `accelerator.num_processes > 1`.
    """
    of_object = re.compile(rf"(?i){own}\w*\.\w")
    for condition in guard:
        if isinstance(condition, Flag) and condition.equals is None and own in condition.name.lower():
            continue
        flags = (flag for flag in PathCondition([condition]).flags() if not of_object.search(flag))
        if any(map(_FRAMEWORK_FLAG.search, flags)):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class WrapperSettings:
    """The settings of a DeepSpeed config; each is None if it is unclear, or no config is visible.

    may_autocast: `torch_autocast` is on, or may be: the code writes this section into the config.
    autocast_fp16: it is on, and in FP16.
    """

    stage: int | None = None
    fp16: bool | None = None
    torch_autocast: bool | None = None
    may_autocast: bool = False
    autocast_fp16: bool = False


def settings_of(wrap: Wrap, defaults: bool = False) -> WrapperSettings:
    """Return the settings of an engine: those of the dict in the code, or of the JSON file that it names.

    defaults: also of the file that is the default of an option.
    """
    from mpguard.lint.facts.domain import config_dicts  # imports PyYAML, which most runs over Python do not need

    document = engine_config(wrap.facts, wrap.call, defaults)
    written = config_dicts.writes_section(wrap.facts, wrap.call, "torch_autocast")
    if document is None:
        return WrapperSettings(may_autocast=written)
    zero = document.data.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    switched = []
    for name in ("fp16", "torch_autocast"):
        section = document.data.get(name, {})
        value = section.get("enabled", False) if isinstance(section, dict) else None
        switched.append(value if isinstance(value, bool) else None)
    fp16, autocast = switched
    in_float16 = autocast is True and document.data["torch_autocast"].get("dtype") in ("float16", "fp16", "half")
    return WrapperSettings(
        stage if type(stage) is int else None,
        fp16,
        autocast,
        bool(autocast) or (written and autocast is None),
        in_float16,
    )


def engine_config(facts: DomainView, call: Call, defaults: bool = False) -> Document | None:
    """Return the config that `deepspeed.initialize` gets: the dict in the code, or the JSON file that it names.

    defaults: see `settings_of`.
    """
    from mpguard.lint.facts.domain import config_dicts  # imports PyYAML, which most runs over Python do not need

    written = config_dicts.given_to(facts, call)
    if written is not None:
        return written
    given = call.argument(None, "config", "config_params")
    atoms = [each.atom for each in facts.evaluate(given, call)] if given is not None else []
    named = {atoms[0].value} if len(atoms) == 1 and isinstance(atoms[0], Constant) else set()
    if defaults and not named:
        named = {options.default_of(given, facts)}
    name = named.pop() if len(named) == 1 else None
    return facts.project.config_named(facts.path, name) if isinstance(name, str) else None
