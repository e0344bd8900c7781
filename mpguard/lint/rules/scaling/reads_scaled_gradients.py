from __future__ import annotations

import libcst as cst

from mpguard.lint import (
    Bad,
    Diagnostic,
    Facts,
    Good,
    Note,
    Record,
    ScalingRule,
    Scope,
    Trace,
    TraceStep,
    Use,
    any_of,
    constant,
    dotted,
    lazy_pattern,
    path_condition,
    trace_facts,
)

#: Methods that measure a gradient, and functions that measure or log one.
_MEASURES = frozenset({"norm", "abs", "mean", "std", "var", "max", "min", "sum", "pow", "square", "item", "median"})
_FUNCTIONS = lazy_pattern(r"(?:^|_)norm$|histogram|^Histogram$|^add_scalar|^log_|^log$|^print$")
#: Views and copies of a gradient; measuring them measures the gradient.
_VIEWS = frozenset({"data", "detach", "clone", "float", "double", "view", "flatten", "reshape", "cpu", "ravel", "to"})
#: Checks whose result is the same with and without the scale.
_SCALE_INDEPENDENT = frozenset({"isfinite", "isnan", "isinf", "any", "all", "is_nonzero", "count_nonzero", "nonzero"})
#: Tests of a gradient.
_NOT_FINITE = lazy_pattern(r"\bis(?:nan|inf)\(.*grad")
_FINITE = lazy_pattern(r"\bisfinite\(.*grad")

#: Steps of a trace after which gradients are not scaled any more, or may not be.
_ENDS = (*trace_facts.ENDS["scaled"], "clip", "other_step", "zero_grad")
_ELSEWHERE = "`{expr}` measures gradients that are still scaled"


def _is_overflow(condition: path_condition.Condition) -> bool:
    """True if a condition means that a gradient is not finite: then its size says nothing, scaled or not."""
    if isinstance(condition, path_condition.Flag):
        return bool(_NOT_FINITE.search(condition.name))
    denied = path_condition.negated(condition)
    return isinstance(denied, path_condition.Flag) and bool(_FINITE.search(denied.name))


