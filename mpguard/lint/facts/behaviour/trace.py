"""Traces: the operations on scaled gradients in order of control flow, with the helper functions of the file expanded.

A *trace* is the run of one function that is called by no other function of the file: scale, backward, unscale, clip,
step, update in order, with the steps of helper functions at their calls. Each trace step has its path condition, the
loops around it, and the calls that lead to it. Rules look for steps between two others whose path conditions are
compatible.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events.event import Event, is_scaler, last_name
from mpguard.lint.facts.behaviour.trace_steps import Trace, TraceStep
from mpguard.lint.facts.program.api_names import CLIPS, SCALER_NAMES
from mpguard.lint.facts.program.lattice import UNKNOWN, Atom, Constant, Function, Object
from mpguard.lint.facts.syntax.nodes import dotted, is_super
from mpguard.lint.facts.syntax.path_condition import (
    ALWAYS,
    MOST_CONDITIONS,
    All,
    Any,
    Condition,
    Flag,
    PathCondition,
    compatible,
    negated,
)
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope, Use
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

_Operation = Literal[
    "scale", "backward", "framework", "unscale", "clip", "scaler_step", "step", "update", "get_scale",
]  # fmt: skip
#: The events that are steps of a trace.
_OPERATIONS: tuple[_Operation, ...] = get_args(_Operation)
#: Functions that take a scaler without stepping with it: `save_checkpoint(model, scaler)`.
_DOES_NOT_STEP = lazy_pattern(
    r"(?i)save|load|checkpoint|ckpt|restore|resume|print|log|info|state|isinstance|hasattr|getattr|bool|^len$"
)
#: Functions of other modules that may measure gradients: `grad_norm`, `log_gradients`; none that clips in place.
_READS_GRADIENTS = lazy_pattern(r"(?i)^(?!.*(?:clip|zero)).*grad.*[a-z]$")
#: Methods that may use the scaler of their object; one that only sets the learning rate, as `update_lr`, does not.
_MAY_USE_OWN_SCALER = lazy_pattern(
    r"(?i)scal|clip|optim|backward|^(?!.*(?:(?:^|_)lrs?(?:_|$)|learning_?rate|sched)).*(?:step|update)"
)
#: Functions that take a value and do not compute with it, and those that return it.
_ONLY_READS = lazy_pattern(
    r"(?i)print|log|info|debug|warn|write|format|postfix|description|scalar|metric|^(?:append|update|str|repr|isinstance)$"
)
_CONVERTS = frozenset({"float", "int", "round", "item", "min", "max", "abs", "log2"})
#: Expressions whose value does not depend on the size of a number in them, or is text.
_READS = (cst.Comparison, cst.FormattedStringExpression, cst.FormattedString)
#: Packages of torch's scaler, and of one that is derived from it: fairscale's sums up over ranks what `unscale_` found.
_SCALER_PACKAGES = ("torch.", "fairscale.")
#: Operators that multiply or divide a tensor in place.
_IN_PLACE = (cst.MultiplyAssign, cst.DivideAssign)
#: Code that uses the scaler of an object: `manager.scaler.update()`.
_USES_SCALER = lazy_pattern(rb"(?i)\w\.\w*scaler\b")
#: Steps of one trace, and depth of calls.
_MAX_STEPS = 3_000
_MAX_DEPTH = 6


class Traces:
    """The traces of one file."""

    def __init__(self, facts: BehaviourView) -> None:
        self.facts = facts
        self._relevant: dict[Scope, bool] = {}
        self._items: dict[Scope, list[TraceStep | Call]] = {}
        self._leaves_between = 0

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
            record = item if isinstance(item, Call) else item.record
            both = guard.joined(record.guard)
            if len(both) > MOST_CONDITIONS or not both.possible or self._leaves_between <= 0:
                continue
            self._leaves_between -= 1
            around = (*loops, *(loop for loop in record.loops if not self._runs_once(loop, record)))
            if isinstance(item, TraceStep):
                yield dataclasses.replace(item, guard=both, loops=around, via=via)
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
        name = f"class#{self.facts.graph.family(call.scope.owner)}"
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
            found += [(m.record.order, 1, m) for m in self._steps_of.get(scope, ())]
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
                if kind == "framework" and self._helpers(event.call):
                    continue  # a method of the file: its operations are visible
                scale = self.scaled.get(event.call) if kind == "backward" else None
                may_scale = self.may_scale.get(event.call) if kind == "backward" else None
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
                if "clip" in call.name and self.clips_elsewhere(call):
                    event = Event("clip", call, facts, call.argument(0))
                    found.setdefault(scope, []).append(TraceStep("clip", call, event))
                if _READS_GRADIENTS.search(call.name) and any(f.facts is not facts for f in facts.functions(call)):
                    found.setdefault(scope, []).append(TraceStep("read", call))
            for call in scope.calls:
                if self._may_use_scaler(call):
                    found.setdefault(scope, []).append(TraceStep("passed", call))
        return found

    def clips_elsewhere(self, call: Call) -> bool:
        """True if a call runs a function of another module that clips with torch's functions, and knows no scaler."""
        functions = self.facts.functions(call)
        return bool(functions) and all(
            function.facts is not self.facts
            and any(path in CLIPS for each in function.scope.calls for _, path in self.facts.of(each).paths(each))
            and not any("scaler" in name.lower() for name in function.scope.uses)
            for function in functions
        )

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

    @cached_property
    def scaled(self) -> dict[Call, Event]:
        """The backward passes that run on a scaled loss on every path, with the call that scales it."""
        return {
            backward: scale
            for backward, scale in self.may_scale.items()
            # The loss must be scaled on every path to this backward pass: an unscaled path may be the one of this step.
            if not (scale.call.guard - backward.guard)
        }

    @cached_property
    def may_scale(self) -> dict[Call, Event]:
        """The backward passes whose loss may be scaled, with the call that scales it."""
        scales = {event.call: event for event in self.facts.events("scale")}
        found = {}
        for backward in self.facts.events("backward") if scales else ():
            if backward.subject is None:
                continue
            records = self.facts.flow.backward(backward.subject, backward.call, depth=1)
            scale = next((scales[r] for r in records if isinstance(r, Call) and r in scales), None)
            if scale is not None and compatible(scale.guard, backward.guard):
                found[backward.call] = scale
        return found

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
            inherited = facts.graph.method(call.scope.owner, call.name, above=True)
            found = [inherited] if inherited is not None else []
        else:
            found = [function for function, _ in self._versions(call)] or facts.functions(call)
        return [function for function in found if function.facts is facts]

    def _versions(self, call: Call) -> list[tuple[Function, list[Scope]]]:
        """Return the methods that a call of `self.name()` may run where derived classes replace that of its class."""
        owner = call.scope.owner
        if owner is None or call.path != f"self.{call.name}" or not self.facts.graph.derived(owner):
            return []
        return self.facts.graph.versions(owner, call.name)

    def _may_use_scaler(self, call: Call) -> bool:
        """True if a call outside the file may use a scaler: one that is an argument, or that its object holds.

        `self.forward(x)` only computes.
        """
        if call.path == "self.forward":
            return False
        replaced = (function for function, _ in self._versions(call) if function.facts is not self.facts)
        if any(_may_use_scaler(function.scope) for function in replaced):
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

    # -- identity of objects ----------------------------------------------------------------------------

    def own(self, node: cst.CSTNode | None, at: Record) -> bool:
        """True if a scaler is created in the file from one of torch's classes.

        It may be None on another path, and unknown, as one that a helper returns.
        """
        atoms = [each.atom for each in self.facts.evaluate(node, at)]
        made = [atom for atom in atoms if not (isinstance(atom, Constant) and atom.value in (None, False))]
        torchs = [atom for atom in made if _is_torch_scaler(atom, self.facts)]
        return bool(torchs) and all(
            _is_torch_scaler(atom, self.facts) or _stands_in(atom) or atom is UNKNOWN for atom in made
        )

    def like_torch(self, node: cst.CSTNode | None, at: Record) -> bool:
        """True if a scaler is torch's, or may be: not a wrapper's, nor a class of another library or of the tree."""
        if self.own(node, at):
            return True
        if self._is_never_set(dotted(node), at):
            return False
        values = [each.atom for each in self.facts.evaluate(node, at)]
        if values and all(each == Constant(None) for each in values):
            return False  # all callers train without a scaler
        return dotted(node).split(".", 1)[0] not in ("accelerator", "engine", "fabric") and all(
            not isinstance(each, Object) or each.path.startswith(_SCALER_PACKAGES) for each in values
        )

    def _is_never_set(self, key: str, at: Record) -> bool:
        """True if nothing sets an attribute of `self`: a class without bases or subclasses initializes others only."""
        owner, name = at.scope.owner, key.removeprefix("self.")
        if owner is None or key == name or "." in name or owner.base_names or owner.method("__init__") is None:
            return False
        facts = self.facts.of(at)
        # All that the file does with the name is to read attributes of it: `self.scaler.scale`.
        may_set = re.compile(rf"\b{name}\b(?!\.)|\bsetattr\(|__dict__|__getattr__")
        return (
            not facts.bindings(key, at)
            and may_set.search(stripped(facts.file_text)) is None
            and not facts.project.derived_elsewhere(facts.path, owner.name)
        )

    def enabled(self, node: cst.CSTNode | None, at: Record) -> PathCondition:
        """Return the path condition under which a scaler is enabled."""
        guard, off = PathCondition(), []
        for each in self.facts.evaluate(node, at):
            if isinstance(each.atom, Object) and each.atom.call is not None and each.atom.kind == "scaler":
                enabled = self.facts.of(each.atom.call).enabled(each.atom.call, each.atom.path)
                if enabled.possible or not each.guard:
                    guard = guard.joined(enabled)
                else:  # another scaler, which does nothing, of a branch without AMP
                    off.append(negated(All(tuple(each.guard))))
        return guard.given(*off)

    def same(self, one: cst.CSTNode | None, at: Record, other: cst.CSTNode | None, there: Record) -> bool:
        """True if two expressions are definitely the same object: created by one call, or one name in one function."""
        if one is None or other is None:
            return False
        made, made_there = self._creating_calls(one, at), self._creating_calls(other, there)
        text = self.facts.short(one) == self.facts.short(other)
        if made is not None and made_there is not None:
            # A helper that returns what it is given may return the object of any of its callers: these are several.
            return bool(made & made_there) and (text or len(made) == len(made_there) == 1)
        place, elsewhere = dotted(one), dotted(other)
        return text and (at.scope is there.scope or (place.startswith("self.") and elsewhere == place))

    def differ(self, one: cst.CSTNode | None, at: Record, other: cst.CSTNode | None, there: Record) -> bool:
        """True if two expressions are definitely different objects."""
        made, made_there = self._creating_calls(one, at), self._creating_calls(other, there)
        return made is not None and made_there is not None and not made & made_there

    def optimized(self, step: TraceStep) -> list[Call | None]:
        """Return the calls that create the models of the optimizers of an unscale or a step; None for an unknown one.

        A model is known where an optimizer of torch gets `model.parameters()`, and no other parameters later.
        """
        found: list[Call | None] = []
        for each in self.facts.evaluate(step.optimizer, step.record):
            made = each.atom.call if isinstance(each.atom, Object) and each.atom.kind == "optimizer" else None
            known = made is not None and "add_param_group" not in self.facts.of(made).calls
            found.append(self.model_of(made.argument(0, "params"), made) if made is not None and known else None)
        return found

    def model_of(self, parameters: cst.CSTNode | None, at: Record) -> Call | None:
        """Return the call that creates the model of `model.parameters()`; None if it is not known."""
        atoms = [each.atom for each in self.facts.evaluate(parameters, at)]
        call = atoms[0].call if len(atoms) == 1 and isinstance(atoms[0], Object) else None
        if call is None or call.name != "parameters":
            return None
        made = self._creating_calls(call.receiver, call)
        return made.pop() if made is not None and len(made) == 1 else None

    def are_apart(self, one: Call, other: Call) -> bool:
        """True if two calls create models of which none is a part of the other, or wraps it."""
        owners = [call.scope.owner for call in (one, other)]
        if owners[0] is not owners[1] and any(o is not None and self.facts.class_kind(o) == "model" for o in owners):
            return False
        given = [(each, call) for call in (one, other) for each in (*call.positional, *call.keywords.values())]
        atoms = [each.atom for node, call in given for each in self.facts.evaluate(node, call)]
        return one is not other and not any(isinstance(atom, Object) and atom.kind == "model" for atom in atoms)

    def _creating_calls(self, node: cst.CSTNode | None, at: Record) -> set[Call] | None:
        """Return the calls that may have created an object; None if one of them is unknown."""
        atoms = [each.atom for each in self.facts.evaluate(node, at)]
        made = [atom for atom in atoms if not isinstance(atom, Constant)]
        if not made or any(not isinstance(atom, Object) or atom.call is None for atom in made):
            return None
        return {atom.call for atom in made if isinstance(atom, Object) and atom.call is not None}


