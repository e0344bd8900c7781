from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Binding,
    Call,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    Object,
    Rule,
    Scope,
    any_of,
    compatible,
    computes_without_float16,
    dotted,
    lazy_pattern,
    scales_without_need,
)

#: In the name of a parameter that is an optimizer.
_OPTIMIZER = lazy_pattern("(?i)optim")
#: The message about a call of a function of another module.
_ELSEWHERE = "`{expr}` saves the optimizer's state, but not the GradScaler's"


class ScalerNotInCheckpoint(Rule):
    """A checkpoint to resume from contains the optimizer's state but not the GradScaler's.

    ## What it does
    Reports a saved `optimizer.state_dict()` in a file that also loads an optimizer's state, scales its losses with a
    GradScaler of its own and saves no `scaler.state_dict()`; a function that saves it, gets a scaler as an argument and
    does nothing with it; a function of another module that saves it and does not get the scaler; and a scaler whose
    state is saved but not loaded where the optimizer's is.

    ## Why is this bad
    A new GradScaler starts at a scale of 65536. The resumed run overflows again until the scale has come down: each of
    these steps is skipped, while the schedule and the step count advance. If the scale had grown, small gradients
    underflow until it has grown again, 2,000 steps for a factor of two. The resumed run differs from the run that was
    not interrupted.

    ## Known limits
    Checkpoints without an optimizer's state are for inference and not reported, nor are those of a file that never
    loads one, or only in a function that nothing calls, in a branch that no call asks for (`resume=False`), or after
    reading a key that they lack, or of a file with another name than those that are loaded: whether a run resumes from
    them is unknown. A scaler under BF16 is reported by MPG207,
    one that is created in each epoch by MPG209: it has no state to restore. Silent if the scaler comes from outside the
    file, is passed to a function that may save it, or has a name that cannot be followed (a loop over objects), and if
    nothing calls `update()`: the scale then never changes. An unknown base class may save the scaler; the rule then
    considers only the checkpoint of the file itself.
    """

    code, name = "MPG208", "scaler-not-in-checkpoint"
    severity = "warning"
    message = "the checkpoint holds `{expr}`, but not the GradScaler's state"
    help = "save `scaler.state_dict()` too, and load it on resuming"
    triggers = (
        any_of(b".scale(", b"caler.load_state_dict("),
        any_of(b".update(", b"caler.load_state_dict("),
        any_of(b"save"),
    )
    triggers_nearby = (any_of(b"Scaler"), any_of(b"state_dict("))
    examples = (
        Bad(
            """\
import os

import torch
from torch.cuda.amp import GradScaler, autocast


def run_fold(fold, model, loader, path):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler()
    if os.path.exists(path):
        states = torch.load(path)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    for epoch in range(10):
        for x in loader:
            with autocast():
                loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # !


for fold in range(5):
    run_fold(fold, build(), loader, f"fold{fold}.pt")
""",
        ),
        Good(
            """\
import torch
from torch.cuda.amp import GradScaler, autocast


def train_epoch(model, loader, optimizer, epoch):
    scaler = GradScaler()
    for x in loader:
        with autocast():
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def main(model, loader, optimizer, path):
    states = torch.load(path)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    for epoch in range(10):
        train_epoch(model, loader, optimizer, epoch)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
""",
        ),
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
if resume:
    found = torch.load("last.pt")
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
for epoch in range(10):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")  # !
"""
        ),
        Bad(
            """\
import torch

def make(model):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    return optimizer, scaler

def train(model, loader, resume):
    optimizer, scaler = make(model)
    if resume:
        optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"optimizer": optimizer.state_dict()}, "last.pt")  # !
"""
        ),
        Bad(
            """\
import torch
from checkpoints import load, save
from amp import make

def train(model, loader):
    optimizer, scaler = make(model)
    load("last.pt", optimizer)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    save("last.pt", optimizer)  # !
""",
            files={
                "amp.py": """\
import torch

def make(model):
    return torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
""",
                "checkpoints.py": """\
import torch

def save(path, optimizer):
    torch.save({"optimizer": optimizer.state_dict()}, path)

def load(path, optimizer):
    optimizer.load_state_dict(torch.load(path)["optimizer"])
""",
            },
        ),
        Bad(
            """\
import torch
from checkpoints import load_state, save_state

def train(model, loader):
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    load_state("optimizer.pt", optimizer)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    save_state("model.pt", model)
    save_state("optimizer.pt", optimizer)  # !
""",
            files={
                "checkpoints.py": """\
