"""Backward passes, optimizer steps, and the frameworks that run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.events.event import Event, called, created, finds, is_optimizer, is_scaler, last_name
from mpguard.lint.walk import Call, constant, dotted

if TYPE_CHECKING:
    from mpguard.lint.facts import Facts


@finds("backward")
def _backwards(facts: Facts) -> Iterator[Event]:
    for call in called(facts, "backward"):
        if call.receiver is not None and _plain_backward(facts, call):
            yield Event("backward", call, facts, call.receiver)


def _plain_backward(facts: Facts, call: Call) -> bool:
    """`loss.backward()`, as against `engine.backward(loss)` and an autograd function's."""
    if call.positional and constant(call.positional[0]) is None and not isinstance(call.positional[0], cst.Call):
        return False
    if dotted(call.receiver).split(".")[-1] in (
        "self",
        "super",
        "ctx",
        "optimizer",
        "engine",
        "accelerator",
        "fabric",
    ):
        return False
    if isinstance(call.receiver, cst.Call) and dotted(call.receiver.func) == "super":
        return False
    kinds = facts.kinds(call.receiver, call)
    return not kinds & {
        "engine",
        "accelerator",
        "trainer",
        "fabric",
        "model",
        "framework",
        "optimizer",
        "own",
        "scaler",
    }


@finds("framework")
def _frameworks(facts: Facts) -> Iterator[Event]:
    """Backward passes that something else runs: `accelerator.backward(loss)`, `facts.manual_backward(loss)`."""
    for call in called(facts, "backward", "manual_backward"):
        if not _plain_backward(facts, call):
            yield Event("framework", call, facts, call.receiver)


@finds("step")
def _steps(facts: Facts) -> Iterator[Event]:
    for call in called(facts, "step"):
        if (
            call.receiver is not None
            and not is_scaler(facts, call.receiver, call)
            and is_optimizer(facts, call.receiver, call)
        ):
            yield Event("step", call, facts, call.receiver)


@finds("accelerator")
def _accelerators(facts: Facts) -> Iterator[Event]:
    yield from created(facts, "accelerator")


@finds("trainer")
def _trainers(facts: Facts) -> Iterator[Event]:
    yield from created(facts, "trainer")


@finds("initialize")
def _initializes(facts: Facts) -> Iterator[Event]:
    yield from created(facts, "engine")


@finds("prepare")
def _prepares(facts: Facts) -> Iterator[Event]:
    for call in called(facts, "prepare"):
        if call.receiver is None:
            continue
        kinds = facts.kinds(call.receiver, call)
        if "accelerator" in kinds or (kinds <= {""} and "accelerator" in last_name(call.receiver).lower()):
            yield Event("prepare", call, facts, call.receiver)
