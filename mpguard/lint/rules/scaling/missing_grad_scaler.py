from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Binding,
    Call,
    Diagnostic,
    Dtype,
    Edit,
    Event,
    Facts,
    Fix,
    Good,
    Note,
    Object,
    PathCondition,
    Record,
    Region,
    Rule,
    Scope,
    any_of,
    autocast_ops,
    compatible,
    dotted,
    library_names,
    options,
    python_edits,
    text_of,
    unscaled_steps,
    wrappers,
)

_SHAPES = autocast_ops.KEEPS | autocast_ops.NUMBERS
_FLOAT32_LAYERS = frozenset(f"torch.nn.{name}" for name in autocast_ops.FLOAT32_LAYERS)

_OFF = "`{expr}` is never enabled: the gradients of this FP16 run are not scaled"
_HELP_OFF = "enable it where autocast is FP16, or leave `enabled` out; or use BF16"


class MissingGradScaler(Rule):
    """FP16 autocast, or FP16 weights, and the gradients are never scaled.

    ## What it does
    Checks each `loss.backward()` that an optimizer's `step()` follows. It is reported if the loss is computed in an
    FP16 autocast region, with weights that are loaded in FP16, or with those that FSDP2 casts to FP16, and the code
    around the loop uses no GradScaler, apex, DeepSpeed, Accelerate, Lightning or Trainer in the same branch of the
    flags. `torch.cuda.amp.autocast()` and `torch.autocast("cuda")` without a dtype are FP16.

    ## Why is this bad
    The smallest normal FP16 number is 6.1e-5, the smallest at all 6.0e-8 (IEEE 754 binary16). Gradients are often below
    both: those in between lose precision, those below become zero, and the weights behind them do not train. A
    GradScaler multiplies the loss (by 65536 at first), so that they stay in range, and skips the steps that overflow.

    ## Fix safety
    The fix creates a scaler before the loop, scales the loss, and steps and updates through it. It is unsafe: the run
    computes something else (what was intended), checkpoints should contain the scaler's state, and code between
    `backward` and `step` that reads gradients must unscale them first. The scaler is enabled where the region is FP16.
    There is no fix if the loop is not in one function, if it runs once per epoch (the scaler must outlive it), if
    several optimizers step, if a step can come without a backward before it, if gradients are clipped more often than
    they are applied, if another branch of a flag computes the loss (with apex, for example), if a flag around the
    region decides, nor for FP16 weights: GradScaler raises "Attempting to unscale FP16 gradients" for those; load them
    in FP32.

    ## Known limits
    If the loss is computed in another function than its backward pass, and a scaler, optimizer or loss comes from
    outside the linted tree, it is unknown whether a scaler exists, and the rule is silent: for a parameter without a
    known argument, an attribute that is not set in the tree, a base class that is not in the tree. It is silent, too,
    where another branch of the function scales the loss and this one has another flag. BF16 needs no scaler. A model
    that is cast to FP16 by hand is reported by MPG101. Scripts that only measure the speed of steps on one synthetic
    batch are skipped, and so are trial runs: functions that clear the gradients after the backward pass and never step.
    A region whose `enabled` is a parameter that all calls in the files of the program set to False is off. An autocast
    without a dtype whose device is a variable is taken for that of a GPU, and a dtype that a parameter gives for its
    default, or for FP16 where the code asks whether it is.
    A scaler whose `enabled` is False in each run, as a comparison of text with a dtype is, counts as none.
    """

    code, name = "MPG201", "missing-grad-scaler"
    severity = "error"
    fixes = True
    message = "{what}, but the gradients are never scaled"
    help = "create a GradScaler, scale the loss, step and update through it; or use BF16"
    triggers = (any_of(b".backward("),)
    triggers_nearby = (any_of(b"autocast", b"half", b"float16", b"fp16"), any_of(b".step("))
    yields_to = ("MPG202", "MPG211", "MPG212")
    examples = (
        Bad(
            """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
args = parser.parse_args()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
        loss = model(x).sum()
    loss.backward()  # !
    optimizer.step()
"""
        ),
        Good(
            """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
parser.add_argument("--amp", choices=["float32", "bfloat16"], default="bfloat16")
args = parser.parse_args()

def scaled(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")
    for x in loader:
        with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def never(model, loader, optimizer):
    for x in loader:
        with torch.autocast("cuda", dtype=getattr(torch, args.amp)):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        losses = facts.events("backward")
        if not losses or facts.declared == "inference" or facts.may_keep_masters:
            return
        reported: set[Scope] = set()
        for backward in losses:
            if backward.scope in reported or facts.is_inference(backward.call):
                continue
            scaler = facts.scalers.never_enabled(backward)
            low = next(self._low_precision(backward, facts), None) if scaler is not None else None
            if scaler is not None and low is not None:
                yield self._never_enabled(scaler, backward, low[1], facts)
            if _is_scaled(backward):
                continue
            program = facts.reachable(backward.scope)
            for region, where, guard, inside in self._low_precision(backward, facts):
                direct = backward if region is not None and inside.scope is backward.scope else None
                step = unscaled_steps.plain_step(backward, guard, program, facts)
                if not options.can_be_chosen(guard, program):
                    continue
                owner = backward.scope.owner
                if step is None:
                    continue
                trainer = owner if step.scope.owner is owner and inside.scope.owner is owner else None
                if direct is None and trainer is None and facts.base_unknown(owner):
                    continue
                if unscaled_steps.arm_scales(backward, facts):
                    continue
                both, scaling = guard.joined(step.guard), self._scaling(backward, step, facts)
                if unscaled_steps.may_be_scaled(both, scaling, facts, direct, step, trainer=trainer):
                    continue
                reported |= {scope for scope in program if scope.kind != "module"}
                notes = (
                    Note("FP16 from here", where.span, facts.elsewhere(where)),
                    Note("this step applies the gradients", step.span, facts.elsewhere(step.call)),
                )
                # There is no fix for FP16 weights: GradScaler refuses gradients of FP16 parameters.
                here = region is not None and facts.elsewhere(where) is None
                fix = self._fix(backward, step, region, guard, facts) if region is not None and here else None
                weights = "FP16 weights" if where.name in library_names.LOADERS else "FP16 parameters of FSDP"
                what = "FP16 autocast" if region is not None else weights
                yield self.at(backward, what=what, notes=notes, fix=fix)
                break

    def _never_enabled(self, scaler: Call, backward: Event, low: Call, facts: Facts) -> Diagnostic:
        notes = (
            Note("FP16 from here", low.span, facts.elsewhere(low)),
            Note("the scaler is created here", scaler.span, facts.elsewhere(scaler)),
        )
        place = scaler if facts.elsewhere(scaler) is None else backward.call
        return self.at(place, message=_OFF, expr=facts.short(scaler.node), help=_HELP_OFF, notes=notes)

    def _scaling(self, backward: Event, step: Event, facts: Facts) -> set[Scope]:
        """Return the functions that may scale the loss.

        If a class has one method for backward and another one for the step, they are its own and what calls backward.
        """
        owner = backward.scope.owner
        if owner is not None and step.scope is not backward.scope and step.scope.owner is owner:
            given = any(dotted(backward.subject) == param.name for param in backward.scope.params)
            if given and facts.class_kind(owner) == "own":
                return {*owner.descendants(), *(call.scope for call in facts.callers(backward.scope))}
        return facts.programs_of(backward.scope)

    # -- what makes the gradients FP16 --------------------------------------------------------------

    def _low_precision(
        self, backward: Event, facts: Facts
    ) -> Iterator[tuple[Region | None, Call, PathCondition, Record]]:
        """Yield what computes this loss in FP16.

        That is the region (None: weights), its call, the condition for both, and what is computed in it.
        """
        assert backward.subject is not None
        program = facts.programs_of(backward.scope)
        records: list[Record] = [backward.call, *facts.flow.backward(backward.subject, backward.call)]
        for record in records:
            if _of_another_loop(record, backward) or (record is not backward.call and _lowers_nothing(record, facts)):
                continue
            around = facts.regions(record)
            without = [region.guard for region in around if region.kind == "no_grad"]
            for place, region in enumerate(around):
                for guard in self._float16_conditions(region, around[place + 1 :]):
                    both = guard.joined(record.guard, backward.guard)
                    if not any(compatible(each, both) for each in without) and _is_active(region, both, program, facts):
                        assert region.call is not None
                        yield region, region.call, both, record
            here = isinstance(record, Call) and record.scope is backward.scope and record is not backward.call
            if not here or without or any(region.kind == "autocast" for region in around):
                continue
            for region, entered in facts.autocasts(record):  # of the callers
                for guard in region.may_be(Dtype.FP16):
                    both = guard.joined(entered, backward.guard)
                    if _is_active(region, both, program, facts):
                        assert region.call is not None
                        yield region, region.call, both, record
        for load in facts.events("load"):
            for guard in load.may_be(Dtype.FP16):
                both = guard.joined(backward.guard)
                if both.possible and self._weights(load, backward, both, facts):
                    yield None, load.call, both, load.call
        for model, wrap in facts.wrappers.differentiated(backward.subject, backward.call, "fsdp"):
            if wrap.kind == "fsdp1" and wrap.facts is facts:
                continue  # MPG211
            for policy, chosen in wrappers.policies_of(wrap):
                for guard in policy.may_be(Dtype.FP16):
                    both = guard.joined(chosen, wrap.guard, backward.guard, facts.guard_of(model))
                    if both.possible:
                        yield None, policy.call, both, policy.call

    def _float16_conditions(self, region: Region, inner: tuple[Region, ...]) -> list[PathCondition]:
        """Return the conditions under which a region is FP16, and not overridden inside."""
        if region.kind != "autocast" or region.call is None:
            return []
        if any(o.kind == "autocast" and (not o.guard.possible or compatible(o.guard, region.guard)) for o in inner):
            return []
        return region.may_be(Dtype.FP16)

    def _weights(self, load: Event, backward: Event, guard: PathCondition, facts: Facts) -> bool:
        """True if the load creates FP16 weights whose gradients this backward computes."""
        if facts.is_inference(load.call) or facts.kinds(load.subject, load.call) != {"model"}:
            return False
        if _of_accelerate(guard, facts) or facts.frozen_params.is_frozen(load.call.node):
            return False
        reach = facts.training_use.reach_of_loaded(load, guard)
        if reach.meets("peft") or not reach.meets("optimizer"):
            return False
        return any(sink.kind == "backward" and sink.call is backward.call for sink in reach.sinks)

    # -- the fix ------------------------------------------------------------------------------------

    def _fix(self, backward: Event, step: Event, region: Region, guard: PathCondition, facts: Facts) -> Fix | None:
        torch = python_edits.name_of_torch(facts)
        scope = backward.scope
        loops = [loop for loop in backward.call.loops if isinstance(loop, (cst.For, cst.While))]
        together = step.scope is scope and loops and set(loops[:1]) <= set(step.call.loops)
        if torch is None or not together or step.subject is None or step.call.node.args or facts.repeated(scope):
            return None
        if any(event.scope is scope for event in facts.events("scaler")) or any(
            name.lower().endswith("scaler") for name in scope.bindings
        ):
            return None  # there is one, which nothing uses, or one that is None
        if backward.guard - step.guard or not set(step.call.loops) <= set(backward.call.loops):
            return None  # a step without a backward before it: `scaler.step` would find no gradients to check
        if not step.call.is_statement or not isinstance(step.call.line, cst.SimpleStatementLine):
            return None
        if [event for event in facts.events("step") if event.scope is scope] != [step]:
            return None
        enabled = self._enabled(region, guard, backward, torch, facts)
        if enabled is None:
            return None
        taken = {key for place in scope.within() for key in place.bindings}
        scaler = next(name for name in ("scaler", "grad_scaler", "amp_scaler") if name not in taken)
        optimizer = facts.text(step.subject, step.call)
        created = f'{scaler} = {torch}.amp.GradScaler("cuda"{enabled})'
        edits = [
            python_edits.line_before(facts, loops[0], backward.call, created),
            python_edits.replaced(step.call.node, step.call, f"{scaler}.step({optimizer})"),
            python_edits.line_after(facts, step.call.line, step.call, f"{scaler}.update()"),
        ]
        for each in facts.events("backward"):
            if each.scope is not scope:
                continue
            if each.subject is None or not set(loops[:1]) <= set(each.call.loops) or facts.is_inference(each.call):
                return None
            if not compatible(each.guard, guard):
                return (
                    None  # an exclusive branch, which may scale its loss in another way, would step through the scaler
                )
            loss = facts.text(each.subject, each.call)
            inner = loss[1:-1] if loss.startswith("(") and loss.endswith(")") and ")" not in loss[1:-1] else loss
            edits.append(Edit(*facts.outer_span(each.subject, each.call), f"{scaler}.scale({inner})"))
        clips = self._clips(backward, step, facts)
        if clips is None:
            return None
        unscale = f"{scaler}.unscale_({optimizer})"
        edits += [python_edits.line_before(facts, clip.call.line, clip.call, unscale) for clip in clips]
        return Fix("Create a GradScaler, scale the loss, step and update through it", "unsafe", tuple(edits))

    def _clips(self, backward: Event, step: Event, facts: Facts) -> list[Event] | None:
        """Return the clips before which the gradients have to be unscaled: the first one of each branch.

        None if `unscale_` would run more often than the step, or if a later clip may run with or without it.
        """
        first: list[Event] = []
        for clip in facts.events("clip"):
            if clip.scope is not step.scope or not backward.order < clip.order < step.order:
                continue
            earlier = [each for each in first if compatible(each.guard, clip.guard)]
            if any(not (each.guard - clip.guard) for each in earlier):
                continue
            line = isinstance(clip.call.line, (cst.SimpleStatementLine, cst.SimpleStatementSuite))
            if earlier or not line or step.guard - clip.guard or clip.call.loops != step.call.loops:
                return None
            first.append(clip)
        return first

    def _enabled(self, region: Region, guard: PathCondition, backward: Event, torch: str, facts: Facts) -> str | None:
        """Return the scaler's `enabled=` argument, true where the region is FP16; None if no expression gives that."""
        call = region.call
        assert call is not None
        legacy = facts.called_path(call).startswith("torch.cuda.amp.")
        enabled, dtype = call.argument(0 if legacy else 2, "enabled"), call.argument(1, "dtype")
        scope, guard, conditions = backward.scope, PathCondition(guard - backward.guard), []
        before = facts.span(backward.call.loops[0], backward.call)[0]
        if enabled is not None and facts.enabled(call, facts.called_path(call)):
            guard = PathCondition(guard - facts.enabled(call, facts.called_path(call)))
            conditions.append((enabled, dotted(enabled)))
        if dtype is not None and len(region.dtypes) > 1:
            for conditional, _ in region.dtypes:
                guard = PathCondition(guard - conditional)
            conditions.append((dtype, f"{dotted(dtype)} == {torch}.float16"))
        for node, _ in conditions:
            bindings = scope.bindings.get(dotted(node).split(".", 1)[0], ())
            if not dotted(node) or call.scope is not scope or any(each.span[0] >= before for each in bindings):
                return None
        if guard:
            return None
        return f", enabled={' and '.join(text for _, text in conditions)}" if conditions else ""


def _is_active(region: Region, guard: PathCondition, program: set[Scope], facts: Facts) -> bool:
    """True if an FP16 region may be entered under a condition; it was not meant to be BF16, as MPG310 reports."""
    if not guard.possible or _of_accelerate(guard, facts) or facts.switched_off(region, program):
        return False
    return region.call is not None and region.call not in facts.forgotten_dtypes


def _lowers_nothing(record: Record, facts: Facts) -> bool:
    """True for a loss of torch that autocast computes in FP32, for a change of shape, and for a sum of such values."""
    value = record.node if isinstance(record, Call) else record.value if isinstance(record, Binding) else None
    if value is None or "@" in text_of(value):
        return False
    call = facts.call_of(value)
    return isinstance(value, cst.BinaryOperation) or (call is not None and _keeps_dtype(call, facts))


def _keeps_dtype(call: Call, facts: Facts) -> bool:
    """True for a call of torch that autocast does not run in low precision: a method only of what is no module."""
    if call.receiver is not None and call.name in _SHAPES:
        is_module = "model" in facts.kinds(call.receiver, call)
        named = dotted(call.receiver).rsplit(".", 1)[-1] in facts.module_names
        return not (is_module or named or facts.functions(call))
    if call.name in autocast_ops.FLOAT32_ON_CUDA and facts.called_path(call).startswith("torch."):
        return True
    made = [each.atom for each in facts.evaluate(call.func, call)]
    return bool(made) and all(isinstance(each, Object) and each.path in _FLOAT32_LAYERS for each in made)


def _of_accelerate(guard: PathCondition, facts: Facts) -> bool:
    """True if a condition tests the precision that Accelerate gets as well: Accelerate then creates the scaler."""
    return "mixed_precision" in guard.flags() and "accelerat" in facts.file_text


def _is_scaled(backward: Event) -> bool:
    """True for `any.scale(loss).backward()`, whatever the object is called and wherever it comes from."""
    loss = backward.subject
    return isinstance(loss, cst.Call) and isinstance(loss.func, cst.Attribute) and loss.func.attr.value == "scale"


def _of_another_loop(record: Record, backward: Event) -> bool:
    """True for what a loop before the one of the backward pass computes, if that one binds the loss again."""
    outer, name = backward.call.loops[:1], dotted(backward.subject)
    if record.scope is not backward.scope or not record.loops or not outer or outer[0] in record.loops:
        return False
    bound = (
        each for each in backward.scope.bindings.get(name, ()) if each.kind == "assign" and each.loops[:1] == outer
    )
    return any(each.order < backward.order and not each.guard - backward.guard for each in bound)
