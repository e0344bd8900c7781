"""Casts of weights that are trained: `model.half()` and the like, after their optimizer was proven.

A cast at the end of a script, to export or evaluate the model, changes nothing that was trained: it is only reported.
It is refused when the optimizer steps again, even if the weights were cast back, because their exact values are lost.
So are parameters that are replaced: the optimizer then trains tensors that the model no longer has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from mpguard.runtime.stacks import is_installed, relative, script_frame

if TYPE_CHECKING:
    import torch
    from torch import nn

#: What to do instead of a cast.
ADVICE = "Cast a copy (copy.deepcopy(model).half()), or evaluate under torch.autocast"

#: What to do if `load_state_dict(assign=True)` has replaced the parameters that an optimizer has.
REPLACED_ADVICE = "Load without assign=True, or create the optimizer after it"

#: The folder of this package.
_OWN = str(Path(__file__).parents[1])


def is_engine(model: Any) -> bool:
    """True for an engine of DeepSpeed: its modules hold copies of the optimizer's parameters."""
    return callable(getattr(model, "zero_optimization_stage", None))


def dtypes(module: nn.Module) -> dict[str, tuple[int, torch.dtype]]:
    """Return id and dtype of each parameter of a module, by name."""
    return {name: (id(parameter), parameter.dtype) for name, parameter in module.named_parameters()}


def narrowed(module: nn.Module, before: dict[str, tuple[int, torch.dtype]]) -> dict[int, tuple[str, str]]:
    """Return the dtypes before and after of parameters that can no longer hold their values, by id.

    before: see `dtypes`.
    """
    from mpguard.runtime.proof.products import short

    found = {}
    for name, parameter in module.named_parameters():
        key, old = before.get(name, (0, parameter.dtype))
        if old != parameter.dtype and not _holds(parameter.dtype, old):
            found[key] = short(old), short(parameter.dtype)
    return found


def replaced(before: dict[str, tuple[int, torch.dtype]], module: nn.Module) -> set[int]:
    """Return the ids of the parameters that a module no longer has. before: see `dtypes`."""
    return {key for key, _ in before.values()} - {id(parameter) for parameter in module.parameters()}


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """True if a dtype can hold every value of another floating-point one."""
    import torch

    if not (dtype.is_floating_point and other.is_floating_point):
        return False
    new, old = torch.finfo(dtype), torch.finfo(other)
    return bool(new.eps <= old.eps and new.max >= old.max and new.tiny <= old.tiny)


def caller() -> tuple[str, str]:
    """Return the method of torch that is being called (`half`), and the place of the call (`train.py:31`).

    The place is in the user's own code, or in the library that is nearest to it if there is none.
    """
    method, frame = _called()
    place = script_frame(frame) or frame
    return method, f"{relative(place.f_code.co_filename)}:{place.f_lineno}" if place else "an unknown place"


def is_called_by_script() -> bool:
    """True if the method of torch that is being called is called by the user's own code, not by another library."""
    _, frame = _called()
    return frame is not None and not is_installed(frame.f_code.co_filename)


def _called() -> tuple[str, FrameType | None]:
    """Return the method of torch that is being called, and the frame that calls it."""
    import torch

    inside = (str(Path(torch.__file__).parent), _OWN)
    method, frame = "", cast("FrameType | None", sys._getframe())
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        method, frame = frame.f_code.co_name, frame.f_back
    return method, frame
