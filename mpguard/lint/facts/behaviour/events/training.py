"""Events of training: backward passes, optimizer steps, and the frameworks that run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.behaviour.events.event import (
    Event,
    created,
    finds,
    is_optimizer,
    is_scaler,
    last_name,
)
from mpguard.lint.facts.program import api_names, project_words
from mpguard.lint.facts.syntax.nodes import constant, dotted, is_super
from mpguard.lint.facts.syntax.records import Call
from mpguard.lint.facts.syntax.view import aliases, called

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView


@finds("backward")
def _backwards(facts: BehaviourView) -> Iterator[Event]:
    """Yield `loss.backward()`; not one that raises, because the scaled loss has freed the graph."""
    for call in called(facts, "backward"):
        if call.receiver is not None and _plain_backward(facts, call) and not _has_no_graph(facts, call):
            yield Event("backward", call, facts, call.receiver)


def _has_no_graph(facts: BehaviourView, call: Call) -> bool:
    """True if `scaler.scale(loss).backward()` stands before the `loss.backward()` of the same loss."""
    loss = dotted(call.receiver)
    bound = [each.order for each in call.scope.bindings.get(loss, ())]
    return bool(loss) and any(
        isinstance(each.receiver, cst.Call)
        and dotted(each.receiver.func).endswith("scaler.scale")
        and [dotted(arg.value) for arg in each.receiver.args] == [loss]
        and each.scope is call.scope
        and each.order < call.order
        and each.loops == call.loops
        and not each.guard - call.guard
        and "retain_graph" not in each.keywords
        and not any(each.order < order < call.order for order in bound)
        for each in facts.calls["backward"]
    )


def _plain_backward(facts: BehaviourView, call: Call) -> bool:
    """True for `loss.backward()`, as opposed to `engine.backward(loss)` and that of an autograd function."""
    if call.positional and constant(call.positional[0]) is None and not isinstance(call.positional[0], cst.Call):
        return False
    if dotted(call.receiver).split(".")[-1] in {"self", "ctx", *api_names.FRAMEWORK_RECEIVERS}:
        return False
    if is_super(call.receiver):
        return False
    kinds = facts.kinds(call.receiver, call)
    return not kinds & (api_names.RUNS_BACKWARD | {"trainer", "model", "framework", "optimizer", "own", "scaler"})


@finds("framework")
def _frameworks(facts: BehaviourView) -> Iterator[Event]:
    """Yield backward passes that a framework runs: `accelerator.backward(loss)`, `self.manual_backward(loss)`."""
    for call in called(facts, "backward", "manual_backward"):
        if not _plain_backward(facts, call):
            yield Event("framework", call, facts, call.receiver)


@finds("step")
def _steps(facts: BehaviourView) -> Iterator[Event]:
    """Yield `optimizer.step()`."""
    for call in called(facts, "step"):
        if (
            call.receiver is not None
            and not is_scaler(facts, call.receiver, call)
            and is_optimizer(facts, call.receiver, call)
        ):
            yield Event("step", call, facts, call.receiver)


@finds("accelerator")
def _accelerators(facts: BehaviourView) -> Iterator[Event]:
    """Yield the calls that create an `Accelerator`."""
    yield from created(facts, "accelerator")


@finds("trainer")
def _trainers(facts: BehaviourView) -> Iterator[Event]:
    """Yield the calls that create a framework's trainer."""
    yield from created(facts, "trainer")


@finds("initialize")
def _initializes(facts: BehaviourView) -> Iterator[Event]:
    """Yield `deepspeed.initialize(...)`."""
    for call in called(facts, "initialize", *aliases(facts, "initialize")):
        if any(api_names.kind_of(path) == "engine" for _, path in facts.paths(call)):
            yield Event("initialize", call, facts, call.node)


@finds("prepare")
def _prepares(facts: BehaviourView) -> Iterator[Event]:
    """Yield `accelerator.prepare(...)`."""
    for call in called(facts, "prepare", "prepare_model", "prepare_optimizer", *aliases(facts, "prepare")):
        receiver = call.receiver if call.receiver is not None else _method_of(facts, call)
        if receiver is None:
            continue
        kinds = facts.kinds(receiver, call)
        if "accelerator" in kinds or (kinds <= {""} and "accelerator" in last_name(receiver).lower()):
            yield Event("prepare", call, facts, receiver)


def _method_of(facts: BehaviourView, call: Call) -> cst.BaseExpression | None:
    """Return `accelerator` for a call of `prepare = accelerator.prepare`."""
    bound = [each.value for each in facts.bindings(call.name, call, call.guard) if each.kind == "assign"]
    return bound[0].value if len(bound) == 1 and isinstance(bound[0], cst.Attribute) else None


@finds("shard")
def _shards(facts: BehaviourView) -> Iterator[Event]:
    """Yield FSDP wrappers: `FullyShardedDataParallel(model)`, `fully_shard(model)`."""
    wanted = ("FullyShardedDataParallel", "fully_shard")
    for call in called(facts, *wanted, *(other for name in wanted for other in aliases(facts, name))):
        if api_names.kind_of(facts.called_path(call)) in ("fsdp1", "fsdp2"):
            yield Event("shard", call, facts, call.argument(0, "module"))


@finds("policy")
def _policies(facts: BehaviourView) -> Iterator[Event]:
    """Yield FSDP's policy objects: `MixedPrecision(...)` of FSDP1, `MixedPrecisionPolicy(...)` of FSDP2."""
    wanted = ("MixedPrecision", "MixedPrecisionPolicy")
    for call in called(facts, *wanted, *(other for name in wanted for other in aliases(facts, name))):
        if api_names.kind_of(facts.called_path(call)) in ("fsdp1_policy", "fsdp2_policy"):
            given = call.argument(0, "param_dtype")
            yield Event("policy", call, facts, call.node, facts.dtypes(given, call) if given is not None else ())


@finds("arguments")
def _arguments(facts: BehaviourView) -> Iterator[Event]:
    """Yield `TrainingArguments(...)` of transformers, and the classes that trl and others derive from it."""
    for name, calls in facts.calls.items():
        if not name.endswith(("TrainingArguments", "Config")):
            continue
        for call in calls:
            if any(
                (path.split(".", 1)[0] in project_words.ARGUMENTS_PACKAGES and name.endswith("TrainingArguments"))
                or path.startswith("trl.")
                for _, path in facts.paths(call)
            ):
                yield Event("arguments", call, facts, call.node)
