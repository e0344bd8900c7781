from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    MENTIONS_LOW_PRECISION,
    NUMBER,
    Bad,
    Binding,
    Call,
    Diagnostic,
    Facts,
    Good,
    Note,
    Rule,
    TensorDtype,
    any_of,
    constant,
    dotted,
    lazy_pattern,
)

#: Iterables of a loop over steps. A loop over layers or experts adds only a few terms.
_STEPS = lazy_pattern(r"loader|Loader|batches|dataset|steps|epoch|_iter")
_KINDS = lazy_pattern(
    r"(?i)(?:^|_)(?:loss|losses|total|sum|acc|accuracy|correct|running|metric|count|avg|mean|error|score)s?(?:_|$)"
)


class AccumulateInHalf(Rule):
    """A loss, metric or sum is accumulated over steps in FP16 or BF16.

    ## What it does
    Reports scalars that are zero before a loop over batches or steps and grow in it by `+=`, if they are FP16 or BF16:
    created in that dtype, or promoted to it by adding to a plain 0.

    ## Why is this bad
    A sum stops growing when the next term is less than half of its last bit. Adding 0.5 ten thousand times gives 1024
    in FP16 and 128 in BF16, not 5000. An average loss over an epoch is then far too low.

    ## Known limits
    Tensors of unknown dtype are not reported, nor are sums of `loss.item()` and `loss.float()`, nor loops over layers,
    experts or tiles, which add few terms.
    """

    code, name = "MPG604", "accumulate-in-half"
    severity = "warning"
    message = "`{key}` is accumulated over steps in {dtype}: the sum stops growing"
    help = "Accumulate in float32, or as a Python number (`.item()`)"
    triggers = (
        any_of(*MENTIONS_LOW_PRECISION),
        any_of(b"loader", b"Loader", b"batches", b"dataset", b"steps", b"epoch", b"_iter"),
        any_of(b"loss", b"total", b"sum", b"acc", b"correct", b"running", b"metric", b"count", b"avg", b"mean",
               b"error", b"score", b"zeros", b"tensor("),
        any_of(b"+= ", b" + "),
    )  # fmt: skip
    #: A loop over steps: up to the end of its header, which the bound keeps from taking quadratic time.
    pattern = lazy_pattern(rb"for\b(?<!\wfor)(?:(?!:[ \t]*[\r\n])[\s\S]){0,400}?(?:%s)" % _STEPS.pattern.encode())
    examples = (
        Bad(
            """\
import torch

def validate(model, loader):
    total = torch.zeros((), dtype=torch.float16, device="cuda")
    for x, y in loader:
        total += model(x, y)  # !
    return total / len(loader)
"""
        ),
        Bad(
            """\
import torch

def train(model, head, loader, optimizer, steps):
    running_loss, seen = 0.0, 0
    correct = torch.tensor(0, dtype=torch.bfloat16)
    for epoch in range(3):
        for x, y in loader:
            loss = model(x).half().mean()
            loss.backward()
            optimizer.step()
            running_loss += loss.detach()  # !
            correct = correct + (model(x) == y).sum().bfloat16()  # !
            total_norm = torch.zeros(1).half()
    return running_loss
"""
        ),
        Good(
            """\
import torch

def train(model, layers, loader, optimizer):
    running = 0.0
    total = torch.zeros((), dtype=torch.float16)
    total_loss = torch.zeros(())
    for x, y in loader:
        loss = model(x).half().mean()
        loss.backward()
        optimizer.step()
        running += loss.item()
        total_loss += loss
        out = 0
        for layer in layers:
            out += layer(x).half()
        total = total.float() + loss
        step_loss = torch.zeros((), dtype=torch.float16)
        step_loss += loss
    return running

def experts(x, layers):
    out = torch.zeros(4, 4, dtype=torch.bfloat16)
    for layer in layers:
        out += layer(x)
    return out

def features(model, loader):
    feats = torch.zeros(100, 512, dtype=torch.float16)
    for x in loader:
        feats += model(x)
    return feats
"""
        ),
        Good(
            """\
import contextlib

import torch

def validate(args, model, loader, labels):
    autocast = torch.cuda.amp.autocast if args.precision == "amp" else contextlib.suppress
    cumulative_loss = 0.0
    for x in loader:
        with autocast():
            a, b = model(x)
            logits = a @ b.t()
            loss = torch.nn.functional.cross_entropy(logits, labels)
        cumulative_loss += loss * len(x)
    return cumulative_loss
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        facts.need_all()
        for scope in facts.scopes:
            for key, bindings in scope.bindings.items():
                for binding in bindings:
                    added = self._added(binding, key)
                    if added is None or not binding.loops:
                        continue
                    found = self._grows(binding, bindings, added, facts)
                    if found is not None:
                        notes = (
                            (Note("it has this dtype from here", found.origin.span),)
                            if found.origin is not None
                            else ()
                        )
                        yield self.at(
                            facts.span(binding.statement, binding) if binding.statement is not None else binding,
                            key=key,
                            dtype=found.label,
                            notes=notes,
                        )

    def _added(self, binding: Binding, key: str) -> cst.BaseExpression | None:
        """Return the added term of `total += x` or `total = total + x`."""
        node = binding.node
        if binding.kind == "augmented" and isinstance(node, cst.AugAssign):
            return node.value if isinstance(node.operator, cst.AddAssign) else None
        value = binding.value
        if binding.kind == "assign" and isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add):
            if dotted(value.left) == key:
                return value.right
            if dotted(value.right) == key:
                return value.left
        return None

    def _grows(
        self, binding: Binding, bindings: list[Binding], added: cst.BaseExpression, facts: Facts
    ) -> TensorDtype | None:
        """Return the low dtype in which a sum grows over the steps of a loop around it."""
        begins = [
            b for b in bindings if b.order < binding.order and b.kind in ("assign", "element") and b is not binding
        ]
        begin = self._single(begins[-1]) if begins else None
        if begin is None or not set(begin.loops) < set(binding.loops):
            return None
        if not any(self._is_step_loop(loop, facts) for loop in binding.loops if loop not in begin.loops):
            return None
        first = facts.precision.of(begin.value, begin)
        if any(each.dtype == NUMBER for each in first):
            named = _KINDS.search(binding.key.rsplit(".", 1)[-1])
            return facts.precision.low(added, binding) if named and self._is_zero(begin, facts) else None
        if not self._is_scalar(begin.value, facts):
            return None
        if binding.kind == "augmented":  # in place: the sum keeps its dtype
            return facts.precision.low(begin.value, begin)
        return facts.precision.low(binding.value, binding)

    def _single(self, begin: Binding) -> Binding | None:
        """Return a binding with its own value: `0.0` for `loss` in `loss, steps = 0.0, 0`."""
        if begin.kind == "assign":
            return begin
        value, place = begin.value, begin.index[0]
        if not isinstance(value, (cst.Tuple, cst.List)) or place >= len(value.elements) or len(begin.index) > 1:
            return None
        return dataclasses.replace(begin, kind="assign", value=value.elements[place].value, index=())

    def _is_step_loop(self, loop: cst.CSTNode, facts: Facts) -> bool:
        return isinstance(loop, cst.For) and bool(_STEPS.search(facts.short(loop.iter)))

    def _is_zero(self, begin: Binding, facts: Facts) -> bool:
        number = facts.scalars.number(begin.value, begin)
        return (number is not None and number.value == 0) or self._is_scalar(begin.value, facts)

    def _is_scalar(self, node: cst.BaseExpression | None, facts: Facts) -> bool:
        """True for a new tensor of one element: `torch.zeros(1)`, `torch.tensor(0.)`, also cast or moved."""
        call: Call | None = facts.call_of(node)
        while call is not None and call.receiver is not None and facts.precision.is_method(call):
            call = facts.call_of(call.receiver)
        if call is None:
            return False
        if call.name in ("tensor", "scalar_tensor"):
            return constant(call.argument(0, "data")) is not None
        shape = call.argument(0, "size") if call.name in ("zeros", "full") and len(call.positional) < 3 else None
        if isinstance(shape, (cst.Tuple, cst.List)):
            return all(constant(element.value) == (1,) for element in shape.elements)
        return constant(shape) == (1,)
