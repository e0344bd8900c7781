"""The mixed precision that Accelerate applies to the models of one file, and what is derived from it."""

from __future__ import annotations

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.regions import Region
from mpguard.lint.facts.behaviour.view import BehaviourView
from mpguard.lint.facts.program import keywords, project_words
from mpguard.lint.facts.program.lattice import constants_of
from mpguard.lint.facts.syntax.nodes import constant, dotted, text_of
from mpguard.lint.facts.syntax.path_condition import Flag, PathCondition, compatible, negated
from mpguard.lint.facts.syntax.records import Binding, Call

#: Flags under which a dtype follows the launcher's policy.
_POLICY = lazy_pattern(r"mixed_precision|(?:bf|fp)16_enabled")
#: The values of `mixed_precision`.
MODES = frozenset({"no", "fp16", "bf16", "fp8"})
#: The distributed types under which Accelerate enters no autocast: the engine has the dtypes.
_ENGINES = frozenset({"DEEPSPEED", "MEGATRON_LM"})
#: Options of launch lines, and arguments of `Accelerator`, that choose such an engine.
_ENGINE_OPTIONS = frozenset({"use_deepspeed", "deepspeed_config_file", "use_megatron_lm"})
_ENGINE_ARGUMENTS = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
#: The arguments of `Accelerator` that change neither the backward pass nor the clipping, without an engine and FP16.
_PLAIN_ARGUMENTS = frozenset({
    "mixed_precision", "kwargs_handlers", "device_placement", "split_batches", "dataloader_config", "log_with",
    "project_dir", "project_config", "logging_dir", "step_scheduler_with_optimizer", "even_batches", "dispatch_batches",
    "use_seedable_sampler", "cpu", "rng_types", "dynamo_backend", "dynamo_plugin", "gradient_accumulation_steps",
})  # fmt: skip
#: The arguments of `Accelerator` that are its precision; `fp16` is one of older versions.
_PRECISIONS = frozenset({"mixed_precision", "fp16"})
#: What a project has that gives an Accelerator a precision from outside of its code.
_LAUNCHES = ("accelerate launch", "accelerate config", "accelerate.commands", "mixed_precision")
#: The same in a program whose own option has the name of the last.
_LAUNCHES_BESIDE_OPTION = (*_LAUNCHES[:-1], "accelerate_mixed_precision", "notebook_launcher", "compute_environment")
#: An option of a program's own that has the name of that of accelerate's launcher.
_OWN_OPTION = lazy_pattern(r"add_argument\([^()]*[\"']--mixed[_-]precision[\"']")
#: Options of launch lines that are about an engine or sharding, or about those and accumulation.
_ENGINE = lazy_pattern(r"deepspeed|fsdp|megatron|parallelism_config|\btpu\b")
_NOT_PLAIN = lazy_pattern(rf"gradient_accumulation_steps|{_ENGINE.pattern}")


def follows_policy(guard: PathCondition) -> bool:
    """True if what holds under a path condition is chosen by the precision of the launcher or a DeepSpeed plugin."""
    return any(map(_POLICY.search, guard.flags())) or Flag("deepspeed_plugin") in guard


def precision(facts: BehaviourView) -> str | None:
    """Return the `mixed_precision` that all Accelerators of the file have; None if it is unknown.

    It is a constant in the code, or what all launch configs of the file set.
    """
    created = [event.call for event in facts.events("accelerator")]
    given = [_modes_in_code(call, facts) for call in created]
    if not any(given) and not any(call.positional or keywords.passed(call, facts) is None for call in created):
        given = [{config.mixed_precision for config in facts.project.configs_for(facts.path)}]
    modes = set[object]().union(*given) if all(given) else set()
    found = modes.pop() if len(modes) == 1 else None
    return found if isinstance(found, str) else None


def is_fixed(facts: BehaviourView) -> bool:
    """True if the code gives all Accelerators of the file a constant precision: no launch config changes it."""
    created = facts.events("accelerator")
    return bool(created) and all(constant(each.call.keywords.get("mixed_precision")) is not None for each in created)


