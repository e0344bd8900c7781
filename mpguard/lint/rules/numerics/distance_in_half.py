from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Diagnostic, Facts, Note, Record, Rule, any_of, constant, dotted, dtype_triggers

_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "addmm_", "baddbmm")


class DistanceInHalf(Rule, form_of="MPG603"):
    """A squared distance that is trained is a difference with a matmul that is computed in FP16 or BF16.

    In `|x|^2 + |y|^2 - 2 * x @ y.T` of near vectors the terms cancel, and the rounding of the matmul is left: autocast
    computes the squares in FP32, but the matmul in 16 bits. Distances of 0 become 0.1, or negative: their root is NaN.

    Reported for a sum less twice a matmul, and for `addmm(..., alpha=-2)`, in a known dtype. What only looks for the
    nearest vector has no gradient, and is not reported.
    """

    message = "a squared distance is left of a matmul in {dtype}, whose rounding is larger than small distances"
    help = "use `torch.cdist`, or compute it in FP32: `x.float()` under `torch.autocast(..., enabled=False)`"
    triggers = (any_of(b"2 * ", b"2*", b"alpha=-2", b"-2,"), any_of(b"matmul(", b"mm(", b" @ ", b"mm_("))
    triggers_nearby = (any_of(*dtype_triggers.MENTIONS_LOW_PRECISION), any_of(b"backward("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        products: list[Record] = [call for name in _PRODUCTS for call in facts.calls.get(name, ())]
        products += [each for scope in facts.scopes for each in scope.products]
        for product in products:
            if facts.is_inference(product) or not _is_left_of_distance(product, facts):
                continue
            low = facts.precision.low(product.node, product)
            reach = facts.flow.forward(product.node, product, past_targets=False) if low is not None else None
            if low is not None and reach is not None and reach.training_sinks:
                origin = low.origin if low.origin is not None and low.origin.node is not product.node else None
                notes = (Note("from here", origin.span, facts.elsewhere(origin)),) if origin is not None else ()
                yield self.at(product, dtype=low.label, notes=notes)


def _is_left_of_distance(product: Record, facts: Facts) -> bool:
    """True if a sum less twice a matmul is computed: `a + b - 2 * x @ y.T`, or `addmm(a, x, y.T, alpha=-2)`."""
    call = facts.call_of(product.node) if isinstance(product.node, cst.Call) else None
    if call is not None and call.name.startswith(("addmm", "baddbmm")):
        return constant(call.keywords.get("alpha")) == (-2,) or [constant(each) for each in call.positional[:2]] == [
            (1,),
            (-2,),
        ]
    twice = product.node  # `(2 * x) @ y.T`
    if not (isinstance(twice, cst.BinaryOperation) and _is_double(twice.left)):
        above = facts.parent(product.node)
        if above is None or not _is_double(above):
            return False
        twice = above
    less = facts.parent(twice)
    if not isinstance(less, cst.BinaryOperation) or not isinstance(less.operator, cst.Subtract):
        return False
    is_sum = _is_sum(less.left) or any(_is_sum(each.value) for each in facts.bindings(dotted(less.left), product))
    return less.right is twice and is_sum


def _is_double(node: cst.CSTNode) -> bool:
    """True for `2 * x` and `x * 2`."""
    if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Multiply):
        return False
    return (2,) in (constant(node.left), constant(node.right))


def _is_sum(node: cst.CSTNode | None) -> bool:
    return isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add)
