"""The modules behind compiled matmuls, and the weights.

The matmuls themselves are in `trace`; compiled code opens no ranges of modules, so that their modules are read from
dynamo's graphs, with the dtypes that autocast leads to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mpguard.nn.fp8.filters import CONV1D
from mpguard.runtime.proof.products import short

#: Names of calls in dynamo's graphs that are matmuls.
CALLS = frozenset(
    ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum", "bilinear", "conv1d", "conv2d",
     "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "grouped_mm",
     "_grouped_mm", "grouped_mm_fallback", "mx_mm")
)  # fmt: skip


#: What dynamo calls in place of a function of autograd that it does not trace, which is in its closure.
TRAMPOLINE = "trampoline_autograd_apply"


def is_traced() -> bool:
    """True while a compiler runs a backward pass with fake tensors, to trace it."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def products_in_graph(
    module: Any,
    outermost: int | None = None,
    *,
    without_autocast: bool = False,
    trained: bool = False,
    off: bool = False,
) -> Counter[tuple[str, int | None]]:
    """Return the multiply-adds in a graph of dynamo, by dtype and by the id of the module that was called.

    outermost: the id of the module whose `forward` was compiled, if it is one. without_autocast: True for those only
    that are in a region which switches autocast off. trained: True for those only whose result needs a gradient.
    off: True if the graph is in a region without autocast.
    """
    work: Counter[tuple[str, int | None]] = Counter()
    regions: dict[Any, bool] = {}
    for node in module.graph.nodes:
        if _name(node) == "_enter_autocast":
            regions[node] = not node.args[2]
        elif _name(node) == "_exit_autocast":
            regions.pop(node.args[0], None)
        inside = off if not regions else list(regions.values())[-1]
        for graph in _inner_graphs(module, node):
            work += products_in_graph(graph, outermost, without_autocast=without_autocast, trained=trained, off=inside)
        value = _value(node)
        if (without_autocast and not inside) or (trained and not getattr(value, "requires_grad", False)):
            continue
        if hasattr(value, "dtype") and value.dtype.is_floating_point:
            size = math.prod(_sizes(value)) * _contracted(_name(node), node)
            work[short(value.dtype), _module(node) or outermost] += size
    return +work


class WeightUse(NamedTuple):
    """A use of a weight in a graph of dynamo. weight: its id. modules: the ids of those in which it is.

    multiplies: True for a matmul, apart from those of a plain Linear, which an FP8 layer with its weight may replace.
    """

    weight: int
    modules: frozenset[int]
    multiplies: bool


def weight_uses(
    module: Any, outside: frozenset[int] = frozenset(), weights: Mapping[Any, int] | None = None
) -> Iterator[WeightUse]:
    """Yield the uses of parameters in a graph of dynamo.

    outside: the modules that the graph is in. weights: of a graph within another one, its inputs that are parameters.
    """
    from torch import nn

    found = dict(weights or {})
    for node in module.graph.nodes:
        argument = getattr(node.meta.get("grapharg"), "example", None)
        if isinstance(argument, nn.Parameter):
            found[node] = id(argument)
        used = [found[other] for other in node.all_input_nodes if other in found]
        if not used:
            continue
        modules = outside | _stack(node)
        inputs = [each for each in node.args if hasattr(each, "op") and each.op != "get_attr"]
        for graph in _inner_graphs(module, node):
            places = [other for other in graph.graph.nodes if other.op == "placeholder"]
            if len(places) == len(inputs):
                inner = {place: found[other] for place, other in zip(places, inputs, strict=True) if other in found}
                yield from weight_uses(graph, modules, inner)
        innermost = list((node.meta.get("nn_module_stack") or {}).values())[-1:]
        linear = any(kind is nn.Linear or f"{kind.__module__}.{kind.__name__}" == CONV1D for _, kind in innermost)
        by_itself = len(used) == len(node.all_input_nodes)  # W times W is no use of a layer
        multiplies = _name(node) in CALLS and not by_itself and not linear
        yield from (WeightUse(weight, modules, multiplies) for weight in used)
        if len(node.all_input_nodes) == 1:  # a cast, a view, a transpose
            found[node] = used[0]


def _inner_graphs(module: Any, node: Any) -> list[Any]:
    """Return the graphs that a node calls: of activation checkpoints, of functions with a backward pass, and others."""
    inner = [getattr(module, str(other.target), None) for other in node.all_input_nodes if other.op == "get_attr"]
    return [graph for graph in inner if hasattr(graph, "graph")]


def _name(node: Any) -> str:
    """Return the name of what a node calls; of a function of autograd that dynamo calls as it is, that of its class."""
    name = getattr(node.target, "__name__", None) or str(node.target)
    if name != TRAMPOLINE:
        return name
    functions = [cell.cell_contents for cell in node.target.__closure__ or ()]
    return next((each.__name__ for each in functions if isinstance(each, type)), name)


def _contracted(name: str, node: Any) -> int:
    """Return the multiply-adds per element of the result of a call; 0 if it is not a matmul."""
    shapes = [_sizes(_value(other)) for other in node.all_input_nodes if hasattr(_value(other), "shape")]
    if name not in CALLS or len(shapes) < 2:
        return 0
    if name == "scaled_dot_product_attention":
        return 2 * shapes[1][-2]
    return math.prod(shapes[1][1:]) if name.startswith("conv") else shapes[1 if "add" in name else 0][-1]


def _module(node: Any) -> int | None:
    """Return the id of the innermost module in which a node was traced; None if it was in none."""
    stack = list(node.meta.get("nn_module_stack") or ())
    return _number(stack[-1]) if stack else None


def _stack(node: Any) -> frozenset[int]:
    """Return the ids of the modules in which a node was traced."""
    numbers = (_number(key) for key in node.meta.get("nn_module_stack") or ())
    return frozenset(number for number in numbers if number is not None)


def _number(key: Any) -> int | None:
    """Return the id of the module that a key of dynamo's stack of modules begins with; None if it has none."""
    number = str(key).partition("@")[0]
    return int(number) if number.isdigit() else None


def _sizes(value: Any) -> tuple[int, ...]:
    """Return a shape as numbers; hints for dynamic sizes, because `int(size)` would specialize the graph to it."""
    return tuple(size if type(size) is int else size.node.hint or 1 for size in value.shape)


def _value(node: Any) -> Any:
    """Return the example value of a node; the first one of several."""
    value = node.meta.get("example_value")
    return value[0] if isinstance(value, (tuple, list)) and value else value
