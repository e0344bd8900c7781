"""Plugins: how a policy becomes the settings and the objects of one target.

A plugin is one function in one file, `settings(policy, strategy)`, which says what the target's
config must hold; further functions may be hung on it. Everything that all plugins need lives here,
once: merge, copy, comparison, conflicts, what is not carried.

    @plugin("deepspeed", carries=("bf16", "params_dtype", "grad_reduce_in_fp32"), extra="deepspeed")
    def deepspeed(policy: Policy, strategy: str | None) -> Settings:
        return {"bf16.enabled": policy.bf16, "fp16.enabled": policy.fp16}

    @deepspeed.builds
    def config(arguments: dict[str, Any]) -> dict[str, Any]: ...
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpguard import discover
from mpguard.discover import Made
from mpguard.errors import ExtensionError, MissingExtra, NotCarried, PolicyError, did_you_mean
from mpguard.policy import FIELD_NAMES, Policy

log = logging.getLogger("mpguard")

#: How a model is spread over processes; decides what some targets need.
STRATEGIES = (
    "single", "ddp", "fsdp1", "fsdp2", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3",
)  # fmt: skip


class _Absent:
    """The value of a key that is not there, or must not be."""

    def __repr__(self) -> str:
        return "(absent)"

    def __copy__(self) -> _Absent:
        return self

    def __deepcopy__(self, memo: object) -> _Absent:
        return self


ABSENT = _Absent()


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value that a config must hold, why, and which other spellings mean the same.

    value: plain data, or `ABSENT` for a key that must not be there.
    why: a clause for the change line, such as "accelerate would reduce in bf16".
    same: says whether a found value already means `value`; default is equality of value and type.
    """

    value: Any
    why: str = ""
    same: Callable[[Any], bool] | None = None

    def met_by(self, found: Any) -> bool:
        if self.same is not None and found is not ABSENT:
            return self.same(found)
        return _equal(found, self.value)


def _equal(found: Any, wanted: Any) -> bool:
    """Equality that tells True from 1, but not 1 from 1.0."""
    if found is ABSENT or wanted is ABSENT:
        return found is wanted
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_equal, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


#: Dotted path -> the value that the target's config must hold there (`Setting` to say why).
Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """One key of a config that is not what the policy says. Plain data.

    key: dotted path, such as `fp8_config.backend`; `old` and `new` may be `ABSENT`.
    """

    key: str
    old: Any
    new: Any
    why: str = ""

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def overrides(self) -> bool:
        """Whether somebody's own value is replaced (and not just a missing one given)."""
        return self.old is not ABSENT

    def __str__(self) -> str:
        new = "(removed)" if self.new is ABSENT else show(self.new)
        return f"{self.key}: {show(self.old)} -> {new}" + (f" ({self.why})" if self.why else "")


def show(value: Any) -> str:
    """A plain value as configs write it: `true`, `null`, `bf16`."""
    if value is ABSENT:
        return "(absent)"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


SettingsOf = Callable[[Policy, str | None], Settings]


