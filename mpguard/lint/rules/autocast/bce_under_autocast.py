from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Facts,
    Fix,
    Note,
    Object,
    PathCondition,
    Ref,
    Rule,
    any_of,
    python_edits,
)

_FUNCTION = "torch.nn.functional.binary_cross_entropy"
_LOSSES = frozenset({"torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss"})


class BceUnderAutocast(Rule):
    """`binary_cross_entropy` or `BCELoss` inside a `"cuda"` autocast region.

    ## What it does
    Reports the call inside an enabled autocast for `"cuda"`: one of the same function or, if that has none, one around
    a call of the function.

    ## Why is this bad
    The call raises: "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast" (seen with
    torch 2.11 on an H100, in FP16 and BF16, for inputs of every dtype). The gradient of the logarithm near 0 and 1 does
    not fit into 16 bits. The form with logits is computed stably, and autocast runs it in FP32.

    ## Fix safety
    Unsafe. There is a fix only for `binary_cross_entropy(torch.sigmoid(x), y)`, which becomes
    `binary_cross_entropy_with_logits(x, y)`: the loss of saturated outputs changes, since `binary_cross_entropy` clamps
    the logarithm at -100.

    ## Known limits
    Calls inside `autocast("cuda", enabled=False)` with FP32 inputs are correct and not reported. CPU autocast does not
    raise (torch 2.13), nor does a `"cuda"` region around tensors on the CPU. A loss that is imported or passed in is
    unknown.
    """

    code, name = "MPG306", "bce-under-autocast"
    severity = "error"
    in_tests = True
    message = "`{call}` raises under autocast"
    help = "use the form that takes logits, or compute the loss in FP32 under autocast(enabled=False)"
    triggers = (any_of(b"BCELoss", b"binary_cross_entropy"),)
    triggers_nearby = (any_of(b"autocast"),)
    examples = (
        Bad(
            """\
import torch
import torch.nn.functional as F

with torch.autocast("cuda", dtype=torch.float16):
    loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)  # !
    loss += F.binary_cross_entropy(model(x).sigmoid(), y, reduction="sum")  # !
""",
            fixed="""\
import torch
import torch.nn.functional as F

with torch.autocast("cuda", dtype=torch.float16):
    loss = F.binary_cross_entropy_with_logits(model(x), y)
    loss += F.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call, guard in self._losses(facts):
            for region, inside in facts.autocasts(call):
                if region.device != "cuda" or region.call is None or facts.off_by_default(region):
                    continue
                if inside.joined(guard).possible:
                    notes = (Note("the region", region.call.span, facts.elsewhere(region.call)),)
                    yield self.at(call, call=facts.short(call.node), notes=notes, fix=self._fix(call, facts))
                    break

    def _losses(self, facts: Facts) -> Iterator[tuple[Call, PathCondition]]:
        """Yield the calls of the loss, each with the guard under which it is this loss."""
        for calls in facts.calls.values():
            for call in calls:
                for each in facts.evaluate(call.func, call):
                    atom = each.atom
                    function = isinstance(atom, Ref) and atom.path == _FUNCTION
                    if function or (isinstance(atom, Object) and atom.path in _LOSSES):
                        yield call, each.guard
                        break

    def _fix(self, call: Call, facts: Facts) -> Fix | None:
        given = call.argument(0, "input")
        sigmoid = facts.call_of(given) if isinstance(given, cst.Call) else None
        if call.name != "binary_cross_entropy" or call.receiver is None or sigmoid is None or call.starred:
            return None
        if sigmoid.name != "sigmoid" or "weight" in call.keywords:
            return None
        function = facts.called_path(sigmoid).startswith("torch.")
        logits = sigmoid.argument(0, "input") if function else sigmoid.receiver
        if logits is None or len(sigmoid.node.args) != (1 if function else 0):
            return None
        return Fix(
            "Compute it from the logits",
            "unsafe",
            (
                python_edits.after(call.func, call, "_with_logits"),
                python_edits.replaced(sigmoid.node, sigmoid, facts.text(logits, sigmoid)),
            ),
        )
