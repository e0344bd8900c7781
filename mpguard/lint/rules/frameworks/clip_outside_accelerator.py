from __future__ import annotations

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
    Wrap,
    accelerate_precision,
    any_of,
    compatible,
    dotted,
    path_condition,
    python_edits,
    trace_facts,
    wrappers,
)

#: The arguments that the Accelerator's functions take as well.
_ARGUMENTS = {
    "clip_grad_norm_": {"parameters", "max_norm", "norm_type"},
    "clip_grad_value_": {"parameters", "clip_value"},
}


_SCALED = "`{expr}` clips gradients that `{accelerator}` may have scaled or sharded"


class ClipOutsideAccelerator(ScalingRule):
    """Gradients of a prepared model are clipped by torch's function instead of the Accelerator's.

    ## What it does
    Reports `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` for parameters of a model that was passed to or
    returned by `accelerator.prepare`, and for any parameters after `accelerator.backward` in the same function.

    ## Why is this bad
    Under FP16 the gradients are still scaled there: a maximum norm of 1.0 clips all of them to 1/65536 of the intended
    value, unless `accelerator.unscale_gradients()` was called before. Under FSDP each rank clips its shards by their
    own norm, and under DeepSpeed there are no gradients to clip. `accelerator.clip_grad_norm_` handles all of these.

    ## Fix safety
    Safe: the same call through the Accelerator. There is no fix for `error_if_nonfinite` and `foreach`, which the
    Accelerator's function does not take, and if the Accelerator has no name at the place.

    ## Known limits
    In another function than `accelerator.backward`, only parameters of a model that is known to be prepared are
    checked. An Accelerator whose `mixed_precision` is "bf16" or "no" in the code, or in all launch configs or launch
    lines, without an engine or sharding, clips as torch does and is ignored. Files that call
    `accelerator.unscale_gradients()` themselves are not reported, nor are functions that unscale with their own scaler
    (MPG502), nor an infinite norm, which clips nothing, nor what runs if the Accelerator's own clipping raised.
    """

    code, name = "MPG503", "clip-outside-accelerator"
    severity = "error"
    message = "`{expr}` clips gradients of `{model}` that may be scaled or sharded"
    help = "call `accelerator.{name}`"
    operations = ("clip",)
    triggers = (any_of(b"ccelerator"), any_of(b"clip_grad_"))
    triggers_nearby = (any_of(b".prepare"),)
    yields_to = ("MPG205",)
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf

config = OmegaConf.load("train.yaml")
accelerator = Accelerator(mixed_precision=config.train.precision)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    accelerator.backward(model(x).sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !
    optimizer.step()
""",
            name="train.py",
            files={"pyproject.toml": "", "train.yaml": "train:\n  precision: fp16\n"},
            fixed="""\
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf

config = OmegaConf.load("train.yaml")
accelerator = Accelerator(mixed_precision=config.train.precision)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    accelerator.backward(model(x).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        step, clip = trace[place], trace[place].event
        path = facts.called_path(step.call)
        if clip is None or clip.subject is None or not path.startswith("torch.nn.utils."):
            return None
        # By the Accelerator, or by a scaler in the code: MPG502 reports that.
        if any(each.kind == "unscale" and compatible(each.guard, step.guard) for each in trace[:place]):
            return None
        if (
            facts.scalars.only_measures(clip.call)
            or facts.is_inference(clip.call)
            or wrappers.other_way(clip.guard, "accelerat")
            or self._is_fallback(clip, facts)
            or self._is_of_another_branch(clip, facts)
        ):
            return None
        name, expr = path.rsplit(".", 1)[-1], facts.short(clip.call.node)
        help, found = self.help.format(name=name), self._prepared_model(clip, facts)
        if found is not None:
            model, wrap = found
            if accelerate_precision.backward_is_plain(wrap.facts, clip.guard, accumulates=True):
                return None
            notes = (Note("prepared here", wrap.call.span, facts.elsewhere(wrap.call)),)
            fix = self._fix(clip, name, wrappers.receiver_at(wrap, clip.call, facts))
            return self.at(clip, expr=expr, model=model, help=help, notes=notes, fix=fix)
        backward = self._backward(trace, place, facts)
        if backward is None:
            return None
        accelerator, notes = facts.short(backward.call.receiver), (Note("its backward pass", backward.span),)
        fix = self._fix(clip, name, accelerator)
        return self.at(clip, message=_SCALED, expr=expr, accelerator=accelerator, help=help, notes=notes, fix=fix)

    def _is_fallback(self, clip: Event, facts: Facts) -> bool:
        """True in the `except` of a `try` that clips through the Accelerator."""
        return any(
            path_condition.negated(condition) in facts.guard_of(other)
            for condition in clip.guard
            if any(flag.startswith("try#") for flag in PathCondition([condition]).flags())
            for other in self._of_accelerator(clip, facts)
        )

    def _is_of_another_branch(self, clip: Event, facts: Facts) -> bool:
        """True if the function runs the Accelerator's backward pass, but in no branch that goes on to a clip."""
        own = [event for event in facts.events("framework") if event.scope is clip.scope]
        return bool(own) and not any(compatible(event.guard, clip.guard) for event in own)

    def _of_accelerator(self, clip: Event, facts: Facts) -> list[Call]:
        """Return the calls of the Accelerator's own clipping in the same function."""
        calls = (each for each in facts.calls.get(clip.call.name, ()) if each.scope is clip.scope)
        return [each for each in calls if "accelerator" in dotted(each.receiver).lower()]

    def _prepared_model(self, clip: Event, facts: Facts) -> tuple[str, Wrap] | None:
        """Return the model whose parameters are clipped, and the call that prepared it."""
        for model, wrap in wrappers.of_clipped(clip, "accelerate", facts):
            if compatible(wrap.guard, clip.guard):
                return model, wrap
        return None

    def _backward(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the backward pass of an Accelerator before a clip, if it may scale the gradients.

        None if a step is in between, or if the Accelerator clips, too: the gradients may be those of others.
        """
        clip = trace[place]
        for index, each in trace_facts.before(trace, place):
            if each.kind != "framework" or each.call.name != "backward" or each.guard - clip.guard:
                continue
            if each.record.scope is not clip.record.scope or each.loops != clip.loops:
                continue
            if any(trace_facts.between(trace, index, place, "step", "other_step", guard=clip.guard)):
                continue
            atoms = [one.atom for one in facts.evaluate(each.call.receiver, each.call)]
            made = [atom.call for atom in atoms if isinstance(atom, Object) and atom.kind == "accelerator"]
            if made and made[0] is not None and clip.event is not None and not self._of_accelerator(clip.event, facts):
                plain = accelerate_precision.backward_is_plain(facts.of(made[0]), clip.guard, accumulates=True)
                return None if plain else each
        return None

    def _fix(self, clip: Event, name: str, accelerator: str | None) -> Fix | None:
        given = set(clip.call.keywords)
        if accelerator is None or clip.call.starred or name not in _ARGUMENTS or not given <= _ARGUMENTS[name]:
            return None
        if len(clip.call.positional) > len(_ARGUMENTS[name]):
            return None
        edit = python_edits.replaced(clip.call.func, clip.call, f"{accelerator}.{name}")
        return Fix("Clip through the Accelerator", "safe", (edit,))
