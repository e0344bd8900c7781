"""Checks of what was computed: the dtypes of matmuls, attention, frozen parts, FP32 modules, and TF32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpguard.nn.fp8.filters import pattern_around
from mpguard.policy.allow import FP32, FROZEN, QUANTIZED, Allowance
from mpguard.policy.dtype import Dtype
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import tf32 as switches
from mpguard.runtime.proof.checks import causes
from mpguard.runtime.proof.checks.common import (
    UNKNOWN_SHARE,
    allowed_dtypes,
    by_dtype,
    format_allowance,
    format_amount,
    format_counts,
    format_names,
    format_places,
    format_share,
    name_pattern,
    narrower,
    products_of,
)
from mpguard.runtime.proof.checks.common import wider as wider_than_asked
from mpguard.runtime.proof.inferred import OUTSIDE
from mpguard.runtime.proof.observe import Computed, Observed
from mpguard.runtime.proof.products import bits
from mpguard.runtime.proof.verdict import UNOBSERVED, Row, Verdict, not_observed

#: At most this share of the matmuls may be in a wider dtype than the policy's: a router, a small head. None may be in
#: a narrower one.
WIDER_SHARE = 0.1

#: At most this share may be in FP32 because the script has switched autocast off around a part of the forward pass.
SCRIPTED_SHARE = 0.75

#: At most this share may be in FP32 because the loss multiplies results of the model, or a penalty multiplies weights.
LOSS_SHARE = 0.9

#: The same where the matmuls are inferred from autograd's graph, which shows neither attention nor what functions do.
INFERRED_SHARE = 0.5

#: So many elements of gradients that backward casts to a narrower dtype and back are refused, however large the model.
MANY = 256

#: How many times as long a matmul takes in FP32 as in BF16 on an H100, without TF32 and with it; from its data sheet:
#: 67, 495 and 989 TFLOPS.
COST, COST_TF32 = 15, 2

#: Dtypes to which activations are packed for the backward pass.
PACKED = ("int8", "uint8", "int16")

#: What is found where an optimizer updates only scalars and vectors (a temperature), and no matmul leads to them.
NO_PRODUCTS = "none: no matrix is trained"

#: What is found where the step has no matmul: embeddings, factors or vectors are multiplied element by element.
NO_MATMULS = "none: no matmul leads to the gradients"

#: What is found where TF32 is asked for on a CPU.
NO_TF32 = "none: the model is on the CPU, which has no TF32"


def compute(seen: Observed, plan: Plan) -> Row:
    """Compare the dtypes of the matmuls whose results reach a gradient. `allow: fp32` accepts some in FP32."""
    name, asked = "compute", plan.policy.compute_dtype.short + (" or fp8" if plan.policy.fp8 else "")
    products = products_of(seen, trained=True)
    total = sum(each.flops for each in products)
    if not total and not seen.matrices and seen.passes and not seen.compiled:
        return Row(name, NO_PRODUCTS, "", Verdict.NOT_ASKED)
    if not total and seen.without_products:
        return Row(name, NO_MATMULS, "", Verdict.NOT_ASKED)
    if not total and not seen.passes and _has_no_graph(products_of(seen, trained=False)):
        return _estimated(seen, plan)
    if not total:
        reason = "all matmuls are in operators that have no 16 bits" if _wide_only(seen) else seen.inferred
        return not_observed(name, asked, reason, _unobserved_advice([]))
    products = _judged(products)
    total = sum(each.flops for each in products)
    others = [each for each in products if each.dtype and each.dtype not in allowed_dtypes(each.module, plan)]
    islands = _islands(others, plan)
    fewer_bits = narrower(products, plan)
    wider = sum(each.flops for each in others if each not in fewer_bits)
    scripted = [each for each in scripted_fp32(seen, plan) if each in products and each not in islands]
    explained = sum(each.flops for each in scripted)
    outside = wider - sum(each.flops for each in islands)
    outside -= explained if explained <= _scripted_limit(scripted, seen) * total else 0
    limit = (INFERRED_SHARE if seen.inferred else WIDER_SHARE) * total
    found = _found(seen, products, others)
    if rounded := _rounded(seen, plan):
        found = f"{found}; gradients or saved activations in {', '.join(rounded)}"
        return Row(name, found, asked, Verdict.WRONG, advice=_advice(seen, plan))
    in_force = plan.policy.compute_dtype.short in by_dtype(products)
    without_autocast = bool(plan.policy.fp8) and outside > 0 and not in_force  # FP8 layers, which are most, need none
    if fewer_bits or outside > limit or without_autocast:
        in_place = not fewer_bits and in_force
        allow = _to_allow([each for each in others if each not in islands], limit, plan) if in_place else ()
        return Row(name, found, asked, Verdict.WRONG, advice=_advice(seen, plan), allow=allow)
    unknown = [each for each in products if each.dtype is None]
    share = sum(each.flops for each in unknown) / total
    if share > UNKNOWN_SHARE:
        kernels = list(dict.fromkeys(each.place for each in unknown))
        reason = f"{100 * share:.0f} % of the matmuls, in {format_names(kernels)}"
        return not_observed(name, asked, reason, _unobserved_advice(kernels))
    if wider - explained > limit:
        return Row(name, found, asked, Verdict.ALLOWED, "; ".join(dict.fromkeys(map(str, islands.values()))))
    note = wider_than_asked(by_dtype(products), asked)
    return Row(name, f"{found}{note}", asked, Verdict.NOT_ASKED if note else Verdict.AS_ASKED)


def _judged(products: list[Computed]) -> list[Computed]:
    """Return the matmuls without those in FP32 of a loss: up to `LOSS_SHARE`; all if there are no others.

    A perceptual loss also computes in weights that are not trained, with autocast switched off, without a limit: in a
    network that is larger than what is trained.
    """
    of_loss = [each for each in products if each.in_the_loss and each.dtype == "fp32"]
    left_out = of_loss if _share_in(of_loss, products) <= LOSS_SHARE else []
    left_out += [each for each in products if each.untrained and each.by_script and each.dtype == "fp32"]
    others = [each for each in products if each not in left_out]
    return others if any(each.flops for each in others) else products


def _has_no_graph(products: list[Computed]) -> bool:
    """True if the model was called without gradients only: else its backward pass was not seen."""
    return any(each.dtype for each in products) and not any(map(_is_frozen, products))


def _estimated(seen: Observed, plan: Plan) -> Row:
    """Compare the matmuls of a step without a backward pass: its gradients are estimated from calls of the model.

    Evolution strategies, simultaneous perturbation and forward-mode differentiation do so. That these calls lead to the
    gradients was not read, so that another dtype is no witness.
    """
    counted = [dataclasses.replace(each, trained=True) for each in seen.computed]
    row = compute(dataclasses.replace(seen, computed=counted, passes=1, looked_at=1), plan)
    if row.verdict is not Verdict.WRONG:
        return dataclasses.replace(row, found=f"{row.found} (no backward pass: calls of the model without one)")
    reason = f"no backward pass was seen, and the calls of the model without one ran in {row.found}"
    return not_observed(row.name, row.asked, reason, row.advice)


def is_mostly_unknown(seen: Observed) -> bool:
    """True if more than half of the trained matmuls ran in kernels whose dtype is not known."""
    products = products_of(seen, trained=True)
    return 2 * sum(each.flops for each in products if each.dtype is None) > sum(each.flops for each in products)


def scripted_fp32(seen: Observed, plan: Plan) -> list[Computed]:
    """Return the trained matmuls in FP32 of parts around which the script has switched autocast off."""
    products = products_of(seen, trained=True)
    return [
        each for each in products
        if each.by_script and each.dtype == "fp32" and "fp32" not in allowed_dtypes(each.module, plan)
    ]  # fmt: skip


def _scripted_limit(found: Iterable[Computed], seen: Observed) -> float:
    """Return the share of the matmuls that may be in FP32 because the script says so.

    An output head, and what computes the loss, may be more than `SCRIPTED_SHARE`: in a small model with a large
    vocabulary the head is nearly all of it.
    """
    only_heads = all(each.module is None or each.module in seen.output_heads for each in found)
    return 1.0 if only_heads and seen.output_heads else SCRIPTED_SHARE


def scripted(seen: Observed, plan: Plan) -> list[Row]:
    """Show the matmuls in FP32 of parts around which the script has switched autocast off, if they are many.

    No row for a small head: at most `WIDER_SHARE` needs no reason.
    """
    found = scripted_fp32(seen, plan)
    products = products_of(seen, trained=True)
    judged = _judged(products)
    share = _share_in(found, products)
    counted = [each for each in found if each in judged]
    is_refused = _share_in(counted, judged) > _scripted_limit(counted, seen)
    if share <= WIDER_SHARE or is_refused:
        return []
    places = format_names(list(dict.fromkeys(each.place for each in found)), seen)
    cost = f"{COST:.0f} times the time of bf16 matmuls on a GPU without TF32, {COST_TF32:.0f} with"
    text = f"{format_share(share)} of the matmuls, where the script has left autocast: {places}; {cost}"
    return [Row("fp32 by the script", text, "", Verdict.NOT_ASKED)]


def _share_in(some: list[Computed], products: list[Computed]) -> float:
    """Return the share of some matmuls among others that contain them."""
    return sum(each.flops for each in some) / max(1, sum(each.flops for each in products))


def _wide_only(seen: Observed) -> list[Computed]:
    """Return the trained matmuls in operators that have no 16 bits."""
    return [each for each in seen.computed if each.trained and each.wide_only and not each.attention]


def wide_operators(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the matmuls in operators that autocast never casts to 16 bits: FFTs, complex numbers, torch.linalg."""
    found = _wide_only(seen)
    if not by_dtype(found):
        return []
    share = sum(each.flops for each in found) / sum(each.flops for each in seen.computed if each.trained)
    text = f"{format_counts(by_dtype(found))}, {format_share(share)} of the matmuls"
    if fewer_bits := narrower(found, plan):
        places = "; ".join(format_places(fewer_bits))
        return [Row("wide operators", f"{text}; {places}", plan.policy.compute_dtype.short, Verdict.WRONG)]
    return [Row("wide operators", f"{text} (FFT, complex, torch.linalg: no autocast)", "", Verdict.NOT_ASKED)]


