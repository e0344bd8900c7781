"""What is only visible while it happens: backward passes, reductions, loss scaling, FP8 autocast.

A `Recorder` listens from its start until the proof is made. It holds no tensor and no model: what
holds a process group must not outlive the script.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.policy.policy import Policy
from mpguard.runtime.proof import fp8, matmuls
from mpguard.runtime.proof.matmuls import Pass, short

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Collectives that reduce, and where they live. FSDP, DeepSpeed and communication hooks of DDP call
#: them through `torch.distributed`; DDP's own reducer is C++ and is asked instead.
REDUCTIONS = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "_reduce_scatter_base",
)  # fmt: skip


class Recorder:
    """Collects for the proofs of a process. `active` between `start` and `stop`; the findings stay."""

    def __init__(self, former: Recorder | None = None) -> None:
        """former: the one before, since what has been compiled is not compiled again."""
        self.active = False
        self.engines: list[Any] = []
        self.passes: dict[frozenset[int], Pass] = {}
        self.compiled: Counter[tuple[str, int]] = Counter(former.compiled if former is not None else ())
        self.output: str | None = None
        self.backwards = 0
        self.skipped = 0
        self.reductions: Counter[str] = Counter()
        self.updated: dict[int, tuple[Counter[str], Counter[str]]] = {}
        self.scaler: Any = None
        self.scalers: dict[int, dict[str, Any]] = {}
        self.te_recipes: list[dict[str, Any]] = []
        self._open: Pass | None = None
        self._scaled = False
        self._modules: Any = None
        self._restore: list[Callable[[], None]] = []
        self._inside = threading.local()

    def start(self, policy: Policy) -> None:
        """Listens. Needs torch. The patches of backward, GradScaler and dynamo tell the recorder that is active."""
        self.active = True
        self._listen_to_collectives()
        if policy.output_dtype is not None or "transformer_engine" in sys.modules:
            self.listen_to_modules()

    def stop(self) -> None:
        """Removes every hook, and lets go of engines and scalers."""
        self.active = False
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
        for restore in self._restore:
            restore()
        self._restore.clear()
        self.engines, self.scaler = [], None

    # -- backward ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def passing(self, outputs: Any, accumulates: bool) -> Iterator[None]:
        """Around a backward pass. One within another (a checkpoint that computes anew) belongs to it."""
        found = matmuls.behind(outputs)
        if self._open is not None:
            self._open.add(found)
            yield
            return
        self.backwards += 1
        self._open = whole = self.passes.setdefault(frozenset(found.leaves), Pass())
        self._scaled = False
        whole.add(found)
        try:
            yield
        finally:
            whole.unscaled |= accumulates and not self._scaled
            self._open = None

    def scaled(self, loss: Any) -> None:
        """What a GradScaler has scaled: its gradient is asked for where backward begins there."""
        from torch.utils._pytree import tree_leaves

        def began(_gradient: Any) -> None:
            self._scaled = True

        for tensor in tree_leaves(loss):
            if getattr(tensor, "requires_grad", False):
                tensor.register_hook(began)

    def graph(self, module: Any) -> None:
        """A graph that dynamo is about to have compiled."""
        import torch

        if torch.is_grad_enabled():
            self.compiled += matmuls.in_graph(module)

    def behind(self, parameters: set[int]) -> Pass:
        """The passes that reached some parameters, as one; all, where engines hold copies of their own."""
        mine = [each for each in self.passes.values() if each.leaves & parameters]
        whole = Pass()
        for each in mine or self.passes.values():
            whole.add(each)
        if whole.compiled:
            whole.work += self.compiled
        return whole

    # -- modules -----------------------------------------------------------------------------

    def listen_to_modules(self) -> None:
        """Only where nothing else tells: dynamo warns about such hooks."""
        if self.active and self._modules is None:
            from torch.nn.modules.module import register_module_forward_hook

            self._modules = register_module_forward_hook(self._put_out)

    def _put_out(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if fp8.is_te(module):
            self.te_recipes.append(fp8.te_recipe_in_force(module))
        if any(parameter.requires_grad for parameter in module.parameters()):
            dtypes = [leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self.output = next((short(dtype) for dtype in dtypes if dtype.is_floating_point), self.output)

    # -- collectives -------------------------------------------------------------------------

    def reduced(self, tensors: Any) -> None:
        """Tensors that are reduced across processes. Scalars (losses, norms, flags) are no gradients."""
        import torch
        from torch.utils._pytree import tree_leaves

        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                self.reductions[short(tensor.dtype)] += tensor.numel()

    def _listen_to_collectives(self) -> None:
        import torch.distributed as dist

        if not dist.is_available():
            return
        from torch.distributed import distributed_c10d

        for name in REDUCTIONS:
            real = getattr(distributed_c10d, name, None)
            if real is None:
                continue
            heard = self._heard(real)
            for module in (distributed_c10d, dist):
                if getattr(module, name, None) is real:
                    setattr(module, name, heard)
                    self._restore.append(functools.partial(_put_back, module, name, heard, real))

    def _heard(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "collective", False) or getattr(self._inside, "own", False):
                return real(*args, **kwargs)
            self.reduced((args, kwargs))
            self._inside.collective = True
            try:
                return real(*args, **kwargs)
            finally:
                self._inside.collective = False

        return collective

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Collectives of our own are no gradients."""
        self._inside.own = True
        try:
            yield
        finally:
            self._inside.own = False

    # -- optimizers --------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """What an optimizer has just updated, and with what: dtypes of weights and gradients. Whether there was any."""
        from mpguard.nn.fp8.weights import master_of

        masters: Counter[str] = Counter()
        gradients: Counter[str] = Counter()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_floating_point() and parameter.grad is not None:
                    masters[short(master_of(parameter).dtype)] += parameter.numel()
                    gradients[short(parameter.grad.dtype)] += parameter.grad.numel()
        if gradients:
            self.updated[id(optimizer)] = masters, gradients
        return bool(gradients)


def _put_back(module: Any, name: str, ours: Any, real: Any) -> None:
    if getattr(module, name, None) is ours:
        setattr(module, name, real)
