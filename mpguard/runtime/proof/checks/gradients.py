"""Checks of gradients: their dtype, their sums over passes, their reduction over ranks, and the loss scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpguard.policy.allow import BF16, LOCAL_SGD, LOSS_SCALING
from mpguard.policy.dtype import Dtype
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import scaled_passes
from mpguard.runtime.proof.checks.common import (
    format_amount,
    format_counts,
    format_names,
    format_share,
    is_stage,
    mostly,
    updated_dtype,
    wider,
)
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.products import bits
from mpguard.runtime.proof.verdict import UNOBSERVED, Row, Verdict, not_observed
from mpguard.runtime.proof.witness import is_allowed, is_division

#: The largest share of the gradients that may be reduced in a narrower dtype: which tensors of a script's own
#: collectives are gradients is told by their values.
NARROWER_SHARE = 0.01

#: What is found as scaler where there is none, and after the class of one that is disabled.
NO_SCALER, DISABLED = "none", ", disabled"

#: What is found where a GradScaler has scaled the loss, and the optimizer was not stepped through it.
BYPASSED = "a GradScaler has scaled the loss, and the step went past it, with gradients that are still scaled"


def gradients(seen: Observed, plan: Plan) -> Row:
    """Compare the dtypes of the gradients that the optimizer was stepped with."""
    asked = updated_dtype(seen, plan).short
    if not seen.gradients:
        return not_observed("gradients", asked)
    # Next to masters, gradients of several passes are added up in FP32.
    narrow = any(bits(dtype) < bits(asked) for dtype in seen.gradients)
    same = not narrow if asked != plan.policy.master_dtype.short else mostly(seen.gradients, asked)
    found, witnessed = format_counts(seen.gradients), seen.witnesses.get("gradients")
    least = min(plan.policy.reduce_dtype.bits, plan.policy.master_dtype.bits)
    if not witnessed or all(is_allowed(to, least) for to in seen.rounded):
        note = wider(seen.gradients, asked)
        return Row("gradients", f"{found}{note}", asked, Verdict.NOT_ASKED if note else Verdict.of(same))
    advice = "What the small dtype rounds away is lost: leave the gradients as the backward pass has made them"
    if any(is_division(to) for to in seen.rounded):
        advice = (
            "Call scaler.unscale_(optimizer) in place of the script's own division, before the gradients are clipped"
        )
    return Row("gradients", f"{found}, {witnessed}", asked, Verdict.WRONG, advice=advice)


def accumulation(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the dtype in which gradients of several backward passes were added up; no row if there were none."""
    policy = plan.policy
    asked = min(policy.reduce_dtype, policy.master_dtype, key=lambda dtype: dtype.bits)
    witnessed = seen.witnesses.get("accumulation")
    if not seen.accumulation and not witnessed:
        return []
    if not witnessed:
        passes = "pass" if seen.accumulated_passes == 1 else "passes"
        found = f"{format_counts(seen.accumulation)}, {seen.accumulated_passes} {passes}"
        same = _is_reduced_in(seen.accumulation, asked)
    else:
        found, same = witnessed, all(is_allowed(to, asked.bits) for to in seen.rounded)
    advice = "What the small dtype rounds away is lost: add up in FP32 buffers, and cast nothing before the step"
    if seen.engine == "fsdp1":
        advice = (
            "FSDP1 adds up in the compute dtype inside no_sync(): reduce each pass, or use FSDP2, which adds in FP32"
        )
    row = Row("accumulation", found, asked.short, Verdict.of(same), advice=advice)
    return [row, *_own_buffers(seen, asked)] if not witnessed else [row]


def _own_buffers(seen: Observed, asked: Dtype) -> list[Row]:
    """Return the row of sums in buffers of an engine: their dtype is read, and their values are not compared."""
    buffers = {"fsdp1": "FSDP1 inside no_sync()", "deepspeed": "DeepSpeed's ZeRO"}.get(seen.engine.partition("-")[0])
    if buffers is None:
        return []
    found = f"{UNOBSERVED}: {buffers} adds up in buffers of its own, whose dtype is read and whose values are not"
    verdict = Verdict.UNPROVEN if asked.bits > 16 else Verdict.NOT_ASKED
    return [Row("accumulated values", found, asked.short, verdict)]


