from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Dtype, Facts, Good, Note, Rule, any_of, dtype_triggers

_TRANSFORMS = frozenset(f"{kind}fft{ends}" for kind in ("", "i", "r", "ir", "h", "ih") for ends in ("", "2", "n"))


class FftInHalf(Rule):
    """A Fourier transform of a tensor in FP16 or BF16, which torch does not compute.

    ## What it does
    Reports functions of `torch.fft` on a tensor that is FP16 or BF16 there: cast by hand, or the result of a matmul
    in an autocast region.

    ## Why is this bad
    Autocast leaves these functions in the dtype of their input on CUDA. BF16 raises "Unsupported dtype BFloat16". FP16
    raises "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision" for all other
    sizes, before torch 1.13 for each one; sums of many values overflow in it besides (torch 1.8 to 2.13).

    ## Known limits
    Sizes are not known: an FP16 tensor whose sizes are powers of two does not raise.
    """

    code, name = "MPG615", "fft-in-half"
    severity = "warning"
    message = "`{call}` gets {dtype}: {effect}"
    help = "transform `x.float()`, and cast the result back"
    triggers = (
        any_of(b"fft(", b"fft2(", b"fftn("),
        any_of(*dtype_triggers.CASTS_LOW_PRECISION, b"forward", b"autocast"),
    )
    triggers_nearby = (any_of(*dtype_triggers.MENTIONS_LOW_PRECISION),)
    examples = (
        Bad(
            """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(768, 768)

    def forward(self, x):
        return torch.fft.fft(self.dense(x), dim=-1).real  # !

def train(loader):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
        ),
        Good(
            """\
import torch
from torch import nn

class Mixing(nn.Module):
    def forward(self, x):
        return torch.fft.fft(torch.fft.fft(x.float(), dim=-1), dim=-2).real
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call in sorted((c for name in _TRANSFORMS for c in facts.calls.get(name, ())), key=lambda c: c.order):
            if facts.called_path(call) != f"torch.fft.{call.name}":
                continue
            states = facts.autocast_states.at(call)
            low = facts.precision.low(call.argument(0, "input"), call)
            if low is None or any(state.device == "cpu" and state.dtype != "off" for state in states):
                continue
            only_powers = low.dtype is Dtype.FP16
            effect = "it raises, unless each size is a power of two" if only_powers else "it raises"
            notes = (Note("computed here", low.origin.span, facts.elsewhere(low.origin)),) if low.origin else ()
            yield self.at(call, call=facts.short(call.func), dtype=low.label, effect=effect, notes=notes)
