"""Casts of inputs to FP16 or BF16 by which a training program loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour import accelerate_precision
from mpguard.lint.facts.behaviour.events import Event, EventKind
from mpguard.lint.facts.domain.casts import CastFacts
from mpguard.lint.facts.domain.optimizers import Optimizers
from mpguard.lint.facts.domain.training import Training
from mpguard.lint.facts.domain.training_use import TrainingUse
from mpguard.lint.facts.domain.view import DomainView
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import PathCondition, compatible
from mpguard.lint.facts.syntax.records import Record
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.autocast_state import AutocastState

#: Words of options that choose the precision of a program.
_PRECISION = lazy_pattern(r"(?i)half|fp_?(?:16|32)|float_?(?:16|32)|bf16|precision|dtype|(?<![a-z])amp(?![a-z])")
#: Names of values that models need in FP32: targets, coordinates, times.
_NEEDS_FLOAT32 = lazy_pattern(
    r"(?i)target|label|box|gt(?:$|_)|loss|coord|pos(?:$|[e_i])|point|xyz|loc(?:$|[s_a])|depth|angle|time|sigma"
)
#: The frequencies of rotary embeddings, which checkpoints in FP16 were trained with: MPG108 is about them.
FREQUENCIES = lazy_pattern(r"(?:^|[._])inv(?:erse)?_freqs?$")
#: Functions whose values are at most 1; those that join tensors; methods that change only their shape or place.
_WAVES = frozenset({"sin", "cos"})
_JOINS = frozenset({"cat", "concat", "stack"})
_FROM_NUMBERS = frozenset({"from_numpy", "tensor", "as_tensor"})
_SHAPES = frozenset({
    "reshape", "view", "expand", "repeat", "repeat_interleave", "unsqueeze", "squeeze", "flatten", "transpose",
    "permute", "contiguous", "to", "cuda", "clone", "detach", "float",
})  # fmt: skip
#: Names of methods and of dtypes that make a value FP16 or BF16.
_LOW = frozenset({"half", "float16", "bfloat16"})
#: Events of policies that choose the dtype of operations.
_FRAMEWORKS: tuple[EventKind, ...] = ("accelerator", "initialize", "trainer")


def loses_nothing(cast: Event, dtype: Dtype, guards: list[PathCondition], training: Training) -> bool:
    """True if a cast of a tensor to a low dtype, under some path conditions, has no effect on what is trained.

    It is of sines and cosines, or of rotary frequencies, or the models that take the value compute in that dtype
    anyway: under an autocast (FP16 only if it is not hard-coded: such a cast stays when the policy becomes BF16), or
    with the frozen weights under their adapters; or no optimizer trains these models. Or an option of the program asks
    for the dtype where no policy decides it and no weights in it are trained.
    """
    facts = cast.facts
    assert isinstance(facts, DomainView)
    if cast.kind != "cast" or facts.part(CastFacts).is_module(cast):
        return False
    if FREQUENCIES.search(cast.key) or _is_wave(facts, cast.subject, cast.call):
        return True
    return all(_enters_low_models(cast, dtype, guard) or _is_own_mode(cast, dtype, guard, training) for guard in guards)


def is_chosen_input(cast: Event, guards: list[PathCondition]) -> bool:
    """True if an option that names a precision makes a tensor FP16: it is a part of the program's own policy.

    Not the loss: scaled, it overflows in FP16.
    """
    facts = cast.facts
    assert isinstance(facts, DomainView)
    if cast.kind != "cast" or facts.part(CastFacts).is_module(cast) or not guards:
        return False
    return all(
        _names_precision(guard) and not facts.part(TrainingUse).inputs(cast, guard).training_sinks for guard in guards
    )


def _enters_low_models(cast: Event, dtype: Dtype, guard: PathCondition) -> bool:
    """True if only models take the value, all of which compute in its dtype, or it is cast back before it is used."""
    facts = cast.facts
    assert isinstance(facts, DomainView)
    reach = facts.part(TrainingUse).inputs(cast, guard)
    if reach.training_sinks or reach.outside:
        return False
    fixed = dtype is Dtype.FP16 and _is_hard_coded(cast) and not _names_precision(guard)
    takers = [
        call
        for call in reach.models
        if not any(facts.of(call).part(Optimizers).is_untaken(key, call) for key in (call.path, dotted(call.receiver)))
    ]
    if takers and any(map(_NEEDS_FLOAT32.search, {cast.key, *reach.names})):
        return False
    for call in takers:
        states = [each for each in facts.of(call).autocast_states.at(call) if compatible(each.guard, guard)]
        adapters = facts.part(TrainingUse).has_adapters(call.path, call)
        prepared = accelerate_precision.precision(facts) == dtype.short
        allowed = {dtype, "off"} if adapters or prepared else {dtype}
        if not states or (fixed and not adapters):
            return False
        if any(each.dtype not in allowed and not _is_entered_with(each, guard) for each in states):
            return False
    return True


def _names_precision(guard: PathCondition) -> bool:
    """True if an option that chooses the precision is part of a path condition."""
    return any(map(_PRECISION.search, map(str, guard.words())))


def _is_hard_coded(cast: Event) -> bool:
    """True if the dtype stands at the cast: `x.half()`, `x.to(torch.float16)`."""
    given = (*cast.call.positional, *cast.call.keywords.values())
    return cast.call.name in _LOW or any(dotted(each).rpartition(".")[2] in _LOW for each in given)


def _is_entered_with(state: AutocastState, guard: PathCondition) -> bool:
    """True if the condition of a cast is that of an autocast whose dtype a config chooses: both have the same one."""
    return state.dtype is None and bool(state.guard) and not state.guard - guard


def _is_own_mode(cast: Event, dtype: Dtype, guard: PathCondition, training: Training) -> bool:
    """True if an option asks for the dtype under a condition under which no policy is active and no weights have it."""
    if not _names_precision(guard):
        return False
    facts = cast.facts
    assert isinstance(facts, DomainView)
    callers = facts.programs_of(cast.scope, lambda _: False)
    takers = (call.scope for call in (*training.reach.models, *(sink.call for sink in training.sinks)))
    files = dict.fromkeys(map(facts.of, (*callers, *takers)))
    return not any(_has_policy(each, guard) or each.part(TrainingUse).weights(dtype) for each in files)


def _has_policy(facts: DomainView, guard: PathCondition) -> bool:
    """True if a file has a policy for the dtype of operations that may be active under a path condition."""
    if not guard.flags().isdisjoint(accelerate_precision.policy_options(facts)):
        return False
    return any(map(facts.events, _FRAMEWORKS)) or any(
        compatible(facts.enabled(event.call, facts.called_path(event.call)), event.guard, guard)
        for event in facts.events("autocast")
    )


def _is_wave(facts: DomainView, node: cst.CSTNode | None, at: Record, depth: int = 4) -> bool:
    """True for sines and cosines, concatenated or in another shape: FP16 holds them as exactly as any product does."""
    if depth < 0:
        return False
    if isinstance(node, cst.Call):
        call = facts.call_of(node)
        if call is None or call.name in _WAVES:
            return call is not None
        if call.name in _JOINS and call.positional and isinstance(call.positional[0], (cst.List, cst.Tuple)):
            parts = call.positional[0].elements
            return bool(parts) and all(_is_wave(facts, each.value, call, depth - 1) for each in parts)
        if call.name in _FROM_NUMBERS and call.positional:
            return _is_wave(facts, call.positional[0], call, depth - 1)
        return call.name in _SHAPES and _is_wave(facts, call.receiver, call, depth)
    if isinstance(node, cst.Subscript):
        return _is_wave(facts, node.value, at, depth)
    bindings = facts.bindings(dotted(node), at, at.guard) if isinstance(node, cst.Name) else []
    if len(bindings) != 1 or bindings[0].kind not in ("assign", "for"):
        return False
    value = bindings[0].value
    if bindings[0].kind == "for":
        each_of = value.elements if isinstance(value, (cst.Tuple, cst.List)) else ()
        return bool(each_of) and all(_is_wave(facts, each.value, bindings[0], depth - 1) for each in each_of)
    return _is_wave(facts, value, bindings[0], depth - 1)
