"""Explain the crash of a script: which parameters, or which module, an error about dtypes or loss scaling is about.

The messages of torch and DeepSpeed name neither. `print_cause` prints one line after the traceback; the objects are
taken from the frames of the traceback.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from mpguard.core.console import print_line
from mpguard.core.errors import MpguardError
from mpguard.nn.fp8.filters import plain_name
from mpguard.runtime import guard as guards
from mpguard.runtime.messages import with_page
from mpguard.runtime.stacks import is_of_script

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("mpguard")

#: The function of torch that runs a backward pass.
BACKWARD = "_engine_run_backward"

#: The function that `torch.amp.custom_fwd` makes of a forward of a Function.
CUSTOM_FWD = "decorate_fwd"

#: The frames of an exception, innermost first.
_Frames = list[FrameType]


@dataclasses.dataclass(frozen=True)
class Cause:
    """The cause of a crash. page: the code of the rule that reports it in source code; else a page of the docs."""

    text: str
    page: str

    def __str__(self) -> str:
        return with_page(self.text, self.page)


def print_cause(error: BaseException) -> None:
    """Print the cause of an error that a script died of, if it is a known one. Never raises."""
    try:
        found = None if isinstance(error, MpguardError) else cause(error)
        if found is not None:
            print_line(str(found))
    except Exception:
        log.debug("mpguard: the cause of %s could not be found", type(error).__name__, exc_info=True)


def cause(error: BaseException) -> Cause | None:
    """Return the cause of an error, or of one behind it; None for an error that is not known."""
    for each in _chain(error):
        text = str(each)
        for pattern, explain in CRASHES:
            if re.search(pattern, text):
                return explain(_frames(error))
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those behind it, as a traceback shows them."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _frames(error: BaseException) -> _Frames:
    """Return the frames of an error and of those behind it, innermost first."""
    frames: _Frames = []
    for each in _chain(error):
        trace = each.__traceback__
        own: _Frames = []
        while trace is not None:
            own.append(trace.tb_frame)
            trace = trace.tb_next
        frames = [*reversed(own), *frames]
    return frames


def _local(frames: _Frames, function: str, name: str) -> Any:
    """Return a local variable of the innermost call of a function; None if there is none."""
    return next((frame.f_locals.get(name) for frame in frames if frame.f_code.co_name == function), None)


# -- what the frames hold ------------------------------------------------------------------------


def _fp16_gradients(frames: _Frames) -> Cause:
    optimizer = _local(frames, "_unscale_grads_", "optimizer")
    parameters = _parameters(optimizer)
    half = [each for each in parameters if each.grad is not None and _short(each.grad) == "fp16"]
    return Cause(
        f"{len(half)} of the {len(parameters)} parameters of {_kind(optimizer)} are FP16 ({_named(half)}), so their "
        "gradients are FP16 too, and a GradScaler unscales FP32 gradients only. Keep the parameters in FP32 (leave out "
        "`.half()`, load with `dtype=torch.float32`), and let autocast cast the inputs of each matmul",
        "MPG103",
    )


def _unscaled_twice(frames: _Frames) -> Cause:
    optimizer = _local(frames, "unscale_", "optimizer")
    parameters = _parameters(optimizer)
    return Cause(
        f"the gradients of {_kind(optimizer)} ({_dtypes(parameters)}: {_named(parameters)}) were unscaled before, and "
        f"there was no `scaler.update()` since{_line(frames)}. Unscale once per optimizer and step: `scaler.unscale_` "
        "and accelerate's `clip_grad_norm_` both do, `scaler.step` does if nothing has",
        "MPG206",
    )


def _never_scaled(frames: _Frames) -> Cause:
    optimizer = _local(frames, "unscale_", "optimizer") or _local(frames, "step", "optimizer")
    return Cause(
        f"this GradScaler has scaled no loss before {_kind(optimizer)} is stepped or its gradients are unscaled"
        f"{_line(frames)}: backward ran on a loss that is not scaled. Call `scaler.scale(loss).backward()`; where a "
        "framework has the scaler, its own backward: `self.manual_backward(loss)` of Lightning, "
        "`fabric.backward(loss)`, `accelerator.backward(loss)`",
        "MPG202",
    )


def _no_gradients(frames: _Frames) -> Cause:
    optimizer = _local(frames, "step", "optimizer")
    parameters = _parameters(optimizer)
    frozen = [each for each in parameters if not each.requires_grad]
    state = "all are frozen" if len(frozen) == len(parameters) else f"{len(frozen)} are frozen"
    return Cause(
        f"none of the {len(parameters)} parameters of {_kind(optimizer)} has a gradient ({_named(parameters)}; "
        f"{_dtypes(parameters)}; {state}){_line(frames)}. Step it only after a backward pass through these parameters, "
        "and create it after the code that replaces parameters (fully_shard, FSDP, a copy of the model)",
        "refused",
    )


def _nothing_to_update(frames: _Frames) -> Cause:
    return Cause(
        f"`scaler.update()` was called, and no optimizer was stepped or unscaled with this scaler since the last "
        f"update{_line(frames)}. Call it once after `scaler.step(optimizer)`, not after each backward pass",
        "MPG206",
    )


def _different_dtypes(frames: _Frames) -> Cause:
    backward = next((number for number, frame in enumerate(frames) if frame.f_code.co_name == BACKWARD), None)
    inner = frames[:backward]  # what a backward pass calls: hooks, functions, recomputation
    tensors: dict[str, torch.Tensor] = next(filter(None, map(_tensors, filter(is_of_script, inner))), {})
    place = _innermost_module(inner)
    script = next(filter(is_of_script, inner), None)
    if script is not None and place is not None and inner.index(script) < inner.index(place[0]):
        operands_of_script = _tensors(script)
        if len(set(map(_short, operands_of_script.values()))) > 1:  # of a function that the module calls
            tensors, place = operands_of_script, None
    if place is None and backward is not None and not tensors:
        return Cause(
            f"an operator of the backward pass{_line(frames)} has operands of different dtypes: a gradient and a "
            "tensor that the forward pass has saved. A hook has cast one of them (remove the cast), or a backward pass "
            "that is differentiated again, as that of `torch.func.grad`, ran under autocast (compute it in FP32). "
            "`torch.autograd.set_detect_anomaly(True)` shows which forward call it is of",
            "MPG307",
        )
    if place is None:
        operands = _listed(tensors)
        if len(set(map(_short, tensors.values()))) < 2:
            operands = f"operands{f' (one of them is {operands})' if operands else ''}"
        if any(frame.f_code.co_name == CUSTOM_FWD for frame in inner):
            return Cause(
                f"{operands} differ in dtype{_line(frames)}. `custom_fwd` without `cast_inputs` casts no input of this "
                "Function: give it `cast_inputs=torch.float32`, or cast them there",
                "MPG307",
            )
        return Cause(
            f"{operands} differ in dtype{_line(frames)}. One of them was cast by hand, or the matmul is outside of "
            "autocast: remove the cast, or compute it under autocast",
            "MPG307",
        )
    frame, module = place
    inputs = {name: tensor for name, tensor in _tensors(frame).items() if not name.startswith("self")} or tensors
    parameters = {name: each for name, each in module.named_parameters(recurse=False) if each.is_floating_point()}
    low = sorted({_short(each) for each in parameters.values()} & {"bf16", "fp16"})
    within = [each for each in module.parameters() if each.is_floating_point()]
    own = _listed(parameters) or (f"parameters {_dtypes(within)}" if within else "no parameters")
    where = f"{_name_of(module)} ({type(module).__name__}): {own}; "
    where += f"inputs {_listed(inputs)}" if inputs else "inputs are not in the traceback"
    guard = guards.current()
    masters = guard.plan.policy.master_dtype.short if guard is not None else "fp32"
    cast = next((call for (call, _), modules in guard.recorder.casts.items() if modules), "") if guard else ""
    if low and masters not in low and not cast and _runs_in(frames, "FSDPModule", "FullyShardedDataParallel"):
        return Cause(
            f"{where}{_line(frames)}. FSDP casts parameters to {low[0]} for the forward pass, and inputs only where "
            f"a unit begins: cast the inputs to {low[0]}, and leave `output_dtype` out of the policies of inner units",
            "MPG307",
        )
    if low and masters not in low and _runs_in(frames, "DeepSpeedEngine"):
        auto_cast = ", or set `fp16.auto_cast` in its config" if "fp16" in low else ""
        return Cause(
            f"{where}{_line(frames)}. DeepSpeed's engine keeps the parameters in {low[0]} ({masters} ones are in its "
            "optimizer) and casts no inputs; `autocast(enabled=False)` does not change that. Cast the inputs to "
            f"{low[0]}{auto_cast}",
            "MPG307",
        )
    if low and masters not in low:
        return Cause(
            f"{where}{_line(frames)}. The parameters were cast to {low[0]} by hand, and the policy keeps them in "
            f"{masters}: remove the cast (`.half()`, `.bfloat16()`, `dtype=` of from_pretrained), and run the forward "
            "pass under autocast",
            "MPG101" if "fp16" in low else "MPG102",
        )
    if not within and len(set(map(_short, inputs.values()))) > 1:
        return Cause(
            f"{where}{_line(frames)}. They differ in dtype: cast those that are not in the dtype of the policy there, "
            "or compute the matmul under autocast",
            "MPG307",
        )
    if cast:
        return Cause(
            f"{where}{_line(frames)}. The script has cast some of the parameters to another dtype by hand ({cast}), "
            "and others not: remove the cast, and run the forward pass under autocast",
            "MPG102",
        )
    return Cause(
        f"{where}{_line(frames)}. The matmul is outside of autocast (or in a region that disables it), and its inputs "
        "are not in the dtype of the weights: cast the inputs there, or name the module in `fp32_modules`",
        "MPG307",
    )


def _tensors_of_script(frames: _Frames) -> dict[str, torch.Tensor]:
    """Return the tensors of the first function of the script that has some."""
    return next(filter(None, map(_tensors, filter(is_of_script, frames))), {})


def _beyond_range(frames: _Frames) -> Cause:
    tensors = _tensors_of_script(frames)
    half = {name: tensor for name, tensor in tensors.items() if _short(tensor) in ("fp16", "bf16")}
    return Cause(
        f"a number is written into a 16-bit tensor that cannot hold it{f' ({_listed(half)})' if half else ''}"
        f"{_line(frames)}. Autocast computes matmuls in 16 bits, and the mask constants of FP32 (-1e9, -1e20) are "
        "beyond 65504: take `torch.finfo(tensor.dtype).min`, or compute it in FP32",
        "MPG601",
    )


def _flash_attention(frames: _Frames) -> Cause:
    tensors = _tensors_of_script(frames)
    wide = {name: tensor for name, tensor in tensors.items() if _short(tensor) not in ("fp16", "bf16")}
    verb = "is" if len(wide) == 1 else "are"
    return Cause(
        f"flash attention takes FP16 and BF16 only; {_listed(wide) or 'its inputs'} {verb} wider{_line(frames)}. "
        "Autocast does not cast them: normalizations, rotary embeddings and 4-bit layers return FP32 under it. Cast "
        "the queries, keys and values to one 16-bit dtype before the attention",
        "attention",
    )


def _mixed_flat_parameters(frames: _Frames) -> Cause:
    tensors = list(_local(frames, "_validate_tensors_to_flatten", "tensors") or ())
    if not tensors:  # FSDP2 keeps parameters one by one, and needs one dtype per group
        group = _local(frames, "_init_mp_dtypes", "self")
        tensors = [each.sharded_param for each in getattr(group, "fsdp_params", ())]
    module = _local(frames, "_init_param_handle_from_module", "fully_sharded_module")
    by_dtype: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(_short(tensor), []).append(tensor)
    names = "; ".join(f"{dtype}: {_named(own, module)}" for dtype, own in by_dtype.items())
    kind = f" of {type(module).__name__}" if module is not None else ""
    if not all(tensor.is_floating_point() for tensor in tensors):
        return Cause(
            f"FSDP shards the {len(tensors)} parameters{kind} as one, which needs one floating-point dtype; they are "
            f"{names}. 4-bit weights are stored in uint8 by default: load them with `bnb_4bit_quant_storage` "
            "(BitsAndBytesConfig) in the dtype of the other parameters",
            "refused",
        )
    return Cause(
        f"FSDP shards the {len(tensors)} parameters{kind} as one, which needs one dtype; they are {names}. Load the "
        "whole model in FP32 (FSDP casts by its mixed precision policy), or wrap the parts in their own FSDP units",
        "MPG511",
    )


def _scale_at_minimum(frames: _Frames) -> Cause:
    scaler = _local(frames, "update_scale", "self")
    engine = next((own for frame in frames if hasattr(own := frame.f_locals.get("self"), "skipped_steps")), None)
    skipped = f" ({engine.skipped_steps} of {engine.global_steps + 1} steps were skipped)" if engine is not None else ""
    infinite = [
        plain_name(name)
        for name, each in getattr(engine, "module", engine).named_parameters()
        if each.is_floating_point() and each.numel() and not bool(each.isfinite().all())
    ] if engine is not None else []  # fmt: skip
    weights = f"not finite are {_cut(infinite)}" if infinite else "all parameters are finite"
    return Cause(
        f"FP16 gradients overflowed down to the smallest loss scale, {getattr(scaler, 'min_scale', 1):g}{skipped}; "
        f"{weights}. A loss or an activation is beyond 65504, or not finite by itself: compute the loss in FP32, look "
        "for infinities in it, or use BF16, which needs no loss scale",
        "refused",
    )


#: The errors that are explained: a pattern of the message, and the function that finds the cause in the frames.
CRASHES: tuple[tuple[str, Callable[[_Frames], Cause]], ...] = (
    ("Attempting to unscale FP16 gradients", _fp16_gradients),
    (r"unscale_\(\) has already been called", _unscaled_twice),
    (r"Attempted \w+ but _scale is None", _never_scaled),
    ("No inf checks were recorded for this optimizer", _no_gradients),
    ("No inf checks were recorded prior to update", _nothing_to_update),
    (
        "Must flatten tensors with uniform dtype|FSDP expects uniform original parameter dtype"
        "|Cannot flatten integer dtype tensors",
        _mixed_flat_parameters,
    ),
    ("Current loss scale already at minimum", _scale_at_minimum),
    (r"cannot be converted to type (at|c10)::(Half|BFloat16) without overflow", _beyond_range),
    (r"(?i)flash ?attention (only supports?|supports? only) fp16 and bf16", _flash_attention),
    (
        r"must have the same dtype|to have the same dtype|expected scalar type \S+ but found|mixed dtype \(CPU\)"
        r"|Input type \(.*\) and (weight|bias) type \(.*\) should be the same",
        _different_dtypes,
    ),
)


# -- text ----------------------------------------------------------------------------------------


def _short(tensor: torch.Tensor) -> str:
    from mpguard.runtime.proof.products import short

    return short(tensor.dtype)


def _kind(optimizer: Any) -> str:
    return type(optimizer).__name__ if optimizer is not None else "the optimizer"


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    from mpguard.runtime.proof.observe import innermost, updated_by

    return updated_by(innermost(optimizer)) if optimizer is not None else []


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    return " and ".join(dict.fromkeys(map(_short, tensors))) or "no dtype"


def _listed(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return `weight bf16, input fp32`: four of them, each dtype among these."""
    first = {_short(tensor): name for name, tensor in reversed(list(tensors.items()))}
    chosen = [*first.values(), *(name for name in tensors if name not in first.values())][:4]
    return ", ".join(f"{name} {_short(tensor)}" for name, tensor in tensors.items() if name in chosen)


