from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Binding,
    Call,
    Diagnostic,
    Dtype,
    Facts,
    Note,
    Record,
    Rule,
    any_of,
    constant,
    dotted,
    lazy_pattern,
    text_of,
)

_MAKES = frozenset({"zeros", "new_zeros", "tensor", "new_tensor", "zeros_like"})
_SCALAR = ("()", "[]", "1", "(1,)", "[1]", "0", "0.0", "0.")
_COUNTS = (".numel()", ".size(0)", ".shape[0]")


class SumInHalf(Rule, form_of="MPG109"):
    """A count is summed in FP16 or BF16: it stops growing.

    BF16 holds integers up to 256 exactly, and FP16 up to 2048; beyond, what is added is rounded, and lost in the end:
    390 batches with 103 hits each are 32,768 in BF16, and not 40,170. `x.new_zeros(())` and `torch.zeros_like(loss)`
    have the dtype of the tensor, and `+=` keeps it.

    Reported for numbers of elements, and sums of comparisons, that a loop adds to one number.
    """

    severity = "warning"
    message = "`{text}` counts in {dtype}, which holds integers exactly up to {exact} only"
    help = "count in int64 or float32: `torch.zeros((), dtype=torch.long)`"
    triggers = (
        any_of(b"zeros((", b"new_zeros(", b"zeros(1", b"zeros([", b"zeros_like(", b"tensor(0", b"tensor([0"),
        any_of(b"+="),
    )
    pattern = lazy_pattern(rb"\+=[^\n]*\.(?:sum\(|numel\(|size\(0\)|shape\[0\])")

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for scope in facts.scopes:
            for key, bindings in scope.bindings.items():
                for added in (each for each in bindings if each.kind == "augmented"):
                    repeated = added.loops or any(call.loops for call in facts.callers(scope))
                    if not repeated or not self._is_count(added, facts) or "+=" not in facts.short(added.statement):
                        continue
                    of_object = scope.owner is not None and key.startswith("self.")
                    made = facts.attributes(scope.owner).get(key[5:], []) if of_object and scope.owner else bindings
                    first = [each for each in made if each.kind == "assign" and _is_before(each, added)]
                    found = {_dtype(each, facts) for each in first}
                    dtype = found.pop() if len(found) == 1 else None
                    if dtype is not None and first[0].value is not None:
                        notes = (Note("created here", facts.span(first[0].value, first[0])),)
                        exact, text = (256 if dtype is Dtype.BF16 else 2048), facts.short(added.statement)
                        yield self.at(added, text=text, dtype=dtype.label, exact=exact, notes=notes)

    def _is_count(self, added: Binding, facts: Facts) -> bool:
        """True if what is added is a number of elements, or a sum of ones."""
        if added.value is not None and text_of(added.value).endswith(_COUNTS):
            return True
        call = facts.call_of(added.value)
        if call is None or call.name != "sum" or call.positional or call.receiver is None:
            return False
        node = call.receiver
        while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):  # (a == b).float()
            node = node.func.value
        bound = facts.bindings(text_of(node), call) if isinstance(node, cst.Name) else []
        return isinstance(bound[0].value if len(bound) == 1 else node, cst.Comparison)


def _is_before(first: Binding, added: Binding) -> bool:
    """True if a binding creates what a loop adds to: outside of it, or under a condition, as `if total is None`."""
    again = bool(added.loops) and set(first.loops) >= set(added.loops) and not first.guard - added.guard
    return not again and constant(first.value) != (None,)


def _dtype(binding: Binding, facts: Facts) -> Dtype | None:
    """Return the low dtype of a single number that a binding creates, or None."""
    call = facts.call_of(binding.value)
    if call is None or call.name not in _MAKES:
        return None
    size = text_of(call.positional[0]) if call.positional else ""
    if call.name == "zeros_like":
        like = facts.call_of(call.positional[0]) if call.positional else None
        if like is None or like.name not in ("sum", "mean") or like.positional:
            return None
    elif size not in _SCALAR or (call.name in ("tensor", "new_tensor") and constant(call.positional[0]) is None):
        return None
    known = {each.dtype for each in facts.precision.of(call.node, call)}
    if len(known) == 1 and (found := known.pop()) in HALF_DTYPES:
        return found
    is_like = call.name.startswith("new_") and "dtype" not in call.keywords
    of_model = set(_of_model(call.receiver, call, facts)) if is_like else set()
    return of_model.pop() if len(of_model) == 1 else None


def _of_model(node: cst.CSTNode | None, at: Record, facts: Facts, depth: int = 5) -> Iterator[Dtype]:
    """Yield the low dtypes of what a model computes that is cast to it as a whole."""
    if (call := facts.call_of(node)) is not None:
        yield from _casts(call.path, call, facts)
    for binding in facts.bindings(dotted(node), at) if call is None and dotted(node) and depth else ():
        if binding.kind == "assign":
            yield from _of_model(binding.value, binding, facts, depth - 1)
        for given in facts.callers(binding.scope) if binding.kind == "param" else ():
            yield from _of_model(facts.argument_for(given, binding), given, facts.of(given), depth - 1)


def _casts(key: str, at: Record, facts: Facts, depth: int = 4) -> Iterator[Dtype]:
    """Yield the low dtypes to which the model of a name is cast, where it is created."""
    bindings = facts.bindings(key, at) if key and depth else []
    for event in facts.events("cast") if bindings else ():
        bound = facts.bound_to(event.call)
        if facts.casts.is_module(event) and (bound in bindings or (bound is None and event.key == key)):
            yield from (dtype for dtype in HALF_DTYPES if event.may_be(dtype) and len(event.dtypes) == 1)
    for binding in bindings if len(bindings) == 1 and bindings[0].kind == "param" else ():
        found: list[Call] = []
        for other in facts.project.all_users_of(facts.path, binding.scope.name) or ():  # evaluation trains nothing
            other.need_all()
            found += [call for call in other.calls.get(binding.scope.name, ()) if call.receiver is None]
        for call in facts.callers(binding.scope) or found:
            yield from _casts(dotted(facts.argument_for(call, binding)), call, facts.of(call), depth - 1)
