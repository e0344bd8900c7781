"""The matrix products behind a backward pass: in which dtype each one ran, and how much work it was.

They are read off autograd's graph when `backward` is called, and off dynamo's where a region was
compiled. Nothing is put between torch and its kernels, so that what is observed is what would have
run anyway; only products that gradients flow through are seen, which are those that train.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mpguard.policy.dtype import Dtype

#: Nodes of autograd's graph, without `Backward0`, and where among their operands the two factors are.
FACTORS = {
    "Mm": (0, 1), "Addmm": (1, 2), "Bmm": (0, 1), "Baddbmm": (1, 2), "Addbmm": (1, 2), "Mv": (0, 1), "Addmv": (1, 2),
}  # fmt: skip

#: The right factor is a weight of shape (outputs, inputs, ...).
WEIGHTED = ("Linear", "MkldnnLinear", "Convolution", "MkldnnConvolution", "CudnnConvolution", "SlowConvDilated2D")

#: The right factor is a stack of matrices (experts, inputs, outputs); each row meets one of them. One library's has a
#: fallback of its own.
GROUPED = ("GroupedMm", "GeneratedBackwardFor_transformers_grouped_mm_fallback")
RECURRENT = ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "Lstm")

#: Products of activations with each other. Autocast leaves some in FP32 that are none of the model's own choice:
#: on the CPU, the attention of torch itself.
BATCHED = ("Bmm", "Baddbmm", "ScaledDotProduct")

#: In place of a weight's id.
ATTENTION, UNNAMED = 0, -1

#: Calls in dynamo's graphs, by name.
CALLS = frozenset(
    ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum", "bilinear", "conv1d", "conv2d",
     "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "grouped_mm",
     "_grouped_mm", "grouped_mm_fallback")
)  # fmt: skip

#: `torch.autograd.Function` in dynamo's graphs. What is inside has no gradient of its own.
FUNCTIONS = ("autograd_function_apply", "trampoline_autograd_apply")


@dataclasses.dataclass
class Pass:
    """Backward passes that reach the same leaves. Holds no tensor.

    work: multiply-adds by dtype and by the id of the weight (`UNNAMED`, or `ATTENTION` where there is none).
    kernels: those of somebody's own kernels, such as FP8 layers have, by the id of the weight.
    leaves: ids of the tensors that get gradients. compiled: whether a compiled region is among it,
    whose products are in dynamo's graph. unscaled: whether it ran on a loss that no GradScaler scaled.
    """

    work: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    kernels: Counter[int] = dataclasses.field(default_factory=Counter)
    leaves: set[int] = dataclasses.field(default_factory=set)
    compiled: bool = False
    unscaled: bool = False

    def add(self, other: Pass) -> None:
        self.work += other.work
        self.kernels += other.kernels
        self.leaves |= other.leaves
        self.compiled |= other.compiled
        self.unscaled |= other.unscaled


def short(dtype: Any) -> str:
    """The policy's short name of a torch dtype; torch's own for those that it does not know."""
    known = Dtype.of(dtype)
    return known.short if known else str(dtype).removeprefix("torch.")


def behind(outputs: Iterable[Any]) -> Pass:
    """The products behind tensors (or gradient edges) whose gradients are about to be computed."""
    from torch.autograd.function import BackwardCFunction

    found = Pass()
    todo = [output.node if hasattr(output, "node") else output.grad_fn for output in outputs]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.leaves.add(id(node.variable))
            continue
        todo += [source for source, _ in node.next_functions]
        if type(node).__name__.startswith("CompiledFunction"):
            found.compiled = True
            continue
        made = _metadata(node, 0)
        if made is None or not made.dtype.is_floating_point:
            continue
        function = isinstance(node, BackwardCFunction)
        weight, work = _work(node, tuple(made.shape), function)
        if work:
            found.work[short(made.dtype), weight] += work
            found.kernels += Counter({weight: work} if function else {})
    return found


def _work(node: Any, shape: tuple[int, ...], function: bool) -> tuple[int, int]:
    """The weight of a node (its id, or what stands for it), and its multiply-adds; 0 for what is no product."""
    name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
    operands = node.next_functions
    elements = math.prod(shape)
    if name in FACTORS:
        left, right = FACTORS[name]
        found = _shape(*operands[left])
        other = _shape(*operands[right])
        inner = found[-1] if found else other[-2:][0] if other else 1
        weight = _leaf(operands[right]) or _leaf(operands[left])
        return weight or (ATTENTION if name.startswith(BATCHED) else UNNAMED), elements * inner
    if name in WEIGHTED:
        sizes = _shape(*operands[1])
        inputs = _shape(*operands[0])
        inner = math.prod(sizes[1:]) if sizes else inputs[-1 if "Linear" in name else 1] if inputs else 1
        return _leaf(operands[1]) or UNNAMED, elements * inner
    if name.startswith(GROUPED):
        stack = _shape(*operands[1])
        rows = _shape(*operands[0])
        return _leaf(operands[1]) or UNNAMED, elements * (rows[-1] if rows else stack[-2] if stack else 1)
    if name.startswith(BATCHED):
        keys = _shape(*operands[1])
        return ATTENTION, 2 * elements * (keys[-2] if len(keys) > 1 else 1)
    if not shape or not (function or name in RECURRENT):
        return 0, 0
    # A kernel of somebody's own, or a recurrent layer: its weights tell. An embedding has no such one.
    weights = {_leaf(operand): _leaf_shape(operand) for operand in operands}
    fit = {id_: size for id_, size in weights.items() if len(size) == 2 and size[0] % shape[-1] == 0}
    return next(iter(fit), UNNAMED), elements // max(1, shape[-1]) * sum(map(math.prod, fit.values()))


def _metadata(node: Any, position: int) -> Any:
    """Dtype and shape of what a node put out in the forward pass."""
    every = getattr(node, "_input_metadata", ())
    return every[position] if position < len(every) else None


def _shape(node: Any, position: int) -> tuple[int, ...]:
    """The shape of an operand; empty where it needs no gradient."""
    if node is None:
        return ()
    variable = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
    full = getattr(variable, "ds_shape", None)  # ZeRO-3 has only a part of it at hand
    made = _metadata(node, position)
    return tuple(full) if full is not None else tuple(made.shape) if made is not None else ()


def _followed(operand: tuple[Any, int]) -> Any:
    """The leaf that an operand is, but for casts, views and transposes; None for another."""
    node = operand[0]
    for _ in range(8):
        if node is None or type(node).__name__ == "AccumulateGrad":
            return node
        sources = [source for source, _ in node.next_functions if source is not None]
        if len(sources) != 1:
            return None
        node = sources[0]
    return None


def _leaf(operand: tuple[Any, int]) -> int:
    node = _followed(operand)
    return 0 if node is None else id(node.variable)


def _leaf_shape(operand: tuple[Any, int]) -> tuple[int, ...]:
    """The shape of the leaf that an operand is; of the matrix that was cut from it where it is flat (FSDP1)."""
    leaf = _followed(operand)
    found, node = _shape(leaf, 0), operand[0]
    while len(found) == 1 and node is not leaf:
        cut = _shape(node, 0)
        node = next(source for source, _ in node.next_functions if source is not None)
        if len(cut) == 2 and len(_shape(node, 0)) != 2:
            return cut
    return found


def in_graph(module: Any) -> Counter[tuple[str, int]]:
    """The multiply-adds in a graph of dynamo's, as in a `Pass`. What autocast did is in its values."""
    work: Counter[tuple[str, int]] = Counter()
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", None) or str(node.target)
        if name not in FUNCTIONS:  # checkpoints and the like: a graph within the graph
            inner = [
                getattr(module, str(other.target), None) for other in node.all_input_nodes if other.op == "get_attr"
            ]
            for graph in inner:
                work += in_graph(graph) if hasattr(graph, "graph") else Counter()
        value = _value(node)
        if hasattr(value, "dtype") and value.dtype.is_floating_point:
            size = math.prod(_sizes(value)) * _contracted(name, node, _sizes(value))
            weights = any(map(_parameter_shape, node.all_input_nodes))
            batched = value.ndim > 2 and (
                "matmul" in name or name in ("bmm", "baddbmm", "scaled_dot_product_attention")
            )
            work += Counter({(short(value.dtype), ATTENTION if batched and not weights else UNNAMED): size})
    return work


