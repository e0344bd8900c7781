from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Good,
    Note,
    Rule,
    Wrap,
    accelerate_precision,
    any_of,
    compatible,
    python_edits,
    wrappers,
)

#: A program whose loop is in `engine.py`.
_MAIN = {
    "pyproject.toml": "",
    "main.py": "import torch\nfrom accelerate import Accelerator\n\nfrom engine import train_epoch\n\n"
    "def main(model, loader):\n"
    '    accelerator = Accelerator(mixed_precision="fp16")\n'
    "    optimizer = torch.optim.AdamW(model.parameters())\n"
    "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    "    for epoch in range(3):\n"
    "        train_epoch(model, optimizer, loader, accelerator)\n",
}

#: A program with the arguments of its Accelerator, and its backward pass.
_LAUNCHED = """\
import torch
from accelerate import Accelerator

def main(args, model, optimizer, loader):
    accelerator = Accelerator({})
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        loss = model(x).sum()
        {}
        optimizer.step()
"""


class BackwardOutsideAccelerator(Rule):
    """`loss.backward()` is called directly on the loss of a model that an Accelerator has prepared.

    ## What it does
    Reports a plain `backward()` whose loss comes from a model that `accelerator.prepare` returned, or whose gradients
    are applied by an optimizer that it returned, and one in the `training_step` of a subclass of transformers' Trainer,
    which prepares the model itself.

    ## Why is this bad
    `accelerator.backward(loss)` scales the loss under FP16, divides it by `gradient_accumulation_steps`, and passes it
    to the engine under DeepSpeed. Without it the prepared optimizer's step unscales gradients that were never scaled
    (FP16: they become 65536 times too small), and the same script under a DeepSpeed config raises or trains without its
    loss scale.

    ## Fix safety
    Safe: with `mixed_precision` off and one step per batch both are the same; in all other cases `accelerator.backward`
    is intended. Unsafe if the Accelerator accumulates gradients and the loss is divided by hand as well. There is no
    fix if the Accelerator has no name at the place.

    ## Known limits
    An Accelerator that prepares nothing that this loss uses (used for devices, logging, metrics) is ignored. A loss
    that a GradScaler of the code's own scales is reported by MPG502, and one that apex scales (`amp.scale_loss`) by no
    rule. An Accelerator whose `mixed_precision` is "bf16" or "no" in the code, without accumulation, an engine or
    sharding, adds nothing to `backward` and is ignored. A `backward` under a flag that is named after accelerate,
    DeepSpeed or the distributed type is assumed to be the path without the Accelerator.
    """

    code, name = "MPG501", "backward-outside-accelerator"
    severity = "error"
    message = "`{expr}` bypasses the Accelerator that prepared {what}"
    help = "call `accelerator.backward(loss)`: it scales, divides for accumulation, and supports DeepSpeed"
    triggers = (any_of(b"ccelerator"), any_of(b".backward("))
    triggers_nearby = (any_of(b".prepare", b"def training_step("),)
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    loss = model(x).sum()
    loss.backward()  # !
    optimizer.step()
    optimizer.zero_grad()
""",
            fixed="""\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    loss = model(x).sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
""",
        ),
        Bad(
            """\
import torch
from accelerate import Accelerator
from ours import build_model, losses

class Run:
    def __init__(self, args):
        self.accelerator = Accelerator(gradient_accumulation_steps=args.steps)
        net = build_model(args)
        self.net = self.accelerator.prepare(net)
        self.optimizer = self.accelerator.prepare_optimizer(torch.optim.SGD(net.parameters(), 0.1))

    def loss(self, x):
        return losses(self.net(x))

    def step(self, x):
        total = self.loss(x) + 1
        total.backward(retain_graph=True)  # !
        self.optimizer.step()

    def other(self, x, critic):
        loss = critic(x)
        (loss / 4).backward()  # !
        self.optimizer.step()

def helper(accelerator, net, optimizer, loader):
    objects = accelerator.prepare(net, optimizer, loader)
    net, optimizer, loader = objects
    for x in loader:
        with accelerator.accumulate(net):
            torch.mean(net(x)).backward()  # !
            optimizer.step()
""",
            fixed="""\
import torch
from accelerate import Accelerator
from ours import build_model, losses

