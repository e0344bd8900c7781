"""Decide what `compile: auto` means for a run, and compile models in place.

`auto` is on where compiling makes training faster, off where it fails, and otherwise left to the script. Measurements
are in benchmarks/results/compile_auto.json. Every engine trains compiled models (gpu_matrix.json).

A deep model is compiled block by block: its blocks share their code, which is compiled once.

Importing this module does not import torch.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.core.objects import objects_of
from mpguard.policy import hardware
from mpguard.policy.policy import Policy

if TYPE_CHECKING:
    from torch import nn

#: The compiler backend, which is the default of `torch.compile` and accelerate.
BACKEND = "inductor"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Compile a model or not. on: None if the script decides. reason: a clause for messages."""

    on: bool | None
    reason: str = ""


#: The reason for delayed scaling, whose histories are updated between steps (S19).
NEVER = "Transformer Engine refuses delayed scaling under torch.compile"

#: The reason for torchao's layers.
PAYS = "torchao's casts cost more than its matmuls gain, unless they are compiled"


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that dynamo neither traces nor compiles, nor what it calls: a hook of an optimizer's step.

    A script may compile its step. `torch.compiler.disable` would import dynamo here, this does at the first call.
    """
    from torch._compile import _disable_dynamo

    return _disable_dynamo(hook)


def conflict(policy: Policy) -> str | None:
    """Return why a policy with `compile: true` cannot be enforced; None if it can."""
    if policy.compile is not True or policy.low_bit_recipe != "delayed":
        return None
    return f"`{policy.name}` has compile=True, and {NEVER}. Leave `compile` out, or set fp8_recipe to tensorwise"


def choice(policy: Policy) -> Choice:
    """Return what `auto` selects for a policy on this machine."""
    recipe = policy.low_bit_recipe
    if recipe == "delayed":
        return Choice(False, NEVER)
    here = hardware.detect()
    if recipe is None or policy.fp8_emulate or here.gpu is None:
        return Choice(None)
    if hardware.backend_of(policy, here) == "torchao":
        return Choice(True, PAYS)
    return Choice(None)  # Transformer Engine: a little faster with wide layers, slower with narrow ones


def wants_compile(policy: Policy) -> Choice:
    """Return the policy's own value of `compile`, or what `auto` selects on this machine."""
    if isinstance(policy.compile, bool):
        return Choice(policy.compile, f"the policy has compile={policy.compile}")
    return choice(policy)


#: The most equal blocks that are compiled as one graph. On an H200 host all 32 blocks of Llama-3-8B take 175 s, and
#: 12 s block by block, which trains 2 % more slowly (benchmarks/results/compile_depth.json): 12 are a minute.
MOST_BLOCKS = 12

#: The same where several ranks of a host compile at the same time, each the same graph for its own device. With four
#: ranks 8 blocks of width 1024 in FP8 took over 100 s, and block by block 34 (benchmarks/results/first_step.json). The
#: stages of a pipeline wait for each other's compilation, so that it counts even for two blocks.
MOST_BLOCKS_OF_RANKS = 1

#: The most kinds of blocks that are compiled: those with the most weights in Linear layers. Each has code of its own,
#: once for each size of its input. A UNet2D of diffusers with 58 Linear layers has 21 kinds.
MOST_KINDS = 16

#: The most sizes of its input for which a block of a model of several widths has code of its own: those of training, of
#: a last batch and of evaluation. Code for any size runs the others.
MOST_SIZES = 3

#: The most processes that inductor compiles kernels with by itself.
COMPILE_THREADS = 32


def ranks_here() -> int:
    """Return the number of ranks on this host, as the launcher has set it; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def share_compile_threads() -> None:
    """Let each rank of this host compile with its share of the cores, unless the user has chosen a number.

    By default each rank starts as many compiling processes as the host has cores, at most 32.
    """
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    if ranks_here() == 1 or name in os.environ:
        return
    share = max(1, min(COMPILE_THREADS, (os.cpu_count() or 1) // ranks_here()))
    os.environ[name] = str(share)
    config = sys.modules.get("torch._inductor.config")
    if config is not None:  # it has read the variable before
        config.compile_threads = share  # type: ignore[attr-defined]


#: Models, and blocks of models, that `compile_in_place` has compiled.
_in_place: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_compiled(module: nn.Module) -> bool:
    """True if a module is compiled, by `torch.compile` or `Module.compile`."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


#: The mode of a model that cannot get the policy's: torch combines no mode with them.
OTHER_MODE = "the script's own options or compiler"

#: The modes in which models are compiled while the policy has one.
_modes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def remember_mode(model: nn.Module, mode: str) -> None:
    """Remember the mode of torch.compile in which a model is compiled; `OTHER_MODE` if it is not the policy's."""
    _modes[model] = mode


