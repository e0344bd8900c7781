"""GradScalers as objects: which one an expression is, when it is enabled, and which losses it scales."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.behaviour.events.event import Event
from mpguard.lint.facts.behaviour.trace_steps import TraceStep
from mpguard.lint.facts.program.api_names import SCALER_NAMES
from mpguard.lint.facts.program.lattice import UNKNOWN, Atom, Constant, Object
from mpguard.lint.facts.syntax.nodes import dotted, is_super
from mpguard.lint.facts.syntax.path_condition import All, PathCondition, compatible, negated
from mpguard.lint.facts.syntax.records import Call, Record
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: Packages of torch's scaler, and of one that is derived from it: fairscale's sums up over ranks what `unscale_` found.
_SCALER_PACKAGES = ("torch.", "fairscale.")


class Scalers:
    """The scalers of one file, their optimizers, and the losses that they scale."""

    def __init__(self, facts: BehaviourView) -> None:
        self.facts = facts

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
        found = {}
        for backward in self.facts.events("backward") if self.facts.events("scale") else ():
            scale = self.scale_of(backward.subject, backward.call)
            if scale is not None and compatible(scale.guard, backward.guard):
                found[backward.call] = scale
        return found

    def scale_of(self, loss: cst.BaseExpression | None, at: Record, depth: int = 1) -> Event | None:
        """Return the `scaler.scale(...)` that a loss comes from."""
        scales: dict[Record, Event] = {event.call: event for event in self.facts.events("scale")}
        records = self.facts.flow.backward(loss, at, depth=depth) if loss is not None and scales else ()
        return next((scales[record] for record in records if record in scales), None)

    def never_enabled(self, loss: Event) -> Call | None:
        """Return the call that creates the scaler of a loss with `enabled=` False in each run; None if it may be on."""
        scale = self.scale_of(loss.subject, loss.call, depth=3)
        made = [each.atom for each in self.facts.evaluate(scale.subject, scale.call)] if scale is not None else []
        calls = [atom.call for atom in made if _is_torch_scaler(atom, self.facts) and isinstance(atom, Object)]
        off = (
            call is not None
            and self.facts.enabled_argument(call, path := self.facts.of(call).called_path(call)) is not None
            and not self.facts.enabled(call, path).possible
            for call in calls
        )
        return calls[0] if calls and len(calls) == len(made) and all(off) else None

    def own(self, node: cst.CSTNode | None, at: Record, *methods: str) -> bool:
        """True if a scaler is created in the file from one of torch's classes.

        It may be None on another path, and unknown, as one that a helper returns. False for an attribute that a base
        class in another file sets: methods of the base may use it. methods: those of a derived class that must run
        torch's; all of the protocol by default.
        """
        key = dotted(node)
        if key.startswith("self.") and key.count(".") == 1 and not self.facts.of(at).bindings(key, at):
            return False
        atoms = [each.atom for each in self.facts.evaluate(node, at)]
        made = [atom for atom in atoms if not (isinstance(atom, Constant) and atom.value in (None, False))]
        torchs = [atom for atom in made if _is_torch_scaler(atom, self.facts, methods)]
        return bool(torchs) and all(atom in torchs or _stands_in(atom) or atom is UNKNOWN for atom in made)

    def like_torch(self, node: cst.CSTNode | None, at: Record, *methods: str) -> bool:
        """True if a scaler is torch's, or may be: not a wrapper's, nor a class of another library or of the tree."""
        if self.own(node, at, *methods):
            return True
        if self._is_never_set(dotted(node), at):
            return False
        values = [each.atom for each in self.facts.evaluate(node, at)]
        if values and all(each == Constant(None) for each in values):
            return False  # all callers train without a scaler
        return {"accelerator", "engine", "fabric"}.isdisjoint(dotted(node).split(".")) and all(
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


def _is_torch_scaler(atom: Atom, facts: BehaviourView, methods: Collection[str] = ()) -> bool:
    """True for one of torch's scalers, or of a class derived from it whose methods call those of torch."""
    if not isinstance(atom, Object) or atom.kind != "scaler":
        return False
    if atom.cls is not None and atom.facts is not None:
        return any(_is_torch_path(base) for base in facts.ancestry(atom.cls)) and all(
            any(call.name == name and is_super(call.receiver) for call in method.calls)
            for name in methods or ("scale", "unscale_", "step", "update")
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
