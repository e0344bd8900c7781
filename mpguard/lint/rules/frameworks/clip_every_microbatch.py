from __future__ import annotations

import re

from mpguard.lint import (
    Call,
    Constant,
    Diagnostic,
    Facts,
    Note,
    Object,
    PathCondition,
    ScalingRule,
    Trace,
    TraceStep,
    accelerate_precision,
    any_of,
    constant,
    dotted,
    option_values,
    trace_facts,
)

_UNSCALES = ("clip_grad_norm_", "clip_grad_value_", "unscale_gradients")
#: What follows the name of an option in a config, a launch line or a text that sets it.
_ASKS = (": fp16", ': "fp16', "=fp16", '="fp16', " fp16", ' = "fp16', '": "fp16')


class ClipEveryMicrobatch(ScalingRule, form_of="MPG206"):
    """`accelerator.clip_grad_norm_` runs for each micro-batch, the optimizer's step once for several, under FP16.

    All three call `scaler.unscale_`, which raises if it is called twice without a step between (accelerate 0.12 to
    1.15): "unscale_() has already been called on this optimizer since the last update()". Under BF16 nothing raises,
    but sums of some of the micro-batches are clipped, so that the first ones weigh less.

    An option for the number of micro-batches whose default is 1 counts if a launch line gives it another value. Not
    reported: a precision that only the launcher knows, and one that cannot be FP16; engines (DeepSpeed, Megatron-LM),
    which clip by themselves.
    """

    operations = ("clip", "unscale")
    message = "`{expr}` unscales for each micro-batch, the optimizer steps once for several: the second one raises"
    help = "clip once per step: {how}"
    triggers = (any_of(b"ccelerator"), any_of(*(f".{name}(".encode() for name in _UNSCALES)))

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        clip = trace[place].call
        accelerator = _accelerator(clip, facts)
        if accelerator is None or facts.is_inference(clip) or not _may_be_float16(accelerator, facts):
            return None
        if accelerate_precision.leaves_autocast_out(facts.of(accelerator)):
            return None
        how, step = "after the loop over micro-batches", None
        if _in_accumulate(clip) and _accumulates(accelerator, facts.of(accelerator)):
            how = f"`if {facts.short(clip.receiver)}.sync_gradients:`"
        elif (step := _step_after_loop(trace, place)) is None:
            return None
        notes = (Note("the step is here", step.span),) if step is not None else ()
        return self.at(clip, expr=facts.short(clip.func), help=self.help.format(how=how), notes=notes)


def _accelerator(clip: Call, facts: Facts) -> Call | None:
    """Return the call that creates the only Accelerator that clips."""
    atoms = [each.atom for each in facts.evaluate(clip.receiver, clip)] if clip.receiver is not None else []
    made = {atom.call for atom in atoms if isinstance(atom, Object) and atom.kind == "accelerator"}
    return made.pop() if len(made) == 1 and len(atoms) == 1 else None


def _may_be_float16(accelerator: Call, facts: Facts) -> bool:
    """True if the code, an option, a launch config or a launch line gives the Accelerator FP16."""
    there = facts.of(accelerator)
    given = accelerator.argument(2, "mixed_precision")
    if given is not None and constant(given) != (None,):
        atoms = [each.atom for each in there.evaluate(given, accelerator)]
        if any(isinstance(atom, Constant) and atom.value == "fp16" for atom in atoms):
            return True
        name = dotted(given).rpartition(".")[2]
        return not all(isinstance(atom, Constant) for atom in atoms) and (
            ("fp16",) in option_values.option_defaults(name, there)
            or any(there.project.asks_for(there.path, name + way) for way in _ASKS)
        )
    return any(config.mixed_precision == "fp16" for config in there.project.configs_for(there.path)) or any(
        word is not None and "fp16" in (word.text or "")
        for launch in there.project.launches_of(there.path)
        for name, word in launch.options.items()
        if name == "mixed_precision"
    )


def _in_accumulate(clip: Call) -> bool:
    """True if a call runs for each micro-batch inside of `with accelerator.accumulate(model):`."""
    for entered in clip.withs:
        func = getattr(entered.expr, "func", None)
        if getattr(getattr(func, "attr", None), "value", "") == "accumulate":
            return trace_facts.same_each_time(PathCondition(clip.guard - entered.guard))
    return False


def _accumulates(accelerator: Call, facts: Facts) -> bool:
    """True if an Accelerator accumulates: not by an option whose default is 1, if no launch line gives it a value."""
    steps = accelerator.argument(3, "gradient_accumulation_steps")
    if steps is None:
        return "gradient_accumulation_plugin" in accelerator.keywords
    if constant(steps) is not None:
        return constant(steps) not in ((1,), (None,))
    name = dotted(steps).rpartition(".")[2]
    given = re.compile(rf"{re.escape(name)}[= ]+(?!1\b)\d")
    lines = (" ".join(word.text or "" for word in launch.arguments) for launch in facts.project.launches_of(facts.path))
    return (1,) not in option_values.option_defaults(name, facts) or any(map(given.search, lines))


def _step_after_loop(trace: Trace, place: int) -> TraceStep | None:
    """Return the step of an optimizer after the innermost loop of a clipping that has a backward pass for each one."""
    clip = trace[place]
    inside = [each for _, each in trace_facts.iteration(trace, clip)] if clip.loops else []
    if not any(
        each.kind in ("backward", "framework")
        and each.loops == clip.loops
        and trace_facts.same_each_time(PathCondition(clip.guard - each.guard))
        for each in inside
    ):
        return None
    if any(each.kind in ("step", "other_step", "passed") for each in inside):
        return None
    after = (each for each in trace[place:] if each.kind == "step")
    return next((each for each in after if set(each.loops) < set(clip.loops)), None)
