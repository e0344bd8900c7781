"""Laws that every installed plugin must satisfy, over all recipes, variations of them, and strategies.

A new plugin or recipe is tested without an edit here. Real objects are in test_plugin_objects.py; nothing here imports
a framework.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from policies import CANDIDATES, bases, variations

import mpguard
from mpguard import targets
from mpguard.core.errors import PolicyError
from mpguard.policy.policy import FIELD_NAMES, Policy
from mpguard.targets.inject import Change, differences, inject
from mpguard.targets.plugin import Plugin, plugins
from mpguard.targets.settings import ABSENT, Setting, lookup, merged

TARGETS = tuple(plugins())
STRATEGIES = (None, *targets.STRATEGIES)

#: Targets whose configs can be read back.
READERS = tuple(name for name, plugin in plugins().items() if plugin._reader is not None)

REFUSED = "refused"


@functools.cache
def outcome(target: str, policy: Policy, strategy: str | None) -> Any:
    """The settings and arguments of a plugin for a policy, as one comparable value."""
    plugin = plugins()[target]
    results: list[Any] = []
    for step in (plugin.settings, plugin.build_arguments):
        try:
            found = step(policy, strategy)
        except PolicyError:
            results.append(REFUSED)
        else:
            results.append(repr([(k, v.value if isinstance(v, Setting) else v) for k, v in found.items()]))
    return tuple(results)


def carried_in_fact(target: str) -> set[str]:
    """The fields whose change changes something for a target, found by trying."""
    found: set[str] = set()
    for policy, field in itertools.product(bases(), FIELD_NAMES):
        if field in found:
            continue
        if any(
            outcome(target, policy, strategy) != outcome(target, changed, strategy)
            for changed in variations(policy, field)
            for strategy in STRATEGIES
        ):
            found.add(field)
    return found


def cases() -> Iterator[tuple[Policy, str | None]]:
    yield from itertools.product(bases(), (None, "fsdp2", "deepspeed-zero2"))


def wanted(plugin: Plugin, policy: Policy, strategy: str | None) -> dict[str, Setting] | None:
    """The settings of a valid combination; None where the target refuses the policy."""
    try:
        return plugin.settings(policy, strategy)
    except PolicyError as error:
        assert str(error).split(":")[0] in TARGETS, "a refusal names its target"
        return None


def test_the_candidates_know_every_field_of_a_policy() -> None:
    assert set(CANDIDATES) == set(FIELD_NAMES)


def test_every_value_that_is_tried_is_valid_somewhere() -> None:
    for field, values in CANDIDATES.items():
        reached = {repr(getattr(p, field)) for base in bases() for p in (base, *variations(base, field))}
        assert len(reached) >= min(2, len(values)), f"{field} never changes: the carries law would not see it"


def test_there_are_targets_of_every_kind() -> None:
    assert {"accelerate", "deepspeed", "fsdp2", "te", "torch"} <= set(TARGETS)
    assert {"accelerate", "deepspeed", "megatron"} <= set(READERS)


@pytest.mark.parametrize("target", TARGETS)
def test_carries_is_exactly_what_the_target_acts_upon(target: str) -> None:
    assert carried_in_fact(target) == set(plugins()[target].carries)


def test_the_carries_law_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = plugins()["deepspeed"]
    monkeypatch.setattr(deepspeed, "carries", deepspeed.carries - {"hysteresis"} | {"fuse"})
    assert carried_in_fact("deepspeed") ^ set(deepspeed.carries) == {"hysteresis", "fuse"}


@pytest.mark.filterwarnings("ignore::mpguard.NotCarried")  # tested below
@pytest.mark.parametrize("target", TARGETS)
def test_inject_reaches_the_policy_from_anywhere_and_stays_there(target: str) -> None:
    """From every other policy's config: nothing is left to change, twice is once, the input is as it was."""
    plugin = plugins()[target]
    for strategy in (None, "fsdp2", "deepspeed-zero2"):
        valid = [(policy, settings) for policy in bases() if (settings := wanted(plugin, policy, strategy)) is not None]
        assert valid
        configs: list[dict[str, Any]] = [{}, *(merged({"kept": {"by": ["us"]}}, settings) for _, settings in valid)]
        for (policy, _), config in itertools.product(valid, configs):
            before = copy.deepcopy(config)
            injected, changes = inject(config, policy, target, strategy)
            again, nothing = inject(injected, policy, target, strategy)
            assert config == before, "the config that was given has changed"
            assert differences(injected, policy, target, strategy) == []
            assert (again, nothing) == (injected, [])
            assert injected.get("kept") == config.get("kept")
            assert bool(changes) == (injected != config)


