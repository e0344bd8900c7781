"""Plugins: how a policy becomes the settings and the objects of one target.

A plugin is one function in one file, `settings(policy, strategy)`, which returns what the target's config must
contain; more functions are added to it with decorators. What all plugins need is implemented here, once: merge, copy,
comparison, conflicts, and which fields of the policy are not carried.

    @plugin("deepspeed", carries=("bf16", "params_dtype", "grad_reduce_in_fp32"), extra="deepspeed")
    def deepspeed(policy: Policy, strategy: str | None) -> Settings:
        return {"bf16.enabled": policy.bf16, "fp16.enabled": policy.fp16}

    @deepspeed.builder
    def config(arguments: dict[str, Any]) -> dict[str, Any]: ...

Each decorator supplies the method that its name is derived from:

    @x.argument_builder    build_arguments(policy, strategy)
    @x.builder             build(policy, strategy)
    @x.reader              read(config)
    @x.strategy_reader     read_strategy(config)
    @x.detector            detect(config)
    @x.adapter             adapt(settings, config)
    @x.equivalent          policy_for(config, policy)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpguard.core import entry_points
from mpguard.core.entry_points import Result
from mpguard.core.errors import ExtensionError, MissingExtra, PolicyError, did_you_mean
from mpguard.policy.policy import FIELD_NAMES, Policy
from mpguard.targets.settings import Setting, Settings, merged

#: How a model is distributed over processes; some targets need other settings for it.
STRATEGIES = (
    "single", "ddp", "fsdp1", "fsdp2", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3",
)  # fmt: skip

SettingsOf = Callable[[Policy, str | None], Settings]


class Plugin:
    """A target: its settings, the real object that they become, and the policy fields that it carries.

    Attributes: `name`; `carries`, the fields that can change its settings or its object, or make it refuse the
    policy; `extra`, the extra of mpguard that installs its library; `module`, the module that `build` imports.
    """

    def __init__(
        self, name: str, carries: Iterable[str], extra: str | None, library: str | None, settings: SettingsOf
    ) -> None:
        self.name, self.carries, self.extra, self.module = name, frozenset(carries), extra, library
        self.doc = settings.__doc__ or ""
        self._settings = settings
        self._argument_builder: Callable[[Policy, str | None], dict[str, Any]] | None = None
        self._builder: Callable[[dict[str, Any]], Any] | None = None
        self._reader: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
        self._strategy_reader: Callable[[Mapping[str, Any]], str | None] | None = None
        self._detector: Callable[[Mapping[str, Any]], bool] | None = None
        self._adapter: Callable[[dict[str, Setting], Mapping[str, Any]], dict[str, Setting]] | None = None
        self._equivalent: Callable[[Mapping[str, Any], Policy], Policy] | None = None
        unknown = self.carries - set(FIELD_NAMES)
        if unknown:
            field = sorted(unknown)[0]
            raise ExtensionError(
                f"plugin {name}: carries `{field}`, which is not a field of Policy{did_you_mean(field, FIELD_NAMES)}"
            )

    def settings(self, policy: Policy, strategy: str | None = None) -> dict[str, Setting]:
        """Return what the target's config must contain: dotted path -> `Setting`. Raises `PolicyError`."""
        check_strategy(strategy)
        return {
            key: value if isinstance(value, Setting) else Setting(value)
            for key, value in self._call(self._settings, policy, strategy).items()
        }

    def settings_for(
        self, config: Mapping[str, Any], policy: Policy, strategy: str | None = None
    ) -> dict[str, Setting]:
        """Return `settings` for one config: for its own strategy unless one is given, and adapted to its other keys."""
        policy = self.policy_for(config, policy)
        return self.adapt(self.settings(policy, strategy or self.read_strategy(config)), config)

    def build_arguments(self, policy: Policy, strategy: str | None = None) -> dict[str, Any]:
        """Return the arguments of the real object as plain data; by default the settings, nested."""
        check_strategy(strategy)
        if self._argument_builder is not None:
            return self._call(self._argument_builder, policy, strategy)
        return merged({}, self.settings(policy, strategy))

    def build(self, policy: Policy, strategy: str | None = None) -> Any:
        """Build the real object. Imports the library; raises `MissingExtra` where it is not installed."""
        arguments = self.build_arguments(policy, strategy)
        if self._builder is None:
            return arguments
        self.require()
        return self._call(self._builder, arguments)

    def require(self) -> None:
        """Raise `MissingExtra` if the target's library is not installed."""
        if self.module and importlib.util.find_spec(self.module) is None:
            raise MissingExtra(self.module, self.extra or self.name, f"target `{self.name}`")

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the policy fields that a config of this target sets, as plain values for `Policy.of`."""
        if self._reader is None:
            raise PolicyError(f"{self.name}: configs of this target can be written, not read back")
        return self._call(self._reader, config)

    def read_strategy(self, config: Mapping[str, Any]) -> str | None:
        """Return the strategy that a config of this target states; None where it states none."""
        return None if self._strategy_reader is None else self._call(self._strategy_reader, config)

    def detect(self, config: Mapping[str, Any]) -> bool:
        """True if a parsed config file is one of this target's, by its content."""
        return self._detector is not None and self._call(self._detector, config)

    def adapt(self, settings: dict[str, Setting], config: Mapping[str, Any]) -> dict[str, Setting]:
        """Return settings without those that conflict with other keys of a config; by default all of them."""
        return settings if self._adapter is None else self._call(self._adapter, settings, config)

    def policy_for(self, config: Mapping[str, Any], policy: Policy) -> Policy:
        """Return the form of a policy that a config has: by default the policy itself."""
        return policy if self._equivalent is None else self._call(self._equivalent, config, policy)

    def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return entry_points.call_extension(f"plugin {self.name}", function, *arguments)

    def argument_builder(
        self, function: Callable[[Policy, str | None], dict[str, Any]]
    ) -> Callable[[Policy, str | None], dict[str, Any]]:
        """Decorator for `build_arguments`: `(policy, strategy) -> arguments`, where they are not the settings."""
        self._argument_builder = function
        return function

    def builder(self, function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        """Decorator for `build`: `(arguments) -> the real object`."""
        self._builder = function
        return function

    def reader(
        self, function: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Decorator for `read`: `(config) -> policy fields`, for formats that other tools write."""
        self._reader = function
        return function

    def strategy_reader(
        self, function: Callable[[Mapping[str, Any]], str | None]
    ) -> Callable[[Mapping[str, Any]], str | None]:
        """Decorator for `read_strategy`: `(config) -> the strategy that it states, or None`."""
        self._strategy_reader = function
        return function

    def detector(self, function: Callable[[Mapping[str, Any]], bool]) -> Callable[[Mapping[str, Any]], bool]:
        """Decorator for `detect`: `(config) -> True if it is a config of this target`."""
        self._detector = function
        return function

    def adapter(
        self, function: Callable[[dict[str, Setting], Mapping[str, Any]], dict[str, Setting]]
    ) -> Callable[[dict[str, Setting], Mapping[str, Any]], dict[str, Setting]]:
        """Decorator for `adapt`: `(settings, config) -> settings`, for keys that require or exclude others."""
        self._adapter = function
        return function

    def equivalent(
        self, function: Callable[[Mapping[str, Any], Policy], Policy]
    ) -> Callable[[Mapping[str, Any], Policy], Policy]:
        """Decorator for `policy_for`: `(config, policy) -> policy`, for configs that have a policy in another form."""
        self._equivalent = function
        return function

    def not_carried(self, policy: Policy, strategy: str | None = None) -> list[str]:
        """Return the fields of the policy that are required and that this target does not carry."""
        return [field for field in required_fields(policy, strategy) if field not in self.carries]

    def __repr__(self) -> str:
        return f"<Plugin {self.name}>"


_PLUGINS: dict[str, Plugin] = {}


def plugin(
    name: str, *, carries: Iterable[str], extra: str | None = None, library: str | None = None
) -> Callable[[SettingsOf], Plugin]:
    """Register `settings(policy, strategy)` as the plugin of target `name`.

    extra, library: the extra of mpguard and the module that `build` needs.
    Raises `ExtensionError` for a second plugin of that name.
    """

    def decorate(settings: SettingsOf) -> Plugin:
        if name in _PLUGINS and _PLUGINS[name]._settings.__module__ != settings.__module__:
            raise ExtensionError(
                f"{settings.__module__}: target `{name}` already has a plugin, in {_PLUGINS[name]._settings.__module__}"
            )
        registered = _PLUGINS[name] = Plugin(name, carries, extra, library, settings)
        return registered

    return decorate


def plugins() -> dict[str, Plugin]:
    """Return all plugins by target, sorted; loaded through the entry point `mpguard.plugins`."""
    entry_points.load("mpguard.plugins")
    return dict(sorted(_PLUGINS.items()))


def get(target: str) -> Plugin:
    """Return the plugin of a target. Raises `PolicyError` for an unknown target, with the similar names."""
    known = plugins()
    if target not in known:
        raise PolicyError(f"there is no target `{target}`{did_you_mean(target, known)}")
    return known[target]


def carriers(field: str) -> list[str]:
    """Return the names of the targets that carry a field."""
    return [name for name, each in plugins().items() if field in each.carries]


#: Fields that no target has to carry: they save memory or time and change no number, or say what the proof accepts.
NOT_FOR_TARGETS = frozenset({"reuse_grad_buf_for_mxfp8_param_ag", "fp8_required", "attention_fix"})


def required_fields(policy: Policy, strategy: str | None = None) -> list[str]:
    """Return the fields that a target must carry for the policy to be in force.

    These are the fields that are not at their default; and under a strategy that shards, the reduction and the
    master weights of low-precision runs, since the frameworks' defaults for these two differ from the policy's (S13).
    """
    required = [name for name in FIELD_NAMES if policy.explicit(name) and name not in NOT_FOR_TARGETS]
    if strategy and strategy.startswith(("fsdp", "deepspeed")) and policy.low_precision:
        required += [name for name in ("grad_reduce_in_fp32", "master_dtype") if name not in required]
    if policy.fp8_param:
        required.remove("fp8_param_gather")  # a second name of the same setting
    if policy.fp4_param:
        required.remove("fp4_param_gather")
    return required


def check_strategy(strategy: str | None) -> None:
    """Raise `PolicyError` for an unknown strategy, with the similar names."""
    if strategy is not None and strategy not in STRATEGIES:
        raise PolicyError(f"there is no strategy `{strategy}`{did_you_mean(strategy, STRATEGIES)}")
