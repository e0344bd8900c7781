from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    All,
    Any,
    Bad,
    Condition,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Flag,
    Good,
    Note,
    Region,
    Rule,
    any_of,
    bfloat16_region,
    constant,
    dotted,
    enabled_argument,
    lazy_pattern,
    python_edits,
)

_BF16 = lazy_pattern(r"(?i)(?:use_|is_|with_|torch\.)?(?:bf16|bfloat16)(?:[-_]mixed|_enabled)?")
_IS_FP16 = lazy_pattern(r"(?i)(?:use_|is_|with_|torch\.)?(?:fp16|float16|half)(?:[-_]mixed|_enabled)?")
#: Conditions on FP16: the scaler is meant for that branch.
_FP16 = lazy_pattern(r"(?i)fp16|float16|half|dtype|precision|\b16")


_SHARED_CRITERION = {
    "pyproject.toml": "",
    "elsewhere.py": "import torch\n"
    "\n"
    "class Criterion(torch.nn.Module):\n"
    "    def forward(self, outputs, targets):\n"
    "        return (outputs - targets).pow(2).mean()\n",
    "with_fp16.py": "import torch\n"
    "from elsewhere import Criterion\n"
    "\n"
    "def train(model, optimizer, loader):\n"
    "    criterion = Criterion()\n"
    '    scaler = torch.amp.GradScaler("cuda")\n'
    "    for x, y in loader:\n"
    '        with torch.autocast("cuda", dtype=torch.float16):\n'
    "            loss = criterion(model(x), y)\n"
    "        scaler.scale(loss).backward()\n"
    "        scaler.step(optimizer)\n"
    "        scaler.update()\n",
}


_USERS_OF_THE_CLASS = {
    "pyproject.toml": "",
    "train.py": "from trainer import Trainer\n"
    "\n"
    "def train(model, optimizer, loader):\n"
    "    trainer = Trainer(model, optimizer)\n"
    "    for x in loader:\n"
    "        trainer.step(x)\n"
    "        trainer.optimizer.zero_grad()\n"
    "    loss.backward()\n",
    "show.py": "import torch\n"
    "from trainer import Trainer\n"
    "\n"
    "def show(model, x, target_scaler):\n"
    "    return target_scaler(Trainer(model, None).model(x)).backward()\n",
    "predict.py": "import torch\n"
    "from trainer import Trainer\n"
    "\n"
    "def predict(model, x, target_scaler):\n"
    "    return target_scaler(Trainer(model, None).model(x))\n",
}