class Run:
    def __init__(self, args):
        self.accelerator = Accelerator(gradient_accumulation_steps=args.steps)
        net = build_model(args)
        self.net = self.accelerator.prepare(net)
        self.optimizer = self.accelerator.prepare_optimizer(torch.optim.SGD(net.parameters(), 0.1))

    def loss(self, x):
        return losses(self.net(x))

    def step(self, x):
        total = self.loss(x) + 1
        self.accelerator.backward(total, retain_graph=True)
        self.optimizer.step()

    def other(self, x, critic):
        loss = critic(x)
        self.accelerator.backward(loss / 4)
        self.optimizer.step()

def helper(accelerator, net, optimizer, loader):
    objects = accelerator.prepare(net, optimizer, loader)
    net, optimizer, loader = objects
    for x in loader:
        with accelerator.accumulate(net):
            accelerator.backward(torch.mean(net(x)))
            optimizer.step()
""",
        ),
        Good(
            """\
from accelerate import Accelerator
from apex import amp

def train(args, model, optimizer, loader):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        loss = model(x).sum()
        if args.use_apex:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()
""",
        ),
        Good(
            """\
import torch
from accelerate import Accelerator

def devices_only(model, loader):
    accelerator = Accelerator()
    loader = accelerator.prepare(loader)
    model.to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def two_ways(args, model, optimizer, loader, accelerator=None):
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        loss = model(x).sum()
        if accelerator is not None:
            accelerator.backward(loss)
        else:
            loss.backward()
        optimizer.step()

def flagged(args, model, optimizer, loader):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        loss = model(x).sum()
        if args.use_accelerate:
            accelerator.backward(loss)
        else:
            loss.backward()
        optimizer.step()

def one_after_the_other(make, loader):
    accelerator = Accelerator()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        loss = model(x).sum()
        accelerator.backward(loss)
        optimizer.step()
    other = make()
    own = torch.optim.SGD(other.parameters(), 0.1)
    for x in loader:
        loss = other(x).sum()
        loss.backward()
        own.step()

def critic_by_itself(critic, model, optimizer, loader, critic_optimizer):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        with torch.no_grad():
            fake = model(x)
        critic(fake).mean().backward()
        critic(model(x).detach()).mean().backward()
        critic_optimizer.step()
        accelerator.backward(critic(model(x)).mean())
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from accelerate import Accelerator

class Run:
    def __init__(self, model, accelerator):
        self.accelerator = accelerator
        self.model = model
        if self.accelerator:
            self.model = self.accelerator.prepare(self.model)

    def backward(self, loss):
        self.accelerator.backward(loss) if self.accelerator else loss.backward()

    def run(self, x, scaler):
        self.backward(self.model(x).sum())

class Mul(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad):
        return grad
"""
        ),
        Bad(
            """\
import torch
from accelerate import Accelerator

def main(args, models, loader):
    if torch.backends.mps.is_available() and args.mixed_precision == "bf16":
        raise ValueError("no BF16")
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(args.model, args.optimizer)
    for key in models:
        models[key] = accelerator.prepare(models[key])
    for x in loader:
        if len(args.mask_strategy) == len(x):
            model(x).sum().backward()  # !
        compute_loss(model, x).backward()  # !
        models.decoder(x).sum().backward()  # !
""",
            fixed="""\
import torch
from accelerate import Accelerator

def main(args, models, loader):
    if torch.backends.mps.is_available() and args.mixed_precision == "bf16":
        raise ValueError("no BF16")
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(args.model, args.optimizer)
    for key in models:
        models[key] = accelerator.prepare(models[key])
    for x in loader:
        if len(args.mask_strategy) == len(x):
            accelerator.backward(model(x).sum())
        accelerator.backward(compute_loss(model, x))
        accelerator.backward(models.decoder(x).sum())
""",
        ),
        Bad(
            """\
from transformers import Trainer

