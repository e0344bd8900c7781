from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    RIGHT_SCALER_CLASS,
    SCALER_CLASS_FILES,
    Bad,
    Diagnostic,
    Facts,
    Fix,
    Good,
    Note,
    Rule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    dotted,
    lazy_pattern,
    python_edits,
    scaler_class,
    trace_facts,
)

_OPTIMIZER_USER = {
    "pyproject.toml": "",
    "train.py": "from tqdm import tqdm\n"
    "\n"
    "from optim import Optimizer\n"
    "\n"
    "def train(args, model, loader):\n"
    "    optimizer = Optimizer(args, model)\n"
    "    bar = tqdm(loader)\n"
    "    for x in loader:\n"
    "        optimizer.scaler.scale(model(x)).backward()\n"
    "        optimizer.step()\n"
    "        bar.update()\n",
    "other.py": "import torch\n"
    "\n"
    "def train(model, loader, optimizer):\n"
    '    scaler = torch.amp.GradScaler("cuda")\n'
    "    for x in loader:\n"
    "        scaler.scale(model(x)).backward()\n"
    "        scaler.step(optimizer)\n"
    "        scaler.update()\n",
}

_OPTIMIZER = """\
import torch

class Optimizer:
    def __init__(self, args, model):
        self.scaler = torch.amp.GradScaler("cuda") if args.amp else None
        self.inner = torch.optim.AdamW(model.parameters())

    def clip(self, model):
        if self.scaler is not None:
            self.scaler.unscale_(self.inner)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def step(self):
        if self.scaler is not None:
            {step}
        else:
            self.inner.step()
"""

#: A program whose callbacks get the scaler before the step.
_WITH_CALLBACKS = """\
import torch

class Trainer:
    def train(self, model, optimizer, loader):
        scaler = torch.amp.GradScaler("cuda", **self.config.scaler)
        for x in loader:
            self.training_step(model, optimizer, scaler, x)

    def training_step(self, model, optimizer, scaler, x):
        loss = scaler.scale(model(x))
        loss.backward()
        self.callbacks.on_before_optimizer_step(model, optimizer, scaler)
        {step}
        optimizer.zero_grad()
"""

_AMP_USER = {
    "pyproject.toml": "",
    "train.py": "from amp import Amp\n"
    "\n"
    "def train(model, optimizer, loader):\n"
    "    amp = Amp(True)\n"
    "    for x in loader:\n"
    "        amp.backward(model(x))\n"
    "        amp.step(optimizer)\n"
    "    print(amp.report())\n",
}


#: Functions that get a scaler before the step, and leave its update to what follows: `on_before_optimizer_step`.
_COMES_BEFORE = lazy_pattern(r"(?i)before|clip|unscale|norm")


class MissingScalerUpdate(Rule):
    """`scaler.step(optimizer)` is called and `scaler.update()` never is, or comes before the step.

    ## What it does
    Reports the (last) `scaler.step` of a training loop in which the scaler is not updated, and a `scaler.update()`
    between the backward pass and the step.

    ## Why is this bad
    `update` starts the next step: without it the second `scaler.step` raises "step() has already been called since the
    last update()", and the scale neither grows nor, after an overflow, shrinks. One `update` after the steps of several
    optimizers is right.

    An `update` before the step forgets that the gradients were unscaled and what was found in them: after
    `unscale_` the step divides by the scale a second time; without `unscale_`, `update` raises "No inf checks were
    recorded prior to update".

    ## Fix safety
    The fix adds `scaler.update()` after the step. It is unsafe because the update may belong elsewhere, such as at the
    end of a helper. There is no fix if the optimizers step in an inner loop, after which the update belongs, or if the
    scaler is updated after the training loop: that update has to move into the loop, since `update()` raises if no step
    came before it. An `update` before the step is moved behind it, where both are statements of one block.

    ## Known limits
    A missing update is reported only for a GradScaler of torch that the file creates: in a loop whose scaled `backward`
    and `step` are both in the file, or where nothing in the project updates a scaler, apart from programs that create
    their own, and from code that steps one and that no import connects with the file. A scaler that is passed to code
    elsewhere may be updated there, and that of a class by other files which call a method of it that updates.
    """

    code, name = "MPG204", "missing-scaler-update"
    severity = "error"
    message = "`{expr}` is never followed by `{scaler}.update()`"
    help = "call `update()` once per step, after the last `step`"
    triggers = (
        any_of(b"GradScaler", b".update("),
        any_of(b".scale(", b".unscale_(", b"caler.step("),
        any_of(b".step("),
    )
    examples = (
        Good(
            """\
from torch.cuda.amp import GradScaler

from hooks import Hook


class Fp16Hook(Hook):
    def __init__(self, loss_scale=512.0):
        self._scale_update_param = None
        if loss_scale == "dynamic":
            self.loss_scaler = GradScaler()
        elif isinstance(loss_scale, float):
            self._scale_update_param = loss_scale
            self.loss_scaler = GradScaler(init_scale=loss_scale)

    def after_train_iter(self, runner):
        self.loss_scaler.scale(runner.outputs["loss"]).backward()
        self.loss_scaler.step(runner.optimizer)
        self.loss_scaler.update(self._scale_update_param)
""",
            name="fp16.py",
            files={"pyproject.toml": "", "hooks.py": "class Hook:\n    pass\n"},
        ),
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
    scaler.step(optimizer)  # !
    optimizer.zero_grad()
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
    optimizer.zero_grad()
""",
        ),
        Bad(
            """\
from torch.cuda.amp import GradScaler

class Run:
    def __init__(self, model, args):
        self.scaler = GradScaler(enabled=args.amp)
        self.one, self.two = args.one, args.two

    def apply(self):
        self.scaler.step(self.one)
        self.scaler.step(self.two)  # !

    def run(self, losses):
        for loss in losses:
            self.scaler.scale(loss).backward()
            self.apply()

def one_arm(args, model, loader, optimizer):
    scaler = GradScaler()
    for x in loader:
        if args.amp:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)  # !
        else:
            model(x).backward()
            optimizer.step()
            scaler.update()
