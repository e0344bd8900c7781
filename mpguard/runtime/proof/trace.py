"""The products in the events of torch's profiler: where each one ran, and which node of autograd it belongs to.

An operator of the forward pass that has a node in autograd's graph has that node's sequence number; the operators of
the node's backward run inside an event with the same number. So a product reaches a gradient if its node was evaluated.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mpguard.policy.dtype import Dtype
from mpguard.runtime.proof import products

#: The beginning of the name of a range that a module opens; the rest is its number.
MODULE = "mpguard::module "

#: The name of a range around operators that are no part of the training: mpguard's own, and those on fake tensors.
OUTSIDE = "mpguard::outside"

#: The beginning of the name of a range around what a script computes without autocast; the rest is its number.
WITHOUT_AUTOCAST = "mpguard::without autocast "

#: The beginning of the name of a range around a call of a trained model without gradients; the rest is its number.
EVALUATION = "mpguard::evaluation "

#: The name of a range around the call of an operator whose result selective checkpointing may have kept, and that of
#: the event of torch's around such a call: it is in the event of the operator.
FROM_CACHE, DISPATCH_MODE = "mpguard::from cache", "PythonDispatchMode"

#: Ranges whose operators are no part of the training: compilation runs the operators with fake tensors.
IGNORED = ("Optimizer.", "DistributedOptimizer.", OUTSIDE)
COMPILING = "(dynamo_timed)"

#: Functions of autograd around compiled code, and the range of a compiled graph.
COMPILED = ("CompiledFunction", "Torch-Compiled Region", "## Call CompiledFxGraph")

#: The beginning of the name of the range around a call of code that inductor has compiled; the rest is a hash of the
#: code and of its inputs' dtypes and shapes, or None where inductor has made none.
GRAPH_CALL, NO_HASH = "## Call CompiledFxGraph", "## Call CompiledFxGraph None "

#: Functions of autograd whose products are in FP8, in software where FP8 is emulated.
FP8_FUNCTIONS = ("matmul_with_hp_or_float8_args", "EmulatedGroupedMM", "mx_mm")

#: Functions of Transformer Engine that multiply by their weights in kernels that are no operators of torch.
TE_FUNCTIONS = ("_Linear", "_LayerNormLinear", "_LayerNormMLP", "_GroupedLinear")

#: The beginnings of names of kernels that inductor generates and that multiply no matrices: its templates do. A trained
#: matrix can be among their operands, or what has its shape, such as the gradient of an embedding.
FUSED = ("triton_poi_", "triton_red_", "triton_per_", "triton_for_", "triton_split_scan_")

#: Further ranges of mpguard.
OWN = (FROM_CACHE, WITHOUT_AUTOCAST, EVALUATION)

#: The beginnings of names of events that are no kernels of other libraries.
NO_KERNELS = ("aten::", "autograd::", "torchao::triton_", "c10d", MODULE, *OWN, "## ", *FUSED)

#: What a product calls that multiplies a sparse matrix. How many elements that has is not recorded, and autocast casts
#: no sparse products: they do not count.
SPARSE = "aten::_nnz"

#: The operator that writes a number into a tensor of another dtype, where it may be infinite. Others raise an error.
WHERE = "aten::where"

#: The dtypes of 16 bits, each with its largest number.
LARGEST: dict[str | None, float] = {each.short: each.largest for each in (Dtype.FP16, Dtype.BF16)}

#: Products of matrices, whose inner dimension has to be a multiple of `FP8_MULTIPLE` for the FP8 kernels of GPUs.
FP8_MATRIX, FP8_MULTIPLE = ("aten::mm", "aten::_scaled_mm", "aten::_scaled_mm_v2"), 16

#: Scopes of events: an operator, or a node of autograd's graph.
FUNCTION, BACKWARD = 0, 1

#: A node of autograd's graph: the thread of its forward pass, and its sequence number.
GraphNode = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Work:
    """Products of one place. dtype: None if it is not known, in a kernel that is no operator of torch.

    module: the number of the module in which they ran; None if unknown. name: of the kernel whose dtype is not known.
    by_script: True in a region in which the script has switched autocast off. evaluated: True in a call of a trained
    model without gradients.
    """

    dtype: str | None
    attention: bool = False
    module: int | None = None
    compiled: bool = False
    name: str = ""
    by_script: bool = False
    evaluated: bool = False


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
    """The products between two points of a process.

    forward: work of the forward pass, each with the nodes that it belongs to (none: without gradient) and its FLOPs.
    backward: FLOPs in the nodes that were evaluated. evaluated: these nodes. origins: where the nodes were created.
    opaque: FLOPs of the kernels that are no operators, by their nodes; their backward does twice as much. likely: those
    that multiply by a trained matrix if their node has taken one: all of their operands have the shape of one.
    converted: elements that were copied to another dtype in backward, by the dtypes before and after. overflows:
    numbers that do not fit. unaligned: FP8 products of the backward pass, with the node that they belong to.
    """

    forward: list[tuple[Work, frozenset[GraphNode], int]] = dataclasses.field(default_factory=list)
    backward: list[tuple[Work, GraphNode | None, int]] = dataclasses.field(default_factory=list)
    evaluated: set[GraphNode] = dataclasses.field(default_factory=set)
    origins: dict[GraphNode, Work] = dataclasses.field(default_factory=dict)
    opaque: dict[GraphNode, tuple[Work, int]] = dataclasses.field(default_factory=dict)
    likely: dict[GraphNode, tuple[Work, int]] = dataclasses.field(default_factory=dict)
    converted: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    overflows: set[Overflow] = dataclasses.field(default_factory=set)
    unaligned: list[tuple[Unaligned, GraphNode | None]] = dataclasses.field(default_factory=list)


def outside() -> Any:
    """Return a range for operators that are no part of the training. Without a profiler it does nothing."""
    from torch._C._profiler import _RecordFunctionFast

    return _RecordFunctionFast(OUTSIDE)


def from_cache() -> Any:
    """Return a range around the call of an operator that computes nothing if its result was kept."""
    from torch._C._profiler import _RecordFunctionFast

    return _RecordFunctionFast(FROM_CACHE)


class _Event:
    """An event with what it inherits from the events around it."""

    __slots__ = (
        "attention", "backward", "by_script", "cached", "call", "compiled", "end", "evaluated", "fp8", "ignored",
        "inside", "known", "module", "multiplies", "name", "node", "outer", "raw", "sparse",
    )  # fmt: skip

    def __init__(self, raw: Any, name: str, end: int, outer: _Event | None) -> None:
        self.raw, self.name, self.end, self.outer = raw, name, end, outer
        self.known: products.Operator | None = None
        self.node: GraphNode | None = None
        self.multiplies = self.sparse = False  # a product ran inside; it multiplies a sparse matrix
        self.cached = False  # its result was kept, unless a product ran inside
        if outer is None:
            self.ignored = self.attention = self.compiled = self.fp8 = self.inside = self.by_script = False
            self.evaluated = False
            self.module: int | None = None
            self.backward: GraphNode | None = None
            self.call: GraphCall | None = None
            return
        self.ignored, self.attention, self.compiled = outer.ignored, outer.attention, outer.compiled
        self.fp8, self.inside, self.module, self.backward = outer.fp8, outer.inside, outer.module, outer.backward
        self.call, self.by_script, self.evaluated = outer.call, outer.by_script, outer.evaluated

    def mark_cached(self) -> None:
        """Mark the operator around the range `FROM_CACHE`, and what is between them."""
        around = self.outer
        while around is not None:
            around.cached = True
            around = around.outer if around.name == DISPATCH_MODE else None

    def mark_multiplying(self) -> None:
        """Mark the events around a product."""
        around = self.outer
        while around is not None and not around.multiplies:
            around.multiplies = True
            around = around.outer


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """A call of compiled code. products: those whose operators ran in it, with their FLOPs."""

    event: _Event
    products: list[tuple[Work, int]] = dataclasses.field(default_factory=list)


class CompiledGraphs:
    """The products of compiled code, by the name of the range around its calls.

    In a replay of a CUDA graph (`mode="reduce-overhead"`) no operator runs. It launches the kernels of the call that
    was recorded, so it has the products of an earlier call of the same code, in which operators ran.
    """

    def __init__(self) -> None:
        self._products: dict[str, list[tuple[Work, int]]] = {}

    def __contains__(self, name: str) -> bool:
        """True if a call with products was seen."""
        return name in self._products

    def replayed(self, call: GraphCall) -> list[tuple[Work, int]]:
        """Return the products of a call whose operators did not run; remember them if all did."""
        name = call.event.name
        known = self._products.get(name, [])
        if len(call.products) >= len(known):
            if call.products and not name.startswith(NO_HASH):
                self._products[name] = call.products
            return []
        ran = Counter(_kind(work) for work, _ in call.products)
        missing = []
        for work, flops in known:
            if ran[_kind(work)]:
                ran[_kind(work)] -= 1
            else:
                missing.append((work, flops))
        return missing


def _kind(work: Work) -> tuple[str | None, bool, str]:
    return work.dtype, work.attention, work.name


def read(
    events: Iterable[Any],
    weights: set[tuple[int, ...]],
    te_dtype: str | None,
    closures: frozenset[int] = frozenset(),
    graphs: CompiledGraphs | None = None,
) -> OperatorTrace:
    """Return the products among the events of a profiler.

    weights: shapes of the matrices that are trained, to recognize kernels that multiply by one. te_dtype: the dtype in
    which layers of Transformer Engine multiply; None if they do as their operands say. closures: when the steps of
    optimizers began that are not finished yet: in them a closure trains. graphs: what compiled code has multiplied in
    earlier calls; those of these events are added.
    """
    graphs = CompiledGraphs() if graphs is None else graphs
    ordered = sorted(
        ((event.start_thread_id(), event.start_ns(), -event.end_ns(), number, event)
         for number, event in enumerate(events) if not event.is_async()),
    )  # fmt: skip
    trace = OperatorTrace()
    nested: list[_Event] = []
    candidates: list[_Event] = []
    calls: list[GraphCall] = []
    creators: dict[GraphNode, _Event] = {}
    thread = None
    for tid, start, end, _, raw in ordered:
        if tid != thread:
            thread, nested = tid, []
        while nested and nested[-1].end <= start:
            nested.pop()
        event = _Event(raw, raw.name(), -end, nested[-1] if nested else None)
        nested.append(event)
        _classify(event, tid, trace, creators)
        if start in closures and event.name.startswith(IGNORED):
            event.ignored = False
        if event.ignored:
            continue
        if event.name.startswith(GRAPH_CALL):
            event.call = GraphCall(event)
            calls.append(event.call)
        _add_fact(event, trace)
        if event.known is not None or _may_be_a_kernel(event):
            candidates.append(event)
    for event in candidates:
        if event.known is not None:
            event.mark_multiplying()
    for call in calls:
        if call.event.name in graphs:
            call.event.mark_multiplying()
    for event in candidates:
        if not (event.multiplies or event.sparse or event.cached):
            _add(event, trace, creators, weights, te_dtype)
    for call in calls:
        for work, flops in graphs.replayed(call):
            _place(dataclasses.replace(work, module=call.event.module), flops, call.event, trace, creators)
    for node, event in creators.items():
        trace.origins[node] = Work(None, event.attention, event.module, event.compiled, by_script=event.by_script)
    return trace


def _add_fact(event: _Event, trace: OperatorTrace) -> None:
    """Add what an event shows about the products around it, or about the values that it writes."""
    if event.name == FROM_CACHE:
        event.mark_cached()
    elif event.name == SPARSE and event.outer is not None:
        event.outer.sparse = True
    elif event.inside and event.name == "aten::copy_":
        _add_conversion(event.raw, trace)
    elif event.name == WHERE:
        _add_overflow(event, trace)


def _classify(event: _Event, thread: int, trace: OperatorTrace, creators: dict[GraphNode, _Event]) -> None:
    """Set what an event is, from its name, its scope and its sequence number."""
    name, scope, number = event.name, event.raw.scope(), event.raw.sequence_nr()
    if name.startswith(MODULE):
        event.module = int(name[len(MODULE) :])
    elif name.startswith(WITHOUT_AUTOCAST):
        event.by_script = True
    elif name.startswith(EVALUATION):
        event.evaluated = True
    elif name.startswith(IGNORED) or name.endswith(COMPILING):
        event.ignored = True
    elif scope == BACKWARD:
        if number >= 0:
            event.backward = event.raw.fwd_thread_id(), number
            trace.evaluated.add(event.backward)
        event.inside, event.module, event.by_script = True, None, False
        event.compiled, event.attention = name.startswith(COMPILED), False
        event.fp8 = name.startswith(FP8_FUNCTIONS)
    elif name.startswith("autograd::engine::evaluate_function"):
        event.inside = True
    elif scope == FUNCTION:
        event.known = products.operator(name)
        event.attention |= name.startswith("aten::") and "_attention" in name
        event.attention |= event.known is not None and event.known.attention
        event.compiled |= name.startswith(COMPILED)
        event.fp8 |= name.startswith(FP8_FUNCTIONS)
        if number >= 0 and not event.ignored:
            event.node = thread, number
            # Several operators can have the number; the last one creates the node, after which it is counted up.
            creators[thread, number] = event


def _may_be_a_kernel(event: _Event) -> bool:
    """True for functions of autograd and operators of other libraries: their kernels may be no operators of torch."""
    return event.raw.scope() == FUNCTION and not event.name.startswith(NO_KERNELS)


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
) -> None:
    """Add an event to a trace if it is a product."""
    name = ""
    if event.known is not None:
        dtype = products.dtype_of(event.known, event.raw.dtypes())
        flops = products.work_of(event.known, _input_shapes(event.raw))
        if dtype is None or not flops:
            return
        dtype = "fp8" if event.fp8 else dtype
        if dtype == "fp8" and event.inside and event.name in FP8_MATRIX:
            _add_unaligned(event, trace, weights)
    else:
        flops = _kernel_work(event.raw.shapes(), event.raw.dtypes(), weights)
        if not flops:
            _add_likely(event, trace, creators, weights)
            return
        te = event.name in TE_FUNCTIONS
        dtype = (te_dtype or _operand(event.raw.dtypes())) if te else None
        name = "" if te else event.name
    work = Work(dtype, event.attention, event.module, event.compiled, name, event.by_script, event.evaluated)
    nodes = _place(work, flops, event, trace, creators)
    if event.call is not None:
        event.call.products.append((work, flops))
    if event.known is None and event.node in nodes:
        assert event.node is not None
        trace.opaque[event.node] = work, flops


def _add_likely(
    event: _Event, trace: OperatorTrace, creators: dict[GraphNode, _Event], weights: set[tuple[int, ...]]
) -> None:
    """Add a function whose operands all have the shape of a trained matrix: its node shows if one of them is one."""
    both = zip(event.raw.shapes(), event.raw.dtypes(), strict=False)
    tensors = [tuple(shape) for shape, dtype in both if shape and products.kineto_dtype(dtype)]
    square = [shape for shape in tensors if shape in weights]
    if event.inside or event.node is None or creators.get(event.node) is not event or len(square) < 2:
        return
    work = Work(None, event.attention, event.module, event.compiled, event.name, event.by_script)
    trace.likely[event.node] = work, 2 * square[0][0] * math.prod(square[1])


def _place(
    work: Work, flops: int, event: _Event, trace: OperatorTrace, creators: dict[GraphNode, _Event]
) -> frozenset[GraphNode]:
    """Add the products of an event to those of its pass. Return the nodes of a forward pass that they belong to."""
    if event.inside:
        trace.backward.append((work, event.backward, flops))
        return frozenset()
    nodes = _nodes(event, creators)
    trace.forward.append((work, nodes, flops))
    return nodes


def _input_shapes(raw: Any) -> products.Shapes:
    """Return the shapes of an event's inputs; those of lists of tensors are known from torch 2.12 on."""
    structured = getattr(raw, "structured_input_shapes", None)
    shapes: products.Shapes = (structured() if structured else None) or raw.shapes()
    return shapes


