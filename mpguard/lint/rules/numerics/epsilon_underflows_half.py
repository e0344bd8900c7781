from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Facts,
    Fix,
    Note,
    Rule,
    ScalarUse,
    accelerate_precision,
    any_of,
    dtype_triggers,
    python_edits,
)

#: Half of FP16's smallest number. This and smaller numbers round to zero.
_ROUNDS_TO_ZERO = 2.0**-25
_WITH_EPS = frozenset({"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad"})


class EpsilonUnderflowsHalf(Rule):
    """An epsilon that FP16 rounds to zero is added to an FP16 value, limits one, or is Adam's for FP16 weights.

    ## What it does
    Reports small numbers such as `1e-8` that are added to a tensor or passed to `clamp`, if the tensor is FP16: cast by
    hand, created in FP16, or the result of a matmul in an FP16 autocast region. Also reports the `eps` of Adam
    and similar optimizers (1e-8 unless given) whose parameters are FP16.

    ## Why is this bad
    FP16's smallest number is 5.96e-8, and anything below half of it is zero: `x + 1e-8` is `x`, and `x.clamp(min=1e-8)`
    lets 0 pass. The division, logarithm or root that the epsilon protects gives inf or NaN after all. Adam with FP16
    weights and `eps=1e-8` turns a weight into NaN in its first step if the gradient is 0 (torch 2.13). BF16 has FP32's
    exponents and is not affected.

    ## Fix safety
    Unsafe: computing in FP32 (`x.float() + 1e-8`) changes the result's dtype. There is no fix for an optimizer.

    ## Known limits
    Tensors of unknown dtype are not reported, nor are values after `.float()`, results of operations that autocast runs
    in FP32 (`norm`, `sum`, `exp`), and the epsilons of layers that compute in FP32 internally (`LayerNorm(eps=1e-12)`).
    """

    code, name = "MPG602", "epsilon-underflows-half"
    severity = "error"
    message = "{number} is zero in FP16, whose smallest number is 6e-8: {effect}"
    help = "compute in float32, or use a number of at least 1e-7"
    triggers = (
        any_of(*dtype_triggers.MENTIONS_FP16),
        any_of(b"e-8", b"e-9", b"e-08", b"e-09", b"e-10", b"e-11", b"e-12", b"e-13", b"e-14", b"e-15", b"e-16", b"e-17",
               b"e-18", b"e-19", b"e-2", b"e-3", b"2**-", b"2 ** -", b"10**-", b"10 ** -", b".tiny", b".00000001",
               b"Adam(", b"AdamW(", b"Adamax(", b"RMSprop(", b"Adagrad("),
    )  # fmt: skip
    examples = (
        Bad(
            """\
import torch

def normalize(x):
    x = x.half()
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)  # !
""",
            fixed="""\
import torch

def normalize(x):
    x = x.half()
    return x / (x.norm(dim=-1, keepdim=True).float() + 1e-8)
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for use in facts.scalars.uses:
            if not 0 < use.number.value <= _ROUNDS_TO_ZERO or not self._protects(use):
                continue
            found = facts.precision.low(use.tensor, use.record, Dtype.FP16)
            if found is None:
                continue
            cause = "autocast computes it in FP16 here" if found.by_autocast else "it is FP16 from here"
            notes = (Note(cause, found.origin.span, facts.elsewhere(found.origin)),) if found.origin else ()
            effect = "0 passes the limit" if use.kind == "clamp" else "nothing is added"
            yield self.at(
                use,
                number=f"`{facts.short(use.node)}`",
                effect=effect,
                notes=notes,
                fix=self._fix(use, facts),
            )
        if facts.declared == "inference":
            return
        for weights in facts.training_use.weights(Dtype.FP16):
            if facts.master_weights.kept_for(weights) or accelerate_precision.follows_policy(weights.guard):
                continue  # or Accelerate's GradScaler raises before the first step
            for call in weights.training.of("optimizer"):
                if call.name in _WITH_EPS and self._has_tiny_eps(call, facts):
                    note = Note("the weights are FP16 from here", weights.event.span)
                    given = call.keywords.get("eps")
                    yield self.at(
                        facts.span(given, call) if given is not None else call,
                        number="`eps=1e-8`" if given is None else f"`eps={facts.short(given)}`",
                        effect=f"{call.name} divides by zero where a gradient of these FP16 weights is 0",
                        notes=(note,),
                    )

    def _protects(self, use: ScalarUse) -> bool:
        return (use.kind == "add" and use.name != "-") or (
            use.kind == "clamp" and use.name not in ("clamp_max", "clamp_max_") and use.lower
        )

    def _has_tiny_eps(self, call: Call, facts: Facts) -> bool:
        given = call.keywords.get("eps")
        number = facts.scalars.number(given, call)
        if given is None:
            return not call.starred and len(call.positional) < 4
        return number is not None and 0 < number.value <= _ROUNDS_TO_ZERO

    def _fix(self, use: ScalarUse, facts: Facts) -> Fix | None:
        if use.name == "+=":
            return None
        text = facts.text(use.tensor, use.record)
        if isinstance(use.tensor, (cst.BinaryOperation, cst.UnaryOperation)) and not text.startswith("("):
            return None
        return Fix("Compute in float32", "unsafe", (python_edits.after(use.tensor, use.record, ".float()"),))