def _found(seen: Observed, products: list[Computed], others: list[Computed]) -> str:
    """Return the dtypes of matmuls with their shares, the places of other dtypes, and how much was checked."""
    found = format_counts(by_dtype(products))
    found += f"; {'; '.join(format_places(others))}" if others and len(by_dtype(products)) > 1 else ""
    if seen.inferred:
        return f"{found} (inferred from autograd's graph: {seen.inferred})"
    if seen.looked_at < seen.passes:
        return f"{found} ({seen.looked_at} of {seen.passes} backward passes checked)"
    return found


def _unobserved_advice(kernels: list[str]) -> str:
    """Return what to do where no matmul was seen, or where the dtype of some kernels is not known."""
    if not kernels:
        return (
            "No matmul that mpguard recognizes is behind the gradients of this step. Activate mpguard before "
            "the optimizer is created, and train in the same thread"
        )
    if any("CompiledFunction" in kernel for kernel in kernels):
        return (
            "No operator runs where a CUDA graph is replayed. Its matmuls are known if the first calls of the "
            "compiled code were checked, and inductor's cache is on (TORCHINDUCTOR_FX_GRAPH_CACHE is not 0)"
        )
    return (
        "Their kernels are no operators of torch, so that their dtype is not known: use operators of torch, or "
        "accept it with --enforce warn"
    )


