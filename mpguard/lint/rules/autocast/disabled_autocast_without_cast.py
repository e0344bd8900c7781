from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Bad, Call, Diagnostic, Facts, Good, Note, Rule, any_of, autocast_ops, constant
from mpguard.policy.dtype import Dtype

#: What is worth FP32: matrix products, and what autocast itself would run in FP32.
_WORK = autocast_ops.LOWERED | autocast_ops.FLOAT32_ON_CUDA


class DisabledAutocastWithoutCast(Rule):
    """Autocast is disabled around an operation, and its input is still in 16 bits.

    ## What it does
    Reports an input of a matrix product, a softmax, a loss and the like inside `autocast(enabled=False)`, where the
    input comes from matrix work of an autocast region further out, and is not cast.

    ## Why is this bad
    `enabled=False` casts nothing back: what the outer region made in FP16 or BF16 stays so, and without autocast the
    operation runs in the dtype of its input. A softmax or a loss that autocast would have run in FP32 runs in 16 bits
    then: less accurate than without the inner region.

    ## Known limits
    Preview: inputs that come from a module of the file's own are followed, those of unknown functions are not, and the
    rule found too little real code to be measured on. A call of the file's own function is taken to cast by itself.
    """

    code, name = "MPG307", "disabled-autocast-without-cast"
    severity = "warning"
    preview = True
    message = "`{value}` is still {dtype} here: `enabled=False` casts nothing back"
    help = "cast it: `.float()`"
    triggers = (any_of(b"autocast"), any_of(b"enabled=False", b"enabled = False", b"autocast(False"))
    examples = (
        Bad(
            """\
import torch
import torch.nn.functional as F

def loss(self, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = F.linear(x, self.weight)
        with torch.autocast("cuda", enabled=False):
            return F.cross_entropy(logits, y)  # !
"""
        ),
        Bad(
            """\
import torch

def attend(q, k, v):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = torch.matmul(q, k.transpose(-1, -2))
        with torch.autocast("cuda", enabled=False):
            weights = scores.softmax(-1)  # !
            out = torch.matmul(weights, v.float())
        return out
"""
        ),
        Good(
            """\
import torch
import torch.nn.functional as F

def loss(self, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = F.linear(x, self.weight)
        other = logits.float()
        with torch.autocast("cuda", enabled=False):
            first = F.cross_entropy(logits.float(), y)
            second = F.cross_entropy(other, y)
            third = torch.softmax(logits, -1, dtype=torch.float32)
            fourth = self.mine(logits)
            shape = logits.view(-1).shape
            logits = logits.to(torch.float32)
            fifth = F.cross_entropy(logits, y)
        with torch.autocast("cuda", enabled=self.amp):
            return F.cross_entropy(logits, y)

def plain(self, x, y):
    with torch.autocast("cuda", enabled=False):
        return F.cross_entropy(F.linear(x, self.weight), y)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        reported: set[object] = set()
        calls = (call for name in _WORK & facts.calls.keys() for call in facts.calls[name])
        for call in sorted(calls, key=lambda call: call.order):
            inner = self._disabled(call, facts)
            if inner is None or inner in reported or "dtype" in call.keywords:
                continue
            for value in self._inputs(call, facts):
                low = facts.precision.low(value, call)
                if low is not None and low.lowered and low.origin is not None:
                    reported.add(inner)
                    notes = (Note("made here", low.origin.span), Note("disabled here", inner.span))
                    yield self.at(
                        facts.span(value, call), value=facts.short(value), dtype=Dtype.label_of(low.dtype), notes=notes
                    )
                    break

    def _disabled(self, call: Call, facts: Facts) -> Call | None:
        """The innermost autocast around a call, where that is disabled."""
        regions = [region for region in facts.regions(call) if region.kind == "autocast"]
        inner = regions[-1].call if regions and not regions[-1].guard.possible else None
        return inner if inner is not None and constant(inner.keywords.get("enabled")) == (False,) else None

    def _inputs(self, call: Call, facts: Facts) -> list[cst.BaseExpression]:
        """The tensors of an operation of torch's: a function's arguments, a method's object."""
        if facts.called_path(call).startswith("torch."):
            return call.positional[:3]
        known = call.receiver is not None and not facts.paths(call) and not facts.functions(call)
        return [call.receiver] if known and call.receiver is not None else []