def _add_conversion(copy: Any, trace: OperatorTrace) -> None:
    """Add a copy in backward to another dtype: of a gradient, or of an activation that was saved in a narrower one."""
    to, source = map(products.kineto_dtype, copy.dtypes()[:2])
    if to and source and to != source and to.startswith(("fp", "bf")):
        trace.converted[source, to] += math.prod(copy.shapes()[1])


def _add_overflow(event: _Event, trace: OperatorTrace) -> None:
    """Add a finite number that `torch.where` writes into a tensor of 16 bits, where it is infinite."""
    found = [name for each in event.raw.dtypes() if (name := products.kineto_dtype(each)) in LARGEST and name]
    dtype = found[0] if found else ""
    for value in event.raw.concrete_inputs() if dtype else ():
        if isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST[dtype]:
            trace.overflows.add(Overflow(event.module, value, dtype))


def _add_unaligned(event: _Event, trace: OperatorTrace, weights: set[tuple[int, ...]]) -> None:
    """Add the FP8 product that is the gradient of a weight, if it sums over a number of rows that no kernel takes."""
    (height, rows), (_, width) = event.raw.shapes()[:2]
    if rows % FP8_MULTIPLE and ((height, width) in weights or (width, height) in weights):
        trace.unaligned.append((Unaligned(event.module, rows), event.backward))


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