class ScalerWithBfloat16(Rule):
    """A GradScaler scales the losses of a BF16 run.

    ## What it does
    Reports a GradScaler whose `enabled` argument is true for BF16 (`enabled=dtype in ("float16", "bfloat16")`), and one
    that is active while the loss that it scales is computed under a BF16 autocast, and never under an FP16 one.

    ## Why is this bad
    BF16 has the exponent range of FP32: its gradients don't underflow, and nothing needs scaling. The scaler still
    costs a pass over all gradients and a synchronization with the GPU at each step, takes fewer steps (it skips those
    whose scaled gradients overflow, while it searches for a scale), and doubles the scale every 2000 steps until it
    overflows again. Code that reads or clips gradients has to unscale them unnecessarily.

    ## Fix safety
    Unsafe: the fix disables the scaler (`enabled=False`), or restricts its condition to FP16. The run then takes the
    steps that were skipped.

    ## Known limits
    Silent if the dtype of a region is unknown, if the scaler's `enabled` depends on FP16, and for a loss that comes
    from outside the file.
    """

    code, name = "MPG207", "scaler-with-bfloat16"
    severity = "warning"
    message = "this GradScaler is active under BF16, which needs no loss scaling"
    help = "enable the scaler for FP16 only, or remove it"
    triggers = (any_of(b"GradScaler"),)
    triggers_nearby = (any_of(b"bfloat16", b"bf16", b"BF16"),)
    examples = (
        Good(
            """\
import torch
from torch.cuda.amp import GradScaler, autocast


def train(config, model, optimizer, loader):
    dtype = None
    if config.mixed_precision == "fp16":
        dtype = torch.float16
    elif config.mixed_precision == "bf16":
        dtype = torch.bfloat16
    use_amp = dtype is not None
    scaler = GradScaler(enabled=use_amp)
    for batch in loader:
        with autocast(enabled=use_amp, dtype=dtype):
            loss = model(batch).mean()
        if dtype == torch.float16:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
""",
        ),
        Good(
            """\
import torch
from torch.cuda.amp import GradScaler, autocast

USE_BF16 = True
AMP_DTYPE = torch.bfloat16 if USE_BF16 else torch.float16


def train(model, optimizer, loader):
    scaler = GradScaler(enabled=not USE_BF16)
    for batch in loader:
        with autocast(dtype=AMP_DTYPE):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch
from torch.cuda.amp import GradScaler, autocast

USE_BF16 = True
USE_AMP = True
AMP_DTYPE = torch.bfloat16 if USE_BF16 else torch.float16


def train(model, optimizer, loader):
    scaler = GradScaler(enabled=USE_AMP and USE_BF16)  # !
    for batch in loader:
        with autocast(dtype=AMP_DTYPE):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            fixed="""\
import torch
from torch.cuda.amp import GradScaler, autocast

USE_BF16 = True
USE_AMP = True
AMP_DTYPE = torch.bfloat16 if USE_BF16 else torch.float16


def train(model, optimizer, loader):
    scaler = GradScaler(enabled=False)
    for batch in loader:
        with autocast(dtype=AMP_DTYPE):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")  # !
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            fixed="""\
import torch

scaler = torch.amp.GradScaler("cuda", enabled=False)
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        ),
        Bad(
            """\
import torch
from torch.cuda.amp import GradScaler

def train(args, dtype, model, loader, optimizer):
    scaler = GradScaler(enabled=dtype in ("bfloat16", "float16"))  # !
    other = GradScaler(1024.0, enabled=args.amp)  # !
    for x in loader:
        with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
            loss = model(x).sum()
        other.scale(loss).backward()
        with torch.autocast("cuda", dtype=getattr(torch, dtype)):
            loss = model(x).sum()
        scaler.scale(loss).backward()
""",
            fixed="""\
import torch
from torch.cuda.amp import GradScaler

def train(args, dtype, model, loader, optimizer):
    scaler = GradScaler(enabled=dtype == "float16")
    other = GradScaler(1024.0, enabled=False)
    for x in loader:
        with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
            loss = model(x).sum()
        other.scale(loss).backward()
        with torch.autocast("cuda", dtype=getattr(torch, dtype)):
            loss = model(x).sum()
        scaler.scale(loss).backward()
""",
        ),
        Bad(
            """\
import torch

class Run:
    def __init__(self, args):
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.fp16 or args.bf16)  # !
        self.always = torch.amp.GradScaler("cuda")  # !
        self.dtype = torch.bfloat16

    def forward(self, x):
        return self.model(x)

    def loss(self, x):
        with torch.autocast("cuda", dtype=self.dtype):
            out = self.forward(x)
        return out.float().mean()

    def step(self, x):
        loss = self.loss(x)
        self.always.scale(loss).backward()
        return torch.amp.GradScaler("cuda", enabled=args.bf16 and self.cuda)  # !
""",
            fixed="""\
import torch

class Run:
    def __init__(self, args):
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
        self.always = torch.amp.GradScaler("cuda", enabled=False)
        self.dtype = torch.bfloat16

    def forward(self, x):
        return self.model(x)

    def loss(self, x):
        with torch.autocast("cuda", dtype=self.dtype):
            out = self.forward(x)
        return out.float().mean()

    def step(self, x):
        loss = self.loss(x)
        self.always.scale(loss).backward()
        return torch.amp.GradScaler("cuda", enabled=False)
""",
        ),
        Bad(
            """\
import torch

class Run:
    def __init__(self, config):
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.dtype]
        self.amp = self.dtype in [torch.bfloat16, torch.float16]
        self.context = torch.amp.autocast("cuda", dtype=self.dtype, enabled=self.amp)
        self.scaler = torch.amp.GradScaler(enabled=self.amp)  # !
