from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Call,
    Diagnostic,
    Facts,
    Fix,
    Note,
    Rule,
    Scope,
    any_of,
    constant,
    lightning,
    python_edits,
)

#: Optimizers of torch that unscale in their own step if they are fused.
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


class LightningClipping(Rule, form_of="MPG503"):
    """Gradient clipping of Lightning that cannot work under its mixed precision.

    A fused optimizer unscales the gradients inside its step, so Lightning cannot unscale them before it clips: it stops
    with "does not allow for gradient clipping because it performs unscaling of gradients internally", also in BF16
    (Lightning 2.6.6, observed; pytorch-lightning#21435). In manual optimization Lightning unscales in
    `optimizer.step()`, after the clipping in `training_step`: what is clipped is 65536 times too large, and the step is
    as small as if everything were clipped (Lightning 2.6.6, observed; pytorch-lightning#18089).

    The `Trainer` must be in the file of the module, or in one that imports it, with a literal precision.
    """

    in_tests = True
    message = "{what}"
    triggers = (any_of(b"lightning"), any_of(b"clip_", b"fused"))
    triggers_nearby = (any_of(b"precision"), any_of(b"clip_"))
    fixes = True

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for module in facts.scopes:
            if module.kind == "class" and lightning.is_module(module, facts):
                trainers = lightning.trainers_of(module, facts)
                mixed = [call for call, values in trainers if values and values <= lightning.MIXED]
                fp16 = [call for call, values in trainers if values and values <= lightning.FP16_MIXED]
                yield from self._fused(module, mixed, facts)
                if fp16 and len(fp16) == len(trainers):
                    yield from self._manual(module, fp16[0], facts)

    def _fused(self, module: Scope, mixed: list[Call], facts: Facts) -> Iterator[Diagnostic]:
        clips = [call for call in mixed if _positive(call, facts.of(call))]
        scopes = list(module.descendants())
        clips += [call for scope in scopes for call in scope.calls if call.path == "self.clip_gradients" and mixed]
        for call in (call for scope in scopes for call in scope.calls if call.name in _FUSED and clips):
            given = call.keywords.get("fused")
            if constant(given) == (True,) and given is not None and facts.called_path(call).startswith("torch.optim."):
                what = "a fused optimizer cannot be clipped under mixed precision: Lightning stops"
                fix = Fix("Remove `fused=True`", "safe", (python_edits.without_argument(call, given),))
                notes = (Note("it is clipped here", clips[0].span, facts.elsewhere(clips[0])),)
                yield self.at(facts.span(given, call), what=what, help="remove `fused=True`", notes=notes, fix=fix)

    def _manual(self, module: Scope, trainer: Call, facts: Facts) -> Iterator[Diagnostic]:
        if not lightning.optimizes_manually(module, facts):
            return
        for scope in module.descendants():
            if any(call.name == "unscale_" for call in scope.calls):
                return
        for scope in module.descendants():
            backwards = [call.order for call in scope.calls if call.name == "manual_backward"]
            steps = [call.order for call in scope.calls if call.name == "step"]
            for call in scope.calls:
                clips = call.path == "self.clip_gradients" or (
                    call.name in _CLIPS and facts.called_path(call).startswith("torch.nn.utils.")
                )
                if clips and any(o < call.order for o in backwards) and any(o > call.order for o in steps):
                    what = "the gradients that are clipped here are still scaled: Lightning unscales them in `step`"
                    help = (
                        "clip in the hook `on_before_optimizer_step`, which runs after that; `unscale_` would run twice"
                    )
                    notes = (Note("the precision is FP16", trainer.span, facts.elsewhere(trainer)),)
                    yield self.at(call, what=what, help=help, notes=notes)


def _positive(trainer: Call, facts: Facts) -> bool:
    """True if a Trainer clips: `gradient_clip_val` is a number above 0."""
    number = facts.scalars.number(trainer.keywords.get("gradient_clip_val"), trainer)
    return number is not None and number.value > 0