def _named(tensors: list[torch.Tensor], model: nn.Module | None = None) -> str:
    """Return the names that parameters have in their model, the first three and the number of the others."""
    from mpguard.runtime.proof.models import models_of

    roots = [model] if model is not None else models_of(tensors)
    names = {id(each): plain_name(name) for root in roots for name, each in root.named_parameters()}
    return _cut([names.get(id(each), f"shape {tuple(each.shape)}") for each in tensors])


def _cut(names: list[str], most: int = 3) -> str:
    """Return `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _name_of(module: nn.Module) -> str:
    """Return the name of a module in its outermost model, in backquotes; `the model` for that model itself."""
    from mpguard.runtime.proof.models import models_of

    for root in models_of(list(module.parameters())):
        for name, each in root.named_modules():
            if each is module and name:
                return f"`{plain_name(name)}`"
    return "the model"


def _runs_in(frames: _Frames, *engines: str) -> bool:
    """True if a method of one of these classes has called."""
    kinds = {kind.__name__ for frame in frames for kind in type(frame.f_locals.get("self")).__mro__}
    return not kinds.isdisjoint(engines)


def _innermost_module(frames: _Frames) -> tuple[FrameType, nn.Module] | None:
    """Return the innermost frame of a module's method, and the module; None if there is none."""
    import torch

    for frame in frames:
        own = frame.f_locals.get("self")
        if isinstance(own, torch.nn.Module):
            return frame, own
    return None


def _tensors(frame: FrameType) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors among the variables of a frame, and in these; a library's arguments only."""
    import torch

    found: dict[str, torch.Tensor] = {}
    code = frame.f_code
    variadic = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + variadic]
    for name, value in frame.f_locals.items():
        if name not in arguments and not is_of_script(frame):
            continue
        values = enumerate(value) if isinstance(value, (tuple, list)) and name != "self" else [("", value)]
        for number, each in values:
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                found[f"{name}[{number}]" if number != "" else name] = each
    return found


def _line(frames: _Frames) -> str:
    """Return ` at train.py:12`, the innermost line that is not in an installed package; empty if there is none."""
    frame = next(filter(is_of_script, frames), None)
    return f", at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
