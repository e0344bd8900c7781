"""The matmuls that autograd's graph implies: a substitute for the account of the operators that ran.

The graph is read when `backward` is called. It has the dtype of each result, not what ran inside of functions and
custom operators, or without gradients; so it counts only where the operators could not be recorded (see `account`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from mpguard.runtime.proof.products import short

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

#: Matmuls of activations with each other. Autocast leaves some of them in FP32, which the model does not choose:
#: on the CPU, torch's own attention.
BATCHED = ("Bmm", "Baddbmm", "ScaledDotProduct")

#: Nodes whose results are logarithms of probabilities, or sums of exponentials.
LOG_PROBABILITIES = ("LogSoftmax", "Logsumexp", "LogSigmoid")

#: Nodes that read rows or elements of a table, and those that multiply by a sparse matrix, which no autocast casts.
LOOKUPS = ("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take", "Select", "SparseAddmm")

#: Packages whose functions hand on what they get, if they take no matrix; others, as a checkpoint, may multiply inside.
HANDING_ON = ("torch.nn.parallel.", "mpguard.")

#: Used in place of a weight's id: for a matmul of activations, and for an unknown weight.
ATTENTION, UNNAMED = 0, -1

#: The place of matmuls that ran in no module.
OUTSIDE = "code outside of modules"


@dataclasses.dataclass
class Inferred:
    """The matmuls behind a backward pass. Holds no tensor.

    work: multiply-adds by dtype and by the id of the weight (`UNNAMED` if unknown, `ATTENTION` if there is none).
    leaves: ids of the tensors that get gradients. weights: ids of leaves that operators of torch multiplied by
    something else; not inside of a `torch.autograd.Function`, as FP8 layers do. in_fp8_layers: ids of leaves that
    functions of the FP8 libraries took. in_functions: those that other functions took. matrix_functions: sequence
    numbers of the nodes of these that took a matrix. in_the_loss: those of matmuls in FP32 whose result no weight
    multiplies, and whose factors are results of the model (similarities), such a result and data, or weights (a
    penalty). log_probabilities: the dtypes of those behind the
    loss. heads: ids of weights whose matmul alone becomes log-probabilities. matrices: ids of the leaves with more than
    one dimension. tables: those of leaves of which rows were read. compiled: True if a compiled region is part of it,
    whose matmuls are in dynamo's graph.
    """

    work: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    leaves: set[int] = dataclasses.field(default_factory=set)
    weights: set[int] = dataclasses.field(default_factory=set)
    in_fp8_layers: set[int] = dataclasses.field(default_factory=set)
    in_functions: set[int] = dataclasses.field(default_factory=set)
    matrix_functions: set[int] = dataclasses.field(default_factory=set)
    in_the_loss: set[int] = dataclasses.field(default_factory=set)
    log_probabilities: set[str] = dataclasses.field(default_factory=set)
    heads: set[int] = dataclasses.field(default_factory=set)
    matrices: set[int] = dataclasses.field(default_factory=set)
    tables: set[int] = dataclasses.field(default_factory=set)
    compiled: bool = False

    @property
    def multiplies_nothing(self) -> bool:
        """True if the graph has no matmul, and each trained matrix is a table: an embedding, a factor."""
        functions = self.in_functions or self.in_fp8_layers or self.matrix_functions
        return not (self.work or self.compiled or functions) and self.matrices <= self.tables

    def add(self, other: Inferred) -> None:
        self.work += other.work
        self.leaves |= other.leaves
        self.weights |= other.weights
        self.in_fp8_layers |= other.in_fp8_layers
        self.in_functions |= other.in_functions
        self.matrix_functions |= other.matrix_functions
        self.in_the_loss |= other.in_the_loss
        self.log_probabilities |= other.log_probabilities
        self.heads |= other.heads
        self.matrices |= other.matrices
        self.tables |= other.tables
        self.compiled |= other.compiled


def nodes_behind(outputs: Iterable[Any]) -> Iterator[Any]:
    """Yield each node once of the autograd graph of tensors, or of gradient edges."""
    return _nodes_from(list(map(node_of, outputs)))


def node_of(output: Any) -> Any:
    """Return the node of autograd's graph that has created a tensor, or that of a gradient edge."""
    return output.node if hasattr(output, "node") else output.grad_fn


def _nodes_from(todo: list[Any]) -> Iterator[Any]:
    """Yield each node once of the autograd graph of nodes."""
    seen = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [source for source, _ in node.next_functions]


def is_leaf(node: Any) -> bool:
    """True if a node of autograd's graph adds to the `.grad` of a tensor, its `variable`."""
    return type(node).__name__ == "AccumulateGrad"


