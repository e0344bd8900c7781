"""Checks of the model: the dtypes of its parameters, buffers and output, and how it is compiled."""

from __future__ import annotations

from mpguard.core import patches
from mpguard.nn import compile as compilation
from mpguard.policy.allow import BF16
from mpguard.policy.dtype import Dtype
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import attention_masks as masks
from mpguard.runtime.proof.checks.common import (
    format_allowance,
    format_amount,
    format_counts,
    format_names,
    mostly,
    name_pattern,
    updated_dtype,
    wider,
)
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import Row, Verdict, not_observed

#: At most so many patterns are proposed for parameters in BF16: of a whole model in BF16, none.
MOST_PATTERNS = 8

#: What to do if a model that mpguard compiled in place was not called: the script calls something else.
CALL_THE_MODEL = "Call the model itself, or add `step = torch.compile(step)` for the function that is called instead"


def parameters(seen: Observed, plan: Plan) -> Row:
    """Compare the dtypes of the parameters. `allow: bf16` accepts some in BF16: see `kept`.

    DeepSpeed's engine holds the compute copy; in other engines the model holds the parameters of the optimizer.
    """
    policy = plan.policy
    if not seen.parameters:
        return not_observed("parameters")
    shards = {"fsdp1": " (sharded)", "fsdp2": " (sharded)"}.get(seen.engine, "")
    asked = policy.params_dtype if seen.engine.startswith("deepspeed") else updated_dtype(seen, plan)
    assert asked is not None
    elements = sum(seen.parameters.values())
    note = wider(seen.parameters, asked.short)
    found = f"{format_counts(seen.parameters)}{shards}, {format_amount(elements)}{note}"
    # Parameters kept in FP8 are compared with the FP8 layers.
    exact = {dtype: count for dtype, count in seen.parameters.items() if dtype != "fp8"}
    same = Verdict.NOT_ASKED if note else Verdict.of(mostly(exact, asked.short))
    allow: tuple[str, ...] = ()
    if policy.master_dtype is Dtype.FP32 and {"bf16", "fp32"} <= seen.parameters.keys():
        patterns = dict.fromkeys(map(name_pattern, seen.in_bf16))
        allow = tuple(format_allowance(BF16, each) for each in patterns) if len(patterns) <= MOST_PATTERNS else ()
        advice = f"Load or keep them in fp32: {format_names(list(patterns))}"
    else:
        required = policy.script_requirements or ""
        advice = required[:1].upper() + required[1:]
    return Row("parameters", found, asked.short, same, advice=advice, allow=allow)


def kept(seen: Observed, plan: Plan) -> list[Row]:
    """Show the parameters that the script keeps in BF16, as the run allows."""
    if not seen.kept:
        return []
    found = ", ".join(f"{pattern} ({format_amount(elements)})" for pattern, elements in seen.kept.items())
    names = "; ".join(str(each) for each in plan.allow if each.kind == BF16 and each.value in seen.kept)
    return [Row("kept in bf16", found, updated_dtype(seen, plan).short, Verdict.ALLOWED, names)]


def buffers(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the dtypes of the buffers, if the policy has one for them."""
    asked = plan.policy.buffer_dtype
    if asked is None or not seen.buffers:
        return []
    return [Row("buffers", format_counts(seen.buffers), asked.short, Verdict.of(mostly(seen.buffers, asked.short)))]


def output(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the dtype of the model's output, if the policy has one for it."""
    asked = plan.policy.output_dtype
    if asked is None or seen.output is None:
        return []
    return [Row("output", seen.output, asked.short, Verdict.of(seen.output == asked.short))]


def compiled(seen: Observed, plan: Plan) -> list[Row]:
    """Compare which code is compiled, and in which mode."""
    rows = _compiled_or_not(seen, plan)
    if plan.policy.compile_mode != "default":
        rows.append(_compile_mode(seen, plan.policy.compile_mode))
    return rows


def _compiled_or_not(seen: Observed, plan: Plan) -> list[Row]:
    name, policy = "compile", plan.policy
    never = f"{compilation.NEVER}: compile nothing, or set fp8_recipe to tensorwise"
    if isinstance(policy.compile, bool):
        found, asked = ("compiled" if each else "not compiled" for each in (seen.compiled, policy.compile))
        advice = never if policy.low_bit_recipe == "delayed" else CALL_THE_MODEL if policy.compile else ""
        return [Row(name, found, asked, Verdict.of(seen.compiled == policy.compile), advice=advice)]
    if policy.low_bit_recipe == "delayed" and seen.compiled_fp8:
        return [Row(name, "FP8 layers are compiled", "delayed scaling not compiled", Verdict.WRONG, advice=never)]
    if policy.low_bit_recipe:
        chosen = compilation.choice(policy)
        lost = f": {chosen.reason}. {CALL_THE_MODEL}" if chosen.on and not seen.compiled else ""
        return [Row(name, "compiled" if seen.compiled else f"not compiled{lost}", "auto", Verdict.NOT_ASKED)]
    return []


def _compile_mode(seen: Observed, asked: str) -> Row:
    name = "compile mode"
    if not seen.compile_modes:
        what = "no model is compiled: set compile to True, or compile the model in the script"
        return Row(name, what, asked, Verdict.NOT_ASKED)
    if compilation.OTHER_MODE in seen.compile_modes:
        advice = (
            "torch combines no mode with `options`, or with a `backend` other than inductor: remove them "
            "(accelerate: dynamo_backend), or set compile_mode to default"
        )
        return Row(name, compilation.OTHER_MODE, asked, Verdict.WRONG, advice=advice)
    if seen.compile_modes != [asked]:
        what = "not known: a model was compiled before mpguard was active, or copied"
        return Row(name, what, asked, Verdict.NOT_ASKED)
    if seen.without_cuda_graphs:
        left_out = f"{seen.without_cuda_graphs} of the compiled graphs of this process have no CUDA graph"
        return Row(name, f"{asked}; {left_out} (TORCH_LOGS=cudagraphs says why)", asked, Verdict.NOT_ASKED)
    return Row(name, asked, asked, Verdict.AS_ASKED)


def not_applied(_seen: Observed, _plan: Plan) -> list[Row]:
    """Show the patches that do not apply to the installed libraries, by what the run loses without them."""
    lost = "; ".join(f"{lost} ({reason})" for lost, reason in patches.not_applied.items())
    return [Row("patches", f"not applied: {lost}", "", Verdict.NOT_ASKED)] if lost else []


def attention_mask(seen: Observed, _plan: Plan) -> list[Row]:
    """Show what attention in compiled code takes: a mask, or `is_causal`."""
    found = masks.describe(seen.attention_masks)
    return [Row("attention mask", found, "", Verdict.NOT_ASKED)] if found else []