def reduction(seen: Observed, plan: Plan) -> Row:
    """Compare the dtype of the reduction; a wider one than requested is accepted, because it loses nothing.

    `allow: local_sgd` accepts a step without one.
    """
    name, asked = "reduction", plan.policy.reduce_dtype
    if seen.world_size == 1:
        return Row(name, f"none: one process{' trains' if seen.idle else ''}", "", Verdict.NOT_ASKED)
    if seen.averaging:
        return Row(name, f"none: weights are averaged ({seen.averaging})", asked.short, Verdict.NOT_ASKED)
    if not seen.reductions and seen.reduced_by == "tensor parallel":
        found = "none: parameters are sharded over all ranks (tensor parallel)"
        return Row(name, found, asked.short, Verdict.NOT_ASKED)
    if not seen.reductions and is_stage(seen):
        return Row(name, "none: each rank has a part of the model", asked.short, Verdict.NOT_ASKED)
    if not seen.reductions and plan.allowed(LOCAL_SGD):
        return Row(name, UNOBSERVED, asked.short, Verdict.ALLOWED, LOCAL_SGD)
    if not seen.reductions:
        advice = (
            "No collective with gradients was seen. Run the last backward pass before a step outside no_sync(), or "
            "reduce the gradients, as tensors of floating-point numbers, with the functions of torch.distributed"
        )
        numbers = ", ".join(f"{format_amount(count)} {dtype}" for dtype, count in seen.unread.items())
        reason = f"the script exchanges integers ({numbers}), which may be bytes of gradients" if numbers else ""
        row = not_observed(name, asked.short, reason, advice)
        return dataclasses.replace(row, allow=(LOCAL_SGD,))
    parts = seen.reductions_over or {"": seen.reductions}
    same = Verdict.of(all(_is_reduced_in(counts, asked) for counts in parts.values()))
    advice = "" if same is Verdict.AS_ASKED else _other_reduction(seen, plan)
    if set(parts) == {""}:
        return Row(name, f"{format_counts(seen.reductions)} ({seen.reduced_by})", asked.short, same, advice=advice)
    named = {
        label if not label or label.startswith("by ") else f"over {label}": counts for label, counts in parts.items()
    }
    found = ", ".join(f"{format_counts(counts)} {label}".rstrip() for label, counts in named.items())
    return Row(name, f"{found} ({seen.reduced_by})", asked.short, same, advice=advice)


def _other_reduction(seen: Observed, plan: Plan) -> str:
    """Return what to do about a reduction in another dtype."""
    asked = plan.policy.reduce_dtype
    others = [dtype for dtype in seen.reductions if dtype != asked.short]
    if {origin for dtype in others for origin in seen.sent_by.get(dtype, ())} == {"script"}:
        return f"The script sends them so itself: cast them to torch.{asked.torch_name} before its collective"
    sent = "Gradients are sent in the dtype that they have, or in that of a communication hook (`register_comm_hook`)"
    if plan.policy.grad_reduce_in_fp32 and plan.policy.master_dtype is not Dtype.FP32:
        return f"{sent}, as DDP does. To accept it: mpguard_overrides: {{grad_reduce_in_fp32: false}}"
    return f"{sent}: remove the hook, and keep the parameters in FP32"


def _is_reduced_in(counts: Mapping[str, int], asked: Dtype) -> bool:
    """True if a small share of the elements is in a narrower dtype, and none in another one of the same width."""
    other = any(bits(dtype) == asked.bits and dtype != asked.short for dtype in counts)
    return _narrower_share(counts, asked) <= NARROWER_SHARE and not other


def _narrower_share(counts: Mapping[str, int], asked: Dtype) -> float:
    return sum(count for dtype, count in counts.items() if bits(dtype) < asked.bits) / max(1, sum(counts.values()))


def reduced_narrower(seen: Observed, plan: Plan) -> list[Row]:
    """Show a share of the gradients that is reduced in a narrower dtype, and so small that it is no failure."""
    asked, parts = plan.policy.reduce_dtype, seen.reductions_over or {"": seen.reductions}
    share = max((_narrower_share(counts, asked) for counts in parts.values()), default=0.0)
    if seen.world_size == 1 or seen.averaging or not 0 < share <= NARROWER_SHARE or plan.allowed(BF16):
        return []
    narrow = ", ".join(dtype for dtype in seen.reductions if bits(dtype) < asked.bits)
    found = f"{format_share(share)} of the elements in {narrow}; up to {100 * NARROWER_SHARE:g} % are no failure"
    return [Row("reduced in fewer bits", found, asked.short, Verdict.UNPROVEN)]


def coverage(seen: Observed, _plan: Plan) -> list[Row]:
    """Return what reduces the gradients of the parameters, if it is not one engine; ranks compare the last ones."""
    if set(seen.covered) <= {"ddp", "engine"} or set(seen.covered) == {"script"}:
        return []
    names = {"ddp": "DDP", "engine": "the engine", "script": "the script"}
    by = [f"{format_amount(count)} by {names[kind]}" for kind, count in seen.covered.items() if kind in names]
    by += [f"no reduction seen of {format_names(seen.alone, seen)}"] if seen.alone else []
    return [Row("coverage", ", ".join(by), "every trained parameter is reduced", Verdict.NOT_ASKED)]