import torch

def save_state(path, anything):
    torch.save(anything.state_dict(), path)

def load_state(path, anything):
    anything.load_state_dict(torch.load(path))
"""
            },
        ),
        Good(
            """\
import torch
from checkpoints import load_scheduler, save

def never_resumed(model, loader):
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    scheduler = load_scheduler(optimizer)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    save("last.pt", optimizer)
""",
            files={
                "checkpoints.py": """\
import torch

def save(path, optimizer):
    torch.save({"optimizer": optimizer.state_dict()}, path)

def load_scheduler(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer)
"""
            },
        ),
        Good(
            """\
import torch
from checkpoints import load, save
from amp import make

def train(model, loader):
    optimizer, scaler = make(model)
    load("last.pt", optimizer, scaler)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    save("last.pt", optimizer, scaler)
""",
            files={
                "amp.py": """\
import torch

def make(model):
    return torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
""",
                "checkpoints.py": """\
import torch

def save(path, optimizer, scaler):
    torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)

def load(path, optimizer, scaler):
    found = torch.load(path)
    optimizer.load_state_dict(found["optimizer"])
    scaler.load_state_dict(found["scaler"])
""",
            },
        ),
        Bad(
            """\
import os

import torch
from torch.cuda.amp import GradScaler

class Run:
    def __init__(self, model, args):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = GradScaler(enabled=args.fp16)

    def step(self, x):
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self, folder):
        torch.save(self.model.state_dict(), os.path.join(folder, "model.pt"))
        state = self.optimizer.state_dict()  # !
        torch.save(state, os.path.join(folder, "optimizer.pt"))

    def load(self, folder):
        self.optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt")))
"""
        ),
        Bad(
            """\
import torch
from project import smart_resume

def train(model, loader, weights):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    smart_resume(torch.load(weights), optimizer)
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")  # !
"""
        ),
        Bad(
            """\
import torch

def train(model, loader, resume):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    if resume:
        found = torch.load(resume)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["scaler"] = scaler.state_dict()  # !
    torch.save(state, "last.pt")
"""
        ),
        Bad(
            """\
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

class Run:
    def __init__(self, model, args):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "fp16")

    def step(self, x):
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self, folder):
        model, optimizer = get_state_dict(model=self.model, optimizers=self.optimizer)  # !
        dcp.save(model, checkpoint_id=folder / "model")
        dcp.save(optimizer, checkpoint_id=folder / "optimizer")

    def load(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load(model, checkpoint_id=folder / "model")
        dcp.load(optimizer, checkpoint_id=folder / "optimizer")
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
"""
        ),
        Good(
            """\
import torch

class Run:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, "last.pt")

    def load_checkpoint(self, path):
        self.optimizer.load_state_dict(torch.load(path)["optimizer"])

def main(model, loader):
    run = Run(model)
    run.train(loader)
""",
            files={"pyproject.toml": "", "main.py": "from train import main\n\nmain(model, loader)\n"},
            name="train.py",
        ),
        Bad(
            """\
import torch

class Run:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, "last.pt")  # !

    def load_checkpoint(self, path):
        self.optimizer.load_state_dict(torch.load(path)["optimizer"])

def main(model, loader):
    run = Run(model)
    run.load_checkpoint("last.pt")
    run.train(loader)
""",
            files={"pyproject.toml": ""},
        ),
        Good(
            """\
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from project import get_state_dict as of_ones_own

