"""What `Accelerator` (1.15) and the Trainer (transformers 5.23) make of the launcher's values and the script's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpguard.document.schemas.accelerate_values import MODES
from mpguard.explain import launch
from mpguard.explain.inputs import RunInputs
from mpguard.explain.model import DEFAULT, Claim, Given, Resolved, ShadowedValue, UnknownValue, resolve
from mpguard.explain.script import HANDLERS, Script
from mpguard.policy import hardware
from mpguard.policy.dtype import Dtype

BACKENDS = ("AO", "TE", "MSAMP")

_CODE = "`Accelerator({name}=...)` is used before what the launcher sets"
_TRAINER = "`TrainingArguments({name}=True)` is used before what the launcher sets"

#: The FP8 settings of each backend: key of `fp8_config` -> argument of the handler, and its default.
FP8_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "AO": {
        "pad_inner_dim": ("pad_inner_dim", True),
        "enable_fsdp_float8_all_gather": ("enable_fsdp_float8_all_gather", True),
    },
    "TE": {
        "format": ("fp8_format", "HYBRID"),
        "margin": ("margin", 0),
        "amax_history_len": ("amax_history_len", 1024),
        "amax_compute_algo": ("amax_compute_algo", "most_recent"),
        "use_mxfp8_block_scaling": ("use_mxfp8_block_scaling", False),
        "use_autocast_during_eval": ("use_autocast_during_eval", False),
    },
    "MSAMP": {"opt_level": ("opt_level", "O2")},
}
_HANDLERS = {"AORecipeKwargs": "AO", "TERecipeKwargs": "TE", "MSAMPRecipeKwargs": "MSAMP"}


def mode_claims(run: RunInputs) -> list[Claim]:
    """Return the claims on the mode of the `Accelerator` that the script, or its Trainer, creates."""
    claims: list[Claim] = []
    script = run.script
    if script is not None and script.has_trainer:
        given = script.trainer_arguments(run.arguments)
        for name in ("fp16", "bf16"):
            if name not in given:
                continue
            unknown = isinstance(given[name].value, UnknownValue)
            lost = "" if given[name].value else "only True selects a mode; otherwise the launcher's is used"
            value = given[name].value if unknown else name if given[name].value else False
            by_class = given[name].name
            default = f"`{by_class}` sets bf16 unless fp16 is given, before what the launcher sets"
            reason = _if_unknown(script, given[name].value, False) if unknown else _TRAINER.format(name=name)
            reason = default if by_class and not unknown else reason
            claims.append(Claim(value, given[name].origin, reason, lost))
    elif script is not None and script.accelerator is not None and "mixed_precision" in script.accelerator:
        own = script.accelerator["mixed_precision"]
        lost = "None leaves it to the launcher" if own.value is None else ""
        reason = _CODE.format(name="mixed_precision")
        if isinstance(own.value, UnknownValue):
            reason = _if_unknown(script, own.value, None)
        claims.append(Claim(own.value, own.origin, reason, lost))
    return [*claims, *launch.mode(run)]


def _if_unknown(script: Script, value: UnknownValue, leaves_it: object) -> str:
    """Return when a setting is used after an argument of the script whose value only the run knows."""
    where = "the command line" if script.reads_command_line else "the run"
    return f"depends on {where}: used if {value.expression} is {leaves_it}"


def mode(run: RunInputs, machine: hardware.Hardware | None) -> Resolved:
    """Return the mode that `Accelerator` asks for, without what DeepSpeed makes of it.

    machine: the GPU that the run is explained for; None: one that can run every mode.
    """
    found = resolve("mixed_precision", mode_claims(run))
    value = found.value
    from_launcher = found.origin.layer in ("YAML", "launch flag")
    if isinstance(value, str) and not isinstance(value, UnknownValue) and from_launcher:
        value = value.lower()
    found = Resolved(found.key, value, found.origin, found.shadowed)
    if found.origin.layer == "environment" and value not in MODES and not (run.script and run.script.has_trainer):
        why = f"accelerate compares in lower case, and takes `{value}` for no mixed precision"
        return Resolved(found.key, "no", DEFAULT, (ShadowedValue(value, found.origin, why), *found.shadowed))
    too_old = machine is not None and machine.capability is not None and machine.capability < (8, 9)
    if value == "fp8" and too_old and machine is not None:
        why = f"{machine} has no FP8: accelerate continues in FP16, with a warning (S10)"
        return Resolved(found.key, "fp16", DEFAULT, (ShadowedValue(value, found.origin, why), *found.shadowed))
    return found


def stops(run: RunInputs, mode: Resolved) -> Iterator[str]:
    """Yield the reasons why `Accelerator` or `TrainingArguments` stops the run."""
    where = str(mode.origin)
    if run.script is not None and run.script.has_trainer:
        given = run.script.trainer_arguments(run.arguments)
        both = [given[name] for name in ("fp16", "bf16") if name in given and given[name].value is True]
        if len(both) == 2:
            yield f"{both[1].origin}: fp16 and bf16 are both True; TrainingArguments stops with ValueError. Remove one"
    known = not isinstance(mode.value, (UnknownValue, bool))
    if known and mode.value not in MODES and mode.origin.layer != "YAML":  # which `validation` reports
        known_modes = ", ".join(MODES)
        yield f"{where}: `{mode.value}` is no mode of accelerate, which stops with ValueError; known are {known_modes}"
    backend = _backend_claims(run)
    written = resolve("", backend) if backend else None
    if written is None or handlers(run) or isinstance(written.value, UnknownValue):
        return
    if written.value not in (*BACKENDS, "NO"):
        meant = str(written.value).upper()
        hint = f"; write {meant} in a config or in ACCELERATE_FP8_BACKEND" if meant in BACKENDS else ""
        yield (
            f"{written.origin}: `{written.value}` is no FP8 backend; accelerate stops with ValueError. Its names are "
            f"{', '.join(BACKENDS)}, in upper case{hint}"
        )


# -- FP8 ------------------------------------------------------------------------------------------


def handlers(run: RunInputs) -> dict[str, Any]:
    """Return the FP8 handlers that the script creates, by class."""
    if run.script is None or run.script.has_trainer:  # the Trainer passes no FP8 handler
        return {}
    names = ("FP8RecipeKwargs", *_HANDLERS)
    return {name: run.script.handlers[name] for name in names if name in run.script.handlers}


def _backend_claims(run: RunInputs) -> list[Claim]:
    return (
        launch.fp8_claims(run, "backend")
        if launch.launched_mode(run).value == "fp8"
        else list(launch.shell(run, "ACCELERATE_FP8_BACKEND", False))
    )


def fp8_backend(run: RunInputs) -> Resolved:
    """Return the FP8 backend: the script's handler, else the launcher's or the shell's, else what is installed."""
    claims: list[Claim] = []
    for name, arguments in handlers(run).items():
        own = arguments.get("backend") if name == "FP8RecipeKwargs" else Given(_HANDLERS[name], arguments[""].origin)
        if own is not None:
            claims.append(Claim(own.value, own.origin, f"the script's `{name}` is used before the launcher's settings"))
    claims += launch.fp8_claims(run, "backend")
    libraries = hardware.detect().libraries
    chosen = next((name for name, library in (("AO", "torchao"), ("TE", "te")) if library in libraries), "AO")
    return resolve("fp8_config.backend", [*claims, Claim(chosen, DEFAULT)])