class ReadsScaledGradients(ScalingRule):
    """A gradient is measured while it is still multiplied by the loss scale.

    ## What it does
    Reports `p.grad.norm()` and the like between the `backward` of a scaled loss and `unscale_` or `step`; under
    `Accelerator(mixed_precision="fp16")`, before `clip_grad_norm_` or `unscale_gradients`. Functions and methods of
    other modules of the project that measure gradients are reported where they are called.

    ## Why is this bad
    The number is larger than the true one by the scale, 65536 at first, and changes by a factor of two whenever the
    scale does: the plot shows the scaler, not the training. A norm that decides about the step, as a guard against
    spikes does, skips nearly all of them.

    ## Known limits
    Only for scalers that the file creates itself. Checks whose result does not depend on the scale (finite, zero, None)
    are not reported, nor is what is printed of a gradient that is not finite, nor are gradients that are changed in
    place (averaged, summed over ranks).
    """

    code, name = "MPG215", "reads-scaled-gradients"
    severity = "warning"
    message = "`{expr}` is read while gradients are still scaled"
    help = "unscale the gradients first"
    operations = ("read",)
    triggers = (any_of(b"backward", b".scale(", b"caler", b"Accelerator("),)
    triggers_nearby = (any_of(b".grad"), any_of(b".backward("), any_of(b"GradScaler", b"Accelerator("))
    across = True
    examples = (
        Bad(
            """\
import torch


def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        for param in model.parameters():
            norm = torch.norm(param.grad)  # !
            if norm > 1.0:
                param.grad.data = param.grad.data / (norm + 1e-6)
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch


class AWP:
    def __init__(self, model, optimizer, scaler, adv_lr):
        self.model, self.optimizer, self.scaler, self.adv_lr = model, optimizer, scaler, adv_lr

    def attack(self):
        for name, param in self.model.named_parameters():
            norm1 = torch.norm(param.grad)
            norm2 = torch.norm(param.data.detach())
            if norm1 != 0 and not torch.isnan(norm1):
                param.data.add_(self.adv_lr * param.grad / (norm1 + 1e-6) * (norm2 + 1e-6))
""",
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        step, read = trace[place], trace[place].record
        if any(map(_is_overflow, read.guard)) or not self._measures(read, facts.of(read)):
            return None
        backward = self._scaled(trace, place, facts)
        if backward is None or (step.at is not None and (backward.at is step.at or _changes_in_place(read.scope))):
            return None
        message = _ELSEWHERE if step.at is not None else None
        return self.at(
            step,
            message=message,
            expr=facts.short(step.here.node),
            notes=(Note("the loss is scaled here", backward.span),),
        )

    def _scaled(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        reads = (each for each in trace if each.kind == "get_scale" and each.here.scope is trace[place].here.scope)
        if any(facts.traces.computes_with_scale(each.call) for each in reads):
            return None  # the gradients are unscaled by hand

        def is_scaled(backward: TraceStep) -> bool:
            if backward.kind == "framework":
                return self._accelerated(backward, facts)
            return backward.scale is not None and facts.scalers.own(backward.scaler, backward.scale.call)

        return facts.traces.scaled_at(trace, place, is_scaled, _ENDS)

    def _accelerated(self, backward: TraceStep, facts: Facts) -> bool:
        """True if an Accelerator with a scaler of its own runs it: its precision is a literal `fp16`."""
        calls = [getattr(each.atom, "call", None) for each in facts.evaluate(backward.call.receiver, backward.record)]
        return "accelerator" in facts.kinds(backward.call.receiver, backward.record) and all(
            call is not None and constant(call.argument(None, "mixed_precision")) == ("fp16",) for call in calls
        )

    def _measures(self, use: Record, facts: Facts) -> bool:
        """True if the use of a gradient depends on its size."""
        assert isinstance(use, Use)
        node: cst.CSTNode = use.node
        _, found, after = use.path.partition(".grad")
        rest = (after if found else use.path).split(".")[1:]  # of `g = p.grad`, what follows `g`
        measured = False
        for name in rest:
            if name in _MEASURES:
                measured = True
            elif name not in _VIEWS:
                return False
        while (parent := facts.parent(node)) is not None:
            if isinstance(parent, cst.Call) and parent.func is node:
                pass
            elif isinstance(parent, cst.Attribute):
                if parent.attr.value in _SCALE_INDEPENDENT:
                    return False
                measured = measured or parent.attr.value in _MEASURES
                if not measured and parent.attr.value not in _VIEWS:
                    return False
            elif isinstance(parent, cst.Arg):
                call = facts.parent(parent)
                name = dotted(call.func).rsplit(".", 1)[-1] if isinstance(call, cst.Call) else ""
                if name in _SCALE_INDEPENDENT:
                    return False
                measured = measured or bool(_FUNCTIONS.search(name))
                if not measured:
                    return False
            elif isinstance(parent, cst.Comparison):
                zero = [constant(each.comparator) for each in parent.comparisons]
                return measured and zero not in ([(0,)], [(0.0,)], [(None,)])
            elif isinstance(parent, (cst.AugAssign, cst.Assign)) and parent.value is not node:
                return False
            elif isinstance(parent, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                return measured and not _cancels(parent, use, facts)
            node = parent
        return measured


def _changes_in_place(scope: Scope) -> bool:
    """True if a function calls methods that change tensors in place: it may average gradients, or unscale them."""
    return any(call.name.endswith("_") for call in scope.calls)


def _cancels(statement: cst.CSTNode, use: Use, facts: Facts) -> bool:
    """True if a norm is only what its gradient is divided by, as adversarial training does: the scale cancels."""
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return False
    name = dotted(statement.targets[0].target)
    later = [each for each in use.scope.uses.get(name, ()) if each.path == name and each.order > use.order]
    divides = [each for each in later if _divides_gradient(each, facts)]
    return bool(divides) and all(each in divides or _is_only_tested(each, facts) for each in later)


def _divides_gradient(use: Use, facts: Facts) -> bool:
    """True in the divisor of a quotient of a gradient: `p.grad / (norm + 1e-6)`."""
    node: cst.CSTNode = use.node
    parent = facts.parent(node)
    while isinstance(parent, cst.BinaryOperation) and not isinstance(parent.operator, cst.Divide):
        node, parent = parent, facts.parent(parent)
    return isinstance(parent, cst.BinaryOperation) and parent.right is node and ".grad" in facts.text(parent.left, use)


def _is_only_tested(use: Use, facts: Facts) -> bool:
    """True for a comparison with 0, and a test for infinities or NaN."""
    parent = facts.parent(use.node)
    if isinstance(parent, cst.Arg):
        call = facts.parent(parent)
        return isinstance(call, cst.Call) and dotted(call.func).rsplit(".", 1)[-1] in _SCALE_INDEPENDENT
    return isinstance(parent, cst.Comparison) and all(
        constant(each.comparator) in ((0,), (0.0,)) for each in parent.comparisons
    )
