"""A run under a policy: the policy's fields with their origin, and what they replace in the frameworks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpguard.core import settings, tracked_fs
from mpguard.core.errors import PolicyError
from mpguard.document import mp_yaml
from mpguard.explain import launch
from mpguard.explain.inputs import RunInputs, origin_of
from mpguard.explain.model import DEFAULT, Given, Origin, Resolved, ShadowedValue, UnknownValue
from mpguard.nn import compile as compilation
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import FIELD_NAMES, Policy
from mpguard.policy.recipes import recipe
from mpguard.runtime.plan import with_first_scale
from mpguard.targets.capabilities import fp8_weights, left_out_at_start, slower_demand
from mpguard.targets.plugin import get
from mpguard.targets.settings import ABSENT, Settings, lookup

_REPLACED = "the policy replaces it in the workers"


@dataclasses.dataclass(frozen=True)
class PolicyInForce:
    """The policy of a run.

    named: the recipe's name, and where it is written. overrides: by field. base: the recipe. modules: the places of the
    entries of `fp8_modules`, in order.
    """

    policy: Policy
    base: Policy
    named: Given
    overrides: Mapping[str, Given]
    replaced: tuple[Given, ...] = ()
    modules: tuple[Origin, ...] = ()

    def origin(self, value: Callable[[Policy], Any]) -> Origin:
        """Return the origin of a value that depends on the policy: the override without which it is another one."""
        here = value(self.policy)
        for field, given in self.overrides.items():
            others = {name: each.value for name, each in self.overrides.items() if name != field}
            try:
                without = value(self.base.replace(**others) if others else self.base)
            except PolicyError:
                continue
            if without != here:
                return given.origin
        return self.named.origin


def policy_of(run: RunInputs) -> PolicyInForce | None:
    """Return the policy that mpguard enforces in a run; None without one.

    Raises `ConfigError` and `PolicyError` as `mpguard launch` does.
    """
    activated = run.script.activate if run.script is not None else None
    in_config = None if run.stock and activated is None else _of_config(run)
    if activated is not None and activated.value is not None:
        if isinstance(activated.value, UnknownValue):
            raise PolicyError(
                f"{activated.origin}: `mpguard.activate` gets a policy that only the running script knows; explain its "
                "proof with --live"
            )
        policy = recipe(activated.value)
        replaced = (in_config.named, *in_config.overrides.values()) if in_config is not None else ()
        return PolicyInForce(policy, policy, activated, {}, replaced)
    if activated is None and (run.stock or run.launcher != "mpguard"):
        return None
    return in_config


def _of_config(run: RunInputs) -> PolicyInForce | None:
    config = run.config
    stored = mp_yaml.stored(config) if config is not None else None
    if config is None or stored is None or stored.recipe is None:
        tool = settings.nearest(Path(config.path) if config is not None else Path.cwd())
        if tool.recipe is None or tool.source is None:
            return None
        policy = recipe(tool.recipe)
        return PolicyInForce(policy, policy, Given(tool.recipe, _tool_origin(tool.source)), {})
    in_file = mp_yaml.policy_of(config)
    assert in_file is not None
    named = Given(stored.recipe, origin_of(config, mp_yaml.RECIPE, "recipe"))
    overrides = {
        field: Given(value, origin_of(config, f"{mp_yaml.OVERRIDES}.{field}", "override"), field)
        for field, value in stored.overrides.items()
    }
    places: tuple[Origin, ...] = ()
    if stored.modules:
        place = origin_of(config, mp_yaml.MODULES, "override")
        overrides["fp8_modules"] = Given(stored.fields["fp8_modules"], place, "fp8_modules")
        keys = (f"{mp_yaml.MODULES}.{number}.pattern" for number in range(len(stored.modules)))
        places = tuple(origin_of(config, key, "override") for key in keys)
    return PolicyInForce(in_file, recipe(stored.recipe), named, overrides, modules=places)


def _tool_origin(source: Path) -> Origin:
    lines = tracked_fs.read(source).decode("utf-8", "replace").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if re.match(r"\s*[\"']?recipe[\"']?\s*=", text)), None)
    return Origin("recipe", str(source), line)


# -- settings ---------------------------------------------------------------------------------------


def fields(found: PolicyInForce) -> Iterator[Resolved]:
    """Yield the recipe's name and the fields of the policy that differ from their defaults, or are overridden."""
    shadowed = tuple(
        ShadowedValue(given.value, given.origin, "`mpguard.activate` in the script replaces the launcher's policy")
        for given in found.replaced
    )
    yield Resolved("recipe", found.named.value, found.named.origin, shadowed)
    values, base = found.policy.settings(), found.base.settings()
    for name in FIELD_NAMES:
        given = found.overrides.get(name)
        if name == "fp8_modules":
            yield from _modules(found)
        elif given is not None:
            before = _field(found.base, base, name)
            yield Resolved(
                name,
                values.get(name, given.value),
                given.origin,
                (ShadowedValue(before, found.named.origin, "an override replaces the recipe's field"),),
            )
        elif name in values:

            def field(policy: Policy, name: str = name) -> Any:
                return policy.settings().get(name)

            yield Resolved(name, values[name], found.origin(field))


