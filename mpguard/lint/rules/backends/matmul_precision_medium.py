from __future__ import annotations

import re
from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, Rule, any_of, backends

#: Code that lowers its precision in the open claims no FP32.
_OPEN = re.compile(r"(?i)autocast|bf16|bfloat16|fp16|float16|mixed")


class MatmulPrecisionMedium(Rule):
    """`torch.set_float32_matmul_precision("medium")` lets FP32 matrix products be computed in BF16.

    ## What it does
    Reports the setting `"medium"`, as a literal or through a name.

    ## Why is this bad
    "medium" allows BF16 inside FP32 products wherever a backend has such a kernel: 8 significant bits where the code
    says 24. On a CPU with BF16 instructions it is used (oneDNN); CUDA today does the same as for "high", TF32 with 11
    bits, and may change. What is meant is nearly always "high": the same speed on CUDA, and what it says.

    ## Known limits
    A value from an option is unknown. Silent in files that speak of FP16, BF16 or autocast themselves: what they lower
    in the open, the switch does not hide.
    """

    code, name = "MPG704", "matmul-precision-medium"
    severity = "warning"
    message = '`set_float32_matmul_precision("medium")` allows BF16 inside FP32 matrix products'
    help = 'Use "high" (TF32), or autocast to BF16 in the open'
    triggers = (any_of(b"set_float32_matmul_precision"), any_of(b"medium"))
    examples = (
        Bad(
            """\
import torch

torch.set_float32_matmul_precision("medium")  # !
"""
        ),
        Bad(
            """\
from torch import set_float32_matmul_precision as precision
import torch as th

SETTING = "medium"

def main():
    th.set_float32_matmul_precision(precision=SETTING)  # !
"""
        ),
        Good(
            """\
import torch

def main(args, trainer):
    torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision(args.precision)
    trainer.set_float32_matmul_precision("medium")
"""
        ),
        Good(
            """\
import torch
from lightning import Trainer

torch.set_float32_matmul_precision("medium")
trainer = Trainer(precision="bf16-mixed")
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if _OPEN.search(facts.source.text):
            return
        for switch in backends.switches(facts):
            if switch.path == "torch.set_float32_matmul_precision" and switch.value == "medium":
                yield self.at(switch)
