from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Dtype, Event, Facts, Note, PathCondition, Rule, Wrap, any_of, wrappers


class FsdpPolicyWithoutScaler(Rule, form_of="MPG211"):
    """A model gets an FSDP policy that may be FP16, and nothing in the project scales a loss.

    Gradients that are too small for FP16 are zero, those that are too large infinite, and the step is not skipped.

    Reported where the loop is in another file than the wrapper. Silent if any code of the project contains a scaler,
    or uses a framework that may bring one, and in a file without an optimizer.
    """

    message = "FP16 under FSDP, and nothing in the project scales the gradients"
    help = "scale the loss with `ShardedGradScaler`; or use BF16"
    triggers = (any_of(b"FullyShardedDataParallel"), any_of(b"mixed_precision"))
    triggers_nearby = (any_of(b".backward("),)

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or facts.events("backward"):
            return
        for call, kind in facts.wrappers.calls.items():
            if kind != "fsdp1" or facts.is_inference(call):
                continue
            wrap = Wrap(kind, call, facts, facts.guard_of(call))
            low = [each for each, chosen in wrappers.policies_of(wrap) if self._is_float16(each, chosen, wrap)]
            if low and self._optimizes(facts) and facts.project.never_scales(facts.path):
                notes = (Note("the policy", low[0].span, facts.elsewhere(low[0].call)),)
                yield self.at(call, notes=notes)

    def _is_float16(self, policy: Event, chosen: PathCondition, wrap: Wrap) -> bool:
        return any(low.joined(chosen, wrap.guard).possible for low in policy.may_be(Dtype.FP16))

    def _optimizes(self, facts: Facts) -> bool:
        return any("optimizer" in facts.kinds(call.node, call) for scope in facts.scopes for call in scope.calls)
