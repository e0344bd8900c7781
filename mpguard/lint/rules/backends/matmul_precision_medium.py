from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, Rule, any_of, backends, lazy_pattern, reachability

#: Code that lowers its precision explicitly does not rely on FP32.
_EXPLICIT = lazy_pattern(r"(?i)autocast|bf16|bfloat16|fp16|float16|mixed")


class MatmulPrecisionMedium(Rule):
    """`torch.set_float32_matmul_precision("medium")` allows BF16 inside FP32 matmuls.

    ## What it does
    Reports the setting `"medium"`, as a literal or through a name.

    ## Why is this bad
    "medium" allows BF16 inside FP32 matmuls wherever a backend has such a kernel: 8 significant bits where the code
    requests 24. A CPU with BF16 instructions uses it (oneDNN). CUDA today treats it like "high", TF32 with 11 bits, and
    this may change. "high" is nearly always what is intended: the same speed on CUDA, with defined precision.

    ## Why it is a preview rule
    It is off by default because most of what it finds loses nothing: on CUDA "medium" is TF32, as "high" (torch 2.13),
    many programs take their precision from a config or an option elsewhere, and in a convolutional network hardly
    anything is a matmul. Of 14 findings in repositories that were not looked at before, 8 were right.

    ## Known limits
    A value from an option is unknown. Files that mention FP16, BF16 or autocast are not reported: there the code lowers
    the precision explicitly. Nor is a setting at the import of a module that its project neither imports nor runs.
    """

    code, name = "MPG704", "matmul-precision-medium"
    severity = "warning"
    preview = True
    message = '`set_float32_matmul_precision("medium")` allows BF16 inside FP32 matmuls'
    help = 'Use "high" (TF32), or autocast to BF16 explicitly'
    triggers = (any_of(b"set_float32_matmul_precision"), any_of(b"medium"))
    examples = (
        Bad(
            """\
import torch

torch.set_float32_matmul_precision("medium")  # !
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
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if _EXPLICIT.search(facts.file_text):
            return
        for switch in backends.switches(facts):
            if switch.path != "torch.set_float32_matmul_precision" or switch.value != "medium":
                continue
            if switch.record.scope is not facts.module or not reachability.is_unused_module(facts):
                yield self.at(switch)
