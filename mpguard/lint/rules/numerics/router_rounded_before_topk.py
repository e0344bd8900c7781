from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Facts,
    Good,
    Note,
    Rule,
    any_of,
    dotted,
    lazy_pattern,
)

_SCORES = ("softmax", "sigmoid")
_ROUNDS = ("to", "type_as", "half", "bfloat16", "type")


class RouterRoundedBeforeTopk(Rule):
    """The probabilities of experts are computed in FP32, and rounded before `topk` chooses.

    ## What it does
    Reports a cast between a softmax or sigmoid that is computed in FP32 and the `topk` of its result: to FP16 or BF16,
    or to the dtype of the activations (`probs.to(x.dtype)`), in a file about experts or routers.

    ## Why is this bad
    The FP32 softmax is there so that close probabilities stay apart. BF16 has 8 bits: those that differ by less than
    0.4 % become equal, and `topk` sends tokens to other experts. Cast the chosen weights, after `topk`.

    ## Known limits
    A cast in another function is not seen.
    """

    code, name = "MPG617", "router-rounded-before-topk"
    severity = "warning"
    message = "`{cast}` rounds the probabilities of the experts before `topk` chooses: close ones become equal"
    help = "choose with the FP32 probabilities, and cast the chosen weights"
    triggers = (
        any_of(b"topk("),
        any_of(b"softmax(", b"sigmoid("),
        any_of(b"xpert", b"outer", b"moe", b"MoE"),
        any_of(b".float(", b"float32", b"torch.float"),
        any_of(b".dtype)", b".type_as(", b"float16", b".half(", b".bfloat16(", b"torch.half"),
    )
    #: Most routers choose before they round; a cast, then a choice soon after it, is rare.
    pattern = lazy_pattern(
        rb"(?:softmax|sigmoid)\([\s\S]{0,160}?%s(?:(?!softmax\()[\s\S]){0,200}?topk\(|topk\((?:[^()\n]|\([^()\n]*\)){0,120}?%s"
        % ((rb"\.(?:(?:to|type)\((?!(?:torch\.float(?:32)?|[\w.]*device)\))|(?:type_as|half|bfloat16)\()",) * 2)
    )
    examples = (
        Bad(
            """\
import torch
import torch.nn.functional as F

class Router(torch.nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.gate = torch.nn.Linear(dim, experts, bias=False)

    def forward(self, x):
        probs = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        probs = probs.to(x.dtype)  # !
        return torch.topk(probs, 2, dim=-1)
"""
        ),
        Good(
            """\
import torch
import torch.nn.functional as F

class Router(torch.nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.gate = torch.nn.Linear(dim, experts, bias=False)

    def forward(self, x):
        probs = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probs, 2, dim=-1)
        return weights.to(x.dtype), chosen
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for topk in facts.calls.get("topk", ()):
            of_torch = facts.called_path(topk).startswith("torch.")
            chosen = topk.argument(0, "input") if of_torch else topk.receiver
            if chosen is None or facts.is_inference(topk):
                continue
            above = [each for each in facts.flow.backward(chosen, topk) if isinstance(each, Call)]
            for cast in above:
                if cast.name in _ROUNDS and _rounds(cast, facts) and _of_fp32_scores(cast, facts):
                    yield self.at(
                        cast, cast=facts.short(cast.node), notes=(Note("experts are chosen here", topk.span),)
                    )
                    break


def _rounds(cast: Call, facts: Facts) -> bool:
    """True for a cast to a 16-bit dtype, or to that of another tensor."""
    if cast.name in ("half", "bfloat16", "type_as"):
        return True
    given = cast.argument(0, "dtype")
    if given is None:
        return False
    dtypes = {dtype for _, dtype in facts.dtypes(given, cast) if dtype is not None}
    return bool(dtypes & set(HALF_DTYPES)) or (not dtypes and dotted(given).endswith(".dtype"))


def _of_fp32_scores(cast: Call, facts: Facts) -> bool:
    """True if what is cast comes from a softmax or sigmoid of FP32 values."""
    if cast.receiver is None:
        return False
    scores = [each for each in facts.flow.backward(cast.receiver, cast) if isinstance(each, Call)]
    return any(each.name in _SCORES and _in_fp32(each, facts) for each in scores)


def _in_fp32(scores: Call, facts: Facts) -> bool:
    given = scores.argument(None, "dtype")
    if given is not None:
        return any(dtype is Dtype.FP32 for _, dtype in facts.dtypes(given, scores))
    value = scores.argument(0, "input") if facts.called_path(scores).startswith("torch.") else scores.receiver
    if value is None:
        return False
    above = [each for each in facts.flow.backward(value, scores) if isinstance(each, Call)]
    return any(each.name == "float" or _casts_to_fp32(each, facts) for each in above)


def _casts_to_fp32(call: Call, facts: Facts) -> bool:
    given = call.argument(0, "dtype") if call.name in ("to", "type") else None
    return given is not None and any(dtype is Dtype.FP32 for _, dtype in facts.dtypes(given, call))
