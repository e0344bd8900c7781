from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Constant,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Note,
    Object,
    Rule,
    Wrap,
    accelerate_precision,
    any_of,
    compatible,
    input_casts,
    python_edits,
)


class ManualBfloat16Cast(Rule):
    """A value that the policy keeps in FP32 is cast to BF16 by hand.

    ## What it does
    Reports a cast of a tensor to BF16 whose result is passed to a model that is trained and runs under autocast, under
    an `Accelerator(mixed_precision=...)`, or in FSDP with a mixed-precision policy, if the cast loses something: the
    policy's dtype is another one, or by its name the value is a target, a box, a position, a time or the like.

    ## Why is this bad
    The policy casts the inputs of the operations that are safe in BF16 and keeps the others in FP32. A cast by hand
    rounds to 8 bits before the policy applies: coordinates, timesteps and targets lose their lower digits, the first
    norm computes with rounded values, and a change of the policy has no effect.

    ## Fix safety
    The fix removes the cast and keeps a device move. It is unsafe because the value then has the policy's dtype.

    ## Known limits
    Silent if the file casts or loads any model in BF16 (its inputs have to be BF16), or the model's class creates
    layers or kernels with `dtype=torch.bfloat16`; for the inputs of a DeepSpeed engine (its parameters are BF16 and it
    casts nothing), for frozen models, in inference, inside the autocast region, and if the precision of an Accelerator
    is not a literal. FP16 casts are reported by MPG101.
    """

    code, name = "MPG102", "manual-bfloat16-cast"
    severity = "warning"
    message = "`{expr}` casts to BF16 by hand what the policy casts"
    help = "remove the cast; autocast, or the launcher's policy, chooses the dtype"
    triggers = (
        any_of(b".bfloat16(", b"bfloat16"),
        any_of(b"autocast", b"Accelerator(", b"MixedPrecision"),
        any_of(b"backward(", b"Trainer"),
        any_of(b".to(", b".type(", b".bfloat16("),
    )
    yields_to = ("MPG107", "MPG109", "MPG110", "MPG511", "MPG603")
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for points in loader:
    points = points.to("cuda", dtype=torch.bfloat16)  # !
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(points).sum()
    loss.backward()
    optimizer.step()
""",
            fixed="""\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for points in loader:
    points = points.to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(points).sum()
    loss.backward()
    optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        casts = [cast for cast in facts.events("cast") if cast.may_be(Dtype.BF16)]
        loads = (load for load in facts.events("load") if load.may_be(Dtype.BF16))
        if not casts or any(facts.casts.is_module(event) for event in (*casts, *loads)):
            return
        for cast in casts:
            policy = self._policy(cast, facts)
            if policy is not None:
                notes = (Note("the policy is set here", policy.span),)
                yield self.at(
                    cast, expr=facts.short(cast.call.node), notes=notes, fix=python_edits.without_cast(facts, cast)
                )

    def _policy(self, cast: Event, facts: Facts) -> Call | None:
        """Return the call that sets the policy of a model to which the value is passed."""
        guards = [guard for guard in cast.may_be(Dtype.BF16) if not accelerate_precision.follows_policy(guard)]
        training = facts.training_use.cast(cast, Dtype.BF16, guards)
        if training is None or input_casts.loses_nothing(cast, Dtype.BF16, guards, training):
            return None
        for call in training.reach.models:
            if facts.training_use.has_layers_in(Dtype.BF16, call.func, call):
                continue  # they may need inputs in BF16
            for region, guard in facts.autocasts(call):
                if region.call is not None and compatible(guard, guards[0]):
                    return region.call
            for wrap in facts.wrappers.of(call.func, call):
                if (found := self._mixed(wrap, facts)) is not None and compatible(wrap.guard, guards[0]):
                    return found
        return None

    def _mixed(self, wrap: Wrap, facts: Facts) -> Call | None:
        """Return the Accelerator or FSDP wrapper with a known mixed precision; DeepSpeed's engine casts no inputs."""
        if wrap.kind == "accelerate" and wrap.call.receiver is not None:
            for each in facts.evaluate(wrap.call.receiver, wrap.call):
                accelerator = each.atom.call if isinstance(each.atom, Object) else None
                if accelerator is None:
                    continue
                values = facts.evaluate(accelerator.keywords.get("mixed_precision"), accelerator)
                atoms = [value.atom for value in values]
                if atoms and all(isinstance(atom, Constant) and atom.value in ("bf16", "fp16") for atom in atoms):
                    return accelerator
        policy = wrap.call.argument(None, "mixed_precision", "mp_policy")
        return wrap.call if wrap.kind.startswith("fsdp") and policy is not None else None
