from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint.facts import Event, Facts
from mpguard.lint.rule import Bad, Diagnostic, Good, Note, Rule, any_of
from mpguard.lint.trace import Moment
from mpguard.lint.values import Constant, Object
from mpguard.lint.walk import Call


class ScalerCreatedInLoop(Rule):
    """A GradScaler is built anew for each step, or for each epoch.

    ## What it does
    Reports the creation of a scaler in a loop, or in a function that is called in one, where the optimizer that it
    steps outlives the loop.

    ## Why is this bad
    The scale begins at 65536 again each time. It is doubled after 2,000 steps without an overflow and halved after
    one: a scaler that lives for a step never adapts, one that lives for an epoch skips its first steps in each.

    ## Known limits
    A loop that builds the optimizer too (folds, configurations, seeds) is right and silent, as is one whose
    optimizer comes from out of sight, and a scaler that is only built where there is none yet.
    """

    code, name = "MPG209", "scaler-created-in-loop"
    severity = "error"
    message = "the GradScaler is built {often}: its scale never adapts"
    help = "build it once, where the optimizer is built"
    triggers = (any_of(b"GradScaler("), any_of(b".scale("), any_of(b".step("))
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    scaler = torch.amp.GradScaler("cuda")  # !
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
        ),
        Bad(
            """\
from torch.cuda.amp import GradScaler
import torch

def train_epoch(model, loader, optimizer):
    scaler = GradScaler()  # !
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

def main(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(10):
        train_epoch(model, loader, optimizer)
"""
        ),
        Good(
            """\
import torch

def folds(loaders):
    for loader in loaders:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

def once(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

def lazily(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = None
    for x in loader:
        if scaler is None:
            scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

def one_for_each(models, loader):
    optimizer = torch.optim.SGD(models[0].parameters(), 0.1)
    scalers = [torch.amp.GradScaler("cuda") for _ in models]

def whole_run(lr, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

def sweep(model, loader):
    for lr in (0.1, 0.01):
        whole_run(lr, model, loader)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for made in facts.events("scaler"):
            for trace in facts.traces.all:
                step = next((each for each in trace if self._steps(each, made, facts)), None)
                if step is None:
                    continue
                often = self._often(made, step, facts)
                if often:
                    notes = (Note("the optimizer that it steps is built once", self._optimizer(step, facts)),)
                    yield self.at(made, often=often, notes=notes)
                    break

    def _steps(self, each: Moment, made: Event, facts: Facts) -> bool:
        return each.kind == "scaler_step" and any(
            isinstance(found.atom, Object) and found.atom.call is made.call
            for found in facts.evaluate(each.scaler, each.record)
        )

    def _optimizer(self, step: Moment, facts: Facts) -> tuple[int, int] | None:
        call = self._made(step, facts)
        return call.span if call is not None and facts.of(call) is facts else None

    def _made(self, step: Moment, facts: Facts) -> Call | None:
        """The call that made the optimizer, where there is exactly one."""
        atoms = [each.atom for each in facts.evaluate(step.optimizer, step.record)]
        made = {
            atom.call if isinstance(atom, Object) and atom.kind == "optimizer" else None
            for atom in atoms
            if not isinstance(atom, Constant)
        }
        return made.pop() if len(made) == 1 else None

    def _often(self, made: Event, step: Moment, facts: Facts) -> str:
        """How often the scaler is built while its optimizer lives: "for each ..."; empty where it is once."""
        built, optimizer = made.call, self._made(step, facts)
        if optimizer is None or facts.of(optimizer) is not facts:
            return ""
        if built.guard - built.scope.guard - step.record.guard:
            return ""  # where there is none yet, as a rule
        loops = [loop for loop in built.loops if isinstance(loop, (cst.For, cst.While))]
        if loops:
            inside = step.record.scope is not built.scope or loops[-1] in step.loops
            return "in a loop" if inside and not (set(loops) <= set(optimizer.loops)) else ""
        scope = built.scope
        if scope.kind != "function" or scope.name == "__init__" or optimizer.scope is scope:
            return ""
        for call in facts.callers(scope):
            around = [loop for loop in call.loops if isinstance(loop, (cst.For, cst.While))]
            same = optimizer.scope is call.scope and not set(around) <= set(optimizer.loops)
            if around and (same or (optimizer.scope.is_method and optimizer.scope.owner is call.scope.owner)):
                return "anew by each call in a loop"
        return ""