def _modules(found: PolicyInForce) -> Iterator[Resolved]:
    """Yield a setting for each pattern of `fp8_modules`, in order: the first that matches a layer decides."""
    entries = found.policy.fp8_modules
    places = found.modules or (found.named.origin,) * len(entries)
    for entry, place in zip(entries, places, strict=True):
        yield Resolved(f"fp8_modules[{entry.pattern}]", entry.recipe, place)


def _field(policy: Policy, values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    value = getattr(policy, name)
    return getattr(value, "short", list(value) if isinstance(value, tuple) else value)


def converts_models(policy: Policy, strategy: str | None, processes: int | None) -> bool:
    """True if mpguard itself converts the model to FP8, so that accelerate's own FP8 is off."""
    return policy.low_bit_recipe is not None and fp8_weights(policy, strategy, processes) != "torchao"


def processes_of(run: RunInputs) -> int | None:
    """Return the number of processes that a run is launched with; None if it is not known."""
    given = run.flags["num_processes"].value if "num_processes" in run.flags else None
    if given is None and run.config is not None:
        given = run.config.require().get("num_processes")
    text = str(given)
    return int(text) if text.isdigit() else None


def speed_notes(policy: Policy, strategy: str | None, processes: int | None) -> Iterator[str]:
    """Yield which wishes a run goes without, and what its demands cost, each with the reason."""
    for field, reason in left_out_at_start(policy, strategy, processes).items():
        yield f"{field} is off: {reason}"
    if (cost := slower_demand(policy, strategy, processes)) is not None:
        yield f"fp8_param: true costs time: {cost}"


def enforced(
    found: PolicyInForce, strategy: str | None, deepspeed: Mapping[str, Any] | None, processes: int | None = None
) -> Iterator[Resolved]:
    """Yield the settings of the frameworks that the policy determines, without what they replace.

    deepspeed: the engine's config; None without one. processes: None if their number is not known.
    """

    def mode(policy: Policy) -> Any:
        without = policy.replace(fp8=None, fp4=None) if converts_models(policy, strategy, processes) else policy
        return get("accelerate").build_arguments(without, strategy)["mixed_precision"]

    yield Resolved("mixed_precision", mode(found.policy), found.origin(mode))
    if strategy in ("fsdp1", "fsdp2"):
        engine = strategy
        for name in ("param_dtype", "reduce_dtype", "output_dtype" if strategy == "fsdp2" else "buffer_dtype"):

            def dtype(policy: Policy, name: str = name) -> Any:
                return get(engine).build_arguments(policy, engine)[name]

            yield Resolved(f"fsdp.{name}", dtype(found.policy), found.origin(dtype))
    if deepspeed is not None:
        yield from _engine(found, strategy, deepspeed)
    if found.policy.low_bit_recipe is not None and not converts_models(found.policy, strategy, processes):
        for key, setting in get("accelerate").settings(found.policy, strategy).items():
            if key.startswith("fp8_config.") and setting.value is not ABSENT:

                def fp8(policy: Policy, key: str = key) -> Any:
                    each = get("accelerate").settings(policy, strategy).get(key)
                    return ABSENT if each is None else each.value

                yield Resolved(key, setting.value, found.origin(fp8))
    if found.policy.fp16 and not (strategy or "").startswith("deepspeed"):
        scaling = _scaling(found.policy, strategy)
        begins_as_given = found.policy.loss_scale is None and not found.policy.explicit("initial_loss_scale")
        for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
            if name in scaling:

                def scale(policy: Policy, name: str = name) -> Any:
                    return _scaling(policy, strategy).get(name)

                origin = DEFAULT if name == "init_scale" and begins_as_given else found.origin(scale)
                yield Resolved(f"grad_scaler.{name}", scaling[name], origin)
    if found.policy.tf32 is not None:
        yield Resolved("tf32", found.policy.tf32, found.origin(lambda policy: policy.tf32))
    if (chosen := compilation.wants_compile(found.policy)).on is not None:
        backend = compilation.BACKEND if chosen.on else "no"
        yield Resolved("dynamo_config.dynamo_backend", backend, found.origin(compilation.wants_compile))


#: The value of a key that a policy removes from DeepSpeed's config; by default the key's section is off.
_WITHOUT: Mapping[str, Callable[[Policy], Any]] = {
    "communication_data_type": lambda policy: str(policy.params_dtype),
    "data_types.grad_accum_dtype": lambda _policy: None,
    "bf16.bf16_master_weights_and_grads": lambda _policy: False,
    "bf16.bf16_optimizer_states": lambda _policy: False,
}


def _engine(found: PolicyInForce, strategy: str | None, config: Mapping[str, Any]) -> Iterator[Resolved]:
    """Yield the settings of DeepSpeed's config that the policy determines, where the config differs or lacks them."""

    def settings_of(policy: Policy) -> Settings:
        return get("deepspeed").settings_for(config, with_first_scale(policy), strategy)

    for key, setting in settings_of(found.policy).items():
        written = lookup(config, key)
        met = written is not ABSENT and setting.met_by(written)
        if setting.value is ABSENT and (written is ABSENT or key not in _WITHOUT):
            continue

        def value(policy: Policy, key: str = key) -> Any:
            each = settings_of(policy).get(key)
            return ABSENT if each is None else each.value

        in_force = _WITHOUT[key](found.policy) if setting.value is ABSENT else setting.value
        yield Resolved(key, _spelled(written) if met else in_force, found.origin(value))


def _spelled(value: Any) -> Any:
    """Return the usual spelling of a dtype; any other value unchanged."""
    dtype = Dtype.spelled(value) if isinstance(value, str) else None
    return value if dtype is None else dtype.short


def _scaling(policy: Policy, strategy: str | None) -> Mapping[str, Any]:
    if not policy.fp16:
        return {}
    handlers = get("accelerate").build_arguments(with_first_scale(policy), strategy)["kwargs_handlers"]
    found: Mapping[str, Any] = handlers["GradScalerKwargs"]
    return found


def overlay(stock: list[Resolved], policy: list[Resolved]) -> Iterator[Resolved]:
    """Yield the policy's settings, each with the stock settings that it replaces; then the other stock settings.

    A default replaces nothing.
    """
    before = {each.key: each for each in stock}
    for each in policy:
        former = before.pop(each.key, None)
        if former is not None and each.origin == DEFAULT:
            yield former
            continue
        shadowed = each.shadowed
        if former is not None:
            if former.origin != DEFAULT and former.origin.layer not in ("recipe", "override"):
                shadowed = (*shadowed, ShadowedValue(former.value, former.origin, _REPLACED))
            shadowed = (*shadowed, *former.shadowed)
        yield Resolved(each.key, each.value, each.origin, shadowed)
    yield from before.values()


def strategy_of(run: RunInputs, deepspeed: Mapping[str, Any] | None) -> str | None:
    """Return the strategy of a run; None if it is unknown."""
    kind = launch.engine(run)
    if kind == "FSDP":
        return f"fsdp{launch.fsdp_version(run).value}"
    if kind == "DEEPSPEED":
        named = get("deepspeed").read_strategy(deepspeed) if deepspeed else None
        configured = get("accelerate").read_strategy(run.config.data) if run.config is not None else None
        return named or (configured if configured and configured.startswith("deepspeed") else None)
    if kind in ("NO", "False"):
        return "single"
    return "ddp" if kind.startswith("MULTI") else None
