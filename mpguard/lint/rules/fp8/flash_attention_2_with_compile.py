from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Constant, Diagnostic, Facts, Good, Note, Rule, any_of, compatible


class FlashAttention2WithCompile(Rule):
    """A model with FlashAttention 2 is compiled and runs in FP8.

    ## What it does
    Reports `attn_implementation="flash_attention_2"` of a model that the same program converts by torchao and compiles.

    ## Why is this bad
    FlashAttention 2 is a kernel that dynamo cannot trace: the graph breaks at every layer, next to the matrix products
    whose casts the compiler is meant to fuse. torch's own attention (`sdpa`) runs the same kernel on Hopper and
    compiles. axolotl's documentation of FP8 recommends it for that reason.

    ## Known limits
    Preview: newer versions of flash-attn register their kernels as operators, which compile. From which version on has
    not been measured.
    """

    code, name = "MPG412", "flash-attention-2-with-compile"
    severity = "warning"
    message = "`flash_attention_2` breaks the graph that FP8 needs compiled"
    help = 'use attn_implementation="sdpa"'
    preview = True
    triggers = (
        any_of(b"flash_attention_2"),
        any_of(b"compile"),
        any_of(b"convert_to_float8_training", b"AORecipeKwargs"),
    )
    examples = (
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("x", attn_implementation="flash_attention_2")  # !
convert_to_float8_training(model, module_filter_fn=keep)
model = torch.compile(model)
"""
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from transformers import AutoModelForCausalLM

def sdpa():
    model = AutoModelForCausalLM.from_pretrained("x", attn_implementation="sdpa")
    convert_to_float8_training(model, module_filter_fn=keep)
    return torch.compile(model)

def main(args):
    if args.fp8:
        model = AutoModelForCausalLM.from_pretrained("x", attn_implementation=args.attention)
        convert_to_float8_training(model, module_filter_fn=keep)
        return torch.compile(model)
    model = AutoModelForCausalLM.from_pretrained("x", attn_implementation="flash_attention_2")
    return model
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        conversions = [
            *facts.events("convert"),
            *(event for event in facts.events("fp8_handler") if event.call.name == "AORecipeKwargs"),
        ]
        for load in facts.events("load"):
            given = load.call.keywords.get("attn_implementation")
            atoms = [each.atom for each in facts.evaluate(given, load.call)] if given is not None else []
            if given is None or atoms != [Constant("flash_attention_2")]:
                continue
            near = facts.reachable(load.scope)
            for event in conversions:
                compiled = [
                    each
                    for each in facts.events("compile")
                    if compatible(each.guard, event.guard, load.guard) and each.scope in near
                ]
                if compiled and event.scope in near:
                    notes = (Note("converted here", event.span), Note("compiled here", compiled[0].span))
                    yield self.at(facts.span(given, load.call), notes=notes)
                    break
