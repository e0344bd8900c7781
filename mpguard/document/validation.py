"""What the program that reads a config refuses in it, for lint, explain, apply and launch alike.

Nothing is imported: the keys are those of the committed tables. `mpguard launch` asks an accelerate of another version
for its own keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mpguard.core.errors import did_you_mean, near
from mpguard.document import Document, mp_yaml
from mpguard.document.schemas import accelerate, axolotl, deepspeed, llamafactory, megatron_bridge, nemo
from mpguard.document.schemas.accelerate import DISTRIBUTED_TYPES, unknown_key
from mpguard.document.values import is_filled_in, wrong_values
from mpguard.targets.settings import show

#: Keys whose value is a number from 1.
COUNTS = ("num_processes", "num_machines")


@dataclasses.dataclass(frozen=True)
class ConfigProblem:
    """A key that is refused. reason: a clause, with the remedy. unknown: the program does not have the key.

    flag: the flag of `accelerate launch` that replaces the key.
    """

    key: str
    reason: str
    unknown: bool = False
    flag: str = ""

    def message(self, document: Document) -> str:
        """Return the text of an error: the place, the key, and the reason."""
        return f"{document.where(self.key)}: {self.reason}"


def problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield the keys and values for which the program of a config stops before it trains."""
    if document.kind == "accelerate":
        yield from accelerate_problems(document)
    elif document.kind == "axolotl":
        yield from (ConfigProblem(each.key, each.reason) for each in axolotl.refusals(document))
    elif document.kind == "deepspeed":
        yield from deepspeed_problems(document)
    elif document.kind == "llamafactory":
        yield from (ConfigProblem(".".join(entry.path), why) for entry, why in llamafactory.refusals(document))
    elif document.kind == "megatron-bridge":
        yield from _megatron_bridge(document)
        yield from (ConfigProblem(".".join(entry.path), why) for entry, why in megatron_bridge.value_refusals(document))
    elif document.kind == "nemo":
        yield from (ConfigProblem(".".join(entry.path), why) for entry, why in nemo.refusals(document))


def deepspeed_problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield the keys and values at which DeepSpeed stops when it parses the config."""
    for name in sorted(deepspeed.STRICT & document.data.keys()):
        section = document.data[name]
        for key, value in section.items() if isinstance(section, dict) else ():
            if key not in deepspeed.SECTIONS[name] and value != "auto":
                known = near(str(key), deepspeed.SECTIONS[name])
                hint = did_you_mean(str(key), deepspeed.SECTIONS[name]) if known else "; remove it"
                yield ConfigProblem(f"{name}.{key}", f"DeepSpeed has no such key, and stops{hint}", unknown=True)
    for entry, reason in wrong_values(document, deepspeed.VALUES, (None, "auto")):
        yield ConfigProblem(".".join(entry.path), f"{reason}; DeepSpeed stops" if "?" not in reason else reason)


def _megatron_bridge(document: Document) -> Iterator[ConfigProblem]:
    precision = document.data.get("mixed_precision")
    if isinstance(precision, str) and not is_filled_in(precision):
        if precision.replace("-", "_") not in megatron_bridge.RECIPES:
            hint = did_you_mean(precision.replace("-", "_"), megatron_bridge.RECIPES)
            yield ConfigProblem("mixed_precision", f"Megatron Bridge has no recipe `{precision}`{hint}")
    elif isinstance(precision, dict) and precision.get("fp8") and precision.get("fp4"):
        yield ConfigProblem("mixed_precision.fp4", "Megatron Bridge stops with `fp8` as well; set one of them")


def accelerate_problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield what is wrong with an accelerate config: unknown top-level keys first, then values.

    mpguard's own keys are left to `own_problems`.
    """
    config = document.require()
    sagemaker = config.get("compute_environment") == "AMAZON_SAGEMAKER"
    for key in config:
        if (hint := unknown_key(str(key), sagemaker)) is not None:
            yield ConfigProblem(str(key), f"accelerate has no such key{hint}", unknown=True)
    if not sagemaker:
        yield from accelerate_values(document)
        yield from _booleans(document)


def accelerate_values(document: Document) -> Iterator[ConfigProblem]:
    """Yield the values that no launch can use."""
    config: dict[str, Any] = document.data
    kind = config.get("distributed_type")
    if isinstance(kind, str) and kind not in DISTRIBUTED_TYPES and not is_filled_in(kind):
        meant = did_you_mean(kind.upper(), DISTRIBUTED_TYPES) or f"; it is one of {', '.join(DISTRIBUTED_TYPES)}"
        yield ConfigProblem("distributed_type", f"accelerate has no `{kind}`{meant}")
    for key in COUNTS:
        value = config.get(key)
        valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if value is not None and not valid and not is_filled_in(value):
            yield ConfigProblem(key, f"is {show(value)}; a number from 1 is needed", flag=key)
    kinds = {**accelerate.VALUES, **accelerate.VALUES_OF_TYPE.get(str(kind), {})}
    if config.get("num_processes", 1) != 1:
        kinds |= accelerate.VALUES_OF_PROCESSES
    for entry, reason in wrong_values(document, kinds):
        yield ConfigProblem(".".join(entry.path), reason)
    for entry, reason in wrong_values(document, accelerate.MODES_OF, (None, False, True)):
        yield ConfigProblem(".".join(entry.path), reason, flag="mixed_precision")


def _booleans(document: Document) -> Iterator[ConfigProblem]:
    """Yield the modes and backends that are booleans, because YAML reads an unquoted `no` so; lint has MPG802."""
    under_deepspeed = document.data.get("distributed_type") == "DEEPSPEED"  # which gets no setting of dynamo (S27)
    for key in ("mixed_precision", *(() if under_deepspeed else accelerate.DYNAMO_KEYS)):
        entry = document.entry(key)
        if entry is None or not isinstance(entry.value, bool):
            continue
        reason = (
            f"is the boolean {show(entry.value)}, because YAML reads an unquoted `{'yes' if entry.value else 'no'}` so;"
            " accelerate stops with AttributeError. Write 'no' with quotation marks, or the name that is meant"
        )
        yield ConfigProblem(key, reason, flag="mixed_precision" if key == "mixed_precision" else "dynamo_backend")


def own_problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield what is wrong with mpguard's keys in an accelerate config: keys, values, recipe."""
    for key, reason in mp_yaml.wrong_own_keys(document):
        yield ConfigProblem(key, reason)
