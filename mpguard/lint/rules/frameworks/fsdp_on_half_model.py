from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import HALF_DTYPES, Bad, Call, Diagnostic, Facts, Good, Note, Rule, Weights, any_of, compatible


class FsdpOnHalfModel(Rule):
    """A model is cast to BF16 or FP16, or loaded in that dtype, before FSDP shards it.

    ## What it does
    Reports a cast or a load in a low dtype if the model is passed to `FullyShardedDataParallel` or `fully_shard`, and
    is trained.

    ## Why is this bad
    FSDP keeps its sharded copy of the weights in the dtype that they have when it is applied, and the optimizer updates
    that copy. `MixedPrecision(param_dtype=...)` casts the gathered weights for compute; beyond that, a cast of the
    model saves only memory of the shards. With BF16 shards an update below 2^-8 of a weight is lost (2^-11 in FP16),
    and the optimizer's state is low precision too.

    ## Known limits
    Models for inference, frozen ones and bases of adapters are not reported, nor are optimizers that keep FP32 copies
    or round stochastically. Under Accelerate, whose FSDP casts trained weights up, nothing is reported. A model that is
    passed in from elsewhere is unknown.
    """

    code, name = "MPG511", "fsdp-on-half-model"
    severity = "warning"
    message = "`{expr}`: FSDP shards and trains {dtype} weights, without an FP32 copy"
    help = "keep the weights in FP32; `MixedPrecision(param_dtype=...)` computes in the low dtype"
    triggers = (any_of(b"float16", b".half", b"import half"),)
    triggers_nearby = (
        any_of(b"float16", b".half", b"import half"),
        any_of(b"FullyShardedDataParallel", b"fully_shard"),
        any_of(b"optim"),
    )
    examples = (
        Bad(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

model = torch.nn.Linear(8, 8).to(torch.bfloat16)  # !
model = FSDP(model)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""
        ),
        Good(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = FSDP(torch.nn.Linear(8, 8), mixed_precision=policy)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        for dtype in HALF_DTYPES:
            for weights in facts.training_use.weights(dtype):
                shard = self._sharded(weights, facts)
                if shard is not None:
                    notes = (Note("sharded here", shard.span, facts.elsewhere(shard)),)
                    expr = facts.short(weights.event.call.node)
                    yield self.at(weights.event, expr=expr, dtype=dtype.label, notes=notes)

    def _sharded(self, weights: Weights, facts: Facts) -> Call | None:
        """Return the FSDP call that shards the low-precision weights, if a plain optimizer trains them."""
        if not facts.optimizers.plain(weights.training):
            return None
        for call in weights.training.of("parallel"):
            sharded = facts.of(call).called_path(call).endswith(("FullyShardedDataParallel", "fully_shard"))
            if sharded and compatible(weights.guard, facts.guard_of(call)):
                return call
        return None
