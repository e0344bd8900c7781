"""The matmuls in the events of torch's profiler: where each one ran, and which node of autograd it belongs to.

An operator of the forward pass that has a node in autograd's graph has that node's sequence number; the operators of
the node's backward run inside an event with the same number. So a matmul reaches a gradient if its node was evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mpguard.policy.dtype import Dtype
from mpguard.runtime.proof import products
from mpguard.runtime.proof.compiled_graphs import GRAPH_CALL, NO_HASH, CompiledGraphs, GraphCall
from mpguard.runtime.proof.products import Work

#: The beginning of the name of a range that a module opens; the rest is its number.
MODULE = "mpguard::module "

#: The beginning of the name of a range around what a script computes without autocast; the rest is its number.
WITHOUT_AUTOCAST = "mpguard::without autocast "

#: The beginning of the name of a range around a call of a trained model without gradients; the rest is its number.
EVALUATION = "mpguard::evaluation "

#: The name of a range around the call of an operator whose result selective checkpointing may have kept, and that of
#: the event of torch's around such a call: it is in the event of the operator.
FROM_CACHE, DISPATCH_MODE = "mpguard::from cache", "PythonDispatchMode"

#: Ranges whose operators are no part of the training: compilation runs the operators with fake tensors.
IGNORED = ("Optimizer.", "DistributedOptimizer.")
COMPILING = "(dynamo_timed)"

#: Functions of autograd around compiled code, and the range of a compiled graph.
COMPILED = ("CompiledFunction", "Torch-Compiled Region", "## Call CompiledFxGraph")

#: Functions of autograd whose matmuls are in FP8, in software where FP8 is emulated.
FP8_FUNCTIONS = ("matmul_with_hp_or_float8_args", "EmulatedGroupedMM", "mx_mm")

#: Functions of Transformer Engine that multiply by their weights in kernels that are no operators of torch.
TE_FUNCTIONS = ("_Linear", "_LayerNormLinear", "_LayerNormMLP", "_GroupedLinear")

#: The beginnings of names of kernels that inductor generates and that multiply no matrices: its templates do. A trained
#: matrix can be among their operands, or what has its shape, such as the gradient of an embedding.
FUSED = ("triton_poi_", "triton_red_", "triton_per_", "triton_for_", "triton_split_scan_")

#: Further ranges of mpguard.
OWN = (FROM_CACHE, WITHOUT_AUTOCAST, EVALUATION)

#: The beginnings of names of events that are no kernels of other libraries.
NO_KERNELS = (
    "aten::", "autograd::", "torch::autograd::", "torch::distributed::", "torch.distributed.", "torchao::triton_",
    "c10d", MODULE, *OWN, "## ", *FUSED,
)  # fmt: skip

#: Functions of `torch.distributed.nn.functional`, which move tensors and multiply nothing. What they send can have the
#: shape of a trained matrix, such as an expert's tokens, if there are as many as the model is wide.
COLLECTIVES = (
    "_AllGather", "_AllGatherBase", "_AllReduce", "_AlltoAll", "_AlltoAllSingle", "_Broadcast", "_Gather", "_Reduce",
    "_Reduce_Scatter", "_Scatter",
)  # fmt: skip

#: What a matmul calls that multiplies a sparse matrix. How many elements that has is not recorded, and autocast casts
#: no sparse matmuls: they do not count.
SPARSE = "aten::_nnz"

#: The operator that copies to another dtype.
COPY = "aten::copy_"

#: The operator that writes a number into a tensor of another dtype, where it may be infinite. Others raise an error.
WHERE = "aten::where"

#: Dtypes to which a copy rounds.
ROUNDED = ("bf16", "fp16", "fp8", "fp4")

#: The dtypes of 16 bits, each with its largest number.
LARGEST: dict[str | None, float] = {each.short: each.largest for each in (Dtype.FP16, Dtype.BF16)}

#: Matmuls of matrices, whose inner dimension has to be a multiple of `FP8_MULTIPLE` for the FP8 kernels of GPUs.
FP8_MATRIX, FP8_MULTIPLE = ("aten::mm", "aten::_scaled_mm", "aten::_scaled_mm_v2"), 16

#: Scopes of events: an operator, or a node of autograd's graph.
FUNCTION, BACKWARD = 0, 1

#: A node of autograd's graph: the thread of its forward pass, and its sequence number.
GraphNode = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Overflow:
    """A finite number that an operator wrote into a tensor in whose dtype it is infinite. module: its number."""

    module: int | None
    value: float
    dtype: str


@dataclasses.dataclass(frozen=True)
class Unaligned:
    """The gradient of a weight in FP8, over a number of rows that no kernel of a GPU takes. module: its number."""

    module: int | None
    rows: int


@dataclasses.dataclass
class OperatorTrace:
    """The matmuls between two points of a process.

    forward: work of the forward pass, each with the nodes that it belongs to (none: without gradient) and its FLOPs.
    backward: FLOPs in the nodes that were evaluated. evaluated: these nodes. origins: where the nodes were created.
    derived: of those that a backward pass has created, the node whose backward that was. opaque: FLOPs of the kernels
    that are no operators, by their nodes; their backward does twice as much. likely: those that multiply by a trained
    matrix if their node has taken one: all of their operands have the shape of one.
    converted: elements that were copied to another dtype in backward, by the dtypes before and after. casts: elements
    that were rounded to 16 bits or fewer elsewhere, by the dtype, the module and the shape. overflows: numbers that do
    not fit. unaligned: FP8 matmuls of the backward pass, with the node that they belong to. eager: True if there are
    matmuls outside of compiled graphs whose name has a hash. unknown: True if something was recorded without shapes
    that cannot be told without.
    """

    forward: list[tuple[Work, frozenset[GraphNode], int]] = dataclasses.field(default_factory=list)
    backward: list[tuple[Work, GraphNode | None, int]] = dataclasses.field(default_factory=list)
    evaluated: set[GraphNode] = dataclasses.field(default_factory=set)
    origins: dict[GraphNode, Work] = dataclasses.field(default_factory=dict)
    derived: dict[GraphNode, GraphNode] = dataclasses.field(default_factory=dict)
    opaque: dict[GraphNode, tuple[Work, int]] = dataclasses.field(default_factory=dict)
    likely: dict[GraphNode, tuple[Work, int]] = dataclasses.field(default_factory=dict)
    converted: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    casts: Counter[tuple[str, int | None, tuple[int, ...]]] = dataclasses.field(default_factory=Counter)
    overflows: set[Overflow] = dataclasses.field(default_factory=set)
    unaligned: list[tuple[Unaligned, GraphNode | None]] = dataclasses.field(default_factory=list)
    eager: bool = False
    unknown: bool = False


def from_cache() -> Any:
    """Return a range around the call of an operator that computes nothing if its result was kept."""
    from torch._C._profiler import _RecordFunctionFast

    return _RecordFunctionFast(FROM_CACHE)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What the name of an event tells. module: its number, of a module's range. known: what an operator multiplies."""

    module: int | None
    by_script: bool
    evaluated: bool
    ignored: bool
    engine: bool
    known: products.Operator | None
    attention: bool
    compiled: bool
    fp8: bool
    kernel: bool
    graph: bool
    fact: bool
    wide_only: bool


