from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Diagnostic,
    Facts,
    Fix,
    Note,
    PathCondition,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    path_condition,
    python_edits,
    trace_facts,
)


class UnscaleWithoutUpdate(ScalingRule):
    """After `unscale_` the step is skipped, and `scaler.update()` with it.

    ## What it does
    Reports a `continue` (or a `return` of the function that is one step) between `unscale_` and `update()`, and an
    `update()` that runs only if the gradients are finite, or pass another check.

    ## Why is this bad
    For the scaler, this step has not ended. The next `unscale_` raises "unscale_() has already been called on this
    optimizer since the last update()"; if the next step has no `unscale_`, its gradients are taken for unscaled, and
    gradients that are 65536 times too large are applied. It happens at the first bad batch, hours into a run.
    `scaler.step` skips such a step by itself.

    ## Fix safety
    The fix calls `scaler.update()` before the `continue`. It is unsafe because the scale then decreases after a batch
    that is skipped for an overflow, which is right but did not happen before. There is no fix if the gradients are
    unscaled in one branch only: `update()` raises if nothing was unscaled.

    ## Known limits
    A skip that raises, ends the loop or leaves the function that contains the loop is not reported.
    """

    code, name = "MPG217", "unscale-without-update"
    severity = "error"
    message = "the step is skipped after `{expr}` without `{scaler}.update()`: the next `unscale_` raises"
    help = "let `{scaler}.step` skip the step, or call `{scaler}.update()` here too"
    operations = ("unscale",)
    triggers = (any_of(b".unscale_("), any_of(b".update("))
    examples = (
        Bad(
            """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        optimizer.zero_grad()
        continue  # !
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
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        optimizer.zero_grad()
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
""",
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        unscale = trace[place]
        found = self._skip(trace, place) if facts.scalers.like_torch(unscale.scaler, unscale.record) else None
        if found is None:
            return None
        scaler = facts.short(unscale.scaler)
        return self.at(
            found,
            expr=facts.short(unscale.call.node),
            scaler=scaler,
            help=self.help.format(scaler=scaler),
            notes=(Note("the gradients are unscaled here", unscale.span),),
            fix=self._fix(found, unscale, scaler, facts),
        )

    def _skip(self, trace: Trace, place: int) -> TraceStep | None:
        """Return what leaves the step between an unscale and its update, or the update under a check."""
        unscale = trace[place]
        updates = [i for i in range(place, len(trace)) if self._updates(trace[i], unscale)]
        if not updates:
            return None
        for index in range(place + 1, updates[0]):
            each = trace[index]
            if self._leaves_step(each, unscale) and not any(self._updated_after(trace, place, index)):
                return each
        return self._checked(trace, place, updates)

    def _updates(self, each: TraceStep, unscale: TraceStep) -> bool:
        same = not unscale.loops or unscale.loops[0] in each.loops
        return each.kind == "update" and compatible(each.guard, unscale.guard) and same

    def _leaves_step(self, each: TraceStep, unscale: TraceStep) -> bool:
        """True for a `continue` of a loop around the unscale, and for a `return` from the step that contains it."""
        more = PathCondition(each.guard - unscale.guard)
        if each.kind != "exit" or not more or trace_facts.rhythm(more) or not compatible(each.guard, unscale.guard):
            return False
        if not trace_facts.unrelated(each.guard, unscale.guard):
            return False  # the branch of a flag that has two names
        if each.ends(cst.Continue):
            return bool(each.loops) and each.loops[-1] in unscale.loops
        if each.ends(cst.Return):
            depth = len(each.via)
            inner = (
                unscale.record
                if len(unscale.via) == depth
                else unscale.via[depth]
                if len(unscale.via) > depth
                else None
            )
            return unscale.via[:depth] == each.via and inner is not None and not inner.loops and not each.record.loops
        return False

    def _updated_after(self, trace: Trace, place: int, index: int) -> Iterator[TraceStep]:
        """Yield the updates before an exit, and those of the callers after it."""
        exits = trace[index]
        # A plain step marks the other branch of a flag that has two names.
        yield from trace_facts.between(
            trace, place, index, *trace_facts.ENDS["unscaled"], "step", "other_step", guard=exits.guard
        )
        for each in trace[index:]:
            if exits.ends(cst.Return):
                reached = each.via[: len(exits.via)] != exits.via
            else:
                reached = exits.loops[-1] not in each.loops
            if reached and each.kind in trace_facts.ENDS["unscaled"] and compatible(each.guard, exits.guard):
                yield each

    def _checked(self, trace: Trace, place: int, updates: list[int]) -> TraceStep | None:
        """Return the update that is under a check of the gradients, if there is no other."""
        unscale, update = trace[place], trace[updates[0]]
        more = PathCondition(update.guard - unscale.guard)
        if not more or not all(_checks_gradients(PathCondition([condition]), unscale, update) for condition in more):
            return None
        otherwise = unscale.guard.given(path_condition.negated(path_condition.All(tuple(more))))
        loop = unscale.loops[0] if unscale.loops else None
        for index, each in enumerate(trace):
            if not compatible(each.guard, otherwise):
                continue
            if each.kind in trace_facts.ENDS["unscaled"] and (loop is None or loop in each.loops):
                return None
            if each.kind == "exit" and place < index and not each.ends(cst.Continue) and each.guard - unscale.guard:
                return None
        return update

    def _fix(self, found: TraceStep, unscale: TraceStep, scaler: str, facts: Facts) -> Fix | None:
        if found.kind != "exit" or found.record.scope is not unscale.record.scope:
            return None
        if unscale.guard - found.guard:
            return None  # where nothing was unscaled, `update()` raises
        line = facts.parent(found.record.node)
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            return None
        edit = python_edits.line_before(facts, line, unscale.call, f"{scaler}.update()")
        return Fix("Update the scaler where the step is skipped", "unsafe", (edit,))


def _checks_gradients(condition: PathCondition, unscale: TraceStep, update: TraceStep) -> bool:
    """True if a condition tests for invalid values, or something that the loop sets between unscale and update."""
    if trace_facts.exceptional(condition):
        return True
    bindings = trace_facts.set_in_loop(condition, unscale)
    related = not trace_facts.unrelated(condition, PathCondition()) or trace_facts.rhythm(condition)
    return not related and any(unscale.record.order < each.order < update.record.order for each in bindings)
