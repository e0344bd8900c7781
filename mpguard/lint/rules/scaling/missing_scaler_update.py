from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Diagnostic,
    Facts,
    Fix,
    Note,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    dotted,
    lazy_pattern,
    python_edits,
    trace_facts,
)

#: Functions that get a scaler before the step, and leave its update to what follows: `on_before_optimizer_step`.
_COMES_BEFORE = lazy_pattern(r"(?i)before|clip|unscale|norm")


class MissingScalerUpdate(ScalingRule):
    """`scaler.step(optimizer)` is called and `scaler.update()` never is, or comes before the step.

    ## What it does
    Reports the (last) `scaler.step` of a training loop in which the scaler is not updated, and a `scaler.update()`
    between the backward pass and the step.

    ## Why is this bad
    `update` starts the next step: without it the second `scaler.step` raises "step() has already been called since the
    last update()", and the scale neither grows nor, after an overflow, shrinks. One `update` after the steps of several
    optimizers is right.

    An `update` before the step forgets that the gradients were unscaled and what was found in them: after
    `unscale_` the step divides by the scale a second time; without `unscale_`, `update` raises "No inf checks were
    recorded prior to update".

    ## Fix safety
    The fix adds `scaler.update()` after the step. It is unsafe because the update may belong elsewhere, such as at the
    end of a helper. There is no fix if the optimizers step in an inner loop, after which the update belongs, or if the
    scaler is updated after the training loop: that update has to move into the loop, since `update()` raises if no step
    came before it. An `update` before the step is moved behind it, where both are statements of one block.

    ## Known limits
    A missing update is reported only for a GradScaler of torch that the file creates: in a loop whose scaled `backward`
    and `step` are both in the file, or where nothing in the project updates a scaler, apart from programs that create
    their own, and from code that steps one and that no import connects with the file. A scaler that is passed to code
    elsewhere may be updated there, and that of a class by other files which call a method of it that updates.
    """

    code, name = "MPG204", "missing-scaler-update"
    severity = "error"
    message = "`{expr}` is never followed by `{scaler}.update()`"
    help = "call `update()` once per step, after the last `step`"
    operations = ("update", "scaler_step")
    yields_to = ("MPG206",)
    triggers = (
        any_of(b"GradScaler", b".update("),
        any_of(b".scale(", b".unscale_(", b"caler.step("),
        any_of(b".step("),
    )
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
    scaler.step(optimizer)  # !
    optimizer.zero_grad()
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
    optimizer.zero_grad()
