"""What several checks need: shares of matmuls and elements, and numbers and names as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch

from mpguard.nn.fp8.filters import pattern_around
from mpguard.policy.dtype import Dtype
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.observe import Computed, Observed
from mpguard.runtime.proof.products import bits

#: If more than this share of the matmuls runs in kernels whose dtype is not known, nothing is proven.
UNKNOWN_SHARE = 0.05

#: At most this share of the elements of parameters, gradients and buffers may be in a wider dtype than the policy's:
#: embeddings and norms in FP32 lose nothing.
WIDER_ELEMENTS = 0.5

#: Characters of the names in a row.
NAMES_WIDTH = 100


def updated_dtype(seen: Observed, plan: Plan) -> Dtype:
    """Return the dtype that the parameters of an optimizer have, and their gradients."""
    policy = plan.policy
    separate = policy.master_weights == "optimizer" and not seen.engine.startswith(("fsdp", "deepspeed"))
    return policy.compute_dtype if separate else policy.master_dtype


def allowed_dtypes(module: str | None, plan: Plan) -> set[str]:
    """Return the dtypes in which the matmuls of a module may run.

    module: its qualified name; None if it is not known.
    """
    policy = plan.policy
    allowed = {policy.compute_dtype.short}
    if not policy.low_precision:
        allowed |= {"fp64", "complex64", "complex128"}
    if module and pattern_around(module, policy.fp32_modules) is not None:
        allowed |= {"fp32"}
    if policy.low_bit_recipe and not (module and any(fnmatch(module, each) for each in policy.kept_out_of_fp8)):
        allowed |= {"fp8", "fp4"}
    return allowed


def products_of(seen: Observed, *, trained: bool, attention: bool = False) -> list[Computed]:
    """Return the matmuls of trained parts or of frozen ones; those of attention, or all others that have 16 bits."""
    found = [each for each in seen.computed if each.trained == trained and each.attention == attention]
    return [each for each in found if each.attention or not each.wide_only]


def by_dtype(products: Iterable[Computed]) -> dict[str, int]:
    """Return the work of matmuls by dtype; those whose dtype is not known are left out."""
    counts: dict[str, int] = {}
    for each in products:
        if each.dtype is not None:
            counts[each.dtype] = counts.get(each.dtype, 0) + each.flops
    return counts


def narrower(products: Iterable[Computed], plan: Plan) -> list[Computed]:
    """Return the matmuls in a dtype with fewer bits than the policy's, or in the other one of 16 bits."""
    asked = plan.policy.compute_dtype
    return [
        each
        for each in products
        if each.dtype is not None
        and each.dtype not in allowed_dtypes(each.module, plan)
        and (bits(each.dtype) < asked.bits or (bits(each.dtype) == asked.bits and not each.dtype.startswith("complex")))
    ]


def mostly(counts: Mapping[str, int], dtype: str) -> bool:
    """True if most elements have a dtype (see `WIDER_ELEMENTS`), and none has a narrower one.

    FP64 counts as FP32: nothing is lost, and matmuls in it are in the row compute.
    """
    total = sum(counts.values())
    fewer_bits = sum(count for other, count in counts.items() if bits(other) < bits(dtype))
    found = counts.get(dtype, 0) + (counts.get("fp64", 0) if dtype == "fp32" else 0)
    return found > total * (1 - WIDER_ELEMENTS) and fewer_bits == 0


def wider(counts: Mapping[str, int], dtype: str) -> str:
    """Return a note if most elements, or matmuls, are in FP64 where FP32 is asked for; else an empty string.

    That is no failure, because nothing is lost, and not as asked: on a GPU it takes 2 to 64 times the time.
    """
    most = dtype == "fp32" and counts.get("fp64", 0) > sum(counts.values()) * (1 - WIDER_ELEMENTS)
    return " (wider than the fp32 that is asked)" if most else ""


def reduced_by_script(seen: Observed) -> bool:
    """True if the script itself has called collectives that reduced as many elements as there are gradients."""
    return seen.engine == "none" and sum(seen.reductions.values()) >= sum(seen.gradients.values()) > 0


def part_of_model(seen: Observed) -> str:
    """Return by what this rank has a part of the model, as it seems; empty if it has none.

    It passes activations on to others, or exchanges them in functions of autograd. The ranks compare that it is so.
    """
    if seen.engine != "none":
        return ""
    return "pipeline" if seen.passed_on else "tensor parallel, by the script" if seen.activations else ""


def is_stage(seen: Observed) -> bool:
    """True if this rank seems to have a part of the model."""
    return bool(part_of_model(seen))


def is_unsynchronized(seen: Observed) -> bool:
    """True if this is one of several processes and its gradients are not reduced with those of the others."""
    return seen.world_size > 1 and seen.engine == "none" and not reduced_by_script(seen)


def name_pattern(name: str) -> str:
    """Return a pattern for a module and those of the same name in other blocks: `*wte` for `transformer.wte`.

    `*value_embeds*` for `value_embeds.3`; `head`, which is in no other module, as it is.
    """
    parts = name.split(".")
    words = [part for part in parts if not part.isdigit()]
    if not words or len(parts) == 1:
        return name
    return f"*{words[-1]}{'*' if parts[-1].isdigit() else ''}"


def format_allowance(kind: str, value: str = "") -> str:
    """Return an entry of `mpguard_allow` as YAML: `{bf16: "*wte"}`."""
    if not value:
        return kind
    plain = re.fullmatch(r"[\w./-]+( [\w./()-]+)*", value) is not None
    return f"{{{kind}: {value if plain else json.dumps(value)}}}"


def format_counts(counts: Mapping[str, int]) -> str:
    """Return `bf16`, or `bf16 98 %, fp32 2 %`."""
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    if len(ordered) == 1:
        return ordered[0][0]
    return ", ".join(f"{dtype} {format_share(count / total)}" for dtype, count in ordered)


def format_share(share: float) -> str:
    """Return `97.6 %`; `below 0.1 %` or `above 99.9 %` for what is hardly there, or hardly missing."""
    if share < 0.001:
        return "below 0.1 %"
    return "above 99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"


def format_names(names: Sequence[str], seen: Observed | None = None, most: int = 3) -> str:
    """Return `a, b, c and 4 more`; fewer names if they are long. A name without letters gets its class and model."""
    known = seen.modules if seen is not None else {}
    texts = [f"`{name}` ({known[name]})" if name in known else name for name in names[:most]]
    while len(texts) > 1 and len(", ".join(texts)) > NAMES_WIDTH:
        texts.pop()
    more = f" and {len(names) - len(texts)} more" if len(names) > len(texts) else ""
    return ", ".join(texts) + more


def format_places(products: Iterable[Computed]) -> list[str]:
    """Return the dtypes of matmuls, each with the places where they ran, the most work first."""
    places: dict[str, dict[str, None]] = {}
    for each in products:
        places.setdefault(each.dtype or "", {})[each.place] = None
    return [f"{dtype}: {format_names(list(names))}" for dtype, names in places.items()]


def format_amount(elements: int) -> str:
    """Return a number of elements with three digits and a unit: `875 k`, `1.24 B`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if elements >= size:
            return f"{elements / size:.3g} {unit}"
    return str(elements)
