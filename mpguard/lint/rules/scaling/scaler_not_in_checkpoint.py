from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Binding,
    Call,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    Object,
    Rule,
    Scope,
    any_of,
    compatible,
    dotted,
    roles,
    scaler_dtype,
)

#: The message about a call of a function of another module.
_ELSEWHERE = "`{expr}` saves the optimizer's state, but not the GradScaler's"


class ScalerNotInCheckpoint(Rule):
    """A checkpoint to resume from contains the optimizer's state but not the GradScaler's.

    ## What it does
    Reports a saved `optimizer.state_dict()` in a file that also loads an optimizer's state, scales its losses with a
    GradScaler of its own and saves no `scaler.state_dict()`; a function that saves it, gets a scaler as an argument and
    does nothing with it; a function of another module that saves it and does not get the scaler; and a scaler whose
    state is saved but not loaded where the optimizer's is.

    ## Why is this bad
    A new GradScaler starts at a scale of 65536. The resumed run overflows again until the scale has come down: each of
    these steps is skipped, while the schedule and the step count advance. If the scale had grown, small gradients
    underflow until it has grown again, 2,000 steps for a factor of two. The resumed run differs from the run that was
    not interrupted.

    ## Known limits
    Checkpoints without an optimizer's state are for inference and not reported, nor are those of a file that never
    loads one, or only in a function that nothing calls, in a branch that no call asks for (`resume=False`), or after
    reading a key that they lack, or of a file with another name than those that are loaded: whether a run resumes from
    them is unknown. A scaler under BF16 is reported by MPG207,
    one that is created in each epoch by MPG209: it has no state to restore. Silent if the scaler comes from outside the
    file, is passed to a function that may save it, or has a name that cannot be followed (a loop over objects), and if
    nothing calls `update()`: the scale then never changes. An unknown base class may save the scaler; the rule then
    considers only the checkpoint of the file itself.
    """

    code, name = "MPG208", "scaler-not-in-checkpoint"
    severity = "warning"
    message = "the checkpoint holds `{expr}`, but not the GradScaler's state"
    help = "save `scaler.state_dict()` too, and load it on resuming"
    triggers = (
        any_of(b".scale(", b"caler.load_state_dict(", b"caler.state_dict("),
        any_of(b".update(", b"caler.load_state_dict(", b"caler.state_dict("),
        any_of(b"save"),
    )
    triggers_nearby = (any_of(b"Scaler"), any_of(b"state_dict("))
    examples = (
        Bad(
            """\
import os

import torch
from torch.cuda.amp import GradScaler, autocast


def run_fold(fold, model, loader, path):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler()
    if os.path.exists(path):
        states = torch.load(path)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    for epoch in range(10):
        for x in loader:
            with autocast():
                loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # !


for fold in range(5):
    run_fold(fold, build(), loader, f"fold{fold}.pt")
""",
        ),
        Good(
            """\
import torch
from torch.cuda.amp import GradScaler, autocast


def train_epoch(model, loader, optimizer, epoch):
    scaler = GradScaler()
    for x in loader:
        with autocast():
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def main(model, loader, optimizer, path):
    states = torch.load(path)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    for epoch in range(10):
        train_epoch(model, loader, optimizer, epoch)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        handed = {made: event for event, made in self._from_helpers(facts)}
        own = (event for event in facts.events("scaler") if event.call not in handed)
        scalers = [event for event in own if self._adapts(event, facts) and not self._is_made_anew(event, facts)]
        scalers += [event for event in handed.values() if self._is_used(event, facts)]
        checkpoints = facts.checkpoints
        if (unsaved := self._loaded_only(facts)) is not None:
            saved, loaded = unsaved
            notes = (Note("the scaler's state is loaded here", loaded.span),)
            yield self.at(saved, expr=facts.short(saved.call.node), notes=notes)
            return
        if (given := self._given_in_vain(facts)) is not None:
            saved, param = given
            notes = (Note("the scaler that is given and not saved", param.span),)
            yield self.at(saved, expr=facts.short(saved.call.node), notes=notes)
            return
        if not scalers:
            if (unloaded := self._saved_only(facts)) is not None:
                yield self._lost(*unloaded, facts)
            return
        names = {key.rsplit(".", 1)[-1] for event in scalers for key in self._keys(event, facts)}
        if not names or any(checkpoints.is_passed_on(name) for name in names):
            return
        states = checkpoints.of("state", "scaler")
        if not facts.events("state"):
            yield from self._saved_elsewhere(scalers, facts)
        if not states and not checkpoints.unclear("state") and checkpoints.resumed():
            reported: set[Scope | None] = set()
            for saved in checkpoints.saved("optimizer"):
                if checkpoints.is_never_loaded(saved):
                    continue
                scaler = next((each for each in scalers if self._same_run(each, saved, facts)), None)
                part = saved.scope.owner or saved.scope
                if scaler is not None and part not in reported and not scaler_dtype.computes_without_float16(facts):
                    reported.add(part)  # one for a class: its other checkpoint files are the same mistake
                    evidence = [Note("the scaler is created here", scaler.span)]
                    if len(loads := checkpoints.of("restore", "optimizer")) == 1:
                        evidence.append(Note("the optimizer's state is loaded here", loads[0].span))
                    yield self.at(saved, expr=facts.short(saved.call.node), notes=tuple(evidence))
        restored = checkpoints.of("restore", "optimizer")
        lost = not checkpoints.of("restore", "scaler") and not checkpoints.unclear("restore")
        if states and restored and lost:
            yield self._lost(states[0], restored[0], facts)

    def _lost(self, saved: Event, restored: Event, facts: Facts) -> Diagnostic:
        """Return the finding about a scaler's state that is saved, and not loaded where the optimizer's is."""
        message = f"`{facts.short(saved.call.node)}` is saved, but not loaded with the optimizer's state"
        return self.at(saved, message=message, notes=(Note("the optimizer's state is loaded here", restored.span),))

    def _saved_only(self, facts: Facts) -> tuple[Event, Event] | None:
        """Return a scaler's state that a file saves, and an optimizer's that it loads without the scaler's; or None.

        None if a file that uses its functions loads a scaler's state, or may do so.
        """
        checkpoints = facts.checkpoints
        saved = [each for each in checkpoints.saved("scaler") if each.scope.name != "state_dict"]
        restored = [each for each in checkpoints.of("restore", "optimizer") if each.scope.name != "load_state_dict"]
        if not saved or not restored or checkpoints.of("restore", "scaler") or checkpoints.unclear("restore"):
            return None
        home = restored[0].scope.owner or restored[0].scope
        users = facts.users(home.name) if home is (saved[0].scope.owner or home) else None
        if not users or any("caler.load_state_dict" in each.source.text for each in users):
            return None
        return saved[0], restored[0]

    def _loaded_only(self, facts: Facts) -> tuple[Event, Event] | None:
        """Return an optimizer's state that is saved, and the scaler's that is loaded and never saved; or None."""
        checkpoints = facts.checkpoints
        delegates = ("state_dict", "load_state_dict")  # methods of a wrapper, which save and load nothing by themselves
        loaded = [each for each in checkpoints.of("restore", "scaler") if each.scope.name not in delegates]
        if not loaded or not checkpoints.of("restore", "optimizer"):
            return None
        if any(each.scope.name not in delegates for each in checkpoints.of("state", "scaler")):
            return None
        if checkpoints.unclear("state"):
            return None
        saved = checkpoints.saved("optimizer")
        return (saved[0], loaded[0]) if saved else None

    def _given_in_vain(self, facts: Facts) -> tuple[Event, Binding] | None:
        """Return an optimizer's state that a function saves, and the scaler that it gets and never uses; or None."""
        for saved in facts.checkpoints.saved("optimizer"):
            for name, bindings in saved.scope.bindings.items():
                if not name.lower().endswith("scaler") or [each.kind for each in bindings] != ["param"]:
                    continue
                if not any(name in place.uses for place in saved.scope.descendants()):
                    return saved, bindings[0]
        return None

    def _from_helpers(self, facts: Facts) -> Iterator[tuple[Event, Call]]:
        """Yield the calls of helpers that return the scaler of a loss, as if they created it, with what creates it."""
        for scale in facts.events("scale"):
            made = [each.atom for each in facts.evaluate(scale.call.receiver, scale.call)]
            for binding in facts.bindings(dotted(scale.call.receiver), scale.call):
                call = facts.call_of(binding.value)
                if call is None or len(made) != 1 or not isinstance(made[0], Object) or made[0].kind != "scaler":
                    continue
                if made[0].call is not None and made[0].call is not call and facts.functions(call):
                    yield Event("scaler", call, facts), made[0].call

    def _saved_elsewhere(self, scalers: list[Event], facts: Facts) -> Iterator[Diagnostic]:
        """Report a function of another module that saves the optimizer's state, and does not get the scaler."""
        scopes = {scope for each in scalers for scope in self._called_scopes(each.scope, facts)}
        scopes |= {
            scope
            for each in scalers
            if each.scope.owner is not None and any(key.startswith("self.") for key in self._keys(each, facts))
            for scope in each.scope.owner.descendants()
        }
        for call, other in facts.checkpoints.saved_elsewhere("optimizer"):
            if call.scope not in scopes or other.of("state", "scaler") or other.unclear("state"):
                continue
            if (other.resumed() or facts.checkpoints.resumed()) and not scaler_dtype.computes_without_float16(facts):
                notes = (Note("the scaler is created here", scalers[0].span),)
                yield self.at(call, expr=facts.short(call.node), message=_ELSEWHERE, notes=notes)
                return

    def _is_used(self, scaler: Event, facts: Facts) -> bool:
        """True if the code around a scaler scales with one and updates it."""
        near = facts.reachable(scaler.scope)
        return scaler.guard.possible and all(
            any(event.scope in near for event in events) for events in (facts.events("scale"), facts.events("update"))
        )

    def _is_made_anew(self, event: Event, facts: Facts) -> bool:
        """True if each epoch creates the scaler, in a function that gets the optimizer: there is no state to restore.

        The optimizer may be that of the method's object. A function that is called once a fold creates both.
        """
        if event.scope.kind != "function" or event.key.startswith("self."):
            return False
        calls = list(facts.callers(event.scope))
        stepped = [step.subject for step in facts.events("scaler_step") if step.scope is event.scope]
        gets_optimizer = any(roles.OPTIMIZER.search(param.name) for param in event.scope.params) or any(
            dotted(each).startswith("self.") for each in stepped
        )
        return bool(calls) and gets_optimizer and all(call.loops for call in calls)

    def _adapts(self, scaler: Event, facts: Facts) -> bool:
        """True if the scale of a scaler changes: the code scales with it and updates it."""
        if not self._is_used(scaler, facts):
            return False
        enabled = facts.enabled(scaler.call, facts.called_path(scaler.call))
        return enabled.possible and not scaler_dtype.scales_without_need(scaler, enabled, facts)

    def _keys(self, scaler: Event, facts: Facts) -> Iterator[str]:
        """Yield the names that a scaler is bound to."""
        for scope in facts.scopes:
            for key, bindings in scope.bindings.items():
                if any(self._binds(binding, scaler) for binding in bindings):
                    yield key

    def _binds(self, binding: Binding, scaler: Event) -> bool:
        if binding.statement is not scaler.call.statement or binding.scope is not scaler.scope:
            return False
        found = scaler.facts.resolve(binding.key, binding.scope, binding.order + 1) if binding.index else ()
        return not binding.index or any(isinstance(each.atom, Object) and each.atom.kind == "scaler" for each in found)

    def _same_run(self, scaler: Event, saved: Event, facts: Facts) -> bool:
        """True if a scaler and a checkpoint belong to one run."""
        near = facts.reachable(saved.scope)
        if scaler.call.loops and scaler.call.loops[-1:] == saved.call.loops[-1:]:
            return False  # a new one in each iteration, at whose end the checkpoint is written
        if not near & {scaler.scope, scaler.scope.owner} or not compatible(scaler.guard, saved.guard):
            return False
        if any(key.startswith("self.") for key in self._keys(scaler, facts)) or scaler.scope.kind != "function":
            return True
        lived = self._called_scopes(scaler.scope, facts)
        if saved.scope in lived:
            return True
        return saved.key.startswith("self.") and not facts.repeated(scaler.scope)

    def _called_scopes(self, scope: Scope, facts: Facts) -> set[Scope]:
        """Return a function and those that run within its calls, while its local names exist."""
        found, pending = {scope}, [scope]
        while pending:
            current = pending.pop()
            inner = [each.scope for call in current.calls for each in facts.functions(call) if each.facts is facts]
            for each in [*inner, *current.children]:
                if each not in found:
                    found.add(each)
                    pending.append(each)
        return found