""",
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        step = trace[place]
        if step.kind == "update":
            late = self._steps_after(trace, place, facts)
            return self._too_early(step, late, facts) if late is not None else None
        if not self._never_updated(trace, place, facts):
            return None
        scaler = facts.short(step.scaler)
        scaled = [each for _, each in _scaled_before(trace, place)][:1]
        notes = tuple(Note("its loss is scaled here", backward.span) for backward in scaled)
        fix = None
        # else the update belongs after the inner loop
        together = set(step.loops) <= set(scaled[0].loops if scaled else ())
        if step.call.is_statement and together and not self._updated_elsewhere(trace, step, facts):
            edit = python_edits.line_after(facts, step.call.line, step.call, f"{scaler}.update()")
            fix = Fix("Update the scaler after the step", "unsafe", (edit,))
        return self.at(step, expr=facts.short(step.call.node), scaler=scaler, notes=notes, fix=fix)

    def _steps_after(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the step of the same iteration that an update precedes; None if the update follows a step."""
        update = trace[place]
        scope = update.record.scope
        if not facts.scalers.like_torch(update.scaler, update.record):
            return None

        def near(each: TraceStep) -> bool:
            return each.kind in ("backward", "scaler_step", "passed") and compatible(each.guard, update.guard)

        before = next((each for each in reversed(trace[:place]) if near(each)), None)
        after = next((each for each in trace[place + 1 :] if near(each)), None)
        if after is None or after.kind != "scaler_step":
            return None
        if self._is_next_line(update, after, facts) and not any(each.kind == "scaler_step" for each in trace[:place]):
            return after
        if before is not None and before.kind == "scaler_step":
            return after if _steps_another(before, after, facts) and not after.guard - update.guard else None
        if before is not None and before.kind != "backward":
            return None
        unscaled = any(each.kind == "unscale" and each.record.scope is scope for each in trace[:place])
        if before is None and not unscaled:
            return None
        together = after.record.scope is scope and after.loops == update.loops and not update.guard - after.guard
        if not together or (before is not None and not set(update.loops) <= set(before.loops)):
            return None
        return after if facts.short(after.scaler) == facts.short(update.scaler) else None

    def _is_next_line(self, update: TraceStep, step: TraceStep, facts: Facts) -> bool:
        """True if the step is the statement after the update: the first update would come before any step."""
        block = facts.parent(update.call.line)
        lines = list[cst.CSTNode](block.body) if isinstance(block, cst.IndentedBlock) else []
        place = lines.index(update.call.line) if update.call.line in lines else len(lines)
        follows = lines[place + 1 : place + 2] == [step.call.line]
        return follows and facts.short(step.scaler) == facts.short(update.scaler)

    def _too_early(self, update: TraceStep, step: TraceStep, facts: Facts) -> Diagnostic:
        call, late = update.call, step.call
        fix = None
        if call.is_statement and late.is_statement and facts.parent(call.line) is facts.parent(late.line):
            moved = python_edits.line_after(facts, late.line, late, facts.text(call.node, call))
            fix = Fix("Update after the step", "unsafe", (python_edits.without_statement(facts, call), moved))
        return self.at(
            update,
            message=f"`{facts.short(call.node)}` comes before `{facts.short(late.node)}`",
            help="update the scaler after the last `step`",
            notes=(Note("the step", step.span),),
            fix=fix,
        )

    def _updated_elsewhere(self, trace: Trace, step: TraceStep, facts: Facts) -> bool:
        """True if the scaler is updated outside the loop, where `update()` raises after one in the loop."""
        return any(
            each.kind == "update"
            and compatible(each.guard, step.guard)
            and not facts.scalers.differ(step.scaler, step.record, each.scaler, each.record)
            for each in trace
        )

    def _never_updated(self, trace: Trace, place: int, facts: Facts) -> bool:
        step, scalers = trace[place], facts.scalers
        if scalers.own(step.scaler, step.record) and self._not_in_its_loop(trace, place, facts):
            return True
        made = any(scalers.own(each.call.node, each.call) for each in facts.events("scaler"))
        return made and scalers.like_torch(step.scaler, step.record) and self._nowhere_updated(trace, place, facts)

    def _nowhere_updated(self, trace: Trace, place: int, facts: Facts) -> bool:
        """True if no code of the project updates the scaler: that of a class whose users run backward, for example."""
        step = trace[place]
        owner = step.record.scope.owner
        if owner is not None and facts.class_kind(owner) in ("framework", "trainer"):
            return False
        if any(each.kind in ("scaler_step", "update") for each in trace[place + 1 :]):
            return False  # only the last step is reported
        for index, each in enumerate(trace):
            before = index < place and _COMES_BEFORE.search(each.call.name) if each.kind == "passed" else True
            if not before and not facts.functions(each.call):
                return False
        return not facts.may_update_scaler

    def _not_in_its_loop(self, trace: Trace, place: int, facts: Facts) -> bool:
        step, scalers = trace[place], facts.scalers
        scaled = next(_scaled_before(trace, place), None)
        if scaled is None:
            return False
        together = scaled[1].record.scope is step.record.scope
        if (
            not together
            and facts.short(step.scaler).startswith("self.")
            and facts.base_unknown(step.record.scope.owner)
        ):
            return False
        loop = next(
            (
                each
                for each in reversed(step.loops)
                if each in scaled[1].loops and not self._counts_as_one(each, step, facts)
            ),
            None,
        )
        guard = step.guard.joined(scaled[1].guard)

        def other(each: TraceStep) -> bool:
            return scalers.differ(step.scaler, step.record, each.scaler, each.record)

        for index, each in enumerate(trace):
            if not compatible(each.guard, guard) or (loop is not None and loop not in each.loops):
                continue
            if each.kind == "passed" or (each.kind == "update" and not other(each)):
                return False
            if each.kind == "scaler_step" and index > place and not other(each):
                return False  # only the last step is reported
        return not self._updated_by_users(step, facts)

    def _updated_by_users(self, step: TraceStep, facts: Facts) -> bool:
        """True if code that uses the class of a scaler updates it: `trainer.scaler.update()`, or by a method of it."""
        owner, scaler = step.record.scope.owner, facts.short(step.scaler)
        if owner is None or not scaler.startswith("self."):
            return False
        for method in owner.children:
            updates = any(call.path == f"{scaler}.update" for call in method.calls)
            if updates and any(facts.of(each) is not facts for each in facts.callers(method)):
                return True
        attribute = scaler.removeprefix("self")
        for user in (facts, *(facts.users(owner.name) or ())):
            user.need_uses(attribute.rpartition(".")[2])
            paths = [dotted(call.func) for call in user.calls.get("update", ())]
            if any(path.endswith(f"{attribute}.update") and not path.startswith("self.") for path in paths):
                return True
        return False

    def _counts_as_one(self, loop: cst.CSTNode, step: TraceStep, facts: Facts) -> bool:
        """True for a loop over optimizers, of which each steps once."""
        if not isinstance(loop, cst.For):
            return False
        optimizer = step.optimizer
        index = optimizer.slice[0].slice if isinstance(optimizer, cst.Subscript) else None
        used = {dotted(optimizer).split(".", 1)[0]}
        if isinstance(index, cst.Index):
            used |= {dotted(index.value), *re.findall(r"\w+", facts.short(index.value))}
        targets = loop.target.elements if isinstance(loop.target, cst.Tuple) else ()
        return bool(used & ({dotted(loop.target), *(dotted(each.value) for each in targets)} - {""}))


def _steps_another(one: TraceStep, other: TraceStep, facts: Facts) -> bool:
    """True if two steps of a scaler, in one loop of a function, are those of two optimizers."""
    together = one.record.scope is other.record.scope and one.loops == other.loops
    same_scaler = facts.short(one.scaler) == facts.short(other.scaler)
    return together and same_scaler and facts.short(one.optimizer) != facts.short(other.optimizer)


def _scaled_before(trace: Trace, place: int) -> Iterator[tuple[int, TraceStep]]:
    """Yield the backward passes before a step, with their places, whose loss is scaled where the scaler steps."""
    step = trace[place]
    for index, each in trace_facts.before(trace, place):
        if each.may_scale is not None and compatible(each.may_scale.guard, step.guard):
            yield index, each
