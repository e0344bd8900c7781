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

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpguard.core import entry_points
from mpguard.core.entry_points import Made
from mpguard.core.errors import ExtensionError, MissingExtra, PolicyError, did_you_mean
from mpguard.policy.policy import FIELD_NAMES, Policy
from mpguard.targets.settings import Setting, Settings, merged

#: How a model is spread over processes; decides what some targets need.
STRATEGIES = (
    "single", "ddp", "fsdp1", "fsdp2", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3",
)  # fmt: skip

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

    def detects(self, config: Mapping[str, Any]) -> bool:
        """Whether a parsed config file is one of this target's, by its content."""
        return self._recognises is not None and self._ask(self._recognises, config)

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The policy fields that a config of this target says, as plain values for `Policy.of`."""
        if self._read is None:
            raise PolicyError(f"{self.name}: configs of this target can be written, not read back")
        return self._ask(self._read, config)

    def _ask(self, function: Callable[..., Made], *arguments: Any) -> Made:
        return entry_points.asked(f"plugin {self.name}", function, *arguments)

    def argument_builder(
        self, function: Callable[[Policy, str | None], dict[str, Any]]
    ) -> Callable[[Policy, str | None], dict[str, Any]]:
        """Decorator: `(policy, strategy) -> plain arguments of the object`, where they are not the settings."""
        self._arguments = function
        return function

    def builder(self, function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        """Decorator: `(plain arguments) -> the real object`."""
        self._build = function
        return function

    def reader(
        self, function: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Decorator: `(config) -> policy fields`, for formats that other tools write."""
        self._read = function
        return function

    def detector(self, function: Callable[[Mapping[str, Any]], bool]) -> Callable[[Mapping[str, Any]], bool]:
        """Decorator: `(config) -> whether it is a file of this target`."""
        self._recognises = function
        return function

    def strategy_reader(
        self, function: Callable[[Mapping[str, Any]], str | None]
    ) -> Callable[[Mapping[str, Any]], str | None]:
        """Decorator: `(config) -> the strategy that it states, or None`."""
        self._strategy = function
        return function

    def adapter(
        self, function: Callable[[dict[str, Setting], Mapping[str, Any]], dict[str, Setting]]
    ) -> Callable[[dict[str, Setting], Mapping[str, Any]], dict[str, Setting]]:
        """Decorator: `(settings, config) -> settings`, for keys that must or must not stand beside others."""
        self._fit = function
        return function

    def not_carried(self, policy: Policy, strategy: str | None = None) -> list[str]:
        """The fields of the policy that matter and that this target has no place for."""
        return [field for field in required_fields(policy, strategy) if field not in self.carries]

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
    entry_points.load("mpguard.plugins")
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


def required_fields(policy: Policy, strategy: str | None = None) -> list[str]:
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


def check_strategy(strategy: str | None) -> None:
    """Raises `PolicyError` for an unknown strategy, with the near ones."""
    if strategy is not None and strategy not in STRATEGIES:
        raise PolicyError(f"there is no strategy `{strategy}`{did_you_mean(strategy, STRATEGIES)}")