def scaler(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the loss scaler with the policy's. `allow: loss_scaling` accepts that the script scales itself."""
    name, policy, found_scaler = "scaler", plan.policy, seen.scaler
    enabled = found_scaler is not None and found_scaler["enabled"]
    found = f"{found_scaler['kind']}, scale {found_scaler['scale']:g}" if found_scaler else NO_SCALER
    if not policy.fp16:
        return [Row(name, found, "", Verdict.NOT_ASKED)] if enabled else []
    asked = "a fixed scale" if policy.loss_scale is not None else "dynamic loss scaling"
    if found_scaler is None or not enabled:
        return [_no_scaler(seen, plan, asked)]
    same = True
    if policy.loss_scale is not None:
        asked = f"a fixed scale of {policy.loss_scale:g}"
        same = abs(found_scaler["scale"] / policy.loss_scale - 1) < 1e-6
    elif found_scaler.get("window") is not None:
        asked = f"dynamic, window {policy.loss_scale_window}"
        found += f", window {found_scaler['window']}"
        found += f", hysteresis {found_scaler['hysteresis']}" if found_scaler.get("hysteresis", 1) > 1 else ""
        same = found_scaler["window"] == policy.loss_scale_window and found_scaler["scale"] <= policy.initial_loss_scale
    by_script = found_scaler.get("set", "")
    if policy.loss_scale is None and (by_script or not found_scaler.get("backs_off", True)):
        return [_static_scale(seen, found, by_script, plan, asked)]
    if seen.unscaled and not seen.engine.startswith("deepspeed"):
        found, same = f"{found}; backward ran on a loss that it did not scale", False
    advice = "A GradScaler gets the policy's values only if mpguard is active when it is created: create it after that"
    if wrong := found_scaler.get("passes", ""):
        return [Row(name, f"{found}; {wrong}", asked, Verdict.WRONG, advice=scaled_passes.ADVICE[wrong])]
    if seen.unscaled:
        advice = "Call backward on the result of scaler.scale(loss), for each loss"
    return [Row(name, found, asked, Verdict.of(same), advice=advice)]


def _static_scale(seen: Observed, found: str, by_script: str, plan: Plan, asked: str) -> Row:
    """Return the row of a scale that does not follow overflows. by_script: how the script sets it."""
    stays = f", which does not back off: its backoff_factor is {(seen.scaler or {}).get('backoff', 1):.7g}"
    found += f", set by the script: {by_script}" if by_script else stays
    if plan.allowed(LOSS_SCALING):
        return Row("scaler", found, asked, Verdict.ALLOWED, LOSS_SCALING)
    advice = (
        "A static scale neither backs off after an overflow nor grows: create one GradScaler before the loop, call its "
        "`update()` without a value after each step, and leave its factors. If the script scales the loss by rules of "
        f"its own: mpguard_allow: [{LOSS_SCALING}]"
    )
    return Row("scaler", found, asked, Verdict.WRONG, advice=advice)


def _no_scaler(seen: Observed, plan: Plan, asked: str) -> Row:
    """Return the row of a run in FP16 without a scaler that is enabled and used."""
    bypassed = bool(seen.scaled and not seen.unscaled)
    if seen.scaler is not None:
        found = f"{seen.scaler['kind']}{DISABLED}"
    else:
        found = BYPASSED if bypassed else NO_SCALER
    if plan.allowed(LOSS_SCALING):
        return Row("scaler", found, asked, Verdict.ALLOWED, LOSS_SCALING)
    if seen.scaler is not None:
        advice = (
            'Enable it (`enabled=True`), for the device of the model: `GradScaler("cpu")` on a CPU, where one for CUDA '
            f"switches itself off. If the script scales the loss itself: mpguard_allow: [{LOSS_SCALING}]"
        )
    elif bypassed:
        advice = (
            "Step through it: `scaler.step(optimizer)` divides the gradients by the scale, and skips a step that has "
            f"overflowed; then `scaler.update()`. If the script divides them itself: mpguard_allow: [{LOSS_SCALING}]"
        )
    else:
        advice = (
            "FP16 gradients below 6e-8 are lost without loss scaling. Scale the loss with a GradScaler, or use BF16. "
            f"If the script scales the loss itself: mpguard_allow: [{LOSS_SCALING}]"
        )
    return Row("scaler", found, asked, Verdict.WRONG, advice=advice)
