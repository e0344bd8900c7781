"""What DeepSpeed's engine gets: its config as accelerate 1.15, the Trainer or the script fills it in (0.19.8)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpguard.core.errors import ConfigError
from mpguard.document import Document, read, validation
from mpguard.document.schemas.deepspeed import OBJECTS, unfilled
from mpguard.explain import launch
from mpguard.explain.inputs import RunInputs, origin_of
from mpguard.explain.model import DEFAULT, Claim, Given, Origin, Resolved, ShadowedValue, UnknownValue, resolve
from mpguard.policy.dtype import Dtype
from mpguard.targets.settings import ABSENT, lookup

#: The keys that concern precision, with DeepSpeed's defaults; those of a section that is off are not read.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"check_grad_overflow": True, "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False},
    "fp16": {
        "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
        "min_loss_scale": 1,
    },
}  # fmt: skip


def document_of(run: RunInputs) -> tuple[Document | None, Given | None]:
    """Return the DeepSpeed config of a run, and where it is named; None if none is named, or it is a dict in code.

    Raises `ConfigError` if the file cannot be read.
    """
    named = _named(run)
    if named is None or isinstance(named.value, UnknownValue) or not isinstance(named.value, str):
        return run.deepspeed, named
    folders = [Path()]
    folders += [Path(origin).parent for origin in (named.origin.file, run.config and run.config.path) if origin]
    for folder in folders:
        if (folder / named.value).is_file():
            if run.deepspeed is not None and Path(run.deepspeed.path).samefile(folder / named.value):
                return run.deepspeed, named
            document = read(Path(os.path.normpath(folder / named.value)))  # it is shown: no `configs/../ds.json`
            document.require()
            return document, named
    raise ConfigError(f"{named.origin}: names the DeepSpeed file `{named.value}`, which does not exist")


def _named(run: RunInputs) -> Given | None:
    script = run.script
    if script is not None:
        arguments = script.trainer_arguments(run.arguments)
        if "deepspeed" in arguments:
            return arguments["deepspeed"]
        if script.deepspeed_plugin is not None and "hf_ds_config" in script.deepspeed_plugin:
            return script.deepspeed_plugin["hf_ds_config"]
        if script.creates_engine:
            return script.initialize or _of_arguments(run)
    return launch.deepspeed_config_file(run)


def _of_arguments(run: RunInputs) -> Given | None:
    """Return `--deepspeed_config` of the script, which `deepspeed.initialize(args=...)` reads."""
    for place, word in enumerate(run.arguments):
        name, equals, value = str(word.value).partition("=")
        if name == "--deepspeed_config":
            following = [str(each.value) for each in run.arguments[place + 1 : place + 2]]
            return Given(value if equals else next(iter(following), None), word.origin)
    return None


def direct(run: RunInputs) -> bool:
    """True if the script passes its config to `deepspeed.initialize` itself, so that nobody fills in `auto`."""
    script = run.script
    if script is None:
        return not run.launches
    return script.creates_engine


def settings(run: RunInputs, mode: Resolved, enforced: Mapping[str, Any] | None = None) -> Iterator[Resolved]:
    """Yield the precision settings of the engine. mode: what `Accelerator` asks for.

    enforced: the values that a policy sets. They decide which section is on, whose other keys are then read.
    """
    document, named = document_of(run)
    if named is not None and document is None:
        yield Resolved("deepspeed_config", _dict_in_code(named), named.origin)
        return
    config: Mapping[str, Any] = document.data if document is not None else {}
    low = {name: _enabled(run, document, config, name, mode) for name in ("bf16", "fp16")}
    yield from low.values()
    on = {name: (enforced or {}).get(each.key, each.value) is True for name, each in low.items()}
    for section, keys in DEFAULTS.items():
        if on[section]:
            for key, default in keys.items():
                yield _key(document, config, f"{section}.{key}", _auto_cast(default, key, config, low, section))
    engine = next((name for name in low if on[name]), "fp32")
    source = low[engine].origin if engine in low else DEFAULT
    autocast = _key(document, config, "torch_autocast.enabled", Claim(False, DEFAULT))
    if autocast.origin != DEFAULT:
        yield Resolved(autocast.key, bool(autocast.value), autocast.origin)
        yield _dtype(_key(document, config, "torch_autocast.dtype", Claim(None, DEFAULT)))
    yield _dtype(_key(document, config, "communication_data_type", Claim(engine, source)))
    yield _key(document, config, "data_types.grad_accum_dtype", Claim(None, DEFAULT))


def _dict_in_code(named: Given) -> Any:
    return named.value if isinstance(named.value, UnknownValue) else UnknownValue("unknown: a dict in the script")


def _auto_cast(default: Any, key: str, config: Mapping[str, Any], low: Mapping[str, Resolved], section: str) -> Claim:
    """Return the default of a key. Where accelerate itself adds the section `fp16`, it sets `auto_cast` in it."""
    added = key == "auto_cast" and section not in config and low[section].origin != DEFAULT
    return Claim(True, low[section].origin) if added else Claim(default, DEFAULT)


def _key(document: Document | None, config: Mapping[str, Any], key: str, default: Claim) -> Resolved:
    value = lookup(config, key)
    claims = []
    if value is not ABSENT and value is not None and document is not None:
        claims.append(Claim(value, origin_of(document, key, "DeepSpeed JSON"), "DeepSpeed's own config sets it"))
    return resolve(key, [*claims, default])


def _dtype(found: Resolved) -> Resolved:
    """Return a setting with the usual spelling of a dtype."""
    dtype = Dtype.spelled(found.value) if isinstance(found.value, str) else None
    return found if dtype is None else Resolved(found.key, dtype.short, found.origin, found.shadowed)


def _enabled(
    run: RunInputs, document: Document | None, config: Mapping[str, Any], name: str, mode: Resolved
) -> Resolved:
    """Return `bf16.enabled` or `fp16.enabled`: the file's, else that of the mode; `auto` is filled in from the mode."""
    key = f"{name}.enabled"
    wanted = mode.value == name or (name == "bf16" and mode.value == "fp8")
    asked: Any = mode.value if isinstance(mode.value, UnknownValue) else wanted
    section = config.get(name)
    written = lookup(config, key)
    where = origin_of(document, key, "DeepSpeed JSON") if document is not None else DEFAULT
    if direct(run):
        if written in (ABSENT, None, "auto"):
            why = "nobody fills in `auto` here: DeepSpeed drops it, and uses its default"
            shadowed = () if written != "auto" else (ShadowedValue("auto", where, why),)
            return Resolved(key, False, DEFAULT, shadowed)
        return Resolved(key, bool(written), where)
    if written == "auto":
        trainer, filled = _trainer_value(run, name)
        asked, origin = (trainer, filled) if filled is not None else (asked, mode.origin)
        from_where = "TrainingArguments" if filled is not None else "mixed_precision"
        why = f"`auto` is filled in from {from_where}" + ("" if asked else ", which does not ask for it (S8)")
        return Resolved(key, asked, origin, (ShadowedValue("auto", where, why),))
    if isinstance(section, Mapping) and written is not ABSENT:
        shadowed = ()
        if asked != bool(written) and mode.origin != DEFAULT:
            why = "accelerate does not change what the DeepSpeed file sets" + (" (S9)" if wanted else "")
            shadowed = (ShadowedValue(mode.value, mode.origin, why),)
        return Resolved(key, bool(written), where, shadowed)
    if isinstance(section, Mapping):  # without `enabled`
        return Resolved(key, False, DEFAULT)
    return Resolved(key, asked, mode.origin)