def may_be_mixed(facts: BehaviourView) -> bool:
    """True if something visible sets a `mixed_precision` for the Accelerators of the file, or if it creates none.

    That is an argument, a launch config or a launch line. Else their `autocast()` enters no autocast by default.
    """
    created = facts.events("accelerator")
    if not created or any(event.call.positional for event in created):
        return True
    ways = [keywords.passed(event.call, facts) for event in created]
    given = [way["mixed_precision"]() for each in ways for way in each or () if "mixed_precision" in way]
    if any(not (modes := constants_of(each)) or not set(modes) <= {None, "no"} for each in given):
        return True
    if any(config.mixed_precision not in (None, "no") for config in facts.project.configs_for(facts.path)):
        return True
    launches = facts.project.launches_of(facts.path)
    return any(launch.hidden or "mixed_precision" in launch.options for launch in launches)


def asks_for_autocast(facts: BehaviourView) -> bool:
    """True if code gives an Accelerator of the file a precision, and no engine has the dtypes in place of autocast."""
    given = [event.call.keywords.get("mixed_precision") for event in facts.events("accelerator")]
    asked = any(constant(each) not in (("no",), (None,)) for each in given if each is not None)
    return asked and not leaves_autocast_out(facts)


def is_without(facts: BehaviourView) -> bool:
    """True if nothing gives the Accelerators of a file a precision: no argument, and nothing launches with accelerate.

    They place the models and the data, and the code's own mixed precision is the only one.
    """
    created = facts.events("accelerator")
    if not created or facts.project.configs_for(facts.path) or _may_be_launched(facts):
        return False
    ways = [None if event.call.positional else keywords.passed(event.call, facts) for event in created]
    return all(each is not None and all(_PRECISIONS.isdisjoint(way) for way in each) for each in ways)


def leaves_autocast_out(facts: BehaviourView) -> bool:
    """True if the file runs, or may run, under an engine with which Accelerate enters no autocast by itself.

    Launch configs, launch lines and the plugins of its Accelerators show it.
    """
    if any(config.distributed_type in _ENGINES for config in facts.project.configs_for(facts.path)):
        return True
    if any(
        name in event.call.keywords and constant(event.call.keywords[name]) != (None,)
        for event in facts.events("accelerator")
        for name in _ENGINE_ARGUMENTS
    ):
        return True
    return any(
        launch.launcher == "deepspeed"
        or not _ENGINE_OPTIONS.isdisjoint(launch.options)
        or any((word.text or "").startswith(("--deepspeed", "--use_deepspeed")) for word in launch.arguments)
        for launch in facts.project.launches_of(facts.path)
    )


def backward_is_plain(facts: BehaviourView, guard: PathCondition, accumulates: bool = False) -> bool:
    """True if the Accelerators of a file add nothing to `loss.backward()` and torch's clipping at a place.

    Their precision is BF16 or none: by a constant in the code, which the launcher does not change, by all configs of
    the project that have the key from which it is read, by all launch configs or launch lines of the file, because
    another branch has the one with a precision, or because nothing in the project launches with accelerate. The file,
    its launch configs and its launch lines use no engine and no sharding.

    guard: the path condition of the place. accumulates: they may accumulate gradients.
    """
    everywhere = facts.events("accelerator")
    created = [event for event in everywhere if compatible(event.guard, guard)]
    if not created or project_words.SHARDING.search(facts.file_text):
        return False
    configs = facts.project.configs_for(facts.path)
    for event in created:
        call = event.call
        others = [other for other in everywhere if not compatible(other.guard, event.guard)]
        if not call.keywords and any(not _PRECISIONS.isdisjoint(other.call.keywords) for other in others):
            continue
        ways = keywords.passed(call, facts)
        if call.positional or ways is None or any(not way.keys() <= _PLAIN_ARGUMENTS for way in ways):
            return False
        steps = [way["gradient_accumulation_steps"] for way in ways if "gradient_accumulation_steps" in way]
        if not accumulates and any(set(constants_of(each())) != {1} for each in steps):
            return False
        modes = _modes_in_code(call, facts)
        if any("mixed_precision" not in way for way in ways):
            launched_with = {config.mixed_precision for config in configs}
            modes |= launched_with or _launched_modes(facts) or ({None} if _may_be_launched(facts) else {"no"})
        if not modes or not modes <= {"no", "bf16"}:
            return False
    launched = {(config.distributed_type or "").upper() for config in configs}
    adds = _ENGINE if accumulates else _NOT_PLAIN
    return launched <= {"", "NO", "MULTI_GPU", "MULTI_CPU"} and not any(
        launch.launcher == "deepspeed"
        or any(map(adds.search, launch.options))
        or any(adds.search(word.text or "") for word in launch.arguments)
        for launch in facts.project.launches_of(facts.path)
    )


