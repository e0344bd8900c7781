"""What `accelerate launch` hands to the workers (accelerate 1.15, `commands/launch.py` and `utils/launch.py`).

A flag is used before the config, `deepspeed_config` before the top level (S7), and the variables of the calling shell
only where the launcher sets none. Other launchers pass on the shell's variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpguard.core.errors import NotInForce
from mpguard.document.mp_yaml import deepspeed_file
from mpguard.document.schemas.accelerate import DYNAMO, FP8, FSDP, Section
from mpguard.explain.inputs import RunInputs, origin_of
from mpguard.explain.model import DEFAULT, Claim, Given, Resolved, resolve
from mpguard.runtime.plan import refuse_config_after_script

#: Sections whose keys become launch arguments without a prefix, in the order in which accelerate copies them.
_UNPREFIXED = ("deepspeed_config", "parallelism_config", "megatron_lm_config", "mpirun_config")

_FLAG = "a flag of `accelerate launch` is used before the config"
_SET = "the launcher sets this variable itself, and replaces the shell's value"
#: Flags of accelerate's launcher that select an engine.
_ENGINE_FLAGS = {
    "cpu": "NO", "use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU", "tpu": "XLA",
}  # fmt: skip

#: The FP8 arguments of the launcher that have a default, which it exports too.
FP8_DEFAULTS: Mapping[str, Any] = {
    "use_autocast_during_eval": False, "margin": 0, "interval": 1, "format": "HYBRID", "amax_history_len": 1024,
    "amax_compute_algo": "most_recent", "override_linear_precision": (False, False, False), "opt_level": "O2",
    "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True,
}  # fmt: skip


def is_on(value: object) -> bool:
    """True if accelerate reads a value, which it passes on as text, as true."""
    return str(value).lower() in ("y", "yes", "t", "true", "on", "1")


# -- the engine -----------------------------------------------------------------------------------


def engine(run: RunInputs) -> str:
    """Return accelerate's `distributed_type` of a run: what the script, the flags, the config or the shell select."""
    script = run.script
    if script is not None:
        if "deepspeed" in script.trainer_arguments(run.arguments) or script.deepspeed_plugin is not None:
            return "DEEPSPEED"
        if script.fsdp_plugin is not None:
            return "FSDP"
    if run.launches:
        for flag, kind in _ENGINE_FLAGS.items():
            if flag in run.flags:
                return kind
        if run.config is not None:
            value = run.config.data.get("distributed_type")
            return "NO" if value in (None, False) else str(value)
        return "NO"
    if script is None and run.launcher == "deepspeed":
        return "DEEPSPEED"
    for variable, kind in (("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"), ("ACCELERATE_USE_FSDP", "FSDP")):
        if variable in run.environment and str(run.environment[variable].value).lower() == "true":
            return kind
    if script is not None and script.initialize is not None:
        return "DEEPSPEED"
    return "NO"


def fsdp_version(run: RunInputs) -> Resolved:
    """Return the version of FSDP."""
    claims = []
    if run.script is not None and run.script.fsdp_plugin is not None and "fsdp_version" in run.script.fsdp_plugin:
        given = run.script.fsdp_plugin["fsdp_version"]
        claims.append(Claim(given.value, given.origin, "the plugin in the script is used as it is"))
    claims += list(arguments(run, "version", FSDP, "fsdp_config", exported=True, default="1"))
    claims += list(shell(run, "FSDP_VERSION", run.launches and engine(run) == "FSDP"))
    found = resolve("fsdp_config.fsdp_version", [*claims, Claim("1", DEFAULT)])
    return Resolved(found.key, str(found.value), found.origin, found.shadowed)


# -- arguments of the launcher --------------------------------------------------------------------


def in_section(run: RunInputs, name: str, section: Section, key: str) -> list[Given]:
    """Return the entries of a section that set a launch argument, in any spelling; the last one counts."""
    if run.config is None:
        return []
    return [
        Given(entry.value, origin_of(run.config, f"{name}.{entry.key}"), f"{name}.{entry.key}")
        for entry in run.config.entries()
        if len(entry.path) == 2 and entry.path[0] == name and section.bare(entry.key) == key
    ]


