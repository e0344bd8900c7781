from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, Note, Rule, any_of, compatible, fp8_facts

_DDP = "torch.nn.parallel."


class Fp8DdpCompile(Rule):
    """torchao float8, DistributedDataParallel and `torch.compile` in one program.

    ## What it does
    Reports a model that is converted by torchao, compiled and wrapped in DistributedDataParallel.

    ## Why is this bad
    axolotl's documentation states that this combination raises an error, and recommends FSDP2 for FP8 instead. Newer
    versions train: torch 2.11 with torchao 0.18 on one H200 in both orders with all three recipes
    (benchmarks/results/fp8_limits.json), on two H200 through accelerate, with every parameter and the loss as in BF16
    (benchmarks/results/gpu_matrix.json), and torch 2.13 with emulation on a CPU.

    ## Known limits
    Preview, because no version that was tried fails. A conversion in another file is not seen.
    """

    code, name = "MPG410", "fp8-ddp-compile"
    severity = "error"
    message = "torchao float8 with DistributedDataParallel and compile: some versions fail"
    help = "shard with FSDP2 (`fully_shard`), or check a first step on two GPUs"
    preview = True
    triggers = (
        any_of(b"convert_to_float8_training"),
        any_of(b"DistributedDataParallel", b"DDP"),
        any_of(b"compile"),
    )
    examples = (
        Bad(
            """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torchao.float8 import convert_to_float8_training

model = torch.nn.Sequential(torch.nn.Linear(1024, 1024)).cuda()
convert_to_float8_training(model)  # !
model = DDP(torch.compile(model), device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters())
"""
        ),
        Good(
            """\
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

def build(args):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024)).cuda()
    if args.fp8:
        convert_to_float8_training(model)
        model = fully_shard(torch.compile(model))
    else:
        model = DDP(torch.compile(model))
    return model

def slow():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024)).cuda()
    convert_to_float8_training(model)
    return DDP(model)

def on_cpu():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    return DDP(torch.compile(model))
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in facts.events("convert"):
            near = facts.reachable(event.scope) - {facts.module} | {event.scope}
            wraps = [
                call
                for scope in near
                for call in scope.calls
                if any(path.startswith(_DDP) for _, path in facts.paths(call))
                and compatible(facts.guard_of(call), event.guard)
            ]
            compiled = [
                each
                for each in facts.events("compile")
                if each.scope in near and wraps and compatible(each.guard, event.guard, wraps[0].guard)
            ]
            if wraps and compiled and not fp8_facts.emulated(facts, event.call):
                notes = (Note("wrapped here", wraps[0].span), Note("compiled here", compiled[0].span))
                yield self.at(event, notes=notes)
