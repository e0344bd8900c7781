"""What a run was asked to be: the policy, and the engine and the processes that it should run on.

The launcher half makes a `Plan` once; workers get it as text in environment variables and read
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
from mpguard.document import Document, mp_yaml, read
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import recipe
from mpguard.targets.plugin import get

Enforce = Literal["error", "warn", "off"]

#: The whole frozen policy as text, the config's name, and the rest of the plan as JSON.
POLICY, CONFIG, PLAN = "MPGUARD_POLICY", "MPGUARD_CONFIG", "MPGUARD_PLAN"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run was asked to be.

    config: the file that says so; None where a recipe alone does.
    strategy, processes: None where nothing says them; then they are shown, not compared.
    announced: whether the header has been printed (by the launcher half).
    """

    policy: Policy
    config: str | None = None
    strategy: str | None = None
    processes: int | None = None
    enforce: Enforce = "error"
    proof_json: str | None = None
    announced: bool = False

    def environment(self) -> dict[str, str]:
        """The variables that hand this plan to the workers."""
        rest = {
            "strategy": self.strategy,
            "processes": self.processes,
            "enforce": self.enforce,
            "proof_json": self.proof_json,
            "announced": self.announced,
        }
        return {POLICY: str(self.policy), CONFIG: self.config or "", PLAN: json.dumps(rest)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Plan | None:
        """The plan that a launcher half handed over; None without one. Raises `PolicyError`."""
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
            plan = cls(Policy.parse(environment[POLICY]), environment.get(CONFIG) or None, **rest)
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, PolicyError):
                raise
            raise PolicyError(f"{PLAN} is {text[:80]!r}; what `mpguard launch` writes is needed: {error}") from None
        return plan if rest else dataclasses.replace(plan, enforce=enforcement(None, Path.cwd()))

    @classmethod
    def of(cls, path: Path, *, enforce: str | None = None, proof_json: str | None = None) -> Plan:
        """The plan that an mp.yaml states. Raises `ConfigError`, `PolicyError`."""
        policy = mp_yaml.load_policy(path)
        config = read(path).require()
        processes = config.get("num_processes")
        return cls(
            policy=policy,
            config=str(path),
            strategy=strategy_of(config, path),
            processes=processes if isinstance(processes, int) and processes > 0 else None,
            enforce=enforcement(enforce, path),
            proof_json=absolute(proof_json),
        )

    @classmethod
    def found(cls, config: str | None, *, enforce: str | None = None, proof_json: str | None = None) -> Plan:
        """The plan of a worker: from a config, else handed over, else `[tool.mpguard] recipe`.

        Raises `ConfigError` where there is none.
        """
        handed = cls.from_environment()
        if config is not None:
            plan = cls.of(Path(config), enforce=enforce, proof_json=proof_json)
            same = handed is not None and handed.config is not None and _same_file(handed.config, config)
            return cast(Plan, handed) if same and enforce is None and proof_json is None else plan
        if handed is None:
            here = settings.nearest(Path.cwd())
            if here.recipe is None:
                raise ConfigError(
                    f"no policy is in force: there is no --config, no {POLICY} and no `recipe` in [tool.mpguard]. "
                    "Give --config mp.yaml (`mpguard init bf16_mixed` writes one), set one of these, "
                    'or call mpguard.activate("bf16_mixed")'
                )
            handed = cls(recipe(here.recipe), enforce=enforcement(None, Path.cwd()))
        return dataclasses.replace(
            handed,
            enforce=cast(Enforce, enforce or handed.enforce),
            proof_json=absolute(proof_json) or handed.proof_json,
        )


def _same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False  # what was handed over is gone; what is given counts


def enforcement(given: str | None, near: Path) -> Enforce:
    """What a mismatch does: as given, else `[tool.mpguard] enforce`, else "error"."""
    said = given or settings.nearest(near).enforce or "error"
    if said not in get_args(Enforce):
        raise ConfigError(f"enforce is {said!r}; it must be one of {', '.join(get_args(Enforce))}")
    return cast(Enforce, said)


def absolute(path: str | None) -> str | None:
    """Workers may run elsewhere than the launcher."""
    return str(Path(path).absolute()) if path else None


def strategy_of(config: Mapping[str, Any], path: Path) -> str | None:
    """The strategy that an accelerate config asks for; None for engines that no strategy names.

    A DeepSpeed file that it names decides the ZeRO stage; one process of many is `single`.
    """
    document = deepspeed_file(config, path) if config.get("distributed_type") == "DEEPSPEED" else None
    if document is not None:
        return get("deepspeed").strategy(document.require())
    strategy = get("accelerate").strategy(config)
    return "single" if strategy == "ddp" and config.get("num_processes") == 1 else strategy


def deepspeed_file(config: Mapping[str, Any], path: Path) -> Document | None:
    """The DeepSpeed file that an accelerate config names, looked for as accelerate does (from here), then beside it."""
    name = mp_yaml.deepspeed_file(config)
    if name is None:
        return None
    beside = path.parent / name
    return read(Path(name) if Path(name).exists() or not beside.exists() else beside)


def refuse_config_after_script(script: str, arguments: Sequence[str]) -> None:
    """Raises `NotInForce` where the script's own arguments name an accelerate config and none is in force."""
    for argument in arguments:
        name = argument.partition("=")[2] if argument.startswith("--") and "=" in argument else argument
        if _looks_like_accelerate(name):
            raise NotInForce(
                f"{name} comes after {script}, so it is an argument of the script and no config is in force. "
                f"Put it before: --config {name} {script}"
            )


def _looks_like_accelerate(name: str) -> bool:
    """Whether an argument names a file that is an accelerate config for certain.

    Less counts than for the plugin, which may take a file with `mixed_precision` and a few more keys for one: here it
    is an argument of the user's script, whose own config may have those, and a run is refused for it.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json") or not path.is_file():
        return False
    try:
        data = read(path).data
    except ConfigError:
        return False
    return isinstance(data, dict) and ("compute_environment" in data or "distributed_type" in data)
