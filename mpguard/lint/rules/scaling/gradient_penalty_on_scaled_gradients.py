from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Call,
    Diagnostic,
    Event,
    Facts,
    Note,
    Rule,
    Scope,
    any_of,
    constant,
    lazy_pattern,
)

#: Other names of the scale: `inv_scale`, `scaler._scale`.
_FACTOR = lazy_pattern(r"(?i)(?:inv|loss|grad|amp|fp16)\w*_scale(?!r)|^_scale$|unscale(?!_$)")


class GradientPenaltyOnScaledGradients(Rule, form_of="MPG215"):
    """`torch.autograd.grad` of a scaled loss, and the gradients are used without dividing by the scale.

    The gradients are larger than the true ones by the scale, 65536 at first: a penalty such as `(norm - 1) ** 2` then
    pulls towards gradients of 1/65536, and its size changes whenever the scale does. torch's AMP examples divide by
    `scaler.get_scale()` before they compute the penalty, and scale the sum again.

    Only calls with `create_graph=True`, which a penalty needs, and only if the output is known to be scaled. Any
    computation with the scale in the function, its class or its callers (`get_scale`, `inv_scale`) counts as the
    division; so does a call that takes both gradients and scaler. A scale that is only logged or compared does not,
    nor does one that is read once, when the module is imported or before the loop: the scaler changes its scale.
    """

    severity = "error"
    message = "`{expr}` gives scaled gradients, and nothing divides them by the scale"
    _old = "the scale is read once: the gradients are divided by another one after the scaler has changed it"
    _each_time = "read it next to the division: `1.0 / scaler.get_scale()`"
    help = "multiply them by `1.0 / scaler.get_scale()` before the penalty is computed"
    triggers = (any_of(b"autograd"), any_of(b".scale("), any_of(b"scaler", b"Scaler"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if not facts.events("scale"):
            return
        old: set[Event] = set()
        calls = (call for name in ("grad", *facts.aliases("grad")) for call in facts.calls.get(name, ()))
        for call in calls:
            if "torch.autograd.grad" not in (path for _, path in facts.paths(call)):
                continue
            if constant(call.keywords.get("create_graph")) != (True,):
                continue  # no penalty: the gradients may be passed to a `backward`, for example
            scale = facts.scalers.scale_of(call.argument(0, "outputs"), call)
            if scale is None or not facts.scalers.like_torch(scale.subject, scale.call):
                continue
            notes = (Note("the gradients are multiplied by it here", call.span),)
            for read in self._read_once(call, facts):
                if read not in old:
                    old.add(read)
                    yield self.at(read, message=self._old, help=self._each_time, notes=notes)
            if self._reads_scale(call, facts):
                continue
            yield self.at(call, expr=facts.short(call.func), notes=(Note("the output is scaled here", scale.span),))

    def _read_once(self, call: Call, facts: Facts) -> Iterator[Event]:
        """Yield the reads of the scale that run once, before what divides the gradients runs again and again."""
        for name in call.scope.uses:
            bindings = facts.bindings(name, call) if _FACTOR.search(name) else []
            for read in facts.events("get_scale") if len(bindings) == 1 else ():
                bound = bindings[0]
                imported = bound.scope.kind == "module" and call.scope.kind == "function" and not bound.loops
                before = bound.scope is call.scope and len(bound.loops) < len(call.loops)
                if (imported or before) and bound.kind == "assign" and read.call.statement is bound.statement:
                    yield read

    def _reads_scale(self, call: Call, facts: Facts) -> bool:
        """True if the code around the call reads the scale, or may divide the gradients elsewhere."""
        around: set[Scope] = {call.scope, *(caller.scope for caller in facts.callers(call.scope))}
        around |= set(call.scope.owner.descendants()) if call.scope.owner is not None else set()
        if any(
            event.scope in around and facts.traces.computes_with_scale(event.call)
            for event in facts.events("get_scale")
        ):
            return True
        return any(
            _FACTOR.search(use.path.rsplit(".", 1)[-1])
            for scope in around
            for uses in scope.uses.values()
            for use in uses
        ) or any(step.kind == "passed" and step.record.scope in around for trace in facts.traces.all for step in trace)
