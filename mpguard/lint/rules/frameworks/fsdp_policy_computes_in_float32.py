from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    HALF_DTYPES,
    Call,
    Diagnostic,
    Dtype,
    Facts,
    Note,
    Object,
    Rule,
    any_of,
    compatible,
)


class FsdpPolicyComputesInFloat32(Rule, form_of="MPG512"):
    """An FSDP policy for mixed precision has `param_dtype=torch.float32`: all matmuls run in FP32.

    FSDP casts the gathered parameters, and the inputs of its root, to `param_dtype` (torch 1.12 to 2.13). With FP32
    there, no matmul is in 16 bits: the run is as slow as in FP32 and takes the same memory. Only the gradients, which
    need the precision most, are reduced in 16 bits.

    Not reported: policies from a config, and programs that mention autocast.
    """

    severity = "warning"
    message = "the policy computes in FP32 and reduces gradients in {reduced}: no matmul is in 16 bits"
    help = "set `param_dtype=torch.bfloat16`, and `reduce_dtype=torch.float32` to keep the reduction exact"
    triggers = (any_of(b"FullyShardedDataParallel", b"fully_shard"), any_of(b"mixed_precision", b"mp_policy"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        shards = facts.events("shard")
        if not shards or any("autocast" in each.file_text for each in (facts, *facts.imported_modules())):
            return
        for shard in shards:
            if not facts.has_step(shard.scope) or facts.is_inference(shard.call):
                continue
            given = shard.call.argument(None, "mixed_precision", "mp_policy")
            for each in facts.evaluate(given, shard.call) if given is not None else ():
                made = each.atom.call if isinstance(each.atom, Object) else None
                reduced = _reduced(made, facts) if made is not None else None
                if made is not None and reduced is not None and compatible(each.guard, shard.guard):
                    notes = (Note("the policy is made here", made.span, facts.elsewhere(made)),)
                    yield self.at(shard, reduced=reduced.label, notes=notes)
                    break


def _reduced(policy: Call, facts: Facts) -> Dtype | None:
    """Return the low precision in which a policy with FP32 parameters reduces gradients, or None."""
    home = facts.of(policy)
    param, reduce = (policy.argument(place, name) for place, name in enumerate(("param_dtype", "reduce_dtype")))
    params = {dtype for _, dtype in home.dtypes(param, policy)} if param is not None else set()
    reduces = {dtype for _, dtype in home.dtypes(reduce, policy)} if reduce is not None else set()
    if params != {Dtype.FP32} or not reduces <= set(HALF_DTYPES) or len(reduces) != 1:
        return None
    found = reduces.pop()
    return found if isinstance(found, Dtype) else None
