from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Facts,
    Fix,
    Good,
    Note,
    Object,
    PathCondition,
    Ref,
    Rule,
    any_of,
    python_edits,
)

_FUNCTION = "torch.nn.functional.binary_cross_entropy"
_LOSSES = frozenset({"torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss"})

#: A script that sets an option after it has parsed the arguments, and its trainer.
_SCRIPT = """\
import argparse

from engine import Trainer

def main(loader):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true")
    opt = parser.parse_args()
    {}
    Trainer(opt).train(loader)
"""
_TRAINER = """\
import torch
import torch.nn.functional as F

class Trainer:
    def __init__(self, opt):
        self.opt = opt

    def train(self, loader):
        for x, y in loader:
            with torch.cuda.amp.autocast(enabled=self.opt.fp16):
                loss = F.binary_cross_entropy(x, y){}
            loss.backward()
"""


class BceUnderAutocast(Rule):
    """`binary_cross_entropy` or `BCELoss` inside a `"cuda"` autocast region.

    ## What it does
    Reports the call inside an enabled autocast for `"cuda"`: one of the same function or, if that has none, one around
    a call of the function.

    ## Why is this bad
    The call raises: "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast" (seen with
    torch 2.11 on an H100, in FP16 and BF16, for inputs of every dtype). The gradient of the logarithm near 0 and 1 does
    not fit into 16 bits. The form with logits is computed stably, and autocast runs it in FP32.

    ## Fix safety
    Unsafe. There is a fix only for `binary_cross_entropy(torch.sigmoid(x), y)`, which becomes
    `binary_cross_entropy_with_logits(x, y)`: the loss of saturated outputs changes, since `binary_cross_entropy` clamps
    the logarithm at -100.

    ## Known limits
    Calls inside `autocast("cuda", enabled=False)` with FP32 inputs are correct and not reported. CPU autocast does not
    raise (torch 2.13), nor does a `"cuda"` region around tensors on the CPU. A loss that is imported or passed in is
    unknown.
    """

    code, name = "MPG306", "bce-under-autocast"
    severity = "error"
    in_tests = True
    message = "`{call}` raises under autocast"
    help = "use the form that takes logits, or compute the loss in FP32 under autocast(enabled=False)"
    triggers = (any_of(b"BCELoss", b"binary_cross_entropy"),)
    triggers_nearby = (any_of(b"autocast"),)
    examples = (
        Bad(
            """\
import torch
import torch.nn.functional as F

with torch.autocast("cuda", dtype=torch.float16):
    loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)  # !
    loss += F.binary_cross_entropy(model(x).sigmoid(), y, reduction="sum")  # !
""",
            fixed="""\
import torch
import torch.nn.functional as F

with torch.autocast("cuda", dtype=torch.float16):
    loss = F.binary_cross_entropy_with_logits(model(x), y)
    loss += F.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
""",
        ),
        Bad(
            """\
import torch
from torch import nn
from torch.cuda.amp import autocast
from torch.nn.functional import binary_cross_entropy

class Run:
    def __init__(self, args):
        self.criterion = nn.BCELoss() if args.probabilities else nn.BCEWithLogitsLoss()

    def loss(self, out, y):
        return self.criterion(out, y)  # !

    def step(self, args, x, y):
        loss_fn = torch.nn.BCELoss(reduction="none")
        with autocast(enabled=args.amp):
            out = self.model(x)
            aux = loss_fn(out, y)  # !
            with torch.autocast("cuda", enabled=False):
                aux = loss_fn(out.float(), y.float())
            return self.loss(out, y) + aux

@autocast()
def forward(x, y):
    return binary_cross_entropy(x, y)  # !
"""
        ),
        Good(
            """\
import torch
import torch.nn.functional as F
from torch.cuda.amp import autocast
from project import BCELoss, full_precision_amp

bce, logits = torch.nn.BCELoss(), torch.nn.BCEWithLogitsLoss()
other = BCELoss()

def train(args, x, y, device):
    with torch.autocast("cuda"):
        loss = F.binary_cross_entropy_with_logits(x, y) + logits(x, y) + other(x, y)
        with torch.autocast("cuda", enabled=False):
            loss = F.binary_cross_entropy(x.float(), y)
        with full_precision_amp():
            loss += bce(x, y)
    loss += bce(x.float(), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss += bce(x, y)
    with torch.autocast(device.type):
        loss += bce(x, y)
    with autocast(enabled=args.amp):
        if args.amp:
            loss += logits(x, y)
        else:
            loss += bce(x, y)
    return helper(x, y)

def seldom(x, y, enable_autocast=False):
    with autocast(enabled=enable_autocast):
        return bce(x, y)

def helper(x, y):
    return F.binary_cross_entropy(x, y)
"""
        ),
        Bad(
            """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.loss = nn.Linear(8, 1), nn.BCELoss()

    def forward(self, x):
        return self.loss(torch.sigmoid(self.head(x[0])), x[1])  # !

def build_model():
    return Model()
""",
            files={
                "pyproject.toml": "",
                "main.py": "import torch\n\nfrom engine import fit\nfrom models import build_model\n\n"
                "model = build_model().cuda()\n"
                "fit(model, loader, torch.optim.AdamW(model.parameters()))\n",
                "engine.py": "import torch\n\ndef fit(model, loader, optimizer):\n"
                '    scaler = torch.amp.GradScaler("cuda")\n'
                "    for x in loader:\n"
                '        with torch.autocast("cuda", dtype=torch.float16):\n'
                "            loss = model(x)\n"
                "        scaler.scale(loss).backward()\n"
                "        scaler.step(optimizer)\n"
                "        scaler.update()\n",
            },
            name="models.py",
        ),
        Good(
            """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.loss = nn.Linear(8, 1), nn.BCEWithLogitsLoss()

    def forward(self, x):
        return self.loss(self.head(x[0]), x[1])

def build_model():
    return Model()
""",
            files={
                "pyproject.toml": "",
                "main.py": "import torch\n\nfrom engine import fit\nfrom models import build_model\n\n"
                "model = build_model().cuda()\n"
                "fit(model, loader, torch.optim.AdamW(model.parameters()))\n",
                "engine.py": "import torch\n\ndef fit(model, loader, optimizer):\n"
                '    scaler = torch.amp.GradScaler("cuda")\n'
                "    for x in loader:\n"
                '        with torch.autocast("cuda", dtype=torch.float16):\n'
                "            loss = model(x)\n"
                "        scaler.scale(loss).backward()\n"
                "        scaler.step(optimizer)\n"
                "        scaler.update()\n",
            },
            name="models.py",
        ),
        Good(
            _TRAINER.format(""),
            files={"pyproject.toml": "", "main.py": _SCRIPT.format("opt.fp16 = False")},
            name="engine.py",
        ),
        *(
            Bad(
                _TRAINER.format("  # !"),
                files={"pyproject.toml": "", "main.py": _SCRIPT.format(line)},
                name="engine.py",
            )
            for line in ("opt.seed = 1", "opt.fp16 = False if opt.seed else opt.fp16", "if opt.cpu: opt.fp16 = False")
        ),
        Bad(
            _TRAINER.format("  # !"),
            files={
                "pyproject.toml": "",
                "main.py": _SCRIPT.format("opt.fp16 = False"),
                "other.py": _SCRIPT.format("opt.seed = 1"),
            },
            name="engine.py",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call, guard in self._losses(facts):
            for region, inside in facts.autocasts(call):
                if region.device != "cuda" or region.call is None or facts.off_by_default(region):
                    continue
                if inside.joined(guard).possible:
                    notes = (Note("the region", region.call.span, facts.elsewhere(region.call)),)
                    yield self.at(call, call=facts.short(call.node), notes=notes, fix=self._fix(call, facts))
                    break

    def _losses(self, facts: Facts) -> Iterator[tuple[Call, PathCondition]]:
        """Yield the calls of the loss, each with the guard under which it is this loss."""
        for calls in facts.calls.values():
            for call in calls:
                for each in facts.evaluate(call.func, call):
                    atom = each.atom
                    function = isinstance(atom, Ref) and atom.path == _FUNCTION
                    if function or (isinstance(atom, Object) and atom.path in _LOSSES):
                        yield call, each.guard
                        break

    def _fix(self, call: Call, facts: Facts) -> Fix | None:
        given = call.argument(0, "input")
        sigmoid = facts.call_of(given) if isinstance(given, cst.Call) else None
        if call.name != "binary_cross_entropy" or call.receiver is None or sigmoid is None or call.starred:
            return None
        if sigmoid.name != "sigmoid" or "weight" in call.keywords:
            return None
        function = facts.called_path(sigmoid).startswith("torch.")
        logits = sigmoid.argument(0, "input") if function else sigmoid.receiver
        if logits is None or len(sigmoid.node.args) != (1 if function else 0):
            return None
        return Fix(
            "Compute it from the logits",
            "unsafe",
            (
                python_edits.after(call.func, call, "_with_logits"),
                python_edits.replaced(sigmoid.node, sigmoid, facts.text(logits, sigmoid)),
            ),
        )
