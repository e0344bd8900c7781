from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Bad, Call, Diagnostic, Facts, Good, Note, Rule, any_of, autocast_ops, constant

#: Operations that a region disables autocast for: matmuls, and those that autocast runs in FP32.
_OPERATIONS = autocast_ops.LOWERED | autocast_ops.FLOAT32_ON_CUDA


class DisabledAutocastWithoutCast(Rule):
    """Autocast is disabled around an operation, but its input is still in 16 bits.

    ## What it does
    Reports an input of a matmul, a softmax, a loss and similar operations inside `autocast(enabled=False)`, if
    the input is the result of matmuls in an outer autocast region and is not cast.

    ## Why is this bad
    `enabled=False` casts nothing back: tensors that the outer region computed in FP16 or BF16 keep that dtype, and
    without autocast the operation runs in the dtype of its input. A softmax or a loss that autocast would have run in
    FP32 then runs in 16 bits, less accurately than without the inner region.

    ## Known limits
    Preview: too little real code was found to measure the rule on. Inputs from modules of the same file are followed,
    those from unknown functions are not. A function of the same file is assumed to cast its inputs itself.
    """

    code, name = "MPG307", "disabled-autocast-without-cast"
    severity = "warning"
    preview = True
    message = "`{value}` is still {dtype} here: `enabled=False` casts nothing back"
    help = "cast it with `.float()`"
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
        calls = (call for name in _OPERATIONS & facts.calls.keys() for call in facts.calls[name])
        for call in sorted(calls, key=lambda call: call.order):
            inner = self._disabled(call, facts)
            if inner is None or inner in reported or "dtype" in call.keywords:
                continue
            for value in self._inputs(call, facts):
                low = facts.precision.low(value, call)
                if low is not None and low.by_autocast and low.origin is not None:
                    reported.add(inner)
                    notes = (Note("computed here", low.origin.span), Note("disabled here", inner.span))
                    yield self.at(facts.span(value, call), value=facts.short(value), dtype=low.label, notes=notes)
                    break

    def _disabled(self, call: Call, facts: Facts) -> Call | None:
        """Return the innermost autocast around a call if it is disabled."""
        regions = [region for region in facts.regions(call) if region.kind == "autocast"]
        inner = regions[-1].call if regions and not regions[-1].guard.possible else None
        return inner if inner is not None and constant(inner.keywords.get("enabled")) == (False,) else None

    def _inputs(self, call: Call, facts: Facts) -> list[cst.BaseExpression]:
        """Return the input tensors of a torch operation: arguments of a function, receiver of a method."""
        if facts.called_path(call).startswith("torch."):
            return call.positional[:3]
        known = call.receiver is not None and not facts.paths(call) and not facts.functions(call)
        return [call.receiver] if known and call.receiver is not None else []