""",
            fixed="""\
from torch.cuda.amp import GradScaler

class Run:
    def __init__(self, model, args):
        self.scaler = GradScaler(enabled=args.amp)
        self.one, self.two = args.one, args.two

    def apply(self):
        self.scaler.step(self.one)
        self.scaler.step(self.two)
        self.scaler.update()

    def run(self, losses):
        for loss in losses:
            self.scaler.scale(loss).backward()
            self.apply()

def one_arm(args, model, loader, optimizer):
    scaler = GradScaler()
    for x in loader:
        if args.amp:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            model(x).backward()
            optimizer.step()
            scaler.update()
""",
        ),
        Bad(
            """\
from torch.cuda.amp import GradScaler

def at_the_end(model, loader, optimizer):
    scaler = GradScaler()
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)  # !
    scaler.update()

def several(model, loader, optimizers):
    scaler = GradScaler()
    for x in loader:
        scaler.scale(model(x)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)  # !

def micro_batches(model, loader, optimizer):
    scaler = GradScaler()
    for x in loader:
        for part in x.split(4):
            scaler.scale(model(part)).backward()
            scaler.step(optimizer)  # !
        scaler.update()
"""
        ),
        Bad(
            """\
try:
    from torch.cuda.amp import GradScaler
except ImportError:
    class GradScaler:
        def scale(self, loss):
            return loss

def train(args, model, loader, optimizer):
    scaler = GradScaler(enabled=args.mixed_precision)
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)  # !
""",
            fixed="""\
try:
    from torch.cuda.amp import GradScaler
except ImportError:
    class GradScaler:
        def scale(self, loss):
            return loss

def train(args, model, loader, optimizer):
    scaler = GradScaler(enabled=args.mixed_precision)
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

def train(model, loader, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.update()  # !
        scaler.step(optimizer)
        optimizer.zero_grad()

class Scaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, update=True):
        self._scaler.scale(loss).backward()
        if update:
            self._scaler.unscale_(optimizer)
            self._scaler.update()  # !
            self._scaler.step(optimizer)
""",
            fixed="""\
import torch

def train(model, loader, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

class Scaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, update=True):
        self._scaler.scale(loss).backward()
        if update:
            self._scaler.unscale_(optimizer)
            self._scaler.step(optimizer)
            self._scaler.update()
""",
        ),
        Bad(
            """\
def train(model, loader, optimizer, scaler, max_norm):
    for x in loader:
        if scaler is None:
            model(x).backward()
            optimizer.step()
            continue
        scaler.scale(model(x)).backward()
        if max_norm > 0:
            scaler.unscale_(optimizer)
        scaler.update()  # !
        scaler.step(optimizer)
""",
            fixed="""\
def train(model, loader, optimizer, scaler, max_norm):
    for x in loader:
        if scaler is None:
            model(x).backward()
            optimizer.step()
            continue
        scaler.scale(model(x)).backward()
        if max_norm > 0:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch
from elsewhere import Base

class LearningRateIsSetByTheBase(Base):
    def build(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            self.scaler.step(self.optimizer)  # !
            self.update_lr()
""",
            fixed="""\
import torch
from elsewhere import Base

class LearningRateIsSetByTheBase(Base):
    def build(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.update_lr()
""",
        ),
        Bad(
            """\
import torch
from elsewhere import Agent

class Learner(Agent):
    def __init__(self, memory, options):
        self.memory, self.options = memory, options
        self.scaler = torch.amp.GradScaler("cuda", enabled=options.amp)

    def after(self, step):
        self.learn()
        super().after(step)

    def learn(self):
        for x in self.memory:
            self.scaler.scale(self.critic(x)).backward()
            self.scaler.step(self.optimizer)  # !
""",
            fixed="""\
import torch
from elsewhere import Agent

class Learner(Agent):
    def __init__(self, memory, options):
        self.memory, self.options = memory, options
        self.scaler = torch.amp.GradScaler("cuda", enabled=options.amp)

    def after(self, step):
        self.learn()
        super().after(step)

    def learn(self):
        for x in self.memory:
            self.scaler.scale(self.critic(x)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
""",
        ),
        Good(
            """\
import torch
from elsewhere import Base

class UpdatedByTheBase(Base):
    def build(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            self.scaler.step(self.optimizer)
            self.update_all()

    def train_differently(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            self.scaler.step(self.optimizer)
            self.update_lr_and_scaler()
"""
        ),
        Good(
            """\
import torch

def gan(loader, generator, critic, one, two):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(critic(x)).backward()
        scaler.step(one)
        scaler.update()
        scaler.scale(generator(x)).backward()
        scaler.step(two)
        scaler.update()

def last_steps_update(loader, model, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        if i:
            scaler.update()
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
    scaler.update()
"""
        ),
        Good(
            """\
import torch
from elsewhere import finish, save_checkpoint

def several(loader, model, optimizers):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

def in_a_helper(loader, model, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        done(scaler)

def done(grad_scaler):
    grad_scaler.update()

def out_of_sight(loader, model, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        finish(scaler)

def from_outside(loader, model, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)

def one_loss_each(loader, model, optimizers):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        for index, optimizer in enumerate(optimizers):
            scaler.scale(model(x, index)).backward()
            scaler.step(optimizer)
        for _ in range(1):
            scaler.scale(model(x)).backward()
            scaler.step(optimizers[0])
        scaler.update()

ROUNDS = 1

def one_round(loader, model, optimizer, other):
    scaler = torch.amp.GradScaler("cuda")
    n_critic = 1
    for x in loader:
        for _ in range(n_critic):
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
        for _ in range(0, ROUNDS):
            scaler.scale(model(x)).backward()
            scaler.step(other)
        scaler.update()

class Gan:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def critic_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.critic_optimizer)

    def generator_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.generator_optimizer)

    def run(self, loader):
        for x in loader:
            self.critic_step(x)
            self.generator_step(x)
            self.scaler.update()
"""
        ),
        Bad(
            scaler_class("self.scaler.scale(loss).backward()", "self.scaler.step(optimizer)  # !"),
            files=SCALER_CLASS_FILES,
            name="amp.py",
            fixed=scaler_class(
                "self.scaler.scale(loss).backward()", "self.scaler.step(optimizer)", "self.scaler.update()"
            ),
        ),
        Good(
            """\
import torch

class Gan:
    def __init__(self, options):
        self.scaler = torch.amp.GradScaler("cuda") if options["amp"] else None
        self.optimizers = options["optimizers"]

    def critic_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizers[0])

    def generator_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizers[1])
""",
            files={
                "pyproject.toml": "",
                "train.py": "from gan import Gan\n\ndef train(options, losses):\n    trainer = Gan(options)\n"
                "    for loss in losses:\n        trainer.critic_step(loss)\n        trainer.generator_step(loss)\n"
                "        trainer.scaler.update()\n",
            },
            name="gan.py",
        ),
        RIGHT_SCALER_CLASS,
        Bad(
            """\
import contextlib

import torch

try:
    from torch.cuda.amp import GradScaler
except ImportError:

    @contextlib.contextmanager
    def nullcontext(*args, **kwargs):
        yield

    GradScaler = nullcontext

def train(cfg, model, optimizer, loader):
    if cfg.SOLVER.USE_AMP:
        scaler = GradScaler()
    for x in loader:
        loss = model(x)
        if cfg.SOLVER.USE_AMP:
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # !
        else:
            loss.backward()
            optimizer.step()
""",
            fixed="""\
import contextlib

import torch

try:
    from torch.cuda.amp import GradScaler
except ImportError:

    @contextlib.contextmanager
    def nullcontext(*args, **kwargs):
        yield

    GradScaler = nullcontext

def train(cfg, model, optimizer, loader):
    if cfg.SOLVER.USE_AMP:
        scaler = GradScaler()
    for x in loader:
        loss = model(x)
        if cfg.SOLVER.USE_AMP:
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
import contextlib

import torch

try:
    from torch.cuda.amp import GradScaler
except ImportError:

    @contextlib.contextmanager
    def nullcontext(*args, **kwargs):
        yield

    GradScaler = nullcontext

def train(cfg, model, optimizer, loader):
    if cfg.SOLVER.USE_AMP:
        scaler = GradScaler()
    for x in loader:
        loss = model(x)
        if cfg.SOLVER.USE_AMP:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from elsewhere import load_model

def train(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    if args.resume:
        model, optimizer, scaler = load_model(args.resume, model, optimizer, scaler)
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer=optimizer)  # !
""",
            fixed="""\
import torch
from elsewhere import load_model

def train(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    if args.resume:
        model, optimizer, scaler = load_model(args.resume, model, optimizer, scaler)
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer=optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch
from elsewhere import load_model

def train(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    if args.resume:
        model, optimizer, scaler = load_model(args.resume, model, optimizer, scaler)
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer=optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

class Estimator:
    def fit(self, x, y):
        return self._fit(x, y)

    def _fit(self, x, y):
        scaler = torch.amp.GradScaler("cuda")
        for each in self.batches(x, y):
            scaler.scale(self.model(each)).backward()
            scaler.step(self.optimizer)  # !
        self.inner = self.build()
        self.inner.fit(x, y)
        return self
""",
            fixed="""\
import torch

class Estimator:
    def fit(self, x, y):
        return self._fit(x, y)

    def _fit(self, x, y):
        scaler = torch.amp.GradScaler("cuda")
        for each in self.batches(x, y):
            scaler.scale(self.model(each)).backward()
            scaler.step(self.optimizer)
            scaler.update()
        self.inner = self.build()
        self.inner.fit(x, y)
        return self
""",
        ),
        Good(
            """\
import torch

class Estimator:
    def fit(self, x, y):
        return self._fit(x, y)

    def _fit(self, x, y):
        scaler = torch.amp.GradScaler("cuda")
        for each in self.batches(x, y):
            scaler.scale(self.model(each)).backward()
            scaler.step(self.optimizer)
            scaler.update()
        self.inner = self.build()
        self.inner.fit(x, y)
        return self
""",
        ),
        Bad(
            """\
import torch

class Amp:
    def __init__(self, enabled):
        self.scaler = torch.amp.GradScaler("cuda", enabled=enabled)

    def scale_loss(self, loss):
        return self.scaler.scale(loss)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self, optimizer):
        self.scaler.step(optimizer)  # !

    def report(self):
        return {"scale": self.scaler.get_scale()}
""",
            files=_AMP_USER,
            name="amp.py",
            fixed="""\
import torch

class Amp:
    def __init__(self, enabled):
        self.scaler = torch.amp.GradScaler("cuda", enabled=enabled)

    def scale_loss(self, loss):
        return self.scaler.scale(loss)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()

    def report(self):
        return {"scale": self.scaler.get_scale()}
""",
        ),
        Good(
            """\
import torch

class Amp:
    def __init__(self, enabled):
        self.scaler = torch.amp.GradScaler("cuda", enabled=enabled)

    def scale_loss(self, loss):
        return self.scaler.scale(loss)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()

    def report(self):
        return {"scale": self.scaler.get_scale()}
""",
            files=_AMP_USER,
            name="amp.py",
        ),
        Bad(
            """\
import torch

def apply(model, optimizer, scaler, norm):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    scaler.update()  # !
    scaler.step(optimizer)
    return scaler.get_scale()
""",
            fixed="""\
import torch

def apply(model, optimizer, scaler, norm):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()
""",
        ),
        Good(
            """\
import torch

def apply(model, optimizer, scaler, norm):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()
""",
        ),
        Bad(
            """\
import torch

def fp16(args):
    if args.fp16:
        return torch.cuda.amp.GradScaler(), torch.cuda.amp.autocast
    return None, None

def train(args, model, loader):
    args.scaler, args.autocast = fp16(args)
    for x in loader:
        step(args, model, x)

def step(args, model, x):
    if args.fp16:
        with args.autocast():
            loss = model(x)
        args.scaler.scale(loss).backward()
        args.scaler.step(args.optimizer)  # !
    else:
        model(x).backward()
        args.optimizer.step()
""",
            fixed="""\
import torch

def fp16(args):
    if args.fp16:
        return torch.cuda.amp.GradScaler(), torch.cuda.amp.autocast
    return None, None

def train(args, model, loader):
    args.scaler, args.autocast = fp16(args)
    for x in loader:
        step(args, model, x)

def step(args, model, x):
    if args.fp16:
        with args.autocast():
            loss = model(x)
        args.scaler.scale(loss).backward()
        args.scaler.step(args.optimizer)
        args.scaler.update()
    else:
        model(x).backward()
        args.optimizer.step()
""",
        ),
        Good(
            """\
import torch

def fp16(args):
    if args.fp16:
        return torch.cuda.amp.GradScaler(), torch.cuda.amp.autocast
    return None, None

def train(args, model, loader):
    args.scaler, args.autocast = fp16(args)
    for x in loader:
        step(args, model, x)

def step(args, model, x):
    if args.fp16:
        with args.autocast():
            loss = model(x)
        args.scaler.scale(loss).backward()
        args.scaler.step(args.optimizer)
        args.scaler.update()
    else:
        model(x).backward()
        args.optimizer.step()
""",
        ),
        Bad(
            """\
import torch

class Trainer:
    def __init__(self, args, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda") if args.amp else None

    def train(self, loader):
        for x in loader:
            with torch.autocast("cuda", enabled=self.scaler is not None):
                loss = self.model(x)
            loss = self.scaler.scale(loss) if self.scaler else loss
            loss.backward()
            if self.scaler:
                self.scaler.step(self.optimizer)  # !
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
""",
            fixed="""\
import torch

class Trainer:
    def __init__(self, args, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda") if args.amp else None

    def train(self, loader):
        for x in loader:
            with torch.autocast("cuda", enabled=self.scaler is not None):
                loss = self.model(x)
            loss = self.scaler.scale(loss) if self.scaler else loss
            loss.backward()
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
""",
        ),
        Bad(
            _OPTIMIZER.format(step="self.scaler.step(self.inner)  # !"),
            files=_OPTIMIZER_USER,
            name="optim.py",
            fixed=_OPTIMIZER.format(step="self.scaler.step(self.inner)\n            self.scaler.update()"),
        ),
        Bad(
            _OPTIMIZER.format(step="self.scaler.update()  # !\n            self.scaler.step(self.inner)"),
            files=_OPTIMIZER_USER,
            name="optim.py",
            fixed=_OPTIMIZER.format(step="self.scaler.step(self.inner)\n            self.scaler.update()"),
        ),
        Good(
            _OPTIMIZER.format(step="self.scaler.step(self.inner)"),
            files={
                **_OPTIMIZER_USER,
                "train.py": _OPTIMIZER_USER["train.py"].replace("bar.update()", "optimizer.scaler.update()"),
            },
            name="optim.py",
        ),
        Good(
            _OPTIMIZER.format(step="self.scaler.step(self.inner)"),
            files={
                **_OPTIMIZER_USER,
                "hooks.py": "def after_step(trainer):\n    scaler = trainer.optimizer.scaler\n    scaler.update()\n",
            },
            name="optim.py",
        ),
        Bad(
            _WITH_CALLBACKS.format(step="scaler.step(optimizer)  # !"),
            files={"pyproject.toml": "", "run.py": "from train import Trainer\n\nTrainer().train(*build())\n"},
            name="train.py",
            fixed=_WITH_CALLBACKS.format(step="scaler.step(optimizer)\n        scaler.update()"),
        ),
        Good(
            _WITH_CALLBACKS.format(step="scaler.step(optimizer)"),
            files={
                "pyproject.toml": "",
                "run.py": "from train import Trainer\n\nTrainer().train(*build())\n",
                "callbacks.py": "class Updates:\n"
                "    def on_before_optimizer_step(self, model, optimizer, scaler):\n"
                "        if self.stepped:\n"
                "            scaler.update()\n",
            },
            name="train.py",
        ),
        Good(
            """\
import torch

class Trainer:
    def __init__(self, args, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda") if args.amp else None

    def train(self, loader):
        for x in loader:
            with torch.autocast("cuda", enabled=self.scaler is not None):
                loss = self.model(x)
            loss = self.scaler.scale(loss) if self.scaler else loss
            loss.backward()
            if self.scaler:
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()
            if self.scaler is not None:
                self.scaler.update()
            self.optimizer.zero_grad()
""",
        ),
        Good(
            """\
import torch

class Trainer:
    def train(self, model, optimizer, loader):
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            self.callbacks.after_step(scaler)
""",
            files={"pyproject.toml": "", "run.py": "from train import Trainer\n\nTrainer().train(*build())\n"},
            name="train.py",
        ),
        Bad(
            _OPTIMIZER.format(step="self.scaler.step(self.inner)  # !"),
            files={
                **_OPTIMIZER_USER,
                "tests/test_optim.py": "def test_scaler(optimizer):\n    optimizer.scaler.update()\n",
                "fp16.py": "from scale import DynamicLossScaler\n\n\nclass FP16:\n    def __init__(self):\n"
                "        self.scaler = DynamicLossScaler()\n\n    def step(self):\n        self.scaler.update()\n",
            },
            name="optim.py",
            fixed=_OPTIMIZER.format(step="self.scaler.step(self.inner)\n            self.scaler.update()"),
        ),
        Bad(
            """\
import torch

def build(options):
    if not options.amp:
        return None
    if options.sharded:
        from fairscale.optim.grad_scaler import ShardedGradScaler

        return ShardedGradScaler()
    return torch.amp.GradScaler("cuda")

def train(options, model, loader, optimizer):
    scaler = build(options)
    for x in loader:
        if scaler is not None:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)  # !
        else:
            model(x).backward()
            optimizer.step()
""",
            fixed="""\
import torch

def build(options):
    if not options.amp:
        return None
    if options.sharded:
        from fairscale.optim.grad_scaler import ShardedGradScaler

        return ShardedGradScaler()
    return torch.amp.GradScaler("cuda")

def train(options, model, loader, optimizer):
    scaler = build(options)
    for x in loader:
        if scaler is not None:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            model(x).backward()
            optimizer.step()
""",
        ),
        Bad(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    scaler.scale((model(x) + other(x)).sum()).backward()
    scaler.step(one)
    scaler.update()  # !
    scaler.step(two)
""",
            fixed="""\
import torch

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    scaler.scale((model(x) + other(x)).sum()).backward()
    scaler.step(one)
    scaler.step(two)
    scaler.update()
""",
        ),
        Good(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(head(x).sum()).backward()
    scaler.step(head_optimizer)
    scaler.update()
"""
        ),
        Good(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    for i in range(2):
        scaler.scale(heads[group * 2 + i](model(x)).sum()).backward()
        scaler.step(head_optimizers[group * 2 + i])
    scaler.step(optimizer)
    scaler.update()
"""
        ),
        # Users of a wrapper call its method that updates.
        Good(
            """\
import torch

class Scaler:
    def __init__(self, enabled=True):
        self._scaler = torch.amp.GradScaler("cuda", enabled=enabled)

    def scale_and_step(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)

    def update(self):
        self._scaler.update()
""",
            name="scaler.py",
            files={
                "pyproject.toml": "",
                "run.py": "import torch\nfrom scaler import Scaler\n\ndef train(model, loader, optimizer):\n"
                "    scaler = Scaler()\n    for x in loader:\n        with torch.autocast('cuda'):\n"
                "            loss = model(x).sum()\n        scaler.scale_and_step(loss, optimizer)\n"
                "        scaler.update()\n        optimizer.zero_grad()\n",
            },
        ),
        # Another program of the project updates a progress bar, or a scaler that it steps itself.
        Bad(
            """\
import torch

class Optimizer:
    def __init__(self, model):
        self.scaler = torch.amp.GradScaler("cuda")
        self.inner = torch.optim.AdamW(model.parameters())

    def step(self):
        self.scaler.step(self.inner)  # !
""",
            fixed="""\
import torch

class Optimizer:
    def __init__(self, model):
        self.scaler = torch.amp.GradScaler("cuda")
        self.inner = torch.optim.AdamW(model.parameters())

    def step(self):
        self.scaler.step(self.inner)
        self.scaler.update()
""",
            name="optim.py",
            files={
                "pyproject.toml": "",
                "train.py": "from optim import Optimizer\n\ndef train(model, loader):\n"
                "    optimizer = Optimizer(model)\n    for x in loader:\n"
                "        optimizer.scaler.scale(model(x)).backward()\n        optimizer.step()\n",
                "other.py": "from tqdm import tqdm\n\ndef evaluate(loader, scaler):\n"
                "    with tqdm(total=len(loader)) as t:\n        for x in loader:\n            t.update()\n",
                "third.py": "def step(scaler, optimizer):\n    scaler.step(optimizer)\n    scaler.update()\n",
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        reported: set[object] = set()
        for trace in facts.traces.all:
            for place, step in enumerate(trace):
                if step.kind == "update" and step.record not in reported:
                    late = self._steps_after(trace, place, facts)
                    if late is not None:
                        reported |= {step.record, late.record}
                        yield self._too_early(step, late, facts)
                if (
                    step.kind != "scaler_step"
                    or step.record in reported
                    or not self._never_updated(trace, place, facts)
                ):
                    continue
                reported.add(step.record)
                scaler = facts.short(step.scaler)
                scaled = [each for _, each in _scaled_before(trace, place)][:1]
                notes = tuple(Note("its loss is scaled here", backward.span) for backward in scaled)
                fix = None
                # else the update belongs after the inner loop
                together = set(step.loops) <= set(scaled[0].loops if scaled else ())
                if step.call.is_statement and together and not self._updated_elsewhere(trace, step, facts):
                    edit = python_edits.line_after(facts, step.call.line, step.call, f"{scaler}.update()")
                    fix = Fix("Update the scaler after the step", "unsafe", (edit,))
                expr = facts.short(step.call.node)
                yield self.at(step, expr=expr, scaler=scaler, notes=notes, fix=fix)

    def _steps_after(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the step of the same iteration that an update precedes; None if the update follows a step."""
        update = trace[place]
        scope = update.record.scope
        if not facts.traces.like_torch(update.scaler, update.record):
            return None

        def near(each: TraceStep) -> bool:
            return each.kind in ("backward", "scaler_step", "passed") and compatible(each.guard, update.guard)

        before = next((each for each in reversed(trace[:place]) if near(each)), None)
        after = next((each for each in trace[place + 1 :] if near(each)), None)
        if after is None or after.kind != "scaler_step":
            return None
        if self._is_next_line(update, after, facts) and not any(each.kind == "scaler_step" for each in trace[:place]):
            return after
        if before is not None and before.kind == "scaler_step":
            return after if _steps_another(before, after, facts) and not after.guard - update.guard else None
        if before is not None and before.kind != "backward":
            return None
        unscaled = any(each.kind == "unscale" and each.record.scope is scope for each in trace[:place])
        if before is None and not unscaled:
            return None
        together = after.record.scope is scope and after.loops == update.loops and not update.guard - after.guard
        if not together or (before is not None and not set(update.loops) <= set(before.loops)):
            return None
        return after if facts.short(after.scaler) == facts.short(update.scaler) else None

    def _is_next_line(self, update: TraceStep, step: TraceStep, facts: Facts) -> bool:
        """True if the step is the statement after the update: the first update would come before any step."""
        block = facts.parent(update.call.line)
        lines = list[cst.CSTNode](block.body) if isinstance(block, cst.IndentedBlock) else []
        place = lines.index(update.call.line) if update.call.line in lines else len(lines)
        follows = lines[place + 1 : place + 2] == [step.call.line]
        return follows and facts.short(step.scaler) == facts.short(update.scaler)

    def _too_early(self, update: TraceStep, step: TraceStep, facts: Facts) -> Diagnostic:
        call, late = update.call, step.call
        fix = None
        if call.is_statement and late.is_statement and facts.parent(call.line) is facts.parent(late.line):
            moved = python_edits.line_after(facts, late.line, late, facts.text(call.node, call))
            fix = Fix("Update after the step", "unsafe", (python_edits.without_statement(facts, call), moved))
        return self.at(
            update,
            message=f"`{facts.short(call.node)}` comes before `{facts.short(late.node)}`",
            help="update the scaler after the last `step`",
            notes=(Note("the step", step.span),),
            fix=fix,
        )

    def _updated_elsewhere(self, trace: Trace, step: TraceStep, facts: Facts) -> bool:
        """True if the scaler is updated outside the loop, where `update()` raises after one in the loop."""
        return any(
            each.kind == "update"
            and compatible(each.guard, step.guard)
            and not facts.traces.differ(step.scaler, step.record, each.scaler, each.record)
            for each in trace
        )

    def _never_updated(self, trace: Trace, place: int, facts: Facts) -> bool:
        step, traces = trace[place], facts.traces
        if traces.own(step.scaler, step.record) and self._not_in_its_loop(trace, place, facts):
            return True
        made = any(traces.own(each.call.node, each.call) for each in facts.events("scaler"))
        return made and traces.like_torch(step.scaler, step.record) and self._nowhere_updated(trace, place, facts)

    def _nowhere_updated(self, trace: Trace, place: int, facts: Facts) -> bool:
        """True if no code of the project updates the scaler: that of a class whose users run backward, for example."""
        step = trace[place]
        owner = step.record.scope.owner
        if owner is not None and facts.class_kind(owner) in ("framework", "trainer"):
            return False
        if any(each.kind in ("scaler_step", "update") for each in trace[place + 1 :]):
            return False  # only the last step is reported
        for index, each in enumerate(trace):
            before = index < place and _COMES_BEFORE.search(each.call.name) if each.kind == "passed" else True
            if not before and not facts.functions(each.call):
                return False
        return not facts.may_update_scaler

    def _not_in_its_loop(self, trace: Trace, place: int, facts: Facts) -> bool:
        step, traces = trace[place], facts.traces
        scaled = next(_scaled_before(trace, place), None)
        if scaled is None:
            return False
        together = scaled[1].record.scope is step.record.scope
        if (
            not together
            and facts.short(step.scaler).startswith("self.")
            and facts.base_unknown(step.record.scope.owner)
        ):
            return False
        loop = next(
            (
                each
                for each in reversed(step.loops)
                if each in scaled[1].loops and not self._counts_as_one(each, step, facts)
            ),
            None,
        )
        guard = step.guard.joined(scaled[1].guard)

        def other(each: TraceStep) -> bool:
            return traces.differ(step.scaler, step.record, each.scaler, each.record)

        for index, each in enumerate(trace):
            if not compatible(each.guard, guard) or (loop is not None and loop not in each.loops):
                continue
            if each.kind == "passed" or (each.kind == "update" and not other(each)):
                return False
            if each.kind == "scaler_step" and index > place and not other(each):
                return False  # only the last step is reported
        return not self._updated_by_users(step, facts)

    def _updated_by_users(self, step: TraceStep, facts: Facts) -> bool:
        """True if code that uses the class of a scaler updates it: `trainer.scaler.update()`, or by a method of it."""
        owner, scaler = step.record.scope.owner, facts.short(step.scaler)
        if owner is None or not scaler.startswith("self."):
            return False
        for method in owner.children:
            updates = any(call.path == f"{scaler}.update" for call in method.calls)
            if updates and any(facts.of(each) is not facts for each in facts.callers(method)):
                return True
        attribute = scaler.removeprefix("self")
        for user in (facts, *(facts.users(owner.name) or ())):
            user.need_uses(attribute.rpartition(".")[2])
            paths = [dotted(call.func) for call in user.calls.get("update", ())]
            if any(path.endswith(f"{attribute}.update") and not path.startswith("self.") for path in paths):
                return True
        return False

    def _counts_as_one(self, loop: cst.CSTNode, step: TraceStep, facts: Facts) -> bool:
        """True for a loop over optimizers, of which each steps once."""
        if not isinstance(loop, cst.For):
            return False
        optimizer = step.optimizer
        index = optimizer.slice[0].slice if isinstance(optimizer, cst.Subscript) else None
        used = {dotted(optimizer).split(".", 1)[0]}
        if isinstance(index, cst.Index):
            used |= {dotted(index.value), *re.findall(r"\w+", facts.short(index.value))}
        targets = loop.target.elements if isinstance(loop.target, cst.Tuple) else ()
        return bool(used & ({dotted(loop.target), *(dotted(each.value) for each in targets)} - {""}))


def _steps_another(one: TraceStep, other: TraceStep, facts: Facts) -> bool:
    """True if two steps of a scaler, in one loop of a function, are those of two optimizers."""
    together = one.record.scope is other.record.scope and one.loops == other.loops
    same_scaler = facts.short(one.scaler) == facts.short(other.scaler)
    return together and same_scaler and facts.short(one.optimizer) != facts.short(other.optimizer)


def _scaled_before(trace: Trace, place: int) -> Iterator[tuple[int, TraceStep]]:
    """Yield the backward passes before a step, with their places, whose loss is scaled where the scaler steps."""
    step = trace[place]
    for index, each in trace_facts.before(trace, place):
        if each.may_scale is not None and compatible(each.may_scale.guard, step.guard):
            yield index, each
