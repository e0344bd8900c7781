"""`Plan`: the policy of a run, and the engine and the number of processes that it should have.

The launcher makes a `Plan` once; workers get it as text in environment variables and read
nothing else. accelerate's own variables carry no recipe outside `mixed_precision: fp8`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from mpguard.core import settings
from mpguard.core.errors import ConfigError, NotInForce, PolicyError
from mpguard.core.watch_levels import WatchLevel, watch_level
from mpguard.document import Document, mp_yaml, read
from mpguard.policy.allow import STATES, Allowance, allowances
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import recipe
from mpguard.targets.capabilities import left_out_at_start
from mpguard.targets.plugin import get

Enforce = Literal["error", "warn", "off"]

#: Environment variables: the whole frozen policy as text, the path of the config, and the rest of the plan as JSON.
POLICY, CONFIG, PLAN = "MPGUARD_POLICY", "MPGUARD_CONFIG", "MPGUARD_PLAN"


#: Where torch's GradScaler and DeepSpeed begin a dynamic loss scale.
LIBRARY_SCALE = 2.0**16


def first_scale(policy: Policy, given: float | None) -> float:
    """Return where a dynamic loss scale begins. given: what the script, or a config, has; None for nothing.

    The default of a policy is Megatron's, for long runs: each halving from there skips a step, and a run of a few steps
    would apply none. Where the policy has no value of its own, it is only the largest one.
    """
    if policy.explicit("initial_loss_scale"):
        return policy.initial_loss_scale
    return min(LIBRARY_SCALE if given is None else given, policy.initial_loss_scale)


def with_first_scale(policy: Policy) -> Policy:
    """Return a policy whose dynamic loss scale begins as it does where a config has no other. See `first_scale`."""
    if not policy.fp16 or policy.loss_scale is not None:
        return policy
    return policy.replace(initial_loss_scale=first_scale(policy, None))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run should be.

    config: the file that defines it; None if it is defined by a recipe alone.
    strategy, processes: None if not defined; then the proof shows them and does not compare them.
    enforce: what a mismatch does. allow: deviations that are wanted. proof_json: the file that the proof is written to.
    announced: True if the launcher has printed the header. watch: how closely the run is watched; None for the default.
    watch_json: the file that the watch writes.
    """

    policy: Policy
    config: str | None = None
    strategy: str | None = None
    processes: int | None = None
    enforce: Enforce = "error"
    proof_json: str | None = None
    announced: bool = False
    allow: tuple[Allowance, ...] = ()
    watch: WatchLevel | None = None
    watch_json: str | None = None

    def allowed(self, kind: str) -> tuple[str, ...]:
        """Return the values of the deviations of one kind that are wanted."""
        return tuple(each.value for each in self.allow if each.kind == kind)

    @property
    def muon_momentum(self) -> tuple[Dtype, str] | None:
        """The dtype of Muon's momentum in DeepSpeed's ZeRO, that of the parameters, and what to use in its place.

        None if the policy asks for no other, or allows this one.
        """
        policy, dtype = self.policy, self.policy.params_dtype
        if dtype is None or dtype in (Dtype.FP32, policy.master_dtype) or dtype.short in self.allowed(STATES):
            return None
        return dtype, (
            "ZeRO stage 1 (with matrices of two dimensions only), or `torch_autocast` in place of the "
            f"`{'bf16' if policy.bf16 else 'fp16'}` section, or accept it: mpguard_allow: [{{states: {dtype}}}]"
        )

    def left_out_at_start(self) -> dict[str, str]:
        """Return the wishes that the run goes without, as far as that is known before it starts: field -> reason."""
        return left_out_at_start(self.policy, self.strategy, self.processes)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that hand this plan to the workers."""
        rest = {
            "strategy": self.strategy,
            "processes": self.processes,
            "enforce": self.enforce,
            "proof_json": self.proof_json,
            "announced": self.announced,
            "allow": [str(each) for each in self.allow],
            "watch": self.watch,
            "watch_json": self.watch_json,
        }
        return {POLICY: str(self.policy), CONFIG: self.config or "", PLAN: json.dumps(rest)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Plan | None:
        """Return the plan that a launcher handed over; None if there is none. Raises `PolicyError`."""
        environment = os.environ if environment is None else environment
        if not environment.get(POLICY):
            return None
        text = environment.get(PLAN) or "{}"
        try:
            rest = json.loads(text)
            if rest.get("enforce", "error") not in get_args(Enforce):
                raise ValueError(f"enforce is {rest['enforce']!r}")
            if not isinstance(rest.get("processes"), (int, type(None))):
                raise ValueError(f"processes is {rest['processes']!r}")
            rest["allow"] = allowances(rest.get("allow"))
            rest["watch"] = watch_level(rest["watch"]) if rest.get("watch") is not None else None
            plan = cls(Policy.parse(environment[POLICY]), environment.get(CONFIG) or None, **rest)
        except (ValueError, TypeError, AttributeError, ConfigError) as error:
            if isinstance(error, PolicyError):
                raise
            raise PolicyError(
                f"{PLAN} is {text[:80]!r}; what `mpguard launch` writes is needed: {error}. Unset the variable"
            ) from None
        return plan if environment.get(PLAN) else dataclasses.replace(plan, enforce=enforcement(None, Path.cwd()))

    @classmethod
    def from_config(
        cls, path: Path, *, enforce: str | None = None, proof_json: str | None = None, allow: object = None
    ) -> Plan:
        """Return the plan that an mp.yaml defines. allow: more deviations. Raises `ConfigError`, `PolicyError`."""
        policy = mp_yaml.load_policy(path)
        document = read(path)
        config = document.require()
        processes = config.get("num_processes")
        return cls(
            policy=policy,
            config=str(path),
            strategy=strategy_of(config, path),
            processes=processes if isinstance(processes, int) and processes > 0 else None,
            enforce=enforcement(enforce, path),
            proof_json=absolute(proof_json),
            allow=(*mp_yaml.stored(document).allow, *allowances(allow)),
            watch=mp_yaml.stored(document).watch,
        )

    @classmethod
    def resolve(
        cls, config: str | None, *, enforce: str | None = None, proof_json: str | None = None, allow: object = None
    ) -> Plan:
        """Return the plan of a worker: from a config, else from the launcher, else from `[tool.mpguard] recipe`.

        Raises `ConfigError` if there is none.
        """
        inherited = cls.from_environment()
        if config is not None:
            plan = cls.from_config(Path(config), enforce=enforce, proof_json=proof_json, allow=allow)
            same = inherited is not None and inherited.config is not None and _same_file(inherited.config, config)
            given = (enforce, proof_json, allow) != (None, None, None)
            return cast(Plan, inherited) if same and not given else plan
        if inherited is None:
            here = settings.nearest(Path.cwd())
            if here.recipe is None:
                raise ConfigError(
                    f"no policy is in force: there is no --config, no {POLICY} and no `recipe` in [tool.mpguard]. "
                    "Give --config mp.yaml (`mpguard init bf16_mixed` writes one), set one of these, "
                    'or call mpguard.activate("bf16_mixed")'
                )
            inherited = cls(recipe(here.recipe), enforce=enforcement(None, Path.cwd()))
        return dataclasses.replace(
            inherited,
            enforce=cast(Enforce, enforce or inherited.enforce),
            proof_json=absolute(proof_json) or inherited.proof_json,
            allow=(*inherited.allow, *allowances(allow)),
        )


def _same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False  # the inherited config no longer exists: the given one applies


def enforcement(given: str | None, near: Path) -> Enforce:
    """Return what a mismatch does: as given, else `[tool.mpguard] enforce`, else "error". Raises `ConfigError`."""
    enforce = given or settings.nearest(near).enforce or "error"
    if enforce not in get_args(Enforce):
        raise ConfigError(f"enforce is {enforce!r}; it must be one of {', '.join(get_args(Enforce))}")
    return cast(Enforce, enforce)


def absolute(path: str | None) -> str | None:
    """Return an absolute path, because workers may run in another folder than the launcher; None for no path."""
    return str(Path(path).absolute()) if path else None


def strategy_of(config: Mapping[str, Any], path: Path) -> str | None:
    """Return the strategy of an accelerate config; None for an engine that has no strategy.

    If the config names a DeepSpeed file, that file defines the ZeRO stage. DDP with `num_processes: 1` is `single`.
    """
    document = deepspeed_file(config, path) if config.get("distributed_type") == "DEEPSPEED" else None
    if document is not None:
        return get("deepspeed").read_strategy(document.require())
    strategy = get("accelerate").read_strategy(config)
    return "single" if strategy == "ddp" and config.get("num_processes") == 1 else strategy


def deepspeed_file(config: Mapping[str, Any], path: Path) -> Document | None:
    """Return the DeepSpeed file that an accelerate config names; None if it names none.

    A relative path is resolved from the current folder, as accelerate does, then from the folder of the config.
    """
    name = mp_yaml.deepspeed_file(config)
    if name is None:
        return None
    sibling = path.parent / name
    return read(Path(name) if Path(name).exists() or not sibling.exists() else sibling)


def refuse_config_after_script(script: str, arguments: Sequence[str]) -> None:
    """Raise `NotInForce` if the script's own arguments name an accelerate config while none is in force."""
    for argument in arguments:
        name = argument.partition("=")[2] if argument.startswith("--") and "=" in argument else argument
        if _is_accelerate_config(name):
            raise NotInForce(
                f"{name} comes after {script}, so it is an argument of the script and no config is in force. "
                f"Put it before: --config {name} {script}"
            )


def _is_accelerate_config(name: str) -> bool:
    """True if an argument names a file that certainly is an accelerate config.

    This is stricter than the plugin, which accepts a file with `mixed_precision` and a few more keys: here the file is
    an argument of the user's script, whose own config may have those keys, and the run would be refused.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json") or not path.is_file():
        return False
    try:
        data = read(path).data
    except ConfigError:
        return False
    return isinstance(data, dict) and ("compute_environment" in data or "distributed_type" in data)
