"""`Facts`: the result of the static analysis of one Python file, and the only interface that a rule needs.

A rule does not walk a syntax tree. It calls `facts.events("cast")`, `facts.calls["step"]`, `facts.evaluate(...)`,
`facts.regions(...)` and `facts.flow`, and yields diagnostics at events.

The kinds of events are listed in `events/event.py` (`EventKind`). `facts.events(kind)` returns the events of a kind in
order of evaluation.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.autocast_state import AutocastStates
from mpguard.lint.facts.behaviour.events import FINDERS, Event, EventKind, compiled, compiled_by
from mpguard.lint.facts.behaviour.flow import Flow
from mpguard.lint.facts.behaviour.frozen_params import FrozenModels
from mpguard.lint.facts.behaviour.options import Option, forgotten_dtypes
from mpguard.lint.facts.behaviour.precision import TensorDtypes
from mpguard.lint.facts.behaviour.regions import Region, Regions
from mpguard.lint.facts.behaviour.scalars import Scalars
from mpguard.lint.facts.behaviour.trace import Traces
from mpguard.lint.facts.domain.checkpoints import Checkpoints
from mpguard.lint.facts.domain.master_weights import may_keep_masters
from mpguard.lint.facts.domain.training_use import TrainingUse
from mpguard.lint.facts.domain.wrappers import WrapperFacts
from mpguard.lint.facts.program import api_names, implied_versions
from mpguard.lint.facts.program.callgraph import CallGraph
from mpguard.lint.facts.program.dtypes import AnyDtype, PossibleDtypes
from mpguard.lint.facts.program.evaluate import DEPTH, Values
from mpguard.lint.facts.program.lattice import (
    Alternatives,
    Class,
    Constant,
    DtypeValue,
    Function,
    Object,
    Ref,
    constants_of,
)
from mpguard.lint.facts.program.mentions import iterated
from mpguard.lint.facts.project_api import NoProject, ProjectApi
from mpguard.lint.facts.syntax import partial_parse
from mpguard.lint.facts.syntax.constant_flags import SUPPORTS_BF16, apply_constant_flags
from mpguard.lint.facts.syntax.index import Indexer
from mpguard.lint.facts.syntax.nodes import dotted, text_of
from mpguard.lint.facts.syntax.path_condition import ALWAYS, Condition, PathCondition, compatible
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope, With
from mpguard.lint.project import references, summaries
from mpguard.lint.project.requirements import Required
from mpguard.lint.reachability.untaken import UntakenBranches
from mpguard.lint.reachability.unused import UnusedDefinitions
from mpguard.lint.source.libcst_internals import Frames
from mpguard.lint.source.source import Chunk, Source
from mpguard.lint.source.strip_comments import stripped
from mpguard.lint.source.test_paths import is_test

#: A class in an imported module whose code is longer than this (in characters) is indexed by its name and its bases
#: only: parsing hundreds of methods costs more than they contribute to the analysis of the importing file.
LARGEST_IMPORTED = 100_000
#: Events of training that a framework runs.
_TRAINS: tuple[EventKind, ...] = ("prepare", "initialize", "trainer")
#: Receivers that have a `step` method and are not optimizers: schedulers, profilers, environments, progress bars.
_NO_OPTIMIZER = lazy_pattern(r"sched|profil|\bprof\b|\benv|warmup|timer|\bp?bar\b|\bema\b")

#: Methods of optimizers of a project: `optimizer.step_and_update_lr(scaler)`.
_STEPS = lazy_pattern(r"(?:^|_)step(?:_|$)")
_OPTIMIZER = lazy_pattern(r"(?i)optim")


class Facts:
    """The facts of one file.

        path           the path of the file
        module         the module scope
        calls          all calls, by the last name of the callee: `facts.calls["step"]`
        flow           forward and backward data flow
        precision      the dtypes of tensors
        scalars        Python numbers that are combined with tensors
        autocast_states  the autocast state at a place
        wrappers       objects wrapped by Accelerate, DeepSpeed or FSDP
        training_use   the values and weights that are trained
        frozen_params  the models that are never trained
        checkpoints    the states that are saved and restored
        project        the configs, settings and other files of the linted tree

    These attributes, their methods, and the methods of this class are what rules use; a test holds it. The modules of
    `mpguard.lint.facts` also use `source`, `index`, `values`, `graph`, `regions_index`, `imported_module` and
    `parsed_bytes`, which may change at any time.

    Raises `text.Unparsable` for a file that Python accepts and LibCST does not.
    """

    def __init__(self, source: Source, project: ProjectApi | None = None, imported: bool = False) -> None:
        """Index the file.

        imported: this is a module that a linted file imports. Its statements are parsed on demand, when one of the
        names that they bind is needed.
        """
        self.source = source
        self.imported_module = imported
        self.project: ProjectApi = project if project is not None else NoProject()
        self.path = source.path
        self.parsed_bytes = 0
        chunks = source.chunks
        self.module = Scope("module", "", cst.Pass(), None, chunks[0])
        self.index = Indexer(self.module)
        self.values = Values(self)
        self.graph = CallGraph(self)
        self.regions_index = Regions(self)
        self.flow = Flow(self)
        self.frozen_params = FrozenModels(self)
        self.wrappers = WrapperFacts(self)
        self.training_use = TrainingUse(self)
        self.checkpoints = Checkpoints(self)
        self.autocast_states = AutocastStates(self)
        self.precision = TensorDtypes(self)
        self.scalars = Scalars(self)
        self.calls: dict[str, list[Call]] = {}
        self._required: dict[str, Required] = {}
        self._supports_bf16: bool | None = None
        self._indexed: dict[Scope, int] = {}
        self._aliases: tuple[int, dict[str, list[str]]] = (-1, {})
        self._unparsed: list[Chunk] = list(chunks) if imported else []
        self._relevance = partial_parse.Relevance(chunks)
        self._chunks_by_name: dict[str, list[Chunk]] = partial_parse.chunks_by_name(chunks) if imported else {}
        if not imported:
            self._index_chunks(self._relevance.skip_irrelevant_methods(self._relevant_chunks(chunks)))
            for chunk in self._unparsed:
                self.index.stub(chunk)
            self._unparsed = []
            apply_constant_flags(self.index, {SUPPORTS_BF16: True} if self.always_supports_bf16() else {})
        self._events: dict[EventKind, list[Event]] = {}
        self._imported: dict[str, Facts | None] = {}
        self._users: dict[str, list[Facts] | None] = {}
        self._searched: set[str] = set()
        self._active: set[object] = set()
        self._steps: dict[Scope, bool] = {}
        self._inference_scopes: dict[Scope, bool] = {}
        if not imported:
            self.project.add_linted(self)

    def need(self, name: str) -> None:
        """Parse the statements that may bind a top-level name.

        Does nothing for the linted file, which is parsed at once; an imported module is parsed on demand.
        """
        if self._unparsed and name in self._chunks_by_name:
            chunks = [chunk for chunk in self._chunks_by_name.pop(name) if chunk in self._unparsed]
            large = [chunk for chunk in chunks if chunk.end - chunk.start > LARGEST_IMPORTED]
            for chunk in large:
                self._unparsed.remove(chunk)
                self.index.stub(chunk)
            self._index_chunks(
                self._relevance.skip_irrelevant_methods(
                    [chunk for chunk in chunks if chunk not in large and not self._relevance.is_table(chunk)]
                )
            )

    def need_uses(self, name: str) -> None:
        """Parse the statements of an imported module that mention a name, and those that are no definitions."""
        if self._unparsed and name not in self._searched:
            self._searched.add(name)
            word = re.compile(rf"\b{re.escape(name)}\b")
            found = [
                chunk
                for chunk in self._unparsed
                if chunk.defines is None or (name in (text := chunk.text) and word.search(text))
            ]
            self._index_chunks(
                self._relevance.skip_irrelevant_methods(
                    [chunk for chunk in found if not self._relevance.is_table(chunk)]
                )
            )

    def need_all(self) -> None:
        """Parse all relevant statements of an imported module, which its events need."""
        if self._unparsed:
            self._index_chunks(
                self._relevance.skip_irrelevant_methods(
                    [chunk for chunk in self._unparsed if self._relevance.is_relevant(chunk)]
                )
            )
            self._unparsed = []

    def _index_chunks(self, chunks: Sequence[Chunk]) -> None:
        with Frames(), _without_gc():
            for chunk in chunks:
                if chunk in self._unparsed:
                    self._unparsed.remove(chunk)
                self.parsed_bytes += chunk.end - chunk.start - sum(each.end - each.body for each in chunk.skipped)
                self.index.chunk(chunk)
        for scope in self.index.scopes:
            done = self._indexed.get(scope, 0)
            for call in scope.calls[done:]:
                self.calls.setdefault(call.name, []).append(call)
            self._indexed[scope] = len(scope.calls)

    def _relevant_chunks(self, chunks: tuple[Chunk, ...]) -> Sequence[Chunk]:
        """Return the chunks of the linted file to parse; the others get stubs."""
        if len(self.source.normal) <= partial_parse.WHOLE_FILE_LIMIT:
            return chunks
        wanted = self._relevance.relevant_chunks(chunks)
        self._unparsed = [chunk for chunk in chunks if chunk not in wanted]
        return [chunk for chunk in chunks if chunk in wanted]

    def aliases(self, name: str) -> list[str]:
        """Return the local names that the file gives to an object of this name.

        Examples: `c` for `compile` after `from torch import compile as c`, `ac` for `autocast` after
        `ac = amp.autocast`.
        """
        if self._aliases[0] != self.parsed_bytes:
            found: dict[str, list[str]] = {}
            for scope in self.index.scopes:
                for key, bindings in scope.bindings.items():
                    for original in dict.fromkeys(map(_original_name, bindings)):
                        if original and original != key:
                            found.setdefault(original, []).append(key)
            self._aliases = self.parsed_bytes, found
        return self._aliases[1].get(name, [])

    # -- syntax -----------------------------------------------------------------------------------

    @property
    def scopes(self) -> list[Scope]:
        """The module, and every class and function of the file that is parsed."""
        return self.index.scopes

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node that directly contains a node; None for a whole top-level statement."""
        return self.index.parents.get(node)

    def call_of(self, node: cst.CSTNode | None) -> Call | None:
        """Return the record of a call; None if the node is no call."""
        return self.index.call_of.get(node) if node is not None else None

    def bindings(self, path: str, at: Record, guard: PathCondition = ALWAYS) -> list[Binding]:
        """Return the bindings of a name or a `self.` attribute that may have set its value at a record, latest first.

        guard: only those that are possible under this path condition.
        """
        return self.of(at).values.reaching(path, at.scope, at.order, guard)

    def argument_for(self, call: Call, param: Binding) -> cst.BaseExpression | None:
        """Return the argument that a call passes for a parameter, or its default; None if it is not visible."""
        return self.values.given(call, param.scope, param.key)

    # -- values -----------------------------------------------------------------------------------

    def resolve(self, path: str, scope: Scope, order: int) -> Alternatives:
        """Return the abstract value of a dotted name in a scope, at a place in the order of evaluation."""
        return self.of(scope).values.lookup(path, scope, order)

    def condition(self, node: cst.CSTNode, scope: Scope) -> Condition:
        """Return the truth of an expression as a formula over flags."""
        return self.of(scope).index.conditions.of(node, scope)

    def evaluate(self, node: cst.CSTNode | None, at: Record) -> Alternatives:
        """Return the abstract value of an expression at a record: its alternatives, each with a path condition."""
        values = self.of(at).values
        known = values.known(node)
        if known is not None:
            return known
        with Frames():
            return values.evaluate(node, at.scope, at.order)

    def constants(self, node: cst.CSTNode | None, at: Record) -> list[object]:
        """Return the constants that an expression may be; empty without one, and if it may be anything else.

        A constant has no attribute `value`, but a member of an `Enum` has: `Precision.BF16.value`.
        """
        if node is None:
            return []
        found = constants_of(self.evaluate(node, at))
        if not found and isinstance(node, cst.Attribute) and node.attr.value == "value":
            members = constants_of(self.evaluate(node.value, at))
            found = members if all(isinstance(each, (str, int, float)) for each in members) else []
        return found

    def paths(self, call: Call) -> list[tuple[PathCondition, str]]:
        """Return the full dotted names of the library callables that a call may run, each with its path condition."""
        return [(each.guard, each.atom.path) for each in self.evaluate(call.func, call) if isinstance(each.atom, Ref)]

    def called_path(self, call: Call) -> str:
        """Return the first of `paths`, or an empty string."""
        return next((path for _, path in self.paths(call)), "")

    def dtypes(self, node: cst.CSTNode | None, at: Record, strings: bool = False) -> PossibleDtypes:
        """Return the dtypes that an expression may have, each with its path condition.

        None stands for an unknown dtype or none. strings: strings such as `"float16"` count as dtypes too.
        """
        found: list[tuple[PathCondition, AnyDtype | None]] = []
        for each in self.evaluate(node, at):
            dtype = each.atom.dtype if isinstance(each.atom, DtypeValue) else None
            if strings and isinstance(each.atom, Constant) and isinstance(each.atom.value, str):
                dtype = api_names.DTYPE_STRINGS.get(each.atom.value)
            found.append((each.guard, dtype))
        return tuple(found)

    def kinds(self, node: cst.CSTNode | None, at: Record) -> set[str]:
        """Return the kinds of object that an expression may be, with "" for an unknown one.

        A value that it has only under other conditions than those of the place does not count.
        """
        found = self.evaluate(node, at)
        here = [each for each in found if compatible(each.guard, at.guard)]
        return {each.atom.kind if isinstance(each.atom, Object) else "" for each in here or found}

    def from_outside(self, node: cst.CSTNode | None, at: Record, depth: int = 8) -> bool:
        """True if an object comes from a caller that is not in the file.

        It is a parameter, or an attribute set from one. The return value of an imported function does not count: from
        there on the object belongs to the script.
        """
        path = dotted(node)
        if (facts := self.of(at)) is not self:
            return facts.from_outside(node, at, depth)
        if isinstance(node, cst.Call):
            inner = self.index.call_of.get(node)
            if inner is not None and inner.receiver is not None and inner.name in api_names.SAME:
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
                return self.from_outside(iterated(binding.value), binding, depth - 1)
        return False

    # -- functions and classes --------------------------------------------------------------------

    def of(self, record: Record | Scope) -> Facts:
        """Return the facts of the file that contains a record or a scope."""
        source = record.chunk.source
        if source is self.source or source.path == self.path:
            return self
        return self.project.facts_at(source.path) or self

    def elsewhere(self, record: Record) -> str | None:
        """Return the path of the file that contains a record if that is another file than this one."""
        path = record.chunk.source.path
        return path if path != self.path else None

    def imported(self, module: str) -> Facts | None:
        """Return the facts of an imported module of the linted tree, or None if it is not in the tree."""
        if module.split(".", 1)[0] in api_names.LIBRARIES:
            return None
        if module not in self._imported:
            self._imported[module] = None  # within an import cycle the module is unknown
            other = self._imported[module] = self.project.source_of(module, self.path)
            if other is not None:
                other.values.share_search(self.values)
        return self._imported[module]

    def imported_modules(self) -> list[Facts]:
        """Return the facts of the modules of the tree that this one imports from in a statement that is parsed."""
        bindings = (each for found in self.module.bindings.values() for each in found)
        found = (self.module_of(each) for each in bindings if each.kind in ("import", "from"))
        return [other for other in dict.fromkeys(found) if other is not None]

    def module_of(self, binding: Binding) -> Facts | None:
        """Return the facts of the module of the tree that an import binds a name of, or None."""
        module = binding.target
        found = self.imported(module)
        if binding.kind == "from" and (found is None or found.source.path.endswith("__init__.py")):
            inner = f"{module}{'' if module.endswith('.') else '.'}{binding.name}"
            atoms = [each.atom for each in self.values.bound(binding)] if found is not None else []
            homes = [atom.facts for atom in atoms if isinstance(atom, (Function, Class))]
            return homes[0] if homes else self.imported(inner)
        return found

    @cached_property
    def may_train(self) -> bool:
        """True if the code may train, or decide in which dtype other code runs."""
        return summaries.trains(self.source.data)

    def users(self, name: str) -> list[Facts] | None:
        """Return the facts of the modules of the tree that use a top-level name of this one, and may train.

        None if they are not all known.
        """
        if name not in self._users:
            found = self._users[name] = self.project.users_of(name, self.path)
            for other in found or ():
                other.values.share_search(self.values)
        return self._users[name]

    def exported(self, name: str) -> bool:
        """True if another module may import a top-level name of this one.

        It is in `__all__`, or some file of the tree imports it.
        """
        self.need("__all__")
        listed = (binding.value for binding in self.module.bindings.get("__all__", ()) if binding.value is not None)
        return any(f"'{name}'" in text_of(each).replace('"', "'") for each in listed) or (
            self.project.imported_elsewhere(self.path, name)
        )

    def derived_elsewhere(self, cls: Scope) -> bool:
        """True if a class of another file may derive from a class: it may replace any of its methods."""
        return self.project.derived_elsewhere(self.of(cls).path, cls.name)

    def attributes(self, cls: Scope) -> dict[str, list[Binding]]:
        """Return the attributes that a class and its base classes in the file set, each with its bindings."""
        return self.of(cls).graph.attributes(cls)

    def ancestry(self, cls: Scope) -> Iterator[str]:
        """Yield the full names of the library classes that a class derives from; "" for an unknown one."""
        return self.of(cls).graph.ancestry(cls)

    def class_kind(self, cls: Scope) -> str:
        """Return the kind of a class's instances: `model`, `own_optimizer`, `trainer` ...

        It is `own` for a plain user class, and "" if unknown.
        """
        return self.of(cls).graph.class_kind(cls)

    def base_unknown(self, cls: Scope | None) -> bool:
        """True if a class has base classes outside the analysed files, which may add attributes and behaviour."""
        return cls is not None and self.of(cls).graph.base_unknown(cls)

    def callers(self, scope: Scope) -> list[Call]:
        """Return the calls of a function in the linted tree, those of its own file first."""
        return self.of(scope).graph.callers(scope)

    def all_calls(self, scope: Scope) -> list[Call] | None:
        """Return the calls of a function in all files of the project; None if there may be others."""
        return self.untaken_branches.all_calls(scope)

    def functions(self, call: Call) -> list[Function]:
        """Return the functions of the tree that a call may run.

        That is a function, the `forward` of a module, or the `__init__` of a class.
        """
        return self.of(call).graph.functions(call)

    def repeated(self, scope: Scope, depth: int = 4) -> bool:
        """True if a function is called in a loop, directly or through its callers: once per epoch, for example."""
        callers = self.callers(scope) if depth else []
        return any(call.loops or self.repeated(call.scope, depth - 1) for call in callers)

    def escapes(self, scope: Scope) -> bool:
        """True if a function is passed as a value, so that code outside the call graph may call it."""
        return self.of(scope).graph.escapes(scope)

    def programs_of(self, scope: Scope, into: Callable[[Scope], bool] = lambda _: True) -> set[Scope]:
        """Return the functions of the tree that run in a program that runs this one.

        into: True for a callee that is of interest, with what it calls.
        """
        return self.of(scope).graph.programs_of(scope, into)

    def reachable(self, scope: Scope) -> set[Scope]:
        """Return the functions of the tree connected with this one by calls, in either direction.

        Its class and module are included.
        """
        return self.graph.reachable(scope)

    def guard_of(self, record: Record) -> PathCondition:
        """Return a record's path condition, including the conditions under which its function is always called."""
        return self.of(record).graph.guard_of(record)

    # -- regions ----------------------------------------------------------------------------------

    def regions(self, record: Record) -> tuple[Region, ...]:
        """Return the contexts around a record, outermost first: decorators of its functions, and `with` items."""
        return self.of(record).regions_index.around(record)

    def autocasts(self, record: Record, depth: int = 3) -> list[tuple[Region, PathCondition]]:
        """Return the autocast regions that are active at a record.

        These are those of its function, otherwise those of its callers.
        """
        with Frames():
            return self.of(record).regions_index.autocasts(record, depth)

    def entered(self, item: With) -> tuple[Region, ...]:
        """Return the regions that a `with` item enters."""
        return self.of(item).regions_index.entered(item)

    def off_by_default(self, region: Region) -> bool:
        """True if `enabled` of a region is a parameter whose default is False."""
        return self.regions_index.off_by_default(region)

    def switched_off(self, region: Region, program: Collection[Scope]) -> bool:
        """True if `enabled` of a region is a parameter that no call in a program's files sets to anything but False."""
        return self.regions_index.switched_off(region, program)

    def autocast(self, call: Call, path: str) -> Region:
        """Return the region that a call of an autocast creates: its device and dtype, with torch's defaults."""
        return self.of(call).regions_index.autocast(call, path)

    def enabled(self, call: Call, path: str) -> PathCondition:
        """Return the path condition that `enabled=` of an autocast or a scaler stands for.

        It is an impossible one for `False`.
        """
        return self.of(call).regions_index.enabled(call, path)

    def required(self, library: str) -> Required:
        """Return the versions of a library that the project requires, and those that the code itself can run with."""
        if library not in self._required:
            below = implied_versions.lowest_too_high(self, library)
            self._required[library] = self.project.required(self.path, library).bounded(below)
        return self._required[library]

    def always_supports_bf16(self) -> bool:
        """True if `torch.cuda.is_bf16_supported()` is True on each GPU: the required torch counts emulation."""
        if self._supports_bf16 is None:
            asks = SUPPORTS_BF16 in self.file_text
            self._supports_bf16 = asks and self.required("torch").since(api_names.COUNTS_EMULATION)
        return self._supports_bf16

    # -- events -----------------------------------------------------------------------------------

    def events(self, kind: EventKind) -> list[Event]:
        """Return all events of a kind in the file, in order of evaluation."""
        self.need_all()
        if kind not in self._events:
            with Frames():
                self._events[kind] = sorted(FINDERS[kind](self), key=lambda event: event.order)
        return self._events[kind]

    def events_around(self, kind: EventKind, scope: Scope) -> list[Event]:
        """Return the events of a kind in the file, and those in the functions of other files connected with a scope."""
        near = self.reachable(scope)
        others = dict.fromkeys(self.of(each) for each in sorted(near, key=lambda each: each.chunk.source.path))
        outside = (event for other in others if other is not self for event in other.events(kind))
        return [*self.events(kind), *(event for event in outside if event.scope in near)]

    @cached_property
    def traces(self) -> Traces:
        """The sequences of operations on scaled gradients in order of control flow, with helper functions expanded."""
        self.need_all()
        return Traces(self)

    def compiles(self, guard: PathCondition = ALWAYS, model: Event | None = None) -> bool:
        """True if something may be compiled under a path condition: by a call, an option, or a decorator.

        model: the event whose subject it may be; what is definitely another object does not count.
        """
        return compiled(self, guard, model)

    def compiled_by(self, scopes: Collection[Scope], model: Event) -> bool:
        """True if one of these functions, in another file than the model's, may compile the subject of an event."""
        return compiled_by(scopes, model)

    @cached_property
    def forgotten_dtypes(self) -> dict[Call, Option]:
        """The autocasts without a dtype in a script whose own option or constant selects BF16.

        Each is returned with that option.
        """
        return forgotten_dtypes(self)

    # -- training and inference -------------------------------------------------------------------

    def is_inference(self, record: Record) -> bool:
        """True if a record belongs to inference.

        The regions around it, the names of its functions, or its callers show it.
        """
        if any(
            region.kind == "no_grad" and compatible(region.guard, record.guard) and not (region.guard - record.guard)
            for region in self.regions(record)
        ):
            return True
        return self.is_inference_scope(record.scope)

    def is_inference_scope(self, scope: Scope) -> bool:
        """True if a scope is used for inference only.

        The names of the functions around it, or all of its callers, show it.
        """
        if (facts := self.of(scope)) is not self:
            return facts.is_inference_scope(scope)
        if scope in self._inference_scopes:
            return self._inference_scopes[scope]
        found, whole = self._find_inference_scope(scope), not self._active
        if whole:  # within a cycle of calls the result may be incomplete
            self._inference_scopes[scope] = found
        return found

    def _find_inference_scope(self, scope: Scope) -> bool:
        key = ("infers", scope)
        if key in self._active or len(self._active) > DEPTH:
            return False
        self._active.add(key)
        try:
            for place in scope.within():
                if place.kind == "function" and api_names.is_inference(place.name) and not _trains(place):
                    return True
            if scope.kind != "function":
                return False
            callers = self.callers(scope)
            if not callers or self.escapes(scope):
                return False
            if _optimizes(scope):  # as a part of an evaluation, a probe is trained; that of a test is not
                return all(any(api_names.measures(place.name) for place in call.scope.within()) for call in callers)
            return all(self.of(call).is_inference(call) for call in callers)
        finally:
            self._active.discard(key)

    @property
    def declared(self) -> str | None:
        """The role that the settings declare for the file: "training", "inference", or None."""
        return self.project.declared(self.path)

    @cached_property
    def any_training(self) -> bool:
        """True if the file trains at all: it has a backward pass, `prepare`, `deepspeed.initialize` or a trainer."""
        return bool(self.calls.get("backward") or self.calls.get("manual_backward")) or any(
            self.events(kind) for kind in _TRAINS
        )

    def has_step(self, scope: Scope) -> bool:
        """True if gradients are applied in the functions connected with a scope.

        They are applied by a `step` of anything but a scheduler.
        """
        if scope not in self._steps:
            self._steps[scope] = any(
                (call.name == "step" or (_STEPS.search(call.name) and _OPTIMIZER.search(self.short(call.receiver))))
                and call.receiver is not None
                and not _NO_OPTIMIZER.search(self.short(call.receiver).lower())
                and "scheduler" not in self.kinds(call.receiver, call)
                for place in self.reachable(scope)
                for call in place.calls
            )
        return self._steps[scope]

    @cached_property
    def unused_definitions(self) -> UnusedDefinitions:
        """The functions, classes and methods that nothing in the project uses."""
        return UnusedDefinitions(self)

    @cached_property
    def untaken_branches(self) -> UntakenBranches:
        """The branches of the file that no call of the project takes."""
        return UntakenBranches(self)

    @cached_property
    def is_test(self) -> bool:
        """True for a test or a benchmark."""
        return is_test(self.path, self.source.data)

    @cached_property
    def may_update_scaler(self) -> bool:
        """True if the file, or other code of its project, may update a GradScaler that the file steps with."""
        code = stripped(self.file_text).encode("utf-8", "surrogateescape")
        return references.updates(code) or self.project.scaler_updated_elsewhere(self.path)

    @cached_property
    def may_keep_masters(self) -> bool:
        """True if FP32 master weights may be kept, and the loss scaled, by other means than torch.amp."""
        return may_keep_masters(self)

    # -- text -------------------------------------------------------------------------------------

    @property
    def file_text(self) -> str:
        """The text of the file, in which spans and edits are offsets."""
        return self.source.text

    def span(self, node: cst.CSTNode, at: Record) -> tuple[int, int]:
        """Return the start and end of a node in `file_text`, without its parentheses."""
        return at.chunk.span(node)

    def outer_span(self, node: cst.CSTNode, at: Record) -> tuple[int, int]:
        """Return the start and end of a node in `file_text`, with its parentheses."""
        return at.chunk.outer_span(node)

    def text(self, node: cst.CSTNode, at: Record) -> str:
        """Return the code of a node as it is in the file, with its parentheses."""
        return at.chunk.source.text[slice(*at.chunk.outer_span(node))]

    def short(self, node: cst.CSTNode | None) -> str:
        """Return a node's code on one line, cut to 60 characters for a message."""
        text = " ".join(cst.Module([]).code_for_node(node).split()) if node is not None else ""
        return text if len(text) <= 60 else text[:57] + "..."


