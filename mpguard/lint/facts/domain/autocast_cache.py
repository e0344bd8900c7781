"""The casts of weights that autocast keeps until the outermost region is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.domain.training_use import TrainingUse
from mpguard.lint.facts.syntax.nodes import constant, dotted, text_of
from mpguard.lint.facts.syntax.path_condition import PathCondition
from mpguard.policy.dtype import HALF_DTYPES

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.events import Event
    from mpguard.lint.facts.behaviour.regions import Region
    from mpguard.lint.facts.domain.view import DomainView

#: The dtype of the weights themselves, in which autocast casts none of them.
_OF_WEIGHTS = lazy_pattern(r"(?:\.weight|\bparameters\(\)\))\.dtype$")


def keeps_no_casts(region: Region, facts: DomainView) -> bool:
    """True if a region keeps no casts of weights: `cache_enabled=False`, or `dtype=model.head.weight.dtype`."""
    if region.call is None:
        return False
    if constant(region.call.keywords.get("cache_enabled")) == (False,):
        return True
    given = region.call.argument(1, "dtype")
    if given is None:
        return False
    home = facts.of(region.call)
    key = dotted(given)
    values = [bound.value for bound in home.bindings(key, region.call)] if key and "." not in key else [given]
    return bool(values) and all(
        value is not None and _OF_WEIGHTS.search(text_of(value)) is not None for value in values
    )


def has_low_weights(region: Region, event: Event, facts: DomainView) -> bool:
    """True if the weights are in FP16 or BF16 whenever a region is entered: autocast keeps casts of FP32 ones only.

    They are created in it, cast to it, or get the region's dtype from FSDP's policy.
    """
    if facts.kinds(event.subject, event.call) & {"engine"}:
        return True  # DeepSpeed's weights are in FP16 or BF16, or it enters autocast by itself
    item = event.call.withs[-1] if event.call.withs else None
    inside = [call for call in event.scope.calls if item is not None and item in call.withs]
    if any(facts.part(TrainingUse).has_layers_in(half, call.func, call) for call in inside for half in HALF_DTYPES):
        return True
    for guard, dtype in region.dtypes:
        entered = region.guard.joined(guard, event.guard)
        if dtype is None:
            return False
        policies = (
            each
            for made in facts.events_around("policy", event.scope)
            if not PathCondition(made.call.guard - _where_optimized(made)) - entered
            for each in made.may_be(dtype)
        )
        weights = (
            each for half in HALF_DTYPES for each in facts.part(TrainingUse).weights(half) if not each.guard - entered
        )
        if entered.possible and not [*policies, *weights]:
            return False
    return bool(region.dtypes)


def _where_optimized(made: Event) -> PathCondition:
    """Return the conditions under which the function that creates a policy creates an optimizer after it."""
    later = (call for call in made.scope.calls if call.order > made.order)
    guards = [call.guard for call in later if "optimizer" in made.facts.kinds(call.node, call)]
    return guards[0] if guards else PathCondition()
