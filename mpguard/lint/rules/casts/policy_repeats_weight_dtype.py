from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Call,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Note,
    Record,
    Rule,
    any_of,
    dotted,
)


class PolicyRepeatsWeightDtype(Rule, form_of="MPG107"):
    """FSDP2's mixed precision policy has the dtype that the weights have already.

    `param_dtype` is what FSDP casts its shards to for compute, so that the shards can be FP32 (torch 2.13). Where they
    have that dtype, nothing is mixed: the optimizer updates BF16 weights, with BF16 states, and an update below 2^-9 of
    a weight is lost.

    Not reported: frozen models and adapters, optimizers that are not torch's, and a policy in another file.
    """

    message = (
        "`{expr}` loads the weights in `{dtype}`, to which the policy casts them: FSDP trains without FP32 weights"
    )
    help = "load the weights in FP32: `MixedPrecisionPolicy(param_dtype=...)` casts them for compute"
    triggers = (
        any_of(b"MixedPrecisionPolicy"),
        any_of(b"from_pretrained(", b"from_config("),
        any_of(b"optim."),
        any_of(b".step("),
    )
    yields_to = ("MPG103", "MPG107", "MPG511")

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        policies = [event for event in facts.events("policy") if facts.called_path(event.call).endswith("Policy")]
        if not policies or facts.declared == "inference" or self._upcasts(facts):
            return
        optimized = self._optimized(facts)
        for shard in facts.events("shard"):
            model = shard.call.argument(0, "module")
            policy = self._policy(shard, policies, facts)
            if model is None or policy is None or dotted(model) not in optimized:
                continue
            records = set(facts.flow.backward(model, shard.call))
            for load in facts.events("load"):
                if load.call not in records or not self._same(load.call, policy, facts):
                    continue
                if facts.frozen_params.is_frozen_name(dotted(model)) or self._adapts(model, load, facts):
                    continue
                given = load.call.argument(None, "dtype", "torch_dtype")
                notes = (Note("the policy", policy.span), Note("trained with here", optimized[dotted(model)].span))
                yield self.at(load, expr=facts.short(load.call.func), dtype=facts.short(given), notes=notes)

    def _upcasts(self, facts: Facts) -> bool:
        casts = (event for event in facts.events("cast") if event.may_be(Dtype.FP32))
        return bool(facts.calls.get("float")) or any(facts.casts.is_module(event) for event in casts)

    def _adapts(self, model: cst.BaseExpression, load: Event, facts: Facts) -> bool:
        return facts.training_use.has_adapters(dotted(model), load.call)

    def _optimized(self, facts: Facts) -> dict[str, Call]:
        """Return the models whose parameters optimizers of torch take, each with the optimizer."""
        found: dict[str, Call] = {}
        for made in facts.optimizers.of_torch():
            given = made.argument(0, "params")
            takes = given.func if isinstance(given, cst.Call) else None
            if isinstance(takes, cst.Attribute) and takes.attr.value == "parameters":
                found[dotted(takes.value)] = made
        return found

    def _policy(self, shard: Event, policies: list[Event], facts: Facts) -> Call | None:
        """Return the policy that `fully_shard` takes, directly or in `**kwargs`."""
        given = shard.call.keywords.get("mp_policy")
        if given is not None:
            records: set[Record] = set(facts.flow.backward(given, shard.call))
            return next((event.call for event in policies if event.call in records), None)
        inside = [event.call for event in policies if event.call.scope is shard.call.scope]
        return inside[0] if shard.call.starred and len(inside) == 1 else None

    def _same(self, load: Call, policy: Call, facts: Facts) -> bool:
        """True if both have the same low dtype, or the same variable."""
        weights, compute = load.argument(None, "dtype", "torch_dtype"), policy.argument(0, "param_dtype")
        if weights is None or compute is None:
            return False
        first, second = (
            {dtype for _, dtype in facts.dtypes(each, at)} for each, at in ((weights, load), (compute, policy))
        )
        if first == second and len(first) == 1 and first <= set(HALF_DTYPES):
            return True
        name = dotted(weights)
        known = first == {Dtype.FP32} or not name or name != dotted(compute)
        same_place = load.scope is policy.scope or (name.startswith("self.") and load.scope.owner is policy.scope.owner)
        return not known and same_place and not name.startswith("torch.")