def products_behind(outputs: Iterable[Any]) -> Inferred:
    """Return the matmuls in the autograd graph of tensors (or gradient edges) that backward is called on."""
    from torch.autograd.function import BackwardCFunction

    products = Inferred()
    like_a_loss: list[Any] = []
    others: list[Any] = []  # all other nodes that may multiply
    softmaxes: list[Any] = []
    for node in nodes_behind(outputs):
        if is_leaf(node):
            products.leaves.add(id(node.variable))
            products.matrices |= {id(node.variable)} if node.variable.ndim > 1 else set()
            continue
        if type(node).__name__.startswith("CompiledFunction"):
            products.compiled = True
            others.append(node)
            continue
        if _kind(node) in LOOKUPS:
            products.tables |= {_leaf(operand) for operand in node.next_functions}
        output = _metadata(node, 0)
        if output is None or not output.dtype.is_floating_point:
            continue
        if type(node).__name__.startswith(LOG_PROBABILITIES):
            products.log_probabilities.add(short(output.dtype))
            softmaxes += [node] if _kind(node) == "LogSoftmax" else []
        function = isinstance(node, BackwardCFunction)
        if function:
            taken = {_leaf(operand) for operand in node.next_functions} - {0}
            (products.in_fp8_layers if _is_of_fp8_layers(node) else products.in_functions).update(taken)
            if any(len(_leaf_shape(operand)) == 2 for operand in node.next_functions if _leaf(operand)):
                products.matrix_functions.add(node._sequence_nr())
        weight, work = _work(node, _sizes(output), function)
        if work:
            products.work[short(output.dtype), weight] += work
            operands = [] if function else _factors(node)
            factors = {_leaf(operand) for operand in operands}
            products.weights |= factors - {0} if len(factors) > 1 else set()  # W times W is no use of a layer
            one_weight = 0 in factors and len(factors) > 1
            if operands and not one_weight and output.dtype.itemsize == 4:
                like_a_loss.append(node)
                continue
        if work or function:
            others.append(node)
    products.heads = _head(softmaxes)
    products.in_the_loss = _in_the_loss(like_a_loss, others) if like_a_loss else set()
    return products


def _in_the_loss(candidates: list[Any], others: list[Any]) -> set[int]:
    """Return the sequence numbers of the matmuls whose result no weight multiplies.

    candidates: nodes, none of which multiplies one weight by something else. others: those that do, or may.
    """
    multiplies, layers, found = set(others), list(others), list[Any]()
    for node in candidates:
        sources = [source for source, _ in _factors(node)]
        results = [source for source in sources if source is not None]
        # Data times what is made of weights alone, as a weight that is normalized, is a layer.
        is_layer = len(results) < len(sources) and multiplies.isdisjoint(_nodes_from(results))
        (layers if is_layer else found).append(node)
    behind = set(_nodes_from([source for node in layers for source, _ in node.next_functions]))
    return {node._sequence_nr() for node in found if node not in behind}


def _head(softmaxes: list[Any]) -> set[int]:
    """Return the id of the weight whose matmul alone becomes log-probabilities; empty if there are several, or none.

    softmaxes: nodes. What a residual connection adds, as in a model without a head, are several.
    """
    from torch.autograd.function import BackwardCFunction

    found: list[set[int]] = []
    seen: set[Any] = set()
    todo = [source for node in softmaxes for source, _ in node.next_functions]
    while todo and len(found) < 2:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves = [] if is_leaf(node) else list(filter(None, map(_leaf_node, node.next_functions)))
        matrices = {id(leaf.variable) for leaf in leaves if leaf.variable.ndim > 1}
        multiplies = _kind(node).startswith((*FACTORS, *WEIGHTED, *GROUPED, *RECURRENT, *BATCHED, "CompiledFunction"))
        hides = isinstance(node, BackwardCFunction) and not _is_of(node, HANDING_ON)
        if multiplies or matrices or hides:
            found.append(matrices)
        else:
            todo += [source for source, _ in node.next_functions]
    return found[0] if len(found) == 1 and len(found[0]) == 1 else set()


def _is_of_fp8_layers(node: Any) -> bool:
    """True for a function of an FP8 library, or of mpguard's own FP8 layers."""
    return _is_of(node, ("torchao.", "transformer_engine.", "mpguard."))


def _is_of(node: Any, packages: tuple[str, ...]) -> bool:
    """True for a `torch.autograd.Function` of packages, whose names end with a dot."""
    return str(type(node)._forward_cls.__module__).startswith(packages)


def _factors(node: Any) -> list[tuple[Any, int]]:
    """Return the two operands that a node of an operator of torch multiplies; none for another node."""
    name = _kind(node)
    positions = FACTORS.get(name, (0, 1) if name in WEIGHTED else ())
    return [node.next_functions[position] for position in positions]


def _kind(node: Any) -> str:
    """Return the name of a node without `Backward0`."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _work(node: Any, shape: tuple[int, ...], function: bool) -> tuple[int, int]:
    """Return the weight of a node (its id, `UNNAMED` or `ATTENTION`) and its multiply-adds; 0 if it is not a matmul.

    shape: of the output. function: True for a `torch.autograd.Function`.
    """
    name = _kind(node)
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


def _sizes(output: Any) -> tuple[int, ...]:
    """Return the shape of an output; empty for a nested tensor of strided layout, which has none.

    The length of the rows of a jagged one is a symbol, with which Python cannot compute: it counts as 1.
    """
    try:
        return tuple(each if isinstance(each, int) else 1 for each in output.shape)
    except RuntimeError:
        return ()


def _shape(node: Any, position: int) -> tuple[int, ...]:
    """Return the shape of an operand; empty if it needs no gradient."""
    if node is None:
        return ()
    variable = getattr(node, "variable", None) if is_leaf(node) else None
    full = getattr(variable, "ds_shape", None)  # the tensor of ZeRO-3 is a part of the parameter
    output = _metadata(node, position)
    return tuple(full) if full is not None else _sizes(output) if output is not None else ()


def _leaf_node(operand: tuple[Any, int]) -> Any:
    """Return the node of the leaf that an operand is, apart from casts, views and transposes; None if it is none."""
    node = operand[0]
    for _ in range(8):
        if node is None or is_leaf(node):
            return node
        if _kind(node) in FACTORS or _kind(node) in WEIGHTED:
            return None
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
