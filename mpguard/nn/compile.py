"""What `compile: auto` means for a run, and models compiled where they stand.

On where it pays, off where it fails, and otherwise as the script has it. Measured in
benchmarks/results/compile_auto.json. Every engine trains compiled models (gpu_matrix.json).

Importing this imports no torch.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpguard.policy import hardware
from mpguard.policy.policy import Policy

if TYPE_CHECKING:
    from torch import nn

#: What compiles, as for `torch.compile` and accelerate by default.
BACKEND = "inductor"


@dataclasses.dataclass(frozen=True)
class Choice:
    """on: None where the script decides. why: in a few words."""

    on: bool | None
    reason: str = ""


#: Of delayed scaling, whose histories are updated between steps (S19).
NEVER = "Transformer Engine refuses delayed scaling under torch.compile"

#: Of torchao's layers.
PAYS = "torchao's casts cost more than its products gain, unless they are compiled"


def conflict(policy: Policy) -> str | None:
    """Why a policy that says `compile: true` cannot be in force; None where it can."""
    if policy.compile is not True or policy.low_bit_recipe != "delayed":
        return None
    return f"`{policy.name}` has compile=True, and {NEVER}. Leave `compile` out, or set fp8_recipe to tensorwise"


def choice(policy: Policy) -> Choice:
    """What `auto` chooses for a policy on this machine."""
    recipe = policy.low_bit_recipe
    if recipe == "delayed":
        return Choice(False, NEVER)
    here = hardware.detect()
    if recipe is None or policy.fp8_emulate or here.gpu is None:
        return Choice(None)
    backend = next((each for each in policy.backends if each in here.libraries), None)
    if backend == "torchao":
        return Choice(True, PAYS)
    return Choice(None)  # Transformer Engine: a little faster with wide layers, slower with narrow ones


def wants_compile(policy: Policy) -> Choice:
    """What a policy asks for on this machine: what it says, else what `auto` chooses."""
    if isinstance(policy.compile, bool):
        return Choice(policy.compile, f"the policy has compile={policy.compile}")
    return choice(policy)


#: Models that `in_place` has compiled.
_ours: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def is_ours(module: nn.Module) -> bool:
    return module in _ours


def compile_in_place(model: nn.Module) -> bool:
    """Compiles the models in what wraps them, by `Module.compile`: objects, names and `state_dict` stay.

    Whether something was compiled: not where the script has compiled a part, or the whole, itself. One that it
    compiles later comes on top, as one graph. Compiled is the call of the model, when it first comes.
    """
    if any(map(is_compiled, model.modules())):
        return False
    called = list(_called(model))
    for each in called:
        _compile(each)
        _ours.add(each)
    return bool(called)


def undo(model: nn.Module) -> None:
    """Takes back what `in_place` did."""
    for module in model.modules():
        if module in _ours:
            _ours.discard(module)
            module._compiled_call_impl = None


def missing_requirement(model: nn.Module) -> str | None:
    """What compiled code for a model needs and is not here."""
    from torch.utils._triton import has_triton

    parameter = next(model.parameters(), None)
    return "Triton is not installed" if parameter is not None and parameter.is_cuda and not has_triton() else None


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that the script's own code is in: those in a wrapper, or a container without a forward."""
    import torch

    if isinstance(model, (torch.jit.ScriptModule, torch.nn.DataParallel)):
        return  # the first is what it is, the second calls copies
    wrapped: Any = getattr(model, "module", None)
    if _wraps(model) and isinstance(wrapped, torch.nn.Module):
        yield from _called(wrapped)
    elif isinstance(model, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        for child in model.children():
            yield from _called(child)
    elif any(parameter.requires_grad for parameter in model.parameters()):
        yield model


def _wraps(model: nn.Module) -> bool:
    names = {kind.__name__ for kind in type(model).__mro__}
    return bool(names & {"DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"})


def _compile(model: nn.Module) -> None:
    import torch

    if not type(model).forward.__module__.startswith("torch."):
        model.compile(backend=BACKEND)
        return

    # Dynamo begins in no frame of torch's own, such as the forward of a Sequential.
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call, backend=BACKEND)
