from __future__ import annotations

from mpguard.lint import Diagnostic, Facts, Note, ScalingRule, Trace, TraceStep, any_of, compatible, trace_facts


class ClipMissingWithScaler(ScalingRule, form_of="MPG205"):
    """Only the branch without a scaler clips gradients.

    With mixed precision the run trains without clipping: it is another training, and its loss is more likely to spike.

    Reported where both branches step the same optimizer in one function, and nothing in the branch with the scaler
    unscales or clips.
    """

    severity = "warning"
    operations = ("scaler_step",)
    message = "`{expr}` steps with gradients that are clipped only in the branch without a scaler"
    help = "call `{scaler}.unscale_(...)`, then clip, before this step too"
    triggers = (any_of(b"clip_grad"), any_of(b".scale("), any_of(b"scaler", b"Scaler"))

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        step = trace[place]
        if not facts.scalers.like_torch(step.scaler, step.record) or self._may_clip(step):
            return None
        own = [each for _, each in trace_facts.iteration(trace, step)]
        with_scaler = [each for each in own if compatible(each.guard, step.guard)]
        if any(each.kind in ("clip", "unscale", "passed", "read") for each in with_scaler):
            return None
        others = [each for each in own if each not in with_scaler and each.record.scope is step.record.scope]
        plain = [each for each in others if each.kind == "step" and self._is_of(each, step, facts)]
        for clip in others:
            if clip.kind == "clip" and any(compatible(clip.guard, each.guard) for each in plain):
                expr, scaler = facts.short(step.call.node), facts.short(step.scaler)
                help = self.help.format(scaler=scaler)
                return self.at(step, expr=expr, help=help, notes=(Note("clipped here only", clip.span),))
        return None

    def _may_clip(self, step: TraceStep) -> bool:
        """True if a call that runs with the step may clip, under any name."""
        calls = step.record.scope.calls
        return any("clip" in call.path.lower() and compatible(call.guard, step.guard) for call in calls)

    def _is_of(self, plain: TraceStep, step: TraceStep, facts: Facts) -> bool:
        """True if a plain step is one of the same optimizer."""
        return step.optimizer is not None and facts.short(plain.call.receiver) == facts.short(step.optimizer)
