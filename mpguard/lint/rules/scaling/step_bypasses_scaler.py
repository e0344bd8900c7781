from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    All,
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Function,
    Note,
    Object,
    PathCondition,
    Rule,
    any_of,
    compatible,
    constant,
    dotted,
    implies,
    lazy_pattern,
    negated,
    own_optimizers,
    python_edits,
    roles,
    trace_facts,
)

#: Conditions on overflow: the code does by hand what the scaler would do.
_CHECKS = lazy_pattern(f"(?i){roles.OVERFLOWS}")


_NO_BACKWARD = frozenset({"step", "scale", "zero_grad", "update"})


@dataclasses.dataclass(frozen=True)
class _Bypass:
    """A step on scaled gradients. before: the backward passes that it may follow, one per branch."""

    step: Event
    scale: Event
    before: list[Call | None]
    all_scaled: bool


class StepBypassesScaler(Rule):
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
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        scaled = facts.scalers.scaled
        if not scaled:
            return
        backwards = {event.call: event for event in facts.events("backward")}
        found = [
            bypass
            for step in facts.events("step")
            if (bypass := self._bypass(step, self._before(step, backwards, facts), scaled, facts)) is not None
        ]
        for bypass in found:
            notes = (Note("the loss is scaled here", bypass.scale.span),)
            fix = self._fix(bypass, found, facts)
            yield self.at(bypass.step, expr=facts.short(bypass.step.call.node), notes=notes, fix=fix)

    def _bypass(
        self, step: Event, before: list[Call | None], scaled: dict[Call, Event], facts: Facts
    ) -> _Bypass | None:
        """Return the step with the scaled backward before it; None if it applies other gradients."""
        for place, backward in enumerate(before):
            if backward not in scaled or backward is None or self._by_hand(backward, step, scaled[backward], facts):
                continue
            if self._constant(scaled[backward], step, facts):
                continue
            if place and not self._surely_after(backward, step):
                continue
            if self._gets_scaler(step, facts) or self._sets_gradients(backward, step, facts):
                continue
            scale = scaled[backward]
            if own_optimizers.ignores_gradients(step, facts):
                continue
            if own_optimizers.steps_through_scaler(step, scale.subject, facts):
                continue
            if compatible(step.guard, facts.guard_of(backward), facts.scalers.enabled(scale.subject, scale.call)):
                return _Bypass(step, scale, before, all(each in scaled for each in before))
        return None

    def _gets_scaler(self, step: Event, facts: Facts) -> bool:
        """True for an optimizer with a `step` of its own that takes the scaler: `optimizer.step(scaler=scaler)`."""
        return any(
            "scaler" in facts.kinds(arg.value, step.call) or "scaler" in facts.short(arg.value).lower()
            for arg in step.call.node.args
        )

    def _sets_gradients(self, backward: Call, step: Event, facts: Facts) -> bool:
        """True if the code sets the gradients after the backward pass, from other values than gradients."""
        return any(
            key.endswith(".grad") and bound.value is not None and not self._from_gradients(bound.value, facts)
            for key, bindings in step.scope.bindings.items()
            for bound in bindings
            if (bound.scope is not backward.scope or backward.order < bound.order)
            and bound.order < step.order
            and implies(step.guard, bound.guard)
        )

    def _from_gradients(self, value: cst.BaseExpression, facts: Facts) -> bool:
        """True for None, and for a value that may be computed from gradients: only differences are known not to be."""
        is_difference = isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Subtract)
        return not is_difference or "grad" in facts.short(value)

    def _constant(self, scale: Event, step: Event, facts: Facts) -> bool:
        """True if the scale is a constant by choice, which Adam divides out.

        Such a scaler is created with a scale, `GradScaler(2**10)`, and neither its `step` nor `update` is called. The
        weight decay of Adam is added to the gradients, and divided with them; that of AdamW is not.
        """
        if facts.events("scaler_step") or facts.events("update"):
            return False
        scalers = [each.atom for each in facts.evaluate(scale.subject, scale.call)]
        stepped = [each.atom for each in facts.evaluate(step.subject, step.call)]
        chosen = [isinstance(atom, Object) and atom.call is not None and bool(atom.call.positional) for atom in scalers]
        adam = [isinstance(atom, Object) and atom.call is not None and _divides_out(atom.call) for atom in stepped]
        return bool(chosen and adam) and all(chosen + adam)

    def _surely_after(self, backward: Call, step: Event) -> bool:
        """True if the step follows the backward under all conditions except those of gradient accumulation."""
        more = (PathCondition([condition]).flags() for condition in step.call.guard - backward.guard)
        return all(any("%" in flag for flag in flags) for flags in more)

    def _before(self, step: Event, backwards: dict[Call, Event], facts: Facts) -> list[Call | None]:
        """Return the backward passes whose gradients the step may apply; None for an unknown one.

        They are the last one before it, in its function, in one that it calls or in its closure, and those in branches
        that exclude the last one.
        """
        found: list[Call | None] = []
        for each in facts.evaluate(step.call.argument(0, "closure"), step.call) if step.call.node.args else ():
            if isinstance(each.atom, Function):
                found += [call for call in each.atom.scope.calls if call in backwards][-1:]
                return found
        without = step.guard  # that none of those found so far runs
        for call in reversed(step.scope.calls):
            if call.order >= step.order or call.name in _NO_BACKWARD or not compatible(call.guard, without):
                continue
            inner = call if call in backwards else self._inside(call, backwards, without, facts)
            if inner is None and call.name != "backward":
                continue
            found.append(inner)
            further = PathCondition(call.guard - step.call.guard)
            if not further:
                break
            without = without.given(negated(All(tuple(further))))
        return found or self._in_trace(step, facts)

    def _in_trace(self, step: Event, facts: Facts) -> list[Call | None]:
        """Return the backward passes in another method of its class that other files call before the step."""
        for trace in facts.traces.all:
            for place, each in enumerate(trace):
                if each.record is step.call:
                    found: list[Call | None] = [one.call for _, one in trace_facts.before(trace, place)]
                    if found:
                        return found
        return []

    def _inside(self, call: Call, backwards: dict[Call, Event], guard: PathCondition, facts: Facts) -> Call | None:
        for function in facts.functions(call):
            if function.facts is facts:
                calls = function.scope.calls
                inner = [each for each in calls if each in backwards and compatible(each.guard, guard)]
                if inner:
                    return inner[-1]
        return None

    def _by_hand(self, backward: Call, step: Event, scale: Event, facts: Facts) -> bool:
        """True if the gradients may be unscaled and checked by hand, or the scaler stepped in between."""
        enabled = facts.scalers.enabled(scale.subject, scale.call)
        further = [each for each in step.guard - backward.guard if not implies(enabled, PathCondition([each]))]
        flags = PathCondition(further).flags()
        if any(_CHECKS.search(flag) and "loss" not in flag for flag in flags):
            return True  # a check of the gradients; one before the backward pass, or with its name, is of the loss
        for call in step.scope.calls:
            between = call.order < step.order and (call.scope is not backward.scope or backward.order < call.order)
            if between and compatible(call.guard, step.guard):
                if call.name in ("get_scale", "_unscale_grads_") and facts.traces.computes_with_scale(call):
                    return True
                if call.name == "step" and call in {event.call for event in facts.events("scaler_step")}:
                    given = call.argument(0, "optimizer")
                    if facts.short(given) == facts.short(step.subject):
                        return True
        return False

    def _fix(self, bypass: _Bypass, found: list[_Bypass], facts: Facts) -> Fix | None:
        step, scale = bypass.step, bypass.scale
        scaler = facts.short(scale.subject)
        here = scale.scope is step.scope or (scaler.startswith("self.") and scale.scope.owner is step.scope.owner)
        module = scaler in facts.module.bindings and scaler not in step.scope.bindings
        if not (here or module) or step.subject is None or not self._right_in_all_branches(bypass, facts):
            return None
        if not self._always_after_backward(bypass):
            return None
        together = [each.step for each in found if each.scale is scale and each.step.scope is step.scope]
        block = facts.parent(step.call.line)
        for each in together:
            line = each.call.line
            if each.call.node.args or not each.call.is_statement or facts.parent(line) is not block:
                return None
            if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
                return None
        edits = [
            python_edits.replaced(step.call.node, step.call, f"{scaler}.step({facts.text(step.subject, step.call)})")
        ]
        updates = [
            event
            for event in facts.events("update")
            if event.scope is step.scope or (step.scope.owner is not None and event.scope.owner is step.scope.owner)
        ]
        after = [u for u in updates if u.scope is step.scope and u.order > together[-1].order]
        if len(after) != len(updates):
            return None  # an update before the step, or in another method: its order is unknown
        if after:
            if not any(u.call.loops == _outer_loops(step) and implies(step.guard, u.guard) for u in after):
                return None
        elif _outer_loops(step) != step.call.loops:
            return None  # the update belongs after the loop over the optimizers
        elif step is together[-1]:
            edits.append(python_edits.line_after(facts, step.call.line, step.call, f"{scaler}.update()"))
        return Fix("Step through the scaler", "safe", tuple(edits))

    def _always_after_backward(self, bypass: _Bypass) -> bool:
        """True if a backward precedes each step; without new gradients `scaler.step` raises or unscales twice."""
        step, without = bypass.step, bypass.step.guard
        for backward in bypass.before:
            if backward is None or (
                backward.scope is step.scope and not set(_outer_loops(step)) <= set(backward.loops)
            ):
                return False
            conditions = PathCondition(backward.guard - step.guard)
            if not conditions:
                return True
            without = without.given(negated(All(tuple(conditions))))
        return not without.possible

    def _right_in_all_branches(self, bypass: _Bypass, facts: Facts) -> bool:
        """True if the scaler exists wherever the step runs, and is disabled where the loss is not scaled."""
        step, scale = bypass.step, bypass.scale
        if bypass.all_scaled and all(call is not None and not (call.guard - step.guard) for call in bypass.before):
            return True
        scalers = facts.evaluate(scale.subject, scale.call)
        if not all(isinstance(each.atom, Object) and implies(step.guard, each.guard) for each in scalers):
            return False
        enabled = facts.scalers.enabled(scale.subject, scale.call)
        return all(
            call is not None and not compatible(call.guard, step.guard, enabled)
            for call in bypass.before
            if call is None or not (call is scale.call or compatible(call.guard, scale.call.guard))
        )


def _divides_out(optimizer: Call) -> bool:
    """True for an Adam whose steps do not depend on a constant factor of the gradients."""
    decay = optimizer.keywords.get("weight_decay")
    return "AdamW" in optimizer.name or ("Adam" in optimizer.name and (decay is None or constant(decay) == (0,)))


def _outer_loops(step: Event) -> tuple[cst.CSTNode, ...]:
    """Return the loops around a step, without the one over the optimizers: `for each in optimizers: each.step()`."""
    loops = step.call.loops
    inner = loops[-1] if loops else None
    return loops[:-1] if isinstance(inner, cst.For) and step.key and dotted(inner.target) == step.key else loops
