from __future__ import annotations

from mpguard.lint import Diagnostic, Facts, Note, ScalingRule, Trace, any_of, compatible, wrappers


class ClipOutsideDeepspeedEngine(ScalingRule, form_of="MPG503"):
    """Gradients of a DeepSpeed engine are clipped by torch's function instead of by `gradient_clipping`.

    From ZeRO 1 on the engine's backward pass moves the gradients into buffers of its optimizer, and sets those of the
    parameters to None: the clip changes nothing, and its norm is 0. Under `fp16` at stage 0 they are still multiplied
    by the loss scale, and a norm of 1 clips all of them to 1/65536 of it (DeepSpeed 0.19.8).

    Not reported at stage 0 without loss scaling, where the clip has the effect that it has without DeepSpeed, nor for a
    config that is unknown.
    """

    message = "`{expr}` clips {what}"
    help = "set `gradient_clipping` in the DeepSpeed config; `engine.get_global_grad_norm()` is the norm"
    operations = ("clip",)
    triggers = (any_of(b"clip_grad_"),)
    triggers_nearby = (any_of(b"deepspeed"), any_of(b"initialize("))

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        clip = trace[place].event
        path = facts.called_path(trace[place].call)
        if clip is None or clip.subject is None or not path.startswith("torch.nn.utils."):
            return None
        if facts.is_inference(clip.call) or wrappers.other_way(clip.guard, "deepspeed"):
            return None
        for _, wrap in wrappers.of_clipped(clip, "deepspeed", facts):
            settings = wrappers.settings_of(wrap, defaults=True)
            moved = f"no gradients: ZeRO {settings.stage} has moved them into buffers of its own"
            scaled = "gradients that are multiplied by DeepSpeed's loss scale" if settings.fp16 else ""
            what = moved if settings.stage else scaled if settings.stage == 0 else ""
            if what and wrap.index in (0, None) and compatible(wrap.guard, clip.guard):
                notes = (Note("the engine is made here", wrap.call.span, facts.elsewhere(wrap.call)),)
                return self.at(clip, expr=facts.short(clip.call.node), what=what, notes=notes)
        return None
