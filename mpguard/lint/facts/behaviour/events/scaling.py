"""Events of a GradScaler and of scaled gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint.facts.behaviour.events.event import Event, created, finds, is_scaler
from mpguard.lint.facts.program.api_names import CLIPS
from mpguard.lint.facts.program.lattice import Object
from mpguard.lint.facts.syntax.view import aliases, called

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView


@finds("scaler")
def _scalers(facts: BehaviourView) -> Iterator[Event]:
    """Yield the calls that create a GradScaler."""
    yield from created(facts, "scaler")


@finds("scale")
def _scales(facts: BehaviourView) -> Iterator[Event]:
    """Yield `scaler.scale(loss)`."""
    for call in called(facts, "scale"):
        if call.receiver is not None and call.positional and is_scaler(facts, call.receiver, call):
            yield Event("scale", call, facts, call.receiver)


@finds("unscale")
def _unscales(facts: BehaviourView) -> Iterator[Event]:
    """Yield `scaler.unscale_(optimizer)`, and `accelerator.unscale_gradients()`."""
    for call in called(facts, "unscale_", "unscale_gradients"):
        yield Event("unscale", call, facts, call.argument(0, "optimizer"))


@finds("update")
def _updates(facts: BehaviourView) -> Iterator[Event]:
    """Yield `scaler.update()`."""
    for call in called(facts, "update"):
        if call.receiver is not None and is_scaler(facts, call.receiver, call):
            yield Event("update", call, facts, call.receiver)


@finds("scaler_step")
def _scaler_steps(facts: BehaviourView) -> Iterator[Event]:
    """Yield `scaler.step(optimizer)`."""
    for call in called(facts, "step"):
        optimizer = call.argument(0, "optimizer")
        if call.receiver is not None and optimizer is not None and is_scaler(facts, call.receiver, call):
            yield Event("scaler_step", call, facts, optimizer)


@finds("get_scale")
def _scale_reads(facts: BehaviourView) -> Iterator[Event]:
    """Yield reads of the scale: gradients may be unscaled by hand, or a skipped step detected."""
    for call in called(facts, "get_scale", "_get_scale_async", "_unscale_grads_"):
        yield Event("get_scale", call, facts, call.receiver)


@finds("clip")
def _clips(facts: BehaviourView) -> Iterator[Event]:
    """Yield calls that clip gradients."""
    wanted = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
    for call in called(facts, *wanted, *(alias for name in wanted for alias in aliases(facts, name))):
        yield Event("clip", call, facts, call.argument(0, "parameters"))
    for name, calls in facts.calls.items():
        if "clip" in name and name not in wanted:
            for call in calls:
                atoms = [each.atom for each in facts.evaluate(call.func, call)]
                if any(isinstance(atom, Object) and atom.path in CLIPS for atom in atoms):
                    yield Event("clip", call, facts, call.argument(0, "parameters"))