@pytest.mark.parametrize("target", TARGETS)
def test_a_contradiction_is_reported_with_key_found_and_wanted(target: str) -> None:
    plugin = plugins()[target]
    for policy, strategy in cases():
        settings = wanted(plugin, policy, strategy)
        if settings is None:
            with pytest.raises(PolicyError):
                differences({}, policy, target, strategy)
            continue
        right = merged({}, settings)
        tried = 0
        for key, wrong in itertools.product(settings, (True, False, 77, "nonsense", {"enabled": True}, ["other"])):
            setting = settings[key]
            nested = any(one.startswith(f"{other}.") for one in settings for other in settings if key in (one, other))
            if nested or setting.met_by(wrong):
                continue
            config = merged(right, {key: Setting(wrong)})
            assert Change(key, wrong, setting.value, setting.reason) in differences(config, policy, target, strategy)
            tried += 1
        assert tried


@pytest.mark.parametrize("target", TARGETS)
def test_settings_and_arguments_are_plain_data(target: str) -> None:
    plugin = plugins()[target]
    for policy, strategy in cases():
        for key, setting in (wanted(plugin, policy, strategy) or {}).items():
            assert plain(setting.value) or setting.value is ABSENT, key
        if outcome(target, policy, strategy)[1] != REFUSED:
            assert plain(plugin.build_arguments(policy, strategy))


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize("target", sorted(set(TARGETS) - set(READERS)))
def test_a_target_without_a_reader_refuses_to_read(target: str) -> None:
    with pytest.raises(PolicyError, match="can be written, not read back"):
        plugins()[target].read({})


@pytest.mark.parametrize("target", READERS)
def test_what_is_written_is_read_back(target: str) -> None:
    """The policy that is read from a written config writes the same config."""
    plugin = plugins()[target]
    seen = 0
    for base, strategy in itertools.product(bases(), (None, "fsdp2", "deepspeed-zero2")):
        for policy in (base, *(p for field in FIELD_NAMES for p in variations(base, field))):
            settings = wanted(plugin, policy, strategy)
            if settings is None:
                continue
            config = merged({}, settings)
            read = plugin.read(config)
            assert set(read) <= plugin.carries | {"fp4_recipe"}, "only what is carried can be read"
            assert merged({}, plugin.settings(Policy.of(read), strategy)) == config, (policy, strategy, read)
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("target", ["megatron"])
def test_megatron_bridge_names_give_back_the_policy_itself(target: str) -> None:
    plugin = plugins()[target]
    for policy in bases():
        settings = wanted(plugin, policy, None)
        if settings is None:
            continue
        read = Policy.of(plugin.read(merged({}, settings)))
        different = {name for name in plugin.carries if getattr(read, name) != getattr(policy, name)}
        # pipeline_dtype is written as what it follows, `backend: auto` is not written at all.
        assert different <= {"pipeline_dtype", "backend"}
        assert "pipeline_dtype" not in different or policy.pipeline_dtype is None


#: The second name of one setting, and what changes no number: these are not warned about.
NOT_WARNED = ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")


@pytest.mark.parametrize("target", TARGETS)
def test_not_carried_is_warned_for_what_matters_and_for_nothing_else(target: str) -> None:
    plugin = plugins()[target]
    for policy in bases():
        if outcome(target, policy, None)[0] == REFUSED:
            continue
        expected = [field for field in FIELD_NAMES if policy.explicit(field) and field not in plugin.carries]
        expected = [field for field in expected if field not in NOT_WARNED]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inject({}, policy, target)
        assert len(caught) == bool(expected), "one warning for all fields"
        if expected:
            message = caught[0].message
            assert isinstance(message, mpguard.NotCarried) and target not in message.carriers
            assert [*message.fields] == expected
            assert message.carriers == tuple(t for t in TARGETS if set(expected) <= set(plugins()[t].carries))


@pytest.mark.parametrize(("kind", "values"), [(Setting, (1,)), (Change, ("a", 1, 2))])
def test_settings_and_changes_are_copied_and_pickled(kind: Any, values: Any) -> None:
    assert copy.deepcopy(kind(*values)) == kind(*values) == pickle.loads(pickle.dumps(kind(*values)))


def test_lookup_distinguishes_absent_from_null() -> None:
    assert lookup({"a": {"b": None}}, "a.b") is None
    assert lookup({"a": None}, "a.b") is ABSENT
