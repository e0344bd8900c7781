"""What a process really does, as plain data.

A `Recorder` collects what is only visible while it happens (what modules put out, what is reduced,
what scales the loss); `observe()` adds what can be read off the model and the optimizer after a
step. Nothing here judges; `proof` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.policy import Dtype, Policy
from mpguard.runtime import fp8

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Collectives that reduce, and where they live. FSDP, DeepSpeed and communication hooks of DDP call
#: them through `torch.distributed`; DDP's own reducer is C++ and is asked instead.
REDUCTIONS = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "_reduce_scatter_base",
)  # fmt: skip


@dataclasses.dataclass
class Observed:
    """One process after an applied optimizer step. Dtypes by short name, counted in elements.

    engine: `single`, `none` (several processes, no wrapper), `ddp`, `fsdp1`, `fsdp2`, `deepspeed-zeroN`.
    world_size: of the process group; 1 without one, whatever the launcher's variables say.
    compute: what Linear-like modules put out, weighted by their weights; `computed_in` says which.
    masters, gradients, states: of what the optimizer updates.
    reductions: of gradients across processes; `reduced_by` says how it was seen.
    """

    engine: str = "single"
    world_size: int = 1
    launched: int = 1
    device: str = "cpu"
    step: int = 0
    skipped: int = 0
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)
    buffers: dict[str, int] = dataclasses.field(default_factory=dict)
    compute: dict[str, int] = dataclasses.field(default_factory=dict)
    computed_in: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    compute_from: str = "modules"
    output: str | None = None
    optimizer: str = ""
    masters: dict[str, int] = dataclasses.field(default_factory=dict)
    gradients: dict[str, int] = dataclasses.field(default_factory=dict)
    states: dict[str, int] = dataclasses.field(default_factory=dict)
    reductions: dict[str, int] = dataclasses.field(default_factory=dict)
    reduced_by: str | None = None
    scaler: dict[str, Any] | None = None
    fp8: fp8.Fp8Found | None = None
    tf32: bool | None = None
    compiled: bool = False


def short(dtype: torch.dtype) -> str:
    """The policy's short name of a dtype; torch's own for those that it does not know."""
    known = Dtype.of(dtype)
    return known.short if known else str(dtype).removeprefix("torch.")


class Recorder:
    """Collects from the first forward pass to the proof, then lets go of everything.

    Models are found by themselves: the outermost module that is called with gradients on, whatever
    framework has wrapped it.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.engines: list[Any] = []
        self.outputs: dict[str, tuple[str, int]] = {}
        self.output: str | None = None
        self.autocast: str | None = None
        self.forwards = 0
        self.backward = False
        self.reductions: Counter[str] = Counter()
        self.gradients: Counter[str] = Counter()
        self.masters: Counter[str] = Counter()
        self.scaler: Any = None
        self.scaler_record: dict[str, Any] | None = None
        self.te_recipes: list[dict[str, Any]] = []
        self.skipped = 0
        self._known: set[int] = set()
        self._handles: list[Any] = []
        self._finding: Any = None
        self._restore: list[Callable[[], None]] = []
        self._inside = threading.local()

    def start(self) -> None:
        """Listens to modules and collectives. Needs torch."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        # Of no concern to anybody else: ours fires twice and minds only the first.
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        self._finding = register_module_forward_pre_hook(self._entered)
        self._handles.append(self._finding)
        self._listen_to_collectives()

    def stop(self) -> None:
        """Removes every hook, and lets go of models: what holds a process group must not outlive the script."""
        for handle in self._handles:
            handle.remove()
        for restore in self._restore:
            restore()
        self._handles.clear()
        self._restore.clear()
        self.roots, self.engines, self.scaler = [], [], None

    def _entered(self, module: nn.Module, _inputs: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or id(module) in self._known or not torch.is_grad_enabled():
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        self.add_root(module)
        self._root_called(module, None, None)  # its hooks are heard from the next call on

    def add_root(self, module: nn.Module) -> None:
        """Watches a model: what its modules put out, and whether backward runs."""
        if id(module) in self._known:
            return
        known = {id(inner) for inner in module.modules()}
        self.roots = [root for root in self.roots if id(root) not in known]
        self.roots.append(module)
        self._known |= known
        self._handles.append(module.register_forward_pre_hook(self._root_called, with_kwargs=True))
        self._handles.append(module.register_forward_hook(self._root_returned))
        compiled = {id(part) for inner in module.modules() if _compiled(inner) for part in inner.modules()}
        if compiled and self._finding is not None:
            self._finding.remove()  # a hook that is gone later would have it all compiled again
        for name, inner in module.named_modules():
            if next(inner.children(), None) is None and id(inner) not in compiled:
                self._handles.append(inner.register_forward_hook(functools.partial(self._put_out, plain_name(name))))

    def _root_called(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.forwards += 1
        device = device_of(module)
        if torch.is_autocast_enabled(device):
            self.autocast = short(torch.get_autocast_dtype(device))

    def _root_returned(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        if torch.compiler.is_compiling():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
                self.output = short(leaf.dtype)
                leaf.register_hook(self._went_back)  # type: ignore[no-untyped-call]
                return

    def _went_back(self, _gradient: Any) -> None:
        self.backward = True

    def _put_out(self, name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if fp8.is_te(module):
            self.te_recipes.append(fp8.te_recipe_in_force())
        weight = getattr(module, "weight", None)
        if hasattr(module, "_original_forward"):
            return  # accelerate has wrapped it, and casts what it puts out back to FP32
        if isinstance(module, torch.nn.Embedding) or not isinstance(weight, torch.Tensor) or weight.ndim < 2:
            return
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            self.outputs[name] = (short(output.dtype), max(1, weight.numel()))

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

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer has just updated, and with what."""
        self.masters, self.gradients = Counter(), Counter()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.is_floating_point():
                    continue
                if parameter.grad is not None:
                    self.masters[short(parameter.dtype)] += parameter.numel()
                    self.gradients[short(parameter.grad.dtype)] += parameter.grad.numel()


