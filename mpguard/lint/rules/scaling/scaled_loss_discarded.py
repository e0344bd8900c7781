from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
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
    python_edits,
)


class ScaledLossDiscarded(Rule):
    """The result of `scaler.scale(loss)` is discarded, and `backward()` runs on the loss that is not scaled.

    ## What it does
    Reports a call of `scale` whose result is not used, if `backward` of the same loss follows.

    ## Why is this bad
    `scale` returns the scaled loss and does not change its argument. The gradients stay small and underflow in FP16,
    and `scaler.step` then divides them by a scale that they were not multiplied by: the steps have 1/65536 of their
    size.

    ## Fix safety
    The fix is `scaler.scale(loss).backward()`. It is unsafe because the gradients change: a learning rate that was
    tuned for the wrong ones does not fit.

    ## Known limits
    The loss must have the same name in both places.
    """

    code, name = "MPG213", "scaled-loss-discarded"
    severity = "error"
    in_tests = True
    message = "the result of `{expr}` is discarded"
    help = "`scale` returns the scaled loss: call `backward()` on that"
    triggers = (any_of(b".scale("), any_of(b".backward("), any_of(b"scaler", b"Scaler"))
    examples = (
        Bad(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss)  # !
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
""",
            fixed="""\
import torch

scaler = torch.amp.GradScaler("cuda")
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
    def __init__(self, args):
        self.scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

    def step(self, out, optimizer):
        optimizer.zero_grad()
        self.scaler.scale(out.loss)  # !
        out.loss.backward(retain_graph=True)
        self.scaler.step(optimizer)
        self.scaler.update()
""",
            fixed="""\
import torch

class Run:
    def __init__(self, args):
        self.scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

    def step(self, out, optimizer):
        optimizer.zero_grad()
        self.scaler.scale(out.loss).backward(retain_graph=True)
        self.scaler.step(optimizer)
        self.scaler.update()
""",
        ),
        Good(
            """\
import torch

def train(args, model, loader, optimizer, scaler, features):
    for x in loader:
        loss = model(x).sum()
        if args.amp:
            loss = scaler.scale(loss)
        loss.backward()
        other = model(x).mean()
        scaler.scale(other).backward()

def arms(args, loss, scaler):
    if args.warm:
        scaler.scale(loss)
    else:
        loss.backward()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        reported: set[object] = set()
        for trace in facts.traces.all:
            for place, scale in enumerate(trace):
                if scale.kind != "scale" or scale.record in reported or not scale.call.is_statement:
                    continue
                if not facts.traces.like_torch(scale.scaler, scale.record):
                    continue
                backward = self._unscaled(trace, place, facts)
                if backward is None:
                    continue
                reported.add(scale.record)
                notes = (Note("this runs on the loss that is not scaled", backward.span),)
                yield self.at(
                    scale,
                    expr=facts.short(scale.call.node),
                    notes=notes,
                    fix=self._fix(scale, backward, facts),
                )

    def _unscaled(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        scale = trace[place]
        loss = facts.short(scale.call.positional[0]).strip("()")
        for each in trace[place + 1 :]:
            if (
                each.kind == "backward"
                and each.scale is None
                and compatible(each.guard, scale.guard)
                and each.record.scope is scale.record.scope
                and facts.short(each.call.receiver).strip("()") == loss
            ):
                return each
        return None

    def _fix(self, scale: TraceStep, backward: TraceStep, facts: Facts) -> Fix | None:
        assert backward.call.receiver is not None
        if facts.parent(scale.call.line) is not facts.parent(backward.call.line):
            return None
        edits = (
            python_edits.without_statement(facts, scale.call),
            python_edits.replaced(backward.call.receiver, backward.call, facts.text(scale.call.node, scale.call)),
        )
        return Fix("Call `backward` on the scaled loss", "unsafe", edits)
