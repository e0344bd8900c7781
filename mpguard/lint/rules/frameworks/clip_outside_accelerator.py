from __future__ import annotations

from collections.abc import Iterator

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
    Rule,
    Wrap,
    accelerate_precision,
    any_of,
    compatible,
    dotted,
    lazy_pattern,
    path_condition,
    python_edits,
    wrappers,
)

_PARAMETERS = ("parameters", "named_parameters")
#: Names of methods of models that give parameters: `get_trainable_params`.
_GIVES_PARAMETERS = lazy_pattern("param")
#: The arguments that the Accelerator's functions take as well.
_ARGUMENTS = {
    "clip_grad_norm_": {"parameters", "max_norm", "norm_type"},
    "clip_grad_value_": {"parameters", "clip_value"},
}


_SCALED = "`{expr}` clips gradients that `{accelerator}` may have scaled or sharded"


class ClipOutsideAccelerator(Rule):
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

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        # By the Accelerator, or by a scaler in the code: MPG502 reports that.
        by_hand = [*facts.calls.get("unscale_gradients", ()), *(event.call for event in facts.events("unscale"))]
        for clip in facts.events("clip"):
            if any(self._before(unscale, clip, facts) for unscale in by_hand):
                continue
            path = facts.called_path(clip.call)
            if not path.startswith("torch.nn.utils.") or clip.subject is None:
                continue
            if (
                facts.scalars.only_measures(clip.call)
                or facts.is_inference(clip.call)
                or wrappers.other_way(clip.guard, "accelerat")
                or self._is_fallback(clip, facts)
                or self._is_of_another_branch(clip, facts)
            ):
                continue
            found = self._prepared_model(clip, facts)
            backward = self._backward(clip, facts) if found is None else None
            if backward is not None:
                event, accelerator = backward
                name = path.rsplit(".", 1)[-1]
                yield self.at(
                    clip,
                    message=_SCALED,
                    expr=facts.short(clip.call.node),
                    accelerator=accelerator,
                    help=self.help.format(name=name),
                    notes=(Note("its backward pass", event.span),),
                    fix=self._fix(clip, name, accelerator),
                )
            if found is None:
                continue
            model, wrap = found
            if not accelerate_precision.backward_is_plain(wrap.facts, clip.guard, accumulates=True):
                name = path.rsplit(".", 1)[-1]
                yield self.at(
                    clip,
                    expr=facts.short(clip.call.node),
                    model=model,
                    help=self.help.format(name=name),
                    notes=(Note("prepared here", wrap.call.span, facts.elsewhere(wrap.call)),),
                    fix=self._fix(clip, name, wrappers.receiver_at(wrap, clip.call, facts)),
                )

    def _before(self, unscale: Call, clip: Event, facts: Facts) -> bool:
        """True if a call that unscales the gradients may run before they are clipped: not in another branch."""
        near = unscale.scope is clip.scope or unscale.scope in facts.reachable(clip.scope)
        return near and compatible(facts.guard_of(unscale), clip.guard)

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
        assert clip.subject is not None
        first, last = facts.span(clip.subject, clip.call)
        parameter_calls = [
            call for name in _PARAMETERS for call in facts.calls.get(name, ()) if call.scope is clip.scope
        ]
        calls = [call for call in parameter_calls if first <= call.span[0] and call.span[1] <= last]
        if not calls:  # a name: follow it to the expression that it was assigned
            records = facts.flow.backward(clip.subject, clip.call, depth=2)
            calls = [record for record in records if isinstance(record, Call) and _GIVES_PARAMETERS.search(record.name)]
        for call in calls:
            if call.receiver is None:
                continue
            wraps = facts.wrappers.of(call.receiver, call, "accelerate", across=True)
            wraps += facts.wrappers.of_argument(call.receiver, call, "accelerate")
            for wrap in wraps:
                if compatible(wrap.guard, clip.guard):
                    return dotted(call.receiver) or facts.short(call.receiver), wrap
        for wrap in facts.wrappers.of(clip.subject, clip.call, "accelerate"):  # a list of several models' parameters
            if compatible(wrap.guard, clip.guard):
                return facts.short(clip.subject), wrap
        return None

    def _backward(self, clip: Event, facts: Facts) -> tuple[Event, str] | None:
        """Return the backward pass of an Accelerator before a clip, and its name, if it may scale the gradients.

        Nothing if a step is in between, or if the Accelerator clips, too: the gradients may be those of others.
        """
        for event in () if self._of_accelerator(clip, facts) else facts.events("framework"):
            together = event.scope is clip.scope and event.call.loops == clip.call.loops and event.order < clip.order
            if not together or event.call.name != "backward" or event.guard - clip.guard:
                continue
            if any(each.name == "step" and event.order < each.order < clip.order for each in clip.scope.calls):
                continue
            for each in facts.evaluate(event.subject, event.call):
                atom = each.atom
                if isinstance(atom, Object) and atom.kind == "accelerator" and atom.call is not None:
                    plain = accelerate_precision.backward_is_plain(facts.of(atom.call), clip.guard, accumulates=True)
                    return None if plain else (event, facts.short(event.subject))
        return None

    def _fix(self, clip: Event, name: str, accelerator: str | None) -> Fix | None:
        given = set(clip.call.keywords)
        if accelerator is None or clip.call.starred or name not in _ARGUMENTS or not given <= _ARGUMENTS[name]:
            return None
        if len(clip.call.positional) > len(_ARGUMENTS[name]):
            return None
        edit = python_edits.replaced(clip.call.func, clip.call, f"{accelerator}.{name}")
        return Fix("Clip through the Accelerator", "safe", (edit,))
