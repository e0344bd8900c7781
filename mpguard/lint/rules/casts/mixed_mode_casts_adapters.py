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
    constant,
    dotted,
)


class MixedModeCastsAdapters(Rule, form_of="MPG107"):
    """A mixed precision mode casts a model to the low dtype, with the adapters that train.

    In a mixed mode the weights that train are FP32, and autocast computes in the low dtype. `get_peft_model` makes FP32
    adapters (peft 0.21); the cast takes that back: an update below 2^-9 (BF16) of a weight is lost, and a GradScaler
    refuses FP16 gradients.

    Not reported: casts before the adapters are added, and files that cast trained parameters to FP32 again.
    """

    message = "under `{mode}` `{cast}` makes the adapters that train {dtype}: a mixed mode keeps them in FP32"
    help = "cast the model before `get_peft_model`, or only the parameters without `requires_grad`"
    triggers = (any_of(b"get_peft_model("), any_of(b"mixed"), any_of(b"float16"), any_of(b".to("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        adapts = facts.calls.get("get_peft_model", ())
        upcasts = (*facts.calls.get("float", ()), *facts.calls.get("cast_training_params", ()))
        if facts.declared == "inference" or upcasts:
            return
        for cast in facts.events("cast"):
            added = next((call for call in adapts if self._is_adapted(call, cast)), None)
            mode = self._mode(cast, facts) if added is not None else None
            if added is not None and mode is not None and not facts.is_inference(cast.call):
                notes = (Note("the adapters are added here", added.span),)
                text = facts.short(cast.call.node)
                yield self.at(cast, mode=mode[0], cast=text, dtype=mode[1].label, notes=notes)

    def _is_adapted(self, call: Call, cast: Event) -> bool:
        """True if the model that is cast is what a call of `get_peft_model` returned before."""
        statement = call.statement
        targets = [dotted(each.target) for each in statement.targets] if isinstance(statement, cst.Assign) else []
        near = call.scope is cast.scope or (cast.key.startswith("self.") and call.scope.owner is cast.scope.owner)
        return bool(cast.key) and cast.key in targets and near and call.order < cast.order

    def _mode(self, cast: Event, facts: Facts) -> tuple[str, Dtype] | None:
        """Return a mixed mode for which a cast has a low dtype, and the dtype, from the dict that gives it."""
        given = (cast.call.keywords.get("dtype"), *cast.call.positional)
        for node in given:
            if isinstance(node, cst.Subscript):
                for table in self._tables(node.value, cast.call, facts):
                    for each in table.elements:
                        key = constant(each.key) if isinstance(each, cst.DictElement) else None
                        dtypes = {dtype for _, dtype in facts.dtypes(each.value, cast.call)}
                        low = next((dtype for dtype in HALF_DTYPES if dtypes == {dtype}), None)
                        if key is not None and "mixed" in str(key[0]) and low is not None:
                            return str(key[0]), low
        return None

    def _tables(self, node: cst.BaseExpression, at: Record, facts: Facts) -> Iterator[cst.Dict]:
        values = [node] if isinstance(node, cst.Dict) else [each.value for each in facts.bindings(dotted(node), at)]
        yield from (each for each in values if isinstance(each, cst.Dict))