def _modes_in_code(call: Call, facts: BehaviourView) -> set[object]:
    """Return what the call that creates an Accelerator may pass as `mixed_precision`; empty if nothing or unknown."""
    given = call.keywords.get("mixed_precision")
    if given is not None:
        return set(facts.constants(given, call)) or _in_configs(given, facts)
    ways = keywords.passed(call, facts) or ()
    found = [constants_of(way["mixed_precision"]()) for way in ways if "mixed_precision" in way]
    return {mode for modes in found for mode in modes} if all(found) else set()


def _in_configs(given: cst.BaseExpression, facts: BehaviourView) -> set[object]:
    """Return the precisions that configs of the project give a key: `config.train.precision`."""
    _, _, key = dotted(given).rpartition(".")
    return {mode for mode in MODES if key and facts.project.gives_option(facts.path, key, mode)}


def _launched_modes(facts: BehaviourView) -> set[object]:
    """Return the values of `--mixed_precision` of all launch lines of a file; empty if one has none, or may hide it."""
    launches = facts.project.launches_of(facts.path)
    given = [None if launch.hidden else launch.options.get("mixed_precision") for launch in launches]
    values = {each.text if each is not None else None for each in given}
    return set() if None in values else {*values}


def _may_be_launched(facts: BehaviourView) -> bool:
    """True if something may give the Accelerators of a file a precision that is not in their arguments."""
    text = facts.file_text.lower()
    words = _LAUNCHES_BESIDE_OPTION if _OWN_OPTION.search(text) else _LAUNCHES
    return any(word in text or facts.project.asks_for(facts.path, word) for word in words)


def is_derived(region: Region) -> bool:
    """True if the dtype of a region is derived from the precision of the Accelerator, or from the same option.

    `accelerator.mixed_precision` may choose it directly, in a helper, or after it is copied to another option.
    """
    facts, call = region.facts, region.call
    assert isinstance(facts, BehaviourView)
    if follows_policy(region.guard) and not MODES.isdisjoint(region.guard.words()):
        return True
    chosen = [guard for guard, _ in region.dtypes]
    options = {flag for guard in chosen for flag in guard.flags()}
    if any(map(follows_policy, chosen)) or not options.isdisjoint(policy_options(facts)):
        return True
    given = call.argument(1, "dtype") if call is not None else None
    if call is None or given is None:
        return False
    origins = [text_of(given)]
    for record in facts.flow.backward(given, call, depth=2):
        value = record.value if isinstance(record, Binding) else record.node
        origins.append(text_of(value) if value is not None else "")
    return any(map(_POLICY.search, origins))


def policy_options(facts: BehaviourView) -> set[str]:
    """Return the flags and options that choose the precision of the file's Accelerators."""
    found: set[str] = set()
    for event in facts.events("accelerator"):
        given = event.call.keywords.get("mixed_precision")
        if given is not None:
            found.add(dotted(given).rsplit(".", 1)[-1])
            for each in facts.evaluate(given, event.call):
                found |= each.guard.flags()
    return found - {""}


def starts_off(region: Region) -> bool:
    """True if a region is entered only under attributes that begin as False and that a condition may set to True."""
    call = region.call
    owner = call.scope.owner if call is not None else None
    if owner is None:
        return False
    attributes = region.facts.attributes(owner)
    off = [negated(Flag(name)) for name in sorted(region.guard.flags()) if _switched_on(attributes.get(name, []))]
    return bool(off) and not region.guard.given(*off).possible


def _switched_on(bindings: list[Binding]) -> bool:
    """True if an attribute is set to False, and to True under conditions only."""
    values = [constant(binding.value) for binding in bindings]
    return (
        set(values) == {(False,), (True,)}
        and any(value == (False,) and not b.guard for value, b in zip(values, bindings, strict=True))
        and all(b.guard for value, b in zip(values, bindings, strict=True) if value == (True,))
    )
