from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Bad, Diagnostic, Dtype, Event, Facts, Good, Note, Rule, Scope, any_of

#: Words of a dtype. Each file with one asks for its program; `dtype)` alone is in most of transformers' models.
_DTYPES = (
    b"bfloat16", b"bf16", b"DTYPE", b"getattr(torch", b"(dtype)", b" dtype)", b"self.dtype)",
    b"cfg.dtype", b"args.dtype", b"base.weight.dtype",
    b"layer.weight.dtype", b"linear.weight.dtype", b"module.weight.dtype", b"orig.weight.dtype",
)  # fmt: skip


class NoMasterWeights(Rule):
    """All parameters are BF16 and a plain optimizer updates them.

    ## What it does
    Reports a model that is cast to BF16, or loaded in BF16, if its parameters are passed to an optimizer of torch,
    bitsandbytes or torchao that updates them in place.

    ## Why is this bad
    BF16 has 8 bits of precision: an update below 2^-9 of a weight (0.2 %) is rounded away. Adam moves a weight by about
    the learning rate; with 1e-5, no weight above 0.005 changes. Mixed precision keeps FP32 master weights: load in FP32
    and use BF16 autocast, or FSDP's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.

    ## Known limits
    Not reported where the recipe of the launch config or of the settings asks for weights that are not FP32
    (`bf16_full`).
    Silent for adapters, quantized loads and frozen models; for optimizers with stochastic rounding
    (`bf16_stochastic_round=True`), Kahan summation or FP32 masters, which are not among the recognized ones; and where
    the functions that train the model, other than those for checkpoints, mention DeepSpeed, FSDP or Megatron, whose
    optimizers may keep masters. A Trainer
    is checked if its `TrainingArguments` are in the file, or parsed by `HfArgumentParser` from launch lines in the tree
    that are fully known.
    """

    code, name = "MPG107", "no-master-weights"
    severity = "warning"
    message = "`{expr}` makes the weights {dtypes}, and a plain optimizer updates them"
    help = "keep the weights in FP32 and compute in BF16 by autocast, or use an optimizer with stochastic rounding"
    triggers = (
        any_of(*_DTYPES),
        any_of(b".bfloat16()", b"_to_bf16()", b".to(", b".type(", b"dtype"),
    )
    triggers_nearby = (
        any_of(b"bfloat16", b"bf16", b"DTYPE", b"getattr(torch"),
        any_of(b"optim", b"Trainer(", b"Trainer)"),
        any_of(b".step(", b".train("),
        any_of(b"arameters()", b"Trainer(", b"Trainer)"),
    )
    yields_to = ("MPG511",)
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).to("cuda", torch.bfloat16)  # !
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x in loader:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""
        ),
        Good(
            """\
import torch

class ShardedOptimizer:
    def __init__(self, inner):
        self.inner = inner
        for group in inner.param_groups:
            group["params"] = [p.detach().clone().float() for p in group["params"]]

    def step(self):
        self.inner.step()

def train(model, loader):
    model = model.cuda().bfloat16()
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()))
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or any(
            policy.master_dtype is not Dtype.FP32 for policy in facts.project.policies(facts.path)
        ):
            return
        reported: set[Scope | None] = set()  # classes: one finding for all parameters of a module
        for weights in facts.training_use.weights(Dtype.BF16):
            made_inside = weights.event.kind == "construct" or facts.casts.is_own_layer(weights.event)
            owner = weights.event.scope.owner if made_inside else None
            if owner is not None and owner in reported:
                continue
            optimizers = facts.optimizers.plain(weights.training) or facts.optimizers.trainers(weights.training)
            if optimizers and not (facts.master_weights.kept_for(weights) or _gets_adapters(weights.event, facts)):
                reported.add(owner)
                call = weights.event.call
                expr = facts.short(call.func if weights.event.kind == "load" else call.node)
                yield self.at(
                    weights.event,
                    expr=expr,
                    dtypes="BF16 or FP16" if weights.event.may_be(Dtype.FP16) else "BF16",
                    notes=(Note("trained with here", optimizers[0].span, facts.elsewhere(optimizers[0])),),
                )


def _gets_adapters(event: Event, facts: Facts) -> bool:
    """True if a model is an argument next to `peft_config`, in a call of whatever starts its training."""
    node = facts.parent(event.call.node)
    while node is not None and not isinstance(node, cst.BaseSmallStatement):
        call = facts.call_of(node) if isinstance(node, cst.Call) else None
        if call is not None and "peft_config" in call.keywords:
            return True
        node = facts.parent(node)
    return False
