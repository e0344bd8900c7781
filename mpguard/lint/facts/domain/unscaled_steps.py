"""Optimizer steps that apply FP16 gradients without loss scaling, and what may scale the loss."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events import Event
from mpguard.lint.facts.program import api_names, roles
from mpguard.lint.facts.program.lattice import Class, Constant, Object, Ref
from mpguard.lint.facts.syntax.nodes import constant, dotted, is_super, text_of
from mpguard.lint.facts.syntax.path_condition import ALWAYS, Flag, PathCondition, compatible
from mpguard.lint.facts.syntax.records import Call, Record, Scope, Use

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

#: Names that may stand for a loss scaler or contain one. They do not prove that there is one, but its absence is no
#: longer certain.
_MAY_BE_SCALER = lazy_pattern(
    r"(?<![Uu]p)(?<!own)(?<![Rr]e)[Ss]caler|SCALER|(?i:scale_loss|loss_scale|grad_scale|lossscale|amp_handle)"
)
#: Numbers with such a name are weights of parts of a loss (`simple_loss_scale * simple_loss + ...`), or only read,
#: unless a whole loss is multiplied by one.
_NUMBER = lazy_pattern(r"(?i)(?:loss|grad)_?scale$")
#: Scalers of data, not of gradients.
_DATA_SCALER = lazy_pattern(
    r"(?i)(?:standard|min_?max|robust|max_?abs|data|feature|target|image|score|\b[xy])_?scaler|scaler_(?:mean|std|var)\b"
)
#: Methods of a scaler of data.
_SCALES_DATA = frozenset({"fit", "transform", "fit_transform", "inverse_transform"})
#: Kinds of objects with a loss scaler of their own.
_HAS_OWN_SCALER = frozenset({"accelerator", "engine", "trainer", "fabric", "apex"})
#: Kinds of objects with a `step` that a framework with a scaler of its own gives.
_BRINGS_SCALER = _HAS_OWN_SCALER | {"engine_optimizer", "apex_optimizer", "framework", "scaler", "scheduler"}
#: Methods of a scaler that scale no loss.
_SCALES_NOTHING = frozenset({
    "step", "update", "unscale_", "state_dict", "load_state_dict", "get_scale", "is_enabled", "GradScaler",
    "ShardedGradScaler", "val", "avg",  # the last two are of a meter that reads the scale
})  # fmt: skip
#: A product with a scale: `(loss * scale).backward()`, which MPG212 looks at.
_SCALED_BY_HAND = lazy_pattern(r"(?i)\*\s*[\w.]*scale|scale\w*(?:\(\))?\s*\*")
#: Kinds of classes whose base class runs the training loop.
_RUNS = frozenset({"framework", "trainer"})
#: Expressions that test whether there is a scaler.
_TESTS = (
    cst.Comparison,
    cst.ComparisonTarget,
    cst.If,
    cst.IfExp,
    cst.UnaryOperation,
    cst.BooleanOperation,
    cst.Assert,
)
#: What gives a scaler back to the caller, whose own uses count.
_RETURNS = (cst.Return, cst.Element)
#: Functions that a scaler is passed to and that do not train.
_READS_SCALER = lazy_pattern(f"(?i){roles.HANDLES_STATE}|raise|scalar")


def plain_step(backward: Event, guard: PathCondition, program: set[Scope], facts: DomainView) -> Event | None:
    """Return the step of a plain optimizer in the same program under a compatible path condition, or None.

    In the function of the backward pass, in one around it, or in another method of its class that gets it as an
    argument or runs next to it, it may be an optimizer that comes from outside: it cannot scale that loss.
    """
    cleared = _clears_gradients(backward.call, facts)
    owner = backward.scope.owner
    unknown: Event | None = None
    for step in facts.events_around("step", backward.scope):
        if step.scope not in program or not compatible(step.guard, guard) or facts.is_inference(step.call):
            continue
        if cleared is not None and _may_be_of(step, cleared, facts):
            continue
        if (
            step.scope is backward.scope
            and step.order < backward.order
            and not set(step.call.loops) & set(backward.call.loops)
        ):
            continue
        alternatives = [
            each.atom
            for each in facts.evaluate(step.subject, step.call)
            if compatible(each.guard, guard, step.guard) and not isinstance(each.atom, Constant)  # None has no step
        ]
        if alternatives and all(
            isinstance(a, Object) and a.kind == "optimizer" and not a.prepared for a in alternatives
        ):
            return step
        foreign = (isinstance(a, Object) and (a.prepared or a.kind in _BRINGS_SCALER) for a in alternatives)
        here = (
            step.scope is backward.scope
            or (step.scope.kind == "function" and step.scope in backward.scope.within())
            or (
                owner is not None
                and step.scope.owner is owner
                and dotted(step.subject).startswith("self.")
                and _runs_both(owner, backward.scope, step.scope)
            )
            or (
                owner is not None
                and step.scope.owner is owner
                and dotted(step.subject) in {param.name for param in step.scope.params}
                and facts.class_kind(owner) == "own"
            )
        )
        if unknown is None and here and not any(foreign):
            unknown = step
    return unknown


def _clears_gradients(backward: Call, facts: DomainView) -> str | None:
    """Return the name of what a function that never steps clears the gradients of, after a backward pass; or None.

    Between the two it calls nothing of the project, which might step: it is a trial, to measure memory.
    """
    calls = backward.scope.calls
    after = [each for each in calls if each.order > backward.order and each.loops == backward.loops]
    cleared = [each for each in after if each.name == "zero_grad" and not each.guard - backward.guard]
    if not cleared or any(each.name == "step" for each in calls):
        return None
    if any(facts.functions(each) for each in after if each.order < cleared[0].order):
        return None
    return dotted(cleared[0].receiver).rpartition(".")[2] or None


def _may_be_of(step: Event, name: str, facts: DomainView) -> bool:
    """True unless the optimizer of a step gets other parameters than those of a model or an optimizer of this name."""
    if dotted(step.subject).rpartition(".")[2] == name:
        return True
    made = (each.atom for each in facts.evaluate(step.subject, step.call))
    given = [text_of(atom.call.node) for atom in made if isinstance(atom, Object) and atom.call is not None]
    return not given or any(re.search(rf"\b{re.escape(name)}\b", each) for each in given)


def _runs_both(owner: Scope, backward: Scope, step: Scope) -> bool:
    """True if a method runs two others, the backward pass as often as the step or more often, or the first the second.

    A method that probes once before a loop which steps is another pass.
    """
    if any(call.path == f"self.{step.name}" for call in backward.calls):
        return True
    return any(
        run.path == f"self.{backward.name}"
        and applied.path == f"self.{step.name}"
        and set(applied.loops) <= set(run.loops)
        and run.order < applied.order
        and compatible(run.guard, applied.guard)
        for method in owner.children
        for run in method.calls
        for applied in method.calls
    )


def may_be_scaled(
    guard: PathCondition,
    program: set[Scope],
    facts: DomainView,
    loss: Event | None = None,
    step: Event | None = None,
    *,
    trainer: Scope | None = None,
) -> bool:
    """True if a scaler, or an object with one of its own, may be used in the program under a path condition.

    loss: a backward pass whose loss is computed in its own function: only this function, and those that it calls, can
    scale it, and not what scales the loss of another one; where the step is in it, too, the base class of a trainer
    cannot. trainer: a class that computes the loss, runs backward and steps in methods of its own: its base cannot.
    """
    if loss is not None:
        owner = loss.scope.owner if step is None or step.scope is not loss.scope else None
        if arm_scales(loss, facts) or (owner is not None and facts.class_kind(owner) in _RUNS):
            return True
        program = _called_by(loss.scope, facts)
    others = {
        scale.call
        for backward, scale in facts.scalers.may_scale.items()
        if loss is not None and backward is not loss.call
    }
    for scope in program:
        if scope.kind == "class" and scope is not trainer and _differentiates(scope) and facts.base_unknown(scope):
            return True
        for uses in scope.uses.values():
            for use in uses:
                if (
                    _MAY_BE_SCALER.search(use.path)
                    and compatible(use.guard, guard)
                    and _may_scale(use, program, facts)
                    and not _data_scaler(use, facts)
                    and not (loss is not None and _scales_own_loss(use, loss, facts))
                    and facts.of(use).call_of(facts.of(use).parent(use.node)) not in others
                ):
                    return True
        for call in scope.calls:
            if not call.name[:1].isupper() and call.name != "initialize":
                continue  # an object with a scaler is created by a class, or by `deepspeed.initialize`
            if not compatible(facts.guard_of(call), guard):
                continue
            for each in facts.evaluate(call.func, call):
                if not compatible(each.guard, guard):
                    continue
                if isinstance(each.atom, Ref) and api_names.kind_of(each.atom.path) in _HAS_OWN_SCALER:
                    return True
                if isinstance(each.atom, Class) and facts.class_kind(each.atom.scope) in _HAS_OWN_SCALER:
                    return True
    scales = [event for event in facts.events("scale") if event.call not in others]
    if any(scale.scope in program and compatible(scale.guard, guard) for scale in scales):
        return True
    return any(
        event.scope in program and compatible(event.guard, guard)
        for event in facts.events("framework")
        if not is_super(event.subject) and not _is_own_backward(event, program, facts)
    )


def _differentiates(cls: Scope) -> bool:
    """True for a class with a backward pass or a step: its base may scale the loss."""
    return any(call.name in ("backward", "step") for each in cls.descendants() for call in each.calls)


def _is_own_backward(event: Event, program: set[Scope], facts: DomainView) -> bool:
    """True for `self.backward(loss)` of a class that defines this method in the program: what it does counts."""
    owner = event.scope.owner
    if dotted(event.subject) != "self" or owner is None or facts.base_unknown(owner):
        return False
    return any(each.scope in program for each in facts.functions(event.call))


def arm_scales(loss: Event, facts: DomainView) -> bool:
    """True if the loss is multiplied by a scale, or another branch in its function scales one: it is meant so.

    Or if its function scales it where there is a scaler (`if scaler is not None: loss = scaler.scale(loss)`): whether
    there is one is decided elsewhere, as the autocast is.
    """
    if _SCALED_BY_HAND.search(facts.short(loss.subject)):
        return True
    tested = (
        flag for flag in loss.guard.flags() if _MAY_BE_SCALER.search(flag) and not _is_none(flag, loss.call, facts)
    )
    return any(not compatible(loss.guard, ALWAYS.given(Flag(flag))) for flag in tested) or any(
        scale.scope is loss.scope
        and (
            not compatible(scale.guard, loss.guard)
            or (
                scale.order < loss.order
                and dotted(scale.call.receiver).rpartition(".")[2] in PathCondition(scale.guard - loss.guard).flags()
            )
        )
        for scale in facts.events("scale")
    )


def _is_none(name: str, at: Record, facts: DomainView) -> bool:
    """True if a name can only be None: what may be a scaler is none."""
    values = facts.resolve(name, at.scope, at.order)
    return bool(values) and all(each.atom == Constant(None) for each in values)


def _scales_own_loss(use: Use, loss: Event, facts: DomainView) -> bool:
    """True for `scaler.scale(other).backward()` in a function that is called after a backward pass.

    It adds the gradients of a loss that it computes itself, as adversarial training does.
    """
    own = facts.of(use)
    scale = own.call_of(own.parent(use.node))
    if scale is None or scale.scope is loss.scope or len(scale.positional) != 1:
        return False
    above = own.parent(scale.node)
    if not (isinstance(above, cst.Attribute) and above.attr.value == "backward"):
        return False
    made = own.bindings(dotted(scale.positional[0]), scale)
    return (
        bool(made)
        and all(each.kind in ("assign", "element") for each in made)
        and any(
            call.order > loss.order and any(each.scope is scale.scope for each in facts.functions(call))
            for call in loss.scope.calls
        )
    )


def _called_by(scope: Scope, facts: DomainView) -> set[Scope]:
    """Return a function, and the functions of the tree that run within its calls."""
    found, pending = {scope}, [scope]
    while pending:
        inner = [each.scope for call in pending.pop().calls for each in facts.functions(call)]
        pending += [each for each in dict.fromkeys(inner) if each not in found]
        found.update(inner)
    return found


def _may_scale(use: Use, program: set[Scope], facts: DomainView) -> bool:
    """True if a use of what is named like a scaler may scale a loss with it.

    Methods that only step, update or save scale nothing, nor does a test (`if scaler is not None`), nor what passes it
    to a function of the program, whose own uses count. A parameter whose default is True or False is no scaler.
    """
    if any(param.name == use.path and constant(param.default) in ((True,), (False,)) for param in use.scope.params):
        return False  # a switch of what the function does
    if _is_weight_of_module(use, facts.of(use)):
        return False
    parts = use.path.split(".")
    place = max(place for place, part in enumerate(parts) if _MAY_BE_SCALER.search(part))
    if _is_none(".".join(parts[: place + 1]), use, facts):
        return False  # no caller gives one
    node: cst.CSTNode = use.node
    parent = facts.of(use).parent(node)
    if place < len(parts) - 1 and parts[place + 1] != "_scale":
        return parts[place + 1] not in _SCALES_NOTHING
    if _is_quotient(use, facts):
        return False
    if place < len(parts) - 1 or _NUMBER.search(use.path):
        return _is_factor(use, program, facts)
    if isinstance(parent, _TESTS) or (isinstance(parent, _RETURNS) and _returned(parent, use, facts.of(use))):
        return False
    if isinstance(parent, cst.Assign):
        return not all(_MAY_BE_SCALER.search(dotted(each.target)) for each in parent.targets)
    if isinstance(parent, cst.Call) and parent.func is node:
        call = facts.of(use).call_of(parent)
        if _READS_SCALER.search(parts[-1]):
            return False
        return call is None or not any(
            isinstance(each.atom, Ref) and each.atom.path.rsplit(".", 1)[-1] in api_names.SCALER_NAMES
            for each in facts.evaluate(call.func, call)
        )
    if isinstance(parent, cst.Arg):
        is_switch = parent.keyword is not None and parent.keyword.value == "enabled"
        return not is_switch and _passed_on(parent, use, program, facts)
    return True


def _is_quotient(use: Use, facts: DomainView) -> bool:
    """True for a name that is bound to quotients only: `loss_scale_factor = 1 / accumulation_steps` is an average."""
    bound = facts.bindings(use.path, use)
    return bool(bound) and all(
        each.kind == "assign"
        and isinstance(each.value, cst.BinaryOperation)
        and isinstance(each.value.operator, cst.Divide)
        for each in bound
    )


def _returned(node: cst.CSTNode, use: Use, facts: DomainView) -> bool:
    """True for a `return` of a name, or of a tuple that contains it, also one with a name that is only returned."""
    while isinstance(node, (cst.Element, cst.Tuple)):
        above = facts.parent(node)
        if above is None:
            return False
        node = above
    if isinstance(node, cst.Assign) and len(node.targets) == 1:
        again = use.scope.uses.get(dotted(node.targets[0].target), ())
        return bool(again) and all(isinstance(facts.parent(each.node), cst.Return) for each in again)
    return isinstance(node, cst.Return)


def _is_weight_of_module(use: Use, facts: DomainView) -> bool:
    """True for an attribute by which a loss module multiplies its result: the module runs no backward pass."""
    owner, parent = use.scope.owner, facts.parent(use.node)
    return (
        use.path.startswith("self.")
        and _NUMBER.search(use.path) is None
        and owner is not None
        and facts.class_kind(owner) in ("model", "criterion")
        and not _differentiates(owner)
        and isinstance(parent, cst.BinaryOperation)
        and isinstance(parent.operator, cst.Multiply)
    )


def _is_factor(use: Use, program: set[Scope], facts: DomainView) -> bool:
    """True if a number is a factor or a divisor of something whole, or other code gets it.

    A factor of one term of a sum, as in `a_loss_scale * a + b_loss_scale * b`, is a weight; in `int(size * loss_scale)`
    it scales no loss.
    """
    facts = facts.of(use)
    node: cst.CSTNode = use.node
    if isinstance(parent := facts.parent(node), cst.Attribute):
        node = parent
    factor = False
    while isinstance(parent := facts.parent(node), cst.BinaryOperation):
        if isinstance(parent.operator, (cst.Add, cst.Subtract)):
            return False
        node, factor = parent, True
    if factor and isinstance(parent, cst.Arg) and isinstance(call := facts.parent(parent), cst.Call):
        return dotted(call.func) != "int" or isinstance(facts.parent(call), cst.BinaryOperation)  # the size of a batch
    return factor or (isinstance(parent, cst.Arg) and _passed_on(parent, use, program, facts))


def _passed_on(argument: cst.Arg, use: Use, program: set[Scope], facts: DomainView) -> bool:
    """True if code outside the program gets an argument, and may scale a loss with it."""
    call = facts.of(use).call_of(facts.of(use).parent(argument))
    if call is None:
        return True
    return not (_READS_SCALER.search(call.name) or any(each.scope in program for each in facts.functions(call)))


def _data_scaler(use: Use, facts: DomainView) -> bool:
    """True if a name is that of a scaler of data (`StandardScaler`), or of an object with its methods."""
    path, owner = use.path, use.scope.owner
    if _DATA_SCALER.search(path) or (owner is not None and _DATA_SCALER.search(owner.name)):
        return True
    parts = path.split(".")
    name = ".".join(parts[: 2 if parts[0] == "self" else 1])
    places = owner.descendants() if owner is not None and parts[0] == "self" else use.scope.within()
    if any(
        other.path.startswith(f"{name}.") and other.path.rsplit(".", 1)[-1] in _SCALES_DATA
        for place in places
        for other in place.uses.get(parts[0], ())
    ):
        return True
    last = path.split(".", 1)[0]
    made = [b for scope in facts.index.scopes for b in scope.bindings.get(last, ()) if isinstance(b.value, cst.Call)]
    return bool(made) and all(
        isinstance(b.value, cst.Call) and bool(_DATA_SCALER.search(dotted(b.value.func))) for b in made
    )
