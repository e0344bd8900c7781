from __future__ import annotations

import libcst as cst

from mpguard.lint import (
    Bad,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Note,
    ScalingRule,
    Trace,
    Wrap,
    accelerate_precision,
    any_of,
    compatible,
    python_edits,
    trace_facts,
    wrappers,
)


class BackwardOutsideAccelerator(ScalingRule):
    """`loss.backward()` is called directly on the loss of a model that an Accelerator has prepared.

    ## What it does
    Reports a plain `backward()` whose loss comes from a model that `accelerator.prepare` returned, or whose gradients
    are applied by an optimizer that it returned, and one in the `training_step` of a subclass of transformers' Trainer,
    which prepares the model itself.

    ## Why is this bad
    `accelerator.backward(loss)` scales the loss under FP16, divides it by `gradient_accumulation_steps`, and passes it
    to the engine under DeepSpeed. Without it the prepared optimizer's step unscales gradients that were never scaled
    (FP16: they become 65536 times too small), and the same script under a DeepSpeed config raises or trains without its
    loss scale.

    ## Fix safety
    Safe: with `mixed_precision` off and one step per batch both are the same; in all other cases `accelerator.backward`
    is intended. Unsafe if the Accelerator accumulates gradients and the loss is divided by hand as well. There is no
    fix if the Accelerator has no name at the place.

    ## Known limits
    An Accelerator that prepares nothing that this loss uses (used for devices, logging, metrics) is ignored. A loss
    that a GradScaler of the code's own scales is reported by MPG502, and one that apex scales (`amp.scale_loss`) by no
    rule. An Accelerator whose `mixed_precision` is "bf16" or "no" in the code, without accumulation, an engine or
    sharding, adds nothing to `backward` and is ignored. A `backward` under a flag that is named after accelerate,
    DeepSpeed or the distributed type is assumed to be the path without the Accelerator.
    """

    code, name = "MPG501", "backward-outside-accelerator"
    severity = "error"
    message = "`{expr}` bypasses the Accelerator that prepared {what}"
    help = "call `accelerator.backward(loss)`: it scales, divides for accumulation, and supports DeepSpeed"
    operations = ("backward",)
    triggers = (any_of(b"ccelerator"), any_of(b".backward("))
    triggers_nearby = (any_of(b".prepare", b"def training_step("),)
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    loss = model(x).sum()
    loss.backward()  # !
    optimizer.step()
    optimizer.zero_grad()
""",
            fixed="""\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    loss = model(x).sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
""",
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        backward = trace[place].event
        if backward is None or wrappers.other_way(backward.guard, "accelerat") or self._is_scaled(backward, facts):
            return None
        expr = facts.short(backward.call.node)
        if _is_in_trainer(backward, facts):
            edit = python_edits.through(facts, backward, "self.accelerator")
            fix = Fix("Run it through the Accelerator", "unsafe", (edit,)) if edit is not None else None
            return self.at(backward, expr=expr, what="the Trainer's model", fix=fix)
        if facts.is_inference(backward.call) or not (facts.has_step(backward.scope) or _prepares_optimizer(facts)):
            return None
        found = self._prepared_model(backward, facts) or self._prepared_optimizer(trace, place, facts)
        if found is None or accelerate_precision.backward_is_plain(found[0].facts, backward.guard):
            return None
        wrap, what = found
        notes = (Note("prepared here", wrap.call.span, facts.elsewhere(wrap.call)),)
        return self.at(backward, expr=expr, what=what, notes=notes, fix=self._fix(backward, wrap, facts))

    def _is_scaled(self, backward: Event, facts: Facts) -> bool:
        """True for `scaled_loss` of `with amp.scale_loss(loss, optimizer) as scaled_loss`, and what a scaler scales."""
        by_apex = {call.node for call in facts.calls.get("scale_loss", ())}
        entered = any(entered.expr in by_apex for entered in backward.call.withs)
        return entered or facts.scalers.scale_of(backward.subject, backward.call, depth=3) is not None

    def _prepared_model(self, backward: Event, facts: Facts) -> tuple[Wrap, str] | None:
        """Return the wrap of the model that computes the loss."""
        for call, wrap in facts.wrappers.differentiated(backward.subject, backward.call, "accelerate", True):
            return wrap, f"`{call.path}`"
        return None

    def _prepared_optimizer(self, trace: Trace, place: int, facts: Facts) -> tuple[Wrap, str] | None:
        """Return the wrap of the optimizer that applies these gradients, in the next step."""
        backward = trace[place]
        steps = (each for each in trace[place:] if each.kind == "step" and compatible(each.guard, backward.guard))
        step = next(steps, None)
        if step is None or step.optimizer is None:
            return None
        wraps = facts.wrappers.of(step.optimizer, step.call, "accelerate", across=True)
        found = next((wrap for wrap in wraps if compatible(wrap.guard, step.guard, backward.guard)), None)
        return (found, f"`{facts.short(step.optimizer)}`") if found is not None else None

    def _fix(self, backward: Event, wrap: Wrap, facts: Facts) -> Fix | None:
        accelerator = wrappers.receiver_at(wrap, backward.call, facts)
        edit = python_edits.through(facts, backward, accelerator) if accelerator is not None else None
        if edit is None:
            return None
        by_hand = isinstance(backward.subject, cst.BinaryOperation) or trace_facts.rhythm(backward.guard)
        made = facts.events("accelerator")
        accumulates = not made or any("gradient_accumulation_steps" in each.call.keywords for each in made)
        return Fix("Run it through the Accelerator", "unsafe" if by_hand and accumulates else "safe", (edit,))


def _prepares_optimizer(facts: Facts) -> bool:
    """True if something in the file that is named as an optimizer is prepared."""
    prepared = (arg.value for event in facts.events("prepare") for arg in event.call.node.args)
    return any("optim" in facts.short(each).lower() for each in prepared)


def _is_in_trainer(backward: Event, facts: Facts) -> bool:
    """True in the `training_step` of a subclass of transformers' or trl's Trainer that uses its Accelerator itself."""
    cls = backward.scope.owner
    if backward.scope.name != "training_step" or cls is None:
        return False
    bases = facts.ancestry(cls)
    return any(base.startswith(("transformers.", "trl.")) and base.endswith("Trainer") for base in bases) and any(
        use.path.startswith("self.accelerator")
        for scope in facts.scopes
        if scope.owner is cls
        for use in scope.uses.get("self", ())
    )