def _trainer_value(run: RunInputs, name: str) -> tuple[Any, Origin | None]:
    """Return what the Trainer fills in for `auto`: its own argument; no origin if it does not read the file."""
    script = run.script
    if script is None or "deepspeed" not in (given := script.trainer_arguments(run.arguments)):
        return None, None
    for argument in (name, f"{name}_full_eval"):
        if argument in given and given[argument].value:
            return given[argument].value, given[argument].origin
    return False, given["deepspeed"].origin if name not in given else given[name].origin


def mode_of_engine(mode: Resolved, engine: list[Resolved]) -> Resolved:
    """Return the mode in which DeepSpeed computes, which is that of its config."""
    if mode.value == "fp8":
        return mode
    enabled = {each.key: each for each in engine}
    for name in ("fp16", "bf16"):
        each = enabled.get(f"{name}.enabled")
        if each is not None and each.value is True:
            return _computed(mode, name, each)
    off = next((each for name in ("bf16", "fp16") if (each := enabled.get(f"{name}.enabled")) is not None), None)
    if off is None or isinstance(off.value, UnknownValue):
        return mode
    same = next((each for each in (enabled.get(f"{mode.value}.enabled"), off) if each is not None), off)
    return _computed(mode, "no", same)


def _computed(mode: Resolved, value: str, source: Resolved) -> Resolved:
    if mode.value == value:
        return mode
    shadowed = mode.shadowed
    if mode.origin not in (DEFAULT, source.origin):
        why = "DeepSpeed computes in the precision of its config"
        shadowed = (ShadowedValue(mode.value, mode.origin, why), *shadowed)
    return Resolved(mode.key, value, source.origin, shadowed)