def fp8(run: RunInputs) -> Iterator[Resolved]:
    """Yield the settings of FP8, for a run whose mode is fp8."""
    backend = fp8_backend(run)
    yield backend
    own: dict[str, Given] = {}
    for arguments in handlers(run).values():
        own = {**arguments, **own}
    if "config" in own and own["config"].value is not None:
        yield Resolved("AORecipeKwargs.config", own["config"].value, own["config"].origin)
        return
    for key, (argument, default) in FP8_KEYS.get(str(backend.value), {}).items():
        claims = []
        if argument in own and own[argument].value is not None:
            reason = "the handler in the script is used before the launcher's settings"
            claims.append(Claim(own[argument].value, own[argument].origin, reason))
        claims += [*launch.fp8_claims(run, key), Claim(default, DEFAULT)]
        found = resolve(f"fp8_config.{key}", claims)
        found = Resolved(found.key, _typed(found.value, default), found.origin, found.shadowed)
        yield _passed_on(found) if key == "amax_compute_algo" else found


def _typed(value: Any, default: Any) -> Any:
    """Return a value, which accelerate passes on as text, with the type in which it is used."""
    if isinstance(value, UnknownValue):
        return value
    if isinstance(default, bool):
        return launch.is_on(value)
    if isinstance(default, int):
        return int(value) if str(value).lstrip("-").isdigit() else value
    return str(value).upper() if default == "HYBRID" else str(value).lower() if default == "most_recent" else value