@functools.lru_cache(maxsize=8192)
def _kind_of(name: str) -> _Kind:
    known = products.operator(name)
    return _Kind(
        module=int(name[len(MODULE) :]) if name.startswith(MODULE) else None,
        by_script=name.startswith(WITHOUT_AUTOCAST),
        evaluated=name.startswith(EVALUATION),
        ignored=name.startswith(IGNORED) or name.endswith(COMPILING),
        engine=name.startswith("autograd::engine::evaluate_function"),
        known=known,
        attention=(name.startswith("aten::") and "_attention" in name) or (known is not None and known.attention),
        compiled=name.startswith(COMPILED),
        fp8=name.startswith(FP8_FUNCTIONS),
        kernel=not name.startswith(NO_KERNELS) and name not in COLLECTIVES,
        graph=name.startswith(GRAPH_CALL),
        fact=name in (FROM_CACHE, SPARSE, COPY, WHERE),
        wide_only=products.is_wide_only(name),
    )


class _Place:
    """Where an event is: what it has from the events around it, many of which share a place."""

    __slots__ = (
        "attention", "backward", "by_script", "call", "compiled", "evaluated", "fp8", "ignored", "inside", "module",
        "wide_only",
    )  # fmt: skip

    def __init__(self, around: _Place | None = None) -> None:
        if around is not None:
            for name in self.__slots__:
                setattr(self, name, getattr(around, name))
            return
        self.ignored = self.attention = self.compiled = self.fp8 = self.inside = self.by_script = False
        self.evaluated = self.wide_only = False
        self.module: int | None = None
        self.backward: GraphNode | None = None
        self.call: GraphCall | None = None


