from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import HALF_DTYPES, Bad, Diagnostic, Facts, Good, Note, Rule, any_of, compatible


class DefaultDtypeHalf(Rule):
    """The default dtype is FP16 or BF16 in code that trains.

    ## What it does
    Reports `torch.set_default_dtype(torch.float16)`, `torch.set_default_tensor_type(torch.HalfTensor)` and the same
    calls with BF16 if the program runs a backward pass and steps, and nothing restores the default.

    ## Why is this bad
    Every parameter, buffer and constant that is created afterwards has that dtype: positions (`torch.arange` of floats
    without a dtype, `linspace`), running statistics, losses, the optimizer's state. The weights have no FP32 master
    copy, and `GradScaler` refuses FP16 gradients. Mixed precision keeps the default at FP32 and lets autocast, or the
    framework's policy, choose the dtype.

    ## Known limits
    Silent if the file sets the default to another dtype elsewhere (after the model is created, in a `finally`, on
    leaving a context manager), and if DeepSpeed runs the training, since it keeps FP32 masters of such parameters.
    Silent for an unknown dtype, and in a program that only measures the speed of steps on one synthetic batch.
    """

    code, name = "MPG104", "default-dtype-half"
    severity = "error"
    message = "`{expr}` makes {dtype} the dtype of everything that is created from here on, in code that trains"
    help = "leave the default at FP32 and compute in {dtype} by autocast, or set it back after the model is created"
    triggers = (
        any_of(b"set_default_dtype", b"set_default_tensor_type"),
        any_of(b"half", b"Half", b"float16", b"BFloat16"),
    )
    triggers_nearby = (any_of(b".backward(", b"Trainer", b".prepare("),)
    examples = (
        Bad(
            """\
import torch

torch.set_default_dtype(torch.bfloat16)  # !
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""
        ),
        Good(
            """\
import contextlib

import torch

@contextlib.contextmanager
def default(dtype=torch.bfloat16):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

def main(loader):
    with default():
        model = torch.nn.Linear(8, 8)
    model.float()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or facts.events("initialize"):
            return
        settings = facts.events("default_dtype")
        for event in settings:
            low = next((dtype for dtype in HALF_DTYPES if event.may_be(dtype)), None)
            if low is None or facts.is_inference(event.call):
                continue
            back = [other for other in settings if not any(map(other.may_be, HALF_DTYPES))]
            if any(compatible(event.guard, other.guard) for other in back):
                continue
            trainer = facts.optimizers.trainer_of(event.call)
            if trainer is not None:
                yield self.at(
                    event,
                    expr=facts.short(event.call.node),
                    dtype=low.label,
                    help=self.help.format(dtype=low.label),
                    notes=(Note("trained here", trainer.span, facts.elsewhere(trainer)),),
                )
