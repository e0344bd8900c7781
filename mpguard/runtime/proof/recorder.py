"""`Recorder`: records what is visible only while it happens: backward passes, reductions, loss scaling, FP8 autocast.

It records from `start` until the proof is complete. It holds no tensor and no model, because an object that
holds a process group must not outlive the script.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.policy.policy import Policy
from mpguard.runtime.containment import contained
from mpguard.runtime.proof import attention_masks, fp8, graphs, program_threads
from mpguard.runtime.proof.account import AT_THE_SAME_TIME, StepAccount, shapes_of
from mpguard.runtime.proof.collectives import Collective, CollectiveListener
from mpguard.runtime.proof.comm_hooks import CommHooks
from mpguard.runtime.proof.gradients import Gradients
from mpguard.runtime.proof.hand_updates import HandUpdates
from mpguard.runtime.proof.inferred import Inferred, products_behind
from mpguard.runtime.proof.master_values import MasterValues
from mpguard.runtime.proof.products import short
from mpguard.runtime.proof.profiler import muted
from mpguard.runtime.proof.samples import safely
from mpguard.runtime.proof.scaled_passes import ScaledPasses
from mpguard.runtime.proof.shards import Shards

if TYPE_CHECKING:
    import torch
    from torch import nn


class Recorder:
    """Records facts for the proofs of a process; they remain after `stop`.

    active: True between `start` and `stop`; listened: since `start`. engines: DeepSpeed engines. account: the matmuls
    of a step. compiled: multiply-adds of compiled graphs by dtype and module. weight_uses: of parameters, in compiled
    graphs with gradients. attention_masks: calls of attention in them by what they take. output: the dtype of the last
    module output. backwards: number of backward passes. gradients: how they are accumulated and reduced. values: of the
    weights. updated: by the id of an optimizer, elements of weights and of gradients by dtype. scalers: facts about the
    scaler of an optimizer, by its id. te_recipes: the recipe of each call of a Transformer Engine module. averaging:
    what averages the weights of all ranks in place of their gradients, and when. casts: by call and dtype, the
    modules whose parameters it has cast to that dtype, which is narrower. several: True if the process has
    created several optimizers, which need not exist any more.
    """

    def __init__(self, previous: Recorder | None = None, optimizers: Collection[Any] = ()) -> None:
        """Create a recorder.

        previous: the recorder before. Its compiled graphs are kept because dynamo does not compile them again, and the
        matmuls are recorded from the beginning, because the optimizers exist.
        optimizers: the optimizers of the process.
        """
        self.active = self.listened = False
        self.engines: list[Any] = []
        self.account: StepAccount = StepAccount(None if previous is None else previous.account)
        self.compiled: Counter[tuple[str, int | None]] = Counter(previous.compiled if previous is not None else ())
        #: Of these the multiply-adds in regions without autocast.
        self.compiled_by_script: Counter[tuple[str, int | None]] = Counter(
            previous.compiled_by_script if previous is not None else ()
        )
        #: The dtypes of matmuls in graphs whose results need a gradient.
        self.trained_in_graphs: set[str] = set(previous.trained_in_graphs if previous is not None else ())
        self.weight_uses: set[graphs.WeightUse] = set(previous.weight_uses if previous is not None else ())
        self.attention_masks: Counter[str] = Counter(previous.attention_masks if previous is not None else ())
        self.output: str | None = None
        self.backwards = 0
        self.gradients = Gradients(optimizers)
        self.comm_hooks = CommHooks(self.gradients.handoffs.found)
        self.scaled_passes = ScaledPasses()
        self.values: MasterValues = MasterValues(None if previous is None else previous.values)
        self.by_hand: HandUpdates = HandUpdates(None if previous is None else previous.by_hand)
        self.updated: dict[int, tuple[Counter[str], Counter[str]]] = {}
        self.scalers: dict[int, dict[str, Any]] = {}
        self.te_recipes: list[dict[str, Any]] = []
        self.averaging: str | None = previous.averaging if previous is not None else None
        self.casts: dict[tuple[str, str], weakref.WeakSet[nn.Module]] = previous.casts if previous is not None else {}
        self.several: bool = previous is not None and previous.several
        self._open: Inferred | None = None  # of the backward pass that runs
        self._thread = 0  # in which it runs
        self._optimizers_exist = previous is not None
        self._scaled = False
        self._module_hook: Any = None
        self.shards = Shards()
        self.activations = 0  # elements that functions of autograd have exchanged: ranks have parts of one model
        self._collectives = CollectiveListener(self._record_collective)

    def start(self, policy: Policy, *, in_step: bool = False, again: bool = False) -> None:
        """Start to record. Needs torch. The patches of backward, GradScaler and dynamo call the active recorder.

        in_step: True while an optimizer's `step` runs: matmuls are recorded after it. again: True if the optimizers
        that step next were proven.
        """
        self.account.trusts_graphs(again)
        self.active = self.listened = True
        if policy.fp8_weight_cache:
            importlib.import_module("mpguard.nn.fp8.weight_cache")
        _observe_modules(True)
        self._collectives.start()
        if self._optimizers_exist and in_step:
            self.account.restart()
        elif self._optimizers_exist:
            self.account.start()
        if policy.output_dtype is not None or "transformer_engine" in sys.modules:
            self.listen_to_modules()

    def stop(self) -> None:
        """Remove every hook, and release engines."""
        self.active = False
        _observe_modules(False)
        self.account.stop()
        if self._module_hook is not None:
            self._module_hook.remove()
            self._module_hook = None
        self._collectives.stop()
        self.gradients.release()
        self.engines = []

    def record_weights(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the shapes of weights, by which matmuls in kernels of other libraries are recognized.

        An engine calls this before it replaces the weights with flat parts.
        """
        self.account.weights |= shapes_of(parameters)

    def record_optimizer(self, parameters: list[torch.Tensor]) -> None:
        """Record that an optimizer was created: steps can follow, so that matmuls are recorded from here."""
        self.record_weights(parameters)
        if self.active:
            self.account.start()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Record nothing inside the block: the watch computes a batch again, which is no part of the training."""
        was_active, self.active = self.active, False
        try:
            with muted(whole=True):
                yield
        finally:
            self.active = was_active

    # -- backward ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def record_backward(self, outputs: Any, accumulates: bool, optimizers: Iterable[Any] = ()) -> Iterator[None]:
        """Record a backward pass around its call; a nested one (activation checkpointing) is part of the outer one.

        accumulates: True if it adds to `.grad` of leaves, so that the loss must be scaled for FP16. optimizers: those
        that exist.
        """
        if graphs.is_traced():
            yield
            return
        behind = products_behind(outputs)
        with self.gradients.handoffs.optimizers_here(optimizers) as here:
            begins = self._open is None
            if self._open is None:
                self.backwards += 1
                self.account.begin_pass(behind, here)
                self._open, self._scaled, self._thread = behind, False, threading.get_ident()
            elif program_threads.is_another(self._thread):
                self.account.imply(behind, AT_THE_SAME_TIME)
            else:
                self._open.add(behind)
        if not begins:
            yield
            return
        try:
            yield
        finally:
            with program_threads.reading:  # no other thread's pass begins before this one has ended
                self._open = None
                self.comm_hooks.pass_ended()
                self.account.te_dtype = "fp8" if self.te_recipes and all(self.te_recipes) else None
                self.account.end_pass(accumulates, scaled=self._scaled)

    def record_scaled_loss(self, loss: Any) -> None:
        """Record a loss that a GradScaler has scaled: a hook on it shows whether a backward pass goes through it."""
        from torch.utils._pytree import tree_leaves

        def mark_scaled(_gradient: Any) -> None:
            self._scaled |= not program_threads.is_another(self._thread)

        for tensor in tree_leaves(loss):
            if getattr(tensor, "requires_grad", False):
                tensor.register_hook(mark_scaled)

    def graph_to_record(self, module: Any, owner: Any = None) -> Callable[[], None]:
        """Read a graph that dynamo passes to the compiler; the function that is returned records it, once it compiled.

        owner: the `self` of the function that is compiled.
        """
        import torch

        is_module = "torch.nn.modules.module" in {kind.__module__ for kind in type(owner).__mro__}
        outermost = frozenset({id(owner)} if is_module else ())
        found = graphs.products_in_graph(module, next(iter(outermost), None))
        by_script = graphs.products_in_graph(module, next(iter(outermost), None), without_autocast=True)
        trained = torch.is_grad_enabled()
        trained_in = {dtype for dtype, _ in graphs.products_in_graph(module, trained=True)} if trained else set()
        masks = attention_masks.kernels_in_graph(module) if trained else ()
        uses = set(graphs.weight_uses(module, outermost)) if trained else set()

        def record() -> None:
            self.compiled += found
            self.compiled_by_script += by_script
            if trained:
                self.trained_in_graphs |= trained_in
                self.attention_masks.update(masks)
                self.weight_uses |= uses

        return record

    def tensors_are_exchanged(self, tensors: Collection[torch.Tensor]) -> None:
        """Release weak references to tensors that are going to be exchanged: torch refuses it where there are any."""
        self.account.tensors_are_exchanged()
        for tensor in tensors:
            self.gradients.forget_leaf(id(tensor))
            self.values.forget_weight(id(tensor))

    # -- modules -----------------------------------------------------------------------------

    def listen_to_modules(self) -> None:
        """Record module outputs with a global hook. Only if they are needed, because dynamo warns about such hooks."""
        if self.active and self._module_hook is None:
            from torch.nn.modules.module import register_module_forward_hook

            self._module_hook = register_module_forward_hook(self._record_output)

    def _record_output(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        with contained("the observation of a module"):
            if fp8.is_te(module):
                self.te_recipes.append(fp8.te_recipe_in_force(module))
            if any(parameter.requires_grad for parameter in module.parameters()):
                dtypes = [leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
                self.output = next((short(dtype) for dtype in dtypes if dtype.is_floating_point), self.output)

    # -- collectives -------------------------------------------------------------------------

    def _record_collective(self, call: Collective) -> None:
        with muted():
            self.comm_hooks.sends(call.tensors)
            known = self.gradients.record_collective(call)
            self.activations += sum(each.numel() for each in call.tensors) if call.origin == "function" else 0
            if (call.origin == "script" and call.reduces) or (call.origin == "hook" and call.outputs):
                self.shards.record(call, known=known)
            elif call.origin == "function" and call.outputs:
                self.shards.record_scattered(call)

    def ignoring_collectives(self) -> contextlib.AbstractContextManager[None]:
        """Record no collectives inside the block: those of mpguard reduce no gradients."""
        return self._collectives.ignoring()

    # -- optimizers --------------------------------------------------------------------------

    def begin_gap(self, optimizer: Any, parameters: list[torch.Tensor]) -> None:
        """Record that what leads to the next step of an optimizer begins, which is checked."""
        self.account.begin_step(parameters)
        self.values.begin_gap(optimizer)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record which gradients an optimizer has when its step begins: the step may clear them."""
        groups = optimizer.param_groups
        own = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        safely(self.shards.begin_step, own, self.gradients)
        self.gradients.made = {id(parameter): short(parameter.grad.dtype) for parameter in own}
        safely(self.gradients.handoffs.step_begins, optimizer)
        self.values.begin_step(optimizer)

    def pre_hooks_ended(self, optimizer: Any) -> None:
        """Compare gradients with those that the hooks before a step have got."""
        safely(self.gradients.handoffs.pre_hooks_ended, optimizer)

    def post_hooks_begin(self, optimizer: Any) -> None:
        """Take samples of what a step leaves to the hooks after it."""
        if _has_hooks_after(optimizer):
            self.values.begin_hooks(optimizer)

    def share_scaler(self, optimizer: Any, around: Iterable[Any]) -> None:
        """Record for an optimizer the scaler of the one that has called its step. around: those whose steps run."""
        for each in around:
            if id(each) in self.scalers:
                self.scalers.setdefault(id(optimizer), self.scalers[id(each)])

    def record_step(self, optimizer: Any) -> bool:
        """Record the dtypes of the weights that an optimizer updated, and of their gradients; False if it had none."""
        from mpguard.nn import master_weights
        from mpguard.nn.fp8.weights import master_of

        masters: Counter[str] = Counter()
        gradients: Counter[str] = Counter()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                made = self.gradients.made.get(id(parameter))
                made = made if parameter.grad is None else short(parameter.grad.dtype)
                if parameter.is_floating_point() and made is not None:
                    kept = master_weights.master_of(parameter)
                    updated = master_of(parameter) if kept is None else kept.value
                    masters[short(updated.dtype)] += parameter.numel()
                    gradients[made] += parameter.numel()
        self.values.end_step(optimizer)
        if gradients:
            self.updated[id(optimizer)] = masters, gradients
        return bool(gradients)


def _observe_modules(on: bool) -> None:
    """Start or stop to record what modules do: those in `fp32_modules`, and those that keep FP8 copies of weights."""
    for name in ("mpguard.nn.fp32", "mpguard.nn.fp8.weight_cache"):  # not imported before a policy needs them
        if name in sys.modules:
            sys.modules[name].observe(on)


def _has_hooks_after(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_optimizer_step_post_hooks", None))
