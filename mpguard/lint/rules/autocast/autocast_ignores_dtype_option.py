from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Call, Diagnostic, Facts, Fix, Note, Rule, any_of, options, python_edits


class AutocastIgnoresDtypeOption(Rule):
    """A CUDA autocast without a dtype (FP16) in a script whose own option or constant is BF16.

    ## What it does
    Reports `torch.autocast("cuda")` and `torch.cuda.amp.autocast()` without a dtype where the file's option for the
    compute dtype is BF16 and no other option is FP16. Options are argparse and click defaults, dataclass fields and
    constants that are called `dtype`, `precision`, `mixed_precision`, `amp_dtype` ... In the `backward` of an
    `autograd.Function`, an autocast without a dtype is also reported if all other regions of the file are BF16.

    ## Why is this bad
    torch's default for CUDA is FP16, whatever the script's option is. The run computes with 5 bits of exponent instead
    of 8, and gradients below 6e-8 become zero, since a script written for BF16 does not scale the loss.

    ## Fix safety
    Unsafe: the run then computes in another dtype. Where the option is text, the fix writes `torch.bfloat16`.

    ## Known limits
    Options in other files and values from config files are not seen. A region under a condition on a dtype or a
    precision is not reported.
    """

    code, name = "MPG310", "autocast-ignores-dtype-option"
    severity = "error"
    message = "`{call}` has no dtype and computes in FP16; `{option}` is BF16"
    help = "pass the dtype: `dtype=torch.bfloat16`"
    triggers = (
        any_of(b"autocast(", b"autocast as"),
        any_of(b"bfloat16", b"bf16"),
        any_of(b"dtype", b"precision", b"DTYPE"),
    )
    examples = (
        Bad(
            """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
args = parser.parse_args()
with torch.autocast("cuda", enabled=args.dtype != "float32"):  # !
    loss = model(x).sum()
""",
            fixed="""\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
args = parser.parse_args()
with torch.autocast("cuda", enabled=args.dtype != "float32", dtype=torch.bfloat16):
    loss = model(x).sum()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call, option in facts.forgotten_dtypes.items():
            notes = (Note("the option", option.span),)
            fix = self._fix(call, option, facts)
            yield self.at(call, call=facts.short(call.node), option=option.name, notes=notes, fix=fix)

    def _fix(self, call: Call, option: options.Option, facts: Facts) -> Fix | None:
        torch = python_edits.name_of_torch(facts)
        known = option.constant and option.record.scope.kind == "module" and option.record.order < call.order
        dtype = option.name if known else f"{torch}.bfloat16"
        if torch is None and not known:
            return None
        return Fix("Pass the dtype", "unsafe", (python_edits.with_argument(facts, call, f"dtype={dtype}"),))