def arguments(
    run: RunInputs, key: str, section: Section, name: str, *, exported: bool, default: Any = None, why: str = ""
) -> Iterator[Claim]:
    """Yield the claims of flag, config and the launcher's default for an argument that workers get as a variable.

    exported: the launcher sets the variable in this run; `why` is the reason if it does not.
    """
    if not run.launches:
        why = f"{run.launcher} reads no config of accelerate"
    lost = "" if run.launches and exported else why
    flag = run.flags.get(f"{section.prefix}{key}")
    if flag is not None:
        yield Claim(flag.value, flag.origin, _FLAG, lost)
    for given in reversed(in_section(run, name, section, key)):
        yield Claim(given.value, given.origin, "the last spelling of a key in the file is used; " + _SET, lost)
    if not lost and default is not None:
        yield Claim(default, DEFAULT, _SET)


def shell(run: RunInputs, variable: str, replaced: bool) -> Iterator[Claim]:
    """Yield the claim of a variable of the calling shell. replaced: the launcher sets the variable itself."""
    given = run.environment.get(variable)
    if given is not None:
        yield Claim(given.value, given.origin, "", _SET if replaced else "")


# -- mixed_precision ------------------------------------------------------------------------------


def mode(run: RunInputs) -> list[Claim]:
    """Return the claims on the mode that a worker finds in ACCELERATE_MIXED_PRECISION; the last one is the default."""
    lost = "" if run.launches else f"{run.launcher} reads no config of accelerate"
    claims: list[Claim] = []
    flag = run.flags.get("mixed_precision")
    if flag is not None and run.launches:
        claims.append(Claim(flag.value, flag.origin, _FLAG))
    if run.config is not None:
        for section in reversed(_UNPREFIXED):
            entry = run.config.entry(f"{section}.mixed_precision")
            if entry is not None:
                empty = "" if entry.value else "an empty value sets nothing"
                reason = f"accelerate copies the keys of `{section}` to launch arguments before it reads the top level"
                where = origin_of(run.config, f"{section}.mixed_precision")
                claims.append(Claim(entry.value, where, reason, lost or empty))
        claims += [Claim(given.value, given.origin, _SET, lost) for given in _top_level(run)]
    if run.launches:
        claims.append(Claim("no", DEFAULT, _SET))
    claims += shell(run, "ACCELERATE_MIXED_PRECISION", run.launches)
    claims.append(Claim("no", DEFAULT))
    return claims


def _top_level(run: RunInputs) -> Iterator[Given]:
    """Yield the top-level key that sets the mode. `fp16: true`, its old form, is read only without it."""
    assert run.config is not None
    data = run.config.data
    if "mixed_precision" in data:
        if data["mixed_precision"] is not None:
            yield Given(data["mixed_precision"], origin_of(run.config, "mixed_precision"), "mixed_precision")
    elif data.get("fp16"):
        yield Given("fp16", origin_of(run.config, "fp16"), "fp16")


def launched_mode(run: RunInputs) -> Resolved:
    """Return the mode that a worker finds in ACCELERATE_MIXED_PRECISION."""
    found = resolve("mixed_precision", mode(run))
    text = found.value
    if run.launches and isinstance(text, str):
        text = text.lower()
    return Resolved(found.key, text, found.origin, found.shadowed)


# -- FP8 and compilation --------------------------------------------------------------------------


def fp8_claims(run: RunInputs, key: str) -> list[Claim]:
    """Return the claims on a key of `fp8_config`, and on its variable."""
    exported = launched_mode(run).value == "fp8"
    why = "accelerate passes FP8 settings to the workers only under `mixed_precision: fp8` (S24)"
    claims = list(arguments(run, key, FP8, "fp8_config", exported=exported, default=FP8_DEFAULTS.get(key), why=why))
    replaced = any(not claim.lost for claim in claims)
    return [*claims, *shell(run, f"ACCELERATE_FP8_{key.upper()}", replaced)]