class _Event:
    """An event, with the one around it."""

    __slots__ = ("cached", "end", "kind", "known", "multiplies", "name", "node", "outer", "place", "raw", "sparse")

    def __init__(self, raw: Any, name: str, end: int, outer: _Event | None, outside: _Place) -> None:
        self.raw, self.name, self.end, self.outer, self.kind = raw, name, end, outer, _kind_of(name)
        self.place: _Place = outside if outer is None else outer.place
        self.known: products.Operator | None = None
        self.node: GraphNode | None = None
        self.multiplies = self.sparse = False  # a matmul ran inside; it multiplies a sparse matrix
        self.cached = False  # its result was kept, unless a matmul ran inside

    def mark_cached(self) -> None:
        """Mark the operator around the range `FROM_CACHE`, and what is between them."""
        around = self.outer
        while around is not None:
            around.cached = True
            around = around.outer if around.name == DISPATCH_MODE else None

    def mark_multiplying(self) -> None:
        """Mark the events around a matmul."""
        around = self.outer
        while around is not None and not around.multiplies:
            around.multiplies = True
            around = around.outer


def read(
    events: Iterable[Any],
    weights: set[tuple[int, ...]],
    te_dtype: str | None,
    closures: frozenset[int] = frozenset(),
    graphs: CompiledGraphs | None = None,
    *,
    shapes: bool = True,
) -> OperatorTrace:
    """Return the matmuls among the events of a profiler.

    weights: shapes of the matrices that are trained, to recognize kernels that multiply by one. te_dtype: the dtype in
    which layers of Transformer Engine multiply; None if they do as their operands say. closures: when the steps of
    optimizers began that are not finished yet: in them a closure trains. graphs: what compiled code has multiplied in
    earlier calls; those of these events are added. shapes: False if the events have no shapes and dtypes.
    """
    graphs = CompiledGraphs() if graphs is None else graphs
    trace = OperatorTrace()
    creators: dict[GraphNode, _Event] = {}
    candidates, calls, copies = _nested(events, trace, creators, closures, None if shapes else graphs)
    for event in candidates:
        if event.known is not None:
            event.mark_multiplying()
    for call in calls:
        if call.name in graphs:
            call.event.mark_multiplying()
    candidates = [each for each in candidates if not (each.multiplies or each.sparse or each.cached)]
    if shapes:
        for event in candidates:
            _add(event, trace, creators, weights, te_dtype, graphs=graphs)
        trace.unknown = not all(call.is_recorded or graphs.is_known(call.name) for call in calls)
        graphs.conversions[copies] = trace.converted.copy()
    else:
        known = all(_is_known(graphs, each) for each in (*candidates, *(call.event for call in calls)))
        trace.unknown = not known or copies not in graphs.conversions
        trace.converted = graphs.conversions.get(copies, trace.converted).copy()
    for call in calls:
        place = call.event.place
        for work, flops in graphs.replayed(call, shapes=shapes):
            here = _moved(work, place.module, place.by_script, place.evaluated)
            _add_work(here, flops, call.event, trace, creators)
        trace.converted += graphs.converted_in(call) if place.inside else Counter()
    for node, event in creators.items():
        place = event.place
        trace.origins[node] = _work(None, place)
        if place.backward is not None:
            trace.derived[node] = place.backward
    return trace


