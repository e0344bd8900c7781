from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Constant,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Good,
    Note,
    Object,
    Rule,
    Wrap,
    accelerate_precision,
    any_of,
    compatible,
    input_casts,
    python_edits,
)


class ManualBfloat16Cast(Rule):
    """A value that the policy keeps in FP32 is cast to BF16 by hand.

    ## What it does
    Reports a cast of a tensor to BF16 whose result is passed to a model that is trained and runs under autocast, under
    an `Accelerator(mixed_precision=...)`, or in FSDP with a mixed-precision policy, if the cast loses something: the
    policy's dtype is another one, or by its name the value is a target, a box, a position, a time or the like.

    ## Why is this bad
    The policy casts the inputs of the operations that are safe in BF16 and keeps the others in FP32. A cast by hand
    rounds to 8 bits before the policy applies: coordinates, timesteps and targets lose their lower digits, the first
    norm computes with rounded values, and a change of the policy has no effect.

    ## Fix safety
    The fix removes the cast and keeps a device move. It is unsafe because the value then has the policy's dtype.

    ## Known limits
    Silent if the file casts or loads any model in BF16 (its inputs have to be BF16), or the model's class creates
    layers or kernels with `dtype=torch.bfloat16`; for the inputs of a DeepSpeed engine (its parameters are BF16 and it
    casts nothing), for frozen models, in inference, and if the precision of an Accelerator is not a literal. Casts
    inside the autocast region are reported by MPG105, FP16 casts by MPG101.
    """

    code, name = "MPG102", "manual-bfloat16-cast"
    severity = "warning"
    message = "`{expr}` casts to BF16 by hand what the policy casts"
    help = "remove the cast; autocast, or the launcher's policy, chooses the dtype"
    triggers = (
        any_of(b".bfloat16(", b"bfloat16"),
        any_of(b"autocast", b"Accelerator(", b"MixedPrecision"),
        any_of(b"backward(", b"Trainer"),
        any_of(b".to(", b".type(", b".bfloat16("),
    )
    yields_to = ("MPG105", "MPG107", "MPG109", "MPG110", "MPG511", "MPG603", "MPG606")
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for points in loader:
    points = points.to("cuda", dtype=torch.bfloat16)  # !
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(points).sum()
    loss.backward()
    optimizer.step()
""",
            fixed="""\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for points in loader:
    points = points.to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(points).sum()
    loss.backward()
    optimizer.step()
""",
        ),
        Bad(
            """\
import torch as th
from accelerate import Accelerator
from torch import bfloat16 as bf16
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

class Loop:
    def __init__(self, net):
        self.net = net.train()
        self.optimizer = th.optim.SGD(self.net.parameters(), 0.1)

    def step(self, batch):
        points = self.move(batch["points"])
        with th.autocast("cuda", bf16):
            loss = self.net(points).mean()
        loss.backward()
        self.optimizer.step()

    def move(self, points):
        return points.type(bf16)  # !

def prepared(loader, model):
    accelerator = Accelerator(mixed_precision="bf16")
    optimizer = th.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for points in loader:
        accelerator.backward(model(points.bfloat16()).sum())  # !
        optimizer.step()

def sharded(loader, model):
    model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=bf16))
    optimizer = th.optim.SGD(model.parameters(), 0.1)
    for points in loader:
        model(points.to(bf16)).sum().backward()  # !
        optimizer.step()
""",
            fixed="""\
import torch as th
from accelerate import Accelerator
from torch import bfloat16 as bf16
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

class Loop:
    def __init__(self, net):
        self.net = net.train()
        self.optimizer = th.optim.SGD(self.net.parameters(), 0.1)

    def step(self, batch):
        points = self.move(batch["points"])
        with th.autocast("cuda", bf16):
            loss = self.net(points).mean()
        loss.backward()
        self.optimizer.step()

    def move(self, points):
        return points

def prepared(loader, model):
    accelerator = Accelerator(mixed_precision="bf16")
    optimizer = th.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for points in loader:
        accelerator.backward(model(points).sum())
        optimizer.step()

def sharded(loader, model):
    model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=bf16))
    optimizer = th.optim.SGD(model.parameters(), 0.1)
    for points in loader:
        model(points).sum().backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