def dynamo_claims(run: RunInputs) -> list[Claim]:
    """Return the claims on the backend of torch.compile."""
    under_deepspeed = run.launches and launcher_engine(run) == "DEEPSPEED"
    why = "under DEEPSPEED the launcher passes no `dynamo_config` to the workers (S27)"
    claims: list[Claim] = []
    old = run.config.entry("dynamo_backend") if run.config is not None else None
    if old is not None and run.config is not None:
        flag = run.flags.get("dynamo_backend")
        if flag is not None:
            claims.append(Claim(flag.value, flag.origin, _FLAG, why if under_deepspeed else ""))
        reason = "the old key `dynamo_backend` replaces the whole `dynamo_config`"
        claims.append(Claim(old.value, origin_of(run.config, "dynamo_backend"), reason, why if under_deepspeed else ""))
        claims += [
            Claim(given.value, given.origin, "", reason)
            for given in in_section(run, "dynamo_config", DYNAMO, "backend")
        ]
    exported = not under_deepspeed
    if old is None:
        claims += arguments(run, "backend", DYNAMO, "dynamo_config", exported=exported, default="no", why=why)
    return [*claims, *shell(run, "ACCELERATE_DYNAMO_BACKEND", run.launches and exported), Claim("no", DEFAULT)]


# -- DeepSpeed ------------------------------------------------------------------------------------


def launcher_engine(run: RunInputs) -> str:
    """Return the engine that flags and config select, without what the script adds."""
    for flag, kind in _ENGINE_FLAGS.items():
        if flag in run.flags:
            return kind
    value = run.config.data.get("distributed_type") if run.config is not None else None
    return "NO" if value in (None, False) else str(value)


def deepspeed_config_file(run: RunInputs) -> Given | None:
    """Return the DeepSpeed file that `accelerate launch` names to the workers; None if it names none."""
    if not run.launches or launcher_engine(run) != "DEEPSPEED":
        return run.environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    flag = run.flags.get("deepspeed_config_file")
    if flag is not None:
        return flag
    name = deepspeed_file(run.config.data) if run.config is not None else None
    if name is None or run.config is None:
        return run.environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    return Given(name, origin_of(run.config, "deepspeed_config.deepspeed_config_file"))


#: Keys that accelerate refuses in its config next to a DeepSpeed file (`DeepSpeedPlugin._deepspeed_config_checks`).
_REFUSED = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
    "mixed_precision",
)  # fmt: skip


def stops(run: RunInputs, guarded: bool = False) -> Iterator[str]:
    """Yield the reasons why accelerate's launcher, or the plugin that it configures, stops the run.

    guarded: a policy replaces `mixed_precision` in the config before accelerate reads it.
    """
    config = run.config
    if run.launcher == "accelerate" and "config" in run.flags:
        yield (
            "`accelerate launch` has no flag --config, and stops (S20). Write --config_file; or use `mpguard launch`, "
            "or `mpguard hook install`"
        )
    if run.launcher == "mpguard":
        yield from config_after_script(run)
    if not run.launches or config is None:
        return
    replaced = ("mixed_precision",) if guarded else ()
    if launcher_engine(run) != "DEEPSPEED" or deepspeed_config_file(run) is None:
        return
    keys = [key for key in _REFUSED if key not in replaced and config.entry(f"deepspeed_config.{key}") is not None]
    where = [f"deepspeed_config.{key}" for key in keys]
    top = [each for each in _top_level(run) if each.origin == resolve("", mode(run)).origin]
    if top and not guarded:
        where.append(top[0].name)
    for key in where:
        yield (
            f"{config.where(key)} next to a DeepSpeed file, which sets it: accelerate stops with ValueError (S25). "
            "Remove the key"
        )


def config_after_script(run: RunInputs) -> Iterator[str]:
    """Yield a message if a config is an argument of the script, so that the launcher does not read it (S20)."""
    if run.script is None:
        return
    try:
        refuse_config_after_script(run.script.path, [str(word.value) for word in run.arguments])
    except NotInForce as error:
        yield f"{error} (S20)"