def _may_use_scaler(method: Scope) -> bool:
    """True if a method may use the scaler of its object, itself or through what it calls."""
    return any("scaler" in use.path.lower() for uses in method.uses.values() for use in uses) or any(
        is_super(call.receiver) or _MAY_USE_OWN_SCALER.search(call.name) for call in method.calls
    )


def _is_torch_scaler(atom: Atom, facts: BehaviourView) -> bool:
    """True for one of torch's scalers, or of a class derived from it whose methods call those of torch."""
    if not isinstance(atom, Object) or atom.kind != "scaler":
        return False
    if atom.cls is not None and atom.facts is not None:
        return any(_is_torch_path(base) for base in facts.ancestry(atom.cls)) and all(
            any(call.name == name and is_super(call.receiver) for call in method.calls)
            for name in ("scale", "unscale_", "step", "update")
            if (method := atom.cls.method(name)) is not None
        )
    return _is_torch_path(atom.path)


def _is_torch_path(path: str) -> bool:
    return path.startswith(_SCALER_PACKAGES) and path.rsplit(".", 1)[-1] in SCALER_NAMES


def _stands_in(atom: Atom) -> bool:
    """True for what has the name of torch's class, for a torch without it: `except: from ... import nullcontext as`."""
    return (
        isinstance(atom, Object) and atom.cls is not None and (atom.cls.name in SCALER_NAMES or atom.kind == "context")
    )
