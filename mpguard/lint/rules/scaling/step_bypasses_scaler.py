from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    RIGHT_SCALER_CLASS,
    SCALER_CLASS_FILES,
    All,
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Function,
    Good,
    Note,
    Object,
    PathCondition,
    Rule,
    any_of,
    compatible,
    constant,
    dotted,
    implies,
    lazy_pattern,
    negated,
    own_optimizers,
    python_edits,
    scaler_class,
    trace_facts,
)

#: Conditions on overflow: the code does by hand what the scaler would do.
_CHECKS = lazy_pattern(r"(?i)finite|inf(?![a-z])|nan(?![a-z])|overflow")


_NO_BACKWARD = frozenset({"step", "scale", "zero_grad", "update"})


_AMP_USER = {
    "pyproject.toml": "",
    "train.py": "from amp import Amp\n"
    "\n"
    "def train(model, optimizer, loader):\n"
    "    amp = Amp(True)\n"
    "    for x in loader:\n"
    "        amp.backward(model(x))\n"
    "        amp.step(optimizer)\n",
}


@dataclasses.dataclass(frozen=True)
class _Bypass:
    """A step on scaled gradients. before: the backward passes that it may follow, one per branch."""

    step: Event
    scale: Event
    before: list[Call | None]
    all_scaled: bool


