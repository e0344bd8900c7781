"""What happens to gradients between backward and the optimizer's step: in which dtype they are accumulated and reduced.

`Gradients` watches the leaves of backward passes, and the collectives. It holds weak references and small samples.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof import program_threads
from mpguard.runtime.proof.collectives import Collective
from mpguard.runtime.proof.handoffs import HandOffs
from mpguard.runtime.proof.inferred import is_leaf, nodes_behind
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.products import short
from mpguard.runtime.proof.samples import are_set, drawn, is_allocated, is_capturing, local, safely, sample

if TYPE_CHECKING:
    import torch

#: Least similarity (cosine) of a tensor that is sent and the gradient from which it was made: rounding costs less.
SIMILAR = 0.99


class Gradients:
    """The ways of gradients in this process.

    optimizers: the optimizers of the process. accumulated: elements added to an earlier gradient, by the id of the leaf
    and the dtype. passes: backward passes that added to the gradient of a leaf, by its id. handoffs: their values
    between passes and steps. loss: the value from which the last backward pass began. sent: elements by origin, dtype
    and process group, see `collectives.origin`; of the script's only those that hold gradients. reduced: ids of the
    parameters whose gradients the script has sent; groups: the names of the process groups, by these ids. in_hooks: ids
    of the leaves of backward passes in which hooks have reduced. unread: elements of integers that the script has
    exchanged, by dtype: they may be bytes of gradients.
    passed_on: elements of other tensors, no weights, that the script has sent to one rank, as stages of a pipeline do.
    exchanged: elements that ranks have exchanged, of gradients too, as they do with the inputs of experts. made: by
    the id of a leaf, the dtype of the gradient that a backward pass has made, since the last step began. starts: by the
    id of a parameter, some of its values before the first step.
    """

    def __init__(self, optimizers: Collection[Any] = ()) -> None:
        self.optimizers = optimizers
        self.accumulated: Counter[tuple[int, str]] = Counter()
        self.passes: Counter[int] = Counter()
        self.handoffs = HandOffs(optimizers)
        self.loss: Any = None
        #: The sum of the values from which backward passes began since the last step: not finite if one of them is not.
        self.loss_sum: torch.Tensor | None = None
        self.norm_dtype = ""  # of the norm by which gradients were clipped
        self.sent: Counter[tuple[str, str, str]] = Counter()
        self.reduced: set[int] = set()
        self.groups: dict[int, set[str]] = {}
        self.in_hooks: set[int] = set()
        self.unread: Counter[str] = Counter()
        self.passed_on = self.exchanged = 0
        self.made: dict[int, str] = {}
        self.starts: dict[int, torch.Tensor] = {}
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._depth = 0
        self._pass: set[int] = set()  # ids of the leaves of the pass that runs

    @property
    def leaves(self) -> set[int]:
        """The ids of the tensors that backward passes have reached."""
        return set(self._leaves)

    def release(self) -> None:
        """Release the samples; what was counted remains."""
        self._leaves, self.optimizers = {}, ()
        self.handoffs.release()

    def forget_leaf(self, number: int) -> None:
        """Release the weak reference to a leaf, and its samples. number: its id."""
        self._leaves.pop(number, None)
        self.handoffs.forget_leaf(number)

    # -- backward ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def during_backward(self, outputs: Iterable[Any], accumulates: bool) -> Iterator[list[torch.Tensor]]:
        """Watch the leaves of a backward pass around its call, and yield them; none of a pass within another.

        accumulates: False for `torch.autograd.grad`.
        """
        watched = accumulates and not is_capturing()
        leaves = (safely(self._find_leaves, list(outputs)) or []) if watched else []
        with program_threads.reading:
            alone = bool(leaves) and not self._depth
            if alone:
                self._depth += 1
        if not alone:  # activation checkpoints run passes within the pass
            if leaves:
                safely(self.handoffs.pass_not_sampled, leaves)  # or another thread's runs at the same time
            yield []
            return
        before = safely(self.handoffs.pass_begins, leaves)
        self._pass = {id(leaf) for leaf in leaves}
        try:
            with self.handoffs.before_hooks(leaves):
                yield leaves
        finally:
            with program_threads.reading:
                self._depth -= 1
        if before is not None:
            safely(self._after, leaves, before)

    def _find_leaves(self, outputs: list[Any]) -> list[torch.Tensor]:
        """Return the leaves of a backward pass."""
        import torch
        import torch.distributed as dist

        if outputs and isinstance(outputs[0], torch.Tensor) and outputs[0].numel() == 1:
            self.loss = outputs[0].detach().clone()
            self._add_loss(local(self.loss))
        leaves = leaves_behind(outputs)
        new = [leaf for leaf in leaves if id(leaf) not in self._leaves]
        self._leaves |= {id(leaf): weakref.ref(leaf) for leaf in new}
        if dist.is_available() and dist.is_initialized():
            self.starts |= {id(leaf): sample(leaf) for leaf in new if is_allocated(leaf)}
        return leaves

    def _add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a backward pass to `loss_sum`, without waiting for a device."""
        before = self.loss_sum
        added = before is not None and before.device == loss.device
        self.loss_sum = before + loss.float() if before is not None and added else loss.float()

    def take_not_finite(self) -> bool:
        """Return True if a loss since the last step was NaN or infinite, and begin to sum up again."""
        found, self.loss_sum = self.loss_sum, None
        return found is not None and not bool(found.isfinite().all())

    def _after(self, leaves: list[torch.Tensor], before: dict[int, torch.Tensor]) -> None:
        """Count what was added to earlier gradients. Gradients that were set to zero are not earlier ones.

        before: samples of those that leaves had.
        """
        own = {id(leaf) for leaf in leaves}
        had_gradient = any(are_set([values for key, values in before.items() if key in own]))
        self.handoffs.pass_ended(leaves, before)
        for leaf in leaves:
            if leaf.grad is not None:
                self.made[id(leaf)] = short(leaf.grad.dtype)
                if had_gradient:
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
        self._leaves |= {id(leaf): weakref.ref(leaf) for leaf, _ in found}
        self.handoffs.returned(found)
        return leaves

    # -- collectives -------------------------------------------------------------------------

    def record_collective(self, call: Collective) -> bool:
        """Count what engines and hooks reduce, and those tensors of the script that hold gradients.

        Return True if a tensor of the script does.
        """
        scattered = bool(call.outputs) and call.origin == "function"  # as in sequence parallelism
        if scattered or (call.is_exchanged and call.origin != "engine"):
            self.exchanged += sum(tensor.numel() for tensor in call.tensors)
        if call.origin == "function" or (call.origin != "script" and not call.reduces):
            return False
        if call.origin == "script" and is_capturing():
            return False
        found = False
        for tensor in call.single if call.origin == "script" else ():
            if owners := next(
                filter(None, (_sharing_memory(tensor, _with_gradient(order)) for order in self._orders())), []
            ):
                self.add_sent(owners, short(tensor.dtype), 1, call.group)
                found = True
        for tensor in call.integers if call.origin == "script" else ():
            self.unread[short(tensor.dtype)] += tensor.numel()
        for tensor in call.tensors:
            if call.origin == "script":
                owners, flat = self.owners(tensor)
                found |= bool(owners)
                safely(self.handoffs.reduction_finds, owners, flat)
                if owners:
                    self.add_sent(owners, short(tensor.dtype), tensor.numel(), call.group)
                elif call.is_sent_to_one and not self._is_weight(tensor):
                    self.passed_on += tensor.numel()
                continue
            self.in_hooks |= self._pass if call.origin == "hook" else set()
            self.sent[call.origin, short(tensor.dtype), call.group] += tensor.numel()
        return found

    def add_sent(self, owners: Iterable[torch.Tensor], dtype: str, elements: int, group: str) -> None:
        """Count a tensor that the script has sent over a group. owners: the parameters whose gradients are in it."""
        for own in owners:
            self.reduced.add(id(own))
            self.groups.setdefault(id(own), set()).add(group)
        self.sent["script", dtype, group] += elements

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

    def owners(
        self, tensor: torch.Tensor, known: Collection[int] = ()
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the parameters whose gradients are in a tensor; none for a metric.

        And the flattened tensor, if it holds copies of them in a row, or the sums of several passes, which the script
        has added up in buffers of its own. known: ids of parameters that are not asked for.
        """
        orders = [[each for each in order if id(each) not in known] for order in self._orders()]
        for with_gradient in map(_with_gradient, orders):
            if sharing := _sharing_memory(tensor, with_gradient):
                return sharing, None
            if alike := _resembling(tensor, with_gradient):
                return alike, tensor.detach().reshape(-1)
        for parameters in orders:
            if summed := self._holding_sums(tensor, parameters):
                return summed, tensor.detach().reshape(-1)
        return [], None

    def _holding_sums(self, tensor: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters in a row of whose gradients, as passes have left them, a tensor holds the sums.

        The script may have added them to buffers, and have removed them from the parameters.
        """
        sizes = [local(each).numel() for each in parameters]
        for first, last in _runs(sizes, tensor.numel()):
            run, flat, offset = parameters[first:last], tensor.detach().reshape(-1), 0
            for own, size in zip(run, sizes[first:last], strict=True):
                total = self.handoffs.sum_of_passes(own)
                if total is not None:
                    found = sample(flat[offset : offset + size].view(local(own).shape))
                    if bool(total.any()) and similar(found, total):
                        return run
                    break
                offset += size
        return []

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


def _with_gradient(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that have a dense gradient."""
    return [each for each in parameters if each.grad is not None and not each.grad.is_sparse]


def _is_parameter(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.nn.Parameter)


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


def _sharing_memory(tensor: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters whose gradients are in the memory of a tensor."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    return [each for each in parameters if begin <= local(each.grad).data_ptr() < end]


def _resembling(tensor: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters in a row whose gradients, up to a factor and a cast, were copied into a tensor."""
    sizes = [local(each.grad).numel() for each in parameters]
    flat = tensor.detach().reshape(-1)
    for first, last in _runs(sizes, flat.numel()):
        largest = max(range(first, last), key=sizes.__getitem__)
        offset = sum(sizes[first:largest])
        gradient = local(parameters[largest].grad).detach().reshape(-1)
        if similar(flat[offset : offset + sizes[largest]], gradient):
            return parameters[first:last]
    return []


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
    a, b = (each[drawn(one.numel(), 512, each.device)].double() for each in (one, other))
    lengths = float(a.norm()) * float(b.norm())
    if not math.isfinite(lengths):
        return False
    return float(a @ b) >= SIMILAR * lengths if lengths else float(a.norm()) == float(b.norm())
