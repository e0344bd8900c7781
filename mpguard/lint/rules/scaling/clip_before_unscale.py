from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    RIGHT_SCALER_CLASS,
    SCALER_CLASS_FILES,
    Bad,
    Constant,
    Diagnostic,
    Dtype,
    Facts,
    Fix,
    Good,
    Method,
    Note,
    Object,
    Record,
    Ref,
    Rule,
    Trace,
    TraceStep,
    Use,
    any_of,
    compatible,
    library_names,
    python_edits,
    scaler_class,
    trace_facts,
)

_CLIPPER = """\
import torch

class Amp:
    def __init__(self, mixed):
        self.scaler = torch.amp.GradScaler("cuda") if mixed else None

    def backward(self, loss):
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def step(self, optimizer):
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def clip(self, model, optimizer, norm):
        {clip}
"""

_CLIPPER_USER = {
    "pyproject.toml": "",
    "train.py": "from amp import Amp\n"
    "\n"
    "def train(model, optimizer, loader):\n"
    "    amp = Amp(True)\n"
    "    for x in loader:\n"
    "        amp.backward(model(x))\n"
    "        amp.clip(model, optimizer, 1.0)\n"
    "        amp.step(optimizer)\n",
}

_HOOK = """\
import torch

class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def before_clip(self):
        {base}

    def fit(self):
        for x in self.loader:
            self.scaler.scale(self.model(x)).backward()
            self.before_clip()
            {clip}
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""

_HOOK_USER = """
class OwnTrainer(Trainer):
    def before_clip(self):
        {derived}

def main(model, loader):
    OwnTrainer(model, loader).fit()
"""

_UNSCALES = "self.scaler.unscale_(self.optimizer)"
_CLIPS = "torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)"

_TWO_MODELS = """\
import torch

def train(make, loader, given):
    one, two = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(one.parameters())
    other = torch.optim.AdamW({other}.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(two(one(x))).backward()
        scaler.unscale_({unscaled})
        {clip}
        scaler.step(optimizer)
        scaler.step(other)
        scaler.update()
"""

_CLIPS_ONE = "torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)"


class ClipBeforeUnscale(Rule):
    """Gradients are clipped while they are still multiplied by the loss scale.

    ## What it does
    Reports `clip_grad_norm_`, `clip_grad_value_` and `p.grad.clamp_` on gradients of a scaled loss if there is no
    `scaler.unscale_(optimizer)` between `backward` and the clip. One of an optimizer that has the parameters of another
    model only does not count.

    ## Why is this bad
    The gradients are larger than the true ones by the scale, 65536 at first: all of them are clipped, and after
    `scaler.step` has divided by the scale, the norm of the step is `max_norm / 65536`. The model hardly trains, and the
    strength of the clipping changes whenever the scale does.

    ## Fix safety
    Safe: `scaler.unscale_(optimizer)` before the clip divides by the scale, and `scaler.step` does not divide again.
    There is no fix for `p.grad.clamp_`, if several optimizers step, if the clip runs for each micro-batch and the
    step once for several (`unscale_` may be called once per step only), or if a later clip runs with or without the
    first one.

    ## Known limits
    Follows one function, the helpers of its file, and one of another module that clips; a `backward` in another module
    is not found. Silent if something in between may unscale: `get_scale`, or a call of unknown code that takes the
    scaler. Silent for a model whose class creates layers in BF16: a scaler that is enabled raises at the gradients of
    such weights. Silent for a norm limit of a million or more (`float("inf")`): it limits no scaled gradients either.
    """

    code, name = "MPG205", "clip-before-unscale"
    severity = "error"
    message = "`{expr}` clips gradients that are still scaled"
    help = "call `{scaler}.unscale_(optimizer)` before"
    triggers = (any_of(b"clip_", b".clamp_("), any_of(b".scale("), any_of(b"scaler", b"Scaler"))
    triggers_nearby = (any_of(b"clip_grad", b".clamp_("),)
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
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !
    scaler.step(optimizer)
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
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        ),
        Bad(
            """\
import torch
from torch import nn
from torch.nn.utils import clip_grad_value_ as clip

def train(args, model, loader, optimizer, scaler):
    for i, x in enumerate(loader):
        loss = model(x)
        if args.amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if (i + 1) % args.accumulate == 0:
            if args.clip_norm > 0:
                norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)  # !
            if args.amp:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()

