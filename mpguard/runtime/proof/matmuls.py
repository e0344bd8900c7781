"""The matrix products behind a backward pass: the dtype in which each one ran, and its multiply-adds.

They are read from autograd's graph when `backward` is called, and from dynamo's graph for compiled
regions. Nothing is inserted between torch and its kernels, so the observed run is the same as without
mpguard. Only products that gradients flow through are seen; those are the ones that train.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mpguard.policy.dtype import Dtype

#: Nodes of autograd's graph, without `Backward0`, and the positions of the two factors among their operands.
FACTORS = {
    "Mm": (0, 1), "Addmm": (1, 2), "Bmm": (0, 1), "Baddbmm": (1, 2), "Addbmm": (1, 2), "Mv": (0, 1), "Addmv": (1, 2),
}  # fmt: skip

#: Nodes whose right factor is a weight of shape (outputs, inputs, ...).
WEIGHTED = ("Linear", "MkldnnLinear", "Convolution", "MkldnnConvolution", "CudnnConvolution", "SlowConvDilated2D")

#: Nodes whose right factor is a stack of matrices (experts, inputs, outputs); each row is multiplied by one of them.
#: The second is a fallback of transformers.
GROUPED = ("GroupedMm", "GeneratedBackwardFor_transformers_grouped_mm_fallback")
RECURRENT = ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "Lstm")

#: Products of activations with each other. Autocast leaves some of them in FP32, which the model does not choose:
#: on the CPU, torch's own attention.
BATCHED = ("Bmm", "Baddbmm", "ScaledDotProduct")

#: Used in place of a weight's id: for a product of activations, and for an unknown weight.
ATTENTION, UNNAMED = 0, -1

#: Names of calls in dynamo's graphs that are matrix products.
CALLS = frozenset(
    ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum", "bilinear", "conv1d", "conv2d",
     "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "grouped_mm",
     "_grouped_mm", "grouped_mm_fallback")
)  # fmt: skip

#: Names of calls of a `torch.autograd.Function` in dynamo's graphs. Operations inside it have no gradient.
FUNCTIONS = ("autograd_function_apply", "trampoline_autograd_apply")


@dataclasses.dataclass
class BackwardPass:
    """Backward passes that reach the same leaves. Holds no tensor.

    work: multiply-adds by dtype and by the id of the weight (`UNNAMED` if unknown, `ATTENTION` if there is none).
    kernels: multiply-adds of custom kernels, such as those of FP8 layers, by the id of the weight.
    leaves: ids of the tensors that get gradients. compiled: True if a compiled region is part of it,
    whose products are in dynamo's graph. unscaled: True if its loss was not scaled by a GradScaler.
    """

    work: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    kernels: Counter[int] = dataclasses.field(default_factory=Counter)
    leaves: set[int] = dataclasses.field(default_factory=set)
    compiled: bool = False
    unscaled: bool = False

    def add(self, other: BackwardPass) -> None:
        self.work += other.work
        self.kernels += other.kernels
        self.leaves |= other.leaves
        self.compiled |= other.compiled
        self.unscaled |= other.unscaled


def short(dtype: Any) -> str:
    """Return the policy's short name of a torch dtype; torch's own name for a dtype that the policy does not have."""
    known = Dtype.of(dtype)
    return known.short if known else str(dtype).removeprefix("torch.")


def products_behind(outputs: Iterable[Any]) -> BackwardPass:
    """Return the products in the autograd graph of tensors (or gradient edges) that backward is called on."""
    from torch.autograd.function import BackwardCFunction

    products = BackwardPass()
    todo = [output.node if hasattr(output, "node") else output.grad_fn for output in outputs]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            products.leaves.add(id(node.variable))
            continue
        todo += [source for source, _ in node.next_functions]
        if type(node).__name__.startswith("CompiledFunction"):
            products.compiled = True
            continue
        output = _metadata(node, 0)
        if output is None or not output.dtype.is_floating_point:
            continue
        function = isinstance(node, BackwardCFunction)
        weight, work = _work(node, tuple(output.shape), function)
        if work:
            products.work[short(output.dtype), weight] += work
            products.kernels += Counter({weight: work} if function else {})
    return products


def _work(node: Any, shape: tuple[int, ...], function: bool) -> tuple[int, int]:
    """Return the weight of a node (its id, `UNNAMED` or `ATTENTION`) and its multiply-adds; 0 if it is not a product.

    shape: of the output. function: True for a `torch.autograd.Function`.
    """
    name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
    operands = node.next_functions
    elements = math.prod(shape)
    if name in FACTORS:
        left, right = FACTORS[name]
        left_shape = _shape(*operands[left])
        right_shape = _shape(*operands[right])
        inner = left_shape[-1] if left_shape else right_shape[-2:][0] if right_shape else 1
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
    # For a custom kernel or a recurrent layer, the work follows from its weights. An embedding has none that fits.
    weights = {_leaf(operand): _leaf_shape(operand) for operand in operands}
    fitting = {id_: size for id_, size in weights.items() if len(size) == 2 and size[0] % shape[-1] == 0}
    return next(iter(fitting), UNNAMED), elements // max(1, shape[-1]) * sum(map(math.prod, fitting.values()))


def _metadata(node: Any, position: int) -> Any:
    """Return dtype and shape of a node's output in the forward pass; None if it is not known."""
    outputs = getattr(node, "_input_metadata", ())
    return outputs[position] if position < len(outputs) else None


