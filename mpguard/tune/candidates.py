"""What `mpguard tune` tries: `TABLE`, a row per candidate. A new field of the policy is a new row.

A row is the policy of the config with some fields changed. The order is that in which they are tried first: what is
likely to be the best stands early, because it shows of others that they cannot be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mpguard.core.errors import PolicyError
from mpguard.nn import compile as compilation
from mpguard.policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table.

    fields: of the policy. base: the name of the variant that this one changes further; with `gain`, the factor by which
    it can at most be faster than that one: if even this were not enough, it is not started.
    """

    name: str
    fields: Mapping[str, Any]
    base: str = ""
    gain: float = 1.0


#: The name of the policy of the config, unchanged.
CONFIGURED = "as configured"

_BF16: Mapping[str, Any] = {"bf16": True, "fp16": False, "fp8": None, "fp4": None, "compile_mode": "default"}
_TORCHAO: Mapping[str, Any] = {"fp4": None, "backend": "torchao", "compile": True, "compile_mode": "default"}
_TE: Mapping[str, Any] = {"fp4": None, "backend": "te", "compile": False, "compile_mode": "default"}
_TENSORWISE: Mapping[str, Any] = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
_ROWWISE: Mapping[str, Any] = {"fp8": "e4m3", "fp8_recipe": "rowwise"}

#: The gains have room above what was measured on H200 (benchmarks/results/compile_auto.json): 1.52 for delayed scaling
#: on a model whose kernels wait for Python, 1.26 for tensorwise against BF16, 1.08 for compiling Transformer Engine;
#: and 1.03 for masters in the optimizer, with FP8 (benchmarks/results/fp8.json).
TABLE = (
    Variant("bf16+compile", {**_BF16, "compile": True}),
    Variant("torchao-tensorwise+compile", {**_TENSORWISE, **_TORCHAO}, "bf16+compile", 2.0),
    Variant(
        "torchao-tensorwise+compile+head+fast_accum",
        {**_TENSORWISE, **_TORCHAO, "fp8_head": True, "fp8_fast_accum": True},
        "torchao-tensorwise+compile",
        1.15,
    ),
    Variant(
        "torchao-tensorwise+compile+head+fast_accum+masters",
        {**_TENSORWISE, **_TORCHAO, "fp8_head": True, "fp8_fast_accum": True, "master_weights": "optimizer"},
        "torchao-tensorwise+compile+head+fast_accum",
        1.08,
    ),
    Variant(
        "torchao-tensorwise+compile+head",
        {**_TENSORWISE, **_TORCHAO, "fp8_head": True},
        "torchao-tensorwise+compile+head+fast_accum",
        1.03,
    ),
    Variant(  # where code of the script multiplies the head's weight, so that `fp8_head` is refused
        "torchao-tensorwise+compile+fast_accum",
        {**_TENSORWISE, **_TORCHAO, "fp8_fast_accum": True},
        "torchao-tensorwise+compile+head+fast_accum",
        1.02,
    ),
    Variant("torchao-rowwise+compile", {**_ROWWISE, **_TORCHAO}, "torchao-tensorwise+compile", 1.05),
    Variant(
        "torchao-rowwise_with_gw_hp+compile",
        {**_ROWWISE, **_TORCHAO, "fp8_recipe": "rowwise_with_gw_hp"},
        "torchao-tensorwise+compile",
        1.05,
    ),
    Variant(
        "torchao-tensorwise+compile+graphs",
        {**_TENSORWISE, **_TORCHAO, "compile_mode": "reduce-overhead"},
        "torchao-tensorwise+compile",
        1.30,
    ),
    Variant("bf16+compile+graphs", {**_BF16, "compile": True, "compile_mode": "reduce-overhead"}, "bf16+compile", 1.25),
    Variant(
        "bf16+compile+max_autotune",
        {**_BF16, "compile": True, "compile_mode": "max-autotune-no-cudagraphs"},
        "bf16+compile",
        1.05,
    ),
    Variant("bf16+compile+masters", {**_BF16, "compile": True, "master_weights": "optimizer"}, "bf16+compile", 1.10),
    Variant("bf16", {**_BF16, "compile": False}, "bf16+compile", 1.15),
    Variant("te-tensorwise", {**_TENSORWISE, **_TE}, "bf16+compile", 2.0),
    Variant("te-tensorwise+compile", {**_TENSORWISE, **_TE, "compile": True}, "te-tensorwise", 1.35),
    Variant("te-delayed", {**_TE, "fp8": "hybrid", "fp8_recipe": "delayed"}, "te-tensorwise", 1.8),
    Variant("te-blockwise", {**_TE, "fp8": "hybrid", "fp8_recipe": "blockwise"}, "te-tensorwise", 1.15),
    Variant("te-mxfp8", {**_TE, "fp8": "e4m3", "fp8_recipe": "mxfp8"}, "bf16+compile", 2.0),
)


@dataclasses.dataclass(frozen=True)
class TuneCandidate:
    """A policy to try. overrides: its fields that differ from those of the config. policy: None if it is none.

    refused: why it cannot run, as far as is known before it starts; empty if it can. cost: what a demand of the policy
    was measured to cost, where a wish for the same would be off; empty without.
    """

    name: str
    overrides: Mapping[str, Any]
    policy: Policy | None
    refused: str = ""
    base: str = ""
    gain: float = 1.0
    cost: str = ""

    @property
    def is_baseline(self) -> bool:
        """True for a policy in 16 bits or more, which FP8 has to beat."""
        return self.policy is not None and self.policy.low_bit_recipe is None


def candidates(configured: Policy) -> Iterator[TuneCandidate]:
    """Yield the candidates for a config: its own policy, then the table. Policies with one effect are one candidate."""
    seen = [_in_effect(configured)]
    names = {variant.name: variant.name for variant in TABLE}
    rows = []
    for variant in TABLE:
        candidate = _candidate(configured, variant)
        policy = None if candidate.policy is None else _in_effect(candidate.policy)
        if policy == seen[0]:
            names[variant.name] = CONFIGURED
        elif policy is None or policy not in seen:
            rows.append(candidate)
            seen += [policy] if policy is not None else []
    yield TuneCandidate(CONFIGURED, {}, configured)
    yield from (dataclasses.replace(row, base=names.get(row.base, "")) for row in rows)


def _in_effect(policy: Policy) -> Policy:
    """Return a policy with what `compile: auto` means here; a script that compiles by itself is not known."""
    return policy.replace(compile=bool(compilation.wants_compile(policy).on))


def _candidate(configured: Policy, variant: Variant) -> TuneCandidate:
    fields = {**({} if configured.low_precision else {"bf16": True}), **variant.fields}
    overrides = {name: value for name, value in fields.items() if getattr(configured, name) != value}
    try:
        policy, refused = configured.replace(**overrides), ""
    except PolicyError as error:
        policy, refused = None, str(error)
    return TuneCandidate(variant.name, overrides, policy, refused, variant.base, variant.gain)
