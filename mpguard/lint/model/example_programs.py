"""Programs that examples of several rules have in common."""

from __future__ import annotations

import textwrap

from mpguard.lint.model.rule import Good

_CLASS = """\
import contextlib
import torch

class MixedPrecision:
    def __init__(self, activated):
        self.activated = activated
        if activated:
            self.scaler = torch.amp.GradScaler("cuda")

    def context(self):
        return torch.autocast("cuda") if self.activated else contextlib.nullcontext()

    def backward(self, loss):
        if self.activated:
{backward}
        else:
            loss.backward()

    def step(self, model, optimizer):
        if self.activated:
{step}
        else:
            optimizer.step()
"""

#: What trains with `scaler_class`, by the name of the file; the class is in `amp.py`.
SCALER_CLASS_FILES = {
    "pyproject.toml": "",
    "train.py": "import torch\nfrom amp import MixedPrecision\ndef train(model, loader, fp16):\n"
    "    optimizer = torch.optim.AdamW(model.parameters())\n    amp = MixedPrecision(fp16)\n"
    "    for x in loader:\n        with amp.context():\n            loss = model(x).sum()\n"
    "        amp.backward(loss)\n        amp.step(model, optimizer)\n",
}


def scaler_class(backward: str, *step: str) -> str:
    """Return a class that manages a scaler, with one method for the backward pass and another one for the step.

    backward, step: the statements of these methods under FP16, each without indentation.
    """
    indent = " " * 12
    return _CLASS.format(backward=indent + backward, step=textwrap.indent("\n".join(step), indent))


#: A class that scales, unscales before it clips, steps and updates: no rule about scalers reports it.
RIGHT_SCALER_CLASS = Good(
    scaler_class(
        "self.scaler.scale(loss).backward()",
        "self.scaler.unscale_(optimizer)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "self.scaler.step(optimizer)",
        "self.scaler.update()",
    ),
    files=SCALER_CLASS_FILES,
    name="amp.py",
)
