"""What happens to gradients between backward and the optimizer's step: in which dtype they are accumulated and reduced.

`Gradients` watches the leaves of backward passes, and the collectives. It holds weak references and small samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof import rounding
from mpguard.runtime.proof.collectives import Collective
from mpguard.runtime.proof.inferred import is_leaf, nodes_behind
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.products import short
from mpguard.runtime.proof.trace import outside

if TYPE_CHECKING:
    import torch

log = logging.getLogger("mpguard")

#: From how many leaves of a model samples are taken, and how many values each has; of at most so many models.
LEAVES, VALUES, MODELS = 32, 64, 4

#: Backward passes whose gradients are known each, of those that a script adds up itself.
PARTS = 8

#: Least similarity (cosine) of a tensor that is sent and the gradient from which it was made: rounding costs less.
SIMILAR = 0.99


@dataclasses.dataclass
class _Sum:
    """Sampled values of the gradients of passes that each began without one, in FP64: what the script should sum.

    The last of `PARTS` is the sum of all later ones. last: the gradient of the last pass. An optimizer that calls a
    closure (LBFGS) evaluates many gradients, of which only the last remains.
    """

    parts: list[torch.Tensor]
    last: torch.Tensor
    terms: int = 1

    def add(self, values: torch.Tensor) -> None:
        """Add the gradient of a pass."""
        if len(self.parts) < PARTS:
            self.parts.append(values)
        else:
            self.parts[-1] = self.parts[-1] + values
        self.last = values
        self.terms += 1

    def rows(self) -> list[torch.Tensor]:
        """Return what a gradient may be a sum of, each up to a factor."""
        return self.parts if self.terms <= PARTS else [*self.parts, self.last]


class Gradients:
    """The ways of gradients in this process.

    optimizers: the optimizers of the process. accumulated: elements added to an earlier gradient, by the id of the leaf
    and the dtype. passes: backward passes that added to the gradient of a leaf, by its id. rounded: the number of
    sampled parameters whose FP32 sums were rounded to a 16-bit dtype, by that dtype. loss: the value from which the
    last backward pass began. sent: elements by origin, dtype and process group, see `collectives.origin`; of the
    script's only those that hold gradients. reduced: ids of the parameters whose gradients the script has sent.
    passed_on: elements of other tensors, no weights, that the script has sent to one rank, as stages of a pipeline do.
    exchanged: elements that ranks have exchanged, of gradients too, as they do with the inputs of experts. made: by
    the id of a leaf, the dtype of the gradient that a backward pass has made, since the last step began. starts: by the
    id of a parameter, a sum of some of its values before the first step.
    """

    def __init__(self, optimizers: Collection[Any] = ()) -> None:
        self.optimizers = optimizers
        self.accumulated: Counter[tuple[int, str]] = Counter()
        self.passes: Counter[int] = Counter()
        self.rounded: Counter[str] = Counter()
        self.loss: Any = None
        self.sent: Counter[tuple[str, str, str]] = Counter()
        self.reduced: set[int] = set()
        self.passed_on = self.exchanged = 0
        self.made: dict[int, str] = {}
        self.starts: dict[int, Any] = {}
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._sampled: set[int] = set()
        self._rounded: set[int] = set()
        self._sums: dict[int, _Sum] = {}
        self._depth = 0

    @property
    def leaves(self) -> set[int]:
        """The ids of the tensors that backward passes have reached."""
        return set(self._leaves)

    def release(self) -> None:
        """Release the samples; what was counted remains."""
        self._leaves, self._sums, self.optimizers = {}, {}, ()

    def forget_leaf(self, number: int) -> None:
        """Release the weak reference to a leaf, and its samples. number: its id."""
        self._leaves.pop(number, None)
        self._sums.pop(number, None)

    # -- backward ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def during_backward(self, outputs: Iterable[Any], accumulates: bool) -> Iterator[list[torch.Tensor]]:
        """Watch the leaves of a backward pass around its call, and yield them; none of a pass within another.

        accumulates: False for `torch.autograd.grad`.
        """
        watched = accumulates and not is_capturing()
        leaves = (safely(self._find_leaves, list(outputs)) or []) if watched else []
        if not leaves or self._depth:  # activation checkpoints run passes within the pass
            yield []
            return
        before = safely(self._samples, leaves)
        self._depth += 1
        try:
            yield leaves
        finally:
            self._depth -= 1
        if before is not None:
            safely(self._after, leaves, before)

    def _find_leaves(self, outputs: list[Any]) -> list[torch.Tensor]:
        """Return the leaves of a backward pass, and choose those of which samples are taken."""
        import torch
        import torch.distributed as dist

        if outputs and isinstance(outputs[0], torch.Tensor) and outputs[0].numel() == 1:
            self.loss = outputs[0].detach().clone()
        leaves = leaves_behind(outputs)
        new = [leaf for leaf in leaves if id(leaf) not in self._leaves]
        self._leaves |= {id(leaf): weakref.ref(leaf) for leaf in new}
        if dist.is_available() and dist.is_initialized():
            self.starts |= {id(leaf): sample(leaf).double().sum() for leaf in new if is_allocated(leaf)}
        if len(self._sampled) < MODELS * LEAVES:
            self._sampled |= {id(leaf) for leaf in new[:: max(1, len(new) // LEAVES)]}
        return leaves

    def _samples(self, leaves: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return samples of the gradients that leaves have already, by id."""
        return {id(leaf): sample(leaf.grad).clone() for leaf in leaves if self._is_sampled(leaf)}

    def _is_sampled(self, leaf: torch.Tensor) -> bool:
        return id(leaf) in self._sampled and leaf.grad is not None and not leaf.grad.is_sparse

    def _after(self, leaves: list[torch.Tensor], before: dict[int, torch.Tensor]) -> None:
        """Count what was added to earlier gradients. Gradients that were set to zero are not earlier ones."""
        had_gradient = any(bool(values.any()) for values in before.values())
        for leaf in leaves:
            if leaf.grad is None:
                continue
            self.made[id(leaf)] = short(leaf.grad.dtype)
            if had_gradient and id(leaf) in before:
                self._check_sum(leaf, before[id(leaf)])
            elif self._is_sampled(leaf):
                self._add_to_sum(leaf, leaf.grad)
        for leaf in leaves if had_gradient else ():
            if leaf.grad is not None:
                self.passes[id(leaf)] += 1
                self.accumulated[id(leaf), short(leaf.grad.dtype)] += leaf.grad.numel()

    def accumulated_by(self, parameters: Iterable[torch.Tensor]) -> tuple[dict[str, int], int]:
        """Return the elements that were added to earlier gradients of an optimizer, by dtype, and the number of passes.

        Of all leaves, if the optimizer has other parameters than the model (masters, shards). Else leaves of which it
        has none do not count: nothing applies their gradients, and often nothing clears them.
        """
        own = {id(parameter) for parameter in parameters if parameter.grad is not None or id(parameter) in self.made}
        own = own if own <= self._leaves.keys() else set(self.passes)
        found: Counter[str] = Counter()
        for (leaf, dtype), elements in self.accumulated.items():
            if leaf in own:
                found[dtype] += elements
        return dict(found), max((self.passes[leaf] for leaf in own), default=0)

    def record_returned(self, inputs: Iterable[Any], returned: Iterable[Any]) -> list[torch.Tensor]:
        """Record gradients that `torch.autograd.grad` returned, and return the leaves that they are of.

        The script may add them up, or apply them, itself. What `torch.func.grad` differentiates are leaves too.
        """
        if self._depth or is_capturing():
            return []
        return safely(self._add_returned, list(zip(inputs, returned, strict=False))) or []

    def _add_returned(self, pairs: list[tuple[Any, Any]]) -> list[torch.Tensor]:
        import torch

        plain = [(unwrapped(leaf), made) for leaf, made in pairs if isinstance(made, torch.Tensor)]
        leaves = [leaf for leaf, made in plain if leaf.is_leaf and leaf.is_floating_point()]
        self.made |= {id(leaf): short(made.dtype) for leaf, made in plain if leaf.is_leaf}
        found = [(leaf, made) for leaf, made in pairs if isinstance(made, torch.Tensor) and leaf.is_leaf]
        found = [(leaf, made) for leaf, made in found if unwrapped(leaf) is leaf]
        if len(self._sampled) < MODELS * LEAVES:
            new = [id(leaf) for leaf, _ in found if id(leaf) not in self._leaves]
            self._sampled |= set(new[:: max(1, len(new) // LEAVES)])
        self._leaves |= {id(leaf): weakref.ref(leaf) for leaf, _ in found}
        for leaf, made in found:
            if id(leaf) in self._sampled and not made.is_sparse:
                self._add_to_sum(leaf, made)
        return leaves

    def _check_sum(self, leaf: torch.Tensor, earlier: torch.Tensor) -> None:
        """Record if the gradient of a leaf, the sum of an earlier one and a new one, was rounded."""
        self._sums.pop(id(leaf), None)
        now = sample(leaf.grad)
        if now.shape != earlier.shape or now.dtype != earlier.dtype:
            return
        ratio = (now - earlier) / earlier
        # The sum of equal gradients (a batch that is repeated) is exact in any dtype: it shows nothing.
        repeated = (1 / ratio - (1 / ratio).round()).abs() < 1e-6
        shows = (earlier != 0) & (now != earlier) & (now != 0) & ~repeated
        dtype = rounding.rounded_to(now[shows])
        # Gradients in BF16 add up in FP32 to numbers that FP16 has too, unless the last one is much smaller.
        smaller = shows & ((now - earlier).abs() < now.abs() / 16)
        if dtype == "fp16" and int(smaller.sum()) < rounding.ENOUGH:
            return
        if dtype is not None and id(leaf) not in self._rounded:
            self._rounded.add(id(leaf))
            self.rounded[dtype] += 1

    def _add_to_sum(self, leaf: torch.Tensor, gradient: Any) -> None:
        """Add the gradient of a pass that began without one to what the script should sum itself."""
        import torch

        now = sample(gradient).to(torch.float64, copy=True)
        total = self._sums.get(id(leaf))
        if total is None or total.last.shape != now.shape:
            self._sums[id(leaf)] = _Sum([now], now)
        else:
            total.add(now)

    def stepped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Compare the gradients that an optimizer has applied with the sums of those that backward passes made."""
        safely(self._compare_sums, list(parameters))

    @property
    def has_sums(self) -> bool:
        """True if gradients of steps before are known."""
        return bool(self._sums)

    def forget_sums(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget the gradients that were applied in a step which is not looked at."""
        for parameter in parameters:
            self._sums.pop(id(parameter), None)

    def _compare_sums(self, parameters: list[torch.Tensor]) -> None:
        import torch

        for parameter in parameters:
            total = self._sums.pop(id(parameter), None)
            if total is None or total.terms < 2 or parameter.grad is None:
                continue
            found = sample(parameter.grad)
            if found.shape == total.last.shape:
                dtype = rounding.summed_in(found, torch.stack(total.rows()), total.terms)
                if dtype is not None and id(parameter) not in self._rounded:
                    self._rounded.add(id(parameter))
                    self.rounded[dtype] += 1

    # -- collectives -------------------------------------------------------------------------

    def record_collective(self, call: Collective) -> None:
        """Count what engines and hooks reduce, and those tensors of the script that hold gradients."""
        if call.is_exchanged and call.origin != "engine":
            self.exchanged += sum(tensor.numel() for tensor in call.tensors)
        if call.origin == "function" or (call.origin != "script" and not call.reduces):
            return
        if call.origin == "script" and is_capturing():
            return
        for tensor in call.tensors:
            if call.origin == "script":
                owners = self._owners(tensor)
                self.reduced |= owners
                if not owners:
                    sent = call.is_sent_to_one and not self._is_weight(tensor)
                    self.passed_on += tensor.numel() if sent else 0
                    continue
            self.sent[call.origin, short(tensor.dtype), call.group] += tensor.numel()

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """True if a tensor holds a parameter, or all in a row: ranks that average their weights are no pipeline."""
        import torch

        flat = tensor.detach().reshape(-1)
        for optimizer in self.optimizers:
            own = [local(each).detach().reshape(-1) for group in optimizer.param_groups for each in group["params"]]
            begin = own[:1] if flat.numel() == sum(each.numel() for each in own) else []
            if any(torch.equal(each, flat) for each in own if each.numel() == flat.numel()) or any(
                torch.equal(each, flat[: each.numel()]) for each in begin
            ):
                return True
        return False

    def _owners(self, tensor: torch.Tensor) -> set[int]:
        """Return the ids of the parameters whose gradients are in a tensor; empty for a metric."""
        for parameters in self._orders():
            with_gradient = [each for each in parameters if each.grad is not None and not each.grad.is_sparse]
            owners = _sharing_memory(tensor, with_gradient) or _resembling(tensor, with_gradient)
            if owners:
                return owners
        return set()

    def _orders(self) -> Iterator[list[torch.Tensor]]:
        """Yield lists of parameters in the orders in which scripts put them into one buffer."""
        own = [[own for group in optimizer.param_groups for own in group["params"]] for optimizer in self.optimizers]
        leaves = [leaf for reference in self._leaves.values() if (leaf := reference()) is not None]
        # An input of a pipeline's stage has a gradient too, which is not reduced.
        leaves = [leaf for leaf in leaves if not own or _is_parameter(leaf)]
        for order in (*own, leaves):
            yield order
            yield order[::-1]
        if own and leaves and not {id(leaf) for leaf in leaves} & {id(each) for order in own for each in order}:
            # The optimizers have copies: the order of the leaves is that of the graph, and scripts take the model's.
            yield [each for model in models_of(leaves) for each in model.parameters()]


def _is_parameter(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.nn.Parameter)


def is_capturing() -> bool:
    """True while a CUDA graph is captured: reading values would end that."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def unwrapped(tensor: Any) -> Any:
    """Return the tensor that a transform of `torch.func` has wrapped; another tensor unchanged."""
    from torch._C import _functorch

    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def are_applicable(inputs: Iterable[Any], *, create_graph: bool) -> bool:
    """True if the gradients that `torch.autograd.grad` is going to return are those of a step, not a part of its loss.

    A gradient that is differentiated again is a part of the loss. Transforms of `torch.func` create a graph always: of
    nested ones the outermost counts, in whose level the inputs are wrapped.
    """
    from torch._C import _functorch

    wrapped = next((each for each in inputs if _functorch.is_functorch_wrapped_tensor(each)), None)
    if wrapped is None:
        return not create_graph
    stack = _functorch.get_interpreter_stack() or []
    levels = [each.level() for each in stack if each.key() == _functorch.TransformType.Grad]
    return not levels or levels == [_functorch.maybe_get_level(wrapped)]


def leaves_behind(outputs: Iterable[Any]) -> list[torch.Tensor]:
    """Return the leaves whose `.grad` a backward pass adds to, from tensors or gradient edges."""
    return [node.variable for node in nodes_behind(outputs) if is_leaf(node)]


def local(tensor: Any) -> Any:
    """Return the part of a DTensor that is in this process; other tensors unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def sample(tensor: Any, values: int = VALUES) -> torch.Tensor:
    """Return some values of a tensor, from all over its first row if it is not contiguous; a view."""
    own = local(tensor).detach()
    while own.dim() > 1 and not own.is_contiguous():
        own = own[0]
    flat: torch.Tensor = own.reshape(-1)
    return flat[:: max(1, flat.numel() // values)][:values]


def is_allocated(tensor: Any) -> bool:
    """True if a tensor has its memory: between uses FSDP frees that of its parameters."""
    own = local(tensor)
    return bool(own.numel()) and own.untyped_storage().nbytes() >= own.numel() * own.element_size()


def _sharing_memory(tensor: torch.Tensor, parameters: list[torch.Tensor]) -> set[int]:
    """Return the ids of the parameters whose gradients are in the memory of a tensor."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    return {id(each) for each in parameters if begin <= local(each.grad).data_ptr() < end}


def _resembling(tensor: torch.Tensor, parameters: list[torch.Tensor]) -> set[int]:
    """Return the ids of parameters in a row whose gradients, up to a factor and a cast, were copied into a tensor."""
    sizes = [local(each.grad).numel() for each in parameters]
    flat = tensor.detach().reshape(-1)
    for first, last in _runs(sizes, flat.numel()):
        largest = max(range(first, last), key=sizes.__getitem__)
        offset = sum(sizes[first:largest])
        gradient = local(parameters[largest].grad).detach().reshape(-1)
        if similar(flat[offset : offset + sizes[largest]], gradient):
            return {id(each) for each in parameters[first:last]}
    return set()


def _runs(sizes: list[int], total: int) -> Iterator[tuple[int, int]]:
    """Yield the runs (first, last + 1) of sizes that add up to a total; all of them, if little more is in the total."""
    ends = list(itertools.accumulate(sizes))
    if not ends or total < min(sizes):
        return
    positions = {0: 0, **{end: index + 1 for index, end in enumerate(ends)}}
    for last, end in enumerate(ends, 1):
        first = positions.get(end - total)
        if first is not None and first < last:
            yield first, last
    if ends[-1] < total <= 1.05 * ends[-1] + 4096:  # padded
        yield 0, len(sizes)


def similar(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one size have the same values up to a factor and rounding."""
    step = max(1, one.numel() // 512)
    a, b = one[::step].double(), other[::step].double()
    lengths = float(a.norm()) * float(b.norm())
    if not math.isfinite(lengths):
        return False
    return float(a @ b) >= SIMILAR * lengths if lengths else float(a.norm()) == float(b.norm())


def safely(look: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function that looks at gradients; an error in it does not end the training."""
    import torch

    try:
        with torch.no_grad(), outside():
            return look(*arguments, **options)
    except Exception as error:
        log.debug("mpguard: gradients were not observed: %r", error)
        return None