def _shape(node: Any, position: int) -> tuple[int, ...]:
    """Return the shape of an operand; empty if it needs no gradient."""
    if node is None:
        return ()
    variable = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
    full = getattr(variable, "ds_shape", None)  # the tensor of ZeRO-3 is a part of the parameter
    output = _metadata(node, position)
    return tuple(full) if full is not None else tuple(output.shape) if output is not None else ()


def _leaf_node(operand: tuple[Any, int]) -> Any:
    """Return the node of the leaf that an operand is, apart from casts, views and transposes; None if it is none."""
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
    """Return the id of the leaf tensor that an operand is; 0 if it is not a leaf."""
    node = _leaf_node(operand)
    return 0 if node is None else id(node.variable)


def _leaf_shape(operand: tuple[Any, int]) -> tuple[int, ...]:
    """Return the shape of the leaf that an operand is; of the view of it if the leaf is flat (FSDP1)."""
    leaf = _leaf_node(operand)
    shape, node = _shape(leaf, 0), operand[0]
    while len(shape) == 1 and node is not leaf:
        view = _shape(node, 0)
        node = next(source for source, _ in node.next_functions if source is not None)
        if len(view) == 2 and len(_shape(node, 0)) != 2:
            return view
    return shape


def products_in_graph(module: Any) -> Counter[tuple[str, int]]:
    """Return the multiply-adds in a graph of dynamo, as in `BackwardPass.work`. Its dtypes show what autocast did."""
    work: Counter[tuple[str, int]] = Counter()
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", None) or str(node.target)
        if name not in FUNCTIONS:  # activation checkpoints and others are a graph within the graph
            inner = [
                getattr(module, str(other.target), None) for other in node.all_input_nodes if other.op == "get_attr"
            ]
            for graph in inner:
                work += products_in_graph(graph) if hasattr(graph, "graph") else Counter()
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
    """Return the multiply-adds per element of the result of a call; 0 if it is not a matrix product."""
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
    """Return the shape of the parameter that a node is, apart from views and casts; empty if it is not a parameter."""
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    value = _value(node)
    is_parameter = getattr(value, "_is_param", False) or _is_flat_parameter_view(node)
    return _sizes(value) if is_parameter else ()


def _is_flat_parameter_view(node: Any) -> bool:
    """True if a node is a view of a flat parameter of FSDP1, which replaces the module's own parameter."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return source is not None and bool(source.guard_source.is_fsdp_module())


def _sizes(value: Any) -> tuple[int, ...]:
    """Return a shape as numbers; hints for dynamic sizes, because `int(size)` would specialize the graph to it."""
    return tuple(size if type(size) is int else size.node.hint or 1 for size in value.shape)


def _value(node: Any) -> Any:
    """Return the example value of a node; the first one of several."""
    value = node.meta.get("example_value")
    return value[0] if isinstance(value, (tuple, list)) and value else value
