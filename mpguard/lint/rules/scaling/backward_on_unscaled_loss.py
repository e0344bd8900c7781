from __future__ import annotations

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Fix,
    Note,
    PathCondition,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    dotted,
    python_edits,
    trace_facts,
)

#: Steps of a trace after which the gradients of a loss are gone: something applies or discards them.
_APPLIED: tuple[trace_facts.StepKind, ...] = ("zero_grad", "step", "other_step", "scaler_step", "framework")

_UNUSED_SCALER = "`{expr}` runs on a loss of FP16 autocast that the GradScaler has not scaled"


class BackwardOnUnscaledLoss(ScalingRule):
    """A GradScaler steps on the gradients of a loss that it has not scaled.

    ## What it does
    Reports `loss.backward()` if `scaler.step` applies its gradients on every path and no scaler can have scaled the
    loss; and if FP16 autocast computes the loss and a scaler is created that scales nothing.

    ## Why is this bad
    `scaler.step` divides the gradients by the scale, 65536 at first, although they were never multiplied by it: SGD
    hardly moves the weights, and Adam steps on gradients that underflowed. If the scaler has not scaled any loss, it
    raises "Attempted step but _scale is None".

    ## Fix safety
    The fix is `scaler.scale(loss).backward()`. It is unsafe because the run computes something else (what was
    intended).

    ## Known limits
    Silent if another branch of a flag scales the loss, if a plain `optimizer.step()` comes first (its network may train
    without a scaler), if a gradient is passed to `backward` (`backward(gradient=...)`), and where the loss is
    passed between methods of a class from which another file derives.
    """

    code, name = "MPG202", "backward-on-unscaled-loss"
    severity = "error"
    message = "`{expr}` runs on a loss that `{scaler}` has not scaled, and `{scaler}` steps on its gradients"
    help = "call `{scaler}.scale({loss}).backward()`"
    operations = ("backward",)
    triggers = (any_of(b".backward("), any_of(b".step("), any_of(b"scaler", b"Scaler"))
    yields_to = ("MPG202",)
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
    loss.backward()  # !
    scaler.step(optimizer)
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
        backward = trace[place]
        expr, loss = facts.short(backward.call.node), facts.short(backward.call.receiver)
        step = self._stepped_through(trace, place, facts)
        if step is not None:
            scaler, notes = facts.short(step.scaler), (Note("the scaler steps here", step.span),)
            help = self.help.format(scaler=scaler, loss=loss)
            fix = self._fix(backward, step, facts)
            return self.at(backward, expr=expr, scaler=scaler, help=help, notes=notes, fix=fix)
        unused = self._unused_scaler(trace, place, facts)
        if unused is None:
            return None
        help = self.help.format(scaler="scaler", loss=loss) + ", and step and update through the scaler"
        notes = (Note("the scaler is created here, and scales nothing", unused.span),)
        return self.at(backward, notes=notes, help=help, message=_UNUSED_SCALER.format(expr=expr))

    def _stepped_through(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the scaler's step that applies the gradients of a loss that nothing has scaled."""
        backward, scalers = trace[place], facts.scalers
        if backward.call in scalers.may_scale or "gradient" in backward.call.keywords:
            return None
        if any(each.kind == "passed" and compatible(each.guard, backward.guard) for each in trace[:place]):
            return None  # other code may scale it
        if any(trace_facts.discards(each, backward) for each in trace[:place]):
            return None  # a form of this rule reports it
        if self._reads_scale(backward, facts):
            return None
        for index in range(place + 1, len(trace)):
            step = trace[index]
            if step.kind != "scaler_step" or not compatible(step.guard, backward.guard):
                continue
            guard = backward.guard.joined(step.guard, scalers.enabled(step.scaler, step.record))
            if trace_facts.chosen(backward, step) or self._scaled_in_another_branch(trace, backward, step, facts):
                continue
            applied = trace_facts.between(trace, place, index, *_APPLIED, guard=guard)
            if not guard.possible or any(not self._is_optional(each, guard) for each in applied):
                continue
            together = set(backward.loops[:1]) <= set(step.loops) or set(step.loops) <= set(backward.loops)
            if together and scalers.like_torch(step.scaler, step.record):
                return None if self._may_be_replaced(backward, step, facts) else step
        return None

    def _is_optional(self, clearing: TraceStep, guard: PathCondition) -> bool:
        """True if an option that has nothing to do with precision clears the gradients: without it they are applied."""
        further = PathCondition(clearing.guard - guard)
        if clearing.kind != "zero_grad" or not further:
            return False
        return trace_facts.unrelated(clearing.guard, guard) and not trace_facts.rhythm(further)

    def _may_be_replaced(self, backward: TraceStep, step: TraceStep, facts: Facts) -> bool:
        """True if a subclass in another file may scale the loss: it comes from, or goes to, another method."""
        scope = backward.record.scope
        given = facts.bindings(dotted(backward.call.receiver), backward.record)
        apart = scope is not step.record.scope or any(each.kind == "param" for each in given)
        return apart and scope.owner is not None and facts.derived_elsewhere(scope.owner)

    def _reads_scale(self, backward: TraceStep, facts: Facts) -> bool:
        """True if the loss is computed with the scale (`get_scale`)."""
        assert backward.call.receiver is not None
        records = facts.flow.backward(backward.call.receiver, backward.call, depth=1)
        return any(isinstance(record, Call) and record.name == "get_scale" for record in records)

    def _unused_scaler(self, trace: Trace, place: int, facts: Facts) -> Event | None:
        """Return a scaler that scales nothing although FP16 autocast computes this loss and a plain step follows."""
        backward = trace[place]
        if facts.events("scale") or any(each.kind == "passed" for each in trace):
            return None
        if not any(each.kind == "step" and compatible(each.guard, backward.guard) for each in trace[place:]):
            return None
        for creation in facts.events("scaler"):
            assert creation.subject is not None
            guard = backward.guard.joined(creation.guard, facts.scalers.enabled(creation.subject, creation.call))
            scope = backward.record.scope
            near = creation.scope in scope.within() or (scope.owner is not None and creation.scope.owner is scope.owner)
            if (
                near
                and guard.possible
                and facts.scalers.own(creation.subject, creation.call)
                and self._only_calls_methods(creation, facts)
            ):
                records = facts.flow.backward(backward.call.receiver or backward.call.node, backward.call, depth=1)
                if any(
                    state.dtype is Dtype.FP16 and compatible(state.guard, guard)
                    for record in records
                    if isinstance(record, Call)
                    for state in facts.autocast_states.at(record)
                ):
                    return creation
        return None

    def _only_calls_methods(self, creation: Event, facts: Facts) -> bool:
        """True if a scaler has one name, which the file uses only to call its methods: no other code scales with it."""
        keys = [
            key for key, bindings in creation.scope.bindings.items() for b in bindings if b.value is creation.call.node
        ]
        if len(keys) != 1 or (keys[0].startswith("self.") and facts.base_unknown(creation.scope.owner)):
            return False
        last = keys[0].rsplit(".", 1)[-1]
        return not any(
            use.path.rsplit(".", 1)[-1] == last
            for scope in facts.scopes
            for uses in scope.uses.values()
            for use in uses
        )

    def _scaled_in_another_branch(self, trace: Trace, backward: TraceStep, step: TraceStep, facts: Facts) -> bool:
        """True if another branch of a flag scales the loss: in this one, the scaler is meant to do nothing."""
        return any(
            each.kind == "backward"
            and each.scale is not None
            and not compatible(each.guard, backward.guard)
            and not facts.scalers.differ(each.scaler, each.record, step.scaler, step.record)
            for each in trace
        )

    def _fix(self, backward: TraceStep, step: TraceStep, facts: Facts) -> Fix | None:
        scaler = facts.short(step.scaler)
        scope = backward.record.scope
        if not (step.record.scope is scope or scaler.startswith("self.")) or backward.call.receiver is None:
            return None
        loss = facts.text(backward.call.receiver, backward.call)
        edit = python_edits.replaced(backward.call.receiver, backward.call, f"{scaler}.scale({loss})")
        return Fix("Scale the loss", "unsafe", (edit,))
