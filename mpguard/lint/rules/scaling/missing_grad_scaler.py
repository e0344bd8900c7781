from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    SCALER_CLASS_FILES,
    Bad,
    Binding,
    Call,
    Diagnostic,
    Dtype,
    Edit,
    Event,
    Facts,
    Fix,
    Good,
    Note,
    Object,
    PathCondition,
    Record,
    Region,
    Rule,
    Scope,
    any_of,
    autocast_ops,
    can_be_chosen,
    compatible,
    dotted,
    python_edits,
    speed_measurement,
    text_of,
    unscaled_steps,
)

_SHAPES = autocast_ops.KEEPS | autocast_ops.NUMBERS
_FLOAT32_LAYERS = frozenset(f"torch.nn.{name}" for name in autocast_ops.FLOAT32_LAYERS)
#: A model whose autocast an argument of its constructor switches on.
_SWITCHED_NET = {
    "pyproject.toml": "",
    "net.py": "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self, width, amp=False):\n"
    "        super().__init__()\n        self.amp = amp\n        self.layer = torch.nn.Linear(width, 8)\n\n"
    "    def forward(self, x):\n        with torch.autocast('cuda', enabled=self.amp):\n"
    "            return self.layer(x)\n\ndef create(width, **kwargs):\n    return Net(width, **kwargs)\n",
}


_AUTOCASTING_NET = {
    "pyproject.toml": "",
    "net.py": "import torch\n"
    "\n"
    "class Net(torch.nn.Module):\n"
    "    def forward(self, x):\n"
    "        with torch.cuda.amp.autocast():\n"
    "            return x.sum()\n",
}


#: A network that inherits a method with an autocast from a class in another file.
_INHERITED_RENDER = {
    "pyproject.toml": "",
    "nets.py": "from renderer import Renderer, Exact\n\nclass Net(Renderer):\n    def forward(self, x):\n"
    "        return x * 2\n\nclass ExactNet(Exact):\n    def forward(self, x):\n        return x * 2\n",
    "renderer.py": """\
import torch

class Renderer(torch.nn.Module):
    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def render(self, x):
        return self.run(x)

    def run(self, x):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.opt.fp16):
            return self(x)

class Exact(Renderer):
    def run(self, x):
        return self(x)
""",
}


#: An object that scales a loss of its own, or one that it gets.
_ADVERSARIAL = {
    "pyproject.toml": "",
    "adversarial.py": """\
import torch

class Perturbed:
    def __init__(self, model, scaler):
        self.model = model
        self.scaler = scaler

    def train(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x + 0.1 * torch.randn_like(x)).mean()
        self.scaler.scale(loss).backward()

    def scaled(self, loss):
        self.scaler.scale(loss).backward()
""",
}

_REJECTS = """\
import argparse
import torch

def train(model, loader, optimizer, args):
    for x in loader:
        with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
            loss = model(x).sum()
        loss.backward(){mark}
        optimizer.step()

def main(model, loader, optimizer):
    options = argparse.ArgumentParser()
    options.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    args = options.parse_args()
    if args.dtype == "{dtype}":
        options.error("not supported")
    train(model, loader, optimizer, args)
"""


#: The program of three examples that train the network below: how it is made, and the mark of a finding.
_TRAINS_NET = """\
import torch
{helper}from net import net50

def main(loader):
    model = {made}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        loss = model(x).sum()
        loss.backward(){mark}
        optimizer.step()

main(torch.utils.data.DataLoader(torch.load("data.pt")))
"""
#: A network of an example that is FP16 only if it is asked for.
_NET_WITHOUT_FP16 = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dropout=0.0, fp16=False):
        super().__init__()
        self.fp16 = fp16
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout))

    def forward(self, x):
        with torch.cuda.amp.autocast(self.fp16):
            return self.layers(x)

def net50(**kwargs):
    return Net(**kwargs)
"""


class MissingGradScaler(Rule):
    """FP16 autocast, or FP16 weights, and the gradients are never scaled.

    ## What it does
    Checks each `loss.backward()` that an optimizer's `step()` follows. It is reported if the loss is computed in an
    FP16 autocast region, or with weights that are loaded in FP16, and the code around the loop uses no GradScaler,
    apex, DeepSpeed, Accelerate, Lightning or Trainer in the same branch of the flags. `torch.cuda.amp.autocast()` and
    `torch.autocast("cuda")` without a dtype are FP16.

    ## Why is this bad
    The smallest normal FP16 number is 6.1e-5, the smallest at all 6.0e-8 (IEEE 754 binary16). Gradients are often below
    both: those in between lose precision, those below become zero, and the weights behind them do not train. A
    GradScaler multiplies the loss (by 65536 at first), so that they stay in range, and skips the steps that overflow.

    ## Fix safety
    The fix creates a scaler before the loop, scales the loss, and steps and updates through it. It is unsafe: the run
    computes something else (what was intended), checkpoints should contain the scaler's state, and code between
    `backward` and `step` that reads gradients must unscale them first. The scaler is enabled where the region is FP16.
    There is no fix if the loop is not in one function, if it runs once per epoch (the scaler must outlive it), if
    several optimizers step, if a step can come without a backward before it, if gradients are clipped more often than
    they are applied, if another branch of a flag computes the loss (with apex, for example), if a flag around the
    region decides, nor for FP16 weights: GradScaler raises "Attempting to unscale FP16 gradients" for those; load them
    in FP32.

    ## Known limits
    If the loss is computed in another function than its backward pass, and a scaler, optimizer or loss comes from
    outside the linted tree, it is unknown whether a scaler exists, and the rule is silent: for a parameter without a
    known argument, an attribute that is not set in the tree, a base class that is not in the tree. It is silent, too,
    where another branch of the function scales the loss and this one has another flag. BF16 needs no scaler. A model
    that is cast to FP16 by hand is reported by MPG101. Scripts that only measure the speed of steps on one synthetic
    batch are skipped, and so are trial runs: functions that clear the gradients after the backward pass and never step.
    A region whose `enabled` is a parameter that all calls in the files of the program set to False is off. An autocast
    without a dtype whose device is a variable is taken for that of a GPU, and a dtype that a parameter gives for its
    default, or for FP16 where the code asks whether it is.
    """

    code, name = "MPG201", "missing-grad-scaler"
    severity = "error"
    message = "{what}, but the gradients are never scaled"
    help = "create a GradScaler, scale the loss, step and update through it; or use BF16"
    triggers = (any_of(b".backward("),)
    triggers_nearby = (any_of(b"autocast", b"half", b"float16", b"fp16"), any_of(b".step("))
    yields_to = ("MPG202", "MPG211", "MPG212", "MPG213")
    examples = (
        Bad(
            """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
args = parser.parse_args()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
        loss = model(x).sum()
    loss.backward()  # !
    optimizer.step()
"""
        ),
        Bad(
            """\
import click
import torch
from config import Config

@click.command()
@click.option("--amp-dtype", type=click.Choice(["float16", "float32"]), default="float16")
def main(amp_dtype):
    for x in loader:
        with torch.autocast("cuda", dtype=getattr(torch, amp_dtype)):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()

def train(model, loader, optimizer, cfg: Config):
    for x in loader:
        with torch.autocast("cuda", dtype=getattr(torch, cfg.compute_dtype)):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()
""",
            files={
                "config.py": """\
from dataclasses import dataclass

@dataclass
class Config:
    compute_dtype: str = "float16"
"""
            },
        ),
        Bad(
            """\
import torch

class ShiftScaleRotate(torch.nn.Module):
    def forward(self, x):
        return x.flip(-1)

class Head(torch.nn.Module):
    def __init__(self, width, init_scale=0.02):
        super().__init__()
        self.linear = torch.nn.Linear(width, 2)
        torch.nn.init.trunc_normal_(self.linear.weight, std=init_scale)

    def forward(self, x):
        return self.linear(upscaler(x))

def upscaler(x):
    return x * 2

def augment(x):
    return ShiftScaleRotate()(x)