class StepBypassesScaler(Rule):
    """`optimizer.step()` on gradients that a GradScaler has scaled.

    ## What it does
    Reports an optimizer's `step()` if the `backward` before it ran on `scaler.scale(loss)`.

    ## Why is this bad
    The gradients are larger than the true ones by the scale, 65536 at first. Adam hides the factor but still steps on
    infinities, SGD multiplies its step by it; and without `scaler.step` nothing skips a step whose gradients
    overflowed, nor adapts the scale.

    ## Fix safety
    Safe: `scaler.step(optimizer)` unscales and takes the intended step. `scaler.update()` is added if none follows,
    after the last of several steps, since the scaler refuses a second step without one. There is no fix for a step with
    a closure (GradScaler takes none), for one that is not a statement of its own, for one that may come without a
    backward before it (`scaler.step` raises), if an update may happen elsewhere, and if one branch of a flag does not
    scale the loss: a scaler that is enabled there would unscale gradients that were not scaled.

    ## Known limits
    If only one branch of a flag scales the loss, the step is reported if it always follows that branch. Silent if code
    between `backward` and `step` reads the scale (`get_scale`: the gradients may be unscaled by hand), and if the step
    is under a check of finiteness. `unscale_` alone is not enough: nothing then skips a step that overflowed. A
    constant scale by choice (`GradScaler(2**10)`, never stepped nor updated) before Adam without weight decay, or
    AdamW, which divides it out, is not reported, nor a step that gets the scaler (`optimizer.step(scaler=scaler)`),
    follows gradients that the code sets to a difference of weights, or is of an optimizer in the project that reads no
    gradients.
    """

    code, name = "MPG203", "step-bypasses-scaler"
    severity = "error"
    message = "`{expr}` bypasses the GradScaler that scaled its gradients"
    help = "step through the scaler, which unscales the gradients and skips the step where they overflowed"
    triggers = (any_of(b"scaler", b"Scaler"), any_of(b".scale("), any_of(b".step("))
    examples = (
        Bad(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    optimizer.step()  # !
    scaler.update()
""",
            fixed="""\
import torch

scaler = torch.amp.GradScaler("cuda")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        ),
        Bad(
            """\
import torch

class Run:
    def __init__(self, model):
        self.scaler = torch.cuda.amp.GradScaler()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(self, loss):
        scaled = self.scaler.scale(loss)
        scaled.backward()

    def run(self, losses):
        for loss in losses:
            self.backward(loss)
            self.optimizer.step()  # !
""",
            fixed="""\
import torch

class Run:
    def __init__(self, model):
        self.scaler = torch.cuda.amp.GradScaler()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(self, loss):
        scaled = self.scaler.scale(loss)
        scaled.backward()

    def run(self, losses):
        for loss in losses:
            self.backward(loss)
            self.scaler.step(self.optimizer)
            self.scaler.update()
""",
        ),
        Bad(
            """\
import torch

def train(model, other, loader):
    one = torch.optim.SGD(model.parameters(), 0.1)
    two = torch.optim.SGD(other.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(other(x)).sum()).backward()
        one.step()  # !
        two.step()  # !
""",
            fixed="""\
import torch

def train(model, other, loader):
    one = torch.optim.SGD(model.parameters(), 0.1)
    two = torch.optim.SGD(other.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(other(x)).sum()).backward()
        scaler.step(one)
        scaler.step(two)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

def train(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for x in loader:
        loss = model(x).sum()
        if args.amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        optimizer.step()  # !
""",
            fixed="""\
import torch

def train(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for x in loader:
        loss = model(x).sum()
        if args.amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

def always_on(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        loss = model(x).sum()
        if args.amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if i % args.accumulate == 0:
            optimizer.step()  # !

class Run:
    def __init__(self, model):
        self.scaler = torch.amp.GradScaler("cuda")
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run(self, loss):
        self.scaler.scale(loss).backward()
        return self.optimizer.step()  # !

def closed(model, loader):
    optimizer = torch.optim.LBFGS(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        def closure():
            loss = model(x).sum()
            scaler.scale(loss).backward()
            return loss
        optimizer.step(closure)  # !

def updated_before(model, other, loader):
    one = torch.optim.SGD(model.parameters(), 0.1)
    two = torch.optim.SGD(other.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(other(x)).sum()).backward()
        scaler.step(one)
        scaler.update()
        two.step()  # !

def skips_a_batch(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, valid in loader:
        if valid:
            scaler.scale(model(x).sum()).backward()
        optimizer.step()  # !
        optimizer.zero_grad()

def steps_more_often(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        for _ in range(2):
            optimizer.step()  # !
"""
        ),
        Bad(
            """\
import torch

class Momentum(torch.optim.Optimizer):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])

scaler = torch.amp.GradScaler("cuda")
model = torch.nn.Linear(8, 8).cuda()
rule = Momentum(model.parameters(), {"lr": 0.1})
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    rule.step()  # !
    scaler.update()
""",
            fixed="""\
import torch

class Momentum(torch.optim.Optimizer):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])

scaler = torch.amp.GradScaler("cuda")
model = torch.nn.Linear(8, 8).cuda()
rule = Momentum(model.parameters(), {"lr": 0.1})
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(rule)
    scaler.update()
""",
        ),
        Bad(
            """\
import torch

def several(model, loader):
    optimizers = [torch.optim.Adam(model.a.parameters()), torch.optim.Adam(model.b.parameters())]
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            optimizer.step()  # !
        scaler.update()
""",
            fixed="""\
import torch

def several(model, loader):
    optimizers = [torch.optim.Adam(model.a.parameters()), torch.optim.Adam(model.b.parameters())]
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch

def train(args, loader, scheduler, scaler):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).sum()
        if args.amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        scheduler.step()

def two(loader, generator_optimizer, optimizer, generator, critic):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(generator(x)).backward()
        scaler.step(generator_optimizer)
        scaler.update()
        critic(x).backward()
        optimizer.step()

def by_hand(loader, model, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        scaler.update()

def two_flags(args, loader, model, scaler=None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        loss = model(x).sum()
        if scaler is not None:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

def flagged(args, loader, model, optimizer):
    use_amp = args.fp16 and torch.cuda.is_available()
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for x in loader:
        scaler.scale(model(x)).backward()
        if not use_amp:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
"""
        ),
        Bad(
            """\
import math
import sys

import torch

def train(model, loader, optimizer, scaler, args):
    for i, x in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(x).sum()
        if not math.isfinite(loss.item()):
            sys.exit(1)
        scaler.scale(loss).backward()
        print("scale", scaler.get_scale())
        if (i + 1) % args.update_freq != 0:
            continue
        optimizer.step()  # !
        scaler.update()
""",
            fixed="""\
import math
import sys

import torch

def train(model, loader, optimizer, scaler, args):
    for i, x in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(x).sum()
        if not math.isfinite(loss.item()):
            sys.exit(1)
        scaler.scale(loss).backward()
        print("scale", scaler.get_scale())
        if (i + 1) % args.update_freq != 0:
            continue
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch
from torch.optim.lr_scheduler import _LRScheduler

class Warmup(_LRScheduler):
    def get_lr(self):
        return [0.1]

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    warmup = Warmup(optimizer)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        warmup.step()
"""
        ),
        Good(
            """\
import torch

class DividedOutByAdam:
    def __init__(self, model):
        self.optimizer = torch.optim.Adam(model.parameters(), eps=1e-15)
        self.scaler = torch.cuda.amp.GradScaler(2**10)

    def train(self, loader, model):
        for x in loader:
            self.scaler.scale(model(x).sum()).backward()
            self.optimizer.step()

class DecoupledDecay:
    def __init__(self, model):
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
        self.scaler = torch.cuda.amp.GradScaler(2**10)

    def train(self, loader, model):
        for x in loader:
            self.scaler.scale(model(x).sum()).backward()
            self.optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def main(args, model, loader):
    scaler = torch.cuda.amp.GradScaler(2**10)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=args.decay)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        optimizer.step()  # !
""",
            fixed="""\
import torch

def main(args, model, loader):
    scaler = torch.cuda.amp.GradScaler(2**10)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=args.decay)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            scaler_class("self.scaler.scale(loss).backward()", "optimizer.step()  # !", "self.scaler.update()"),
            files=SCALER_CLASS_FILES,
            name="amp.py",
            fixed=scaler_class(
                "self.scaler.scale(loss).backward()", "self.scaler.step(optimizer)", "self.scaler.update()"
            ),
        ),
        RIGHT_SCALER_CLASS,
        Good(
            """\
import torch

class Base:
    def __init__(self, config):
        self.config = config
        self.scaler = torch.amp.GradScaler("cuda") if self.config.train.use_amp else None

class Trainer(Base):
    def backward(self, loss):
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()

    def step(self, loss, optimizer):
        self.backward(loss)
        if self.config.train.use_amp:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
"""
        ),
        Bad(
            """\
import math
import torch

def train(model, optimizer, scaler, parts):
    for x in parts:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
    loss_value = loss.item()
    if not math.isfinite(loss_value):
        raise ValueError("the loss is not finite")
    optimizer.step()  # !
    scaler.update()
""",
            fixed="""\
import math
import torch

def train(model, optimizer, scaler, parts):
    for x in parts:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
    loss_value = loss.item()
    if not math.isfinite(loss_value):
        raise ValueError("the loss is not finite")
    scaler.step(optimizer)
    scaler.update()
""",
        ),
        Bad(
            """\
import torch

class Trainer:
    def __init__(self, args, model):
        self.model, self.args = model, args
        self.optim, self.scheduler = self.build(args)
        if args.fp16:
            if args.native:
                self.scaler = torch.amp.GradScaler("cuda")
            else:
                from apex import amp

                self.model, self.optim = amp.initialize(self.model, self.optim)

    def train(self, loader):
        for x in loader:
            loss = self.model(x)
            if self.args.fp16 and self.args.native:
                self.scaler.scale(loss).backward()
                self.optim.step()  # !
                self.scaler.update()
            else:
                loss.backward()
                self.optim.step()
""",
            fixed="""\
import torch

class Trainer:
    def __init__(self, args, model):
        self.model, self.args = model, args
        self.optim, self.scheduler = self.build(args)
        if args.fp16:
            if args.native:
                self.scaler = torch.amp.GradScaler("cuda")
            else:
                from apex import amp

                self.model, self.optim = amp.initialize(self.model, self.optim)

    def train(self, loader):
        for x in loader:
            loss = self.model(x)
            if self.args.fp16 and self.args.native:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optim)
                self.scaler.update()
            else:
                loss.backward()
                self.optim.step()
""",
        ),
        Good(
            """\
import torch

class Trainer:
    def __init__(self, args, model):
        self.model, self.args = model, args
        self.optim, self.scheduler = self.build(args)
        if args.fp16:
            if args.native:
                self.scaler = torch.amp.GradScaler("cuda")
            else:
                from apex import amp

                self.model, self.optim = amp.initialize(self.model, self.optim)

    def train(self, loader):
        for x in loader:
            loss = self.model(x)
            if self.args.fp16 and self.args.native:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optim)
                self.scaler.update()
            else:
                loss.backward()
                self.optim.step()