"""
        ),
        Bad(
            """\
import torch

def build(dtype):
    return torch.amp.GradScaler("cuda", enabled=dtype in (torch.bfloat16, torch.float16))  # !
""",
            fixed="""\
import torch

def build(dtype):
    return torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
""",
        ),
        Good(
            """\
import torch

try:
    grad_scaler, autocast = torch.GradScaler, torch.autocast
except AttributeError:

    def grad_scaler(**kwargs):
        if torch.cuda.is_available():
            return torch.cuda.amp.GradScaler(**kwargs)
        return torch.cuda.amp.GradScaler(**kwargs)

    def autocast(device_type=None, **kwargs):
        if torch.cuda.is_available():
            return torch.cuda.amp.autocast(**kwargs)
        return torch.cpu.amp.autocast(**kwargs)

class Run:
    def epoch(self, loader):
        scaler = grad_scaler(enabled=self.scale)
        for x in loader:
            with autocast(device_type=self.device.type, enabled=self.amp):
                loss = self.model(x)
            scaler.scale(loss).backward()
"""
        ),
        Good(
            """\
import torch

class NativeScaler:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer):
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
""",
            name="utils.py",
            files={
                "pyproject.toml": "",
                "pretrain.py": "import torch\nfrom utils import NativeScaler\n\ndef train(model, optimizer, loader):\n"
                "    scaler = NativeScaler()\n    for x in loader:\n        with torch.autocast('cuda'):\n"
                "            loss = model(x)\n        scaler(loss, optimizer)\n",
                "finetune.py": "import torch\nfrom utils import NativeScaler\n\ndef train(model, optimizer, loader):\n"
                "    scaler = NativeScaler()\n    for x in loader:\n"
                "        with torch.autocast('cuda', dtype=torch.bfloat16):\n            loss = model(x)\n"
                "        scaler(loss, optimizer)\n",
            },
        ),
        Good(
            """\
import torch

class Run:
    def __init__(self, dtype):
        self.amp = dtype in [torch.bfloat16, torch.float16]
        self.scaler = torch.amp.GradScaler(enabled=self.amp and dtype is not torch.bfloat16)
        self.other = torch.amp.GradScaler(enabled=dtype in [torch.float16])
"""
        ),
        Good(
            """\
import torch

def train(args, model, loader, optimizer):
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for x in loader:
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x).sum()
        scaler.scale(loss).backward()

def both(args, model, loader, optimizer):
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x).sum()
        scaler.scale(loss).backward()

def tied(args, model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "fp16")
    off = torch.amp.GradScaler("cuda", enabled=False)
    not_bf16 = torch.amp.GradScaler("cuda", enabled=not args.bf16)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        off.scale(loss).backward()

