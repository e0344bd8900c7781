from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, HasSpan, Record, Rule, any_of, dotted, fp8_facts, lazy_pattern

#: Words of code that may select another dtype than FP32, or leave that to a framework, a config or a checkpoint.
_SELECTS = lazy_pattern(
    r"(?i)bf_?16|bfloat|fp_?16|float_?16|\bhalf\b|(?<!fp8_)(?<!\bte\.)autocast|(?<!matmul_)precision|\bamp\b"
    r"|accelerat|trainer|deepspeed|fsdp|fully_?shard|megatron|lightning|from_pretrained|_dtype\b|tensor_type|model_init"
    r"|dtype=(?!np\.|numpy\.|torch\.(?:u?int|long|bool|float32))|\.to\([^)]*dtype|torch\.load\([^)]*\)\.to"
)


class Fp8AroundFloat32(Rule):
    """FP8 layers in a program in which nothing selects BF16: all that is not a matmul in FP8 is FP32.

    ## What it does
    Reports a conversion by torchao's `convert_to_float8_training`, or a region of Transformer Engine's `autocast` or
    `fp8_autocast`, in a script that trains, if neither the script nor a module that it imports selects a low precision
    in any way.

    ## Why is this bad
    FP8 replaces the matmuls of linear layers only. Their inputs and results, attention, norms and activations,
    and what is saved for the backward pass, keep the dtype around them (torchao 0.7 to 0.18, Transformer Engine 1.0 to
    2.20). In FP32 they take twice the memory and most of the time, and attention has no fused kernel: the run is slower
    than in BF16.

    ## Known limits
    Not reported: functions that another module imports, programs with a framework, a model from a checkpoint, or any
    word for a 16-bit dtype.
    """

    code, name = "MPG418", "fp8-around-float32"
    severity = "warning"
    message = "FP8 is used for matmuls of linear layers only: everything else runs in FP32, as nothing selects BF16"
    help = 'run the forward pass in `torch.autocast("cuda", dtype=torch.bfloat16)`, or the model in BF16'
    triggers = (any_of(b"convert_to_float8_training", b"transformer_engine"), any_of(b".backward("))
    examples = (
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def main(loader):
    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.LayerNorm(4096)).cuda()
    convert_to_float8_training(model)  # !
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def main(loader):
    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.LayerNorm(4096)).cuda().bfloat16()
    convert_to_float8_training(model)
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        places: list[HasSpan] = [
            *(event for event in facts.events("convert") if facts.has_step(event.scope)),
            *(
                region.call
                for item, region in fp8_facts.entered(facts)
                if region.call and facts.has_step(item.scope) and not _runs_one_layer(item, facts)
            ),
        ]
        if not places or not facts.any_training or _may_select(facts):
            return
        if any(facts.exported(scope.name) for scope in facts.module.children):
            return
        yield self.at(places[0])


def _runs_one_layer(region: Record, facts: Facts) -> bool:
    """True if a region calls one linear layer and nothing else, as a trial of the library does: all of it is in FP8."""
    inside = [call for call in region.scope.calls if region in call.withs]
    bound = facts.bindings(dotted(inside[0].func), inside[0]) if len(inside) == 1 else []
    made = facts.call_of(bound[0].value) if len(bound) == 1 else None
    return made is not None and made.name == "Linear"


def _may_select(facts: Facts) -> bool:
    """True if a file, or a module of the tree that it imports, may select another dtype than FP32."""
    found = [facts]
    for each in found:  # which grows
        each.need_all()
        if _SELECTS.search(each.file_text):
            return True
        found += [other for other in each.imported_modules() if other not in found]
    return False
