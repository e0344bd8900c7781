"""Checks of the optimizer: the dtypes and values of the weights that it updates, and of its states."""

from __future__ import annotations

from collections.abc import Collection

from mpguard.policy.allow import STATES
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks.causes import weights_in_fp32
from mpguard.runtime.proof.checks.common import format_allowance, format_counts, format_names, mostly, wider
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import Row, Verdict, not_observed
from mpguard.runtime.proof.witness import describe

#: What to do about weights whose values are rounded.
ROUNDED_WEIGHTS = (
    "What the small dtype rounds away of each update is lost: cast copies of the weights, not their values"
)


def optimizer(seen: Observed, plan: Plan) -> Row:
    """Compare the weights that the optimizer updates, and its states. `allow: states` accepts a lower dtype of these.

    Quantized states are shown, and not refused: the script chose that optimizer.
    """
    name, asked = "optimizer", plan.policy.master_dtype.short
    if not seen.masters:
        return Row(name, seen.optimizer, asked, Verdict.UNPROVEN) if seen.optimizer else not_observed(name, asked)
    rounded_states = _rounding(seen.rounded_states)
    states = f", states {format_counts(seen.states)}{rounded_states}" if seen.states else ""
    rounded = _rounding(seen.rounded_weights)
    witnessed = "".join(f"; {seen.witnesses[row]}" for row in ("weights", "states") if row in seen.witnesses)
    found = f"{seen.optimizer}, weights {format_counts(seen.masters)}{rounded}{states}{witnessed}"
    both = f"weights and states {asked}"
    lower, allowed = _lower_states(seen, plan), {each.value: each for each in plan.allow if each.kind == STATES}
    exact = not ((rounded or rounded_states) and asked == "fp32")
    if not (mostly(seen.masters, asked) and exact and allowed.keys() >= set(lower)):
        weights = mostly(seen.masters, asked) and exact
        allow = tuple(format_allowance(STATES, dtype) for dtype in lower if weights)
        return Row(name, found, both, Verdict.WRONG, advice=_advice(seen, plan), allow=allow)
    if lower:
        return Row(name, found, both, Verdict.ALLOWED, "; ".join(str(allowed[dtype]) for dtype in lower))
    note = wider(seen.masters, asked)
    return Row(name, f"{found}{note}", both, Verdict.NOT_ASKED if quantized_states(seen) or note else Verdict.AS_ASKED)


def _rounding(found: Collection[str]) -> str:
    """Return what values were rounded to. Of a grid of int8 a sample may have few levels only, as one of int4 has."""
    kinds = [to for to in found if to != "a grid of int4" or "a grid of int8" not in found]
    return "".join(f" {describe(to)}" for to in kinds)


def _lower_states(seen: Observed, plan: Plan) -> list[str]:
    """Return the dtypes of states that are lower than the policy's, without those of quantized states."""
    asked = plan.policy.master_dtype.short
    return [dtype for dtype in seen.states if dtype in ("bf16", "fp16") and dtype != asked]


def quantized_states(seen: Observed) -> list[str]:
    """Return the formats of quantized states."""
    return [dtype for dtype in seen.states if Dtype.spelled(dtype) is None]


def _advice(seen: Observed, plan: Plan) -> str:
    policy = plan.policy
    if seen.rounded_weights:
        return ROUNDED_WEIGHTS
    if seen.rounded_states:
        return "The script rounds the states, between steps or in one: leave them as torch's step has made them"
    if mostly(seen.masters, policy.master_dtype.short):
        return "Create the optimizer with its states in that dtype, or use one that keeps them in it"
    return _load_in_fp32(seen, policy) if policy.master_dtype is Dtype.FP32 else ""


def _load_in_fp32(seen: Observed, policy: Policy) -> str:
    """Return how to have FP32 master weights, or to do without them."""
    advice = f"The optimizer's parameters are the master weights: {weights_in_fp32(seen)}"
    if policy.bf16 and not policy.low_bit_recipe and "bf16" in seen.masters:
        return f"{advice}, or train without master weights: recipe bf16_full"
    return advice


def updated_by_script(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the values of trained parameters that no optimizer has, and that the script updates itself."""
    if not seen.by_script:
        return []
    name, asked = "updates by the script", plan.policy.master_dtype.short
    found = "; ".join(f"{format_names(names, seen)}, values of {dtype}" for dtype, names in seen.by_script.items())
    narrow = asked == "fp32" and any(dtype != asked for dtype in seen.by_script)
    advice = (
        "No optimizer has these parameters, and all their values are of that dtype after each step: what it rounds "
        "away of an update is lost. Update FP32 weights, or give them to the optimizer"
    )
    verdict = Verdict.WRONG if narrow else Verdict.NOT_ASKED
    return [Row(name, f"{found}, in no optimizer that is known", asked, verdict, advice=advice)]