def mode_of(module: nn.Module) -> str:
    """Return the mode in which a module, or the model inside of a compiled one, is compiled; empty if not known."""
    return _modes.get(getattr(module, "_orig_mod", module), "")


def is_compiled_in_place(module: nn.Module) -> bool:
    """True if `compile_in_place` has compiled a module."""
    return module in _in_place


def compile_in_place(model: nn.Module, failed: Callable[[str], None] | None = None) -> bool:
    """Compile the models inside of wrappers with `Module.compile`, which keeps objects, names and `state_dict`.

    Of a deep model (`is_deep`) each block is compiled, and what is called outside of them. Returns True if something
    was compiled; False if the script has compiled the model, or a part of it, itself. If the script compiles it later,
    both become one graph. Compilation happens at the model's first call.

    failed: takes what could not be compiled, and why, after which it is called as it is; None to raise torch's error.
    """
    if any(map(is_compiled, model.modules())):
        return False
    called = list(_called(model))
    if is_deep(model):
        called = [block for kind in _compiled_kinds(model) for block in kind]
        # Blocks that differ in a number of their code are compiled one by one; then dynamo must not give up after 8.
        _allow_graphs(len(called))
    static = is_deep(model) and _is_of_several_widths(block for kind in _kinds(model) for block in kind)
    for each in called:
        _compile_by_size(each) if static else _compile(each)
        _in_place.add(each)
        if failed is not None:
            each._compiled_call_impl = _falling_back(each, failed)
    return bool(called)