@functools.lru_cache(maxsize=8192)  # a compiled model has hundreds that are equal
def _moved(work: Work, module: int | None, by_script: bool, evaluated: bool) -> Work:
    """Return the work of a compiled graph, in the place of its call."""
    return dataclasses.replace(work, module=module, by_script=by_script, evaluated=evaluated)


def _is_known(graphs: CompiledGraphs, event: _Event) -> bool:
    """True if what an event multiplies is known without its shapes."""
    call = event.place.call
    if call is not None:
        return graphs.is_known(call.name)
    return event.known is None and event.name in graphs.harmless


@functools.lru_cache(maxsize=8192)
def _is_plain(name: str) -> bool:
    """True for the name of an operator that tells nothing but where its node of autograd's graph was created."""
    kind = _kind_of(name)
    around = kind.module is not None or kind.by_script or kind.evaluated or kind.ignored or kind.engine or kind.graph
    multiplies = kind.known is not None or kind.attention or kind.kernel or kind.compiled or kind.fp8 or kind.wide_only
    return not (around or multiplies or kind.fact)


def _tells_nothing(event: Any) -> bool:
    """True for an operator that multiplies nothing and has no node, such as most of a backward pass: DDP's copies."""
    return _is_plain(event.name()) and event.sequence_nr() < 0 and event.scope() == FUNCTION


def _nested(
    events: Iterable[Any],
    trace: OperatorTrace,
    creators: dict[GraphNode, _Event],
    closures: frozenset[int],
    graphs: CompiledGraphs | None,
) -> tuple[list[_Event], list[GraphCall], int]:
    """Return what may multiply, the calls of compiled graphs, and the number of copies in backward passes.

    The last event that has the number of a node is its creator. graphs: those whose operators are left out; None if
    shapes were recorded.
    """
    ordered = sorted(
        ((event.start_thread_id(), event.start_ns(), -event.end_ns(), number, event)
         for number, event in enumerate(events) if not _tells_nothing(event) and not event.is_async()),
    )  # fmt: skip
    candidates: list[_Event] = []
    calls: list[GraphCall] = []
    nested: list[_Event] = []
    outside, copies, thread = _Place(), 0, None
    for tid, start, end, _, raw in ordered:
        if tid != thread:
            thread, nested = tid, []
        while nested and nested[-1].end <= start:
            nested.pop()
        around = nested[-1].place.call if nested and graphs is not None else None
        if around is not None and graphs is not None and graphs.is_known(around.name):
            continue
        event = _Event(raw, raw.name(), -end, nested[-1] if nested else None, outside)
        nested.append(event)
        kind = event.kind
        _classify(event, tid, trace, creators, closure=start in closures)
        if event.place.ignored:
            continue
        if kind.graph:
            event.place = _Place(event.place)
            event.place.call = GraphCall(event)
            calls.append(event.place.call)
        if kind.fact:
            copies += event.place.inside and event.place.call is None and event.name == COPY
            _add_fact(event, trace, shapes=graphs is None)
        if event.known is not None or (kind.kernel and raw.scope() == FUNCTION):
            candidates.append(event)
    return candidates, calls, copies


def _add_fact(event: _Event, trace: OperatorTrace, *, shapes: bool) -> None:
    """Add what an event shows about the matmuls around it, or about the values that it writes."""
    if event.name == FROM_CACHE:
        event.mark_cached()
    elif event.name == SPARSE and event.outer is not None and event.outer.known is not None:
        event.outer.sparse = True
    elif not shapes:
        return
    elif event.name == COPY:
        if event.place.call is not None:
            _add_conversion(event.raw, event.place.call.converted)
        elif event.place.inside:
            _add_conversion(event.raw, trace.converted)
        if not event.place.inside:
            _add_cast(event, trace)
    elif event.name == WHERE:
        _add_overflow(event, trace)