def _advice(seen: Observed, plan: Plan) -> str:
    """Return what to do about matmuls in another dtype than the policy's."""
    asked = plan.policy.compute_dtype.short
    products = products_of(seen, trained=True)
    found = by_dtype(products)
    low = [dtype for dtype in (*_rounded(seen, plan), *found) if dtype in ("fp16", "bf16") and dtype != asked]
    if base := next((dtype for dtype in low if seen.frozen.get(dtype)), ""):
        return (
            f"The base model, which is not trained, is in {base} ({format_amount(seen.frozen[base])} parameters), and "
            f"the gradients pass through what it computes: load it in {asked}"
        )
    if _rounded(seen, plan):
        return "Something rounds them to that dtype (a hook of saved tensors, a cast in the forward pass): remove it"
    by_script = _share_in(scripted_fp32(seen, plan), products)
    if low:
        return causes.other_sixteen_bits(seen, plan.policy, low[0])
    if asked not in found and by_script <= SCRIPTED_SHARE:
        return causes.not_cast(seen, plan.policy)
    if by_script > SCRIPTED_SHARE:
        return (
            f"The script has left autocast, or switched it off, around {format_share(by_script)} of the matmuls; at "
            f"most {100 * SCRIPTED_SHARE:.0f} % count as wanted: compute fewer of them in FP32"
        )
    return (
        f"At most {100 * WIDER_SHARE:.0f} % of the matmuls may be in a wider dtype, and none in a narrower one: "
        "enable autocast there (a custom Function or operator must multiply in autocast's dtype, in backward too)"
    )


