from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, Note, Rule, Trace, TraceStep, any_of, compatible

_GAN = """\
import torch

def train(g, d, loader):
    scaler = torch.amp.GradScaler("cuda")
    opt_g, opt_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            a, b = g(x).mean(), d(x).mean()
        opt_g.zero_grad()
        opt_d.zero_grad()
{}
"""
_BEFORE = """\
        scaler.scale(a).backward()
        scaler.scale(b).backward()
        scaler.step(opt_g)
"""


def _gan(lines: str) -> str:
    """Return the program with these lines in its loop."""
    return _GAN.format(lines)


class UpdateBeforeStep(Rule):
    """`scaler.update()` runs between the backward passes of two optimizers and the second one's step.

    ## What it does
    Reports `scaler.step(b)` after `scaler.step(a)` and `scaler.update()`, with the backward passes of both before, and
    the same scaler.

    ## Why is this bad
    `update()` may change the scale, and the gradients of the second optimizer were scaled with the old one: where the
    scale grows (each 2000 steps) they become half as large, where it is lowered after an overflow twice as large.
    torch's documentation: `update` "should only be called once, after all optimizers used this iteration have been
    stepped" (torch 1.6 to 2.13).

    ## Known limits
    Both steps must be in one iteration of the same loop. A scaler of each optimizer's own is correct.
    """

    code, name = "MPG218", "update-before-step"
    severity = "warning"
    message = "`{expr}` unscales by a scale that `update()` may have changed after the backward pass"
    help = "call `update()` once, after the last step"
    triggers = (any_of(b".update("), any_of(b".step("), any_of(b".scale("))
    examples = (
        Bad(_gan(_BEFORE + "        scaler.update()\n        scaler.step(opt_d)  # !\n        scaler.update()")),
        Bad(
            _gan(
                "        scaler.scale(a + b).backward()\n        scaler.step(opt_g)\n        scaler.update()\n"
                "        torch.nn.utils.clip_grad_norm_(d.parameters(), 1.0)\n"
                "        scaler.step(opt_d)  # !\n        scaler.update()"
            )
        ),
        Good(_gan(_BEFORE + "        scaler.step(opt_d)\n        scaler.update()")),
        Good(
            _gan(
                "        scaler.scale(a).backward()\n        scaler.step(opt_g)\n        scaler.update()\n"
                "        scaler.scale(b).backward()\n        scaler.step(opt_d)\n        scaler.update()"
            )
        ),
        Good(
            _gan(
                "        if x.train_d:\n            scaler.scale(b).backward()\n            scaler.step(opt_d)\n"
                "            scaler.update()\n        else:\n            scaler.scale(a).backward()\n"
                "            scaler.step(opt_g)\n            scaler.update()"
            )
        ),
        Good(
            _gan(
                "        other.scale(b).backward()\n        scaler.scale(a).backward()\n        scaler.step(opt_g)\n"
                "        scaler.update()\n        other.step(opt_d)\n        other.update()"
            ).replace("    opt_g, opt_d =", '    other = torch.amp.GradScaler("cuda")\n    opt_g, opt_d =')
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        reported: set[object] = set()
        for trace in facts.traces.all:
            for place, step in enumerate(trace):
                if step.kind != "scaler_step" or step.record in reported:
                    continue
                if not facts.traces.like_torch(step.scaler, step.record):
                    continue
                update = self._update(trace, place, facts)
                if update is not None:
                    reported.add(step.record)
                    yield self.at(step, expr=facts.short(step.call.node), notes=(Note("updated here", update.span),))

    def _update(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the update after which a step applies gradients that were scaled before it."""
        step, update = trace[place], None
        for each in reversed(trace[:place]):
            if each.loops != step.loops or not compatible(each.guard, step.guard):
                if each.kind in ("backward", "framework", "passed", "unscale", "exit"):
                    return None
                continue
            if each.kind in ("backward", "framework", "passed", "exit", "unscale") and update is None:
                return None
            if each.kind == "update" and update is None:
                if each.guard - step.guard or not facts.traces.same(each.scaler, each.record, step.scaler, step.record):
                    return None
                update = each
            elif each.kind == "scaler_step" and update is not None:
                other = facts.short(each.optimizer) != facts.short(step.optimizer) and not facts.traces.same(
                    each.optimizer, each.record, step.optimizer, step.record
                )
                return update if other and self._scaled_before(trace, each, step) else None
            elif each.kind in ("backward", "passed") and update is not None:
                return None
        return None

    def _scaled_before(self, trace: Trace, first: TraceStep, step: TraceStep) -> bool:
        """True if a scaled backward pass precedes the first step in the same iteration."""
        return any(
            each.kind == "backward" and each.scale is not None and each.loops == step.loops
            for each in trace[: trace.index(first)]
        )