def _trains(scope: Scope) -> bool:
    """True if a function trains whatever its name is: `eval_linear` calls `train(...)`, or steps on parameters.

    Or it gives an optimizer that it makes to a function that it calls in a loop.
    """
    calls_trainer = any(call.receiver is None and api_names.is_training(call.name) for call in scope.calls)
    return calls_trainer or ((_optimizes(scope) or _hands_out_optimizer(scope)) and not api_names.measures(scope.name))


def _optimizes(scope: Scope) -> bool:
    """True if a function takes steps on the parameters of a model in a loop."""
    looped = {call.name for call in scope.calls if call.loops and call.receiver is not None}
    return {"backward", "step"} <= looped and any(call.name == "parameters" for call in scope.calls)


def _hands_out_optimizer(scope: Scope) -> bool:
    """True if a function makes an optimizer (`optim.SGD(...)`), and passes it to a function in a loop."""
    made = {
        key
        for key, bindings in scope.bindings.items()
        for binding in bindings
        if isinstance(binding.value, cst.Call) and re.search(r"(?:^|\.)optim\.", dotted(binding.value.func))
    }
    looped = (call for call in scope.calls if call.loops and call.receiver is None)
    return bool(made) and any(dotted(arg.value) in made for call in looped for arg in call.node.args)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection while trees are built.

    They consist of many objects, none of them garbage, and collecting meanwhile takes a tenth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _original_name(binding: Binding) -> str:
    """Return the original last name that an import or an assignment of a dotted name renames; or an empty string."""
    if binding.kind == "from":
        return binding.name
    return dotted(binding.value).rpartition(".")[2] if binding.kind == "assign" and "." in dotted(binding.value) else ""