def _to_allow(wider: Iterable[Computed], limit: float, plan: Plan) -> tuple[str, ...]:
    """Return what accepts matmuls in FP32: the places with the most work, until the others are below the limit."""
    work: dict[str, int] = {}
    for each in wider:
        place = name_pattern(each.module) if each.module else each.place
        if each.dtype == "fp32" and pattern_around(each.module or "", plan.policy.fp32_modules) is None:
            work[place] = work.get(place, 0) + each.flops
    left, entries = sum(work.values()), []
    for place, flops in sorted(work.items(), key=lambda item: -item[1]):
        if left > limit:
            entries.append(format_allowance(FP32, place))
            left -= flops
    return tuple(entries)


def _islands(products: Iterable[Computed], plan: Plan) -> dict[Computed, Allowance]:
    """Return the matmuls in FP32 of modules that the run allows by a pattern, with what allows them."""
    patterns = {each.value: each for each in plan.allow if each.kind == FP32}
    found = {each: _pattern_of(each, patterns) for each in products if each.dtype == "fp32"}
    return {each: patterns[pattern] for each, pattern in found.items() if pattern is not None}


def _pattern_of(product: Computed, patterns: Iterable[str]) -> str | None:
    """Return the pattern that names where matmuls ran: their module, or what the proof calls their place."""
    place = product.module or product.place
    return place if not product.module and place in patterns else pattern_around(product.module or "", patterns)


def _rounded(seen: Observed, plan: Plan) -> list[str]:
    """Return the dtypes narrower than the policy's that gradients or saved activations went through in backward.

    Empty if matmuls ran in a narrower dtype: then their gradients are in it too.
    """
    asked = plan.policy.compute_dtype
    if narrower(products_of(seen, trained=True), plan):
        return []
    least = WIDER_SHARE * sum(seen.gradients.values())
    narrow = {dtype for dtype, elements in seen.widened.items() if elements > least}
    narrow |= {dtype for dtype, elements in seen.rounded_in_backward.items() if elements > min(least, MANY)}
    expected = {asked.short, plan.policy.reduce_dtype.short}  # DDP's hooks run in backward
    expected |= set() if plan.policy.low_bit_recipe is None else {"fp8", "fp4"}
    return sorted(narrow & {"bf16", "fp16", "fp8", "fp4"} - expected)  # integers are masks and indices


