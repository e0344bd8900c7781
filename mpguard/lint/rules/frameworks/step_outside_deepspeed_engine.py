from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Call,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Note,
    Rule,
    Wrap,
    any_of,
    compatible,
    dotted,
    python_edits,
    wrappers,
)

_DEPTH = 4


class StepOutsideDeepspeedEngine(Rule, form_of="MPG501"):
    """The client optimizer steps, or the loss runs backward, without the DeepSpeed engine.

    Tried with DeepSpeed 0.19.8: under BF16 at stage 0, and at ZeRO 1 and 2 in FP32 and BF16, the client optimizer has
    gradients that are never filled: its step changes no weight, and nothing warns. In FP32 at stage 0 it steps, but the
    engine's gradient clipping, accumulation and schedule are skipped. `loss.backward()` raises a RuntimeError at stage
    0 ("Direct calls to tensor.backward() are not supported in this configuration"), and under FP16 if the loss was not
    scaled (`engine.scale(loss).backward()`), or under `torch_autocast` in FP16. From ZeRO 1 on without loss scaling it
    works, and is not reported. The engine may be made in another module of the project, if all callers give one.

    The optimizer that `deepspeed.initialize` *returns* is not checked. A config that comes from the command line is
    unknown, and so is its stage; the default of its option is known.
    """

    message = "`{expr}` {reason}"
    help = "use `engine.backward(loss)` and `engine.step()`"
    triggers = (any_of(b".step(", b".backward("),)
    triggers_nearby = (any_of(b"deepspeed"), any_of(b"initialize("))
    fixes = True

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for step in facts.events("step") if facts.events("initialize") else ():
            if wrappers.other_way(step.guard, "deepspeed"):
                continue
            wrap = self._client(step.subject, step.call, step, _DEPTH, facts)
            if wrap is not None:
                why = "steps the optimizer that was passed to DeepSpeed's engine, which bypasses the engine"
                yield self._found(step, why, wrap, None, facts)
        for backward in facts.events("backward"):
            found = self._loss(backward, facts)
            if found is not None:
                why, wrap, forward = found
                yield self._found(backward, why, wrap, self._fix(backward, forward, wrap, facts), facts)

    def _found(self, event: Event, why: str, wrap: Wrap, fix: Fix | None, facts: Facts) -> Diagnostic:
        notes = (Note("the engine is made here", wrap.call.span, facts.elsewhere(wrap.call)),)
        return self.at(event, expr=facts.short(event.call.node), reason=why, notes=notes, fix=fix)

    def _client(self, node: cst.BaseExpression | None, at: Call, step: Event, depth: int, facts: Facts) -> Wrap | None:
        """Return the engine that an optimizer was passed to, if its name still refers to that optimizer."""
        if node is None or depth == 0 or facts.wrappers.of(node, at, "deepspeed"):
            return None
        for wrap in facts.wrappers.of_argument(node, at, "deepspeed"):
            given = wrap.call.argument(2, "optimizer")
            later = wrap.call.scope is not at.scope or wrap.call.order < at.order
            if dotted(given) == dotted(node) and later and compatible(wrap.guard, step.guard, at.guard):
                return wrap
        for binding in facts.bindings(dotted(node), at, at.guard):
            for call in facts.callers(binding.scope) if binding.kind == "param" else ():
                inner = facts.argument_for(call, binding)
                wrapped = self._client(inner, call, step, depth - 1, facts) if inner is not binding.value else None
                if wrapped is not None:
                    return wrapped
        return None

    def _loss(self, backward: Event, facts: Facts) -> tuple[str, Wrap, Call] | None:
        """Return why the engine of a loss refuses this backward, the engine, and its forward call."""
        if (
            backward.subject is None
            or facts.is_inference(backward.call)
            or wrappers.other_way(backward.guard, "deepspeed")
        ):
            return None
        records = [r for r in facts.flow.backward(backward.subject, backward.call, depth=3) if isinstance(r, Call)]
        scaled = any(
            record.name == "scale" and facts.wrappers.of(record.receiver, record, "deepspeed", True)
            for record in records
        )
        for record, wrap in facts.wrappers.differentiated(backward.subject, backward.call, "deepspeed", True):
            if wrap.index in (0, None):
                why = self._refusal(wrappers.settings_of(wrap, defaults=True), scaled)
                return (why, wrap, record) if why else None
        return None

    def _refusal(self, settings: wrappers.WrapperSettings, scaled: bool) -> str:
        if settings.stage == 0:
            return "raises at ZeRO stage 0: the engine has to run the backward pass"
        if (settings.fp16 or settings.autocast_fp16) and not scaled:
            return "runs backward without the loss scale, which DeepSpeed's FP16 refuses"
        return ""

    def _fix(self, backward: Event, forward: Call, wrap: Wrap, facts: Facts) -> Fix | None:
        """Return a fix through the engine, by the name of the forward call, or the one it was created under."""
        call = backward.call
        own = forward.path.startswith("self.") and forward.scope.owner is call.scope.owner
        engine = forward.path if own or forward.scope is call.scope else self._name(wrap, call)
        edit = python_edits.through(facts, backward, engine) if engine else None
        return Fix("Run it through the engine", "safe", (edit,)) if edit is not None else None

    def _name(self, wrap: Wrap, at: Call) -> str:
        """Return the name of the engine in its own function: `engine, *_ = deepspeed.initialize(...)`; "" elsewhere."""
        made = wrap.call.statement
        if wrap.call.scope is not at.scope or not isinstance(made, cst.Assign) or made.value is not wrap.call.node:
            return ""
        target: cst.BaseExpression = made.targets[0].target
        if isinstance(target, (cst.Tuple, cst.List)):
            target = target.elements[0].value
        key = dotted(target)
        bindings = at.scope.bindings.get(key, []) if len(made.targets) == 1 else []
        return key if len(bindings) == 1 and wrap.call.order < at.order else ""