def _falling_back(model: nn.Module, failed: Callable[[str], None]) -> Callable[..., Any]:
    """Return a function that calls compiled code, or the model itself from the first call on that cannot be compiled.

    An error of the model itself is raised again by the model. Code for a backward pass is compiled when it runs first;
    that cannot be undone.
    """
    import torch
    from torch._dynamo.exc import TorchDynamoException

    call: Any = model._compiled_call_impl

    @functools.wraps(call)
    def call_or_fall_back(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", None) or error  # what a backend raised
            reason = next(iter(str(cause).strip().splitlines()), "")
            kind = type(cause).__name__
        _in_place.discard(model)
        model._compiled_call_impl = None
        _empty_masks()
        result = model(*args, **kwargs)
        failed(f"{type(model).__name__} cannot be compiled ({kind}: {reason[:200]})")
        return result

    return call_or_fall_back


def _empty_masks() -> None:
    """Empty the masks that a failed trace has left behind, with fake tensors, in the placements that DTensor caches.

    A vocabulary-parallel embedding fills a mask that the reduction of its output empties; a trace that fails between
    the two leaves it full, and the next call of the embedding raises.
    """
    for kind in type.__subclasses__(object):
        if kind.__name__ == "MaskBuffer" and kind.__module__.startswith("torch.distributed.tensor"):
            for each in objects_of(kind):
                each.data, each.refcount = None, 0  # type: ignore[attr-defined]


def by_block(model: nn.Module) -> str:
    """Return what messages add about a model that is compiled block by block; empty for other models."""
    if not is_deep(model):
        return ""
    every = len(_kinds(model))
    most = f" ({MOST_KINDS} of its {every} kinds of blocks; the others run as they are)" if every > MOST_KINDS else ""
    return f", block by block{most}"


def is_deep(model: nn.Module) -> bool:
    """True if a model has stacks of more blocks of one class and size than are compiled as one graph."""
    kinds = collections.Counter(
        (type(block), tuple(parameter.numel() for parameter in block.parameters()))
        for stack in _stacks(model)
        for block in stack.children()
    )
    return max(kinds.values(), default=0) > (MOST_BLOCKS if ranks_here() == 1 else MOST_BLOCKS_OF_RANKS)


def undo(model: nn.Module) -> None:
    """Undo `compile_in_place`."""
    for module in model.modules():
        if module in _in_place:
            _in_place.discard(module)
            module._compiled_call_impl = None


def missing_requirement(model: nn.Module) -> str | None:
    """Return a clause about what compiled code for a model needs and this machine lacks; None if nothing."""
    from torch.utils._triton import has_triton

    parameter = next(model.parameters(), None)
    return "Triton is not installed" if parameter is not None and parameter.is_cuda and not has_triton() else None


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with the script's own forward, if anything of them is trained."""
    for each in _unwrapped(model):
        if any(parameter.requires_grad for parameter in each.parameters()):
            yield each


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with the script's own forward: inside of wrappers, and containers without one."""
    import torch

    if isinstance(model, (torch.jit.ScriptModule, torch.nn.DataParallel)):
        return  # the code of the first is fixed, the second calls copies of the module
    wrapped: Any = getattr(model, "module", None)
    if _wraps(model) and isinstance(wrapped, torch.nn.Module):
        yield from _unwrapped(wrapped)
    elif isinstance(model, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        for child in model.children():
            yield from _unwrapped(child)
    else:
        yield model


def _stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost stacks of blocks."""
    if _is_stack(model):
        yield model
        return
    for child in model.children():
        yield from _stacks(child)


def _is_stack(module: nn.Module) -> bool:
    """True for a ModuleList or Sequential of modules of one class, which have submodules."""
    import torch

    if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        return False
    kinds = {type(block) for block in module.children()}
    return len(kinds) == 1 and all(any(True for _ in block.children()) for block in module.children())


def _regions(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model's stacks, and what else is called in it: not single layers of torch."""
    if _is_stack(model):
        for block in model.children():
            yield from _unwrapped(block)
    elif any(True for _ in _stacks(model)):
        for child in model.children():
            yield from _regions(child)
    else:
        for each in _unwrapped(model):
            if any(True for _ in each.children()) or not type(each).__module__.startswith("torch."):
                yield each


def _kinds(model: nn.Module) -> list[list[nn.Module]]:
    """Return what is compiled of a deep model, grouped by class and shapes of parameters."""
    found: dict[Any, list[nn.Module]] = {}
    for region in (part for each in _called(model) for part in _regions(each)):
        shapes = tuple(tuple(own.shape) for own in region.parameters())
        found.setdefault((type(region), shapes), []).append(region)
    return list(found.values())


def _compiled_kinds(model: nn.Module) -> list[list[nn.Module]]:
    """Return the kinds of blocks of a deep model that are compiled."""
    import torch

    def in_linear_layers(kind: list[nn.Module]) -> int:
        layers = (each for each in kind[0].modules() if isinstance(each, torch.nn.Linear))
        return len(kind) * sum(each.weight.numel() for each in layers)

    return sorted(_kinds(model), key=in_linear_layers, reverse=True)[:MOST_KINDS]


def _is_of_several_widths(blocks: Iterable[nn.Module]) -> bool:
    """True if the blocks of a class have inputs of several widths, as their first parameters show: a UNet's have.

    Dynamo would take the widths, and the heights of images, for sizes that vary from batch to batch, and compile code
    for any of them, which takes much longer: two ranks were still at the attention of diffusers' UNet2D after 50 s.
    """
    widths: dict[type[nn.Module], set[tuple[int, ...]]] = {}
    for block in blocks:
        first = next(block.parameters(), None)
        widths.setdefault(type(block), set()).add(() if first is None else tuple(first.shape))
    return any(len(found) > 1 for found in widths.values())


def _allow_graphs(number: int) -> None:
    """Let dynamo compile one function so many times, besides the calls for which it does by default."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, number + 8)


def _wraps(model: nn.Module) -> bool:
    """True if a model is a wrapper of DDP, FSDP1 or DeepSpeed."""
    names = {kind.__name__ for kind in type(model).__mro__}
    return bool(names & {"DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"})


def _compile_by_size(model: nn.Module) -> None:
    """Compile a module for each size of its input, up to `MOST_SIZES`, and for any size from then on."""
    import torch

    _compile(model, dynamic=False)
    of_a_size: Any = model._compiled_call_impl
    _compile(model)
    of_any_size: Any = model._compiled_call_impl
    seen: set[tuple[torch.Size, ...]] = set()

    @functools.wraps(of_a_size)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return of_a_size(*args, **kwargs)
        inputs = (*args, *kwargs.values())
        sizes = tuple(each.shape for each in inputs if isinstance(each, torch.Tensor))
        if len(seen) < MOST_SIZES:
            seen.add(sizes)
        return (of_a_size if sizes in seen else of_any_size)(*args, **kwargs)

    model._compiled_call_impl = call


def _compile(model: nn.Module, *, dynamic: bool | None = None) -> None:
    """Compile a module in place. dynamic: see `torch.compile`."""
    import torch

    if not type(model).forward.__module__.startswith("torch."):
        model.compile(backend=BACKEND, dynamic=dynamic)
        return

    # Dynamo does not start in a frame of torch itself, such as the forward of a Sequential.
    def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    from mpguard.nn import cuda_graphs
    from mpguard.nn.fp8 import first_batch

    call = types.MethodType(_call_impl, model)
    compiled = cuda_graphs.keeping_gradients(model, torch.compile(call, backend=BACKEND, dynamic=dynamic))
    model._compiled_call_impl = first_batch.telling(model, compiled)
