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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

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

T = TypeVar("T")

SECTION = "fp8_config"
RECIPE = f"{SECTION}.mpguard_recipe"
OVERRIDES = f"{SECTION}.mpguard_overrides"
#: The policy field `fp8_modules`, which is a list of sections, while overrides are single values.
MODULES = f"{SECTION}.mpguard_fp8_modules"
ALLOW = f"{SECTION}.mpguard_allow"
WATCH = f"{SECTION}.mpguard_watch"
KEYS = tuple(key.split(".")[1] for key in (RECIPE, OVERRIDES, MODULES, ALLOW, WATCH))

#: The recipe that is decided by the hardware of each launch.
AUTO_RECIPE = "auto"


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
        policy = auto_on(hardware.detect().cpu) if _auto_on_cpu(document) else named(keys.recipe)
    except PolicyError as error:
        raise _at(error, document.where(RECIPE)) from None
    if not keys.fields:
        return policy
    try:
        return policy.replace(**keys.fields)
    except PolicyError as error:
        where = MODULES if str(error).startswith("fp8_modules") else OVERRIDES
        raise ConfigError(f"{document.where(where)}: {error}") from None


def _auto_on_cpu(document: Document) -> bool:
    """True for a config of `auto` that accelerate runs on the CPU, whatever GPUs this machine has."""
    return stored(document).recipe == AUTO_RECIPE and runs_on_cpu(document.require())


def runs_on_cpu(config: Mapping[str, Any]) -> bool:
    """True if accelerate runs a config on the CPU: with other engines it ignores `use_cpu` (S23)."""
    kind = config.get("distributed_type")
    return config.get("use_cpu") is True and (kind in (None, False) or str(kind) in ("NO", "MULTI_CPU"))


def stored(document: Document) -> Stored:
    """Return mpguard's keys in a config. Raises `ConfigError` for an unknown key or a value of the wrong kind."""
    document.require()
    section = document.entry(SECTION)
    if section is None or section.value is None:
        return Stored(None, {})
    if not isinstance(section.value, dict):
        raise ConfigError(f"{document.where(SECTION)}: is {show(section.value)}; a section is needed")
    for key in section.value:
        if str(key).startswith("mpguard") and key not in KEYS:
            raise ConfigError(f"{document.where(f'{SECTION}.{key}')}: mpguard has no such key{did_you_mean(key, KEYS)}")
    recipe = document.entry(RECIPE)
    if recipe is not None and (not isinstance(recipe.value, str) or not recipe.value):
        raise ConfigError(f"{document.where(RECIPE)}: is {show(recipe.value)}; the name of a recipe is needed")
    allowed, watch = _parsed(document, ALLOW, allowances) or (), _parsed(document, WATCH, watch_level)
    modules = _parsed(document, MODULES, module_recipes) or ()
    if modules and recipe is None:
        raise ConfigError(f"{document.where(MODULES)}: `mpguard_recipe` is needed next to it: a recipe with FP8")
    overrides = document.entry(OVERRIDES)
    if overrides is None or overrides.value is None:
        return Stored(recipe.value if recipe else None, {}, allowed, watch, modules)
    _check_overrides(document, overrides, recipe)
    return Stored(recipe.value if recipe else None, overrides.value, allowed, watch, modules)


def unknown_deviation(value: Any) -> str:
    """Return what is wrong with a value of `mpguard_allow`; empty if nothing is."""
    return _error_of(allowances, value)


def wrong_modules(value: Any) -> str:
    """Return what is wrong with a value of `mpguard_fp8_modules`; empty if nothing is."""
    return _error_of(module_recipes, value)


def unknown_watch_level(value: Any) -> str:
    """Return what is wrong with a value of `mpguard_watch`; empty if nothing is."""
    return _error_of(watch_level, value)


def _error_of(parse: Callable[[Any], object], value: Any) -> str:
    try:
        parse(value)
    except (ConfigError, PolicyError) as error:
        return str(error)
    return ""


def _parsed(document: Document, key: str, parse: Callable[[Any], T]) -> T | None:
    """Return the value of a key, parsed; None where it is not set. The error of a parser gets the place of the key."""
    entry = document.entry(key)
    try:
        return parse(entry.value) if entry is not None and entry.value is not None else None
    except (ConfigError, PolicyError) as error:
        raise ConfigError(f"{document.where(key)}: {error}") from None


def _check_overrides(document: Document, overrides: Entry, recipe: Entry | None) -> None:
    where = document.where(OVERRIDES)
    if not isinstance(overrides.value, dict):
        raise ConfigError(f"{where}: is {show(overrides.value)}; a section is needed, policy field: value")
    for field, value in overrides.value.items():
        if field not in FIELD_NAMES:
            here = document.where(f"{OVERRIDES}.{field}")
            raise ConfigError(f"{here}: a policy has no field `{field}`{did_you_mean(str(field), FIELD_NAMES)}")
        if field == "fp8_modules":
            here = document.where(f"{OVERRIDES}.{field}")
            raise ConfigError(f"{here}: belongs next to `mpguard_overrides`, as `{SECTION}.mpguard_fp8_modules`")
        if isinstance(value, dict):
            raise ConfigError(f"{document.where(f'{OVERRIDES}.{field}')}: is a section; a single value is needed")
    if overrides.value and recipe is None:
        raise ConfigError(f"{where}: overrides no recipe; `mpguard_recipe` is needed next to it")


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