def region(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for images in loader:
        images = images.to("cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(images).sum()
        loss.backward()
        optimizer.step()

def prepared(loader, model):
    accelerator = Accelerator(mixed_precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        accelerator.backward(model(x.bfloat16()).sum())
        optimizer.step()

def sharded(loader, model):
    model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x.to(torch.bfloat16)).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for images, weights in loader:
        images = images.to("cuda", dtype=torch.bfloat16)  # !
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(images).sum()
        loss.backward()
        optimizer.step()
""",
            fixed="""\
import torch

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for images, weights in loader:
        images = images.to("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(images).sum()
        loss.backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import deepspeed
import torch
from accelerate import Accelerator
from transformers import AutoModel

def engine(loader, model, args):
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)
    for x in loader:
        engine.backward(engine(x.bfloat16()).sum())
        engine.step()

def policy(loader, args, model):
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    dtype = torch.float32
    if accelerator.mixed_precision == "bf16":
        dtype = torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        accelerator.backward(model(x.to(dtype)).sum())
        accelerator.backward(model(x.bfloat16()).sum())
        optimizer.step()

def no_autocast(loader, model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x.bfloat16()).sum().backward()
        optimizer.step()

def frozen(loader, model, tower):
    tower.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tower(x.bfloat16())).sum() + model(x.bfloat16().float()).sum()
        loss.backward()
        optimizer.step()

def evaluate(loader, model):
    for x in loader:
        x = x.bfloat16()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            print(model(x).sum())
"""
        ),
        Good(
            """\
import torch
from transformers import AutoModel

base = AutoModel.from_pretrained("x", torch_dtype=torch.bfloat16)
head = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(head.parameters())
for x in loader:
    x = x.to(torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = head(base(x)).sum()
    loss.backward()
    optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from models import Net

net = Net()
optimizer = torch.optim.AdamW(net.parameters())
for points in loader:
    points = points.to(torch.bfloat16)  # !
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net(points).mean()
    loss.backward()
    optimizer.step()
""",
            files={
                "models.py": """\
import torch
from kernels import FastConv

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = FastConv(2048, dtype=torch.float32)

    def forward(self, x):
        return self.conv(x)
""",
            },
            fixed="""\
import torch
from models import Net

net = Net()
optimizer = torch.optim.AdamW(net.parameters())
for points in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net(points).mean()
    loss.backward()
    optimizer.step()
""",
        ),
        Good(
            """\
import torch
from models import Net

net = Net()
optimizer = torch.optim.AdamW(net.parameters())
for x in loader:
    x = x.to(torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net(x).mean()
    loss.backward()
    optimizer.step()
""",
            files={
                "models.py": """\
import torch
from kernels import FastConv

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = FastConv(2048, dtype=torch.bfloat16)

    def forward(self, x):
        return self.conv(x)
""",
            },
        ),
        Good(
            """\
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x):
        return self.out(x.to(torch.bfloat16))

def train(loader):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        casts = [cast for cast in facts.events("cast") if cast.may_be(Dtype.BF16)]
        loads = (load for load in facts.events("load") if load.may_be(Dtype.BF16))
        if not casts or any(facts.training_use.is_module(event) for event in (*casts, *loads)):
            return
        for cast in casts:
            policy = self._policy(cast, facts)
            if policy is not None:
                notes = (Note("the policy is set here", policy.span),)
                yield self.at(
                    cast, expr=facts.short(cast.call.node), notes=notes, fix=python_edits.without_cast(facts, cast)
                )

    def _policy(self, cast: Event, facts: Facts) -> Call | None:
        """Return the call that sets the policy of a model to which the value is passed."""
        guards = [guard for guard in cast.may_be(Dtype.BF16) if not accelerate_precision.follows_policy(guard)]
        training = facts.training_use.cast(cast, Dtype.BF16, guards)
        if training is None or input_casts.loses_nothing(cast, Dtype.BF16, guards, training):
            return None
        for call in training.reach.models:
            if facts.training_use.has_layers_in(Dtype.BF16, call.func, call):
                continue  # they may need inputs in BF16
            for region, guard in facts.autocasts(call):
                if region.call is not None and compatible(guard, guards[0]):
                    return region.call
            for wrap in facts.wrappers.of(call.func, call):
                if (found := self._mixed(wrap, facts)) is not None and compatible(wrap.guard, guards[0]):
                    return found
        return None

    def _mixed(self, wrap: Wrap, facts: Facts) -> Call | None:
        """Return the Accelerator or FSDP wrapper with a known mixed precision; DeepSpeed's engine casts no inputs."""
        if wrap.kind == "accelerate" and wrap.call.receiver is not None:
            for each in facts.evaluate(wrap.call.receiver, wrap.call):
                accelerator = each.atom.call if isinstance(each.atom, Object) else None
                if accelerator is None:
                    continue
                values = facts.evaluate(accelerator.keywords.get("mixed_precision"), accelerator)
                atoms = [value.atom for value in values]
                if atoms and all(isinstance(atom, Constant) and atom.value in ("bf16", "fp16") for atom in atoms):
                    return accelerator
        policy = wrap.call.argument(None, "mixed_precision", "mp_policy")
        return wrap.call if wrap.kind.startswith("fsdp") and policy is not None else None
