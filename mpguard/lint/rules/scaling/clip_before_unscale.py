from __future__ import annotations

import libcst as cst

from mpguard.lint import (
    Bad,
    Constant,
    Diagnostic,
    Dtype,
    Facts,
    Fix,
    Note,
    Object,
    Record,
    Ref,
    ScalingRule,
    Trace,
    TraceStep,
    Use,
    any_of,
    compatible,
    lattice,
    library_names,
    python_edits,
    trace_facts,
)


class ClipBeforeUnscale(ScalingRule):
    """Gradients are clipped while they are still multiplied by the loss scale.

    ## What it does
    Reports `clip_grad_norm_`, `clip_grad_value_` and `p.grad.clamp_` on gradients of a scaled loss if there is no
    `scaler.unscale_(optimizer)` between `backward` and the clip. One of an optimizer that has the parameters of another
    model only does not count.

    ## Why is this bad
    The gradients are larger than the true ones by the scale, 65536 at first: all of them are clipped, and after
    `scaler.step` has divided by the scale, the norm of the step is `max_norm / 65536`. The model hardly trains, and the
    strength of the clipping changes whenever the scale does.

    ## Fix safety
    Safe: `scaler.unscale_(optimizer)` before the clip divides by the scale, and `scaler.step` does not divide again.
    There is no fix for `p.grad.clamp_`, if several optimizers step, if the clip runs for each micro-batch and the
    step once for several (`unscale_` may be called once per step only), or if a later clip runs with or without the
    first one.

    ## Known limits
    Follows one function, the helpers of its file, and the functions and methods of other modules of the project that it
    calls, but not what those call in further modules. Silent if something in between may unscale: `get_scale`, or a
    call of unknown code that takes the scaler. Silent for a model whose class creates layers in BF16: a scaler that is
    enabled raises at the gradients of such weights. Silent for a norm limit of a million or more (`float("inf")`): it
    limits no scaled gradients either.
    """

    code, name = "MPG205", "clip-before-unscale"
    severity = "error"
    message = "`{expr}` clips gradients that are still scaled"
    help = "call `{scaler}.unscale_(optimizer)` before"
    operations = ("clip", "read")
    triggers = (any_of(b"backward", b".scale(", b"caler"),)
    triggers_nearby = (any_of(b"clip_grad", b".clamp_("), any_of(b".scale("), any_of(b"scaler", b"Scaler"))
    across = True
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
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !
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
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        clip, backward = trace[place], self._unscaled(trace, place, facts)
        if backward is None:
            return None
        others = [
            Note("this unscales the gradients of another model", each.span)
            for each in trace[trace.index(backward) : place]
            if each.kind == "unscale" and compatible(each.guard, clip.guard, backward.guard)
        ]
        notes = (Note("the loss is scaled here", backward.span), *others)
        if clip.at is not None and backward.at is clip.at:
            return None  # reported in its own file
        expr = facts.short((clip.at or clip.call).func if clip.at or clip.kind == "clip" else clip.record.node)
        fix = self._fix(trace, place, backward, facts) if clip.kind == "clip" and clip.here is clip.record else None
        steps = (each for each in trace[place:] if each.kind == "scaler_step" and each.at is None)
        named = next(steps, backward) if backward.at is not None else backward
        help = self.help.format(scaler=facts.short(named.scaler))
        return self.at(clip, expr=expr, notes=notes, fix=fix, help=help)

    def _unscaled(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the backward pass whose gradients are limited here without having been unscaled."""
        clip = trace[place]
        if clip.kind == "read":
            return self._scaled(trace, place, facts) if _clamps(clip.record) else None
        if not self._of_torch(clip, facts) or facts.scalars.only_measures(clip.call):
            return None
        if facts.training_use.has_layers_in(Dtype.BF16, clip.call.argument(0, "parameters"), clip.call):
            return None  # `scaler.step` raises
        return self._scaled(trace, place, facts)

    def _of_torch(self, clip: TraceStep, facts: Facts) -> bool:
        if clip.record is clip.at:
            return True
        atoms = [each.atom for each in facts.evaluate(clip.call.func, clip.call)]
        if any(isinstance(atom, Ref) and atom.path in library_names.CLIPS for atom in atoms):
            return True
        if any(
            isinstance(atom, lattice.Method) and atom.owner.path.endswith("FullyShardedDataParallel") for atom in atoms
        ):
            return True  # the wrapper's own `clip_grad_norm_`
        clips = [atom for atom in atoms if atom != Constant(None)]  # None: the clipping is switched off
        return bool(clips) and all(isinstance(atom, Object) and atom.path in library_names.CLIPS for atom in clips)

    def _scaled(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the backward pass whose gradients are clipped while they are still scaled."""

        def is_scaled(backward: TraceStep) -> bool:
            scale = backward.scale
            return scale is not None and facts.scalers.like_torch(scale.subject, scale.call)

        backward = facts.traces.scaled_at(trace, place, is_scaled)
        if backward is None:
            ends = [kind for kind in trace_facts.ENDS["scaled"] if kind != "unscale"]
            backward = facts.traces.scaled_at(trace, place, is_scaled, ends)
            if backward is not None and not self._unscales_another(trace, place, backward, facts):
                return None
        return backward

    def _unscales_another(self, trace: Trace, place: int, backward: TraceStep, facts: Facts) -> bool:
        """True if all that is unscaled before a clip are optimizers of other models than the one that is clipped.

        The scaler steps another optimizer that has the parameters of the clipped model.
        """
        clip, scalers = trace[place], facts.scalers
        before = [each for each in trace[:place] if each.kind == "unscale" and compatible(each.guard, clip.guard)]
        if clip.kind != "clip" or not before:
            return False
        model = scalers.model_of(clip.call.argument(0, "parameters"), clip.call)
        unscaled = [each for step in before for each in scalers.optimized(step)]
        return (
            model is not None
            and all(each is not None and scalers.are_apart(each, model) for each in unscaled)
            and any(
                step.kind == "scaler_step"
                and compatible(step.guard, clip.guard)
                and scalers.same(backward.scaler, backward.record, step.scaler, step.record)
                and model in scalers.optimized(step)
                for step in trace[place:]
            )
        )

    def _fix(self, trace: Trace, place: int, backward: TraceStep, facts: Facts) -> Fix | None:
        clip = trace[place]
        scaler = facts.short(backward.scaler)
        here = (backward.scale is not None and backward.scale.scope is clip.record.scope) or scaler.startswith("self.")
        guard = clip.guard.joined(backward.guard)
        steps = [
            each
            for each in trace[place:]
            if each.kind == "scaler_step"
            and compatible(each.guard, guard)
            and facts.scalers.same(backward.scaler, backward.record, each.scaler, each.record)
        ]
        if not here or len({facts.short(step.optimizer) for step in steps}) != 1:
            return None
        step = steps[0]
        if step.record.scope is not clip.record.scope or step.loops != clip.loops or step.guard - guard:
            return None
        if backward.guard - clip.guard:
            return None  # the scaler may be None in the other branch
        if any(each.kind == "clip" and self._unscaled(trace, index, facts) for index, each in enumerate(trace[:place])):
            return None  # one `unscale_` is enough: the next round of fixes handles what is left
        if any(each.kind == "unscale" and compatible(each.guard, guard) for each in trace[place:]):
            return None  # a second `unscale_` raises
        later = (each for each in trace[place + 1 : trace.index(step)] if each.kind == "clip")
        if any(clip.guard - each.guard and compatible(each.guard, guard) for each in later):
            return None  # the later clip runs with or without the `unscale_` of this branch
        if step.optimizer is None or not isinstance(
            clip.call.line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)
        ):
            return None
        optimizer = facts.text(step.optimizer, step.record)
        edit = python_edits.line_before(facts, clip.call.line, clip.call, f"{scaler}.unscale_({optimizer})")
        return Fix("Unscale the gradients first", "safe", (edit,))


def _clamps(record: Record) -> bool:
    """True for the use of a gradient, or of a name for it, that limits its elements: `p.grad.data.clamp_`."""
    return isinstance(record, Use) and record.path.endswith(".clamp_")
