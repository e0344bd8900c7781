"""Checks of FP8: which layers it has, their recipe, weights and scales, and its share of the matmuls."""

from __future__ import annotations

from typing import Any

from mpguard.nn.fp8 import filters
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks.common import (
    UNKNOWN_SHARE,
    by_dtype,
    format_counts,
    format_names,
    format_share,
    products_of,
)
from mpguard.runtime.proof.fp8 import FAST_ACCUMULATION, Fp8Layers
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import Row, Verdict, not_observed
from mpguard.targets.plugin import get

#: The class of Transformer Engine that rounds the weights that are kept in FP8, by recipe.
QUANTIZERS = {
    "delayed": "Float8Quantizer", "tensorwise": "Float8CurrentScalingQuantizer", "blockwise": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
}  # fmt: skip

#: What the row `fp8 recipe` needs.
_ASKED = "each layer in the recipe of the first pattern of fp8_modules that it matches"

#: If less than this share of the matmuls is in FP8, the run is not what was asked: FP8 cannot save time in it.
LEAST_FP8_SHARE = 0.05

#: The share of an FP8 copy that may differ from its weight rounded again: its scale is known by its reciprocal only.
STALE_SHARE = 0.001


def fp8(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the FP8 layers of the model with the policy's FP8."""
    policy, layers = plan.policy, seen.fp8
    if policy.low_bit_recipe is None:
        if layers is None or layers.entered is False:
            return []
        return [Row("fp8", f"{len(layers.converted)} FP8 layers ({layers.backend})", "none", Verdict.WRONG)]
    recipe = " or ".join(policy.recipes)
    asked = f"{'fp4' if policy.fp4 else 'fp8'} {recipe} ({' or '.join(policy.backends)})"
    if layers is None:
        return [] if "fp8" in seen.left_out else [_none(seen, plan, asked)]
    return [
        _layers(layers, plan, asked),
        *_recipes(layers, plan),
        _beside(seen, layers, plan) if layers.beside else _share(seen, plan),
        *_heads(layers, plan),
        *_experts(seen, layers, plan),
        *_weights(layers, plan),
        *_calibration(seen, layers, plan),
        *_weight_cache(seen, layers, plan),
        *_left(seen, layers, plan),
    ]


def _required(plan: Plan) -> Verdict:
    """Return the verdict on what is not in FP8: wrong, unless FP8 is only a wish of the policy."""
    return Verdict.WRONG if plan.policy.fp8_required else Verdict.NOT_ASKED


def _none(seen: Observed, plan: Plan, asked: str) -> Row:
    """Return the row of a model without FP8 layers: no layer fits, or the script has replaced those that did."""
    found, advice = "no FP8 module in the model", ""
    if seen.step > 1:
        found += f" at step {seen.step}"
        advice = (
            "Layers that the script replaces after they were converted are ordinary ones: replace them before the "
            "optimizer is created, or create the optimizer again, which converts them"
        )
    return Row("fp8", found, asked, _required(plan), advice=advice)


def _layers(layers: Fp8Layers, plan: Plan, asked: str) -> Row:
    """Compare the number of FP8 layers, their backend and recipe."""
    policy = plan.policy
    wrong = [] if layers.emulated == policy.fp8_emulate else ["emulation"]
    wrong += ["not the same in every layer"] if layers.mixed else []
    if layers.entered is False:
        wrong.append("FP8 autocast not entered around each of them")
    elif layers.backend in policy.backends and layers.converted:
        wrong += _other_recipe(layers, plan)
    found = f"{len(layers.converted)} of {len(layers.converted) + len(layers.left)} Linear ({layers.backend}"
    found += f" {layers.recipe['recipe']}" if layers.recipe else ""
    found += ", emulated)" if layers.emulated else ")"
    asked += ", emulated" if policy.fp8_emulate else ""
    return Row("fp8", "; ".join([found, *wrong]), asked, Verdict.of(layers.backend in policy.backends and not wrong))


def _recipes(layers: Fp8Layers, plan: Plan) -> list[Row]:
    """Compare, with `fp8_modules`, the recipe in which each layer ran with that of its group, by count."""
    policy, name = plan.policy, "fp8 recipe"
    if not policy.fp8_modules:
        return []
    rows = []
    found = ", ".join(f"{recipe} {count}" for recipe, count in layers.ran_in.items())
    left = sum(reason == filters.NO_RECIPE for reason in layers.left.values())
    found += f", none {left}" if left else ""
    if layers.misplaced:
        wrong = format_names([f"{each} ran in {how}" for each, how in layers.misplaced.items()])
        rows.append(Row(name, f"{found}; {len(layers.misplaced)} not in their own: {wrong}", _ASKED, Verdict.WRONG))
    else:
        rows.append(Row(name, found, _ASKED, Verdict.AS_ASKED))
    if layers.patterns:
        advice = "Patterns are compared with the names of layers, as `print(model)` shows them, joined by dots"
        rows.append(
            Row("fp8_modules", "; ".join(layers.patterns), "patterns that decide a layer", Verdict.WRONG, advice=advice)
        )
    return rows


def _other_recipe(layers: Fp8Layers, plan: Plan) -> list[str]:
    """Return the fields in which the recipe in force differs from the policy's, with both values."""
    if layers.backend == "torchao":
        asked: dict[str, Any] = {} if plan.policy.fp8_modules else {"recipe": plan.policy.fp8_recipe}
        asked |= {FAST_ACCUMULATION: True} if plan.policy.fp8_fast_accum else {}
    elif plan.policy.fp8_modules:
        return []  # see `_recipes`
    else:
        asked = get("te").build_arguments(plan.policy)
    return [
        f"{field} is {layers.recipe.get(field)}, not {value}"
        for field, value in asked.items()
        if layers.recipe.get(field) != value
    ]


def _beside(seen: Observed, layers: Fp8Layers, plan: Plan) -> Row:
    """Show the layers whose weights other code multiplies."""
    outside = f"{format_names(layers.beside, seen)} multiplied outside of the FP8 layer"
    asked = "each FP8 layer called; or named in fp8_exclude, if other code uses its weight"
    return Row("fp8 products", outside, asked, _required(plan))


def _share(seen: Observed, plan: Plan) -> Row:
    """Compare the share of the matmuls that ran in FP8 with the least one that is worth it."""
    name, products = "fp8 products", products_of(seen, trained=True)
    counts = by_dtype(products)
    total = sum(each.flops for each in products)
    if seen.inferred or not counts:
        return not_observed(name, reason=seen.inferred)
    share = sum(counts.get(dtype, 0) for dtype in ("fp8", "fp4")) / sum(counts.values())
    found = f"{100 * share:.0f} % of the matmuls"
    if share >= LEAST_FP8_SHARE or sum(counts.values()) < (1 - UNKNOWN_SHARE) * total:
        return Row(name, found, "", Verdict.NOT_ASKED)
    others = [each for each in products if each.dtype not in ("fp8", "fp4", None)]
    places = list(dict.fromkeys(each.place for each in others))
    found = f"{format_share(share)} of the matmuls; the others are in {format_names(places)}"
    asked = f"at least {100 * LEAST_FP8_SHARE:.0f} %: FP8 saves no time here"
    advice = (
        "Only Linear layers become FP8. Choose a recipe without FP8, or accept it: mpguard_overrides: "
        "{fp8_required: false}"
    )
    return Row(name, found, asked, _required(plan), advice=advice)


def _heads(layers: Fp8Layers, plan: Plan) -> list[Row]:
    """Show if the output heads are in FP8, with `fp8_head`."""
    if not plan.policy.fp8_head:
        return []
    taken = dict.fromkeys(layers.beside, "other code multiplies its weight")
    left = {name: why for name, reason in layers.heads.items() if (why := reason or taken.get(name))}
    if not layers.heads:
        return [Row("fp8 head", "no output head in the model", "", Verdict.NOT_ASKED)]
    if not left:
        return [Row("fp8 head", f"{format_names(list(layers.heads))} in fp8", "in fp8", Verdict.AS_ASKED)]
    reasons = format_names([f"{name}: {reason}" for name, reason in left.items()])
    return [Row("fp8 head", f"left in {plan.policy.compute_dtype.short} ({reasons})", "", Verdict.NOT_ASKED)]


def _experts(seen: Observed, layers: Fp8Layers, plan: Plan) -> list[Row]:
    """Show which experts are in FP8, with `fp8_experts`. Fails if those that should be multiplied in another dtype."""
    if not plan.policy.fp8_experts:
        return []
    name, inside = "fp8 experts", [each for each, reason in layers.experts.items() if not reason]
    reasons = [f"{each}: {reason}" for each, reason in layers.experts.items() if reason]
    ran = {each.module: each.dtype for each in sorted(seen.computed, key=lambda each: each.dtype == "fp8")}
    plain = [each for each in inside if ran.get(each, "fp8") not in ("fp8", None)]
    compute = plan.policy.compute_dtype.short
    if plain:
        return [Row(name, f"{format_names(plain, seen)} multiplied in {compute}", "in fp8", Verdict.WRONG)]
    if not layers.experts:
        return [Row(name, "no experts of transformers in the model", "", Verdict.NOT_ASKED)]
    found = [f"{format_names(inside, seen)} in fp8 (e4m3, a scale per row)"] if inside else []
    if not reasons:
        return [Row(name, "; ".join(found), "in fp8", Verdict.AS_ASKED)]
    found.append(f"left in {compute} ({format_names(reasons)})")
    return [Row(name, "; ".join(found), "", Verdict.NOT_ASKED)]


def _weights(layers: Fp8Layers, plan: Plan) -> list[Row]:
    """Compare the weights that are kept in FP8, and their masters."""
    name, policy, kept = "fp8 weights", plan.policy, sum(layers.kept.values())
    if not kept and not (policy.fp8_param and layers.backend == "te" in policy.backends):
        return []
    if not kept and policy.wishes:
        return [Row(name, "in high precision", "", Verdict.NOT_ASKED)]
    total = len(layers.converted)
    found = f"{kept} of {total} kept in FP8 ({', '.join(layers.kept)})" if kept else "in high precision"
    found += f", masters {format_counts(layers.masters)}" if layers.masters else ""
    found += f"; not made from exact weights: {format_names(layers.inexact)}" if layers.inexact else ""
    advice = (
        "mpguard keeps the exact values only of layers that it converts itself: build them as nn.Linear, without "
        "quantized_model_init, and set fp8_param"
    )
    if not policy.fp8_param:
        return [Row(name, found, "in high precision", Verdict.WRONG, advice=advice)]
    quantizer = QUANTIZERS[policy.low_bit_recipe or ""]
    exact = set(layers.masters) == {policy.master_dtype.short} and not layers.inexact
    asked = f"all kept in FP8 ({quantizer}), exact masters in {policy.master_dtype.short}"
    return [Row(name, found, asked, Verdict.of(layers.kept == {quantizer: total} and exact), advice=advice)]


def _calibration(seen: Observed, layers: Fp8Layers, plan: Plan) -> list[Row]:
    """Show which layers began with the scales of their own tensors, with `fp8_calibration`. Fails if one did not."""
    if not plan.policy.fp8_calibration:
        return []
    name, asked = "fp8 calibration", "first scales from the tensors of the first pass, or from a checkpoint"
    if layers.uncalibrated:
        return [Row(name, f"{format_names(layers.uncalibrated, seen)} not calibrated", asked, Verdict.WRONG)]
    if not layers.calibrated:
        return [not_observed(name, asked)]
    return [Row(name, f"{layers.calibrated} of {len(layers.converted)} layers", asked, Verdict.AS_ASKED)]


def _weight_cache(seen: Observed, layers: Fp8Layers, plan: Plan) -> list[Row]:
    """Show how often weights were rounded, with `fp8_weight_cache`.

    Fails if that was in each of several passes of a step, or if a copy was not that of its weight.
    """
    if not plan.policy.fp8_weight_cache:
        return []
    name, asked = "fp8 weight cache", "rounded once per step"
    if layers.stale > STALE_SHARE:
        found = f"{format_share(layers.stale)} of a copy is not that of its weight"
        asked = "copies of the weights: they were changed between two passes of one step; set fp8_weight_cache to False"
        return [Row(name, found, asked, Verdict.WRONG)]
    in_training = f"{asked}, of a model in training mode"
    if layers.uncached:
        found = f"{format_names(layers.uncached, seen)} rounded in each pass"
        return [Row(name, found, in_training, Verdict.WRONG)]
    if not layers.copies:
        verdict = Verdict.NOT_ASKED if layers.kept else Verdict.WRONG
        return [Row(name, "no copy is kept", in_training, verdict)]
    times = f"{layers.passes} {'pass' if layers.passes == 1 else 'passes'}"
    cached = f"{layers.copies} of {len(layers.converted)} layers"
    if layers.roundings > 1:  # weights that were loaded or changed between two passes, or copies without a transpose
        found = f"{cached} rounded {layers.roundings} times in {times} of a step"
        return [Row(name, found, asked, Verdict.NOT_ASKED)]
    return [Row(name, f"{cached} rounded once in {times} of a step", asked, Verdict.AS_ASKED)]


def _left(seen: Observed, layers: Fp8Layers, plan: Plan) -> list[Row]:
    """Show the layers that are not in FP8, and patterns of `fp8_exclude` that match nothing, or a layer in FP8."""
    compute, rows = plan.policy.compute_dtype.short, []
    explained = [name for name, reason in layers.left.items() if reason]
    reasons = dict.fromkeys(layers.left[name] for name in explained)
    if explained:
        found = f"{format_names(explained, seen)} ({format_names(list(reasons))})"
        rows.append(Row(f"left in {compute}", found, "", Verdict.NOT_ASKED))
    if unexplained := [name for name, reason in layers.left.items() if not reason]:
        asked = "in fp8, or named in fp8_exclude"
        advice = (
            "Layers that are added to a model after its optimizer was created are not converted: create the "
            "optimizer when the model is complete, or call mpguard.convert before the first step"
        )
        rows.append(Row("not in fp8", format_names(unexplained, seen), asked, _required(plan), advice=advice))
    if layers.against:
        found = f"{format_names(layers.against, seen)} in fp8"
        rows.append(Row("fp8_exclude", found, f"left in {compute}", Verdict.WRONG))
    if layers.unmatched:
        found = f"{', '.join(layers.unmatched)} matches no module"
        rows.append(Row("fp8_exclude", found, "a pattern that matches", Verdict.WRONG))
    return rows
