from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import mend
from mpguard.lint.facts import Event, Facts
from mpguard.lint.guard import Guard, compatible
from mpguard.lint.rule import Bad, Diagnostic, Fix, Good, Note, Rule, any_of
from mpguard.lint.values import Object
from mpguard.lint.walk import Call

#: A condition on overflow: what the scaler would do is done by hand.
_CHECKS = re.compile(r"(?i)finite|inf|nan|overflow")


class StepBypassesScaler(Rule):
    """`optimizer.step()` on gradients that a GradScaler has scaled.

    ## What it does
    Reports an optimizer's `step()` where the `backward` before it ran on `scaler.scale(loss)`.

    ## Why is this bad
    The gradients are larger than the true ones by the scale, 65536 at first. Adam hides the factor
    and still steps on infinities, SGD multiplies its step by it; and without `scaler.step` nothing
    skips a step whose gradients overflowed, nor adapts the scale.

    ## Fix safety
    Safe: `scaler.step(optimizer)` unscales and does what was meant. Where no `scaler.update()`
    follows it is added, since the scaler refuses a second step without one. A step with a closure
    has no fix: GradScaler takes none.

    ## Known limits
    Silent where something between `backward` and `step` asks for the scale (`get_scale`: the
    gradients may be unscaled by hand), and where the step happens under a check of finiteness.
    `unscale_` alone is not enough: nothing then skips a step that overflowed.
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
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        scaled = self._scaled_backwards(facts)
        if not scaled:
            return
        backwards = {event.call: event for event in facts.events("backward")}
        for step in facts.events("step"):
            found = self._before(step, backwards, facts, step.guard)
            if found is None or found not in scaled or self._by_hand(found, step, facts):
                continue
            scale = scaled[found]
            guard = step.guard.joined(facts.guard_of(found), self._enabled(scale, facts))
            if not guard.possible:
                continue
            notes = (Note("the loss is scaled here", scale.span),)
            yield self.at(step, expr=facts.short(step.call.node), notes=notes, fix=self._fix(step, scale, facts))

    def _scaled_backwards(self, facts: Facts) -> dict[Call, Event]:
        """The backward passes that run on a scaled loss, with the call that scales it."""
        scales = {event.call: event for event in facts.events("scale")}
        found = {}
        for backward in facts.events("backward"):
            if backward.subject is None:
                continue
            records = facts.flow.backward(backward.subject, backward.call, depth=1)
            scale = next((scales[record] for record in records if isinstance(record, Call) and record in scales), None)
            # Each way that the loss comes by must be scaled: an arm that is not may be the one of this step.
            if (
                scale is not None
                and compatible(scale.guard, backward.guard)
                and not (scale.call.guard - backward.call.guard)
            ):
                found[backward.call] = scale
        return found

    def _before(self, step: Event, backwards: dict[Call, Event], facts: Facts, guard: Guard) -> Call | None:
        """The last backward pass before the step, in its function or in one that it calls."""
        found: Call | None = None
        for call in step.scope.calls:
            if call.order >= step.order:
                break
            if not compatible(call.guard, guard):
                continue
            if call in backwards:
                found = call
            elif call.name == "backward":
                inner = self._inside(call, backwards, facts)
                found = inner
            elif call.name not in ("step", "scale", "zero_grad", "update"):
                found = self._inside(call, backwards, facts) or found
        return found

    def _inside(self, call: Call, backwards: dict[Call, Event], facts: Facts) -> Call | None:
        for function in facts.functions(call):
            if function.facts is facts:
                inner = [each for each in function.scope.calls if each in backwards]
                if inner:
                    return inner[-1]
        return None

    def _by_hand(self, backward: Call, step: Event, facts: Facts) -> bool:
        """Whether the gradients may be unscaled and checked by hand, or were stepped through the scaler in between."""
        if any(_CHECKS.search(flag) for flag in step.guard.flags()):
            return True
        for call in step.scope.calls:
            between = call.order < step.order and (call.scope is not backward.scope or backward.order < call.order)
            if between and compatible(call.guard, step.guard):
                if call.name in ("get_scale", "_unscale_grads_"):
                    return True
                if call.name == "step" and call in {event.call for event in facts.events("scaler_step")}:
                    given = call.positional[0]
                    if facts.short(given) == facts.short(step.subject):
                        return True
        return False

    def _enabled(self, scale: Event, facts: Facts) -> Guard:
        """The guard under which the scaler is enabled at all."""
        guard = Guard()
        for each in facts.evaluate(scale.subject, scale.call):
            if isinstance(each.atom, Object) and each.atom.call is not None:
                guard = guard.joined(facts.of(each.atom.call).enabled(each.atom.call, each.atom.path))
        return guard

    def _fix(self, step: Event, scale: Event, facts: Facts) -> Fix | None:
        scaler = facts.short(scale.subject)
        here = scale.scope is step.scope or (scaler.startswith("self.") and scale.scope.owner is step.scope.owner)
        module = scaler in facts.module.bindings and scaler not in step.scope.bindings
        if step.call.node.args or not (here or module) or step.subject is None:
            return None
        edits = [mend.replaced(step.call.node, step.call, f"{scaler}.step({facts.text(step.subject, step.call)})")]
        updated = any(
            event.scope is step.scope and event.order > step.order and compatible(event.guard, step.guard)
            for event in facts.events("update")
        )
        if not updated:
            if not isinstance(step.call.line, cst.SimpleStatementLine):
                return None
            edits.append(mend.line_after(facts, step.call.line, step.call, f"{scaler}.update()"))
        return Fix("Step through the scaler", "safe", tuple(edits))