class Run:
    def __init__(self, model, args):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "fp16")

    def step(self, x):
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}, checkpoint_id=folder)

    def load(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.scaler.load_state_dict(state["scaler"])
"""
        ),
        Good(
            """\
import torch

def train(model, loader, resume, helpers):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    if resume:
        found = torch.load(resume)
        optimizer.load_state_dict(found["optimizer"])
        if "scaler" in found:
            scaler.load_state_dict(found["scaler"])
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if scaler is not None:
        state["scaler"] = scaler.state_dict()
    torch.save(state, "last.pt")
"""
        ),
        Good(
            """\
import torch
from project import save_checkpoint

def handed(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    save_checkpoint(model.state_dict(), optimizer.state_dict(), scaler)
"""
        ),
        Good(
            """\
import torch

def any_object(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    objects = {"model": model, "optimizer": optimizer, "scaler": scaler}
    torch.save({name: each.state_dict() for name, each in objects.items()}, "last.pt")
    torch.save(optimizer.state_dict(), "optimizer.pt")
"""
        ),
        Good(
            """\
import torch

def for_inference(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    before = optimizer.state_dict()
    optimizer.load_state_dict(before)
    torch.save(model.state_dict(), "model.pt")

def full_precision(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), "optimizer.pt")
"""
        ),
        Bad(
            """\
import torch

class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)

def save_model(path, epoch, model, optimizer, loss_scaler):
    to_save = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}  # !
    torch.save(to_save, path)

def load_model(path, model, optimizer, loss_scaler):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if "scaler" in checkpoint:
        loss_scaler.load_state_dict(checkpoint["scaler"])
"""
        ),
        Good(
            """\
import torch
from runs import load_optimizer_state

def finetunes(model, loader, args):
    optimizer = torch.optim.AdamW(model.parameters())
    if args.load_optimizer:  # warm-start the optimizer from the pretraining run
        optimizer.load_state_dict(load_optimizer_state("base", args.tag))
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
        ),
        Good(
            """\
import torch

def exclusive(model, loader, args):
    optimizer = torch.optim.AdamW(model.parameters())
    if args.amp:
        scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        loss = model(x).sum()
        if args.amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    if not args.amp:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
        ),
        Good(
            """\
import torch

def never_resumed(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
        ),
        Good(
            """\
import torch

def new_each_epoch(model, loader, resume):
    optimizer = torch.optim.AdamW(model.parameters())
    if resume:
        optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
    for _ in range(10):
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
        ),
        Good(
            """\
import torch

class NewEachEpoch:
    def epoch(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            scaler.scale(self.model(x).sum()).backward()
            scaler.step(self.optimizer)
            scaler.update()

    def save(self):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, "last.pt")

    def fit(self, loader, resume):
        if resume:
            self.optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
        for _ in range(10):
            self.epoch(loader)
            self.save()
"""
        ),
        Good(
            """\
import torch

def under_bf16(model, loader, resume):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    if resume:
        optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
        ),
        Good(
            """\
import torch

def in_fp32(model, loader, resume):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.cuda.amp.GradScaler()
    if resume:
        optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
    for x in loader:
        with torch.cuda.amp.autocast(dtype=torch.float32):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
        ),
        Good(
            """\
import torch

class Tests:
    def amp(self, model, loader):
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    def reload(self, model):
        optimizer = torch.optim.AdamW(model.parameters())
        torch.save({"optimizer": optimizer.state_dict()}, "last.pt")
        optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
"""
        ),
        Bad(
            """\
import torch

class Scaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

def save_model(args, epoch, model, optimizer, loss_scaler):
    to_save = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),  # !
        "epoch": epoch,
    }
    torch.save(to_save, args.output)
"""
        ),
        Good(
            """\
import torch

class Scaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

def save_model(args, epoch, model, optimizer, loss_scaler):
    to_save = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    if loss_scaler is not None:
        to_save["scaler"] = loss_scaler.state_dict()
    torch.save(to_save, args.output)
"""
        ),
        Bad(
            """\
import torch

class Run:
    def __init__(self, config, model):
        self.model, self.dtype = model, config.dtype
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=(self.dtype == "float16"))

    def train(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=getattr(torch, self.dtype)):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self, path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)  # !

    def load(self, path):
        found = torch.load(path)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
""",
        ),
        Good(
            """\
import torch

class Run:
    def __init__(self, config, model):
        self.model, self.dtype = model, config.dtype
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=(self.dtype == "bfloat16"))

    def train(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=getattr(torch, self.dtype)):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self, path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path):
        found = torch.load(path)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
""",
        ),
        Good(
            """\
import torch

