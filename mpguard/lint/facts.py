"""The facts of one file that rules ask about: events, calls, values, callers, training or inference.

A rule walks no tree. It asks for `facts.events("cast")`, `facts.calls["step"]`, `facts.evaluate(...)`,
`facts.regions(...)`, `facts.flow`, `facts.trains(...)`, and yields diagnostics at events.

Events, each in order of evaluation within its function:

    cast        `x.half()`, `x.to(torch.float16)`, `x.type(...)`: `dtypes`
    scaler      a GradScaler is created          scale       `scaler.scale(loss)`
    unscale     `scaler.unscale_(optimizer)`     update      `scaler.update()`
    backward    of a loss; `framework` where an engine, an accelerator or the like runs it
    step        of an optimizer; `scaler_step` through a scaler
    autocast    a region is entered              compile     `torch.compile`, `model.compile`, a dynamo option
    clip        `clip_grad_norm_`, `clip_grad_value_`
    prepare     `accelerator.prepare`            initialize  `deepspeed.initialize`
    convert     torchao's float8 conversion      trainer     a framework's trainer is built
    load        `from_pretrained`                accelerator an Accelerator is built
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import libcst as cst

from mpguard.lint import names
from mpguard.lint.flow import Flow
from mpguard.lint.guard import ALWAYS, Condition, Guard, compatible
from mpguard.lint.source import Chunk, Frames, Source
from mpguard.lint.values import (
    NOTHING_KNOWN,
    UNKNOWN,
    Alternative,
    Alternatives,
    Class,
    Constant,
    Dtype,
    Function,
    Method,
    Object,
    Ref,
    Values,
)
from mpguard.lint.walk import Binding, Call, Record, Scope, Walker, With, constant, dotted, text_of

if TYPE_CHECKING:
    from mpguard.lint.project import LaunchConfig

#: Files up to this size are walked whole; of larger ones the statements that matter.
WHOLE = 8_000
#: What makes a top-level statement matter: precision, training, and what decides between them.
_MATTERS = re.compile(
    r"half|float16|bf16|fp16|autocast|[sS]caler|backward|\.step\(|\bamp\b|float8|fp8|\.prepare\(|deepspeed|accelerat|"
    r"compile|no_grad|inference_mode|Trainer|Optimizer|optim\b|HalfTensor|requires_grad"
)
_HEADER = re.compile(r"^(async[ \t]+def|def|class)[ \t]+(\w+)[ \t]*(?:\(([^()]*)\))?", re.MULTILINE)


class Project(Protocol):
    """What the facts ask of the rest of the linted tree."""

    def configs_for(self, path: str) -> tuple[LaunchConfig, ...]:
        """The launch configs that a file is started with."""

    def declared(self, path: str) -> Literal["training", "inference"] | None:
        """What `training-paths` and `inference-paths` say about a file."""

    def source_of(self, module: str, from_path: str) -> Facts | None:
        """The facts of an imported module of the linted tree; leading dots for relative imports."""


class NoProject:
    """A file linted by itself."""

    def configs_for(self, path: str) -> tuple[LaunchConfig, ...]:  # noqa: ARG002
        return ()

    def declared(self, path: str) -> Literal["training", "inference"] | None:  # noqa: ARG002
        return None

    def source_of(self, module: str, from_path: str) -> Facts | None:  # noqa: ARG002
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A context that is entered: what kind, under which guard, where.

    kind: `autocast`, `no_grad`, `fp8_autocast`, `accelerator_autocast`, or empty where it is unknown.
    dtypes: of an autocast; UNKNOWN alternatives are left in. device: "cuda", "cpu" or None if unknown.
    """

    kind: str
    guard: Guard
    call: Call | None
    facts: Facts
    dtypes: tuple[tuple[Guard, str | None], ...] = ()
    device: str | None = None

    def may_be(self, dtype: str) -> list[Guard]:
        """The guards under which the region has that dtype for certain."""
        return [both for guard, name in self.dtypes if name == dtype and (both := self.guard.joined(guard)).possible]


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """Something that happens to an object.

    subject: the expression of the object that it concerns; `key` its dotted name, or empty.
    dtypes: of casts, loads and autocasts: (guard, name) alternatives, None for unknown.
    """

    kind: str
    call: Call
    facts: Facts
    subject: cst.BaseExpression | None = None
    dtypes: tuple[tuple[Guard, str | None], ...] = ()

    @property
    def key(self) -> str:
        return dotted(self.subject)

    @property
    def scope(self) -> Scope:
        return self.call.scope

    @property
    def order(self) -> int:
        return self.call.order

    @cached_property
    def guard(self) -> Guard:
        """Its own conditions and those under which its function is called."""
        return self.facts.guard_of(self.call)

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.facts.regions(self.call)

    @property
    def span(self) -> tuple[int, int]:
        return self.call.span

    def may_be(self, dtype: str) -> list[Guard]:
        return [both for guard, name in self.dtypes if name == dtype and (both := self.guard.joined(guard)).possible]


