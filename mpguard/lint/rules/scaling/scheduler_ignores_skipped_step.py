from __future__ import annotations

from mpguard.lint import Bad, Diagnostic, Facts, Good, Note, ScalingRule, Trace, TraceStep, any_of, compatible


class SchedulerIgnoresSkippedStep(ScalingRule):
    """The learning rate schedule steps after `scaler.step`, which may have skipped the optimizer's step.

    ## What it does
    Reports a `scheduler.step()` that follows `scaler.step` in the same iteration if nothing checks the scale.

    ## Why is this bad
    The first steps of a run often overflow, since the scale starts at 65536: the schedule steps although the optimizer
    has not. torch then warns "Detected call of `lr_scheduler.step()` before `optimizer.step()`", and a warm-up is a few
    steps shorter than intended.

    ## Known limits
    Preview, since it hardly matters in a run of many steps, and most published code does it. A scheduler that steps
    once per epoch is not reported.
    """

    code, name = "MPG216", "scheduler-ignores-skipped-step"
    severity = "info"
    preview = True
    operations = ("scheduler",)
    message = "`{expr}` also steps if `{scaler}` has skipped the optimizer's step"
    help = "step the schedule only if `{scaler}.get_scale()` has not decreased"
    triggers = (any_of(b".scale("), any_of(b"sched"), any_of(b".step("), any_of(b"scaler", b"Scaler"))
    examples = (
        Bad(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # !
"""
        ),
        Good(
            """\
def looks(model, loader, optimizer, scheduler, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()

def per_epoch(model, loader, optimizer, scheduler, scaler):
    for epoch in range(10):
        for x in loader:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()

def other_arm(args, model, loader, optimizer, scheduler, scaler):
    for x in loader:
        if args.amp:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            model(x).backward()
            optimizer.step()
            scheduler.step()
"""
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        scheduler = trace[place]
        step = self._step(trace, place, facts) if scheduler.loops else None
        if step is None:
            return None
        expr, scaler = facts.short(scheduler.call.node), facts.short(step.scaler)
        notes = (Note("this step may be skipped", step.span),)
        return self.at(scheduler, expr=expr, scaler=scaler, help=self.help.format(scaler=scaler), notes=notes)

    def _step(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the scaler's step that is taken, or skipped, before each step of the schedule."""
        scheduler = trace[place]
        loop = scheduler.loops[-1]
        if any(each.kind in ("get_scale", "passed") and loop in each.loops for each in trace):
            return None
        for each in reversed(trace[:place]):
            if each.kind != "scaler_step" or not compatible(each.guard, scheduler.guard):
                continue
            scaled = any(
                e.kind == "backward" and e.scale is not None and loop == e.loops[-1:][0] for e in trace if e.loops
            )
            own = facts.scalers.like_torch(each.scaler, each.record)
            return each if own and scaled and loop in each.loops else None
        return None