""",
        ),
        Bad(
            """\
import torch

class Noam:
    def __init__(self, params):
        self.optimizer = torch.optim.Adam(params)

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

def train(model, loader):
    optimizer = Noam(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        scaler.scale(model(x)).backward()
        storage.put_scalar("scale", scaler.get_scale())
        optimizer.step()  # !
        scaler.update()
        optimizer.zero_grad()
""",
            fixed="""\
import torch

class Noam:
    def __init__(self, params):
        self.optimizer = torch.optim.Adam(params)

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

def train(model, loader):
    optimizer = Noam(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        scaler.scale(model(x)).backward()
        storage.put_scalar("scale", scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        ),
        Good(
            """\
import torch

class Noam:
    def __init__(self, params):
        self.optimizer = torch.optim.Adam(params)

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

def train(model, loader):
    optimizer = Noam(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        scaler.scale(model(x)).backward()
        storage.put_scalar("scale", scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        ),
        Bad(
            """\
import torch

class Amp:
    def __init__(self, use_amp):
        self.use_amp = use_amp
        if self.use_amp:
            self.scaler = torch.amp.GradScaler("cuda", enabled=True)
        else:
            self.scaler = torch.amp.GradScaler("cuda", enabled=False)

    def backward(self, loss):
        if self.use_amp:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def step(self, optimizer):
        if self.use_amp:
            optimizer.step()  # !
            self.scaler.update()
        else:
            optimizer.step()

    def scale(self):
        return self.scaler.get_scale()
""",
            files=_AMP_USER,
            name="amp.py",
            fixed="""\
import torch

class Amp:
    def __init__(self, use_amp):
        self.use_amp = use_amp
        if self.use_amp:
            self.scaler = torch.amp.GradScaler("cuda", enabled=True)
        else:
            self.scaler = torch.amp.GradScaler("cuda", enabled=False)

    def backward(self, loss):
        if self.use_amp:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def step(self, optimizer):
        if self.use_amp:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def scale(self):
        return self.scaler.get_scale()
""",
        ),
        Good(
            """\
import torch

class Amp:
    def __init__(self, use_amp):
        self.use_amp = use_amp
        if self.use_amp:
            self.scaler = torch.amp.GradScaler("cuda", enabled=True)
        else:
            self.scaler = torch.amp.GradScaler("cuda", enabled=False)

    def backward(self, loss):
        if self.use_amp:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def step(self, optimizer):
        if self.use_amp:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def scale(self):
        return self.scaler.get_scale()
""",
            files=_AMP_USER,
            name="amp.py",
        ),
        Bad(
            """\
import torch

def train(args, attack, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        if args.adversarial:
            attack(model, x).backward()
        if (i + 1) % args.accumulation_steps == 0:
            optimizer.step()  # !
            optimizer.zero_grad()
""",
            fixed="""\
import torch

def train(args, attack, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        if args.adversarial:
            attack(model, x).backward()
        if (i + 1) % args.accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        ),
        Good(
            """\
import torch

def train(args, attack, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        if args.adversarial:
            attack(model, x).backward()
        if (i + 1) % args.accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        ),
        Good(
            """\
import torch

class Averages(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["sum"] / self.state[p]["count"]

def step(optimizer, scaler, loss):
    scaler.scale(loss).backward()
    if isinstance(optimizer, Averages):
        optimizer.step()
    else:
        scaler.step(optimizer)
    scaler.update()

def passed(model, optimizer, losses):
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer.inner)
        optimizer.step(scaler=scaler)
        scaler.update()

def pseudo_gradients(model, inner, outer_optimizer, kept, losses):
    scaler = torch.amp.GradScaler("cuda")
    for i, loss in enumerate(losses):
        scaler.scale(loss).backward()
        scaler.step(inner)
        scaler.update()
        if i % 500 == 0:
            for old, param in zip(kept, model.parameters()):
                param.grad = old.data - param.data
            outer_optimizer.step()
"""
        ),
        Bad(
            """\
import torch

class Momentum(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= p.grad

def step(optimizer, scaler, loss):
    scaler.scale(loss).backward()
    if isinstance(optimizer, Momentum):
        optimizer.step()  # !
    else:
        scaler.step(optimizer)
    scaler.update()

def decayed(model, optimizer, losses):
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        scaler.scale(loss).backward()
        for param in model.parameters():
            param.grad = param.grad - param.grad.mean()
        optimizer.step()  # !
""",
            fixed="""\
import torch

class Momentum(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= p.grad

def step(optimizer, scaler, loss):
    scaler.scale(loss).backward()
    if isinstance(optimizer, Momentum):
        scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    scaler.update()

def decayed(model, optimizer, losses):
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        scaler.scale(loss).backward()
        for param in model.parameters():
            param.grad = param.grad - param.grad.mean()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch
from project.optimizers import build_optimizer

class AmpOptimizer:
    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

def train(model, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = AmpOptimizer(torch.optim.AdamW(model.parameters()), scaler)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        optimizer.step()

def train_from_config(config, model, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = build_optimizer(config, model, scaler)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        optimizer.step()

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def train(self, loader):
        for x in loader:
            loss = self.model(x).sum()
            if self.optimizer.grad_scaler is not None:
                self.optimizer.grad_scaler.scale(loss).backward()
            else:
                loss.backward()
            self.optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def build_optimizer(args, model):
    return torch.optim.SGD(model.parameters(), 0.1)

def train(args, model, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = build_optimizer(args, model)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        optimizer.step()  # !
""",
            fixed="""\
import torch

def build_optimizer(args, model):
    return torch.optim.SGD(model.parameters(), 0.1)

def train(args, model, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = build_optimizer(args, model)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch
from elsewhere import Base

class Trainer(Base):
    def create_scaler(self):
        self.scaler = torch.amp.GradScaler("cuda") if self.fp16 else None

    def backward(self, x):
        loss = self.model(x)
        if self.fp16:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        return loss

    def train(self, loader):
        for x in loader:
            self.backward(x)
            if self.fp16:
                self.optimizer.step()  # !
                self.scaler.update()
            else:
                self.optimizer.step()
""",
            fixed="""\
import torch
from elsewhere import Base

class Trainer(Base):
    def create_scaler(self):
        self.scaler = torch.amp.GradScaler("cuda") if self.fp16 else None

    def backward(self, x):
        loss = self.model(x)
        if self.fp16:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        return loss

    def train(self, loader):
        for x in loader:
            self.backward(x)
            if self.fp16:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
""",
        ),
        Good(
            """\
import torch
from elsewhere import Base

class Trainer(Base):
    def create_scaler(self):
        self.scaler = torch.amp.GradScaler("cuda") if self.fp16 else None

    def backward(self, x):
        loss = self.model(x)
        if self.fp16:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        return loss

    def train(self, loader):
        for x in loader:
            self.backward(x)
            if self.fp16:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from elsewhere import load

def train(path, model, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    if path:
        model, optimizer, scaler = load(path, model, optimizer, scaler)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        optimizer.step()  # !
        scaler.update()
""",
            fixed="""\
import torch
from elsewhere import load

def train(path, model, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    if path:
        model, optimizer, scaler = load(path, model, optimizer, scaler)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

class Trainer:
    def __init__(self, model, fp16):
        self.model, self.fp16 = model, fp16
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.fp16)

    def step(self, x):
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not torch.isfinite(norm) and not self.fp16:
            raise FloatingPointError
        self.optimizer.step()  # !
        self.scaler.update()
""",
            fixed="""\
import torch

class Trainer:
    def __init__(self, model, fp16):
        self.model, self.fp16 = model, fp16
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.fp16)

    def step(self, x):
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not torch.isfinite(norm) and not self.fp16:
            raise FloatingPointError
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
        ),
        Good(
            """\
import torch

class Trainer:
    def __init__(self, model, fp16):
        self.model, self.fp16 = model, fp16
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.fp16)

    def step(self, x):
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            self.scaler.update()
            return
        self.optimizer.step()
        self.scaler.update()
""",
        ),
        Bad(
            """\
import deepspeed
import torch
from elsewhere import build_optimizer

def wrap(args, model, optimizer):
    if args.deepspeed:
        model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer)
    return model, optimizer

def train(args, model, loader):
    model, optimizer = wrap(args, model, build_optimizer(args, model))
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        loss = model(x).sum()
        if args.deepspeed:
            model.backward(loss)
            model.step()
        else:
            scaler.scale(loss).backward()
            optimizer.step()  # !
            scaler.update()
""",
            fixed="""\
import deepspeed
import torch
from elsewhere import build_optimizer

def wrap(args, model, optimizer):
    if args.deepspeed:
        model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer)
    return model, optimizer

def train(args, model, loader):
    model, optimizer = wrap(args, model, build_optimizer(args, model))
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        loss = model(x).sum()
        if args.deepspeed:
            model.backward(loss)
            model.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
        ),
        Bad(
            """\
import torch

def main(args, model, loader):
    if args.infer:
        return
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).sum()
        if torch.isfinite(loss):
            scaler.scale(loss).backward()
            if not args.infer:
                optimizer.step()  # !
            scaler.update()
""",
            fixed="""\
import torch

def main(args, model, loader):
    if args.infer:
        return
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).sum()
        if torch.isfinite(loss):
            scaler.scale(loss).backward()
            if not args.infer:
                scaler.step(optimizer)
            scaler.update()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        scaled = facts.traces.scaled
        if not scaled:
            return
        backwards = {event.call: event for event in facts.events("backward")}
        found = [
            bypass
            for step in facts.events("step")
            if (bypass := self._bypass(step, self._before(step, backwards, facts), scaled, facts)) is not None
        ]
        for bypass in found:
            notes = (Note("the loss is scaled here", bypass.scale.span),)
            fix = self._fix(bypass, found, facts)
            yield self.at(bypass.step, expr=facts.short(bypass.step.call.node), notes=notes, fix=fix)

    def _bypass(
        self, step: Event, before: list[Call | None], scaled: dict[Call, Event], facts: Facts
    ) -> _Bypass | None:
        """Return the step with the scaled backward before it; None if it applies other gradients."""
        for place, backward in enumerate(before):
            if backward not in scaled or backward is None or self._by_hand(backward, step, scaled[backward], facts):
                continue
            if self._constant(scaled[backward], step, facts):
                continue
            if place and not self._surely_after(backward, step):
                continue
            if self._gets_scaler(step, facts) or self._sets_gradients(backward, step, facts):
                continue
            scale = scaled[backward]
            if own_optimizers.ignores_gradients(step, facts):
                continue
            if own_optimizers.steps_through_scaler(step, scale.subject, facts):
                continue
            if compatible(step.guard, facts.guard_of(backward), facts.traces.enabled(scale.subject, scale.call)):
                return _Bypass(step, scale, before, all(each in scaled for each in before))
        return None

    def _gets_scaler(self, step: Event, facts: Facts) -> bool:
        """True for an optimizer with a `step` of its own that takes the scaler: `optimizer.step(scaler=scaler)`."""
        return any(
            "scaler" in facts.kinds(arg.value, step.call) or "scaler" in facts.short(arg.value).lower()
            for arg in step.call.node.args
        )

    def _sets_gradients(self, backward: Call, step: Event, facts: Facts) -> bool:
        """True if the code sets the gradients after the backward pass, from other values than gradients."""
        return any(
            key.endswith(".grad") and bound.value is not None and not self._from_gradients(bound.value, facts)
            for key, bindings in step.scope.bindings.items()
            for bound in bindings
            if (bound.scope is not backward.scope or backward.order < bound.order)
            and bound.order < step.order
            and implies(step.guard, bound.guard)
        )

    def _from_gradients(self, value: cst.BaseExpression, facts: Facts) -> bool:
        """True for None, and for a value that may be computed from gradients: only differences are known not to be."""
        is_difference = isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Subtract)
        return not is_difference or "grad" in facts.short(value)

    def _constant(self, scale: Event, step: Event, facts: Facts) -> bool:
        """True if the scale is a constant by choice, which Adam divides out.

        Such a scaler is created with a scale, `GradScaler(2**10)`, and neither its `step` nor `update` is called. The
        weight decay of Adam is added to the gradients, and divided with them; that of AdamW is not.
        """
        if facts.events("scaler_step") or facts.events("update"):
            return False
        scalers = [each.atom for each in facts.evaluate(scale.subject, scale.call)]
        stepped = [each.atom for each in facts.evaluate(step.subject, step.call)]
        chosen = [isinstance(atom, Object) and atom.call is not None and bool(atom.call.positional) for atom in scalers]
        adam = [isinstance(atom, Object) and atom.call is not None and _divides_out(atom.call) for atom in stepped]
        return bool(chosen and adam) and all(chosen + adam)

    def _surely_after(self, backward: Call, step: Event) -> bool:
        """True if the step follows the backward under all conditions except those of gradient accumulation."""
        more = (PathCondition([condition]).flags() for condition in step.call.guard - backward.guard)
        return all(any("%" in flag for flag in flags) for flags in more)

    def _before(self, step: Event, backwards: dict[Call, Event], facts: Facts) -> list[Call | None]:
        """Return the backward passes whose gradients the step may apply; None for an unknown one.

        They are the last one before it, in its function, in one that it calls or in its closure, and those in branches
        that exclude the last one.
        """
        found: list[Call | None] = []
        for each in facts.evaluate(step.call.argument(0, "closure"), step.call) if step.call.node.args else ():
            if isinstance(each.atom, Function):
                found += [call for call in each.atom.scope.calls if call in backwards][-1:]
                return found
        without = step.guard  # that none of those found so far runs
        for call in reversed(step.scope.calls):
            if call.order >= step.order or call.name in _NO_BACKWARD or not compatible(call.guard, without):
                continue
            inner = call if call in backwards else self._inside(call, backwards, without, facts)
            if inner is None and call.name != "backward":
                continue
            found.append(inner)
            further = PathCondition(call.guard - step.call.guard)
            if not further:
                break
            without = without.given(negated(All(tuple(further))))
        return found or self._in_trace(step, facts)

    def _in_trace(self, step: Event, facts: Facts) -> list[Call | None]:
        """Return the backward passes in another method of its class that other files call before the step."""
        for trace in facts.traces.all:
            for place, each in enumerate(trace):
                if each.record is step.call:
                    found: list[Call | None] = [one.call for _, one in trace_facts.before(trace, place)]
                    if found:
                        return found
        return []

    def _inside(self, call: Call, backwards: dict[Call, Event], guard: PathCondition, facts: Facts) -> Call | None:
        for function in facts.functions(call):
            if function.facts is facts:
                calls = function.scope.calls
                inner = [each for each in calls if each in backwards and compatible(each.guard, guard)]
                if inner:
                    return inner[-1]
        return None

    def _by_hand(self, backward: Call, step: Event, scale: Event, facts: Facts) -> bool:
        """True if the gradients may be unscaled and checked by hand, or the scaler stepped in between."""
        enabled = facts.traces.enabled(scale.subject, scale.call)
        further = [each for each in step.guard - backward.guard if not implies(enabled, PathCondition([each]))]
        flags = PathCondition(further).flags()
        if any(_CHECKS.search(flag) and "loss" not in flag for flag in flags):
            return True  # a check of the gradients; one before the backward pass, or with its name, is of the loss
        for call in step.scope.calls:
            between = call.order < step.order and (call.scope is not backward.scope or backward.order < call.order)
            if between and compatible(call.guard, step.guard):
                if call.name in ("get_scale", "_unscale_grads_") and facts.traces.computes_with_scale(call):
                    return True
                if call.name == "step" and call in {event.call for event in facts.events("scaler_step")}:
                    given = call.argument(0, "optimizer")
                    if facts.short(given) == facts.short(step.subject):
                        return True
        return False

    def _fix(self, bypass: _Bypass, found: list[_Bypass], facts: Facts) -> Fix | None:
        step, scale = bypass.step, bypass.scale
        scaler = facts.short(scale.subject)
        here = scale.scope is step.scope or (scaler.startswith("self.") and scale.scope.owner is step.scope.owner)
        module = scaler in facts.module.bindings and scaler not in step.scope.bindings
        if not (here or module) or step.subject is None or not self._right_in_all_branches(bypass, facts):
            return None
        if not self._always_after_backward(bypass):
            return None
        together = [each.step for each in found if each.scale is scale and each.step.scope is step.scope]
        block = facts.parent(step.call.line)
        for each in together:
            line = each.call.line
            if each.call.node.args or not each.call.is_statement or facts.parent(line) is not block:
                return None
            if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
                return None
        edits = [
            python_edits.replaced(step.call.node, step.call, f"{scaler}.step({facts.text(step.subject, step.call)})")
        ]
        updates = [
            event
            for event in facts.events("update")
            if event.scope is step.scope or (step.scope.owner is not None and event.scope.owner is step.scope.owner)
        ]
        after = [u for u in updates if u.scope is step.scope and u.order > together[-1].order]
        if len(after) != len(updates):
            return None  # an update before the step, or in another method: its order is unknown
        if after:
            if not any(u.call.loops == _outer_loops(step) and implies(step.guard, u.guard) for u in after):
                return None
        elif _outer_loops(step) != step.call.loops:
            return None  # the update belongs after the loop over the optimizers
        elif step is together[-1]:
            edits.append(python_edits.line_after(facts, step.call.line, step.call, f"{scaler}.update()"))
        return Fix("Step through the scaler", "safe", tuple(edits))

    def _always_after_backward(self, bypass: _Bypass) -> bool:
        """True if a backward precedes each step; without new gradients `scaler.step` raises or unscales twice."""
        step, without = bypass.step, bypass.step.guard
        for backward in bypass.before:
            if backward is None or (
                backward.scope is step.scope and not set(_outer_loops(step)) <= set(backward.loops)
            ):
                return False
            conditions = PathCondition(backward.guard - step.guard)
            if not conditions:
                return True
            without = without.given(negated(All(tuple(conditions))))
        return not without.possible

    def _right_in_all_branches(self, bypass: _Bypass, facts: Facts) -> bool:
        """True if the scaler exists wherever the step runs, and is disabled where the loss is not scaled."""
        step, scale = bypass.step, bypass.scale
        if bypass.all_scaled and all(call is not None and not (call.guard - step.guard) for call in bypass.before):
            return True
        scalers = facts.evaluate(scale.subject, scale.call)
        if not all(isinstance(each.atom, Object) and implies(step.guard, each.guard) for each in scalers):
            return False
        enabled = facts.traces.enabled(scale.subject, scale.call)
        return all(
            call is not None and not compatible(call.guard, step.guard, enabled)
            for call in bypass.before
            if call is None or not (call is scale.call or compatible(call.guard, scale.call.guard))
        )


def _divides_out(optimizer: Call) -> bool:
    """True for an Adam whose steps do not depend on a constant factor of the gradients."""
    decay = optimizer.keywords.get("weight_decay")
    return "AdamW" in optimizer.name or ("Adam" in optimizer.name and (decay is None or constant(decay) == (0,)))


def _outer_loops(step: Event) -> tuple[cst.CSTNode, ...]:
    """Return the loops around a step, without the one over the optimizers: `for each in optimizers: each.step()`."""
    loops = step.call.loops
    inner = loops[-1] if loops else None
    return loops[:-1] if isinstance(inner, cst.For) and step.key and dotted(inner.target) == step.key else loops