class Run:
    def __init__(self, optimizer):
        self.scaler = torch.amp.GradScaler("cuda")
        self.optimizer = optimizer

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def run(self, model, losses):
        for loss in losses:
            self.backward(loss)
            clip(model.parameters(), 0.1)  # !
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
        ),
        Bad(
            """\
import torch

def train(model, losses, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for i, loss in enumerate(losses):
        scaled = scaler.scale(loss)
        scaled.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !
        if i % 4 == 3:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""
        ),
        Bad(
            """\
import torch
from torch.nn.utils import clip_grad_norm_

def train(model, losses, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        scaler.scale(loss).backward(); clip_grad_norm_(model.parameters(), 1.0)  # !
        scaler.step(optimizer); scaler.update()
""",
            fixed="""\
import torch
from torch.nn.utils import clip_grad_norm_

def train(model, losses, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        scaler.scale(loss).backward(); scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer); scaler.update()
""",
        ),
        Bad(
            """\
import torch
from torch.nn.utils import clip_grad_norm_

def in_one_arm_and_after_it(args, model, head, losses, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        scaler.scale(loss).backward()
        if args.clip_model:
            clip_grad_norm_(model.parameters(), 1.0)  # !
        clip_grad_norm_(head.parameters(), 1.0)  # !
        scaler.step(optimizer)
        scaler.update()
"""
        ),
        Bad(
            """\
from functools import partial

import torch
from builders import build_clipper

class Manager:
    def __init__(self, model, optimizer, config):
        self.model, self.optimizer = model, optimizer
        self.clip_grad = build_clipper(config)
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.fp16) if config.cuda else None

    def differentiate(self, x):
        loss = self.model(x)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()

    def epoch(self, loader):
        for x in loader:
            self.differentiate(x)
            if self.clip_grad is not None:
                self.clip_grad(parameters=self.model.parameters())  # !
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
""",
            files={
                "builders.py": "from functools import partial\n\nfrom torch import nn\n\ndef build_clipper(config):\n"
                "    clip = None\n    if config.value is not None:\n"
                "        clip = partial(nn.utils.clip_grad_value_, clip_value=config.value)\n"
                "    elif config.norm is not None:\n"
                "        clip = partial(nn.utils.clip_grad_norm_, max_norm=config.norm)\n    return clip\n",
                "pyproject.toml": "",
            },
        ),
        Bad(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

model = FSDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
scaler = ShardedGradScaler()
for x in loader:
    scaler.scale(model(x).sum()).backward()
    model.clip_grad_norm_(1.0)  # !
    scaler.step(optimizer)
    scaler.update()
""",
            fixed="""\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

model = FSDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
scaler = ShardedGradScaler()
for x in loader:
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        ),
        Bad(
            """\
import torch

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.clamp_(-1, 1)  # !
        scaler.step(optimizer)
        scaler.update()

def alias(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        for p in model.parameters():
            g = p.grad
            g.clamp_(-1, 1)  # !
        scaler.step(optimizer)
        scaler.update()

def unscaled(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.clamp_(-1, 1)
            p.data.clamp_(-8, 8)
        scaler.step(optimizer)
        scaler.update()
"""
        ),
        Bad(
            """\
import torch
from elsewhere import clip_gradients, clip_images, clip_unscaled

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(clip_images(x))).backward()
        clip_gradients(model.parameters(), 1.0)  # !
        scaler.step(optimizer)
        scaler.update()

def unscaled(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        clip_unscaled(scaler, optimizer, model.parameters())
        scaler.step(optimizer)
        scaler.update()
""",
            files={
                "elsewhere.py": """\
import torch

def clip_gradients(parameters, most):
    return torch.nn.utils.clip_grad_norm_(parameters, most)

def clip_unscaled(scaler, optimizer, parameters):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)

def clip_images(images):
    return images.clamp(0, 1)
"""
            },
            fixed="""\
import torch
from elsewhere import clip_gradients, clip_images, clip_unscaled

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(clip_images(x))).backward()
        scaler.unscale_(optimizer)
        clip_gradients(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

def unscaled(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        clip_unscaled(scaler, optimizer, model.parameters())
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch
from builders import build_clipper, unscales_and_clips

class Manager:
    def __init__(self, model, optimizer, config):
        self.model, self.optimizer = model, optimizer
        self.clip_grad = build_clipper(config)
        self.other_clip_grad = unscales_and_clips
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.fp16)

    def epoch(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            self.scaler.unscale_(self.optimizer)
            self.clip_grad(self.model.parameters())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scaler.scale(self.model(x)).backward()
            self.other_clip_grad(self.model.parameters())
            self.scaler.step(self.optimizer)
            self.scaler.update()
""",
            files={
                "builders.py": "from functools import partial\n\nfrom torch import nn\n\ndef build_clipper(config):\n"
                "    return partial(nn.utils.clip_grad_norm_, max_norm=config.norm)\n",
                "pyproject.toml": "",
            },
        ),
        Good(
            """\
import torch
from elsewhere import unscale

def right(args, model, loader, optimizer, scaler):
    for i, x in enumerate(loader):
        loss = model(x)
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if args.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()

def unscaled_first(args, model, loader, optimizer, scaler):
    for x in loader:
        if args.amp:
            scaler.scale(model(x)).backward()
        else:
            model(x).backward()
        if args.amp:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)

def two_names_of_one_flag(args, model, loader, optimizer, scaler):
    for x in loader:
        if scaler is not None:
            scaler.scale(model(x)).backward()
        else:
            model(x).backward()
        if not args.fp16:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.zero_grad()

def elsewhere(model, loader, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        unscale(scaler, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

def by_hand(model, loader, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()

def only_the_generator_is_scaled(generator, critic, loader, one, two, scaler):
    for x in loader:
        scaler.scale(generator(x)).backward()
        scaler.step(one)
        scaler.update()
        critic(x).backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        two.step()

def clip_grad_norm_(parameters, scaler, optimizer):
    scaler.unscale_(optimizer)

def of_ones_own(model, loader, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        clip_grad_norm_(model.parameters(), scaler, optimizer)
"""
        ),
        Good(
            """\
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        # self.scaler = torch.amp.GradScaler()

    def step(self, x):
        self.scaler.scale(self.model(x)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
        ),
        Bad(
            scaler_class(
                "self.scaler.scale(loss).backward()",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !",
                "self.scaler.step(optimizer)",
                "self.scaler.update()",
            ),
            files=SCALER_CLASS_FILES,
            name="amp.py",
            fixed=RIGHT_SCALER_CLASS.code,
        ),
        RIGHT_SCALER_CLASS,
        Bad(
            """\
import torch

def train(args, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        if args.adversarial:
            model(attack(x)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !
        scaler.step(optimizer)
        scaler.update()
""",
            fixed="""\
import torch

def train(args, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        if args.adversarial:
            model(attack(x)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch

def train(args, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        if args.adversarial:
            model(attack(x)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            _CLIPPER.format(clip="torch.nn.utils.clip_grad_norm_(model.parameters(), norm)  # !"),
            files=_CLIPPER_USER,
            name="amp.py",
        ),
        Good(
            _CLIPPER.format(
                clip="if self.scaler is not None:\n            self.scaler.unscale_(optimizer)\n"
                "        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)"
            ),
            files=_CLIPPER_USER,
            name="amp.py",
        ),
        Good(
            _CLIPPER.format(
                clip="torch.nn.utils.clip_grad_norm_(model.parameters(), norm)\n\n"
                "    def unscale(self, optimizer):\n        self.scaler.unscale_(optimizer)"
            ),
            files={
                **_CLIPPER_USER,
                "train.py": _CLIPPER_USER["train.py"].replace(
                    "        amp.clip", "        amp.unscale(optimizer)\n        amp.clip"
                ),
            },
            name="amp.py",
        ),
        Good(
            """\
import torch
from torch import nn

CONFIG = {"dim": 8, "dtype": torch.bfloat16}

class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head = nn.Linear(cfg["dim"], 8, dtype=cfg["dtype"])

    def forward(self, x):
        return self.head(x)

def train(loader):
    dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
    model = Net(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.amp.autocast("cuda", dtype=getattr(torch, dtype)):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch
from torch import nn

CONFIG = {"dim": 8, "dtype": torch.float32}

class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head = nn.Linear(cfg["dim"], 8, dtype=cfg["dtype"])

    def forward(self, x):
        return self.head(x)

def train(loader):
    dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
    model = Net(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.amp.autocast("cuda", dtype=getattr(torch, dtype)):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # !
        scaler.step(optimizer)
        scaler.update()
""",
            fixed="""\
import torch
from torch import nn

CONFIG = {"dim": 8, "dtype": torch.float32}

class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head = nn.Linear(cfg["dim"], 8, dtype=cfg["dtype"])

    def forward(self, x):
        return self.head(x)

def train(loader):
    dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
    model = Net(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.amp.autocast("cuda", dtype=getattr(torch, dtype)):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

class Trainer:
    def grad_norm(self, parameters, scale):
        total = 0.0
        for p in parameters:
            total += (p.grad.detach() / scale).norm(2).item() ** 2
        return total**0.5

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            norm = self.grad_norm(self.model.parameters(), self.scaler.get_scale())
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # !
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.log(norm)
""",
            fixed="""\
import torch

class Trainer:
    def grad_norm(self, parameters, scale):
        total = 0.0
        for p in parameters:
            total += (p.grad.detach() / scale).norm(2).item() ** 2
        return total**0.5

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            norm = self.grad_norm(self.model.parameters(), self.scaler.get_scale())
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.log(norm)
""",
        ),
        Good(
            """\
import torch

class Trainer:
    def unscale(self, parameters, scale):
        for p in parameters:
            p.grad.div_(scale)

    def factor(self, parameters, scale):
        return 1.0 / scale

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            self.unscale(self.model.parameters(), self.scaler.get_scale())
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scaler.update()

    def train_by_a_factor(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            factor = self.factor(self.model.parameters(), self.scaler.get_scale())
            for p in self.model.parameters():
                p.grad = p.grad * factor
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scaler.update()
""",
        ),
        Good(
            """\
import torch

class CFG:
    max_grad_norm = 1e7

def measure(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=CFG.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        print(float(norm))
"""
        ),
        Good(_HOOK.format(base="pass", clip=_CLIPS) + _HOOK_USER.format(derived=_UNSCALES)),
        Good(_HOOK.format(base="raise NotImplementedError", clip=_CLIPS) + _HOOK_USER.format(derived=_UNSCALES)),
        Bad(
            _HOOK.format(base=_UNSCALES, clip=f"{_CLIPS}  # !") + _HOOK_USER.format(derived="pass"),
            fixed=_HOOK.format(base=_UNSCALES, clip=f"{_UNSCALES}\n            {_CLIPS}")
            + _HOOK_USER.format(derived="pass"),
        ),
        Good(
            _HOOK.format(base="pass", clip=_CLIPS),
            files={
                "pyproject.toml": "",
                "train.py": "from base import Trainer\n" + _HOOK_USER.format(derived=_UNSCALES),
            },
            name="base.py",
        ),
        *(
            Good(
                _HOOK.format(base=_UNSCALES, clip=_CLIPS),
                files={
                    "pyproject.toml": "",
                    "train.py": "from base import Trainer\n" + _HOOK_USER.format(derived=derived),
                },
                name="base.py",
            )
            for derived in ("super().before_clip()", "self.amp.unscale(self.optimizer)")
        ),
        Bad(
            _HOOK.format(base=_UNSCALES, clip=f"{_CLIPS}  # !"),
            files={
                "pyproject.toml": "",
                "train.py": "from base import Trainer\n" + _HOOK_USER.format(derived="pass"),
            },
            name="base.py",
            fixed=_HOOK.format(base=_UNSCALES, clip=f"{_UNSCALES}\n            {_CLIPS}"),
        ),
        Bad(_TWO_MODELS.format(other="two", unscaled="other", clip=f"{_CLIPS_ONE}  # !")),
        Bad(
            """\
import torch

class Gan:
    def __init__(self):
        self.one, self.two = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(self.one.parameters())
        self.optimizers = {"one": optimizer, "two": torch.optim.AdamW(self.two.parameters())}
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.one(x)).backward()
            for optimizer in (self.optimizers["two"],):
                self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.one.parameters(), 1.0)  # !
            self.scaler.step(self.optimizers["one"])
            self.scaler.update()
""",
            fixed="""\
import torch

class Gan:
    def __init__(self):
        self.one, self.two = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(self.one.parameters())
        self.optimizers = {"one": optimizer, "two": torch.optim.AdamW(self.two.parameters())}
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.one(x)).backward()
            for optimizer in (self.optimizers["two"],):
                self.scaler.unscale_(optimizer)
            self.scaler.unscale_(self.optimizers["one"])
            torch.nn.utils.clip_grad_norm_(self.one.parameters(), 1.0)
            self.scaler.step(self.optimizers["one"])
            self.scaler.update()
""",
        ),
        Good(_TWO_MODELS.format(other="two", unscaled="optimizer", clip=_CLIPS_ONE)),
        Good(_TWO_MODELS.format(other="two", unscaled="given", clip=_CLIPS_ONE)),
        Good(_TWO_MODELS.format(other="make(one)", unscaled="other", clip=_CLIPS_ONE)),
        Good(_TWO_MODELS.format(other="torch.nn.Sequential(one, two)", unscaled="other", clip=_CLIPS_ONE)),
        Good(
            """\
import torch

def unscaled_before_the_other_loss(loader):
    one, two = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
    optimizer, other = torch.optim.AdamW(one.parameters()), torch.optim.AdamW(two.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(one(x)).backward()
        scaler.unscale_(optimizer)
        scaler.scale(two(x)).backward()
        scaler.unscale_(other)
        torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(two.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.step(other)
        scaler.update()
"""
        ),
        Good(
            """\
import torch

class Trainer:
    def fit(self, loader):
        for x in loader:
            self.backward(self.model(x))
            self.clip()
            self.step()

class Half(Trainer):
    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip(self):
        pass

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

class Full(Trainer):
    def backward(self, loss):
        loss.backward()

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self):
        self.optimizer.step()
"""
        ),
        Good(
            """\
import math

import torch

LIMIT = math.inf

def measure(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        print(float(norm))
"""
        ),
        Bad(
            """\
import math

import torch

LIMIT = 1.0

def measure(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)  # !
        scaler.step(optimizer)
        scaler.update()
        print(float(norm))
""",
            fixed="""\
import math

import torch

LIMIT = 1.0

def measure(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        print(float(norm))
""",
        ),
        Bad(
            """\
import torch

def train(args, model, loader, optimizer, scaler):
    for i, x in enumerate(loader):
        optimizer.zero_grad()
        if args.accum_freq == 1:
            scaler.scale(model(x).sum()).backward()
        else:
            for part in x.chunk(args.accum_freq):
                scaler.scale(model(part).sum()).backward()
        if args.device != "tpu" and args.grad_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip_norm)  # !
        scaler.step(optimizer)
        scaler.update()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        reported: set[object] = set()
        for trace in facts.traces.all:
            for place, clip in enumerate(trace):
                if _clamps(clip.record) and clip.record not in reported:
                    backward = self._scaled(trace, place, facts)
                    if backward is not None:
                        reported.add(clip.record)
                        notes = self._notes(trace, place, backward)
                        help = self.help.format(scaler=facts.short(backward.scaler))
                        yield self.at(clip, expr=facts.short(clip.record.node), notes=notes, help=help)
                    continue
                if clip.kind != "clip" or clip.record in reported or not self._of_torch(clip, facts):
                    continue
                if facts.training_use.has_layers_in(Dtype.BF16, clip.call.argument(0, "parameters"), clip.call):
                    continue  # `scaler.step` raises
                if facts.scalars.only_measures(clip.call):
                    continue
                backward = self._scaled(trace, place, facts)
                if backward is None:
                    continue
                fix = self._fix(trace, place, backward, reported, facts)
                reported.add(clip.record)
                scaler = facts.short(backward.scaler)
                notes = self._notes(trace, place, backward)
                help = self.help.format(scaler=scaler)
                yield self.at(clip, expr=facts.short(clip.call.func), notes=notes, fix=fix, help=help)

    def _notes(self, trace: Trace, place: int, backward: TraceStep) -> tuple[Note, ...]:
        others = [
            Note("this unscales the gradients of another model", each.span)
            for each in trace[trace.index(backward) : place]
            if each.kind == "unscale" and compatible(each.guard, trace[place].guard, backward.guard)
        ]
        return (Note("the loss is scaled here", backward.span), *others)

    def _of_torch(self, clip: TraceStep, facts: Facts) -> bool:
        if facts.traces.clips_elsewhere(clip.call):
            return True
        atoms = [each.atom for each in facts.evaluate(clip.call.func, clip.call)]
        if any(isinstance(atom, Ref) and atom.path in library_names.CLIPS for atom in atoms):
            return True
        if any(isinstance(atom, Method) and atom.owner.path.endswith("FullyShardedDataParallel") for atom in atoms):
            return True  # the wrapper's own `clip_grad_norm_`
        clips = [atom for atom in atoms if atom != Constant(None)]  # None: the clipping is switched off
        return bool(clips) and all(isinstance(atom, Object) and atom.path in library_names.CLIPS for atom in clips)

    def _scaled(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the backward pass whose gradients are clipped while they are still scaled."""
        clip = trace[place]
        for index, backward in trace_facts.before(trace, place):
            if backward.scale is None or not facts.traces.like_torch(backward.scaler, backward.scale.call):
                continue
            if trace_facts.chosen(backward, clip):
                continue
            guard = clip.guard.joined(backward.guard, facts.traces.enabled(backward.scaler, backward.scale.call))
            if not guard.possible:
                continue
            between = trace_facts.between(
                trace, index, place, "unscale", "scaler_step", "step", "passed", "get_scale", guard=guard
            )
            if self._unscales_another(trace, place, backward, facts):
                between = (each for each in between if each.kind != "unscale")
            if any(each.kind != "get_scale" or facts.traces.computes_with_scale(each.call) for each in between):
                continue
            return backward
        return None

    def _unscales_another(self, trace: Trace, place: int, backward: TraceStep, facts: Facts) -> bool:
        """True if all that is unscaled before a clip are optimizers of other models than the one that is clipped.

        The scaler steps another optimizer that has the parameters of the clipped model.
        """
        clip, traces = trace[place], facts.traces
        before = [each for each in trace[:place] if each.kind == "unscale" and compatible(each.guard, clip.guard)]
        if clip.kind != "clip" or not before:
            return False
        model = traces.model_of(clip.call.argument(0, "parameters"), clip.call)
        unscaled = [each for step in before for each in traces.optimized(step)]
        return (
            model is not None
            and all(each is not None and traces.are_apart(each, model) for each in unscaled)
            and any(
                step.kind == "scaler_step"
                and compatible(step.guard, clip.guard)
                and traces.same(backward.scaler, backward.record, step.scaler, step.record)
                and model in traces.optimized(step)
                for step in trace[place:]
            )
        )

    def _fix(self, trace: Trace, place: int, backward: TraceStep, reported: set[object], facts: Facts) -> Fix | None:
        clip = trace[place]
        scaler = facts.short(backward.scaler)
        here = (backward.scale is not None and backward.scale.scope is clip.record.scope) or scaler.startswith("self.")
        guard = clip.guard.joined(backward.guard)
        steps = [
            each
            for each in trace[place:]
            if each.kind == "scaler_step"
            and compatible(each.guard, guard)
            and facts.traces.same(backward.scaler, backward.record, each.scaler, each.record)
        ]
        if not here or len({facts.short(step.optimizer) for step in steps}) != 1:
            return None
        step = steps[0]
        if step.record.scope is not clip.record.scope or step.loops != clip.loops or step.guard - guard:
            return None
        if backward.guard - clip.guard:
            return None  # the scaler may be None in the other branch
        if any(each.kind == "clip" and each.record in reported for each in trace[:place]):
            return None  # one `unscale_` is enough: the next round of fixes handles what is left
        if any(each.kind == "unscale" and compatible(each.guard, guard) for each in trace[place:]):
            return None  # a second `unscale_` raises
        later = (each for each in trace[place + 1 : trace.index(step)] if each.kind == "clip")
        if any(clip.guard - each.guard and compatible(each.guard, guard) for each in later):
            return None  # the later clip runs with or without the `unscale_` of this branch
        if step.optimizer is None:
            return None
        if not isinstance(clip.call.line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            return None
        optimizer = facts.text(step.optimizer, step.record)
        edit = python_edits.line_before(facts, clip.call.line, clip.call, f"{scaler}.unscale_({optimizer})")
        return Fix("Unscale the gradients first", "safe", (edit,))


def _clamps(record: Record) -> bool:
    """True for the use of a gradient, or of a name for it, that limits its elements: `p.grad.data.clamp_`."""
    return isinstance(record, Use) and record.path.endswith(".clamp_")