class Facts:
    """Raises `source.Unparsable` for a file that Python accepts and libcst does not."""

    def __init__(self, source: Source, project: Project | None = None, imported: bool = False) -> None:
        """imported: a module that another file asks about: only what matters to precision is parsed."""
        self.source = source
        self._whole = 0 if imported else WHOLE
        self.project: Project = project if project is not None else NoProject()
        self.path = source.path
        self.parsed_bytes = 0
        chunks = source.chunks
        self.module = Scope("module", "", cst.Pass(), None, chunks[0])
        self.walker = Walker(self.module)
        self.values = Values(self)
        self.flow = Flow(self)
        with Frames(), _without_gc():
            self._walk(chunks)
        self.calls: dict[str, list[Call]] = {}
        for scope in self.walker.scopes:
            for call in scope.calls:
                self.calls.setdefault(call.name, []).append(call)
        self._attributes: dict[Scope, dict[str, list[Binding]]] = {}
        self._callers: dict[Scope, list[Call]] = {}
        self._contexts: dict[Scope, Guard] = {}
        self._regions: dict[With, tuple[Region, ...]] = {}
        self._imported: dict[str, Facts | None] = {}
        self._active: set[object] = set()

    def _walk(self, chunks: tuple[Chunk, ...]) -> None:
        wanted = self._wanted(chunks)
        for chunk in chunks:
            if chunk in wanted:
                self.parsed_bytes += chunk.end - chunk.start
                self.walker.chunk(chunk)
            else:
                self._stub(chunk)

    def _wanted(self, chunks: tuple[Chunk, ...]) -> set[Chunk]:
        """Imports, small statements, those with a token that matters, and those that call them."""
        if len(self.source.normal) <= self._whole:
            return set(chunks)
        wanted = {chunk for chunk in chunks if chunk.defines is None or _MATTERS.search(chunk.text)}
        named = {chunk.defines for chunk in wanted} - {None}
        if named:
            mentions = re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, filter(None, named)))) + r")\(")
            wanted |= {chunk for chunk in chunks if chunk not in wanted and mentions.search(chunk.text)}
        return wanted

    def _stub(self, chunk: Chunk) -> None:
        """A definition that is not parsed: its name, and the bases of a class."""
        header = _HEADER.search(chunk.text)
        if header is None:
            return
        kind, name, bases = header.groups()
        scope = Scope("class" if kind == "class" else "function", name, cst.Pass(), self.module, chunk)
        scope.parsed = False
        scope.base_names = [base.strip() for base in (bases or "").split(",") if "=" not in base and base.strip()]
        self.module.children.append(scope)
        place = self.walker._place(scope.node)
        self.module.bindings.setdefault(name, []).append(Binding(*place, key=name, kind="stub", defines=scope))

    # -- values -----------------------------------------------------------------------------------

    def condition(self, node: cst.CSTNode, scope: Scope) -> Condition:
        """The formula that the truth of an expression is."""
        before, self.walker.scope = self.walker.scope, scope
        try:
            return self.walker.condition(node)
        finally:
            self.walker.scope = before

    def evaluate(self, node: cst.CSTNode | None, at: Record) -> Alternatives:
        """What an expression may be, where a record stands; `values` explains the alternatives."""
        with Frames():
            return self.values.evaluate(node, at.scope, at.order)

    def paths(self, call: Call) -> list[tuple[Guard, str]]:
        """The full dotted names of what a call calls, where that is something of a library."""
        return [(each.guard, each.atom.path) for each in self.evaluate(call.func, call) if isinstance(each.atom, Ref)]

    def called_path(self, call: Call) -> str:
        """The first of `paths`, or empty."""
        return next((path for _, path in self.paths(call)), "")

    def dtypes(self, node: cst.CSTNode | None, at: Record, strings: bool = False) -> tuple[tuple[Guard, str | None], ...]:
        """The dtypes that an expression may be: (guard, name); None where it is unknown or none.

        strings: whether `"float16"` is one here.
        """
        found: list[tuple[Guard, str | None]] = []
        for each in self.evaluate(node, at):
            name = each.atom.name if isinstance(each.atom, Dtype) else None
            if strings and isinstance(each.atom, Constant) and isinstance(each.atom.value, str):
                name = names.DTYPE_STRINGS.get(each.atom.value)
            found.append((each.guard, name))
        return tuple(found)

    def kinds(self, node: cst.CSTNode | None, at: Record) -> set[str]:
        """The kinds of object that an expression may be; "" among them where one is unknown."""
        return {each.atom.kind if isinstance(each.atom, Object) else "" for each in self.evaluate(node, at)}

    def from_outside(self, node: cst.CSTNode | None, at: Record, depth: int = 8) -> bool:
        """Whether an object is the caller's, and no caller is in sight: a parameter, or an attribute set from one.

        What an imported function returns is not: it is the script's from there on.
        """
        path = dotted(node)
        if isinstance(node, cst.Call):
            inner = self.walker.call_of.get(node)
            if inner is not None and inner.receiver is not None and inner.name in names.SAME:
                return self.from_outside(inner.receiver, inner, depth - 1)
            return False
        if not path or depth < 0:
            return False
        bindings = self.values.reaching(path, at.scope, at.order, at.guard)
        if not bindings:
            root = path.split(".", 1)[0]
            return "." in path and (root == "self" or self.from_outside(cst.Name(root), at, depth - 1))
        for binding in bindings:
            if binding.kind == "param":
                callers = self.callers(binding.scope)
                if not callers:
                    return True
                given = [(self.values.given(call, binding.scope, binding.key), call) for call in callers]
                if any(each is None or self.from_outside(each, call, depth - 1) for each, call in given):
                    return True
            elif binding.kind in ("assign", "with") and binding.value is not None:
                if self.from_outside(binding.value, binding, depth - 1):
                    return True
            elif binding.kind == "for":
                return True
        return False

    # -- functions and classes --------------------------------------------------------------------

    def of(self, record: Record) -> Facts:
        """The facts of the file in which a record stands."""
        return self._home.get(record.chunk.source.path, self)

    @property
    def _home(self) -> dict[str, Facts]:
        return {self.path: self, **{f.path: f for f in self._imported.values() if f is not None}}

    def imported(self, module: str) -> Facts | None:
        """The facts of a module of the linted tree."""
        if module not in self._imported:
            self._imported[module] = None  # an import cycle finds nothing
            self._imported[module] = self.project.source_of(module, self.path)
        return self._imported[module]

    def attributes(self, cls: Scope) -> dict[str, list[Binding]]:
        """What the methods and the body of a class set: attribute -> bindings; of bases in sight too."""
        if cls not in self._attributes:
            found: dict[str, list[Binding]] = {}
            self._attributes[cls] = found
            for scope in cls.descendants():
                for key, bindings in scope.bindings.items():
                    if key.startswith("self.") and key.count(".") == 1:
                        found.setdefault(key[5:], []).extend(b for b in bindings if b.kind not in ("item", "del"))
            for key, bindings in cls.bindings.items():
                found.setdefault(key, []).extend(bindings)
            for base in self.bases(cls):
                if isinstance(base, Class):
                    for key, bindings in base.facts.attributes(base.scope).items():
                        if base.facts is self and key not in found:
                            found[key] = bindings
        return self._attributes[cls]

    def bases(self, cls: Scope) -> list[Class | str]:
        """The base classes: those of the tree, and the full names of the others ("" if unknown)."""
        found: list[Class | str] = []
        for name in cls.base_names:
            for each in self.values.lookup(name, cls.parent or self.module, 1 << 60) if name else NOTHING_KNOWN:
                if isinstance(each.atom, Class) and each.atom.scope is not cls:
                    found.append(each.atom)
                else:
                    found.append(each.atom.path if isinstance(each.atom, Ref) else "")
        return found

    def ancestry(self, cls: Scope) -> Iterator[str]:
        """The full names of all library classes that a class descends from; "" for what is out of sight."""
        seen: set[Scope] = set()
        pending: list[tuple[Facts, Scope]] = [(self, cls)]
        while pending:
            facts, scope = pending.pop()
            if scope in seen:
                continue
            seen.add(scope)
            for base in facts.bases(scope):
                if isinstance(base, Class):
                    pending.append((base.facts, base.scope))
                else:
                    yield base

    def class_kind(self, cls: Scope) -> str:
        """What an instance is: `model`, `optimizer`, `trainer` ..., `own` for a class of the user's, or "" if unknown."""
        if cls in self._active:
            return ""
        self._active.add(cls)
        try:
            bases = list(self.ancestry(cls))
        finally:
            self._active.discard(cls)
        for base in bases:
            last = base.rsplit(".", 1)[-1]
            if base.split(".", 1)[0] in names.FRAMEWORK_ROOTS or last in ("LightningModule", "LightningDataModule"):
                return "framework"
            if base.startswith("torch.nn.") or last in ("PreTrainedModel", "ModelMixin", "Module"):
                return "model"
            if base.startswith("torch.optim.") or last == "Optimizer":
                return "own_optimizer"
            if "Scaler" in last:
                return "scaler"
            if last.endswith(("Trainer", "Callback", "Mixin")):
                return "trainer"
            if "." in base and base.startswith(("torch.utils", "abc", "typing", "enum", "dataclasses")):
                continue
        if "" in bases or any("." in base and not base.startswith(_HARMLESS) for base in bases):
            return ""
        return "own"

    def base_unknown(self, cls: Scope | None) -> bool:
        """Whether a class has ancestors that may bring what the file does not show."""
        return cls is not None and self.class_kind(cls) in ("", "framework", "trainer")

    def callers(self, scope: Scope) -> list[Call]:
        """The calls of a function in its file."""
        if scope in self._callers:
            return self._callers[scope]
        self._callers[scope] = []
        if scope.kind != "function":
            return []
        found = []
        wanted = scope.name
        candidates = self.calls.get(wanted, [])
        if scope.is_method and wanted in ("__init__", "forward", "__call__"):
            candidates = [call for calls in self.calls.values() for call in calls if _could_be_instance(call)]
        for call in candidates:
            if self._resolves(call, scope):
                found.append(call)
        self._callers[scope] = found
        return found

    def _resolves(self, call: Call, scope: Scope) -> bool:
        for each in self.values.evaluate(call.func, call.scope, call.order):
            atom = each.atom
            if isinstance(atom, Function) and atom.scope is scope:
                return True
            if scope.name == "__init__" and isinstance(atom, Class) and atom.scope is scope.parent:
                return True
            if scope.name in ("forward", "__call__") and isinstance(atom, Object) and atom.cls is scope.parent and atom.cls is not None:
                return True
        if scope.is_method and call.name == scope.name and call.receiver is not None and not scope.name.startswith("__"):
            unknown = all(each.atom is UNKNOWN for each in self.values.evaluate(call.receiver, call.scope, call.order))
            same = [s for s in self.walker.scopes if s.kind == "function" and s.name == scope.name]
            return unknown and len(same) == 1 and scope.name not in _COMMON and dotted(call.receiver).split(".")[0] != "super"
        return False

    def functions(self, call: Call) -> list[Function]:
        """The functions of the tree that a call may run; the `forward` of a module, the `__init__` of a class."""
        found = []
        for each in self.evaluate(call.func, call):
            atom = each.atom
            if isinstance(atom, Function):
                found.append(atom)
            elif isinstance(atom, Class) and (init := atom.scope.method("__init__")):
                found.append(Function(init, atom.facts))
            elif isinstance(atom, Object) and atom.cls is not None and atom.facts is not None:
                method = atom.cls.method("forward") or atom.cls.method("__call__")
                if method is not None:
                    found.append(Function(method, atom.facts))
        if not found and call.receiver is not None and call.name not in _COMMON:
            found = [Function(s, self) for s in self.walker.scopes if s.is_method and s.name == call.name and call in self.callers(s)]
        return found

    def escapes(self, scope: Scope) -> bool:
        """Whether a function is handed on as a value, so that others may call it."""
        if scope.parent is None:
            return False
        for place in self.walker.scopes:
            roots = place.uses.get(scope.name, ()) if not scope.is_method else place.uses.get("self", ())
            for use in roots:
                if use.path in (scope.name, f"self.{scope.name}"):
                    parent = self.walker.parents.get(use.node)
                    if isinstance(parent, cst.Arg) or (isinstance(parent, cst.Element)):
                        return True
        return False

    # -- guards and regions -----------------------------------------------------------------------

    def guard_of(self, record: Record) -> Guard:
        """A record's guard, with the conditions under which its function is always called."""
        joined = record.guard.joined(self.context(record.scope))
        return joined if joined.possible else record.guard

    def context(self, scope: Scope) -> Guard:
        """The conditions that all calls of a function have in common."""
        if scope.kind != "function":
            return ALWAYS
        if scope not in self._contexts:
            self._contexts[scope] = ALWAYS
            callers = self.callers(scope)
            if callers and not self.escapes(scope):
                guards = [self.guard_of(call) for call in callers]
                self._contexts[scope] = Guard(frozenset.intersection(*map(frozenset, guards)))
            elif scope.parent is not None and scope.parent.kind == "function":
                self._contexts[scope] = self.context(scope.parent)
        return self._contexts[scope]

    def regions(self, record: Record) -> tuple[Region, ...]:
        """The contexts around a record, outermost first: `with` items, and decorators of its functions."""
        found: list[Region] = []
        for scope in reversed(list(record.scope.within())):
            for decorator in scope.decorators:
                found += self._decorated(decorator, scope)
        for item in record.withs:
            found += self.entered(item)
        return tuple(found)

    def _decorated(self, decorator: cst.BaseExpression, scope: Scope) -> Iterable[Region]:
        outer = scope.parent or self.module
        for each in self.values.evaluate(decorator, outer, scope.order):
            if isinstance(each.atom, Object) and each.atom.kind in _REGIONS:
                yield self._region(each, outer)
            elif isinstance(each.atom, Ref) and each.atom.path in names.NO_GRAD:
                yield Region("no_grad", each.guard, None, self)

    def entered(self, item: With) -> tuple[Region, ...]:
        """What a `with` item enters."""
        if item not in self._regions:
            self._regions[item] = ()
            found: list[Region] = []
            for each in self.values.evaluate(item.expr, item.scope, item.order):
                atom = each.atom
                if isinstance(atom, Object) and atom.kind == "context" and atom.cls is not None and atom.facts is not None:
                    for given in atom.cls.returns:
                        for region in atom.facts.regions(given):
                            found.append(dataclasses.replace(region, guard=region.guard.joined(item.guard, each.guard)))
                elif isinstance(atom, Object) and atom.kind in _REGIONS:
                    region = self._region(each, item.scope)
                    found.append(dataclasses.replace(region, guard=region.guard.joined(item.guard)))
                elif atom is UNKNOWN or isinstance(atom, (Ref, Method)):
                    found.append(Region("", each.guard.joined(item.guard), None, self))
            self._regions[item] = tuple(found)
        return self._regions[item]

    def _region(self, each: Alternative, scope: Scope) -> Region:
        assert isinstance(each.atom, Object)
        atom, guard = each.atom, each.guard
        call = atom.call
        if call is None:
            return Region(atom.kind, guard, None, self)
        facts = self.of(call)
        if atom.kind != "autocast":
            return Region(atom.kind, guard, call, facts)
        return dataclasses.replace(facts.autocast(call, atom.path), guard=guard.joined(facts.enabled(call, atom.path)))

    def enabled(self, call: Call, path: str) -> Guard:
        """The guard that an autocast's or a scaler's `enabled=` is; an impossible one for `False`."""
        legacy = path.startswith(("torch.cuda.amp.", "torch.cpu.amp."))
        place = (0 if legacy else 2) if path in names.AUTOCASTS else (4 if legacy else 5)
        given = call.argument(place, "enabled")
        if given is None:
            return ALWAYS
        known = {each.atom.value if isinstance(each.atom, Constant) else None for each in self.evaluate(given, call)}
        if known == {True}:
            return ALWAYS
        if known == {False}:
            return ALWAYS.given(self.condition(cst.Name("False"), call.scope))
        return ALWAYS.given(self.condition(given, call.scope))

    def autocast(self, call: Call, path: str) -> Region:
        """The region that a call of an autocast makes: its device and dtype, with torch's defaults."""
        legacy = path.startswith(("torch.cuda.amp.", "torch.cpu.amp."))
        if legacy:
            device: str | None = path.split(".")[1]
            devices = [(ALWAYS, device)]
        else:
            devices = [
                (each.guard, str(each.atom.value).split(":", 1)[0] if isinstance(each.atom, Constant) else None)
                for each in self.evaluate(call.argument(0, "device_type"), call)
            ]
            device = devices[0][1] if len({name for _, name in devices}) == 1 else None
        given = call.argument(1, "dtype")
        if given is not None and constant(given) != (None,):
            dtypes = self.dtypes(given, call)
        elif call.starred or "set_autocast_gpu_dtype" in self.calls or "set_autocast_dtype" in self.calls:
            dtypes = ((ALWAYS, None),)
        else:
            dtypes = tuple((guard, {"cuda": "float16", "cpu": "bfloat16"}.get(name or "")) for guard, name in devices)
        return Region("autocast", ALWAYS, call, self, dtypes, device)

    # -- events -----------------------------------------------------------------------------------

    def events(self, kind: str) -> list[Event]:
        """All events of a kind in the file, in order."""
        with Frames():
            return self._events.setdefault(kind, sorted(self._found(kind), key=lambda event: event.order))

    @cached_property
    def _events(self) -> dict[str, list[Event]]:
        return {}

    def _called(self, *wanted: str) -> Iterator[Call]:
        for name in wanted:
            yield from self.calls.get(name, ())

    def _found(self, kind: str) -> Iterator[Event]:
        maker = getattr(self, f"_{kind}s", None)
        if maker is None:
            raise KeyError(f"there are no events of kind {kind!r}")
        yield from maker()

    def _casts(self) -> Iterator[Event]:
        for call in self._called("half", "bfloat16"):
            if call.receiver is not None and not call.node.args and self._is_torch(call):
                yield Event("cast", call, self, call.receiver, ((ALWAYS, "float16" if call.name == "half" else "bfloat16"),))
        for call in self._called("to"):
            if call.receiver is None or not self._is_torch(call):
                continue
            given = call.keywords.get("dtype")
            for argument in [given] if given is not None else call.positional[:2]:
                dtypes = self.dtypes(argument, call)
                if any(name is not None for _, name in dtypes):
                    yield Event("cast", call, self, call.receiver, dtypes)
                    break
        for call in self._called("type"):
            given = call.argument(0, "dtype")
            if call.receiver is None or given is None or not self._is_torch(call):
                continue
            text = constant(given)
            if text is not None:
                if text[0] in names.HALF_TENSOR_STRINGS:
                    yield Event("cast", call, self, call.receiver, ((ALWAYS, "float16"),))
                continue
            dtypes = self.dtypes(given, call)
            if any(name is not None for _, name in dtypes):
                yield Event("cast", call, self, call.receiver, dtypes)

    def _is_torch(self, call: Call) -> bool:
        """Whether a method's receiver may be a tensor or a module: no class of the user's with that method, no library."""
        for each in self.evaluate(call.receiver, call):
            if isinstance(each.atom, (Ref, Class, Constant)):
                return False
            if isinstance(each.atom, Object) and each.atom.kind not in ("model", "tensor", "engine", "criterion", "pipeline", ""):
                return False
        for each in self.evaluate(call.func, call):
            if isinstance(each.atom, Function) and each.atom.scope.parent is not None:
                return self.class_kind(each.atom.scope.parent) == "model" and False
        return True

    def _scalers(self) -> Iterator[Event]:
        yield from self._creates("scaler")

    def _accelerators(self) -> Iterator[Event]:
        yield from self._creates("accelerator")

    def _trainers(self) -> Iterator[Event]:
        yield from self._creates("trainer")

    def _initializes(self) -> Iterator[Event]:
        yield from self._creates("engine")

    def _creates(self, kind: str) -> Iterator[Event]:
        for calls in self.calls.values():
            for call in calls:
                if any(names.kind_of(path) == kind for _, path in self.paths(call)) or any(
                    isinstance(each.atom, Class) and each.atom.facts.class_kind(each.atom.scope) == kind
                    for each in self.evaluate(call.func, call)
                    if call.name[:1].isupper()
                ):
                    yield Event(kind, call, self, call.node)

    def _scales(self) -> Iterator[Event]:
        for call in self._called("scale"):
            if call.receiver is not None and call.positional and self.is_scaler(call.receiver, call):
                yield Event("scale", call, self, call.receiver)

    def _unscales(self) -> Iterator[Event]:
        for call in self._called("unscale_"):
            yield Event("unscale", call, self, call.argument(0, "optimizer"))

    def _updates(self) -> Iterator[Event]:
        for call in self._called("update"):
            if call.receiver is not None and self.is_scaler(call.receiver, call):
                yield Event("update", call, self, call.receiver)

    def _backwards(self) -> Iterator[Event]:
        for call in self._called("backward"):
            if call.receiver is not None and self._plain_backward(call):
                yield Event("backward", call, self, call.receiver)

    def _plain_backward(self, call: Call) -> bool:
        """`loss.backward()`, as against `engine.backward(loss)` and an autograd function's."""
        if call.positional and constant(call.positional[0]) is None and not isinstance(call.positional[0], cst.Call):
            return False
        if dotted(call.receiver).split(".")[-1] in ("self", "super", "ctx", "optimizer", "engine", "accelerator", "fabric"):
            return False
        if isinstance(call.receiver, cst.Call) and dotted(call.receiver.func) == "super":
            return False
        kinds = self.kinds(call.receiver, call)
        return not kinds & {"engine", "accelerator", "trainer", "fabric", "model", "framework", "optimizer", "own", "scaler"}

    def _frameworks(self) -> Iterator[Event]:
        """Backward passes that something else runs: `accelerator.backward(loss)`, `self.manual_backward(loss)`."""
        for call in self._called("backward", "manual_backward"):
            if not self._plain_backward(call):
                yield Event("framework", call, self, call.receiver)

    def _steps(self) -> Iterator[Event]:
        for call in self._called("step"):
            if call.receiver is not None and not self.is_scaler(call.receiver, call) and self.is_optimizer(call.receiver, call):
                yield Event("step", call, self, call.receiver)

    def _scaler_steps(self) -> Iterator[Event]:
        for call in self._called("step"):
            if call.receiver is not None and call.positional and self.is_scaler(call.receiver, call):
                yield Event("scaler_step", call, self, call.positional[0])

    def is_scaler(self, node: cst.CSTNode, at: Record) -> bool:
        kinds = self.kinds(node, at)
        return "scaler" in kinds or (kinds <= {""} and "scaler" in _last_name(node).lower())

    def is_optimizer(self, node: cst.CSTNode, at: Record) -> bool:
        """By what it is, or where that is unknown, by its name."""
        kinds = self.kinds(node, at)
        return "optimizer" in kinds or (kinds <= {"", "parameters"} and bool(_OPTIMIZER.search(_last_name(node).lower())))

    def _clips(self) -> Iterator[Event]:
        for call in self._called("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
            yield Event("clip", call, self, call.argument(0, "parameters"))

    def _prepares(self) -> Iterator[Event]:
        for call in self._called("prepare"):
            if call.receiver is None:
                continue
            kinds = self.kinds(call.receiver, call)
            if "accelerator" in kinds or (kinds <= {""} and "accelerator" in _last_name(call.receiver).lower()):
                yield Event("prepare", call, self, call.receiver)

    def _converts(self) -> Iterator[Event]:
        for call in self._called("convert_to_float8_training", *self._aliases("convert_to_float8_training")):
            if any(path == "torchao.float8.convert_to_float8_training" for _, path in self.paths(call)):
                yield Event("convert", call, self, call.argument(0, "module"))

    def _aliases(self, name: str) -> list[str]:
        return [
            key
            for scope in self.walker.scopes
            for key, bindings in scope.bindings.items()
            if key != name and any(binding.kind == "from" and binding.name == name for binding in bindings)
        ]

    def _loads(self) -> Iterator[Event]:
        for call in self._called(*names.LOADERS):
            given = call.argument(None, "dtype", "torch_dtype")
            yield Event("load", call, self, call.node, self.dtypes(given, call, strings=True) if given is not None else ())

    def _autocasts(self) -> Iterator[Event]:
        """Calls of an autocast, with the dtypes of its region; see `regions` for where it is entered."""
        for calls in self.calls.values():
            for call in calls:
                path = next((path for _, path in self.paths(call) if path in names.AUTOCASTS), None) if "autocast" in call.name or call.name in self._autocast_names else None
                if path is not None:
                    yield Event("autocast", call, self, call.node, self.autocast(call, path).dtypes)

    @cached_property
    def _autocast_names(self) -> set[str]:
        return set(self._aliases("autocast"))

    def _compiles(self) -> Iterator[Event]:
        for call in self._called("compile", "optimize", *self._aliases("compile")):
            if call.path in ("re.compile", "regex.compile", "builtins.compile", "sre.compile") or (call.receiver is None and call.name == "compile" and not self.paths(call)):
                continue
            paths = [path for _, path in self.paths(call)]
            if any(path.startswith(("torch.", "torch_xla.")) for path in paths) or (call.receiver is not None and not paths and call.name == "compile"):
                yield Event("compile", call, self, call.receiver)
        for calls in self.calls.values():
            for call in calls:
                for keyword, value in call.keywords.items():
                    if keyword in _COMPILE_OPTIONS and constant(value) not in ((False,), (None,), ("no",), ("NO",)):
                        yield Event("compile", call, self, value)
                        break

    def compiles(self, guard: Guard = ALWAYS) -> bool:
        """Whether something may be compiled under a guard: a call, an option, or a decorator."""
        if any(compatible(event.guard, guard) for event in self.events("compile")):
            return True
        for name, calls in self.calls.items():
            if "compile" in name and name != "compile" and any(compatible(self.guard_of(c), guard) for c in calls):
                return True
        return any(
            use.path.endswith("compile") and compatible(use.guard, guard) and not use.path.startswith(("re.", "regex."))
            for scope in self.walker.scopes
            for uses in scope.uses.values()
            for use in uses
            if not isinstance(self.walker.parents.get(use.node), cst.Call)
        )

    # -- training and inference -------------------------------------------------------------------

    def infers(self, record: Record) -> bool:
        """Whether what happens here is inference: by the regions, the names of the functions around it, their callers."""
        if any(region.kind == "no_grad" and compatible(region.guard, record.guard) and not (region.guard - record.guard) for region in self.regions(record)):
            return True
        return self.scope_infers(record.scope)

    def scope_infers(self, scope: Scope) -> bool:
        key = ("infers", scope)
        if key in self._active:
            return False
        self._active.add(key)
        try:
            for place in scope.within():
                if place.kind == "function" and names.infers(place.name):
                    return True
            if scope.kind != "function":
                return False
            callers = self.callers(scope)
            return bool(callers) and not self.escapes(scope) and all(self.of(c).infers(c) for c in callers)
        finally:
            self._active.discard(key)

    @property
    def declared(self) -> str | None:
        """What the settings say that the file is: "training", "inference", or None."""
        return self.project.declared(self.path)

    @cached_property
    def any_training(self) -> bool:
        """Whether the file trains at all."""
        return bool(self.calls.get("backward") or self.calls.get("manual_backward")) or any(
            self.events(kind) for kind in ("prepare", "initialize", "trainer")
        )

    def reachable(self, scope: Scope) -> set[Scope]:
        """The functions of the file that are connected with this one by calls, and its class and module."""
        seen: set[Scope] = set()
        pending = [scope]
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            if current.kind == "class":
                pending += current.children
                pending += [base.scope for base in self.bases(current) if isinstance(base, Class) and base.facts is self]
            elif current.kind == "function":
                pending += [call.scope for call in self.callers(current)]
                pending += [s for s in current.children]
                if current.parent is not None:
                    pending.append(current.parent)
            if current.kind != "module":
                for call in current.calls:
                    pending += [function.scope for function in self.functions(call) if function.facts is self]
            else:
                for call in current.calls:
                    pending += [function.scope for function in self.functions(call) if function.facts is self]
        return seen

    # -- text -------------------------------------------------------------------------------------

    def span(self, node: cst.CSTNode, at: Record) -> tuple[int, int]:
        return at.chunk.span(node)

    def text(self, node: cst.CSTNode, at: Record) -> str:
        """The code of a node, as it stands in the file, with its parentheses."""
        first, last = at.chunk.outer_span(node)
        return self.source.text[first:last]

    def short(self, node: cst.CSTNode | None) -> str:
        """A node's code on one line, cut to what a message can hold."""
        text = " ".join(cst.Module([]).code_for_node(node).split()) if node is not None else ""
        return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Trees are made of many objects, none of them garbage: collecting meanwhile costs a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Subscript):
        node = node.value
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def _could_be_instance(call: Call) -> bool:
    return not isinstance(call.func, (cst.Call, cst.Subscript, cst.Lambda))


_REGIONS = frozenset({"autocast", "no_grad", "fp8_autocast", "accelerator_autocast"})
_OPTIMIZER = re.compile(r"optim(?!.*sched)|^opt(?:_|$)|_opt$")
_HARMLESS = ("torch.utils.", "abc.", "typing.", "enum.", "dataclasses.", "collections.", "torch.autograd.", "object", "builtins.")
_COMPILE_OPTIONS = frozenset({"dynamo_backend", "dynamo_plugin", "torch_compile", "torch_compile_backend", "torch_compile_mode"})
#: Method names that many classes have: a receiver that is unknown may be any of them.
_COMMON = frozenset({
    "step", "update", "forward", "to", "train", "eval", "run", "get", "add", "append", "items", "load", "save", "backward", "scale",
    "half", "type", "init", "build", "state_dict", "load_state_dict", "parameters", "prepare", "compile", "__call__", "__init__",
})  # fmt: skip

__all__ = ["Event", "Facts", "NoProject", "Project", "Region", "text_of"]
