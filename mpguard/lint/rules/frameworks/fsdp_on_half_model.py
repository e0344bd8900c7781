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

    ## Why it is a preview rule
    Many models under FSDP are not trained, or are references and rewards of others. Of the 6 repositories with findings
    that were not looked at before, those of 2 were right.

    ## Known limits
    Models for inference, frozen ones and bases of adapters are not reported, nor are optimizers that keep FP32 copies
    or round stochastically. Under Accelerate, whose FSDP casts trained weights up, nothing is reported. A model that is
    passed in from elsewhere is unknown.
    """

    code, name = "MPG511", "fsdp-on-half-model"
    severity = "warning"
    preview = True
    message = "`{expr}`: FSDP shards and trains {dtype} weights, without an FP32 copy"
    help = "keep the weights in FP32; `MixedPrecision(param_dtype=...)` computes in the low dtype"
    triggers = (
        any_of(b"FullyShardedDataParallel", b"fully_shard"),
        any_of(b"float16", b".half", b"import half"),
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
        Bad(
            """\
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

def two(args, loader):
    model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.bfloat16)  # !
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).loss.backward()
        optimizer.step()

class Run:
    def __init__(self, args):
        net = torch.nn.Linear(8, 8)
        if args.pure_half:
            net.half()  # !
        self.net = fully_shard(net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def run(self, x):
        self.net(x).sum().backward()
        self.optimizer.step()
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
        Good(
            """\
import torch
from peft import get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from transformers import AutoModelForCausalLM

def whole(loader):
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(model, mixed_precision=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).loss.backward()
        optimizer.step()

def up_again(loader):
    model = torch.nn.Linear(8, 8)
    model.half()
    model.float()
    model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def rounded(loader):
    from bitsandbytes.optim import AdamW8bit
    from anyprecision import AnyPrecisionAdamW

    model = FSDP(torch.nn.Linear(8, 8).to(torch.bfloat16))
    optimizer = AnyPrecisionAdamW(model.parameters(), use_kahan_summation=True)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def adapters(loader, lora):
    model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.bfloat16)
    model = FSDP(get_peft_model(model, lora))
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).loss.backward()
        optimizer.step()

def swapped(loader, args):
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    qlora.swap_for_qlora(model, args.lora, torch.bfloat16)
    model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def reference(x):
    model = FSDP(torch.nn.Linear(8, 8).to(torch.bfloat16))
    model.eval()
    with torch.no_grad():
        return model(x)
"""
        ),
        Good(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM

def to_dtype(precision):
    if precision in ("fp16", "float16"):
        return torch.float16
    elif precision in ("fp32", "float32"):
        return torch.float32
    elif precision in ("bf16", "bfloat16"):
        return torch.bfloat16
    raise ValueError(precision)

def main(config, loader):
    dtype = to_dtype(config.get("model_dtype", "fp32"))
    model = FSDP(AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import functools
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

def policy_of(module):
    layers = {type(layer) for layer in module.layers}
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)

def reward(model):
    model = model.to(torch.bfloat16)
    return FSDP(model, auto_wrap_policy=policy_of(model))

def train(model, loader):
    model = FSDP(model, auto_wrap_policy=policy_of(model))
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not facts.events("shard"):
            return
        shards = {event.call for event in facts.events("shard")}
        for dtype in HALF_DTYPES:
            for weights in facts.training_use.weights(dtype):
                shard = self._sharded(weights, shards, facts)
                if shard is not None:
                    notes = (Note("sharded here", shard.span, facts.elsewhere(shard)),)
                    yield self.at(
                        weights.event,
                        expr=facts.short(weights.event.call.node),
                        dtype=dtype.label,
                        notes=notes,
                    )

    def _sharded(self, weights: Weights, shards: set[Call], facts: Facts) -> Call | None:
        """Return the FSDP call that shards the low-precision weights, if a plain optimizer trains them."""
        optimizers = weights.training.of("optimizer")
        if not optimizers or not facts.training_use.plain_optimizers(weights.training):
            return None
        for call in weights.training.of("parallel"):
            if call in shards and compatible(weights.guard, facts.guard_of(call)):
                return call
        return None
