from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Call,
    Diagnostic,
    Edit,
    Event,
    Facts,
    Fix,
    Note,
    Object,
    Rule,
    any_of,
    constant,
    lightning,
    python_edits,
)


class BackwardOutsideLightning(Rule, form_of="MPG501"):
    """`loss.backward()` is called directly where Lightning steps through its own GradScaler.

    With `precision="16-mixed"` Lightning owns the GradScaler. `self.manual_backward(loss)` and `fabric.backward(loss)`
    scale the loss; `step` unscales the gradients. Without a scaled loss the first `step` raises "Attempted unscale_ but
    _scale is None" (Lightning 1.6 to 2.6). If another loss was scaled before, the gradients become 65536 times too
    small. Newer versions of Fabric raise in `loss.backward()` itself.

    Not reported: a precision that only the command line sets; the optimizers that
    `self.optimizers(use_pl_optimizer=False)` gives.
    """

    message = "`{expr}` bypasses the GradScaler of Lightning's FP16 mixed precision, which `step` uses"
    help = "call `{through}`, which scales the loss"
    triggers = (any_of(b".backward("), any_of(b"optimizers(", b".setup", b"abric"))
    triggers_nearby = (any_of(b"lightning"), any_of(b"precision", b"(**"))
    fixes = True

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for backward in facts.events("backward"):
            if facts.is_inference(backward.call) or _is_scaled(backward, facts):
                continue
            found = self._in_module(backward, facts) or self._under_fabric(backward, facts)
            if found is not None:
                runner, edit, through = found
                fix = Fix("Run it through Lightning", "safe", (edit,)) if edit is not None else None
                notes = (Note("the precision is FP16", runner.span, facts.elsewhere(runner)),)
                expr = facts.short(backward.call.node)
                help = self.help.format(through=through)
                yield self.at(backward, expr=expr, notes=notes, fix=fix, help=help)

    def _in_module(self, backward: Event, facts: Facts) -> tuple[Call, Edit | None, str] | None:
        module = backward.scope.owner
        if module is None or not lightning.is_module(module, facts) or not lightning.optimizes_manually(module, facts):
            return None
        if not any(_is_lightnings(step, facts) for step in _later_steps(backward)):
            return None
        trainers = lightning.trainers_of(module, facts)
        if not trainers or not all(values and values <= lightning.FP16_MIXED for _, values in trainers):
            return None
        edit = python_edits.through(facts, backward, "self", "manual_backward")
        return trainers[0][0], edit, "self.manual_backward(loss)"

    def _under_fabric(self, backward: Event, facts: Facts) -> tuple[Call, Edit | None, str] | None:
        for step in _later_steps(backward):
            made = {
                each.atom.call if isinstance(each.atom, Object) else None
                for each in facts.evaluate(step.receiver, step)
            }
            for fabric in made:
                if fabric is None or len(made) > 1:
                    continue
                there = facts.of(fabric)
                if fabric in lightning.created(there, "Fabric") and _is_float16(there, fabric):
                    name = _name_of(fabric, backward, facts)
                    edit = python_edits.through(facts, backward, name) if name else None
                    return fabric, edit, f"{name or 'fabric'}.backward(loss)"
        return None


def _is_float16(facts: Facts, fabric: Call) -> bool:
    values = lightning.precision(facts, fabric, defaults=True)
    return bool(values) and values <= lightning.FP16_MIXED


def _later_steps(backward: Event) -> list[Call]:
    """Return the calls of `step` after a backward pass in its function."""
    return [
        call
        for call in backward.scope.calls
        if call.name == "step" and call.receiver is not None and call.order > backward.order
    ]


def _is_lightnings(step: Call, facts: Facts) -> bool:
    """True for the step of an optimizer that `self.optimizers()` gives, with Lightning's wrapper."""
    records = facts.flow.backward(step.receiver, step, depth=3) if step.receiver is not None else []
    return any(
        isinstance(record, Call)
        and record.path == "self.optimizers"
        and constant(record.argument(0, "use_pl_optimizer")) != (False,)
        for record in records
    )


def _is_scaled(backward: Event, facts: Facts) -> bool:
    records = facts.flow.backward(backward.subject, backward.call, depth=3) if backward.subject is not None else []
    return any(isinstance(record, Call) and record.name in ("scale", "scale_loss") for record in records)


def _name_of(fabric: Call, backward: Event, facts: Facts) -> str:
    """Return the name of a Fabric at a backward pass, or an empty string."""
    for name in ("fabric", "self.fabric"):
        atoms = [each.atom for each in facts.resolve(name, backward.scope, backward.order)]
        if any(isinstance(atom, Object) and atom.call is fabric for atom in atoms):
            return name
    return ""