class Plugin:
    """A target: its settings, the real object they become, and which policy fields it carries.

    Attributes: `name`; `carries`, the fields that can change its settings or its object, or make
    it refuse the policy; `extra`, the extra of mpguard that installs its library; `module`, the one
    that must be there.
    """

    def __init__(
        self, name: str, carries: Iterable[str], extra: str | None, library: str | None, settings: SettingsOf
    ) -> None:
        self.name, self.carries, self.extra, self.module = name, frozenset(carries), extra, library
        self.doc = settings.__doc__ or ""
        self._settings = settings
        self._arguments: Callable[[Policy, str | None], dict[str, Any]] | None = None
        self._build: Callable[[dict[str, Any]], Any] | None = None
        self._read: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
        self._recognises: Callable[[Mapping[str, Any]], bool] | None = None
        self._strategy: Callable[[Mapping[str, Any]], str | None] | None = None
        self._fit: Callable[[dict[str, Setting], Mapping[str, Any]], dict[str, Setting]] | None = None
        unknown = self.carries - set(FIELD_NAMES)
        if unknown:
            field = sorted(unknown)[0]
            raise ExtensionError(
                f"plugin {name}: carries `{field}`, which no policy has{did_you_mean(field, FIELD_NAMES)}"
            )

    def settings(self, policy: Policy, strategy: str | None = None) -> dict[str, Setting]:
        """What the target's config must hold: dotted path -> `Setting`. Raises `PolicyError`."""
        check_strategy(strategy)
        return {
            key: value if isinstance(value, Setting) else Setting(value)
            for key, value in self._ask(self._settings, policy, strategy).items()
        }

    def strategy(self, config: Mapping[str, Any]) -> str | None:
        """The strategy that a config of this target states; None where it does not say."""
        return None if self._strategy is None else self._ask(self._strategy, config)

    def settings_for(
        self, config: Mapping[str, Any], policy: Policy, strategy: str | None = None
    ) -> dict[str, Setting]:
        """`settings` for one config: its own strategy unless given, and what cannot stand beside its other keys."""
        found = self.settings(policy, strategy or self.strategy(config))
        return found if self._fit is None else self._ask(self._fit, found, config)

    def arguments(self, policy: Policy, strategy: str | None = None) -> dict[str, Any]:
        """What the real object is built from, as plain data; by default the settings, nested."""
        check_strategy(strategy)
        if self._arguments is not None:
            return self._ask(self._arguments, policy, strategy)
        return merged({}, self.settings(policy, strategy))

    def build(self, policy: Policy, strategy: str | None = None) -> Any:
        """The real object. Imports the library; raises `MissingExtra` where it is not installed."""
        arguments = self.arguments(policy, strategy)
        if self._build is None:
            return arguments
        self.require()
        return self._ask(self._build, arguments)

    def require(self) -> None:
        if self.module and importlib.util.find_spec(self.module) is None:
            raise MissingExtra(self.module, self.extra or self.name, f"target `{self.name}`")

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a parsed config file is one of this target's, by its content."""
        return self._recognises is not None and self._ask(self._recognises, config)

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The policy fields that a config of this target says, as plain values for `Policy.of`."""
        if self._read is None:
            raise PolicyError(f"{self.name}: configs of this target can be written, not read back")
        return self._ask(self._read, config)

    def _ask(self, function: Callable[..., Made], *arguments: Any) -> Made:
        return discover.asked(f"plugin {self.name}", function, *arguments)

    def argued(
        self, function: Callable[[Policy, str | None], dict[str, Any]]
    ) -> Callable[[Policy, str | None], dict[str, Any]]:
        """Decorator: `(policy, strategy) -> plain arguments of the object`, where they are not the settings."""
        self._arguments = function
        return function

    def builds(self, function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        """Decorator: `(plain arguments) -> the real object`."""
        self._build = function
        return function

    def reads(
        self, function: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Decorator: `(config) -> policy fields`, for formats that other tools write."""
        self._read = function
        return function

    def recognised(self, function: Callable[[Mapping[str, Any]], bool]) -> Callable[[Mapping[str, Any]], bool]:
        """Decorator: `(config) -> whether it is a file of this target`."""
        self._recognises = function
        return function

    def strategist(
        self, function: Callable[[Mapping[str, Any]], str | None]
    ) -> Callable[[Mapping[str, Any]], str | None]:
        """Decorator: `(config) -> the strategy that it states, or None`."""
        self._strategy = function
        return function

    def fits(
        self, function: Callable[[dict[str, Setting], Mapping[str, Any]], dict[str, Setting]]
    ) -> Callable[[dict[str, Setting], Mapping[str, Any]], dict[str, Setting]]:
        """Decorator: `(settings, config) -> settings`, for keys that must or must not stand beside others."""
        self._fit = function
        return function

    def not_carried(self, policy: Policy, strategy: str | None = None) -> list[str]:
        """The fields of the policy that matter and that this target has no place for."""
        return [field for field in fields_that_matter(policy, strategy) if field not in self.carries]

    def __repr__(self) -> str:
        return f"<Plugin {self.name}>"


_PLUGINS: dict[str, Plugin] = {}


def plugin(
    name: str, *, carries: Iterable[str], extra: str | None = None, library: str | None = None
) -> Callable[[SettingsOf], Plugin]:
    """Registers `settings(policy, strategy)` as the plugin of target `name`.

    extra, library: the extra of mpguard and the module that `build` needs.
    Raises `ExtensionError` for a second plugin of that name.
    """

    def decorate(settings: SettingsOf) -> Plugin:
        if name in _PLUGINS and _PLUGINS[name]._settings.__module__ != settings.__module__:
            raise ExtensionError(
                f"{settings.__module__}: target `{name}` already has a plugin, in {_PLUGINS[name]._settings.__module__}"
            )
        made = _PLUGINS[name] = Plugin(name, carries, extra, library, settings)
        return made

    return decorate


def plugins() -> dict[str, Plugin]:
    """All plugins by target, loaded through the entry point `mpguard.plugins`."""
    discover.load("mpguard.plugins")
    return dict(sorted(_PLUGINS.items()))


def get(target: str) -> Plugin:
    """The plugin of a target; `PolicyError` for an unknown one, with the near ones."""
    known = plugins()
    if target not in known:
        raise PolicyError(f"there is no target `{target}`{did_you_mean(target, known)}")
    return known[target]