def saved_activations(seen: Observed, _plan: Plan) -> list[Row]:
    """Show integers that backward converts to floating-point numbers, if they are as many as a tenth of the gradients.

    They are activations that were packed for the backward pass, or large masks.
    """
    least = WIDER_SHARE * sum(seen.gradients.values())
    packed = {dtype: elements for dtype, elements in seen.widened.items() if dtype in PACKED and elements > least}
    found = ", ".join(f"{dtype}, {format_amount(elements)} elements" for dtype, elements in packed.items())
    return [Row("saved activations", f"converted from {found}", "", Verdict.NOT_ASKED)] if packed else []


def foreign_casts(seen: Observed, plan: Plan) -> list[Row]:
    """Show values that were rounded to a dtype that neither the policy nor an allowance has, outside of backward.

    That they went into the training in this form is not known: they may be logged, or saved.
    """
    policy = plan.policy
    own = {each.short for each in vars(policy).values() if isinstance(each, Dtype)} | {policy.compute_dtype.short}
    own |= {"fp8", "fp4"} if policy.low_bit_recipe else set()
    own |= {word for each in plan.allow for word in (each.kind, each.value)}
    rows = []
    for dtype, places in seen.casts.items():
        if dtype not in own and sum(places.values()) >= MANY:
            found = (
                f"{UNOBSERVED}: what {format_amount(sum(places.values()))} elements became that were rounded so, in "
            )
            rows.append(Row(f"casts to {dtype}", found + format_names(list(places)), "", Verdict.UNPROVEN))
    return rows