def save(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

def main(model, loader, path):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    optimizer.load_state_dict(torch.load(path)["optimizer"])
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        save(model, optimizer, path)

if __name__ == "__main__":
    main(torch.nn.Linear(8, 8), [], "last.pt")
""",
        ),
        Bad(
            """\
import torch

def save(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # !

def main(model, loader, path):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    optimizer.load_state_dict(torch.load(path)["optimizer"])
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        save(model, optimizer, path)

if __name__ == "__main__":
    main(torch.nn.Linear(8, 8), [], "last.pt")
""",
        ),
        Bad(
            """\
import torch

class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)

def save(path, model, optimizer, loss_scaler):
    if loss_scaler is not None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # !
    else:
        model.save_checkpoint(path)

def load(path, model, optimizer, loss_scaler):
    if loss_scaler is not None:
        found = torch.load(path)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        loss_scaler.load_state_dict(found["scaler"])
    else:
        model.load_checkpoint(path)

def main(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    loss_scaler = None if args.deepspeed else NativeScaler()
    load(args.path, model, optimizer, loss_scaler)
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        loss_scaler(loss, optimizer)
    save(args.path, model, optimizer, loss_scaler)
""",
        ),
        Good(
            """\
import torch

class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)

def save(path, model, optimizer, loss_scaler):
    if loss_scaler is not None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": loss_scaler.state_dict()}
        torch.save(state, path)
    else:
        model.save_checkpoint(path)

def load(path, model, optimizer, loss_scaler):
    if loss_scaler is not None:
        found = torch.load(path)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        loss_scaler.load_state_dict(found["scaler"])
    else:
        model.load_checkpoint(path)

def main(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    loss_scaler = None if args.deepspeed else NativeScaler()
    load(args.path, model, optimizer, loss_scaler)
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        loss_scaler(loss, optimizer)
    save(args.path, model, optimizer, loss_scaler)
""",
        ),
        Good(
            """\
import torch

class Run:
    def __init__(self, model, path):
        self.model, self.scaler = model, torch.amp.GradScaler("cuda")
        self.optimizer = torch.optim.Adam(model.parameters())
        if path is not None:
            self.last = torch.load(path)
            self.epoch = self.last["epoch"]
            self.model.load_state_dict(self.last["model_state_dict"])
            self.optimizer.load_state_dict(self.last["optimizer"])

    def train(self, loader, epoch):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x).sum()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        state = {"state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
        torch.save(state, "last.pt")
""",
        ),
        Bad(
            """\
import torch

class Run:
    def __init__(self, model, path):
        self.model, self.scaler = model, torch.amp.GradScaler("cuda")
        self.optimizer = torch.optim.Adam(model.parameters())
        if path is not None:
            self.last = torch.load(path)
            try:
                self.model.load_state_dict(self.last["model_state_dict"])
            except KeyError:
                self.model.load_state_dict(self.last["state_dict"])
            self.epoch = self.last["epoch"]
            self.optimizer.load_state_dict(self.last["optimizer"])

    def train(self, loader, epoch):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x).sum()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        state = {"state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}  # !
        state["epoch"] = epoch
        torch.save(state, "last.pt")
""",
        ),
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
dtype = torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float16
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == torch.float16))
checkpoint = torch.load("last.pt")
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
for x in loader:
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")  # !
""",
            files={"requirements.txt": "torch==2.2.0\n"},
        ),
        Good(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
dtype = torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float16
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == torch.float16))
checkpoint = torch.load("last.pt")
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
for x in loader:
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
            files={"requirements.txt": "torch==2.6.0\n"},
        ),
        Good(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
checkpoint = torch.load("last.pt")
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
for x in loader:
    with torch.autocast("cuda", dtype=getattr(torch, dtype)):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
            files={"requirements.txt": "torch==2.6.0\n"},
        ),
        Good(
            """\
import torch

def restarted(model, loader, start):
    optimizer = torch.optim.AdamW(model.parameters())
    if False and start == "resume":
        optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
        ),
        Good(
            """\
import torch
from checkpoints import load_checkpoint

def warm_started(model, loader, path):
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(path, model, optimizer)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
            files={
                "pyproject.toml": "",
                "checkpoints.py": "import torch\n\ndef load_checkpoint(path, model, optimizer):\n"
                "    model.load_state_dict(torch.load(path)['model'])\n",
            },
        ),
        Good(
            """\
import torch
from checkpoints import load, save

class Trainer:
    def __init__(self, model, path):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())
        load(path, self.optimizer)

    def train_one_epoch(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            scaler.scale(self.model(x).sum()).backward()
            scaler.step(self.optimizer)
            scaler.update()
        save(self.model, self.optimizer)

    def train(self, loader):
        for _ in range(10):
            self.train_one_epoch(loader)
""",
            files={
                "pyproject.toml": "",
                "checkpoints.py": "import torch\n\ndef load(path, optimizer):\n"
                "    optimizer.load_state_dict(torch.load(path)['optimizer'])\n\ndef save(model, optimizer):\n"
                "    torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, 'last.pt')\n",
            },
        ),
        # A function that loads restores the optimizer only where it is asked to, which no call does.
        Good(
            """\
import torch

def load_model(model, path, optimizer=None, resume=False):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    if optimizer is not None and resume:
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer

def train(model, loader, path):
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = load_model(model, path, optimizer)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
""",
            files={"pyproject.toml": ""},
        ),
        Bad(
            """\
import torch

def load_model(model, path, optimizer=None, resume=False):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    if optimizer is not None and resume:
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer

def train(model, loader, path):
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = load_model(model, path, optimizer, resume=True)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # !
""",
            files={"pyproject.toml": ""},
        ),
        # No run resumes from a file of another name.
        Good("""\
import os
import torch

def train(model, loader, out_dir, resume):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    if resume:
        path = os.path.join(out_dir, "ckpt.pt")
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, os.path.join(out_dir, "optimizer.pt"))
"""),
        Bad("""\
import os
import torch

def train(model, loader, out_dir, resume):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    if resume:
        path = os.path.join(out_dir, "ckpt.pt")
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # !
    torch.save(state, os.path.join(out_dir, "ckpt.pt"))
"""),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        handed = {made: event for event, made in self._from_helpers(facts)}
        own = (event for event in facts.events("scaler") if event.call not in handed)
        scalers = [event for event in own if self._adapts(event, facts) and not self._is_made_anew(event, facts)]
        scalers += [event for event in handed.values() if self._is_used(event, facts)]
        checkpoints = facts.checkpoints
        if (unsaved := self._loaded_only(facts)) is not None:
            saved, loaded = unsaved
            notes = (Note("the scaler's state is loaded here", loaded.span),)
            yield self.at(saved, expr=facts.short(saved.call.node), notes=notes)
            return
        if (given := self._given_in_vain(facts)) is not None:
            saved, param = given
            notes = (Note("the scaler that is given and not saved", param.span),)
            yield self.at(saved, expr=facts.short(saved.call.node), notes=notes)
            return
        if not scalers:
            return
        names = {key.rsplit(".", 1)[-1] for event in scalers for key in self._keys(event, facts)}
        if not names or any(checkpoints.is_passed_on(name) for name in names):
            return
        states = checkpoints.of("state", "scaler")
        if not facts.events("state"):
            yield from self._saved_elsewhere(scalers, facts)
        if not states and not checkpoints.unclear("state") and checkpoints.resumed():
            reported: set[Scope | None] = set()
            for saved in checkpoints.saved("optimizer"):
                if checkpoints.is_never_loaded(saved):
                    continue
                scaler = next((each for each in scalers if self._same_run(each, saved, facts)), None)
                part = saved.scope.owner or saved.scope
                if scaler is not None and part not in reported and not computes_without_float16(facts):
                    reported.add(part)  # one for a class: its other checkpoint files are the same mistake
                    evidence = [Note("the scaler is created here", scaler.span)]
                    if len(loads := checkpoints.of("restore", "optimizer")) == 1:
                        evidence.append(Note("the optimizer's state is loaded here", loads[0].span))
                    yield self.at(saved, expr=facts.short(saved.call.node), notes=tuple(evidence))
        restored = checkpoints.of("restore", "optimizer")
        lost = not checkpoints.of("restore", "scaler") and not checkpoints.unclear("restore")
        if states and restored and lost:
            yield self.at(
                states[0],
                message=f"`{facts.short(states[0].call.node)}` is saved, but not loaded with the optimizer's state",
                notes=(Note("the optimizer's state is loaded here", restored[0].span),),
            )

    def _loaded_only(self, facts: Facts) -> tuple[Event, Event] | None:
        """Return an optimizer's state that is saved, and the scaler's that is loaded and never saved; or None."""
        checkpoints = facts.checkpoints
        delegates = ("state_dict", "load_state_dict")  # methods of a wrapper, which save and load nothing by themselves
        loaded = [each for each in checkpoints.of("restore", "scaler") if each.scope.name not in delegates]
        if not loaded or not checkpoints.of("restore", "optimizer"):
            return None
        if any(each.scope.name not in delegates for each in checkpoints.of("state", "scaler")):
            return None
        if checkpoints.unclear("state"):
            return None
        saved = checkpoints.saved("optimizer")
        return (saved[0], loaded[0]) if saved else None

    def _given_in_vain(self, facts: Facts) -> tuple[Event, Binding] | None:
        """Return an optimizer's state that a function saves, and the scaler that it gets and never uses; or None."""
        for saved in facts.checkpoints.saved("optimizer"):
            for name, bindings in saved.scope.bindings.items():
                if not name.lower().endswith("scaler") or [each.kind for each in bindings] != ["param"]:
                    continue
                if not any(name in place.uses for place in saved.scope.descendants()):
                    return saved, bindings[0]
        return None

    def _from_helpers(self, facts: Facts) -> Iterator[tuple[Event, Call]]:
        """Yield the calls of helpers that return the scaler of a loss, as if they created it, with what creates it."""
        for scale in facts.events("scale"):
            made = [each.atom for each in facts.evaluate(scale.call.receiver, scale.call)]
            for binding in facts.bindings(dotted(scale.call.receiver), scale.call):
                call = facts.call_of(binding.value)
                if call is None or len(made) != 1 or not isinstance(made[0], Object) or made[0].kind != "scaler":
                    continue
                if made[0].call is not None and made[0].call is not call and facts.functions(call):
                    yield Event("scaler", call, facts), made[0].call

    def _saved_elsewhere(self, scalers: list[Event], facts: Facts) -> Iterator[Diagnostic]:
        """Report a function of another module that saves the optimizer's state, and does not get the scaler."""
        scopes = {scope for each in scalers for scope in self._called_scopes(each.scope, facts)}
        for call, other in facts.checkpoints.saved_elsewhere("optimizer"):
            if call.scope not in scopes or other.of("state", "scaler") or other.unclear("state"):
                continue
            if (other.resumed() or facts.checkpoints.resumed()) and not computes_without_float16(facts):
                notes = (Note("the scaler is created here", scalers[0].span),)
                yield self.at(call, expr=facts.short(call.node), message=_ELSEWHERE, notes=notes)
                return

    def _is_used(self, scaler: Event, facts: Facts) -> bool:
        """True if the code around a scaler scales with one and updates it."""
        near = facts.reachable(scaler.scope)
        return scaler.guard.possible and all(
            any(event.scope in near for event in events) for events in (facts.events("scale"), facts.events("update"))
        )

    def _is_made_anew(self, event: Event, facts: Facts) -> bool:
        """True if each epoch creates the scaler, in a function that gets the optimizer: there is no state to restore.

        The optimizer may be that of the method's object. A function that is called once a fold creates both.
        """
        if event.scope.kind != "function" or event.key.startswith("self."):
            return False
        calls = list(facts.callers(event.scope))
        stepped = [step.subject for step in facts.events("scaler_step") if step.scope is event.scope]
        gets_optimizer = any(_OPTIMIZER.search(param.name) for param in event.scope.params) or any(
            dotted(each).startswith("self.") for each in stepped
        )
        return bool(calls) and gets_optimizer and all(call.loops for call in calls)

    def _adapts(self, scaler: Event, facts: Facts) -> bool:
        """True if the scale of a scaler changes: the code scales with it and updates it."""
        if not self._is_used(scaler, facts):
            return False
        enabled = facts.enabled(scaler.call, facts.called_path(scaler.call))
        return enabled.possible and not scales_without_need(scaler, enabled, facts)

    def _keys(self, scaler: Event, facts: Facts) -> Iterator[str]:
        """Yield the names that a scaler is bound to."""
        for scope in facts.scopes:
            for key, bindings in scope.bindings.items():
                if any(self._binds(binding, scaler) for binding in bindings):
                    yield key

    def _binds(self, binding: Binding, scaler: Event) -> bool:
        if binding.statement is not scaler.call.statement or binding.scope is not scaler.scope:
            return False
        found = scaler.facts.resolve(binding.key, binding.scope, binding.order + 1) if binding.index else ()
        return not binding.index or any(isinstance(each.atom, Object) and each.atom.kind == "scaler" for each in found)

    def _same_run(self, scaler: Event, saved: Event, facts: Facts) -> bool:
        """True if a scaler and a checkpoint belong to one run."""
        near = facts.reachable(saved.scope)
        if scaler.call.loops and scaler.call.loops[-1:] == saved.call.loops[-1:]:
            return False  # a new one in each iteration, at whose end the checkpoint is written
        if not near & {scaler.scope, scaler.scope.owner} or not compatible(scaler.guard, saved.guard):
            return False
        if any(key.startswith("self.") for key in self._keys(scaler, facts)) or scaler.scope.kind != "function":
            return True
        lived = self._called_scopes(scaler.scope, facts)
        if saved.scope in lived:
            return True
        return saved.key.startswith("self.") and not facts.repeated(scaler.scope)

    def _called_scopes(self, scope: Scope, facts: Facts) -> set[Scope]:
        """Return a function and those that run within its calls, while its local names exist."""
        found, pending = {scope}, [scope]
        while pending:
            current = pending.pop()
            inner = [each.scope for call in current.calls for each in facts.functions(call) if each.facts is facts]
            for each in [*inner, *current.children]:
                if each not in found:
                    found.add(each)
                    pending.append(each)
        return found
