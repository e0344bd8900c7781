from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Binding,
    Call,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    Record,
    Rule,
    any_of,
    compatible,
    constant,
    dotted,
    lazy_pattern,
    trace_facts,
)

#: Names of a factor that scales a loss against underflow (not one for ranks or for accumulation).
_SCALE = lazy_pattern(r"(?i)(?:loss|grad|amp|fp16|static|dynamic)_?scal(?:e|ing)|^scal(?:e|ing)(?:_?factor)?$")
#: The smallest constant that is taken for a loss scale.
_SMALLEST_SCALE = 8
_DIVIDES, _MULTIPLIES = frozenset({"div_", "div", "divide_"}), frozenset({"mul_", "mul", "multiply_"})
_GRAD = lazy_pattern(r"\.grad(?:\.data)?$")


class HandWrittenLossScaling(Rule):
    """A loss is multiplied by a constant before `backward`, and the gradients are divided by it again.

    ## What it does
    Reports `(loss * 1024).backward()` if the gradients (`p.grad`) are divided by the same constant, or by the same name
    of a loss scale.

    ## Why is this bad
    The largest FP16 number is 65504: a scale that fits at the start overflows or underflows later. Hand-written scaling
    does not detect an infinite gradient, skip its step, or adapt the scale; `torch.amp.GradScaler` does all three.

    ## Known limits
    Both the multiplication and the division must be in the file and name the same factor. Optimizers that keep FP32
    masters of FP16 weights scale by themselves and are not reported. Constants below 8 are taken for weights of a loss.
    A function that checks for overflows itself is not reported: it does what a GradScaler does.
    Neither is a class with a base of another library: such a hook runs only where a config of that library names it,
    and most published ones (for an old mmcv) are not run any more.
    """

    code, name = "MPG212", "hand-written-loss-scaling"
    severity = "warning"
    message = "the loss is scaled by hand with `{factor}`, and nothing checks for overflows"
    help = "use `torch.amp.GradScaler`: it skips the steps that overflow, and adapts the scale"
    triggers = (any_of(b".backward("), any_of(b".grad"), any_of(b"*", b".mul(", b".mul_("))
    examples = (
        Bad(
            """\
import torch

for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    (loss * 1024).backward()  # !
    for p in model.parameters():
        p.grad /= 1024
    optimizer.step()
"""
        ),
        Good(
            """\
import torch
import torch.distributed as dist

def accumulated(args, model, loader, optimizer):
    for x in loader:
        (model(x) / args.accumulate).backward()
        optimizer.step()

def weighted(model, loader, optimizer):
    for x in loader:
        (model(x) * 100).backward()
        for p in model.parameters():
            p.grad /= 8
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        divisions = list(self._divisions(facts))
        if not divisions or facts.may_keep_masters:
            return
        for backward in facts.events("backward"):
            if facts.is_inference(backward.call) or self._checks_overflows(backward):
                continue
            if facts.base_unknown(backward.scope.owner):
                continue
            for factor in self._factors(backward, facts):
                undone = next(
                    (at for text, at in divisions if text == factor and compatible(facts.guard_of(at), backward.guard)),
                    None,
                )
                if undone is not None:
                    notes = (Note("the gradients are divided here", undone.span),)
                    yield self.at(backward, factor=factor, notes=notes)
                    break

    def _checks_overflows(self, backward: Event) -> bool:
        """True if the function of a backward pass checks for overflows."""
        return any(trace_facts.CHECKS.search(call.name) for call in backward.scope.calls)

    def _factors(self, backward: Event, facts: Facts) -> Iterator[str]:
        """Yield the factors of the loss that may be a loss scale."""
        assert backward.subject is not None
        expressions: list[cst.CSTNode] = [backward.subject]
        for record in facts.flow.backward(backward.subject, backward.call, depth=0):
            if isinstance(record, Binding) and record.value is not None and record.scope is backward.scope:
                expressions.append(record.value)
        for node in expressions:
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
                for side in (node.left, node.right):
                    if self._is_scale(side):
                        yield facts.short(side)
            elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
                given = node.args[0].value if node.args and node.func.attr.value in _MULTIPLIES else None
                if given is not None and self._is_scale(given):
                    yield facts.short(given)

    def _is_scale(self, node: cst.CSTNode) -> bool:
        literal = constant(node)
        if literal is not None:
            return isinstance(literal[0], (int, float)) and literal[0] >= _SMALLEST_SCALE
        return bool(_SCALE.search(dotted(node).rsplit(".", 1)[-1]))

    def _divisions(self, facts: Facts) -> Iterator[tuple[str, Record]]:
        """Yield what gradients are divided by, in place or by assignment."""
        for scope in facts.scopes:
            for key, bindings in scope.bindings.items():
                if not _GRAD.search(key):
                    continue
                for binding in bindings:
                    value = binding.value
                    if isinstance(binding.node, cst.AugAssign) and value is not None:
                        operator = binding.node.operator
                        if isinstance(operator, cst.DivideAssign):
                            yield facts.short(value), binding
                        elif isinstance(operator, cst.MultiplyAssign) and (inverse := self._inverse(value, facts)):
                            yield inverse, binding
                    elif (
                        isinstance(value, cst.BinaryOperation)
                        and isinstance(value.operator, cst.Divide)
                        and _GRAD.search(dotted(value.left))
                    ):
                        yield facts.short(value.right), binding
        for name in _DIVIDES | _MULTIPLIES:
            for call in facts.calls.get(name, ()):
                if _GRAD.search(dotted(call.receiver)) and call.positional:
                    yield from self._divided(call, facts)

    def _divided(self, call: Call, facts: Facts) -> Iterator[tuple[str, Record]]:
        given = call.positional[0]
        if call.name in _DIVIDES:
            yield facts.short(given), call
        elif inverse := self._inverse(given, facts):
            yield inverse, call

    def _inverse(self, node: cst.CSTNode, facts: Facts) -> str:
        """Return the divisor of `1 / x`; empty for any other expression."""
        if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Divide):
            return ""
        return facts.short(node.right) if constant(node.left) in ((1,), (1.0,)) else ""
