from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Facts,
    Good,
    Note,
    Object,
    Record,
    ScalingRule,
    Scope,
    Trace,
    TraceStep,
    any_of,
    constant,
    dotted,
    lazy_pattern,
    scaler_dtype,
)

#: Methods that a framework, or a loop in another file, calls once for each batch.
_STEP = lazy_pattern(r"_?train(?:ing)?_(?:one_|on_|a_)?(?:step|batch|iter(?:ation)?|minibatch)")


class ScalerCreatedInLoop(ScalingRule):
    """A GradScaler is created again for each step, or for each epoch.

    ## What it does
    Reports the creation of a scaler in a loop, by itself or by a helper function that returns a new one, or in a
    function that is called in a loop, if the optimizer that it steps outlives the loop; and in a method that trains one
    batch (`training_step`, `train_batch`).

    ## Why is this bad
    The scale starts at 65536 again each time. It is doubled after 2,000 steps without an overflow and halved after one:
    a scaler that lives for a step never adapts, one that lives for an epoch skips its first steps in each epoch.

    ## Known limits
    A loop that creates the optimizer as well (folds, configurations, seeds) is right and not reported. Silent for an
    optimizer from outside the file, and for a scaler that is only created if there is none yet. A scaler of BF16
    losses is reported by MPG207.
    """

    code, name = "MPG209", "scaler-created-in-loop"
    severity = "error"
    message = "the GradScaler is created {often}: its scale is reset each time"
    help = "create it once, where the optimizer is created"
    operations = ("scaler_step",)
    triggers = (any_of(b"scaler", b"Scaler"), any_of(b".scale("), any_of(b".step("))
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    scaler = torch.amp.GradScaler("cuda")  # !
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
        ),
        Good(
            """\
import torch

class Classifier:
    def training_step(self, batch, index):
        if self.scaler is None:
            self.scaler = torch.amp.GradScaler()
        self.scaler.scale(self.network(batch).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_batch(self, batch):
        optimizer = torch.optim.SGD(self.network.parameters(), 0.1)
        scaler = torch.amp.GradScaler()
        scaler.scale(self.network(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    def training_iteration(self, loader):
        scaler = torch.amp.GradScaler()
        for batch in loader:
            scaler.scale(self.network(batch).sum()).backward()
            scaler.step(self.optimizer)
            scaler.update()
"""
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        step = trace[place]
        for built in self._creations(step, facts):
            often = self._frequency(built, step, facts)
            if often and not self._is_needless(built, facts) and not scaler_dtype.computes_without_float16(facts):
                return self.at(built, often=often, notes=(Note("its optimizer outlives it", step.span),))
        return None

    def _is_needless(self, built: Call, facts: Facts) -> bool:
        """True if the losses that it scales need no scaler: its scale does not matter, and MPG207 reports it."""
        return any(
            event.call is built
            and scaler_dtype.scales_without_need(event, facts.enabled(built, facts.called_path(built)), facts)
            for event in facts.events("scaler")
        )

    def _creations(self, step: TraceStep, facts: Facts) -> Iterator[Call]:
        """Yield the calls in the file that create the scaler of a step: of its class, and in loops of helpers."""
        places = dict.fromkeys((step.record.scope, *(call.scope for call in step.via)))
        for made in _scalers(step.scaler, step.record, facts):
            if facts.of(made) is facts:
                yield made
            if _is_new_each_time(made):
                for call in (call for place in places for call in place.calls if call is not made and _loops(call)):
                    if made in _scalers(call.node, call, facts):
                        yield call

    def _frequency(self, built: Call, step: TraceStep, facts: Facts) -> str:
        """Return how often the scaler is created while its optimizer lives; empty for once or unknown."""
        scope = built.scope
        at, optimizer = self._seen_from(scope, step, facts)
        if at is None or built.guard - scope.guard - at.guard:
            return ""  # usually created only if there is none yet
        around = _loops(built)
        if around:
            inside = around[-1] in at.loops and self._outlives(optimizer, at, around[-1], facts)
            return "in a loop" if inside else ""
        if scope.kind == "function" and scope.name != "__init__":
            for call in facts.callers(scope):
                if _loops(call) and self._outlives(optimizer, at, _loops(call)[-1], facts, call):
                    return "by each call in a loop"
            if _STEP.fullmatch(scope.name) and not step.loops and self._not_created_in(optimizer, at):
                return "by each training step"
        return ""

    def _seen_from(
        self, scope: Scope, step: TraceStep, facts: Facts
    ) -> tuple[Record | None, cst.BaseExpression | None]:
        """Return what leads to a step in a function that calls helpers for it, and the optimizer as it is named there.

        None if the function does not lead to the step, or does not give the optimizer to the helper.
        """
        at, optimizer = step.record, step.optimizer
        for call in reversed(step.via):
            if at.scope is scope:
                break
            bound = facts.bindings(dotted(optimizer), at)
            if len(bound) == 1 and bound[0].kind == "param" and bound[0].scope is at.scope:
                optimizer = facts.argument_for(call, bound[0])
            elif not dotted(optimizer).startswith("self.") or call.scope.owner is not at.scope.owner:
                return None, None
            at = call
        return (at, optimizer) if at.scope is scope else (None, None)

    def _not_created_in(self, node: cst.BaseExpression | None, at: Record) -> bool:
        """True if a method does not create an object: it is a parameter, or an attribute that is set elsewhere."""
        key = dotted(node)
        kinds = {each.kind for each in at.scope.bindings.get(key, ())}
        return at.scope.owner is not None and (kinds == {"param"} or (key.startswith("self.") and not kinds))

    def _initializes(self, scope: Scope, facts: Facts) -> bool:
        """True for `__init__`, and for a method that only `__init__` calls."""
        if scope.name == "__init__":
            return True
        callers = facts.callers(scope)
        return bool(callers) and all(
            call.scope.name == "__init__" and call.scope.owner is scope.owner for call in callers
        )

    def _outlives(
        self, node: cst.BaseExpression | None, at: Record, loop: cst.CSTNode, facts: Facts, call: Call | None = None
    ) -> bool:
        """True if an object is bound outside a loop on all paths; the loop may be around a call of its function.

        One that only some iterations replace, as `if epoch == 100:`, outlives the others.
        """
        key = dotted(node)
        bindings = [
            each for each in facts.bindings(key, at, at.guard) if each.value is None or constant(each.value) != (None,)
        ]
        found: list[bool] = []
        for each in bindings:
            if key.startswith("self."):
                outside = self._initializes(each.scope, facts) or (
                    each.scope is at.scope and call is None and loop not in each.loops
                )
            elif each.kind == "param":
                given = facts.argument_for(call, each) if call is not None else None
                outside = call is None or (given is not None and self._outlives(given, call, loop, facts))
            else:
                outside = loop not in each.loops and (call is None or each.scope is not at.scope)
            found.append(outside)
            if not outside and not (call is None and each.scope is at.scope and each.guard - at.guard):
                return False
        return any(found)


def _loops(record: Record) -> list[cst.CSTNode]:
    return [loop for loop in record.loops if isinstance(loop, (cst.For, cst.While))]


def _is_new_each_time(made: Call) -> bool:
    """True if a function that returns a scaler makes a new one in each call: it keeps none, and is not cached."""
    scope = made.scope
    if scope.kind != "function" or scope.decorators or made.guard - scope.guard:
        return False
    return not any(
        binding.value is made.node and ("." in key or key in scope.globals)
        for key, bindings in scope.bindings.items()
        for binding in bindings
    )


def _scalers(node: cst.BaseExpression | None, at: Record, facts: Facts) -> list[Call]:
    """Return the calls that may have created the scaler that an expression is."""
    atoms = [each.atom for each in facts.evaluate(node, at)]
    return [a.call for a in atoms if isinstance(a, Object) and a.kind == "scaler" and a.call is not None]
