"""Models that are loaded into an attribute of a module of the project: `self.unet = UNet.from_pretrained(...)`."""

from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint.facts.behaviour.events.event import Event
from mpguard.lint.facts.behaviour.view import BehaviourView
from mpguard.lint.facts.syntax.nodes import text_of
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope

#: Attributes of a model that say what it is: `self.backbone.config.hidden_size`.
_READ = frozenset({"config", "device", "dtype"})


def outer_module(load: Event, bound: Binding | None) -> tuple[str, Record] | None:
    """Return the name and record of the module that contains a loaded model, where an optimizer takes all of it.

    bound: the name that the loaded model gets. None if it is no attribute, or if the methods of the module run it
    without gradients, or give the attribute to other code.
    """
    owner, facts = load.scope.owner, load.facts
    assert isinstance(facts, BehaviourView)
    if bound is None or not bound.key.startswith("self.") or load.scope.name != "__init__" or owner is None:
        return None
    if facts.class_kind(owner) != "model" or facts.base_unknown(owner) or not _is_run(bound.key, owner, facts):
        return None
    for other in (facts, *(facts.users(owner.name) or ())):
        for created in other.calls.get(owner.name, ()):
            for key, bindings in created.scope.bindings.items():
                for each in bindings:
                    if each.value is not None and _is_made_by(each, created, other) and _is_optimized(key, other):
                        return key, each
    return None


def objects_of(owner: Scope, facts: BehaviourView, depth: int = 4) -> Iterator[tuple[str, Binding | None, Call]]:
    """Yield the calls that create a module of the project, or one that contains it, with the names that they get.

    The name is empty for an object that no name gets, such as an adapter that `setattr` puts into a model.
    """
    for other in (facts, *(facts.users(owner.name) or ())):
        other.need_uses(owner.name)
        for created in other.calls.get(owner.name, ()):
            outer = created.scope.owner
            if outer is not None and outer is not owner and other.class_kind(outer) == "model":
                if depth:
                    yield from objects_of(outer, other, depth - 1)
                continue
            named = (
                (key, each)
                for key, bindings in created.scope.bindings.items()
                for each in bindings
                if each.value is not None and _is_made_by(each, created, other)
            )
            yield (*next(named, ("", None)), created)


def _is_run(attribute: str, owner: Scope, facts: BehaviourView) -> bool:
    """True if the methods of a module call an attribute, with gradients, and do nothing else with it."""
    runs = False
    for method in owner.descendants():
        for use in method.uses.get("self", ()):
            if not f"{use.path}.".startswith(f"{attribute}."):
                continue
            if not _READ.isdisjoint(use.path.split(".")):
                continue
            call = facts.call_of(facts.parent(use.node))
            if call is None or call.func is not use.node:
                return False
            if facts.is_inference(call) or any(region.kind == "no_grad" for region in facts.regions(call)):
                return False
            runs = runs or use.path == attribute
    return runs


def _is_made_by(binding: Binding, created: Record, facts: BehaviourView) -> bool:
    """True if a name is bound to an object as it was created, or moved to a device: `model = Net().cuda()`."""
    node = binding.value
    while (call := facts.call_of(node)) is not None:
        if call is created:
            return True
        if call.name not in ("cuda", "to", "train") or call.receiver is None:
            return False
        node = call.receiver
    return False


def _is_optimized(key: str, facts: BehaviourView) -> bool:
    return any(
        text_of(given) == f"{key}.parameters()"
        for calls in facts.calls.values()
        for call in calls
        for given in call.positional
    )