def _classify(
    event: _Event, thread: int, trace: OperatorTrace, creators: dict[GraphNode, _Event], *, closure: bool
) -> None:
    """Set what an event is, from its name, its scope and its sequence number. closure: True if it is no part of what
    is ignored."""
    kind, scope = event.kind, event.raw.scope()
    if kind.module is not None or kind.by_script or kind.evaluated or kind.ignored:
        place = event.place = _Place(event.place)
        place.module = place.module if kind.module is None else kind.module
        place.by_script |= kind.by_script
        place.evaluated |= kind.evaluated
        place.ignored = (place.ignored or kind.ignored) and not (closure and event.name.startswith(IGNORED))
    elif scope == BACKWARD:
        place = event.place = _Place(event.place)
        number = event.raw.sequence_nr()
        if number >= 0:
            place.backward = event.raw.fwd_thread_id(), number
            trace.evaluated.add(place.backward)
        place.inside, place.module, place.by_script = True, None, False
        place.compiled, place.attention, place.fp8, place.wide_only = kind.compiled, False, kind.fp8, False
    elif kind.engine:
        event.place = _Place(event.place)
        event.place.inside = True
    elif scope == FUNCTION:
        event.known = kind.known
        if kind.attention or kind.compiled or kind.fp8 or kind.wide_only:
            place = event.place = _Place(event.place)
            place.attention |= kind.attention
            place.compiled |= kind.compiled
            place.fp8 |= kind.fp8
            place.wide_only |= kind.wide_only
        number = event.raw.sequence_nr()
        if number >= 0 and not event.place.ignored:
            event.node = thread, number
            creators[thread, number] = event


def _nodes(event: _Event, creators: dict[GraphNode, _Event]) -> frozenset[GraphNode]:
    """Return the nodes that an event, or an event around it, has created."""
    found: list[GraphNode] = []
    around: _Event | None = event
    while around is not None:
        if around.node is not None and creators.get(around.node) is around:
            found.append(around.node)
        around = around.outer
    return frozenset(found)


def _add(
    event: _Event,
    trace: OperatorTrace,
    creators: dict[GraphNode, _Event],
    weights: set[tuple[int, ...]],
    te_dtype: str | None,
    *,
    graphs: CompiledGraphs,
) -> None:
    """Add an event to a trace if it is a matmul. graphs: get the names of those that are none."""
    name, place = "", event.place
    in_graph = place.call is not None and not place.call.name.startswith(NO_HASH)
    if event.known is not None:
        trace.eager |= not in_graph
        dtype = products.dtype_of(event.known, event.raw.dtypes())
        flops = products.work_of(event.known, _input_shapes(event.raw))
        if dtype is None or not flops:
            return
        dtype = "fp8" if place.fp8 else dtype
        if dtype == "fp8" and place.inside and event.name in FP8_MATRIX:
            _add_unaligned(event, trace, weights)
    else:
        flops = _kernel_work(event.raw.shapes(), event.raw.dtypes(), weights)
        if not flops:
            if not _add_likely(event, trace, creators, weights):
                graphs.harmless.add(event.name)
            return
        te = event.name in TE_FUNCTIONS
        dtype = (te_dtype or _operand(event.raw.dtypes())) if te else None
        name = "" if te else event.name
    trace.eager |= not in_graph
    work = _work(dtype, place, name)
    nodes = _add_work(work, flops, event, trace, creators)
    if place.call is not None:
        place.call.products.append((work, flops))
    if event.known is None and event.node in nodes:
        assert event.node is not None
        trace.opaque[event.node] = work, flops
    if event.known is None and place.call is not None:
        graphs.opaque.add(place.call.name)


def _add_likely(
    event: _Event, trace: OperatorTrace, creators: dict[GraphNode, _Event], weights: set[tuple[int, ...]]
) -> bool:
    """Add a function whose operands all have the shape of a trained matrix: its node shows if one of them is one.

    Return False for another function.
    """
    both = zip(event.raw.shapes(), event.raw.dtypes(), strict=False)
    tensors = [tuple(shape) for shape, dtype in both if shape and products.kineto_dtype(dtype)]
    square = [shape for shape in tensors if shape in weights]
    place = event.place
    if place.inside or event.node is None or creators.get(event.node) is not event or len(square) < 2:
        return False
    work = _work(None, place, event.name)
    trace.likely[event.node] = work, 2 * square[0][0] * math.prod(square[1])
    trace.eager = True
    return True