def unknown(args, model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            teacher(x)

def arms(args, model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        if args.bf16:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                model(x).sum().backward()
        else:
            with torch.autocast("cuda"):
                loss = model(x).sum()
            scaler.scale(loss).backward()

def from_outside(loss):
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(loss).backward()
"""
        ),
        Bad(
            """\
import torch
from elsewhere import Criterion

def train(model, optimizer, loader):
    criterion = Criterion()
    scaler = torch.amp.GradScaler("cuda")  # !
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            files=_SHARED_CRITERION,
            fixed="""\
import torch
from elsewhere import Criterion

def train(model, optimizer, loader):
    criterion = Criterion()
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch
from elsewhere import Criterion

def train(model, optimizer, loader):
    criterion = Criterion()
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            files=_SHARED_CRITERION,
        ),
        Bad(
            """\
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")  # !

    def step(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
            files=_USERS_OF_THE_CLASS,
            name="trainer.py",
            fixed="""\
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)

    def step(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
        ),
        Good(
            """\
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
            files=_USERS_OF_THE_CLASS,
            name="trainer.py",
        ),
        Good(
            """\
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()
        needs_update = False  # (step + 1) % 4 == 0
        scaler.scale(loss).backward()
        if needs_update:
            scaler.step(optimizer)
            scaler.update()
""",
        ),
        Bad(
            """\
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")  # !
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()
        needs_update = (step + 1) % 4 == 0
        scaler.scale(loss).backward()
        if needs_update:
            scaler.step(optimizer)
            scaler.update()
""",
            fixed="""\
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()
        needs_update = (step + 1) % 4 == 0
        scaler.scale(loss).backward()
        if needs_update:
            scaler.step(optimizer)
            scaler.update()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        steps = facts.events("scaler_step")
        if steps and not any(each.guard.possible for each in steps):
            return  # a constant keeps all steps off
        for scaler in facts.events("scaler"):
            path = facts.called_path(scaler.call)
            if path.rsplit(".", 1)[-1] not in ("GradScaler", "ShardedGradScaler") or not path.startswith("torch."):
                continue
            given, enabled = enabled_argument(scaler.call, path), facts.enabled(scaler.call, path)
            bf16_flags = [
                flag for condition in enabled for flag in _bf16_flags(condition) if enabled.given(flag).possible
            ]
            if bf16_flags and _scales_float16_only(scaler, facts):
                continue
            if bf16_flags:
                alone = any(flag in enabled for flag in bf16_flags)
                fix = self._off(given, scaler, facts) if alone else self._condition(given, scaler, facts)
                yield self.at(scaler, fix=fix)
            elif enabled.possible and not any(_FP16.search(flag) for flag in enabled.flags()):
                region = bfloat16_region(scaler, enabled, facts)
                if region is not None and region.call is not None and not _inactive(scaler, region):
                    notes = (Note("the BF16 region", region.call.span, facts.elsewhere(region.call)),)
                    yield self.at(scaler, notes=notes, fix=self._off(given, scaler, facts))

    def _off(self, given: cst.BaseExpression | None, scaler: Event, facts: Facts) -> Fix:
        if given is None:
            edit = python_edits.with_argument(facts, scaler.call, "enabled=False")
        else:
            edit = python_edits.replaced(given, scaler.call, "False")
        return Fix("Switch the scaler off", "unsafe", (edit,))

    def _condition(self, given: cst.BaseExpression | None, scaler: Event, facts: Facts) -> Fix | None:
        """Return the fix of a condition: `dtype in ("float16", "bfloat16")` becomes `dtype == "float16"`."""
        if isinstance(given, cst.BooleanOperation):
            sides = (given.left, given.right)
            kept = [each for each in sides if not _BF16.fullmatch(dotted(each).rpartition(".")[2])]
            text = facts.text(kept[0], scaler.call) if len(kept) == 1 else None
        elif isinstance(given, cst.Comparison) and isinstance(given.comparisons[0].comparator, (cst.Tuple, cst.List)):
            elements = [element.value for element in given.comparisons[0].comparator.elements]
            kept = [each for each in elements if not _BF16.fullmatch(str((constant(each) or (dotted(each),))[0]))]
            left = facts.text(given.left, scaler.call)
            text = f"{left} == {facts.text(kept[0], scaler.call)}" if len(kept) == 1 else None
        else:
            text = None
        if text is None or given is None:
            return None
        return Fix("Enable it for FP16 only", "unsafe", (python_edits.replaced(given, scaler.call, text),))


def _scales_float16_only(scaler: Event, facts: Facts) -> bool:
    """True if each use of a scaler is in a branch for FP16: that it is enabled for BF16 changes nothing."""
    scales = facts.events_around("scale", scaler.scope)
    return bool(scales) and all(
        any(isinstance(each, Flag) and _IS_FP16.fullmatch(str(each.equals or each.name)) for each in scale.guard)
        for scale in scales
    )


def _inactive(scaler: Event, region: Region) -> bool:
    """True if the region is for the CPU and the scaler for a GPU: torch disables the scaler then."""
    return region.device == "cpu" and constant(scaler.call.argument(0, "device")) != ("cpu",)


def _bf16_flags(condition: Condition) -> Iterator[Flag]:
    """Yield the BF16 flags of a condition."""
    if isinstance(condition, Flag):
        if _BF16.fullmatch(condition.name if condition.equals is None else str(condition.equals)):
            yield condition
    elif isinstance(condition, (All, Any)):
        for part in condition.parts:
            yield from _bf16_flags(part)