def carriers(field: str) -> list[str]:
    """The targets that carry a field."""
    return [name for name, each in plugins().items() if field in each.carries]


#: Fields that save memory and change no number.
MEMORY_ONLY = frozenset({"reuse_grad_buf_for_mxfp8_param_ag"})


def fields_that_matter(policy: Policy, strategy: str | None = None) -> list[str]:
    """The fields that a target must carry for the policy to be in force.

    Those that are not at their default; and under a strategy that shards, the reduction and the
    master weights of low-precision runs, since the frameworks' defaults for them are other ones (S13).
    """
    matter = [name for name in FIELD_NAMES if policy.explicit(name) and name not in MEMORY_ONLY]
    if strategy and strategy.startswith(("fsdp", "deepspeed")) and policy.low_precision:
        matter += [name for name in ("grad_reduce_in_fp32", "master_dtype") if name not in matter]
    if policy.fp8_param:
        matter.remove("fp8_param_gather")  # one setting, two names
    if policy.fp4_param:
        matter.remove("fp4_param_gather")
    return matter


def build(policy: Policy, target: str, strategy: str | None = None) -> Any:
    """`policy.to(target, strategy)`."""
    found = get(target)
    built = found.build(policy, strategy)
    _say_not_carried(found, policy, strategy, stacklevel=4)
    return built


def inject(
    config: Mapping[str, Any], policy: Policy | str, target: str, strategy: str | None = None
) -> tuple[dict[str, Any], list[Change]]:
    """Writes the policy, or that of a recipe's name, into a copy of a target's config.

    Returns the new config and what changed; the given one is left as it is. What replaces a value
    that was there is logged at warning level (logger `mpguard`), with key, old and new value.
    Warns `NotCarried`; raises `PolicyError` where the target makes no sense for the policy or the
    config has a value where a section must be.
    """
    from mpguard.recipes import given

    policy = given(policy, "inject")
    if not isinstance(config, Mapping):
        raise PolicyError(f"inject: the config is a {type(config).__name__}; a mapping of keys and values is needed")
    found = get(target)
    changes = differences(config, policy, target, strategy)
    _say_not_carried(found, policy, strategy or found.strategy(config), stacklevel=3)
    for change in changes:
        log.log(logging.WARNING if change.overrides else logging.INFO, "%s: %s", target, change)
    return merged(config, {change.key: Setting(change.new) for change in changes}), changes


def differences(config: Mapping[str, Any], policy: Policy, target: str, strategy: str | None = None) -> list[Change]:
    """What `inject` would change; empty when the policy is in the config already.

    strategy: by default the one that the config itself states.
    """
    return [
        Change(key, old, setting.value, setting.why)
        for key, setting in get(target).settings_for(config, policy, strategy).items()
        if not setting.met_by(old := lookup(config, key))
    ]


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted path, or `ABSENT`."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node


def merged(config: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """A deep copy of `config` with the settings in it; sections are made, and removed when they end empty."""
    result = copy.deepcopy(dict(config))
    for key, setting in settings.items():
        *parents, last = key.split(".")
        if setting.value is ABSENT:
            _remove(result, parents, last)
            continue
        node = result
        for depth, part in enumerate(parents):
            inner = node.setdefault(part, {})
            if inner is None:
                inner = node[part] = {}
            if not isinstance(inner, dict):
                where = ".".join(parents[: depth + 1])
                raise PolicyError(f"`{where}` is {show(inner)}; a section is needed there, to hold `{last}`. Remove it")
            node = inner
        node[last] = copy.deepcopy(setting.value)
    return result


def _remove(config: dict[str, Any], parents: list[str], last: str) -> None:
    chain = [config]
    for part in parents:
        inner = chain[-1].get(part)
        if not isinstance(inner, dict):
            return
        chain.append(inner)
    chain[-1].pop(last, None)
    for part, outer, inner in zip(reversed(parents), reversed(chain[:-1]), reversed(chain[1:]), strict=True):
        if not inner:
            del outer[part]


def _say_not_carried(found: Plugin, policy: Policy, strategy: str | None, *, stacklevel: int) -> None:
    """stacklevel: of the user's own line, counted from here."""
    for field in found.not_carried(policy, strategy):
        warnings.warn(NotCarried(field, policy.text_of(field), found.name, carriers(field)), stacklevel=stacklevel)


def check_strategy(strategy: str | None) -> None:
    """Raises `PolicyError` for an unknown strategy, with the near ones."""
    if strategy is not None and strategy not in STRATEGIES:
        raise PolicyError(f"there is no strategy `{strategy}`{did_you_mean(strategy, STRATEGIES)}")
