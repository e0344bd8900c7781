from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Binding,
    Diagnostic,
    Event,
    Facts,
    Good,
    Rule,
    any_of,
    dotted,
    fp8_facts,
    lazy_pattern,
    text_of,
)

#: Names that show that the code applies a scale or limits the range.
_SCALES = lazy_pattern(r"(?i)scale|amax|absmax|quant|clamp|clip|448|57344|finfo|fp8_max")
_PARTS = frozenset({"parameters", "named_parameters"})


class RawFloat8Cast(Rule):
    """Weights or gradients are cast to float8 without a scale.

    ## What it does
    Reports `.to(torch.float8_e4m3fn)` (and E5M2) of a layer's weight, of a model's parameters in a loop, or of a
    gradient, in a function that mentions no scale.

    ## Why is this bad
    E4M3 ends at 448 and has no infinity; below 2^-6 it loses bits, and below 2^-10 all of them. Of normally distributed
    weights with a standard deviation of 0.02 more than half are below 2^-6 and one in 26 becomes zero: the mean
    relative error is 10 %, as against 2 % with a scale (computed with torch 2.13). FP8 recipes divide by a scale first,
    so that the largest value maps to the end of the range, and store the scale next to the tensor.

    ## Known limits
    Tensors of unknown origin are not checked, nor are computed values, which may have been scaled before. If a layer
    stores float8 on purpose (layerwise casting), suppress the finding.
    """

    code, name = "MPG415", "raw-float8-cast"
    severity = "warning"
    message = "`{subject}` is cast to {dtype} without a scale"
    help = "divide by a scale that maps the largest value to the end of the range, and keep the scale"
    triggers = (
        any_of(b".float8_e", b"import float8_e"),
        any_of(b".to(", b".type("),
        any_of(b".weight.", b".grad.", b"parameters("),
    )
    examples = (
        Bad(
            """\
import torch

def shrink(model):
    for p in model.parameters():
        p.data = p.data.to(torch.float8_e4m3fn)  # !

def one(layer):
    return layer.weight.to(torch.float8_e4m3fn)  # !

net = torch.nn.Linear(64, 64)
grad = net.weight.grad.to(torch.float8_e5m2)  # !
"""
        ),
        Good(
            """\
import torch

def scaled(layer):
    scale = layer.weight.abs().max() / 448
    return (layer.weight / scale).to(torch.float8_e4m3fn), scale
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for cast in facts.events("cast"):
            dtype = fp8_facts.only_float8(cast.dtypes)
            if dtype is None or cast.subject is None:
                continue
            if self._is_unscaled(cast, facts) and not self._mentions_scale(cast):
                yield self.at(cast, subject=facts.short(cast.subject), dtype=f"torch.{dtype.torch_name}")

    def _is_unscaled(self, cast: Event, facts: Facts) -> bool:
        """True if the cast value is a weight, a gradient, or a parameter in a loop."""
        subject = cast.subject
        path = dotted(subject)
        while path.endswith((".data", ".detach")):
            path = path.rpartition(".")[0]
        if path.endswith((".weight", ".grad")):
            return True
        for binding in facts.bindings(path, cast.call) if path and "." not in path else ():
            if self._is_parameter(binding):
                return True
        return False

    def _is_parameter(self, binding: Binding) -> bool:
        over = binding.value
        return binding.kind == "for" and isinstance(over, cst.Call) and dotted(over.func).rsplit(".", 1)[-1] in _PARTS

    def _mentions_scale(self, cast: Event) -> bool:
        """True if a name in the function or its class refers to a scale."""
        places = [scope for scope in cast.scope.within() if scope.kind != "module"] or [cast.scope]
        for scope in places:
            if _SCALES.search(scope.name):
                return True
            if any(_SCALES.search(key) for key in scope.bindings):
                return True
            if any(_SCALES.search(use.path) for uses in scope.uses.values() for use in uses):
                return True
            if any(call.path == "setattr" and _SCALES.search(text_of(call.node)) for call in scope.calls):
                return True
        return False
