from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Call, Diagnostic, Event, Facts, Good, Note, Rule, any_of, compatible, fp8_facts

_CHECKPOINTS = ("apply_activation_checkpointing", "checkpoint_wrapper", "gradient_checkpointing_enable")
_SELECTS = frozenset({"context_fn", "policy_fn"})


class Fp8Fsdp2CheckpointingCompile(Rule):
    """torchao float8, FSDP2, full activation checkpointing and `torch.compile` together.

    ## What it does
    Reports a conversion by torchao in a program that shards with FSDP2, recomputes whole blocks in the backward pass,
    and compiles.

    ## Why is this bad
    axolotl warns that FP8 "may be slower than BF16" with activation checkpointing under FSDP2, since the casts are
    recomputed too. This does not hold everywhere: on one H200 (torch 2.11, torchao 0.18, six blocks of width 4096, 8192
    tokens, FSDP2 on one GPU; benchmarks/results/fp8_limits.json) a compiled step with full checkpointing took 105 ms
    with float8 all-gather, 118 ms with the rowwise recipe, and 132 ms in BF16; uncompiled FP8 was slowest (200 ms).
    torchao's own numbers (+25 % on eight H100) use selective checkpointing. Measure both before you choose.

    ## Known limits
    Preview, because the measurement contradicts the claim for large layers. Selective checkpointing is not reported.
    """

    code, name = "MPG411", "fp8-fsdp2-checkpointing-compile"
    severity = "warning"
    message = "float8 with FSDP2, full activation checkpointing and compile: can be slower than BF16"
    help = "measure a step in BF16 too, or checkpoint selectively"
    preview = True
    triggers = (
        any_of(b"convert_to_float8_training"),
        any_of(b"fully_shard"),
        any_of(b"compile"),
        any_of(*(name.encode() for name in _CHECKPOINTS)),
    )
    examples = (
        Bad(
            """\
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard
from torchao.float8 import convert_to_float8_training

def parallelize(model):
    convert_to_float8_training(model)  # !
    apply_activation_checkpointing(model)
    for block in model.blocks:
        block.compile()
        fully_shard(block)
    fully_shard(model)
"""
        ),
        Good(
            """\
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torchao.float8 import convert_to_float8_training

def selective(model):
    convert_to_float8_training(model)
    for i, block in enumerate(model.blocks):
        block = checkpoint_wrapper(block, context_fn=choose)
        model.blocks[i] = torch.compile(block)
        fully_shard(block)

def one_or_the_other(model, args):
    if args.checkpoint:
        model.gradient_checkpointing_enable()
    else:
        convert_to_float8_training(model)
    model.compile()
    fully_shard(model)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        checkpoints = [
            call
            for name in _CHECKPOINTS
            for call in facts.calls.get(name, ())
            if not call.starred and not _SELECTS & set(call.keywords)
        ]
        compiled = [each.call for each in facts.events("compile")]
        for event in facts.events("convert"):
            places = [self._with(event, calls) for calls in (facts.calls.get("fully_shard", []), checkpoints, compiled)]
            if None in places or fp8_facts.emulated(facts, event.call):
                continue
            words = ("sharded here", "checkpointed here", "compiled here")
            notes = (Note(word, call.span) for word, call in zip(words, places, strict=True) if call is not None)
            yield self.at(event, notes=tuple(notes))

    def _with(self, event: Event, calls: list[Call]) -> Call | None:
        """Return the first of some calls that the program of a conversion runs."""
        facts = event.facts
        near = facts.reachable(event.scope) - {facts.module} | {event.scope}
        return next((c for c in calls if c.scope in near and compatible(facts.guard_of(c), event.guard)), None)
