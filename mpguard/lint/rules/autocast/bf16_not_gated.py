from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Dtype, Event, Facts, Good, Rule, any_of, lazy_pattern

#: Code that checks the hardware, or names that refer to such a check.
_GATES = lazy_pattern(
    r"(?i)bf16_?(?:is_)?(?:supported|available|ok|ready)|(?:is|has|supports?|can)_\w*(?:bf16|bfloat16)|capability|"
    r"get_device_properties|is_torch_bf16|sm_\d\d|ampere|compute_cap"
)
_CHOICE = lazy_pattern(r"(?i)bf16|bfloat16|dtype|precision")


class Bf16NotGated(Rule):
    """A script offers BF16 as an option but does not check that the GPU supports it.

    ## What it does
    Reports the first CUDA autocast whose dtype is BF16 under one value of an option and another dtype under the others,
    in a file that calls neither `torch.cuda.is_bf16_supported()` nor reads the device's capability.

    ## Why is this bad
    GPUs before Ampere (compute capability 8.0: V100, T4, RTX 20) have no tensor cores for BF16. torch emulates BF16
    there without a warning: `is_bf16_supported()` returns True unless it is called with `including_emulation=False`.

    ## Known limits
    Preview: many scripts are written for one machine whose GPUs are known. A check in another file is not seen.
    """

    code, name = "MPG308", "bf16-not-gated"
    severity = "info"
    preview = True
    message = "BF16 is an option here, and nothing checks that the GPU supports it"
    help = "check `torch.cuda.is_bf16_supported(including_emulation=False)` first"
    triggers = (any_of(b"autocast(", b"autocast as"), any_of(b"torch.bfloat16", b"bfloat16"))
    examples = (
        Bad(
            """\
import torch

dtype = torch.bfloat16 if args.bf16 else torch.float16
with torch.autocast("cuda", dtype=dtype):  # !
    loss = model(x)
"""
        ),
        Bad(
            """\
import torch

def train(args, x):
    if args.precision == "bf16":
        with torch.autocast("cuda", dtype=torch.bfloat16):  # !
            return model(x)
    return model(x)
"""
        ),
        Good(
            """\
import torch

dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
with torch.autocast("cuda", dtype=dtype):
    loss = model(x)
"""
        ),
        Good(
            """\
import torch

with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(x)
for dtype in (torch.float16, torch.bfloat16):
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x)
with torch.autocast("cpu", dtype=torch.bfloat16 if args.bf16 else torch.float16):
    loss = model(x)
with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
    loss = model(x)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if _GATES.search(facts.file_text):
            return
        for event in facts.events("autocast"):
            region = facts.autocast(event.call, facts.called_path(event.call))
            if region.device == "cuda" and self._is_option(event):
                yield self.at(event)
                return  # one option, however many regions use it

    def _is_option(self, event: Event) -> bool:
        """True if an option selects BF16 for the region."""
        low = [guard for guard, dtype in event.dtypes if dtype is Dtype.BF16]
        others = {dtype for _, dtype in event.dtypes} - {Dtype.BF16, None}
        if others and any(low):  # under a flag, and not one after the other as in a test's loop
            return True
        flags = set().union(*(event.guard.joined(guard).flags() for guard in low)) if low else set()
        return any(_CHOICE.search(flag) for flag in flags)