def _passed_on(found: Resolved) -> Resolved:
    """Return `max` in the place of `most_recent`, which accelerate never passes to Transformer Engine (S3)."""
    if found.value != "most_recent":
        return found
    why = "accelerate passes on what differs from its own default only; Transformer Engine's default is max (S3)"
    shadowed = () if found.origin == DEFAULT else (ShadowedValue(found.value, found.origin, why),)
    return Resolved(found.key, "max", DEFAULT, (*shadowed, *found.shadowed))


# -- FSDP, loss scaling, compilation ----------------------------------------------------------------


def fsdp(run: RunInputs, mode: Resolved) -> Iterator[Resolved]:
    """Yield the dtypes of FSDP's policy: the script's, else that of the mode for everything (S13)."""
    version = launch.fsdp_version(run)
    yield version
    third = "output_dtype" if version.value == "2" else "buffer_dtype"
    plugin = dict(run.script.fsdp_plugin or {}) if run.script is not None else {}
    given = plugin.get("mixed_precision_policy")
    if given is not None:
        dtype = Dtype.spelled("bf16" if given.value == "fp8" else str(given.value))
        plugin |= dict.fromkeys(
            ("param_dtype", "reduce_dtype", third), Given(dtype.short if dtype else given.value, given.origin)
        )
    compute = {"fp8": "bf16", "no": None}.get(str(mode.value), mode.value)
    for name in ("param_dtype", "reduce_dtype", third):
        claims = []
        if name in plugin:
            reason = "accelerate never replaces the policy of the script's plugin by the mode (S12)"
            claims.append(Claim(plugin[name].value, plugin[name].origin, reason))
        yield resolve(f"fsdp.{name}", [*claims, Claim(compute, mode.origin)])


def loss_scaling(run: RunInputs) -> Iterator[Resolved]:
    """Yield the arguments of torch's GradScaler, which accelerate creates in mode fp16."""
    own = run.script.handlers.get("GradScalerKwargs", {}) if run.script is not None else {}
    defaults = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    for name in HANDLERS["GradScalerKwargs"]:
        if name in defaults:
            claims = [Claim(own[name].value, own[name].origin)] if name in own else []
            yield resolve(f"grad_scaler.{name}", [*claims, Claim(defaults[name], DEFAULT)])


def compilation(run: RunInputs) -> Resolved:
    """Return the backend of torch.compile, `no` without."""
    claims: list[Claim] = []
    script = run.script
    if script is not None and script.has_trainer:
        given = script.trainer_arguments(run.arguments)
        backend, switch = given.get("torch_compile_backend"), given.get("torch_compile")
        if backend is not None:
            claims.append(Claim(backend.value, backend.origin, _TRAINER.format(name="torch_compile_backend")))
        elif switch is not None and switch.value:
            value = switch.value if isinstance(switch.value, UnknownValue) else "inductor"
            claims.append(Claim(value, switch.origin, _TRAINER.format(name="torch_compile")))
    elif script is not None and script.accelerator is not None and "dynamo_backend" in script.accelerator:
        own = script.accelerator["dynamo_backend"]
        lost = "None leaves it to the launcher" if own.value is None else ""
        claims.append(Claim(own.value, own.origin, _CODE.format(name="dynamo_backend"), lost))
    found = resolve("dynamo_config.dynamo_backend", [*claims, *launch.dynamo_claims(run)])
    value = found.value if isinstance(found.value, UnknownValue) else str(found.value).lower()
    return Resolved(found.key, value, found.origin, found.shadowed)


def of_the_script(run: RunInputs) -> Iterator[Resolved]:
    """Yield what the script sets in torch itself: TF32, autocast regions, the dtype in which it loads models."""
    script = run.script
    if script is None:
        return
    tf32 = script.trainer_arguments(run.arguments).get("tf32") if script.has_trainer else None
    if tf32 is not None:
        yield Resolved("tf32", tf32.value, tf32.origin)
    for given in script.switches:
        yield Resolved(given.name, given.value, given.origin)
    for given in script.autocasts:
        yield Resolved("autocast", given.value, given.origin)
    for given in script.loads:
        yield Resolved("model.dtype", given.value, given.origin)
