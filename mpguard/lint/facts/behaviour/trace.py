"""Traces: the operations on scaled gradients in order of control flow, with the helper functions of the file expanded.

A *trace* is the run of one function that is called by no other function of the file: scale, backward, unscale, clip,
step, update in order, with the steps of helper functions at their calls. Each trace step has its path condition, the
loops around it, and the calls that lead to it. Rules look for steps between two others whose path conditions are
compatible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events.event import is_scaler, last_name
from mpguard.lint.facts.behaviour.scalers import Scalers
from mpguard.lint.facts.behaviour.trace_steps import ENDS, StepKind, Trace, TraceStep, before, between, chosen
from mpguard.lint.facts.program import roles
from mpguard.lint.facts.program.api_names import CLIPS
from mpguard.lint.facts.program.lattice import Class, Function
from mpguard.lint.facts.syntax.nodes import dotted, is_super
from mpguard.lint.facts.syntax.path_condition import (
    ALWAYS,
    MOST_CONDITIONS,
    Any,
    Condition,
    Flag,
    PathCondition,
)
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope, Use

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

_Operation = Literal[
    "scale", "backward", "framework", "unscale", "clip", "scaler_step", "step", "update", "get_scale",
]  # fmt: skip
#: The events that are steps of a trace.
_OPERATIONS: tuple[_Operation, ...] = get_args(_Operation)
#: Functions that take a scaler without stepping with it: `save_checkpoint(model, scaler)`.
_DOES_NOT_STEP = lazy_pattern(f"(?i){roles.HANDLES_STATE}|state|getattr|^len$")
#: Methods that may use the scaler of their object; one that only sets the learning rate, as `update_lr`, does not.
_MAY_USE_OWN_SCALER = lazy_pattern(
    r"(?i)scal|clip|optim|backward|^(?!.*(?:(?:^|_)lrs?(?:_|$)|learning_?rate|sched)).*(?:step|update)"
)
#: Functions that take a value and do not compute with it, and those that return it.
_ONLY_READS = lazy_pattern(
    rf"(?i){roles.PRINTS}|format|postfix|description|scalar|metric|^(?:append|update|str|repr|isinstance)$"
)
_CONVERTS = frozenset({"float", "int", "round", "item", "min", "max", "abs", "log2"})
#: Expressions whose value does not depend on the size of a number in them, or is text.
_READS = (cst.Comparison, cst.FormattedStringExpression, cst.FormattedString)
#: Operators that multiply or divide a tensor in place.
_IN_PLACE = (cst.MultiplyAssign, cst.DivideAssign)
#: Code that uses the scaler of an object: `manager.scaler.update()`.
_USES_SCALER = lazy_pattern(rb"(?i)\w\.\w*scaler\b")
#: Steps of one trace, and depth of calls.
_MAX_STEPS = 3_000
_MAX_DEPTH = 6
#: Operations after which it is known what code with a scaler does.
_PROTOCOL = frozenset({"scale", "backward", "framework", "unscale", "scaler_step", "step", "update", "get_scale"})
#: Words of modules whose functions may change, or read, gradients.
_CHANGES_GRADIENTS = (b".backward(", b".unscale_(", b"clip_grad", b".grad", b".step(", b".update(")


class Traces:
    """The traces of one file."""

    def __init__(self, facts: BehaviourView) -> None:
        self.facts = facts
        self._relevant: dict[Scope, bool] = {}
        self._items: dict[Scope, list[TraceStep | Call]] = {}
        self._leaves_between = 0
        self._inside: dict[Call, list[TraceStep]] = {}

    @cached_property
    def all(self) -> tuple[Trace, ...]:
        """One trace for each function with relevant operations that no other function of the file calls."""
        scopes = [s for s in self.facts.index.scopes if s.kind != "class" and self._has_steps(s, ())]
        called = {
            helper.scope
            for s in scopes
            for item in self._items_of(s)
            if isinstance(item, Call) and not is_super(item.receiver)
            for helper in self._helpers(item)
        }
        roots = {scope: self._trace(scope) for scope in scopes if scope not in called}
        roots |= {scope: self._trace(scope) for scope in self._first_of_cycles(scopes, roots)}
        return (*roots.values(), *self._of_classes(roots))

    def _first_of_cycles(self, scopes: list[Scope], roots: Iterable[Scope]) -> list[Scope]:
        """Return the functions that call each other in a cycle that no root leads to: of each cycle the first one."""
        found: list[Scope] = []
        seen: set[Scope] = set()

        def see(scope: Scope) -> None:
            pending = [scope]
            while pending:
                current = pending.pop()
                if current not in seen:
                    seen.add(current)
                    calls = (item for item in self._items_of(current) if isinstance(item, Call))
                    pending += [helper.scope for call in calls for helper in self._helpers(call)]

        for root in roots:
            see(root)
        for scope in scopes:
            if scope not in seen:
                found.append(scope)
                see(scope)
        return found

    def _of_classes(self, roots: dict[Scope, Trace]) -> Iterator[Trace]:
        """Yield what code of other files runs of a class with one method for backward and another one for the step.

        There may be a third one, which clips in between. Each of them is a root, because no function of this file
        calls them.
        """
        methods: dict[Scope, list[Scope]] = {}
        for scope in roots:
            if scope.is_method and scope.owner is not None:
                methods.setdefault(scope.owner, []).append(scope)
        for owner, each in methods.items():
            kinds = {scope: {step.kind for step in roots[scope]} for scope in each}
            backward = [scope for scope in each if kinds[scope] & {"backward", "framework"}]
            steps = [scope for scope in each if kinds[scope] & {"step", "scaler_step", "other_step"}]
            if len(backward) == len(steps) == 1 and backward != steps and self._keeps_its_scaler(owner):
                # A method that reads the scale, or only scales a loss, stands next to the one for backward.
                others = set(_OPERATIONS) - {"get_scale"} - ({"scale"} if "scale" in kinds[backward[0]] else set())
                rest = [scope for scope in each if scope not in (*backward, *steps) and kinds[scope] & others]
                if len(rest) <= 1 and all(kinds[scope] & others <= {"unscale", "clip"} for scope in rest):
                    yield tuple(step for scope in (*backward, *rest, *steps) for step in roots[scope])

    def _keeps_its_scaler(self, owner: Scope) -> bool:
        """True if only the class itself uses its scaler: neither its users nor classes derived from it do."""
        facts = self.facts
        if facts.class_kind(owner) != "own" or facts.derived_elsewhere(owner):
            return False
        if not any("scaler" in key.lower() for key in facts.attributes(owner)):
            return False
        users = facts.users(owner.name)
        return users is not None and not any(_USES_SCALER.search(each.source.data) for each in users)

    def _trace(self, scope: Scope) -> Trace:
        self._leaves_between = _MAX_STEPS
        return tuple(self._expand(scope, ALWAYS, (), (), (scope,)))

    def _expand(
        self,
        scope: Scope,
        guard: PathCondition,
        loops: tuple[cst.CSTNode, ...],
        via: tuple[Call, ...],
        stack: tuple[Scope, ...],
    ) -> Iterator[TraceStep]:
        for item in self._items_of(scope):
            record = item if isinstance(item, Call) else item.here
            both = guard.joined(record.guard) if isinstance(item, Call) else guard.joined(record.guard, item.guard)
            if len(both) > MOST_CONDITIONS or not both.possible or self._leaves_between <= 0:
                continue
            self._leaves_between -= 1
            around = (*loops, *(loop for loop in record.loops if not self._runs_once(loop, record)))
            if isinstance(item, TraceStep):
                yield dataclasses.replace(item, guard=both, loops=(*around, *item.loops), via=via)
                continue
            helpers = [each for each in self._helpers(item) if each.scope not in stack]
            for number, helper in enumerate(helpers if len(stack) < _MAX_DEPTH else ()):
                arm = both.given(self._choice(item, helper, number)) if len(helpers) > 1 else both
                yield from self._expand(helper.scope, arm, around, (*via, item), (*stack, helper.scope))

    def _choice(self, call: Call, helper: Function, number: int) -> Condition:
        """Return the condition under which a call runs one of several helpers: for methods, the class of the object."""
        classes = next((found for each, found in self._versions(call) if each.scope is helper.scope), [])
        if not classes or call.scope.owner is None:
            return Flag(f"call#{call.order}", number + 1)
        name = f"class#{self.facts.classes.family(call.scope.owner)}"
        flags = tuple(Flag(name, each.qualname) for each in classes)
        return flags[0] if len(flags) == 1 else Any(flags)

    def _runs_once(self, loop: cst.CSTNode, at: Record) -> bool:
        """True for a loop of a single round: `for _ in range(1)`, or over a constant that is 1."""
        call = self.facts.call_of(loop.iter) if isinstance(loop, cst.For) else None
        if call is None or call.path != "range" or len(call.positional) != len(call.node.args):
            return False
        counts = [self.facts.constants(each, at) for each in call.positional]
        return counts in ([[1]], [[0], [1]])

    # -- the steps of one function ----------------------------------------------------------------------

    def _has_steps(self, scope: Scope, active: tuple[Scope, ...]) -> bool:
        """True if a function, or one of its helpers, has relevant operations."""
        if scope not in self._relevant and scope not in active and len(active) <= _MAX_DEPTH:
            found = scope in self._steps_of or any(
                self._has_steps(helper.scope, (*active, scope))
                for call in scope.calls
                for helper in self._helpers(call)
            )
            if active and not found:
                return False  # within a cycle the result may be incomplete
            self._relevant[scope] = found
        return self._relevant.get(scope, False)

    def _items_of(self, scope: Scope) -> list[TraceStep | Call]:
        """Return the steps of a function itself and its calls of helpers that have some, in order."""
        if scope not in self._items:
            calls = [
                call
                for call in scope.calls
                if any(self._has_steps(each.scope, (scope,)) for each in self._helpers(call))
            ]
            found: list[tuple[int, int, TraceStep | Call]] = [(c.order, 0, c) for c in calls]
            found += [(m.here.order, 1, m) for m in self._steps_of.get(scope, ())]
            if found:
                found += [(e.order, 2, TraceStep("exit", e)) for e in (*scope.exits, *scope.returns)]
            self._items[scope] = [item for _, _, item in sorted(found, key=lambda each: each[:2])]
        return self._items[scope]

    @cached_property
    def _steps_of(self) -> dict[Scope, list[TraceStep]]:
        facts = self.facts
        found: dict[Scope, list[TraceStep]] = {}
        for kind in _OPERATIONS:
            for event in facts.events(kind):
                if kind == "framework" and (self._helpers(event.call) or self._elsewhere(event.call)):
                    continue  # a method of the tree: its operations are visible
                scale = self.facts.part(Scalers).scaled.get(event.call) if kind == "backward" else None
                may_scale = self.facts.part(Scalers).may_scale.get(event.call) if kind == "backward" else None
                found.setdefault(event.scope, []).append(
                    TraceStep(kind, event.call, event, scale=scale, may_scale=may_scale)
                )
        for call in facts.calls.get("zero_grad", ()):
            found.setdefault(call.scope, []).append(TraceStep("zero_grad", call))
        known = {event.call for event in (*facts.events("step"), *facts.events("scaler_step"))}
        for call in facts.calls.get("step", ()):
            if call.receiver is None or call in known:
                continue
            schedules = "sched" in last_name(call.receiver).lower() or "scheduler" in facts.kinds(call.receiver, call)
            found.setdefault(call.scope, []).append(TraceStep("scheduler" if schedules else "other_step", call))
        for scope in facts.index.scopes:
            for uses in scope.uses.values():
                for use in uses:
                    if use.path.endswith(".grad") or ".grad." in use.path:
                        found.setdefault(scope, []).append(TraceStep("read", use))
            for use in self._gradient_aliases(scope):
                found.setdefault(scope, []).append(TraceStep("read", use))
            for call in scope.calls:
                steps = self._elsewhere(call)
                if not any(step.kind in _PROTOCOL for step in steps) and self._may_use_scaler(call):
                    steps = [*steps, TraceStep("passed", call)]
                if steps:
                    found.setdefault(scope, []).extend(steps)
        return found

    def _elsewhere(self, call: Call) -> list[TraceStep]:
        """Return the steps of the one function of another module that a call runs, if it has some.

        Those of functions that this one calls in a third module are left out. The record of a clip is the call itself
        if all that it runs of the protocol is the clip.
        """
        if call in self._inside:
            return self._inside[call]
        found = self._inside[call] = []
        atoms = [each.atom for each in self.facts.evaluate(call.func, call)]
        functions = self.facts.functions(call) if len(atoms) == 1 and not isinstance(atoms[0], Class) else []
        if len(functions) == 1 and functions[0].facts is not self.facts:
            scope = functions[0].scope
            other = self.facts.of(scope)
            if other is not self.facts and any(word in other.source.data for word in _CHANGES_GRADIENTS):
                other.need_all()
                steps = [step for step in other.part(_OwnTraces).of(scope) if step.kind != "exit"]
                plain = all(step.kind not in _PROTOCOL for step in steps)
                for step in steps:
                    clips = plain and step.kind == "clip" and other.called_path(step.call) in CLIPS
                    found.append(dataclasses.replace(step, record=call if clips else step.record, at=call, via=()))
        return found

    def _gradient_aliases(self, scope: Scope) -> Iterator[Use]:
        """Yield the uses of names that are bound to a gradient: `g = p.grad`, or `for g in [p.grad for p in ...]`."""
        for key, bindings in scope.bindings.items():
            if "." in key or not any(map(self._binds_gradient, bindings)):
                continue
            for use in scope.uses.get(key, ()):
                reaching = self.facts.values.reaching(key, scope, use.order, use.guard)
                if reaching and all(map(self._binds_gradient, reaching)):
                    yield use

    def _binds_gradient(self, binding: Binding) -> bool:
        """True if a name is bound to a gradient, or runs over a list of them."""
        if binding.kind != "for" or binding.index:
            return binding.kind == "assign" and dotted(binding.value).endswith(".grad")
        over = binding.value
        if isinstance(over, cst.Name):
            lists = self.facts.values.reaching(over.value, binding.scope, binding.order)
            over = lists[0].value if len(lists) == 1 and lists[0].kind == "assign" else None
        return isinstance(over, (cst.ListComp, cst.GeneratorExp)) and dotted(over.elt).endswith(".grad")

    def _helpers(self, call: Call) -> Sequence[Function]:
        """Return the functions of the file that a call runs, including a closure passed to an optimizer's `step`."""
        facts = self.facts
        if call.name == "step" and call.path != "self.step":
            closure = call.argument(None, "closure") or next(iter(call.positional), None)
            atoms = [each.atom for each in facts.evaluate(closure, call)] if closure is not None else []
            return [atom for atom in atoms if isinstance(atom, Function) and atom.facts is facts]
        if not facts.graph.named(call.name):
            return ()
        if is_super(call.receiver) and call.scope.owner is not None:
            inherited = facts.classes.method(call.scope.owner, call.name, above=True)
            found = [inherited] if inherited is not None else []
        else:
            found = [function for function, _ in self._versions(call)] or facts.functions(call)
        return [function for function in found if function.facts is facts]

    def _versions(self, call: Call) -> list[tuple[Function, list[Scope]]]:
        """Return the methods that a call of `self.name()` may run where derived classes replace that of its class."""
        owner = call.scope.owner
        if owner is None or call.path != f"self.{call.name}" or not self.facts.classes.derived(owner):
            return []
        return self.facts.classes.versions(owner, call.name)

    def _may_use_scaler(self, call: Call) -> bool:
        """True if a call outside the file may use a scaler: one that is an argument, or that its object holds.

        `self.forward(x)` only computes.
        """
        if call.path == "self.forward":
            return False
        own = call.path == f"self.{call.name}"
        methods = [*(each for each, _ in self._versions(call)), *(self.facts.functions(call) if own else ())]
        if any(_may_use_scaler(method.scope) for method in methods if method.facts is not self.facts):
            return True
        if call.name[:1].isupper() or _DOES_NOT_STEP.search(call.name) or self._helpers(call):
            return False
        given = [*call.positional, *call.keywords.values()]
        if any("scaler" in last_name(each).lower() for each in given) and not (
            call.receiver is not None and is_scaler(self.facts, call.receiver, call)
        ):
            return True
        if isinstance(call.func, cst.Name) and "scaler" in call.func.value.lower():
            return True  # timm's `loss_scaler(loss, optimizer)`
        return (
            call.path.startswith("self.")
            and call.path.count(".") == 1
            and not self.facts.paths(call)
            and call.name not in call.scope.bindings
            and self.facts.base_unknown(call.scope.owner)
            and bool(_MAY_USE_OWN_SCALER.search(call.name))
        )

    def scaled_at(
        self,
        trace: Trace,
        place: int,
        is_scaled: Callable[[TraceStep], bool],
        ends: Sequence[StepKind] = ENDS["scaled"],
    ) -> TraceStep | None:
        """Return the backward pass whose gradients are still scaled at a place of a trace; None if there is none.

        is_scaled: which backward passes scale. ends: what ends the state.
        """
        step, scalers = trace[place], self.facts.part(Scalers)
        for index, backward in before(trace, place):
            if not is_scaled(backward) or chosen(backward, step):
                continue
            scale = backward.scale
            enabled = scalers.enabled(scale.subject, scale.call) if scale is not None else ALWAYS
            guard = step.guard.joined(backward.guard, enabled)
            ended = (
                each.kind != "get_scale" or self.computes_with_scale(each.call)
                for each in between(trace, index, place, *ends, guard=guard)
            )
            if guard.possible and not any(ended):
                return backward
        return None

    def computes_with_scale(self, read: Call) -> bool:
        """True if the scale that a call reads may be computed with: it reaches a product, a division or other code.

        A scale that is only printed, logged or compared changes no gradient.
        """
        unscales = read.name == "_unscale_grads_"
        return unscales or (not read.is_statement and self._computed_with(read.node, read, set()))

    def _computed_with(self, node: cst.CSTNode, at: Record, seen: set[object]) -> bool:
        parents = self.facts.index.parents
        while (parent := parents.get(node)) is not None:
            if isinstance(parent, cst.BinaryOperation):
                if isinstance(parent.operator, (cst.Multiply, cst.Divide)):
                    return True
            elif isinstance(parent, cst.Arg):
                call = parents[parent]
                name = dotted(call.func).rsplit(".", 1)[-1] if isinstance(call, cst.Call) else ""
                if not name or _ONLY_READS.search(name):
                    return False
                if name not in _CONVERTS and not self._leaves_gradients(call):
                    return True
                parent = call
            elif isinstance(parent, (cst.Assign, cst.AnnAssign, cst.AugAssign)):
                targets = (
                    [each.target for each in parent.targets] if isinstance(parent, cst.Assign) else [parent.target]
                )
                return isinstance(parent, cst.AugAssign) or any(self._target_computed(t, at, seen) for t in targets)
            elif isinstance(parent, (cst.Return, cst.Yield, cst.Lambda)):
                return True
            elif isinstance(parent, (cst.BaseSmallStatement, cst.BaseCompoundStatement, *_READS)):
                return False
            node = parent
        return False

    def _leaves_gradients(self, node: cst.CSTNode) -> bool:
        """True if a call is of functions of the file that change no tensor in place, as one that returns a norm."""
        call = self.facts.call_of(node)
        functions = self._helpers(call) if call is not None else ()
        return bool(functions) and all(
            not any(each.name.endswith("_") or self._helpers(each) for each in scope.calls)
            and not any(
                ".grad" in key or isinstance(getattr(each.statement, "operator", None), _IN_PLACE)
                for key, bindings in scope.bindings.items()
                for each in bindings
            )
            for scope in (function.scope for function in functions)
        )

    def _target_computed(self, target: cst.CSTNode, at: Record, seen: set[object]) -> bool:
        """True if the value of a name may be computed with; a subscript, as `logs["scale"]`, is no name."""
        key = dotted(target)
        if not key:
            return not isinstance(target, cst.Subscript)
        if (key, at.scope) in seen:
            return False
        seen.add((key, at.scope))
        owner = at.scope.owner if key.startswith("self.") else None
        places = owner.descendants() if owner is not None else at.scope.descendants()
        return any(
            self._computed_with(use.node, use, seen)
            for place in places
            for use in place.uses.get(key.split(".", 1)[0], ())
            if use.path == key
        )


class _OwnTraces(Traces):
    """The traces of a module, as the code of other files sees them: without what it calls in further modules."""

    def of(self, scope: Scope) -> Trace:
        """Return the steps of one function."""
        return self._trace(scope) if self._has_steps(scope, ()) else ()

    def _elsewhere(self, _: Call) -> list[TraceStep]:
        return []


def _may_use_scaler(method: Scope) -> bool:
    """True if a method may use the scaler of its object, itself or through what it calls."""
    return any("scaler" in use.path.lower() for uses in method.uses.values() for use in uses) or any(
        is_super(call.receiver) or _MAY_USE_OWN_SCALER.search(call.name) for call in method.calls
    )
