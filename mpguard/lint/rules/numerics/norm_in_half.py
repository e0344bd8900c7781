from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    MENTIONS_LOW_PRECISION,
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Facts,
    Fix,
    Good,
    Note,
    Rule,
    any_of,
    constant,
    dotted,
    python_edits,
    text_of,
)

_SQUARES = frozenset({"pow", "square", "pow_", "square_"})
_MEANS = frozenset({"mean", "sum"})
_VARIANCES = frozenset({"var", "var_mean"})


class NormInHalf(Rule):
    """A hand-written RMSNorm, LayerNorm or variance squares FP16 or BF16 values without an upcast.

    ## What it does
    Reports `x.pow(2).mean(...)`, `(x * x).mean(...)`, `(x ** 2).sum(...)` and `x.var(...)` if `x` is certain to be FP16
    or BF16: cast by hand, or the result of a matrix product in an autocast region.

    ## Why is this bad
    A square overflows FP16 from 256 on: `torch.full((3,), 300.).half().pow(2).mean()` is inf, and the normalised value
    is 0. In BF16 the mean of squares keeps 8 bits. Models that implement their own norm upcast first
    (`x.float().pow(2).mean(-1)`) and cast the result back.

    ## Fix safety
    Unsafe: `.float()` before the square makes everything that follows FP32.

    ## Known limits
    Preview: real modules get their input from their callers, so its dtype is seldom known, and whether a variance in
    half precision matters depends on the values. `std` is not reported: torch computes it in FP32 internally, and the
    result fits. CUDA's autocast runs `pow` and `**` in FP32 (not `x * x`, `var`).
    """

    code, name = "MPG605", "norm-in-half"
    severity = "warning"
    preview = True
    message = "squares of {dtype} values without an upcast: {effect}"
    help = "compute it in float32: cast the values with `.float()` before they are squared"
    triggers = (
        any_of(*MENTIONS_LOW_PRECISION),
        any_of(b"pow(", b"** 2", b"**2", b"square(", b").mean(", b".var(", b"var_mean", b").sum("),
    )
    examples = (
        Bad(
            """\
import torch

def rms_norm(x, weight):
    x = x.half()
    variance = x.pow(2).mean(-1, keepdim=True)  # !
    return weight * x * torch.rsqrt(variance + 1e-6)
""",
            fixed="""\
import torch

def rms_norm(x, weight):
    x = x.half()
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return weight * x * torch.rsqrt(variance + 1e-6)
""",
        ),
        Good(
            """\
import torch

def fine(q, k, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        h = q @ k
        one = h.pow(2).mean(-1) + (h ** 2).mean()  # FP32 under CUDA's autocast
        two = h.float().var(-1)
    x = x.to(torch.float16)
    three = x.float().pow(2).mean(-1)
    return one, two, three, y.pow(2).mean(), x.mean(), (x * y).mean(), x.std()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for name in (*sorted(_MEANS), *sorted(_VARIANCES)):
            for call in facts.calls.get(name, ()):
                given = call.receiver if facts.precision.is_method(call) else call.argument(0, "input")
                squared = given if name in _VARIANCES else self._squared(given, facts)
                if squared is None or given is None or call.argument(None, "dtype") is not None:
                    continue
                found = facts.precision.low(given, call)
                if found is None:
                    continue
                half = found.dtype is Dtype.FP16
                yield self.at(
                    call,
                    dtype=found.label,
                    effect="they overflow from 256 on" if half else "they keep 8 bits",
                    notes=(Note("it has this dtype from here", found.origin.span),) if found.origin is not None else (),
                    fix=self._fix(squared, call),
                )

    def _squared(self, node: cst.BaseExpression | None, facts: Facts) -> cst.BaseExpression | None:
        """Return the operand if an expression is a square."""
        if isinstance(node, cst.BinaryOperation):
            if isinstance(node.operator, cst.Power) and constant(node.right) == (2,):
                return node.left
            same = isinstance(node.operator, cst.Multiply) and text_of(node.left) == text_of(node.right)
            return node.left if same else None
        call = facts.call_of(node)
        if call is None or call.name not in _SQUARES:
            return None
        method = facts.precision.is_method(call)
        power = call.argument(0 if method else 1, "exponent")
        if "pow" in call.name and (power is None or constant(power) not in ((2,), (2.0,))):
            return None
        return call.receiver if method else call.argument(0, "input")

    def _fix(self, squared: cst.BaseExpression, call: Call) -> Fix | None:
        if not dotted(squared) or isinstance(call.receiver, cst.BinaryOperation):
            return None
        return Fix("Compute in float32", "unsafe", (python_edits.after(squared, call, ".float()"),))