def train(loader):
    model = Head(8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(augment(x)).sum()
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch

class ShiftScaleRotate(torch.nn.Module):
    def forward(self, x):
        return x.flip(-1)

class Head(torch.nn.Module):
    def __init__(self, width, init_scale=0.02):
        super().__init__()
        self.linear = torch.nn.Linear(width, 2)
        torch.nn.init.trunc_normal_(self.linear.weight, std=init_scale)

    def forward(self, x):
        return self.linear(upscaler(x))

def upscaler(x):
    return x * 2

def augment(x):
    return ShiftScaleRotate()(x)

def train(loader):
    model = Head(8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(augment(x)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import functools
import torch

amp = functools.partial(torch.autocast, "cuda", dtype=torch.float16)

def train(model, loader, optimizer):
    for x in loader:
        with amp():
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import functools
import torch

amp = functools.partial(torch.autocast, "cuda", dtype=torch.float16)

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with amp():
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(_REJECTS.format(dtype="bfloat16", mark="  # !")),
        Good(
            """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
parser.add_argument("--amp", choices=["float32", "bfloat16"], default="bfloat16")
args = parser.parse_args()

def scaled(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")
    for x in loader:
        with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def never(model, loader, optimizer):
    for x in loader:
        with torch.autocast("cuda", dtype=getattr(torch, args.amp)):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
        ),
        *(
            example(
                f"""\
import torch

learning_rate = 6e-4
dtype = "bfloat16"
exec(open("configurator.py").read())

precision = {{"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}}[dtype]
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
for x in loader:
    with torch.autocast("cuda", dtype=precision):
        loss = model(x).sum()
    {backward}
""",
                files={
                    "configurator.py": "import sys\n\nexec(open(sys.argv[1]).read())\n",
                    "config/old_gpu.py": config,
                },
            )
            for example, config, backward in (
                (
                    Bad,
                    "import time\n\n# an old GPU\nlearning_rate = time.time()\ndtype = 'float16'\n",
                    "loss.backward()  # !\n    optimizer.step()",
                ),
                (Good, "dtype = 'bfloat16'\n", "loss.backward()\n    optimizer.step()"),
                (Good, "dtype = 'float16'\nheads = 4\n", "loss.backward()\n    optimizer.step()"),
                (Good, "dtype = 'float16'\nprint(dtype)\n", "loss.backward()\n    optimizer.step()"),
                (
                    Good,
                    "dtype = 'float16'\n",
                    "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
                ),
            )
        ),
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (model(x) - y).pow(2).mean()
    loss.backward()  # !
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
            fixed="""\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (model(x) - y).pow(2).mean()
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

def main(args, loader):
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=dtype, enabled=args.amp):
            loss = model(x).sum()
            aux = model(y).sum()
        loss.backward(retain_graph=True)  # !
        aux.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
""",
            fixed="""\
import torch

def main(args, loader):
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp and dtype == torch.float16)
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=dtype, enabled=args.amp):
            loss = model(x).sum()
            aux = model(y).sum()
        scaler.scale(loss).backward(retain_graph=True)
        scaler.scale(aux).backward()
        if i % 4 == 3:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        ),
        Bad(
            """\
import torch

def train_one_epoch(model, optimizer, loader):
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()

def main(loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        train_one_epoch(model, optimizer, loader)
"""
        ),
        Bad(
            """\
import torch
from functools import partial

def run_epoch(model, loader, optimizer=None):
    amp = partial(torch.autocast, device_type="cuda", dtype=torch.float16)
    for x in loader:
        with torch.set_grad_enabled(optimizer is not None), amp():
            loss = model(x).sum()
        if optimizer is not None:
            loss.backward()  # !
            optimizer.step()

def main(loader):
    model = torch.nn.Linear(8, 8)
    run_epoch(model, loader, torch.optim.SGD(model.parameters(), 0.1))
    run_epoch(model, loader)
""",
            fixed="""\
import torch
from functools import partial

def run_epoch(model, loader, optimizer=None):
    amp = partial(torch.autocast, device_type="cuda", dtype=torch.float16)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.set_grad_enabled(optimizer is not None), amp():
            loss = model(x).sum()
        if optimizer is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

def main(loader):
    model = torch.nn.Linear(8, 8)
    run_epoch(model, loader, torch.optim.SGD(model.parameters(), 0.1))
    run_epoch(model, loader)
""",
        ),
        Bad(
            """\
import torch
from torch.cuda.amp import autocast

def forward(model, batch):
    with autocast():
        return model(batch).sum()

def train(loader, epochs):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for batch in loader:
            loss = forward(model, batch)
            (loss / 4).backward()  # !
            optimizer.step()
""",
            fixed="""\
import torch
from torch.cuda.amp import autocast

def forward(model, batch):
    with autocast():
        return model(batch).sum()

def train(loader, epochs):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for batch in loader:
            loss = forward(model, batch)
            scaler.scale(loss / 4).backward()
            scaler.step(optimizer)
            scaler.update()
""",
        ),
        Bad(
            """\
import torch

class Run:
    def __init__(self, args):
        self.dtype = torch.float16 if args.fp16 else torch.bfloat16
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def loss(self, batch):
        return self.model(batch).mean()

    def train_step(self, batch):
        with torch.autocast(device_type="cuda", dtype=self.dtype):
            loss = self.loss(batch)
        loss.backward()  # !
        self.optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from apex import amp

def train(args, loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    if args.apex:
        model, optimizer = amp.initialize(model, optimizer)
    for x in loader:
        if args.apex:
            loss = model(x).sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            with torch.autocast("cuda"):
                loss = model(x).sum()
            loss.backward()  # !
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def clips_each_microbatch(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        loss.backward()  # !
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if i % 4 == 3:
            optimizer.step()

def skips_a_batch(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, valid in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        if valid:
            loss.backward()  # !
        optimizer.step()
        optimizer.zero_grad()

def steps_more_often(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        loss.backward()  # !
        for _ in range(2):
            optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def two_ways_to_clip(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16): loss = model(x).sum()
        loss.backward()  # !
        if args.clip == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step(); optimizer.zero_grad()
""",
            fixed="""\
import torch

def two_ways_to_clip(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16): loss = model(x).sum()
        scaler.scale(loss).backward()
        if args.clip == "norm":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        ),
        Bad(
            """\
import torch

from transformers import AutoModel

model = AutoModel.from_pretrained("gpt2", dtype=torch.float16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    loss = model(x).sum()
    loss.backward()  # !
    optimizer.step()
"""
        ),
        Bad(
            """\
import torch

class Run:
    def __init__(self, model, mixed_precision=False):
        self.model, self.mixed_precision = model, mixed_precision
        self.optimizer = torch.optim.AdamW(model.parameters())

    def loss(self, x):
        if self.mixed_precision:
            with torch.autocast(device_type="cuda"):
                return self.model(x).sum()
        return self.model(x).sum()

    def fit(self, loader):
        for x in loader:
            loss = self.loss(x)
            loss.backward()  # !
            self.optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from shim import autocast

class Run:
    def __init__(self, model, amp):
        self.model, self.amp = model, amp
        self.optimizer = torch.optim.AdamW(model.parameters())

    def fit(self, loader):
        for x in loader:
            with autocast(enabled=self.amp):
                loss = self.model(x).sum()
            loss.backward()  # !
            self.optimizer.step()
""",
            files={
                "shim.py": "import torch\n\ndef autocast(**kwargs):\n    return torch.autocast('cuda', **kwargs)\n",
                "pyproject.toml": "",
            },
        ),
        Bad(
            """\
import contextlib
import torch
from data import args, loader

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
contexts = {"fp16": torch.autocast("cuda", dtype=torch.float16), "no": contextlib.nullcontext()}
for x in loader:
    with contexts[args.precision]:
        loss = model(x).sum()
    loss.backward()  # !
    optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def from_outside(model, optimizer, x):
    with torch.cuda.amp.autocast():
        loss = model(x).sum()
    loss.backward()  # !
    optimizer.step()

def train_one_epoch(model, loader, optimizer, scaler, amp):
    for i, x in enumerate(loader):
        with torch.autocast("cuda", enabled=amp):
            loss = model(x).sum()
        if amp:
            loss.backward()  # !
            if i % 4 == 3:
                optimizer.step()
                scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from base import BaseTrainer

class Trainer(BaseTrainer):
    def __init__(self, model, config):
        super().__init__(model)
        self.config = config
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.use_amp)

    def train_on_batch(self, x):
        with torch.autocast("cuda", enabled=self.config.use_amp):
            loss = self.model(x).sum()
        loss.backward()  # !
        self.optimizer.step()
        self.scaler.update()

    def load_checkpoint(self, state):
        if self.scaler and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
""",
            files={
                "pyproject.toml": "",
                "base.py": "import torch\n\nclass BaseTrainer:\n    def __init__(self, model):\n"
                "        self.model = model\n        self.optimizer = self.init_optimizer()\n\n"
                "    def fit(self, loader):\n        for x in loader:\n            self.train_on_batch(x)\n",
                "other.py": "import torch\nfrom base import BaseTrainer\n\nclass Other(BaseTrainer):\n"
                "    def train_on_batch(self, x):\n        self.scaler.scale(self.model(x).sum()).backward()\n",
            },
        ),
        Bad(
            """\
import torch
from detectron2.engine import SimpleTrainer

class AMPTrainer(SimpleTrainer):
    def run_step(self):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = sum(self.model(next(self._data_loader_iter)).values())
        self.optimizer.zero_grad()
        loss.backward()  # !
        self.loss_scale_meter.update(self.loss_scale_meter.val)
        self.optimizer.step()
"""
        ),
        Bad(
            """\
import torch

class Adaptive(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for p in self.param_groups[0]["params"]:
            p_data_fp32 = p.data.float()
            p_data_fp32.add_(p.grad, alpha=-1e-3)
            p.data.copy_(p_data_fp32)

def train(loader, model):
    optimizer = Adaptive(model.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch

class Adaptive(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for p in self.param_groups[0]["params"]:
            p_data_fp32 = p.data.float()
            p_data_fp32.add_(p.grad, alpha=-1e-3)
            p.data.copy_(p_data_fp32)

def train(loader, model):
    optimizer = Adaptive(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch
from shim import autocast, other

class Run:
    def __init__(self, model, amp):
        self.model, self.amp = model, amp
        self.optimizer = torch.optim.AdamW(model.parameters())

    def fit(self, loader, options):
        for x in loader:
            with autocast(enabled=self.amp, dtype=torch.bfloat16):
                loss = self.model(x).sum()
            with autocast(**options):
                loss = loss + self.model(x).sum()
            with autocast(enabled=False):
                loss = loss + self.model(x).sum()
            with other(enabled=self.amp):
                loss = loss + self.model(x).sum()
            loss.backward()
            self.optimizer.step()
""",
            files={
                "shim.py": "import torch\n\ndef autocast(**kwargs):\n    return torch.autocast('cuda', **kwargs)\n\n"
                "def other(**kwargs):\n    kwargs = {'dtype': torch.bfloat16, **kwargs}\n"
                "    return torch.autocast('cuda', **kwargs)\n",
                "pyproject.toml": "",
            },
        ),
        Good(
            """\
import torch

def train(args, loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    for x in loader:
        with torch.autocast("cuda", torch.float16, enabled=args.amp):
            loss = model(x).sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

def exclusive(args, loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        if args.amp:
            with torch.autocast("cuda", torch.float16):
                print(model(x).sum())
        else:
            model(x).sum().backward()
            optimizer.step()

def evaluates_in_half(loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.no_grad(), torch.autocast("cuda"):
            target = model(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (model(x) - target).pow(2).sum()
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from accelerate import Accelerator
from timm.utils import NativeScaler
from project import BaseTrainer, build

def with_wrapper(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    loss_scaler = NativeScaler()
    for x in loader:
        with torch.cuda.amp.autocast():
            loss = model(x).sum()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer)
        else:
            loss.backward()
            optimizer.step()

class Mine(BaseTrainer):
    def step(self, x):
        optimizer = torch.optim.AdamW(self.model.parameters())
        with torch.cuda.amp.autocast():
            loss = self.model(x).sum()
        loss.backward()
        self.apply(optimizer)

    def apply(self, optimizer):
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def train(args, loader, dtype):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x).sum()
        with torch.autocast("cpu"):
            loss = loss + model(x).sum()
        with torch.autocast("cuda", enabled=False):
            loss = loss + model(x).sum()
        with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
            loss = loss + model(x).sum()
        loss.backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import contextlib
import torch

class Precision:
    def __init__(self, fp16):
        self.dtype = torch.float16 if fp16 else torch.float32

    @contextlib.contextmanager
    def __call__(self):
        with torch.autocast("cuda", dtype=self.dtype, enabled=self.dtype == torch.float16):
            yield

class Trainer:
    def __init__(self, args, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.autocast = Precision(args.fp16)

    def train(self, loader):
        for x in loader:
            with self.autocast():
                loss = self.model(x).sum()
            loss.backward()  # !
            self.optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from contextlib import nullcontext

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

def train(args, loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=DTYPES[args.dtype]):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()

def train_by_hardware(loader, model, optimizer):
    dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    ptdtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype, torch.float32)
    ctx = torch.autocast("cuda", dtype=ptdtype) if torch.cuda.is_available() else nullcontext()
    for x in loader:
        with ctx:
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

dtype = "float16"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=ptdtype):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

def in_bfloat16(loader):
    kind = "bf16"
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
    for x in loader:
        with torch.autocast("cuda", dtype=dtypes[kind]):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

AMP_DTYPE = torch.bfloat16

def forgets_the_dtype(loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def peak_memory(model):
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, 8)).sum()
    loss.backward()
    optimizer.step()
    return torch.cuda.max_memory_allocated()
""",
            files={"tests/__init__.py": ""},
            name="tests/measure.py",
        ),
        Good(
            """\
import torch

class TrainBenchmark:
    def step(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
""",
            name="benchmark.py",
        ),
        Bad(
            """\
import contextlib
import torch

class MixedPrecision:
    def __init__(self, activated):
        self.activated = activated

    def context(self):
        return torch.autocast("cuda") if self.activated else contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()  # !

    def step(self, model, optimizer):
        optimizer.step()
""",
            files=SCALER_CLASS_FILES,
            name="amp.py",
        ),
        Bad(
            """\
import torch

def compute_loss(args, model, x):
    with torch.autocast("cuda", dtype=torch.float16):
        simple_loss, pruned_loss = model(x)
    return args.simple_loss_scale * simple_loss + args.pruned_loss_scale * pruned_loss

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = compute_loss(args, model, x)
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch

def compute_loss(args, model, x):
    with torch.autocast("cuda", dtype=torch.float16):
        simple_loss, pruned_loss = model(x)
    return args.simple_loss_scale * simple_loss + args.pruned_loss_scale * pruned_loss

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        loss = compute_loss(args, model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch

def compute_loss(args, model, x):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(x).sum()

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = compute_loss(args, model, x)
        loss = loss * args.loss_scale
        loss.backward()
        for p in model.parameters():
            p.grad.div_(args.loss_scale)
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

class Trainer:
    def __init__(self, prepared):
        self.grad_scalar = prepared["grad_scalar"]
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, x):
        with torch.autocast("cuda"):
            loss = self.model(x).sum()
        self.grad_scalar.scale(loss).backward()
        self.grad_scalar.step(self.optimizer)
"""
        ),
        Bad(
            """\
import torch

def train(generator, discriminator, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer_d = torch.optim.AdamW(discriminator.parameters())
    optimizer_g = torch.optim.AdamW(generator.parameters())
    for x in loader:
        with torch.autocast("cuda"):
            loss_d = discriminator(x).sum()
        optimizer_d.zero_grad()
        scaler.scale(loss_d).backward()
        scaler.step(optimizer_d)
        scaler.update()
    for x in loader:
        with torch.autocast("cuda"):
            loss_g = generator(x).sum()
        optimizer_g.zero_grad()
        loss_g.backward()  # !
        optimizer_g.step()
"""
        ),
        Good(
            """\
import argparse
import contextlib
import torch

def get_autocast(precision):
    return torch.cuda.amp.autocast if precision == "amp" else contextlib.nullcontext

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    autocast = get_autocast(args.precision)
    for x in loader:
        with autocast():
            loss = model(x).sum()
        loss.backward()
        optimizer.step()

def main(model, loader):
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["amp_bf16", "bf16", "fp32"])
    train(parser.parse_args(), model, loader)
"""
        ),
        Good(
            """\
import torch

def train(renderer, unet, scaler, optimizer, unet_optimizer, loader):
    for x in loader:
        with torch.autocast("cuda"):
            loss, latents = renderer(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            clean = latents.expand(4, 4)
        noise = torch.randn(clean.shape)
        unet_loss = torch.nn.functional.mse_loss(unet(clean + noise), noise)
        unet_loss.backward()
        unet_optimizer.step()
"""
        ),
        Good(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.AdamW(unet.parameters())
optimizer_cls = torch.optim.AdamW(classifier.parameters())
for x in loader:
    with torch.autocast("cuda"):
        loss = unet(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
for x in loader:
    with torch.autocast("cuda", enabled=False):
        loss = classifier(x).sum()
        loss.backward()
        optimizer_cls.step()
"""
        ),
        speed_measurement(region='with torch.autocast("cuda"):'),
        Good(
            """\
import torch
from net import create

def train(args, loader):
    model = create(8, amp=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            files=_SWITCHED_NET,
        ),
        Bad(
            """\
import torch
from net import create

def train(args, loader):
    model = create(8, amp=args.amp)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()  # !
        optimizer.step()
""",
            files=_SWITCHED_NET,
        ),
        Good(
            """\
import torch
from net import Criterion, Net

def in_fp32(loader):
    model, criterion = Net(), Criterion()
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
            files={
                "pyproject.toml": "",
                "net.py": "'The model, which runs in torch.autocast as well.'\nimport torch\n\n"
                "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
                "        self.layer = torch.nn.Linear(8, 8)\n\n"
                "    def forward(self, x):\n        return self.layer(x)\n\n"
                "class Criterion(torch.nn.Module):\n    def forward(self, outputs, targets):\n"
                "        return (outputs - targets).pow(2).mean()\n",
                "with_amp.py": "import torch\nfrom net import Criterion, Net\n\ndef in_fp16(loader):\n"
                "    model, criterion = Net(), Criterion()\n"
                "    optimizer = torch.optim.AdamW(model.parameters())\n"
                "    scaler = torch.amp.GradScaler('cuda')\n    for x, y in loader:\n"
                "        with torch.autocast('cuda', dtype=torch.float16):\n            outputs = model(x)\n"
                "            loss = criterion(outputs, y)\n        scaler.scale(loss).backward()\n"
                "        scaler.step(optimizer)\n        scaler.update()\n",
            },
        ),
        Bad(
            """\
import torch

def train(args, model, loader, device):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast(device_type=device.type, enabled=args.amp):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()
""",
        ),
        Good(
            """\
import torch

def train(args, model, loader, device):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=args.amp):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch

def train(model, loader):
    device = torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast(device_type=device.type):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import contextlib

import torch
from sklearn.base import BaseEstimator

class Estimator(BaseEstimator):
    def _context(self, device):
        use_amp = self.amp and device.type == "cuda"
        if use_amp:
            context = lambda: torch.autocast(device_type="cuda", dtype=torch.float16)
        else:
            context = contextlib.nullcontext
        return use_amp, context

    def fit(self, x, y):
        optimizer = torch.optim.AdamW(self.model.parameters())
        _, context = self._context(self.device)
        for batch in self.batches(x, y):
            shift = batch.y_scaler_mean
            with context():
                loss = self.model(batch - shift).sum()
            loss.backward()  # !
            optimizer.step()
""",
        ),
        Good(
            """\
import contextlib

import torch
from sklearn.base import BaseEstimator

class Estimator(BaseEstimator):
    def _context(self, device):
        use_amp = self.amp and device.type == "cuda"
        if use_amp:
            context = lambda: torch.autocast(device_type="cuda", dtype=torch.bfloat16)
        else:
            context = contextlib.nullcontext
        return use_amp, context

    def fit(self, x, y):
        optimizer = torch.optim.AdamW(self.model.parameters())
        _, context = self._context(self.device)
        for batch in self.batches(x, y):
            shift = batch.y_scaler_mean
            with context():
                loss = self.model(batch - shift).sum()
            loss.backward()
            optimizer.step()
""",
        ),
        Bad(
            """\
import contextlib

import torch

def loss_of(model, x, training):
    gradients = contextlib.nullcontext if training else torch.no_grad
    with torch.autocast("cuda"), gradients():
        loss = model(x).sum()
    if training:
        loss.backward()  # !
    return loss

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss_of(model, x, training=True)
        optimizer.step()
""",
        ),
        Good(
            """\
import torch

def train(model, teacher, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda"), torch.no_grad():
            target = teacher(x)
        loss = (model(x) - target).sum()
        loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

class Critic:
    def __init__(self, config, module, optimizer):
        self.config, self.module, self.optimizer = config, module, optimizer

    def _forward(self, x):
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            return self.module(x).sum()

    def _step(self):
        self.optimizer.step()

    def update(self, parts):
        for x in parts:
            loss_scale_factor = 1 / len(parts)
            loss = self._forward(x) * loss_scale_factor
            loss.backward()  # !
        self._step()
""",
        ),
        Good(
            """\
import torch

class Critic:
    def __init__(self, config, module, optimizer):
        self.config, self.module, self.optimizer = config, module, optimizer

    def _forward(self, x):
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            return self.module(x).sum()

    def _step(self):
        self.optimizer.step()

    def update(self, parts):
        for x in parts:
            loss_scale_factor = 1 / len(parts)
            loss = self._forward(x) * loss_scale_factor
            loss.backward()
        self._step()
""",
        ),
        Good(
            """\
import torch

class Critic:
    def __init__(self, config, module, optimizer):
        self.config, self.module, self.optimizer = config, module, optimizer

    def _forward(self, x):
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            return self.module(x).sum()

    def _step(self):
        self.optimizer.step()

    def update(self, parts):
        for x in parts:
            loss_scale_factor = self.config.loss_scale
            loss = self._forward(x) * loss_scale_factor
            loss.backward()
        self._step()
""",
        ),
        Bad(
            """\
import torch

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    use_scaler = args.amp and scaler is not None
    for x in loader:
        with torch.autocast("cuda", enabled=use_scaler):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()
""",
        ),
        Good(
            """\
import torch

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    use_scaler = args.amp and scaler is not None
    for x in loader:
        with torch.autocast("cuda", enabled=use_scaler):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch
from net import Net

def train(model, loader, optimizer, scaler=None):
    use_amp = scaler is not None
    for x in loader:
        loss = loss_of(model, x, use_amp)
        if scaler:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()

def loss_of(model, x, use_amp):
    if use_amp:
        with torch.cuda.amp.autocast():
            return model(x)
    return model(x)

def main(args, loader):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, loader, optimizer, torch.amp.GradScaler("cuda") if args.amp else None)
""",
            files=_AUTOCASTING_NET,
        ),
        Bad(
            """\
import torch
from net import Net

def train(model, loader, optimizer):
    for x in loader:
        loss = model(x)
        loss.backward()  # !
        optimizer.step()

def main(args, loader):
    model = Net()
    train(model, loader, torch.optim.AdamW(model.parameters()))
""",
            files=_AUTOCASTING_NET,
        ),
        Bad(
            """\
import torch

class Trainer:
    def __init__(self, model, optimizer, precision: torch.dtype = torch.float16):
        assert not isinstance(model, torch.nn.DataParallel)
        self.model, self.optimizer = model, optimizer
        self.precision = precision

    def run_step(self, x):
        with torch.autocast("cuda", dtype=self.precision):
            loss = self.model(x).sum()
        loss.backward()  # !
        self.optimizer.step()
""",
        ),
        Good(
            """\
import torch

class Trainer:
    def __init__(self, model, optimizer, precision: torch.dtype = torch.bfloat16):
        assert not isinstance(model, torch.nn.DataParallel)
        self.model, self.optimizer = model, optimizer
        self.precision = precision

    def run_step(self, x):
        with torch.autocast("cuda", dtype=self.precision):
            loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
""",
        ),
        Bad(
            """\
import torch

class Trainer:
    def __init__(self, model, amp):
        self.model, self.amp = model, amp
        self.optimizer = torch.optim.AdamW(model.parameters())

    def train(self, x):
        loss = self.forward(x)
        self.backward(loss)

    def forward(self, x):
        with torch.autocast("cuda", enabled=self.amp):
            return self.model(x).sum()

    def backward(self, loss):
        loss.backward()  # !
        self.optimizer.step()
""",
        ),
        Good(
            """\
import torch

class Trainer:
    def __init__(self, model, amp):
        self.model, self.amp = model, amp
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)

    def train(self, x):
        loss = self.forward(x)
        self.backward(loss)

    def forward(self, x):
        with torch.autocast("cuda", enabled=self.amp):
            return self.model(x).sum()

    def backward(self, loss):
        if self.amp:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
""",
        ),
        Good(
            """\
import contextlib
import torch

class Trainer:
    def __init__(self, amp, optimizer):
        self.optimizer = optimizer
        if amp:
            self.context, self.scaler = torch.cuda.amp.autocast, torch.cuda.amp.GradScaler()
        else:
            self.context, self.scaler = contextlib.nullcontext, None

    def step(self, batch):
        with self.context():
            loss = self.model(batch).sum()
        loss = self.scaler.scale(loss) if self.scaler else loss
        loss.backward()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

def step(model, batch, optimizer, amp, scaler=None):
    if amp:
        with torch.cuda.amp.autocast():
            loss = model(batch).sum()
    else:
        loss = model(batch).sum()
    if scaler is not None:
        loss = scaler.scale(loss)
    loss.backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
"""
        ),
        Good(
            """\
import torch

def boxes_of(teacher, image):
    with torch.autocast("cuda"):
        out = teacher(image)
    return out.boxes.to("cpu").numpy().astype("float32"), out.scores.cpu().numpy()

@torch.no_grad()
def target_of(teacher, image):
    with torch.autocast("cuda"):
        return teacher(image)

def train(model, teacher, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for image in loader:
        boxes, scores = boxes_of(teacher, image)
        loss = model(image, boxes, scores).sum() + (model(image) - target_of(teacher, image)).abs().sum()
        loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def boxes_of(model, image):
    with torch.autocast("cuda"):
        out = model(image)
    return out.boxes, out.scores.detach().cpu().numpy()

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for image, target in loader:
        boxes, scores = boxes_of(model, image)
        loss = (boxes - target).abs().sum()
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch

def boxes_of(model, image):
    with torch.autocast("cuda"):
        out = model(image)
    return out.boxes, out.scores.detach().cpu().numpy()

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for image, target in loader:
        boxes, scores = boxes_of(model, image)
        loss = (boxes - target).abs().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch

def main(model, teacher, loader, images):
    with torch.autocast("cuda"):
        sizes = [size for _, size in map(teacher, images)]
        _, shown = teacher(images[0])
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        x = torch.stack([each for each, _ in batch])
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    return sizes, shown
""",
        ),
        Good(
            """\
import torch

def labels_of(teacher, loader):
    found = []
    for x in loader:
        with torch.autocast("cuda"):
            y = teacher(x).argmax(-1)
        found.append((x, y))
    return found

def train(encoder, head, teacher, loader):
    encoder.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters())
    for x, y in labels_of(teacher, loader):
        x = x.to("cuda")
        with torch.autocast("cuda"):
            features = encoder.encode(x).features
        loss = torch.nn.functional.cross_entropy(head(features.float()), y)
        loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def train(model, critic, loader):
    critic.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        out = model(x)
        with torch.autocast("cuda"):
            loss = critic(out)
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch

def train(model, critic, loader):
    critic.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        out = model(x)
        with torch.autocast("cuda"):
            loss = critic(out)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch

def without_gradients(function):
    def wrapped(*args):
        with torch.no_grad():
            return function(*args)
    return wrapped

@without_gradients
def target_of(teacher, x):
    with torch.autocast("cuda"):
        return teacher(x)

def roll_out(model, prompts):
    with torch.autocast("cuda"):
        tokens = model.generate(prompts)
    return tokens

def train(model, teacher, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for prompts in loader:
        tokens = roll_out(model, prompts)
        loss = (model(tokens) - target_of(teacher, tokens)).abs().sum()
        loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def logged(function):
    def wrapped(*args):
        print(function.__name__)
        return function(*args)
    return wrapped

@logged
def loss_of(model, x):
    with torch.autocast("cuda"):
        return model(x).sum()

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = loss_of(model, x)
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch

def logged(function):
    def wrapped(*args):
        print(function.__name__)
        return function(*args)
    return wrapped

@logged
def loss_of(model, x):
    with torch.autocast("cuda"):
        return model(x).sum()

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

def gathered(x, group, grad_scaler=True):
    return Gather.apply(x, group, grad_scaler)

class Training:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.AdamW(model.parameters())

    def train(self):
        for x in self.loader:
            with torch.autocast("cuda", enabled=torch.cuda.is_available()):
                print(self.step(x))

    def step(self, x):
        self.optimizer.zero_grad()
        loss = gathered(self.model(x), None).mean()
        loss.backward()  # !
        self.optimizer.step()
        return loss.item()
""",
        ),
        Good(
            """\
import torch

class Training:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.AdamW(model.parameters())

    def train(self):
        for x in self.loader:
            with torch.autocast("cuda"):
                with torch.autocast("cuda", enabled=False):
                    self.step(x)
            with torch.autocast("cuda", torch.bfloat16):
                self.step(x)

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).mean().backward()
        self.optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from torch.cuda.amp import GradScaler, autocast

def resume(path, model, optimizer, scaler=None):
    state = torch.load(path)
    optimizer.load_state_dict(state["optimizer"])
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    everything = (model, optimizer, scaler)
    del state
    return everything

def train(path, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler()
    if path:
        model, optimizer, scaler = resume(path, model, optimizer, scaler)
    for x in loader:
        with autocast():
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()
""",
        ),
        Bad(
            """\
from nets import Net

import torch

def train(opt, loader):
    print("FP16" if opt.fp16 else "FP32")
    model = Net(opt)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model.render(x).mean()
        loss.backward()  # !
        optimizer.step()
""",
            files=_INHERITED_RENDER,
        ),
        Good(
            """\
from nets import ExactNet

import torch

def train(opt, loader):
    print("FP16" if opt.fp16 else "FP32")
    model = ExactNet(opt)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model.render(x).mean()
        loss.backward()
        optimizer.step()
""",
            files=_INHERITED_RENDER,
        ),
        Good(
            """\
from nets import Net

import torch

def train(opt, loader):
    print("FP16" if opt.fp16 else "FP32")
    model = Net(opt)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=opt.fp16)
    for x in loader:
        loss = model.render(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            files=_INHERITED_RENDER,
        ),
        Bad(
            """\
import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import LoraLoaderMixin

class Preview(DiffusionPipeline, LoraLoaderMixin):
    def __init__(self, unet):
        super().__init__()
        self.unet = unet

def train(unet, loader):
    optimizer = torch.optim.AdamW(unet.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = unet(x).mean()
        loss.backward()  # !
        optimizer.step()
        Preview(unet).save_pretrained("last")
""",
            fixed="""\
import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import LoraLoaderMixin

class Preview(DiffusionPipeline, LoraLoaderMixin):
    def __init__(self, unet):
        super().__init__()
        self.unet = unet

def train(unet, loader):
    optimizer = torch.optim.AdamW(unet.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = unet(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        Preview(unet).save_pretrained("last")
""",
        ),
        Bad(
            """\
import torch
from adversarial import Perturbed

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    perturbed = Perturbed(model, scaler)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        loss.backward()  # !
        perturbed.train(x)
        optimizer.step()
""",
            files=_ADVERSARIAL,
        ),
        Good(
            """\
import torch
from adversarial import Perturbed

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    perturbed = Perturbed(model, scaler)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        perturbed.scaled(loss)
        scaler.step(optimizer)
        scaler.update()
""",
            files=_ADVERSARIAL,
        ),
        Good(
            """\
import dataclasses
import torch

@dataclasses.dataclass
class Params:
    lr: float = 1e-3
    dtype: torch.dtype = torch.float16

class Trainer:
    def __init__(self, model, params: Params):
        self.model, self.params = model, params
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=params.lr)

    def step(self, x):
        with torch.autocast("cuda", dtype=self.params.dtype):
            loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()

def main(model, loader):
    trainer = Trainer(model, Params(dtype=torch.bfloat16))
    for x in loader:
        trainer.step(x)
"""
        ),
        Bad(
            """\
import dataclasses
import torch

@dataclasses.dataclass
class Params:
    lr: float = 1e-3
    dtype: torch.dtype = torch.bfloat16

class Trainer:
    def __init__(self, model, params: Params):
        self.model, self.params = model, params
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=params.lr)

    def step(self, x):
        with torch.autocast("cuda", dtype=self.params.dtype):
            loss = self.model(x).sum()
        loss.backward()  # !
        self.optimizer.step()

def main(model, loader):
    trainer = Trainer(model, Params(lr=1e-4, dtype=torch.float16))
    for x in loader:
        trainer.step(x)
"""
        ),
        Good(
            """\
import functools
import torch

amp = functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16)
off = functools.partial(torch.autocast, "cuda", dtype=torch.float16, enabled=False)

def train(model, loader, optimizer):
    for x in loader:
        with amp():
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
        with off():
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
        ),
        Good(_REJECTS.format(dtype="float16", mark="")),
        Bad(
            """\
import dataclasses

import torch

@dataclasses.dataclass
class Params:
    dtype: torch.dtype = torch.float16

class Finetuning:
    def __init__(self, model, params):
        self.model, self.params = model, params
        self.optimizer = torch.optim.AdamW(model.parameters())

    def run(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=self.params.dtype):
                loss = self.model(x).sum()
            loss.backward()  # !
            self.optimizer.step()
""",
            name="finetuning.py",
            fixed="""\
import dataclasses

import torch

@dataclasses.dataclass
class Params:
    dtype: torch.dtype = torch.float16

class Finetuning:
    def __init__(self, model, params):
        self.model, self.params = model, params
        self.optimizer = torch.optim.AdamW(model.parameters())

    def run(self, loader):
        scaler = torch.amp.GradScaler("cuda", enabled=self.params.dtype == torch.float16)
        for x in loader:
            with torch.autocast("cuda", dtype=self.params.dtype):
                loss = self.model(x).sum()
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
""",
            files={
                "pyproject.toml": "",
                "main.py": "import sys\n\nimport torch\nfrom finetuning import Finetuning, Params\n"
                "\ndtype = torch.float16 if sys.argv[1] != 'cpu' else torch.bfloat16\n"
                "tuning = Finetuning(torch.nn.Linear(8, 8).cuda(), Params(dtype=dtype))\n"
                "tuning.run(torch.rand(4, 2, 8, device='cuda'))\n",
            },
        ),
        Good(
            """\
import torch

class BaseTrainer:
    DTYPE = torch.float16

    def fit(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=self.DTYPE):
                loss = self.model(x).sum()
            loss.backward()
            self.optimizer.step()
""",
            name="base_trainer.py",
            files={
                "pyproject.toml": "",
                "trainer.py": "import torch\nfrom base_trainer import BaseTrainer\n\n"
                "class Trainer(BaseTrainer):\n    DTYPE = torch.bfloat16\n\n"
                "    def __init__(self, model):\n        self.model = model\n"
                "        self.optimizer = torch.optim.AdamW(model.parameters())\n\n"
                "Trainer(torch.nn.Linear(8, 8).cuda()).fit(torch.rand(4, 2, 8, device='cuda'))\n",
            },
        ),
        Bad(
            """\
import torch

class BaseTrainer:
    DTYPE = torch.bfloat16

    def fit(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=self.DTYPE):
                loss = self.model(x).sum()
            loss.backward()  # !
            self.optimizer.step()
""",
            name="base_trainer.py",
            files={
                "pyproject.toml": "",
                "trainer.py": "import torch\nfrom base_trainer import BaseTrainer\n\n"
                "class Trainer(BaseTrainer):\n    DTYPE = torch.float16\n\n"
                "    def __init__(self, model):\n        self.model = model\n"
                "        self.optimizer = torch.optim.AdamW(model.parameters())\n\n"
                "Trainer(torch.nn.Linear(8, 8).cuda()).fit(torch.rand(4, 2, 8, device='cuda'))\n",
            },
            fixed="""\
import torch

class BaseTrainer:
    DTYPE = torch.bfloat16

    def fit(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            with torch.autocast("cuda", dtype=self.DTYPE):
                loss = self.model(x).sum()
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
""",
        ),
        Good(
            """\
import sys

import torch

if sys.argv[1] == "fp16":
    dtype = torch.float16
elif sys.argv[1] == "bf16":
    dtype = torch.bfloat16
else:
    dtype = torch.float32
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x).sum()
    if dtype == torch.float16:
        train_scaled(scaler, loss, optimizer)
    else:
        loss.backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from actors.base import BaseActor

class Actor(BaseActor):
    def __init__(self, config, model, optimizer):
        super().__init__(config)
        self.model, self.optimizer = model, optimizer

    def log_probabilities(self, batch):
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            return self.model(batch).log_softmax(-1)

    def update_policy(self, batches):
        for batch in batches:
            loss = -self.log_probabilities(batch).mean()
            loss.backward()  # !
            self.update_weights()

    def update_weights(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
"""
        ),
        Bad(
            """\
import torch
from optimizers import build

def train(args, model, loader):
    optimizer = build(args.optimizer, model)
    for x in loader:
        with torch.autocast("cuda", enabled=args.amp):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()
""",
            files={
                "pyproject.toml": "",
                "optimizers.py": "import torch\n\nclass Lion(torch.optim.Optimizer):\n"
                "    def step(self):\n        for p in self.masters:\n            p.copy_(p.clone().float())\n\n"
                "def build(name, model):\n    if name == 'lion':\n        return Lion(model.parameters(), {})\n"
                "    return torch.optim.AdamW(model.parameters())\n",
            },
            fixed="""\
import torch
from optimizers import build

def train(args, model, loader):
    optimizer = build(args.optimizer, model)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for x in loader:
        with torch.autocast("cuda", enabled=args.amp):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

def train(args, manager, loader):
    def step(x):
        with torch.autocast("cuda", enabled=args.amp):
            loss = manager.model(x).sum() / args.fold
        loss.backward()  # !
        return loss.detach()

    optimizer = manager.scheduler.optimizer
    total = 0
    for i, x in enumerate(loader):
        total += step(x)
        if (i + 1) % args.fold == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
        ),
        Good(
            """\
import torch

def dtype_of(name):
    match name:
        case "fp16" | "half":
            return torch.float16
        case "bf16":
            return torch.bfloat16
        case _:
            raise ValueError(name)

def train(precision, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=dtype_of(precision)):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()

train("bf16", torch.nn.Linear(8, 8).cuda(), torch.rand(4, 2, 8, device="cuda"))
"""
        ),
        Bad(
            """\
import torch

def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        results = []
        for part in x.chunk(4):
            with torch.autocast("cuda", dtype=torch.float16):
                results.append(model(part))
            (results[-1].loss / 4).backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        results = []
        for part in x.chunk(4):
            with torch.autocast("cuda", dtype=torch.float16):
                results.append(model(part))
            scaler.scale(results[-1].loss / 4).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch

def train(model, probe, loader, optimizer):
    for x in loader:
        seen = []
        with torch.autocast("cuda", dtype=torch.float16):
            seen.append(probe(x).detach())
        optimizer.zero_grad()
        model(torch.stack(seen)).mean().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
import torch.nn.functional as F

criterion = torch.nn.CrossEntropyLoss()

def train(model, loader, optimizer):
    for x, y, z in loader:
        logits, numbers = model(x)
        with torch.autocast("cuda"):
            loss = criterion(logits.view(-1, logits.size(-1)), y.view(-1))
            loss = loss + F.mse_loss(numbers, z)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def train(args, model, loader, optimizer):
    loss_scale = 0.5 if args.loss == "trades" else 1.0
    size = int(args.batch_size * loss_scale)
    for x in loader:
        for part in x.split(size):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(part).sum()
            loss.backward()  # !
            optimizer.step()
""",
            fixed="""\
import torch

def train(args, model, loader, optimizer):
    loss_scale = 0.5 if args.loss == "trades" else 1.0
    size = int(args.batch_size * loss_scale)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        for part in x.split(size):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(part).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
        ),
        Bad(
            """\
import torch

class BarlowTwins(torch.nn.Module):
    def __init__(self, scale_loss=1 / 32):
        super().__init__()
        self.scale_loss = scale_loss

    def forward(self, a, b):
        return self.scale_loss * (a @ b.T).pow(2).sum()

def train(model, loader, optimizer):
    criterion = BarlowTwins()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), model(y))
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch

class BarlowTwins(torch.nn.Module):
    def __init__(self, scale_loss=1 / 32):
        super().__init__()
        self.scale_loss = scale_loss

    def forward(self, a, b):
        return self.scale_loss * (a @ b.T).pow(2).sum()

def train(model, loader, optimizer):
    criterion = BarlowTwins()
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), model(y))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

def train(model, loader, optimizer, device):
    amp = device.type == "cuda"
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type=device.type, dtype=torch.float16, enabled=amp):
            loss = model(x).sum()
        loss.backward()  # !
        optimizer.step()

def run(node, model, loader, optimizer):
    if node.type == "train":
        train(model, loader, optimizer, torch.device(node.device))
""",
            fixed="""\
import torch

def train(model, loader, optimizer, device):
    amp = device.type == "cuda"
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type=device.type, dtype=torch.float16, enabled=amp):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def run(node, model, loader, optimizer):
    if node.type == "train":
        train(model, loader, optimizer, torch.device(node.device))
""",
        ),
        Bad(
            """\
import torch
import torch.nn.functional as F

def train(encode, loader, optimizer):
    for images, texts, labels in loader:
        a, b = encode(images, texts)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(a @ b.t() / 0.07, labels)
        loss.backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch
import torch.nn.functional as F

def train(encode, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for images, texts, labels in loader:
        a, b = encode(images, texts)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(a @ b.t() / 0.07, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        # The loop calls the backward pass and the step of an optimizer that a subclass makes.
        Bad("""\
import abc
import torch

class Loop(abc.ABC):
    def __init__(self, net, amp=False):
        self.net, self.amp = net, amp
        self.optimizer = self.get_optimizer(net.parameters())

    @abc.abstractmethod
    def get_optimizer(self, parameters): ...

    def backward_batch(self, x):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
            loss = self.net(x).sum()
        loss.backward()  # !

    def step_optimizer(self):
        self.optimizer.step()

    def train(self, batches):
        for x in batches:
            self.backward_batch(x)
            self.step_optimizer()
            self.optimizer.zero_grad()
"""),
        Good("""\
import abc
import torch

class Loop(abc.ABC):
    def __init__(self, net, amp=False):
        self.net, self.amp = net, amp
        self.optimizer = self.get_optimizer(net.parameters())

    @abc.abstractmethod
    def get_optimizer(self, parameters): ...

    def probe(self, x):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
            loss = self.net(x).sum()
        loss.backward()
        return [parameter.grad.isfinite().all() for parameter in self.net.parameters()]

    def step_optimizer(self):
        self.optimizer.step()

    def train(self, batches):
        for x in batches:
            self.net(x).sum().backward()
            self.step_optimizer()
"""),
        # What the code asks about the parameter says which dtypes it may get.
        Bad("""\
import torch

class Model(torch.nn.Module):
    def train_step(self, x, precision):
        with torch.autocast("cuda", enabled=precision != torch.float32, dtype=precision):
            loss = self(x).sum()
        loss.backward()  # !
        self.optimizer.step()

    def fit(self, loader, precision=torch.float32):
        print("half precision", precision == torch.float16)
        for x in loader:
            self.train_step(x, precision)
"""),
        Good("""\
import torch

class Model(torch.nn.Module):
    def train_step(self, x, precision):
        with torch.autocast("cuda", enabled=precision != torch.float32, dtype=precision):
            loss = self(x).sum()
        loss.backward()
        self.optimizer.step()

    def fit(self, loader, precision=torch.float32):
        print("half precision", precision == torch.bfloat16)
        for x in loader:
            self.train_step(x, precision)
"""),
        # A trial run that measures memory drops the gradients.
        Good("""\
import torch

def largest_batch(model, sizes):
    for size in sizes:
        with torch.autocast("cuda"):
            out = model(torch.zeros(size, 3, 64, 64, device="cuda"))
        out.float().sum().backward()
        model.zero_grad(set_to_none=True)
        if torch.cuda.max_memory_allocated() > 2**34:
            return size // 2

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    largest_batch(model, (1, 2, 4))
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""),
        # A function in a method calls another method that steps; a GAN clears the gradients of its other network.
        Bad("""\
import torch

class Trainer:
    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer

    def step(self):
        self.optimizer.step()

    def fit(self, loader):
        def run(x):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.net(x).sum()
            loss.backward()  # !
            self.step()
        for x in loader:
            run(x)
"""),
        Bad(
            """\
import torch

def train(gen, disc, loader):
    opt_g = torch.optim.Adam(gen.parameters())
    for z in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = disc(gen(z)).mean()
        loss.backward()  # !
        disc.zero_grad()
        if z.isfinite().all():
            opt_g.step()
        opt_g.zero_grad()
""",
            fixed="""\
import torch

def train(gen, disc, loader):
    opt_g = torch.optim.Adam(gen.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for z in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = disc(gen(z)).mean()
        scaler.scale(loss).backward()
        disc.zero_grad()
        if z.isfinite().all():
            scaler.step(opt_g)
            scaler.update()
        opt_g.zero_grad()
""",
        ),
        # A method probes FP16 once; its loop trains in FP32.
        Good("""\
import torch

class Loop:
    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer

    def probe(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.net(x).sum()
        loss.backward()

    def step_optimizer(self):
        self.optimizer.step()

    def train(self, batches):
        self.probe(batches[0])
        for x in batches:
            self.net(x).sum().backward()
            self.step_optimizer()
            self.optimizer.zero_grad()
"""),
        # What other code asks about a dtype, a default and a check that refuses FP16 say nothing.
        Good("""\
import torch

def size_of(dtype):
    return 2 if dtype == torch.float16 else 4

def train_step(model, x, optimizer, dtype):
    if dtype == torch.float16:
        raise ValueError("FP16 needs a scaler")
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def train_in_bf16(model, x, optimizer, dtype=torch.bfloat16):
    print("half", dtype == torch.float16)
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""),
        # A method runs the backward pass for each part of a batch, and the step once.
        Bad("""\
import torch

class Trainer:
    def __init__(self, net, get_optimizer):
        self.net, self.optimizer = net, get_optimizer(net.parameters())

    def compute(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.net(x).sum()
        loss.backward()  # !

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fit(self, loader):
        for batch in loader:
            for x in batch.split(4):
                self.compute(x)
            self.update()
"""),
        # What the backward pass of a GAN leaves in its other network is cleared.
        Bad("""\
import torch

def run(gen, disc, z):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = disc(gen(z)).mean()
    loss.backward()  # !
    print(loss.item())
    disc.zero_grad()

def train(gen, disc, loader):
    optimizer = torch.optim.Adam(gen.parameters())
    for z in loader:
        run(gen, disc, z)
        optimizer.step()
        optimizer.zero_grad()
"""),
        Good(
            _TRAINS_NET.format(helper="", made="net50(dropout=0.4).cuda()", mark=""),
            files={"pyproject.toml": "", "net.py": _NET_WITHOUT_FP16},
        ),
        Bad(
            _TRAINS_NET.format(helper="", made="net50(dropout=0.4, fp16=True).cuda()", mark="  # !"),
            files={"pyproject.toml": "", "net.py": _NET_WITHOUT_FP16},
        ),
        Bad(
            _TRAINS_NET.format(
                helper="from helper import prepare\n", made="prepare(net50(dropout=0.4).cuda())", mark="  # !"
            ),
            files={
                "pyproject.toml": "",
                "net.py": _NET_WITHOUT_FP16,
                "helper.py": "def prepare(m):\n    m.fp16 = True\n    return m\n",
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        losses = facts.events("backward")
        if not losses or facts.declared == "inference" or facts.may_keep_masters:
            return
        reported: set[Scope] = set()
        for backward in losses:
            if backward.scope in reported or facts.is_inference(backward.call) or _is_scaled(backward):
                continue
            program = facts.reachable(backward.scope)
            for region, where, guard, inside in self._low_precision(backward, facts):
                direct = backward if region is not None and inside.scope is backward.scope else None
                step = unscaled_steps.plain_step(backward, guard, program, facts)
                if not can_be_chosen(guard, program):
                    continue
                owner = backward.scope.owner
                if step is None:
                    continue
                trainer = owner if step.scope.owner is owner and inside.scope.owner is owner else None
                if direct is None and trainer is None and facts.base_unknown(owner):
                    continue
                if unscaled_steps.arm_scales(backward, facts):
                    continue
                both, scaling = guard.joined(step.guard), self._scaling(backward, step, facts)
                if unscaled_steps.may_be_scaled(both, scaling, facts, direct, step, trainer=trainer):
                    continue
                reported |= {scope for scope in program if scope.kind != "module"}
                notes = (
                    Note("FP16 from here", where.span, facts.elsewhere(where)),
                    Note("this step applies the gradients", step.span, facts.elsewhere(step.call)),
                )
                # There is no fix for FP16 weights: GradScaler refuses gradients of FP16 parameters.
                here = region is not None and facts.elsewhere(where) is None
                fix = self._fix(backward, step, region, guard, facts) if region is not None and here else None
                what = "FP16 autocast" if region is not None else "FP16 weights"
                yield self.at(backward, what=what, notes=notes, fix=fix)
                break

    def _scaling(self, backward: Event, step: Event, facts: Facts) -> set[Scope]:
        """Return the functions that may scale the loss.

        If a class has one method for backward and another one for the step, they are its own and what calls backward.
        """
        owner = backward.scope.owner
        if owner is not None and step.scope is not backward.scope and step.scope.owner is owner:
            given = any(dotted(backward.subject) == param.name for param in backward.scope.params)
            if given and facts.class_kind(owner) == "own":
                return {*owner.descendants(), *(call.scope for call in facts.callers(backward.scope))}
        return facts.programs_of(backward.scope)

    # -- what makes the gradients FP16 --------------------------------------------------------------

    def _low_precision(
        self, backward: Event, facts: Facts
    ) -> Iterator[tuple[Region | None, Call, PathCondition, Record]]:
        """Yield what computes this loss in FP16.

        That is the region (None: weights), its call, the condition for both, and what is computed in it.
        """
        assert backward.subject is not None
        program = facts.programs_of(backward.scope)
        records: list[Record] = [backward.call, *facts.flow.backward(backward.subject, backward.call)]
        for record in records:
            if _of_another_loop(record, backward) or (record is not backward.call and _lowers_nothing(record, facts)):
                continue
            around = facts.regions(record)
            without = [region.guard for region in around if region.kind == "no_grad"]
            for place, region in enumerate(around):
                for guard in self._float16_conditions(region, around[place + 1 :]):
                    both = guard.joined(record.guard, backward.guard)
                    if not any(compatible(each, both) for each in without) and _is_active(region, both, program, facts):
                        assert region.call is not None
                        yield region, region.call, both, record
            here = isinstance(record, Call) and record.scope is backward.scope and record is not backward.call
            if not here or without or any(region.kind == "autocast" for region in around):
                continue
            for region, entered in facts.autocasts(record):  # of the callers
                for guard in region.may_be(Dtype.FP16):
                    both = guard.joined(entered, backward.guard)
                    if _is_active(region, both, program, facts):
                        assert region.call is not None
                        yield region, region.call, both, record
        for load in facts.events("load"):
            for guard in load.may_be(Dtype.FP16):
                both = guard.joined(backward.guard)
                if both.possible and self._weights(load, backward, both, facts):
                    yield None, load.call, both, load.call

    def _float16_conditions(self, region: Region, inner: tuple[Region, ...]) -> list[PathCondition]:
        """Return the conditions under which a region is FP16, and not overridden inside."""
        if region.kind != "autocast" or region.call is None:
            return []
        if any(o.kind == "autocast" and (not o.guard.possible or compatible(o.guard, region.guard)) for o in inner):
            return []
        return region.may_be(Dtype.FP16)

    def _weights(self, load: Event, backward: Event, guard: PathCondition, facts: Facts) -> bool:
        """True if the load creates FP16 weights whose gradients this backward computes."""
        if facts.is_inference(load.call) or facts.kinds(load.subject, load.call) != {"model"}:
            return False
        if _of_accelerate(guard, facts) or facts.frozen_params.is_frozen(load.call.node):
            return False
        reach = facts.flow.forward(load.call.node, load.call, guard)
        if reach.meets("peft") or not reach.meets("optimizer"):
            return False
        return any(sink.kind == "backward" and sink.call is backward.call for sink in reach.sinks)

    # -- the fix ------------------------------------------------------------------------------------

    def _fix(self, backward: Event, step: Event, region: Region, guard: PathCondition, facts: Facts) -> Fix | None:
        torch = python_edits.name_of_torch(facts)
        scope = backward.scope
        loops = [loop for loop in backward.call.loops if isinstance(loop, (cst.For, cst.While))]
        together = step.scope is scope and loops and set(loops[:1]) <= set(step.call.loops)
        if torch is None or not together or step.subject is None or step.call.node.args or facts.repeated(scope):
            return None
        if any(event.scope is scope for event in facts.events("scaler")):
            return None  # there is one, which nothing uses
        if backward.guard - step.guard or not set(step.call.loops) <= set(backward.call.loops):
            return None  # a step without a backward before it: `scaler.step` would find no gradients to check
        if not step.call.is_statement or not isinstance(step.call.line, cst.SimpleStatementLine):
            return None
        if [event for event in facts.events("step") if event.scope is scope] != [step]:
            return None
        enabled = self._enabled(region, guard, backward, torch, facts)
        if enabled is None:
            return None
        taken = {key for place in scope.within() for key in place.bindings}
        scaler = next(name for name in ("scaler", "grad_scaler", "amp_scaler") if name not in taken)
        optimizer = facts.text(step.subject, step.call)
        created = f'{scaler} = {torch}.amp.GradScaler("cuda"{enabled})'
        edits = [
            python_edits.line_before(facts, loops[0], backward.call, created),
            python_edits.replaced(step.call.node, step.call, f"{scaler}.step({optimizer})"),
            python_edits.line_after(facts, step.call.line, step.call, f"{scaler}.update()"),
        ]
        for each in facts.events("backward"):
            if each.scope is not scope:
                continue
            if each.subject is None or not set(loops[:1]) <= set(each.call.loops) or facts.is_inference(each.call):
                return None
            if not compatible(each.guard, guard):
                return (
                    None  # an exclusive branch, which may scale its loss in another way, would step through the scaler
                )
            loss = facts.text(each.subject, each.call)
            inner = loss[1:-1] if loss.startswith("(") and loss.endswith(")") and ")" not in loss[1:-1] else loss
            edits.append(Edit(*facts.outer_span(each.subject, each.call), f"{scaler}.scale({inner})"))
        clips = self._clips(backward, step, facts)
        if clips is None:
            return None
        unscale = f"{scaler}.unscale_({optimizer})"
        edits += [python_edits.line_before(facts, clip.call.line, clip.call, unscale) for clip in clips]
        return Fix("Create a GradScaler, scale the loss, step and update through it", "unsafe", tuple(edits))

    def _clips(self, backward: Event, step: Event, facts: Facts) -> list[Event] | None:
        """Return the clips before which the gradients have to be unscaled: the first one of each branch.

        None if `unscale_` would run more often than the step, or if a later clip may run with or without it.
        """
        first: list[Event] = []
        for clip in facts.events("clip"):
            if clip.scope is not step.scope or not backward.order < clip.order < step.order:
                continue
            earlier = [each for each in first if compatible(each.guard, clip.guard)]
            if any(not (each.guard - clip.guard) for each in earlier):
                continue
            line = isinstance(clip.call.line, (cst.SimpleStatementLine, cst.SimpleStatementSuite))
            if earlier or not line or step.guard - clip.guard or clip.call.loops != step.call.loops:
                return None
            first.append(clip)
        return first

    def _enabled(self, region: Region, guard: PathCondition, backward: Event, torch: str, facts: Facts) -> str | None:
        """Return the scaler's `enabled=` argument, true where the region is FP16; None if no expression gives that."""
        call = region.call
        assert call is not None
        legacy = facts.called_path(call).startswith("torch.cuda.amp.")
        enabled, dtype = call.argument(0 if legacy else 2, "enabled"), call.argument(1, "dtype")
        scope, guard, conditions = backward.scope, PathCondition(guard - backward.guard), []
        before = facts.span(backward.call.loops[0], backward.call)[0]
        if enabled is not None and facts.enabled(call, facts.called_path(call)):
            guard = PathCondition(guard - facts.enabled(call, facts.called_path(call)))
            conditions.append((enabled, dotted(enabled)))
        if dtype is not None and len(region.dtypes) > 1:
            for conditional, _ in region.dtypes:
                guard = PathCondition(guard - conditional)
            conditions.append((dtype, f"{dotted(dtype)} == {torch}.float16"))
        for node, _ in conditions:
            bindings = scope.bindings.get(dotted(node).split(".", 1)[0], ())
            if not dotted(node) or call.scope is not scope or any(each.span[0] >= before for each in bindings):
                return None
        if guard:
            return None
        return f", enabled={' and '.join(text for _, text in conditions)}" if conditions else ""


def _is_active(region: Region, guard: PathCondition, program: set[Scope], facts: Facts) -> bool:
    """True if an FP16 region may be entered under a condition; it was not meant to be BF16, as MPG310 reports."""
    if not guard.possible or _of_accelerate(guard, facts) or facts.switched_off(region, program):
        return False
    return region.call is not None and region.call not in facts.forgotten_dtypes


def _lowers_nothing(record: Record, facts: Facts) -> bool:
    """True for a loss of torch that autocast computes in FP32, for a change of shape, and for a sum of such values."""
    value = record.node if isinstance(record, Call) else record.value if isinstance(record, Binding) else None
    if value is None or "@" in text_of(value):
        return False
    call = facts.call_of(value)
    return isinstance(value, cst.BinaryOperation) or (call is not None and _keeps_dtype(call, facts))


def _keeps_dtype(call: Call, facts: Facts) -> bool:
    """True for a call of torch that autocast does not run in low precision: a method only of what is no module."""
    if call.receiver is not None and call.name in _SHAPES:
        is_module = "model" in facts.kinds(call.receiver, call)
        named = dotted(call.receiver).rsplit(".", 1)[-1] in facts.training_use.modules
        return not (is_module or named or facts.functions(call))
    if call.name in autocast_ops.FLOAT32_ON_CUDA and facts.called_path(call).startswith("torch."):
        return True
    made = [each.atom for each in facts.evaluate(call.func, call)]
    return bool(made) and all(isinstance(each, Object) and each.path in _FLOAT32_LAYERS for each in made)


def _of_accelerate(guard: PathCondition, facts: Facts) -> bool:
    """True if a condition tests the precision that Accelerate gets as well: Accelerate then creates the scaler."""
    return "mixed_precision" in guard.flags() and "accelerat" in facts.file_text


def _is_scaled(backward: Event) -> bool:
    """True for `any.scale(loss).backward()`, whatever the object is called and wherever it comes from."""
    loss = backward.subject
    return isinstance(loss, cst.Call) and isinstance(loss.func, cst.Attribute) and loss.func.attr.value == "scale"


def _of_another_loop(record: Record, backward: Event) -> bool:
    """True for what a loop before the one of the backward pass computes, if that one binds the loss again."""
    outer, name = backward.call.loops[:1], dotted(backward.subject)
    if record.scope is not backward.scope or not record.loops or not outer or outer[0] in record.loops:
        return False
    bound = (
        each for each in backward.scope.bindings.get(name, ()) if each.kind == "assign" and each.loops[:1] == outer
    )
    return any(each.order < backward.order and not each.guard - backward.guard for each in bound)