def _work(dtype: str | None, place: _Place, name: str = "") -> Work:
    """Return work in a place. name: of a kernel whose dtype is not known."""
    return Work(
        dtype, place.attention, place.module, place.compiled, name, place.by_script, place.evaluated,
        wide_only=place.wide_only or (dtype or "").startswith("complex"),  # autocast casts no complex numbers
    )  # fmt: skip


def _add_work(
    work: Work, flops: int, event: _Event, trace: OperatorTrace, creators: dict[GraphNode, _Event]
) -> frozenset[GraphNode]:
    """Add the matmuls of an event to those of its pass. Return the nodes of a forward pass that they belong to."""
    if event.place.inside:
        trace.backward.append((work, event.place.backward, flops))
        return frozenset()
    nodes = _nodes(event, creators)
    trace.forward.append((work, nodes, flops))
    return nodes


def _input_shapes(raw: Any) -> products.Shapes:
    """Return the shapes of an event's inputs; those of lists of tensors are known from torch 2.12 on."""
    structured = getattr(raw, "structured_input_shapes", None)
    shapes: products.Shapes = (structured() if structured else None) or raw.shapes()
    return shapes


def _add_conversion(copy: Any, converted: Counter[tuple[str, str]]) -> None:
    """Add a copy in backward to another dtype: of a gradient, or of an activation that was saved in a narrower one."""
    to, source = map(products.kineto_dtype, copy.dtypes()[:2])
    if to and source and to != source and to.startswith(("fp", "bf")):
        converted[source, to] += math.prod(copy.shapes()[1])


def _add_cast(event: _Event, trace: OperatorTrace) -> None:
    """Add a copy outside of backward passes that rounds numbers to 16 bits or fewer."""
    to, source = map(products.kineto_dtype, event.raw.dtypes()[:2])
    if to in ROUNDED and source and source != to and source.startswith(("fp", "bf")) and not event.place.evaluated:
        shape = tuple(event.raw.shapes()[1])
        trace.casts[to, event.place.module, shape] += math.prod(shape)


def _add_overflow(event: _Event, trace: OperatorTrace) -> None:
    """Add a finite number that `torch.where` writes into a tensor of 16 bits, where it is infinite."""
    found = [name for each in event.raw.dtypes() if (name := products.kineto_dtype(each)) in LARGEST and name]
    dtype = found[0] if found else ""
    for value in event.raw.concrete_inputs() if dtype else ():
        if isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST[dtype]:
            trace.overflows.add(Overflow(event.place.module, value, dtype))


def _add_unaligned(event: _Event, trace: OperatorTrace, weights: set[tuple[int, ...]]) -> None:
    """Add the FP8 matmul that is the gradient of a weight, if it sums over a number of rows that no kernel takes."""
    (height, rows), (_, width) = event.raw.shapes()[:2]
    if rows % FP8_MULTIPLE and ((height, width) in weights or (width, height) in weights):
        trace.unaligned.append((Unaligned(event.place.module, rows), event.place.backward))


def _operand(dtypes: Sequence[str]) -> str | None:
    """Return the dtype of the first operand that is a tensor of floating-point numbers."""
    return next((name for each in dtypes if (name := products.kineto_dtype(each)) and not name.startswith("int")), None)


def _kernel_work(shapes: products.Shapes, dtypes: Sequence[str], weights: set[tuple[int, ...]]) -> int:
    """Return the work of a kernel that multiplies its inputs by trained matrices; 0 if none of its operands is one."""
    both = zip(shapes, dtypes, strict=False)
    tensors = [tuple(shape) for shape, dtype in both if shape and products.kineto_dtype(dtype)]
    matrices = [shape for shape in tensors if shape in weights]
    inputs = [shape for shape in tensors if len(shape) > 1 and any(shape[-1] in matrix for matrix in matrices)]
    for matrix in matrices:
        inputs.remove(matrix) if matrix in inputs else None
    if not inputs:
        return 0
    rows = math.prod(inputs[0][:-1])
    return 2 * rows * sum(map(math.prod, matrices))
