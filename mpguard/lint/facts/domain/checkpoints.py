"""The states that a file saves to checkpoints and restores: of models, optimizers, scalers.

The state of an object of unknown kind (`for o in objects: o.state_dict()`) may be any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events.event import Event, is_optimizer, is_scaler, last_name
from mpguard.lint.facts.program import project_words, roles
from mpguard.lint.facts.program.lattice import Constant, Object
from mpguard.lint.facts.syntax.nodes import constant, dotted, iterated, text_of
from mpguard.lint.facts.syntax.path_condition import PathCondition, compatible, equality
from mpguard.lint.facts.syntax.records import Call, Record, Scope, Use
from mpguard.lint.reachability import Reachability
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

Role = Literal["model", "optimizer", "scaler", "other", ""]
#: The last part of a path that the code writes.
_FILE_NAME = lazy_pattern(r"[\"'/]([\w-]+\.(?:pth?|ckpt|tar|bin|pkl))[\"']")
#: Functions that return the wrapped model.
_UNWRAPS = project_words.MODEL_UNWRAPPERS | {"unwrap_model"}
_SCHEDULER = lazy_pattern(r"sched|warmup")
_MODEL = lazy_pattern(
    r"model|net(?:work)?(?:_?[gd\d])?$|module|encoder|decoder|generator|discriminator|backbone|ema|critic|actor|policy|head"
)
#: Functions that read a checkpoint; not data, and not a factory (`load_optimizer(args.optimizer)`, `load_scheduler`).
_LOADS = lazy_pattern(r"(?i)^(?!.*(?:data|batch|sched|optim(?:izer)?s?$)).*(?:load|resume|restore)")
#: Ends of the names of classes that hold a GradScaler.
_WRAPPERS = ("GradScaler", "LossScaler", "NativeScaler", "ScalerWithGradNormCount", "AmpScaler", "AMPScaler")
_WARM_START = lazy_pattern(r"(?i)warm[-_ ]?start")


class Checkpoints:
    """The checkpoints of one file."""

    def __init__(self, facts: DomainView) -> None:
        self.facts = facts

    def role(self, event: Event) -> Role:
        """Return the role of the object of a `state` or `restore` event; "" if it is unknown."""
        node = event.subject
        assert node is not None
        if isinstance(node, cst.Subscript) and not last_name(node):
            return ""
        if is_scaler(self.facts, node, event.call) or self._wraps_scaler(node, event.call):
            return "scaler"
        kinds = self.facts.kinds(node, event.call)
        name = last_name(node).lower()
        if "scheduler" in kinds or _SCHEDULER.search(name):
            return "other"
        if is_optimizer(self.facts, node, event.call):
            return "optimizer"
        if "model" in kinds or _MODEL.search(name) or last_name(node) in self.facts.module_names:
            return "model"
        if isinstance(node, cst.Call) and dotted(node.func).rsplit(".", 1)[-1] in _UNWRAPS:
            return "model"
        return ""

    def _wraps_scaler(self, node: cst.CSTNode, at: Call) -> bool:
        """True for an object of a class of the tree that is named after the scaler inside: `NativeScaler`."""
        atoms = [each.atom for each in self.facts.evaluate(node, at) if each.atom != Constant(None)]
        return bool(atoms) and all(
            isinstance(atom, Object) and atom.cls is not None and atom.cls.name.endswith(_WRAPPERS) for atom in atoms
        )

    def saved(self, role: Role) -> list[Event]:
        """Return the states of a role that are written to a file."""
        return [event for event in self.facts.events("state") if self.role(event) == role and self._written(event)]

    def is_never_loaded(self, saved: Event) -> bool:
        """True if a state goes to a file of another name than those that the program resumes from.

        All files that the code loads have names in the code, where it restores an optimizer: `ckpt.pt`, and a state in
        `optimizer.pt`.
        """
        writes = (call for call in saved.scope.calls if call.name == "save" and call.order > saved.order)
        write = next((call for call in writes if compatible(call.guard, saved.guard)), None)
        names = self._file_names(write.argument(1, "f"), write, saved.guard) if write is not None else set()
        reads = [
            call
            for call in self.facts.calls.get("load", ())
            if self.facts.called_path(call).startswith("torch.") and self.facts.part(Reachability).is_used(call.span[0])
        ]
        if not names or not reads or not self.of("restore", "optimizer"):
            return False
        loaded = [self._file_names(call.argument(0, "f"), call, call.guard) for call in reads]
        return all(loaded) and names.isdisjoint(set().union(*loaded))

    def _file_names(self, node: cst.BaseExpression | None, at: Record, guard: PathCondition) -> set[str]:
        """Return the names of files in a path, also in what its names are bound to under a path condition."""
        if node is None:
            return set()
        texts = [text_of(node)]
        for name in set(re.findall(r"(?<![\w.\"'])[A-Za-z_]\w*(?![\w(\"'])", texts[0])):
            bound = self.facts.bindings(name, at)
            texts += [text_of(each.value) for each in bound if each.value is not None and compatible(each.guard, guard)]
        return {name for text in texts for name in _FILE_NAME.findall(text)}

    def saved_elsewhere(self, role: Role) -> Iterator[tuple[Call, Checkpoints]]:
        """Yield the calls of functions of other modules that write states of a role, with the checkpoints there."""
        calls = [call for name, found in self.facts.calls.items() if roles.SAVES.search(name) for call in found]
        for call in sorted(calls, key=lambda each: each.order):
            for function in self.facts.functions(call):
                other = self.facts.of(function.scope)
                if other is not self.facts:
                    other.need_all()
                    within = set(function.scope.descendants())
                    saved = (event for event in other.part(Checkpoints).saved(role) if event.scope in within)
                    if any(self._gets(call, function.scope, event.key, role) for event in saved):
                        yield call, other.part(Checkpoints)

    def _gets(self, call: Call, function: Scope, saved: str, role: Role) -> bool:
        """True if what a function saves is no parameter of it, or the call gives an object of the role for it."""
        name = saved.split(".", 1)[0]
        if name != saved or not any(param.name == name for param in function.params):
            return True
        given = self.facts.values.given(call, function, name)
        return given is not None and (role != "optimizer" or is_optimizer(self.facts, given, call))

    def of(self, kind: Literal["state", "restore"], role: Role) -> list[Event]:
        """Return the events of a kind for objects of a role."""
        return [event for event in self.facts.events(kind) if self.role(event) == role]

    def resumed(self) -> bool:
        """True if an optimizer's state is restored, in the file or by a function that loads.

        Such a function is `load_checkpoint(path, optimizer)`. A warm start from another run does not resume this one,
        nor does a function that nothing calls, or a branch that no call takes.
        """
        if _WARM_START.search(self.facts.file_text):
            return False
        restored = (event for event in self.of("restore", "optimizer") if event.guard.possible)
        used = [event for event in restored if self.facts.part(Reachability).is_used(event.span[0])]
        if used:
            return not all(map(self._lacks_key, used))
        return any(
            is_optimizer(self.facts, arg.value, call) and self._is_used(arg.value, call)
            for name, calls in self.facts.calls.items()
            if _LOADS.search(name)
            for call in calls
            for arg in call.node.args
        )

    def _is_used(self, given: cst.BaseExpression, call: Call) -> bool:
        """True unless the function of the tree that a call runs does nothing with the parameter for an argument.

        That it tests the parameter and returns it is nothing, nor is what it does under another value of a parameter
        than the call passes: `if resume: optimizer.load_state_dict(...)`.
        """
        functions = [function.scope for function in self.facts.functions(call)]
        taken = [
            (function, param.name)
            for function in functions
            for param in function.params
            if self.facts.values.given(call, function, param.name) is given
        ]
        return not taken or any(
            self._is_taken(use, function, call)
            for function, name in taken
            for use in function.uses.get(name, ())
            if use.path != name or not self._is_only_tested(use)
        )

    def _is_only_tested(self, use: Use) -> bool:
        """True if a name is compared, or is a part of a condition or of what is returned."""
        parent = self.facts.of(use).parent
        node = parent(use.node)
        if isinstance(node, (cst.Comparison, cst.ComparisonTarget)):
            return True
        while isinstance(node, (cst.BooleanOperation, cst.UnaryOperation, cst.Element, cst.Tuple)):
            node = parent(node)
        return isinstance(node, (cst.If, cst.Return))

    def _is_taken(self, use: Use, function: Scope, call: Call) -> bool:
        """True unless a constant that a call passes to its function, or a default, rules out the condition of a use."""
        flags = use.guard.flags()
        for param in function.params:
            given = self.facts.values.given(call, function, param.name) if param.name in flags else None
            default = param.default if param.name in flags and not call.starred else None
            literal = constant(given if given is not None else default) or ()
            if literal and not any(
                not (value is None or isinstance(value, (bool, str)))
                or compatible(use.guard.given(equality(param.name, value)))
                for value in literal
            ):
                return False
        return True

    def _lacks_key(self, restored: Event) -> bool:
        """True if a state is restored after a key is read that no checkpoint of the file has: it raises a KeyError."""
        given = restored.call.argument(0, "state_dict")
        loaded = dotted(given.value) if isinstance(given, cst.Subscript) else ""
        if not loaded or not all(map(self._is_in_plain_dict, self.saved("optimizer"))):
            return False
        return any(
            use.path == loaded
            and use.order <= restored.order
            and not use.guard - restored.guard
            and not set(use.loops) - set(restored.call.loops)
            and self._is_unknown_key(use)
            for use in restored.scope.uses.get(loaded.partition(".")[0], ())
        )

    def _is_in_plain_dict(self, saved: Event) -> bool:
        """True if a state is an entry of a dict whose keys are all literals."""
        element = self.facts.parent(saved.call.node)
        holder = self.facts.parent(element) if isinstance(element, (cst.DictElement, cst.IfExp)) else None
        if isinstance(holder, cst.DictElement):
            holder = self.facts.parent(holder)
        return isinstance(holder, cst.Dict) and all(
            isinstance(each, cst.DictElement) and constant(each.key) is not None for each in holder.elements
        )

    def _is_unknown_key(self, use: Use) -> bool:
        """True for `loaded["key"]` with a key that is only read in the file, outside of a `try`."""
        node: cst.CSTNode | None = self.facts.parent(use.node)
        index = node.slice[0].slice if isinstance(node, cst.Subscript) and node.value is use.node else None
        key = constant(index.value) if isinstance(index, cst.Index) else None
        if not key or not isinstance(key[0], str):
            return False
        name = re.escape(key[0])
        if re.search(rf"([\"']){name}\1(?!\s*\](?!\s*=[^=]))|[(,]\s*{name}\s*=[^=]", stripped(self.facts.file_text)):
            return False
        while node is not None and not isinstance(node, cst.FunctionDef):
            node = self.facts.parent(node)
            if isinstance(node, cst.Try) and node.handlers:
                return False
        return True

    def unclear(self, kind: Literal["state", "restore"]) -> bool:
        """True if states are saved from, or restored to, objects of unknown kind: loop variables, parameters."""
        for event in self.of(kind, ""):
            if kind == "state" and not self._written(event):
                continue
            if not event.key:
                return True
            found = self.facts.values.reaching(event.key, event.scope, event.order)
            if any(binding.kind in ("for", "param") for binding in found):
                return True
        return False

    def writes(self, state: Event | Call) -> list[Call]:
        """Return the calls that write a state, or the result of a call: `torch.save(...)`, or a function that saves."""
        call = state if isinstance(state, Call) else state.call
        return [sink.call for sink in self.facts.flow.forward(call.node, call).sinks if sink.kind == "saved"]

    def passed_through(self, cast: Event) -> list[Call]:
        """Return the calls of a function that returns the values of its argument cast: `shrink(model.state_dict())`."""
        scope = cast.scope
        bindings = self.facts.bindings(cast.key, cast.call) if cast.key and scope.kind == "function" else []
        given = iterated(bindings[0].value) if len(bindings) == 1 and bindings[0].kind == "for" else None
        sources = self.facts.bindings(dotted(given), bindings[0]) if given is not None and dotted(given) else []
        if len(sources) != 1 or sources[0].kind != "param" or sources[0].scope is not scope:
            return []
        names = self.facts.flow.forward(cast.call.node, cast.call).names
        start = cast.call.span[0]
        returned = any(each.span[0] < start < each.span[1] or dotted(each.value) in names for each in scope.returns)
        return self.facts.callers(scope) if returned else []

    def _written(self, event: Event) -> bool:
        parents = self.facts.index.parents
        node: cst.CSTNode | None = event.call.node
        while node is not None and node is not event.call.line:
            node = parents.get(node)
            call = self.facts.index.call_of.get(node) if isinstance(node, cst.Call) else None
            if call is not None and call is not event.call and roles.SAVES.search(call.name):
                return True
        return self._saved_by_name(event) or bool(self.writes(event))

    def _saved_by_name(self, event: Event) -> bool:
        """True if a name that the statement of an event binds is passed to a function of its scope that saves."""
        statement = event.call.statement
        targets = statement.targets if isinstance(statement, cst.Assign) else ()
        names = {dotted(each.target) for each in targets} - {""}
        return any(
            roles.SAVES.search(call.name) and call.order > event.order and dotted(given) in names
            for call in (event.scope.calls if names else ())
            for given in (*call.positional, *call.keywords.values())
        )

    def is_passed_on(self, uses: str) -> bool:
        """True if an object of this (last) name is passed to code that may save or restore it.

        That is an argument of such a function, an element of a list or dict, an attribute of another object, or the
        return value of a function that the file does not call.
        """
        for scope in self.facts.index.scopes:
            for each in scope.uses.values():
                for use in each:
                    if use.path.rsplit(".", 1)[-1] == uses and self._passes_on(use):
                        return True
        return False

    def _passes_on(self, use: Use) -> bool:
        parents = self.facts.index.parents
        node: cst.CSTNode = use.node
        parent = parents.get(node)
        while isinstance(parent, (cst.Element, cst.StarredElement, cst.DictElement, cst.Tuple, cst.List, cst.Dict)):
            if isinstance(parent, (cst.List, cst.Dict)):
                return True
            node, parent = parent, parents.get(parent)
        if isinstance(parent, cst.Arg):
            above = parents.get(parent)
            call = self.facts.index.call_of.get(above) if isinstance(above, cst.Call) else None
            return call is not None and bool(
                roles.STORES.search(call.name) or call.name in ("register", "append", "setattr")
            )
        if isinstance(parent, cst.Assign) and parent.value is node:
            return any(isinstance(target.target, (cst.Attribute, cst.Subscript)) for target in parent.targets)
        called = (self.facts.of(call) is self.facts for call in self.facts.callers(use.scope))
        return isinstance(parent, cst.Return) and not any(called)
