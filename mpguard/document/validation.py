"""What the program that reads a config refuses in it, for lint, explain, apply and launch alike.

Nothing is imported: keys and values are those of the committed tables. Where a newer program is installed, what the
tables lack is undecided: it is reported, and refused by that program alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from mpguard.core.errors import did_you_mean, near
from mpguard.document import Document, mp_yaml
from mpguard.document.newer import may_be_new
from mpguard.document.schemas import (
    accelerate_values,
    axolotl,
    deepspeed,
    llamafactory,
    megatron_bridge,
    nemo,
)
from mpguard.document.schemas.accelerate import unknown_key
from mpguard.document.values import ConfigProblem, is_filled_in, wrong_values


def problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield the keys and values for which the program of a config stops before it trains."""
    return (each for each in every(document) if not each.undecided)


def undecided(document: Document) -> Iterator[ConfigProblem]:
    """Yield the keys and values that mpguard does not know, and that the newer program that is installed may have."""
    return (each for each in every(document) if each.undecided)


def every(document: Document) -> Iterator[ConfigProblem]:
    """Yield the problems of a config, also those that are undecided."""
    if document.kind == "accelerate":
        found = _accelerate(document)
    elif document.kind == "deepspeed":
        found = _deepspeed(document)
    else:
        found = _trainer(document)
    yield from judged(document.kind, found)


def judged(kind: str | None, found: Iterable[ConfigProblem]) -> Iterator[ConfigProblem]:
    """Yield the problems; those that rest on a table are undecided where a newer program is installed."""
    for each in found:
        why = may_be_new("key" if each.unknown else "value", kind) if each.unknown or each.listed else None
        yield each if why is None else dataclasses.replace(each, undecided=True, reason=f"{why}{each.hint}")


def _trainer(document: Document) -> Iterator[ConfigProblem]:
    """Yield the problems of a training program's config."""
    if document.kind == "axolotl":
        yield from axolotl.refusals(document)
    elif document.kind == "llamafactory":
        yield from llamafactory.refusals(document)
    elif document.kind == "megatron-bridge":
        yield from _megatron_bridge(document)
        yield from megatron_bridge.value_refusals(document)
    elif document.kind == "nemo":
        yield from nemo.refusals(document)


def deepspeed_problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield the keys and values at which DeepSpeed stops when it parses the config, or a section of another one."""
    return (each for each in judged("deepspeed", _deepspeed(document)) if not each.undecided)


def _deepspeed(document: Document) -> Iterator[ConfigProblem]:
    for name in sorted(deepspeed.STRICT & document.data.keys()):
        section = document.data[name]
        for key, value in section.items() if isinstance(section, dict) else ():
            if key not in deepspeed.SECTIONS[name] and value != "auto":
                known = near(str(key), deepspeed.SECTIONS[name])
                hint = did_you_mean(str(key), deepspeed.SECTIONS[name]) if known else "; remove it"
                yield ConfigProblem(f"{name}.{key}", f"DeepSpeed has no such key, and stops{hint}", unknown=True)
    for each in wrong_values(document, deepspeed.VALUES, (None, "auto")):
        reason = each.reason if "?" in each.reason else f"{each.reason}; DeepSpeed stops"
        yield dataclasses.replace(each, reason=reason)
    for key, why in deepspeed.contradictions(document.data):
        yield ConfigProblem(key, why, flag="mixed_precision")
    for key, why in deepspeed.without_path(document.data):
        yield ConfigProblem(key, why)
    for key, why in deepspeed.misnamed(document.data):
        yield ConfigProblem(key, why, listed=True)


def without_effect(document: Document) -> Iterator[ConfigProblem]:
    """Yield what a config of DeepSpeed, or accelerate's section for it, offloads at a ZeRO stage that ignores it."""
    if document.kind != "accelerate":
        yield from (ConfigProblem(key, reason) for key, reason in deepspeed.without_effect(document.data))
        return
    section = document.data.get("deepspeed_config")
    if not isinstance(section, dict) or document.data.get("distributed_type") != "DEEPSPEED":
        return
    if "deepspeed_config_file" in section:  # which has these settings
        return
    names = {f"zero_optimization.{each}.device": f"{each}_device" for each in ("offload_optimizer", "offload_param")}
    devices = {key.split(".")[1]: {"device": str(section.get(name)).lower()} for key, name in names.items()}
    stage = section.get("zero_stage", 2)  # accelerate's default
    for key, reason in deepspeed.without_effect({"zero_optimization": {"stage": stage, **devices}}):
        yield ConfigProblem(f"deepspeed_config.{names[key]}", reason)


def _megatron_bridge(document: Document) -> Iterator[ConfigProblem]:
    precision = document.data.get("mixed_precision")
    if isinstance(precision, str) and not is_filled_in(precision):
        if precision.replace("-", "_") not in megatron_bridge.RECIPES:
            hint = did_you_mean(precision.replace("-", "_"), megatron_bridge.RECIPES)
            yield ConfigProblem("mixed_precision", f"Megatron Bridge has no recipe `{precision}`{hint}", listed=True)
    elif isinstance(precision, dict) and precision.get("fp8") and precision.get("fp4"):
        yield ConfigProblem("mixed_precision.fp4", "Megatron Bridge stops with `fp8` as well; set one of them")


def _accelerate(document: Document) -> Iterator[ConfigProblem]:
    """Yield what is wrong with an accelerate config: unknown top-level keys first, then values.

    mpguard's own keys are left to `own_problems`.
    """
    config = document.require()
    sagemaker = config.get("compute_environment") == "AMAZON_SAGEMAKER"
    for key in config:
        if (hint := unknown_key(str(key), sagemaker)) is not None:
            yield ConfigProblem(str(key), f"accelerate has no such key{hint}", unknown=True)
    if not sagemaker:
        yield from accelerate_values.problems(document)
        yield from accelerate_values.booleans(document)


def accelerate_problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield the problems of a config that a launch reads as accelerate's, also those that are undecided."""
    return judged("accelerate", _accelerate(document))


def accelerate_wrong_values(document: Document) -> Iterator[ConfigProblem]:
    """Yield those of an accelerate config that are values, without the booleans of an unquoted `no`."""
    return judged("accelerate", accelerate_values.problems(document))


def own_problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield what is wrong with mpguard's keys in an accelerate config: keys, values, recipe."""
    for key, reason in mp_yaml.wrong_own_keys(document):
        yield ConfigProblem(key, reason)