def _put_back(module: Any, name: str, ours: Any, real: Any) -> None:
    if getattr(module, name, None) is ours:
        setattr(module, name, real)


def plain_name(name: str) -> str:
    """A qualified name without what wrappers put in it."""
    for wrapper in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def device_of(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else str(parameter.device.type)


def observe(recorder: Recorder, model: nn.Module | None, optimizer: Any, *, policy: Policy, step: int = 1) -> Observed:
    """Everything about a process after a step, as plain data.

    model: None for those that the recorder has found. policy: says why a layer is not FP8.
    """
    roots = [model] if model is not None else owners(recorder.roots, optimizer)
    world, launched = world_size()
    seen = Observed(step=step, world_size=world, launched=launched, skipped=recorder.skipped)
    seen.engine = engine_of(roots, recorder, world)
    modules = [pair for root in roots for pair in root.named_modules()]
    for root in roots:
        seen.device = device_of(root)
        _count(seen.parameters, (parameter for parameter in root.parameters() if parameter.requires_grad))
        _count(seen.buffers, root.buffers())
    seen.compiled = any(_compiled(module) for _, module in modules)
    _computed(seen, recorder, cast_back=any(hasattr(module, "_original_forward") for _, module in modules))
    seen.output = recorder.output
    _optimized(seen, recorder, optimizer)
    _reduced(seen, recorder, roots)
    seen.scaler = recorder.scaler_record
    seen.fp8 = fp8.find([(plain_name(name), module) for name, module in modules], policy, recorder.te_recipes)
    if "torch" in sys.modules:
        import torch

        seen.tf32 = torch.backends.cuda.matmul.allow_tf32
    return seen


def owners(roots: list[nn.Module], optimizer: Any) -> list[nn.Module]:
    """Those models whose parameters the optimizer updates; all, where it holds copies of its own."""
    groups = getattr(optimizer, "param_groups", None) or []
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    mine = [root for root in roots if any(id(parameter) in updated for parameter in root.parameters())]
    return mine or roots


def world_size() -> tuple[int, int]:
    """Processes in the process group (1 without one), and how many the launcher says it started."""
    import torch.distributed as dist

    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), launched
    return 1, launched