def stops(run: RunInputs, mode: Resolved, engine: list[Resolved], guarded: bool = False) -> Iterator[str]:
    """Yield the reasons why accelerate, the Trainer or DeepSpeed stops the run.

    guarded: a policy replaces the engine's config and the arguments of the Trainer; accelerate reads the file before.
    """
    document, _ = document_of(run)
    if guarded:
        yield from _set_by_the_trainer(run, mode)
    values = {each.key: each for each in engine}
    both = [values[f"{name}.enabled"] for name in ("bf16", "fp16") if _true(values.get(f"{name}.enabled"))]
    if document is None:
        return
    if len(both) == 2 and not guarded:
        yield f"{both[1].origin}: bf16 and fp16 are both enabled; DeepSpeed stops with AssertionError. Disable one"
    elif not direct(run) and isinstance(mode.value, str) and mode.value in ("bf16", "fp16", "fp8"):
        other = "bf16" if mode.value == "fp16" else "fp16"
        each = values.get(f"{other}.enabled")
        if _true(each) and each is not None and each.origin.layer == "DeepSpeed JSON":
            yield (
                f"{each.origin}: enables {other}, and mixed_precision is {mode.value} ({mode.origin}); accelerate "
                "stops with ValueError. Set it in one place"
            )
    if direct(run) and run.script is not None:
        yield from (
            f'{document.where(key)} is "auto", and the script passes the config to deepspeed.initialize itself: nobody '
            "fills it in, and DeepSpeed stops. Write a value"
            for key in unfilled(document.data, run.script.engine_creates)
        )
    if not direct(run) and "zero_optimization" not in document.data:
        yield f"{document.path}: has no section `zero_optimization`; accelerate stops with ValueError. Add it"
    if not guarded:
        yield from _mismatches(run, document)
    yield from wrong_keys(run, document, guarded)


def wrong_keys(run: RunInputs, document: Document, guarded: bool) -> Iterator[str]:
    """Yield the messages of the keys and values at which DeepSpeed stops when it reads its config.

    guarded: a policy replaces some of them. A class is not read where the script passes an object of its own.
    """
    passed = OBJECTS.keys() - run.script.engine_creates if direct(run) and run.script is not None else ()
    for problem in validation.problems(document):
        if not (guarded and problem.flag == "mixed_precision") and problem.key.partition(".")[0] not in passed:
            yield problem.message(document)


def _set_by_the_trainer(run: RunInputs, mode: Resolved) -> Iterator[str]:
    """Yield the argument with which `TrainingArguments` enables another dtype in the plugin, before the policy can."""
    given = run.script.trainer_arguments(run.arguments) if run.script is not None else {}
    other = {"bf16": "fp16", "fp16": "bf16"}.get(str(mode.value))
    if launch.engine(run) == "DEEPSPEED" and "deepspeed" not in given and other in given and given[other].value is True:
        yield (
            f"{given[other].origin}: `TrainingArguments({other}=True)` enables {other} in DeepSpeed's config, and the "
            f"policy computes in {mode.value}; accelerate stops with ValueError. Remove the argument"
        )


def _true(each: Resolved | None) -> bool:
    return each is not None and each.value is True


def _mismatches(run: RunInputs, document: Document) -> Iterator[str]:
    """Yield the keys in which the Trainer compares its arguments with the DeepSpeed file that it is given."""
    script = run.script
    if script is None or "deepspeed" not in (given := script.trainer_arguments(run.arguments)):
        return
    for name in ("fp16", "bf16"):
        written = lookup(document.data, f"{name}.enabled")
        own = [given[each].value for each in (name, f"{name}_full_eval") if each in given]
        if written in (ABSENT, None, "auto") or any(isinstance(each, UnknownValue) for each in own):
            continue
        if written != (True in own):
            yield (
                f"{document.where(f'{name}.enabled')} is {str(written).lower()}, `TrainingArguments({name}=...)` is "
                f'{str(True in own).lower()}; the Trainer stops with ValueError. Write "auto" in the file'
            )
