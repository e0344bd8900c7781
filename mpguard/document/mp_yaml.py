"""mpguard's own keys in an accelerate config: the only module that reads and writes them.

    fp8_config:
      mpguard_recipe: bf16_mixed
      mpguard_overrides: {grad_reduce_in_fp32: false}
      mpguard_fp8_modules: [{pattern: "*.mlp.*", recipe: rowwise}]
      mpguard_allow: [{frozen: fp16}]
      mpguard_watch: full

They are in `fp8_config`, where accelerate accepts unknown keys; it refuses unknown top-level keys. Workers do not read
them from there: they receive the whole policy as text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpguard.core import settings
from mpguard.core.errors import ConfigError, PolicyError, UnknownRecipe, did_you_mean
from mpguard.core.watch_levels import WatchLevel, watch_level
from mpguard.document import Document, Entry, read
from mpguard.policy import hardware
from mpguard.policy.allow import Allowance, allowances
from mpguard.policy.fp8_modules import ModuleRecipe, module_recipes
from mpguard.policy.policy import FIELD_NAMES, Policy
from mpguard.policy.recipes import auto_on
from mpguard.policy.recipes import recipe as named
from mpguard.targets.inject import Change
from mpguard.targets.settings import ABSENT, lookup, show

SECTION = "fp8_config"
RECIPE = f"{SECTION}.mpguard_recipe"
OVERRIDES = f"{SECTION}.mpguard_overrides"
#: The policy field `fp8_modules`, which is a list of sections, while overrides are single values.
MODULES = f"{SECTION}.mpguard_fp8_modules"
ALLOW = f"{SECTION}.mpguard_allow"
WATCH = f"{SECTION}.mpguard_watch"
_ALL = (RECIPE, OVERRIDES, MODULES, ALLOW, WATCH)
KEYS = tuple(key.split(".")[1] for key in _ALL)
#: The functions that parse the value of a key, and raise for a wrong one.
_PARSERS: Mapping[str, Callable[[Any], object]] = {ALLOW: allowances, WATCH: watch_level, MODULES: module_recipes}

#: The recipe that is decided by the hardware of each launch.
AUTO_RECIPE = "auto"


class OwnKeyError(ConfigError):
    """One of mpguard's keys in a config is unknown, or has a value that cannot be used. `reason` is a clause."""

    def __init__(self, document: Document, key: str, reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(f"{document.where(key)}: {reason}")


@dataclasses.dataclass(frozen=True)
class Stored:
    """The values of mpguard's keys in a config.

    recipe: None if it names none. allow: deviations that are wanted. watch: how closely the run is watched; None for
    the default. modules: a recipe per module.
    """

    recipe: str | None
    overrides: Mapping[str, Any]
    allow: tuple[Allowance, ...] = ()
    watch: WatchLevel | None = None
    modules: tuple[ModuleRecipe, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the policy that the config changes: the overrides, and `fp8_modules`."""
        modules = {"fp8_modules": [each.plain() for each in self.modules]} if self.modules else {}
        return {**self.overrides, **modules}


def load_policy(path: Path) -> Policy:
    """Return the policy of an mp.yaml: its recipe with its overrides, else `[tool.mpguard] recipe`.

    Raises `UnknownRecipe` for an unknown recipe; `ConfigError` for a file that cannot be used, an unknown key or field,
    fields that contradict each other, and if no recipe is named. All messages name file, line and key.
    """
    document = read(Path(path))
    policy = policy_of(document)
    if policy is not None:
        return policy
    fallback = settings.nearest(Path(path))
    if fallback.recipe is None:
        raise ConfigError(
            f"{path}: names no recipe. Run `mpguard apply RECIPE {path}`, add `{SECTION}: {{mpguard_recipe: NAME}}`, "
            "or set `recipe` in [tool.mpguard]; `mpguard recipes` lists them"
        )
    try:
        return named(fallback.recipe)
    except PolicyError as error:
        raise _at(error, f"{fallback.source}: `recipe`") from None


def policy_of(document: Document) -> Policy | None:
    """Return the policy that a config stores; None if it names no recipe. Raises as `load_policy` does."""
    keys = stored(document)
    if keys.recipe is None:
        return None
    try:
        return _with_fields(document, _base(document, keys.recipe), keys)
    except PolicyError as error:
        raise _at(error, document.where(RECIPE)) from None


def wrong_own_keys(document: Document) -> Iterator[tuple[str, str]]:
    """Yield mpguard's keys that a launch refuses, with the reasons: unknown ones, values, recipes that do not exist."""
    found = [] if document.problems else list(_wrong_keys(document))
    yield from found
    if found or document.problems:
        return
    keys = stored(document)
    try:
        if keys.recipe is not None:
            _with_fields(document, _base(document, keys.recipe), keys)
    except OwnKeyError as error:
        yield error.key, error.reason
    except PolicyError as error:
        yield RECIPE, str(error)


def _base(document: Document, recipe: str) -> Policy:
    """Return the policy of a recipe. `auto` of a config that accelerate runs on the CPU is decided without GPUs."""
    on_cpu = recipe == AUTO_RECIPE and runs_on_cpu(document.require())
    return auto_on(hardware.detect().cpu) if on_cpu else named(recipe)


def _with_fields(document: Document, policy: Policy, keys: Stored) -> Policy:
    if not keys.fields:
        return policy
    try:
        return policy.replace(**keys.fields)
    except PolicyError as error:
        key = MODULES if str(error).startswith("fp8_modules") else OVERRIDES
        raise OwnKeyError(document, key, str(error)) from None


def runs_on_cpu(config: Mapping[str, Any]) -> bool:
    """True if accelerate runs a config on the CPU: with other engines it ignores `use_cpu` (S23)."""
    kind = config.get("distributed_type")
    return config.get("use_cpu") is True and (kind in (None, False) or str(kind) in ("NO", "MULTI_CPU"))


def stored(document: Document) -> Stored:
    """Return mpguard's keys in a config. Raises `ConfigError` for an unknown key or a value of the wrong kind."""
    document.require()
    for key, reason in _wrong_keys(document):
        raise OwnKeyError(document, key, reason)
    found: dict[str, Any] = {key: entry.value for key in _ALL if (entry := document.entry(key)) is not None}
    return Stored(
        found.get(RECIPE),
        found.get(OVERRIDES) or {},
        allowances(found.get(ALLOW) or ()),
        watch_level(found[WATCH]) if found.get(WATCH) is not None else None,
        module_recipes(found.get(MODULES) or ()),
    )


def _wrong_keys(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the unknown keys, and those with a value of the wrong kind."""
    section = document.entry(SECTION)
    if section is None or section.value is None:
        return
    if not isinstance(section.value, dict):
        yield SECTION, f"is {show(section.value)}; a section is needed"
        return
    for name in section.value:
        if str(name).startswith("mpguard") and name not in KEYS:
            yield f"{SECTION}.{name}", f"mpguard has no such key{did_you_mean(name, KEYS)}"
    recipe = document.entry(RECIPE)
    if recipe is not None and (not isinstance(recipe.value, str) or not recipe.value):
        yield RECIPE, f"is {show(recipe.value)}; the name of a recipe is needed"
    for key, parse in _PARSERS.items():
        entry = document.entry(key)
        try:
            parsed = parse(entry.value) if entry is not None and entry.value is not None else None
        except (ConfigError, PolicyError) as error:
            yield key, str(error)
            continue
        if key == MODULES and parsed and recipe is None:
            yield key, "`mpguard_recipe` is needed next to it: a recipe with FP8"
    overrides = document.entry(OVERRIDES)
    if overrides is not None and overrides.value is not None:
        yield from _wrong_overrides(overrides.value, recipe)


def _wrong_overrides(overrides: Any, recipe: Entry | None) -> Iterator[tuple[str, str]]:
    if not isinstance(overrides, dict):
        yield OVERRIDES, f"is {show(overrides)}; a section is needed, policy field: value"
        return
    for field, value in overrides.items():
        key = f"{OVERRIDES}.{field}"
        if field not in FIELD_NAMES:
            yield key, f"a policy has no field `{field}`{did_you_mean(str(field), FIELD_NAMES)}"
        elif field == "fp8_modules":
            yield key, f"belongs next to `mpguard_overrides`, as `{SECTION}.mpguard_fp8_modules`"
        elif isinstance(value, dict):
            yield key, "is a section; a single value is needed"
    if overrides and recipe is None:
        yield OVERRIDES, "overrides no recipe; `mpguard_recipe` is needed next to it"


def changes(config: Mapping[str, Any], recipe: str, overrides: Mapping[str, Any] | None = None) -> list[Change]:
    """Return the changes of an accelerate config after which `load_policy` returns a recipe with some overrides.

    overrides: fields of the policy; `fp8_modules` gets a key of its own.
    Raises `ConfigError` for a SageMaker config, which has no `fp8_config`.
    """
    if config.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError("a SageMaker config has no `fp8_config`, and no other place for mpguard's recipe")
    fields = dict(overrides or {})
    modules = [each.plain() for each in module_recipes(fields.pop("fp8_modules", ()))]
    wanted = {RECIPE: recipe, OVERRIDES: fields or ABSENT, MODULES: modules or ABSENT}
    return [
        Change(key, old, new, "" if key == RECIPE else "they were those of another recipe" if new is ABSENT else "")
        for key, new in wanted.items()
        if (old := lookup(config, key)) != new
    ]


def deepspeed_file(config: Mapping[str, Any]) -> str | None:
    """Return the DeepSpeed file that an accelerate config names, as written; None without one (accelerate: `none`)."""
    name = lookup(config, "deepspeed_config.deepspeed_config_file")
    return name if isinstance(name, str) and name not in ("", "none") else None


def _at(error: PolicyError, where: str) -> PolicyError:
    """Return the same error with the position of its cause in front of the message."""
    if isinstance(error, UnknownRecipe):
        error.args = (f"{where}: {error}",)
        return error
    return PolicyError(f"{where}: {error}")