def engine_of(roots: list[nn.Module], recorder: Recorder, world: int) -> str:
    """What spreads the model over processes, by the objects that are there."""
    for candidate in (*recorder.engines, *roots):
        stage = getattr(candidate, "zero_optimization_stage", None)
        if callable(stage) and type(candidate).__module__.startswith("deepspeed"):
            return f"deepspeed-zero{stage()}"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = [module for root in roots for module in root.modules()]
    for name, engine in (("FullyShardedDataParallel", "fsdp1"), ("FSDPModule", "fsdp2")):
        kind = getattr(fsdp, name, None)
        if kind is not None and any(isinstance(module, kind) for module in modules):
            return engine
    if any(type(module).__name__ == "DistributedDataParallel" for module in modules):
        return "ddp"
    return "single" if world == 1 else "none"


def _computed(seen: Observed, recorder: Recorder, cast_back: bool) -> None:
    """cast_back: what the model puts out tells nothing, since accelerate casts it to FP32."""
    counted: Counter[str] = Counter()
    for name, (dtype, size) in recorder.outputs.items():
        counted[dtype] += size
        seen.computed_in.setdefault(dtype, []).append(name)
    seen.compute = dict(counted)
    if not counted and recorder.autocast:
        seen.compute, seen.compute_from = {recorder.autocast: 1}, "autocast"
    elif not counted and recorder.output and not cast_back:
        seen.compute, seen.compute_from = {recorder.output: 1}, "the model's output"


def _optimized(seen: Observed, recorder: Recorder, optimizer: Any) -> None:
    import torch
    from torch.utils._pytree import tree_leaves

    while hasattr(optimizer, "optimizer") and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if optimizer is None:
        return
    seen.optimizer = type(optimizer).__name__
    if not recorder.masters and isinstance(optimizer, torch.optim.Optimizer):
        recorder.optimizer_stepped(optimizer)
    seen.masters, seen.gradients = dict(recorder.masters), dict(recorder.gradients)
    state = getattr(optimizer, "state", None) or {}
    tensors = [t for t in tree_leaves([dict(entry) for entry in state.values()]) if isinstance(t, torch.Tensor)]
    _count(seen.states, (t for t in tensors if t.numel() > 1))


def _reduced(seen: Observed, recorder: Recorder, roots: list[nn.Module]) -> None:
    """The dtypes in which gradients crossed processes: at the collective, or as DDP's reducer says."""
    if seen.world_size == 1:
        return
    for root in roots:
        for module in root.modules():
            data = _ddp_data(module)
            if data is None:
                continue
            if recorder.reductions and data["hook"]:
                break  # a communication hook reduces in Python: seen at the collective
            if not data["hook"]:
                seen.reductions, seen.reduced_by = data["dtypes"], "the buckets of DDP's reducer"
                return
    if recorder.reductions:
        seen.reductions, seen.reduced_by = dict(recorder.reductions), "the collective"


def _ddp_data(module: nn.Module) -> dict[str, Any] | None:
    """What DDP's reducer holds: a bucket has the dtype of its parameters, unless a hook replaces it."""
    if type(module).__name__ != "DistributedDataParallel" or not hasattr(module, "reducer"):
        return None
    dtypes: dict[str, int] = {}
    _count(dtypes, (parameter for parameter in module.parameters() if parameter.requires_grad))
    return {"dtypes": dtypes, "hook": bool(getattr(module, "_comm_hooks", None))}


def _compiled(module: Any) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _count(counter: dict[str, int], tensors: Any) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            # Partitioned parameters of ZeRO-3 are empty between uses and know their real size.
            dtype = short(tensor.dtype)
            counter[dtype] = counter.get(dtype, 0) + int(getattr(tensor, "ds_numel", tensor.numel()))


@contextlib.contextmanager
def unheard(recorder: Recorder) -> Iterator[None]:
    """Collectives of our own are no gradients."""
    recorder._inside.own = True
    try:
        yield
    finally:
        recorder._inside.own = False
