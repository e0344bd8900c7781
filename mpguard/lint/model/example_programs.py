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


_LOSS = "loss = torch.nn.functional.cross_entropy(model(x), y)\n"
_MEASUREMENT = """\
import time

import torch

parser = ArgumentParser()
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()
{before}model = torch.nn.Linear(8, 8).cuda()
{after}optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
x, y = torch.randn(64, 8, device="cuda"){cast}, torch.zeros(64, dtype=torch.int64, device="cuda")
total = 0
for step in range(args.num_steps):
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.zero_grad()
{loss}    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    stop = time.perf_counter()
    total += stop - start
print(f"[Benchmark] {{args.num_steps * 64 / total:.1f}} samples, {{2 * 3 * 64 * 64 * 1e-12 / total:.2f}} tflops")
"""


def speed_measurement(before: str = "", after: str = "", cast: str = "", region: str = "") -> Good:
    """Return a program that measures the speed of steps on one synthetic batch.

    before, after: lines around the one that creates the model. cast: follows the input. region: a `with` around the
    computation of the loss.
    """
    loss = f"{region}\n    {_LOSS}" if region else _LOSS
    loss = textwrap.indent(loss, "    ")
    return Good(_MEASUREMENT.format(before=before, after=after, cast=cast, loss=loss))


#: A program whose FP8 is behind an option that nothing in its project sets.
FP8_OPTION_UNUSED = Good(
    """\
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

def forward(layer, x, config):
    if not config.fp8:
        return layer(x)
    recipe = DelayedScaling(margin=0, interval=config.fp8_interval)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        return layer(x)
""",
    files={"pyproject.toml": "", "run.sh": "torchrun train.py --bf16 --transformer-impl transformer_engine\n"},
)