def _contracted(name: str, node: Any, shape: tuple[int, ...]) -> int:
    """Multiply-adds per element of the result of a call; 0 for what is no product."""
    shapes = [_sizes(_value(other)) for other in node.all_input_nodes if hasattr(_value(other), "shape")]
    if name in CALLS and len(shapes) > 1:
        if name == "scaled_dot_product_attention":
            return 2 * shapes[1][-2]
        return math.prod(shapes[1][1:]) if name.startswith("conv") else shapes[1 if "add" in name else 0][-1]
    if name in FUNCTIONS and len(shape) > 1:
        weights = [size for other in node.all_input_nodes if len(size := _parameter_shape(other)) == 2]
        return sum(size[1] for size in weights if size[0] == shape[-1])
    return 0


def _parameter_shape(node: Any) -> tuple[int, ...]:
    """The shape of the parameter that a node is, but for views and casts; empty for another."""
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    value = _value(node)
    is_parameter = getattr(value, "_is_param", False) or _of_fsdp1(node)
    return _sizes(value) if is_parameter else ()


def _of_fsdp1(node: Any) -> bool:
    """Whether a node is a part of a flat parameter, which stands for the module's own."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return source is not None and bool(source.guard_source.is_fsdp_module())


def _sizes(value: Any) -> tuple[int, ...]:
    """A shape in numbers; of a dynamic one those at hand: to ask it for them would make the graph for them alone."""
    return tuple(size if type(size) is int else size.node.hint or 1 for size in value.shape)


def _value(node: Any) -> Any:
    value = node.meta.get("example_value")
    return value[0] if isinstance(value, (tuple, list)) and value else value