class OwnTrainer(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(make_loader())

    def training_step(self, model, inputs):
        loss = self.compute_loss(model, inputs)
        loss.backward()  # !
        return loss.detach()
""",
            fixed="""\
from transformers import Trainer

class OwnTrainer(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(make_loader())

    def training_step(self, model, inputs):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()
""",
        ),
        Bad(
            """\
from transformers import Trainer

class OwnTrainer(Trainer):
    def training_step(self, model, inputs):
        loss = self.compute_loss(model, inputs)
        if self.args.plain:
            loss.backward()  # !
        else:
            self.accelerator.backward(loss)
        return loss.detach()
""",
            fixed="""\
from transformers import Trainer

class OwnTrainer(Trainer):
    def training_step(self, model, inputs):
        loss = self.compute_loss(model, inputs)
        if self.args.plain:
            self.accelerator.backward(loss)
        else:
            self.accelerator.backward(loss)
        return loss.detach()
""",
        ),
        Good(
            """\
from transformers import Trainer

class OwnTrainer(Trainer):
    def training_step(self, model, inputs):
        loss = self.compute_loss(model, inputs)
        if self.do_grad_scaling:
            self.scaler.scale(loss).backward()
        else:
            self.accelerator.backward(loss)
        return loss.detach()
"""
        ),
        Good(
            """\
from accelerate import Accelerator
from transformers import Trainer

class OwnTrainer(Trainer):
    def training_step(self, model, inputs):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()

def other(args, loader, critic, critic_optimizer):
    accelerator = Accelerator()
    loader, model = accelerator.prepare(loader, args.model)
    for x in loader:
        if args.train_backend == "plain":
            model(x).sum().backward()
        compute_loss(critic, loader).backward()
        critic_optimizer.step()
"""
        ),
        Bad(
            """\
from torch.nn import functional as F

def train_epoch(model, optimizer, loader, accelerator):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # !
            optimizer.step()
""",
            files=_MAIN,
            name="engine.py",
        ),
        Good(
            """\
from torch.nn import functional as F

def train_epoch(model, optimizer, loader, accelerator):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
""",
            files={
                **_MAIN,
                "plain.py": "import torch\n\nfrom engine import train_epoch\n\n"
                "def main(model, loader):\n"
                "    optimizer = torch.optim.AdamW(model.parameters())\n"
                "    train_epoch(model, optimizer, loader, None)\n",
            },
            name="engine.py",
        ),
        Good(
            """\
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

def bfloat16(model, optimizer, loader):
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[ddp])
    model, optimizer = accelerator.prepare(model, optimizer)
    for i, x in enumerate(loader):
        loss = model(x).sum() / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
""",
            files={"pyproject.toml": "", "run.sh": "torchrun --nproc-per-node 8 example.py\n"},
        ),
        *(
            Bad(
                _LAUNCHED.format(arguments, "loss.backward()  # !"),
                files={"pyproject.toml": "", "run.sh": f"accelerate launch {options} train.py\n"},
                name="train.py",
                fixed=_LAUNCHED.format(arguments, "accelerator.backward(loss)"),
            )
            for arguments, options in (
                ('mixed_precision="fp16"', ""),
                ("mixed_precision=args.mixed_precision", ""),
                ('mixed_precision="bf16" if args.bf16 else None', ""),
                ('mixed_precision="bf16", gradient_accumulation_steps=args.steps', ""),
                ('mixed_precision="bf16", fsdp_plugin=args.plugin', ""),
                ('mixed_precision="bf16", **args.others', ""),
                ('mixed_precision="bf16"', "--use_deepspeed"),
                ('mixed_precision="bf16"', "--gradient_accumulation_steps 4"),
            )
        ),
        Good(
            """\
import torch
from accelerate import Accelerator

def main(model, optimizer, loader):
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            name="train.py",
            files={"pyproject.toml": "", "run.sh": "python train.py\n"},
        ),
        Bad(
            """\
import torch
from accelerate import Accelerator

def main(model, optimizer, loader):
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        model(x).sum().backward()  # !
        optimizer.step()
""",
            name="train.py",
            files={"pyproject.toml": "", "run.sh": "accelerate launch train.py\n"},
            fixed="""\
import torch
from accelerate import Accelerator

def main(model, optimizer, loader):
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
""",
        ),
        Good(
            """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = accelerator.prepare(model)
seen = torch.ones(1, 1, 8, 8, 8, requires_grad=True)
for x in loader:
    with torch.enable_grad():
        torch.nn.functional.grid_sample(seen, model(x)).sum().backward()
seen = (seen.grad > 0.0001).float()
"""
        ),
        Bad(
            """\
import torch
from accelerate import Accelerator

def train_one_epoch(args, model, loader, optimizer):
    for x in loader:
        loss = 0
        if x.size(0) > 1:
            loss += model(x[1:]).sum() / 2
        loss += model(x).sum() / 2
        loss.backward()  # !
        optimizer.step()

def main(args, model, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kwargs = {"args": args, "model": model, "loader": loader, "optimizer": optimizer}
    train_one_epoch(**kwargs)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        yield from self._in_trainers(facts)
        for backward in facts.events("backward"):
            if (
                _is_in_trainer(backward, facts)
                or wrappers.other_way(backward.guard, "accelerat")
                or facts.is_inference(backward.call)
            ):
                continue
            if self._is_scaled(backward, facts) or not (facts.has_step(backward.scope) or _prepares_optimizer(facts)):
                continue
            found = self._prepared_model(backward, facts) or self._prepared_optimizer(backward, facts)
            if found is not None and not accelerate_precision.backward_is_plain(found[0].facts, backward.guard):
                wrap, what = found
                notes = (Note("prepared here", wrap.call.span, facts.elsewhere(wrap.call)),)
                expr = facts.short(backward.call.node)
                yield self.at(backward, expr=expr, what=what, notes=notes, fix=self._fix(backward, wrap, facts))

    def _in_trainers(self, facts: Facts) -> Iterator[Diagnostic]:
        """Yield the plain backward passes in the `training_step` of a subclass of transformers' Trainer."""
        for backward in facts.events("backward"):
            if not _is_in_trainer(backward, facts):
                continue
            if self._is_scaled(backward, facts) or wrappers.other_way(backward.guard, "accelerat"):
                continue
            edit = python_edits.through(facts, backward, "self.accelerator")
            fix = Fix("Run it through the Accelerator", "unsafe", (edit,)) if edit is not None else None
            yield self.at(backward, expr=facts.short(backward.call.node), what="the Trainer's model", fix=fix)

    def _is_scaled(self, backward: Event, facts: Facts) -> bool:
        """True for `scaled_loss` of `with amp.scale_loss(loss, optimizer) as scaled_loss`, and what a scaler scales."""
        by_apex = {call.node for call in facts.calls.get("scale_loss", ())}
        if any(entered.expr in by_apex for entered in backward.call.withs):
            return True
        scales = {event.call for event in facts.events("scale")}
        records = facts.flow.backward(backward.subject, backward.call, depth=3) if backward.subject else []
        return any(record in scales for record in records)

    def _prepared_model(self, backward: Event, facts: Facts) -> tuple[Wrap, str] | None:
        """Return the wrap of the model that computes the loss."""
        for call, wrap in facts.wrappers.differentiated(backward.subject, backward.call, "accelerate", True):
            return wrap, f"`{call.path}`"
        return None

    def _prepared_optimizer(self, backward: Event, facts: Facts) -> tuple[Wrap, str] | None:
        """Return the wrap of the optimizer that applies these gradients, in the next step of the same function."""
        for step in facts.events("step"):
            if step.scope is not backward.scope or step.order < backward.order:
                continue
            if not compatible(step.guard, backward.guard):
                continue
            for wrap in facts.wrappers.of(step.subject, step.call, "accelerate", across=True):
                if compatible(wrap.guard, step.guard, backward.guard):
                    return wrap, f"`{step.key or facts.short(step.subject)}`"
            return None
        return None

    def _fix(self, backward: Event, wrap: Wrap, facts: Facts) -> Fix | None:
        accelerator = wrappers.receiver_at(wrap, backward.call, facts)
        edit = python_edits.through(facts, backward, accelerator) if accelerator is not None else None
        if edit is None:
            return None
        by_hand = isinstance(backward.subject, cst.BinaryOperation) or any(
            "accum" in flag for flag in backward.guard.flags()
        )
        made = facts.events("accelerator")
        accumulates = not made or any("gradient_accumulation_steps" in each.call.keywords for each in made)
        return Fix("Run it through the Accelerator", "unsafe" if by_hand and accumulates else "safe", (edit,))


def _prepares_optimizer(facts: Facts) -> bool:
    """True if something in the file that is named as an optimizer is prepared."""
    prepared = (arg.value for event in facts.events("prepare") for arg in event.call.node.args)
    return any("optim" in facts.short(each).lower() for each in prepared)


def _is_in_trainer(backward: Event, facts: Facts) -> bool:
    """True in the `training_step` of a subclass of transformers' or trl's Trainer that uses its Accelerator itself."""
    cls = backward.scope.owner
    if backward.scope.name != "training_step" or cls is None:
        return False
    bases = facts.ancestry(cls)
    return any(base.startswith(("transformers.", "trl.")) and base.endswith("Trainer") for base in bases) and any(
        use.path.startswith("self.accelerator")
        for scope in facts.scopes
        if scope.owner is cls
        for use in scope.uses.get("self", ())
    )
