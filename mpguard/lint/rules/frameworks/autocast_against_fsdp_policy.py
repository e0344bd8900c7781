from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Good,
    Note,
    PathCondition,
    Region,
    Rule,
    any_of,
    compatible,
    path_condition,
    wrappers,
)


class AutocastAgainstFsdpPolicy(Rule):
    """An autocast region computes in another dtype than the FSDP policy of the model that it runs.

    ## What it does
    Reports an autocast region in FP16 or BF16 that calls a model whose FSDP policy has the other of the two as
    `param_dtype`.

    ## Why is this bad
    FSDP gathers the weights in `param_dtype`, and autocast then casts them again, for each matmul. The result
    has the region's dtype (tried with torch 2.13, FSDP1 and FSDP2). Weights rounded to BF16 are computed with in FP16
    and its range, or the reverse: the run has the rounding of one and the overflow of the other, and is slower than
    either.

    ## Fix safety
    Only the class of the other FSDP version has a fix. It is safe if both classes have the given fields: the class is
    changed, with its import. It is unsafe if fields that only FSDP1 has (`buffer_dtype`) are removed.

    ## Known limits
    Both dtypes must be literal, or that of the policy one of a table, by the value of a setting, around a region
    without a condition. Evaluation is not checked. A region around FP32 parameters (`param_dtype` not given) is
    correct.
    """

    code, name = "MPG512", "autocast-against-fsdp-policy"
    severity = "error"
    message = "autocast in {inside} around `{model}`, whose FSDP policy computes in {outside}"
    help = "remove the autocast region, or give both the same dtype"
    triggers = (
        any_of(b"FullyShardedDataParallel", b"fully_shard"),
        any_of(b"autocast"),
        any_of(b"MixedPrecision"),
    )
    examples = (
        Bad(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = FSDP(torch.nn.Linear(8, 8), mixed_precision=policy)
for x in loader:
    with torch.autocast("cuda"):  # !
        loss = model(x).sum()
    loss.backward()
"""
        ),
        Good(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

class Engine:
    def __init__(self, net, config):
        self.config = config
        dtype = PRECISIONS[config.get("param_dtype", "bf16")]
        self.net = FSDP(net, mixed_precision=MixedPrecision(param_dtype=dtype))
        self.dtype = dtype

    def train(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=self.dtype):
                loss = self.net(x).sum()
            loss.backward()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        policies = {event.call: event for event in facts.events("policy")}
        if not policies:
            return
        reported: set[Call] = set()
        for call, wrap in facts.wrappers.forwards("fsdp"):
            if facts.is_inference(call):
                continue
            found = wrappers.policy_of(wrap)
            policy = policies.get(found[0]) if found is not None else None
            for region, guard in facts.autocasts(call) if policy is not None else ():
                place = region.call
                if policy is None or place is None or place in reported or facts.of(place) is not facts:
                    continue
                if facts.is_inference(place):
                    continue
                pair = self._differ(region, policy, guard.joined(wrap.guard))
                if pair is not None:
                    reported.add(place)
                    notes = (Note("the policy is made here", policy.span), Note("called here", call.span))
                    inside, outside = pair
                    yield self.at(place, inside=inside, outside=outside, model=call.path, notes=notes)

    def _differ(self, region: Region, policy: Event, guard: PathCondition) -> tuple[str, str] | None:
        """Return the dtypes of a region and of a policy if they always differ."""
        pairs = [
            (inside, outside)
            for one, inside in region.dtypes
            for other, outside in policy.dtypes
            if compatible(guard, one, other)
        ]
        low = [
            (inside.label, outside.label)
            for inside, outside in pairs
            if isinstance(inside, Dtype) and isinstance(outside, Dtype) and {inside, outside} == set(HALF_DTYPES)
        ]
        if low and len(low) == len(pairs):
            return low[0]
        return self._chosen(region, policy) if low else None

    def _chosen(self, region: Region, policy: Event) -> tuple[str, str] | None:
        """Return the same if the value of a setting gives the policy its dtype, and the region has a fixed one."""
        literals = [dtype for guard, dtype in region.dtypes if not guard and not region.guard]
        inside = literals[0] if len(literals) == len(region.dtypes) == 1 else None
        given: dict[str, dict[object, str]] = {}
        for guard, dtype in policy.dtypes:
            for each in guard:
                if isinstance(each, path_condition.Flag) and isinstance(each.equals, str):
                    given.setdefault(each.name, {})[dtype] = each.equals
        for values in given.values():
            other = next((dtype for dtype in HALF_DTYPES if dtype is not inside and dtype in values), None)
            if isinstance(inside, Dtype) and inside in values and other is not None:
                return inside.label, f"{other.label} for the setting {values[other]!r}"
        return None
