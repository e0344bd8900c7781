from __future__ import annotations

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Note,
    Object,
    PathCondition,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    constant,
    dotted,
    own_optimizers,
    path_condition,
    python_edits,
    trace_facts,
)


class StepBypassesScaler(ScalingRule):
    """`optimizer.step()` on gradients that a GradScaler has scaled.

    ## What it does
    Reports an optimizer's `step()` if the `backward` before it ran on `scaler.scale(loss)`.

    ## Why is this bad
    The gradients are larger than the true ones by the scale, 65536 at first. Adam hides the factor but still steps on
    infinities, SGD multiplies its step by it; and without `scaler.step` nothing skips a step whose gradients
    overflowed, nor adapts the scale.

    ## Fix safety
    Safe: `scaler.step(optimizer)` unscales and takes the intended step. `scaler.update()` is added if none follows,
    after the last of several steps, since the scaler refuses a second step without one. There is no fix for a step with
    a closure (GradScaler takes none), for one that is not a statement of its own, for one that may come without a
    backward before it (`scaler.step` raises), if an update may happen elsewhere, and if one branch of a flag does not
    scale the loss: a scaler that is enabled there would unscale gradients that were not scaled.

    ## Known limits
    If only one branch of a flag scales the loss, the step is reported if it always follows that branch. Silent if code
    between `backward` and `step` reads the scale (`get_scale`: the gradients may be unscaled by hand), and if the step
    is under a check of finiteness. `unscale_` alone is not enough: nothing then skips a step that overflowed. A
    constant scale by choice (`GradScaler(2**10)`, never stepped nor updated) before Adam without weight decay, or
    AdamW, which divides it out, is not reported, nor a step that gets the scaler (`optimizer.step(scaler=scaler)`),
    follows gradients that the code sets to a difference of weights, or is of an optimizer in the project that reads no
    gradients.
    """

    code, name = "MPG203", "step-bypasses-scaler"
    severity = "error"
    message = "`{expr}` bypasses the GradScaler that scaled its gradients"
    help = "step through the scaler, which unscales the gradients and skips the step where they overflowed"
    operations = ("step",)
    triggers = (any_of(b".step("), any_of(b"backward", b".scale("))
    triggers_nearby = (any_of(b"scaler", b"Scaler"), any_of(b".scale("))
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
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        step, backward = trace[place], self._scaled(trace, place, facts)
        if backward is None or backward.scale is None:
            return None
        notes = (Note("the loss is scaled here", (backward.at or backward.scale).span),)
        fix = self._fix(trace, place, backward.scale, facts) if backward.at is None else None
        return self.at(step, expr=facts.short(step.call.node), notes=notes, fix=fix)

    def _scaled(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the scaled backward pass whose gradients a step applies as they are."""
        step = trace[place]
        for number, (index, backward) in enumerate(trace_facts.before(trace, place)):
            scale = backward.scale
            if scale is None or self._by_hand(trace, index, place, facts) or self._constant(scale, step, facts):
                continue
            more = (PathCondition([condition]) for condition in step.guard - backward.guard)
            if number and not all(map(trace_facts.rhythm, more)):
                continue  # another backward pass is between
            enabled = facts.scalers.enabled(scale.subject, scale.call)
            if compatible(step.guard, backward.guard, enabled) and not self._applies_others(backward, step, facts):
                return backward
        return None

    def _applies_others(self, backward: TraceStep, step: TraceStep, facts: Facts) -> bool:
        """True if the optimizer uses the scaler itself, or other values than the gradients of the backward pass."""
        assert step.event is not None
        return (
            self._gets_scaler(step, facts)
            or self._sets_gradients(backward, step, facts)
            or own_optimizers.ignores_gradients(step.event, facts)
            or own_optimizers.steps_through_scaler(step.event, backward.scaler, facts)
        )

    def _gets_scaler(self, step: TraceStep, facts: Facts) -> bool:
        """True for an optimizer with a `step` of its own that takes the scaler: `optimizer.step(scaler=scaler)`."""
        return any(
            "scaler" in facts.kinds(arg.value, step.call) or "scaler" in facts.short(arg.value).lower()
            for arg in step.call.node.args
        )

    def _sets_gradients(self, backward: TraceStep, step: TraceStep, facts: Facts) -> bool:
        """True if the code sets the gradients after the backward pass to a difference, which is no gradient."""
        scope = step.record.scope
        return any(
            key.endswith(".grad")
            and isinstance(bound.value, cst.BinaryOperation)
            and isinstance(bound.value.operator, cst.Subtract)
            and "grad" not in facts.short(bound.value)
            and (bound.scope is not backward.record.scope or backward.record.order < bound.order)
            and bound.order < step.record.order
            and path_condition.implies(step.guard, bound.guard)
            for key, bindings in scope.bindings.items()
            for bound in bindings
        )

    def _constant(self, scale: Event, step: TraceStep, facts: Facts) -> bool:
        """True if the scale is a constant by choice, which Adam divides out.

        Such a scaler is created with a scale, `GradScaler(2**10)`, and neither its `step` nor `update` is called. The
        weight decay of Adam is added to the gradients, and divided with them; that of AdamW is not.
        """
        if any(each.events(kind) for each in (facts, facts.of(scale.call)) for kind in ("scaler_step", "update")):
            return False
        scalers = [each.atom for each in facts.evaluate(scale.subject, scale.call)]
        stepped = [each.atom for each in facts.evaluate(step.optimizer, step.call)]
        chosen = [isinstance(atom, Object) and atom.call is not None and bool(atom.call.positional) for atom in scalers]
        adam = [isinstance(atom, Object) and atom.call is not None and _divides_out(atom.call) for atom in stepped]
        return bool(chosen and adam) and all(chosen + adam)

    def _by_hand(self, trace: Trace, index: int, place: int, facts: Facts) -> bool:
        """True if the gradients may be unscaled and checked by hand, or the scaler stepped in between."""
        step, backward = trace[place], trace[index]
        assert backward.scale is not None
        enabled = facts.scalers.enabled(backward.scale.subject, backward.scale.call)
        further = [
            each for each in step.guard - backward.guard if not path_condition.implies(enabled, PathCondition([each]))
        ]
        if any(trace_facts.CHECKS.search(flag) and "loss" not in flag for flag in PathCondition(further).flags()):
            return True  # a check of the gradients; one before the backward pass, or with its name, is of the loss
        return any(
            facts.traces.computes_with_scale(each.call)
            if each.kind == "get_scale"
            else each.at is not None or facts.short(each.optimizer) == facts.short(step.optimizer)
            for each in trace_facts.between(trace, index, place, "get_scale", "scaler_step", guard=step.guard)
        )

    def _fix(self, trace: Trace, place: int, scale: Event, facts: Facts) -> Fix | None:
        step, scaler = trace[place], facts.short(scale.subject)
        scope = step.record.scope
        here = scale.scope is scope or (scaler.startswith("self.") and scale.scope.owner is scope.owner)
        module = scaler in facts.module.bindings and scaler not in scope.bindings
        before = [each for _, each in trace_facts.before(trace, place)]
        if not (here or module) or step.optimizer is None or not _right_in_all_branches(step, scale, before, facts):
            return None
        # Without new gradients `scaler.step` raises, or unscales twice.
        loops = set(_outer_loops(step))
        known = all(each.kind == "backward" and loops <= set(each.loops) for each in before)
        if not known or not trace_facts.is_covered(step.guard, before):
            return None
        together = [
            each
            for index, each in enumerate(trace)
            if each.kind == "step"
            and each.record.scope is scope
            and (backward := self._scaled(trace, index, facts)) is not None
            and backward.scale is scale
        ]
        block = facts.parent(step.call.line)
        for each in together:
            line = each.call.line
            if each.call.node.args or not each.call.is_statement or facts.parent(line) is not block:
                return None
            if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
                return None
        edits = [
            python_edits.replaced(step.call.node, step.call, f"{scaler}.step({facts.text(step.optimizer, step.call)})")
        ]
        updates = [
            event
            for event in facts.events("update")
            if event.scope is scope or (scope.owner is not None and event.scope.owner is scope.owner)
        ]
        after = [u for u in updates if u.scope is scope and u.order > together[-1].record.order]
        if len(after) != len(updates):
            return None  # an update before the step, or in another method: its order is unknown
        if after:
            if not any(
                u.call.loops == _outer_loops(step) and path_condition.implies(step.call.guard, u.guard) for u in after
            ):
                return None
        elif _outer_loops(step) != step.call.loops:
            return None  # the update belongs after the loop over the optimizers
        elif step is together[-1]:
            edits.append(python_edits.line_after(facts, step.call.line, step.call, f"{scaler}.update()"))
        return Fix("Step through the scaler", "safe", tuple(edits))


def _right_in_all_branches(step: TraceStep, scale: Event, before: list[TraceStep], facts: Facts) -> bool:
    """True if the scaler exists wherever the step runs, and is disabled where the loss is not scaled."""
    if all(each.scale is not None and not (each.guard - step.guard) for each in before):
        return True
    scalers = facts.evaluate(scale.subject, scale.call)
    if not all(isinstance(each.atom, Object) and path_condition.implies(step.guard, each.guard) for each in scalers):
        return False
    enabled = facts.scalers.enabled(scale.subject, scale.call)
    return all(
        each.kind == "backward" and not compatible(each.guard, step.guard, enabled)
        for each in before
        if each.kind != "backward" or not compatible(each.guard, scale.call.guard)
    )


def _divides_out(optimizer: Call) -> bool:
    """True for an Adam whose steps do not depend on a constant factor of the gradients."""
    decay = optimizer.keywords.get("weight_decay")
    return "AdamW" in optimizer.name or ("Adam" in optimizer.name and (decay is None or constant(decay) == (0,)))


def _outer_loops(step: TraceStep) -> tuple[cst.CSTNode, ...]:
    """Return the loops around a step, without the one over the optimizers: `for each in optimizers: each.step()`."""
    loops = step.call.loops
    inner = loops[-1] if loops else None
    return loops[:-1] if isinstance(inner, cst.For) and dotted(inner.target) == dotted(step.optimizer) else loops
