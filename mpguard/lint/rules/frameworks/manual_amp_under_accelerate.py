from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Fix,
    Note,
    Object,
    Region,
    Rule,
    Wrap,
    accelerate_precision,
    any_of,
    compatible,
    python_edits,
    wrappers,
)

#: The dtypes of the precisions that enter autocast.
_DTYPES = {"fp16": Dtype.FP16, "bf16": Dtype.BF16}


class ManualAmpUnderAccelerate(Rule):
    """Manual autocast or a manual GradScaler around a model that an Accelerator has prepared.

    ## What it does
    Reports an enabled `torch.autocast` region in which a prepared model is called for training, if the region has a
    dtype of its own (a constant, torch's default, one that other options choose), and a GradScaler that scales the loss
    of a prepared model. A dtype that is not visible is reported only if the Accelerator certainly has mixed precision.

    ## Why is this bad
    `prepare` wraps the model's forward in an autocast with the precision of the launch config or of
    `Accelerator(mixed_precision=...)`; `accelerator.autocast()` does the same for loss functions around it. A manual
    region sets a second dtype, and under `mixed_precision: no` a dtype that was not configured. Under FP16, a manual
    GradScaler scales a loss that the Accelerator's scaler scales again, and the gradients are unscaled only once.

    ## Fix safety
    Unsafe: `accelerator.autocast()` computes in the Accelerator's precision, which may be none. There is no fix for a
    region that is stored in a name, since the context of `accelerator.autocast()` can be entered only once, and none
    for a scaler: its `scale`, `step` and `update` would have to be removed with it.

    ## Known limits
    Frozen models that were not prepared (a VAE, a text encoder), evaluation and disabled regions are not reported, nor
    is a region under a flag that is named after accelerate or DeepSpeed. Not reported either: a dtype that is derived
    from `accelerator.mixed_precision` or from the option that the Accelerator takes, or the constant that the code
    gives the Accelerator too, since it cannot differ; a region of a script that launch lines, configs or plugins run
    with DeepSpeed or Megatron-LM, where Accelerate enters no autocast, unless its dtype differs from the precision that
    is set; a region that is entered only if an attribute is True that begins as False and is set under a condition;
    Accelerators without a precision in a project that has no launch line, config or text for accelerate (an option
    `--mixed_precision` of the script's own is none), unless an FP16 region has no scaler.
    """

    code, name = "MPG502", "manual-amp-under-accelerate"
    severity = "error"
    message = "manual `{expr}` in addition to the Accelerator that prepared `{model}`"
    help = "leave the precision to the Accelerator: `accelerator.autocast()`, `accelerator.backward(loss)`"
    triggers = (any_of(b"ccelerator"), any_of(b"autocast", b"Scaler"))
    triggers_nearby = (any_of(b".prepare"),)
    yields_to = ("MPG862",)
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):  # !
        loss = model(x).sum()
    accelerator.backward(loss)
    optimizer.step()
""",
            fixed="""\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.autocast():
        loss = model(x).sum()
    accelerator.backward(loss)
    optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        is_alone = accelerate_precision.is_without(facts)
        reported: set[Call] = set()
        for call, wrap in facts.wrappers.forwards("accelerate"):
            if facts.is_inference(call):
                continue
            for region, guard in facts.autocasts(call):
                place = region.call
                if place is None or place in reported or facts.of(place) is not facts or facts.is_inference(place):
                    continue
                if is_alone and (facts.events("scale") or not region.may_be(Dtype.FP16)):
                    continue
                certain = compatible(guard, wrap.guard) and not wrappers.other_way(guard, "accelerat")
                if certain and self._conflicts(region, facts):
                    reported.add(place)
                    yield self._found(place, call, wrap, self._fix(place, wrap, facts), facts)
        for scale in facts.events("scale") if not is_alone else ():
            yield from self._scaled(scale, reported, facts)

    def _conflicts(self, region: Region, facts: Facts) -> bool:
        """True if a region is a second authority for the dtype: it does not follow the Accelerator's precision."""
        if accelerate_precision.starts_off(region) or accelerate_precision.is_derived(region):
            return False
        own = {dtype for _, dtype in region.dtypes}
        certain = _DTYPES.get(accelerate_precision.precision(facts) or "")
        if certain is not None and own == {certain} and accelerate_precision.is_fixed(facts):
            return False
        if accelerate_precision.leaves_autocast_out(facts):  # the region may be the only one
            return certain is not None and None not in own and certain not in own
        return certain is not None or None not in own

    def _scaled(self, scale: Event, reported: set[Call], facts: Facts) -> Iterator[Diagnostic]:
        """Yield a scaler that scales the loss of a prepared model."""
        if wrappers.other_way(scale.guard, "accelerat"):
            return
        for call, wrap in facts.wrappers.differentiated(scale.call.positional[0], scale.call, "accelerate", True):
            place = self._scaler_call(scale, facts)
            if place is not None and place not in reported:
                reported.add(place)
                yield self._found(place, call, wrap, None, facts)
            return

    def _scaler_call(self, scale: Event, facts: Facts) -> Call | None:
        """Return the call that creates the scaler, if it is torch's, enabled, and in this file."""
        for each in facts.evaluate(scale.subject, scale.call):
            if isinstance(each.atom, Object) and each.atom.call is not None and each.atom.path.startswith("torch."):
                made = each.atom.call
                if facts.of(made) is facts and facts.enabled(made, each.atom.path).joined(scale.guard).possible:
                    return made
        return None

    def _found(self, place: Call, call: Call, wrap: Wrap, fix: Fix | None, facts: Facts) -> Diagnostic:
        notes = (Note("prepared here", wrap.call.span, facts.elsewhere(wrap.call)), Note("called here", call.span))
        return self.at(place, expr=facts.short(place.node), model=call.path, notes=notes, fix=fix)

    def _fix(self, place: Call, wrap: Wrap, facts: Facts) -> Fix | None:
        if not self._entered_once(place, facts):
            return None
        accelerator = wrappers.receiver_at(wrap, place, facts)
        if accelerator is None:
            return None
        edit = python_edits.replaced(place.node, place, f"{accelerator}.autocast()")
        return Fix("Enter the Accelerator's autocast", "unsafe", (edit,))

    def _entered_once(self, place: Call, facts: Facts) -> bool:
        """True if a region is made where it is entered: an object of `accelerator.autocast()` can be entered once."""
        parent = facts.parent(place.node)
        while isinstance(parent, (cst.IfExp, cst.BooleanOperation)):
            parent = facts.parent(parent)
        return isinstance(parent, (cst.With, cst.Decorator))
