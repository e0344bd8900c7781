from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Call,
    Diagnostic,
    Facts,
    Note,
    Object,
    Ref,
    Rule,
    Weights,
    any_of,
    dtype_triggers,
)

_LOSSES = frozenset({
    "cross_entropy", "binary_cross_entropy_with_logits", "binary_cross_entropy",
    "CrossEntropyLoss", "BCEWithLogitsLoss", "BCELoss",
})  # fmt: skip


class CrossEntropyOnHalfLogits(Rule, form_of="MPG603"):
    """A loss is computed outside autocast on logits in FP16 or BF16: cast by hand, or computed under autocast before.

    The loss has the dtype of the logits: between 8 and 16 a BF16 number has steps of 0.06, so a loss that improves by
    less does not change, and logits of 10.0 and 9.99 are the same number. Under autocast the loss is computed in FP32
    (on CUDA). Cast the logits with `.float()`, or do not cast them.

    Logits of unknown dtype are not reported, nor is code that may run under autocast: a module whose callers are
    unknown, and functions of a file that mentions autocast or a trainer.
    """

    message = "`{loss}` on logits {cause}"
    help = "compute the loss in FP32: cast the logits with `.float()`, or compute it inside autocast"
    triggers = (any_of(b"cross_entropy(", b"CrossEntropyLoss(", b"BCELoss(", b"BCEWithLogitsLoss("),)
    triggers_nearby = (
        any_of(*dtype_triggers.CASTS_LOW_PRECISION, *dtype_triggers.NAMED_LOW_PRECISION),
        any_of(b"backward("),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        for calls in list(facts.calls.values()):
            for call in calls:
                loss = self._loss(call, facts)
                if not loss or facts.is_inference(call):
                    continue
                logits = call.argument(0, "input")
                found = facts.precision.outside_autocast(logits, call)
                if found is not None:
                    cause, origin = found.cause, found.origin
                elif cast := self._cast_of_module(logits, call, facts):
                    cause, origin = "of a module whose weights are cast to 16 bits", cast.event.call
                else:
                    continue
                notes = (Note("from here", origin.span, facts.elsewhere(origin)),) if origin else ()
                yield self.at(call, loss=loss, cause=cause, notes=notes)

    def _cast_of_module(self, logits: cst.CSTNode | None, call: Call, facts: Facts) -> Weights | None:
        """Return how the weights of the module that computes its own loss get a 16-bit dtype."""
        owner = call.scope.owner
        if owner is None or not facts.precision.in_dtype_of_weights(logits, call):
            return None
        return facts.training_use.of_module(owner)

    def _loss(self, call: Call, facts: Facts) -> str:
        """Return the name of the loss that a call computes; empty if it computes none."""
        for each in facts.evaluate(call.func, call):
            path = each.atom.path if isinstance(each.atom, (Object, Ref)) else ""
            last = path.rsplit(".", 1)[-1]
            if path.startswith("torch.") and last in _LOSSES and last[0].isupper() == isinstance(each.atom, Object):
                return last
        return ""