def attention(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the dtypes of attention. Autocast leaves some of it in FP32, which the model does not choose."""
    policy, products = plan.policy, products_of(seen, trained=True, attention=True)
    counts = by_dtype(products)
    if not counts:
        return []
    in_fp8 = policy.fp8_dot_product_attention or policy.fp8_multi_head_attention
    fewer_bits = [each for each in narrower(products, plan) if not (in_fp8 and each.dtype == "fp8")]
    found = format_counts(counts)
    found += f"; {'; '.join(format_places(fewer_bits))}" if fewer_bits and len(counts) > 1 else ""
    advice = "Cast the queries, keys and values to the policy's dtype, or remove the cast before the attention"
    if narrower(products_of(seen, trained=True), plan):
        advice = ""  # the other matmuls are in a narrower dtype too: their advice is about all of them
    asked = policy.compute_dtype
    wide = sum(flops for dtype, flops in counts.items() if bits(dtype) > asked.bits)
    if not fewer_bits and 2 * wide > sum(counts.values()):
        note = f"{found} (wider than {asked.short}: torch, or the script, computes it so)"
        return [Row("attention", note, asked.short, Verdict.NOT_ASKED)]
    return [Row("attention", found, asked.short, Verdict.of(not fewer_bits), advice=advice)]


def frozen(seen: Observed, plan: Plan) -> list[Row]:
    """Show the matmuls that reach no gradient. Fails if those of a trained model are in a narrower dtype.

    `allow: frozen` accepts a dtype.
    """
    products = [each for each in seen.computed if _is_frozen(each)]
    if not by_dtype(products):
        return []
    fewer_bits = narrower([each for each in products if each.inside], plan)
    found, asked = frozen_share(seen, least=0.0), plan.policy.compute_dtype.short
    if not fewer_bits:
        return [Row("frozen parts", found, "", Verdict.NOT_ASKED)]
    found += f"; {'; '.join(format_places(fewer_bits))}"
    allowed = {each.value: each for each in plan.allow if each.kind == FROZEN}
    if all(each.dtype in allowed for each in fewer_bits):
        names = "; ".join(str(allowed[each]) for each in by_dtype(fewer_bits))
        return [Row("frozen parts", found, asked, Verdict.ALLOWED, names)]
    known = [dtype for dtype in by_dtype(fewer_bits) if dtype in QUANTIZED or Dtype.spelled(dtype)]
    allow = tuple(format_allowance(FROZEN, dtype) for dtype in known if dtype not in allowed)
    advice = (
        "What they compute goes into the trained part with less precision than the policy has. Load or cast them "
        f"in {asked} or fp32"
    )
    return [Row("frozen parts", found, asked, Verdict.WRONG, advice=advice, allow=allow)]


def frozen_share(seen: Observed, least: float = 0.01) -> str:
    """Return the dtypes of frozen parts and their share: `fp32, 99 % of the matmuls`. Empty below the least share."""
    return _share_of(list(filter(_is_frozen, seen.computed)), seen, least)


def _is_frozen(product: Computed) -> bool:
    """True for a matmul in a module that reaches no gradient, and is no evaluation of a trained model."""
    return not product.trained and not product.evaluated and not _is_outside(product)


def _is_outside(product: Computed) -> bool:
    """True for a matmul without a gradient in no module: the script computes with gradients or statistics."""
    return not product.trained and not product.evaluated and product.place == OUTSIDE


def evaluation(seen: Observed, _plan: Plan) -> list[Row]:
    """Show the matmuls of a trained model that was called without gradients, and those of no module."""
    found = _share_of([each for each in seen.computed if each.evaluated], seen, least=0.0)
    outside = _share_of(list(filter(_is_outside, seen.computed)), seen, least=0.0)
    rows = [Row("evaluation", found, "", Verdict.NOT_ASKED)] if found else []
    return rows + ([Row("without gradient", f"{outside}, in {OUTSIDE}", "", Verdict.NOT_ASKED)] if outside else [])


def _share_of(products: list[Computed], seen: Observed, least: float) -> str:
    """Return the dtypes of matmuls and their share among all; empty below the least share."""
    share = sum(each.flops for each in products) / max(1, sum(each.flops for each in seen.computed))
    counts = by_dtype(products)
    return f"{format_counts(counts)}, {format_share(share)} of the matmuls" if counts and share > least else ""


def fp32_modules(seen: Observed, _plan: Plan) -> list[Row]:
    """Compare what the modules that `fp32_modules` names computed in."""
    fp32 = seen.fp32
    if fp32 is None:
        return []
    name, asked = "fp32 modules", "fp32"
    if fp32.unmatched:
        found = f"{', '.join(fp32.unmatched)} matches no module"
        return [Row(name, found, "a pattern that matches", Verdict.WRONG)]
    if fp32.left:
        asked = "fp32: add modules to the model before its optimizer is created"
        return [Row(name, f"{format_names(fp32.left)} not in fp32", asked, Verdict.WRONG)]
    counts = [f"{dtype} ({format_names(names)})" for dtype, names in fp32.computed.items()]
    if not counts:
        return [not_observed(name, asked)]
    low = [dtype for dtype in fp32.weights if dtype in ("bf16", "fp16")]
    found = ", ".join(counts)
    found += f", from weights that {seen.engine} holds in {low[0]}" if low else ""
    found += f"; not called: {format_names(fp32.idle)}" if fp32.idle else ""
    advice = ""
    if fp32.bypassed:
        advice = (
            f"Other code multiplies by the weight of {format_names(fp32.bypassed)}, in the dtype of autocast there: "
            "call the module, or multiply inside of `autocast(enabled=False)`"
        )
    return [Row(name, found, asked, Verdict.of(not set(fp32.computed) - {"fp32", "fp64"}), advice=advice)]


def tf32(seen: Observed, plan: Plan) -> list[Row]:
    """Compare torch's switches for matmuls of FP32 matrices."""
    asked = plan.policy.tf32
    if asked and seen.device == "cpu":
        return [Row("tf32", NO_TF32, "on", Verdict.WRONG)]
    if asked is None or not seen.fp32_switches:
        return []
    found, same = switches.compare(seen.fp32_switches, asked)
    advice = "The script, or a library, has set it after mpguard: remove that"
    return [Row("tf32", found, "on" if asked else "off", Verdict.of(same), advice=advice)]
