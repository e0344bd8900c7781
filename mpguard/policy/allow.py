"""Deviations from a policy that are wanted: `allow` of a run.

Each is named, so that it is shown in the proof, and everything else is compared as before:

    local_sgd        the ranks step without reducing their gradients each time
    frozen: fp16     parts that are not trained compute in a dtype that is lower than the policy's
    fp32: lm_head    modules, by a name pattern, that the script itself computes in FP32
    bf16: '*wte'     parameters, by a pattern of their modules' names, that the script itself keeps in BF16
    states: bf16     states of optimizers in a dtype that is lower than the policy's
    idle_ranks: 1    ranks that only act, generate or serve, and never train
    loss_scaling     the script scales the loss of FP16 training itself, without a GradScaler
    ranks_differ: policy
                     the ranks have different policies, or different values of one field, or another `strategy`, `allow`

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mpguard.core.errors import ConfigError, PolicyError, did_you_mean
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import FIELD_NAMES

LOCAL_SGD, FROZEN, FP32, BF16, STATES, IDLE_RANKS, LOSS_SCALING, RANKS_DIFFER = (
    "local_sgd", "frozen", "fp32", "bf16", "states", "idle_ranks", "loss_scaling", "ranks_differ",
)  # fmt: skip

#: The deviations that have a name -> what follows the name; empty if nothing does.
KINDS = {
    LOCAL_SGD: "",
    FROZEN: "a dtype",
    FP32: "a pattern of module names",
    BF16: "a pattern of module names",
    STATES: "a dtype",
    IDLE_RANKS: "a rank, or ranks such as 1-3,",
    LOSS_SCALING: "",
    RANKS_DIFFER: "`policy`, one of its fields, `strategy` or `allow`",
}

#: What else than a field of the policy may differ between ranks.
_DIFFERING = ("policy", "strategy", "allow")

#: Dtypes of quantized parts that are not trained, as the proof names them; a policy has none of these.
QUANTIZED = ("int8", "uint8", "int16", "int32")

_EXAMPLES = {
    LOCAL_SGD: "local_sgd",
    FROZEN: "frozen: fp16",
    FP32: "fp32: '*lm_head'",
    BF16: "bf16: '*wte'",
    STATES: "states: bf16",
    IDLE_RANKS: "idle_ranks: 1-3",
    LOSS_SCALING: "loss_scaling",
    RANKS_DIFFER: "ranks_differ: policy",
}


@dataclasses.dataclass(frozen=True)
class Allowance:
    """One deviation that is wanted. kind: a key of `KINDS`. value: the dtype or the pattern; empty without one."""

    kind: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.value}" if self.value else self.kind


def allowances(given: object) -> tuple[Allowance, ...]:
    """Return the deviations that a config, a flag or an argument allows. Raises `ConfigError`.

    given: a text such as `frozen: fp16`, a mapping `{frozen: fp16}`, or a list of these; None for nothing.
    """
    if given is None:
        return ()
    if isinstance(given, (str, Mapping, Allowance)):
        given = [given]
    if not isinstance(given, Iterable):
        raise ConfigError(f"allow is {given!r}; a list is needed, such as [{', '.join(_EXAMPLES.values())}]")
    return tuple(dict.fromkeys(each for item in given for each in _parse(item)))


def _parse(item: Any) -> Iterable[Allowance]:
    if isinstance(item, Allowance):
        return [item]
    if isinstance(item, Mapping):
        return [_checked(str(kind), each) for kind, value in item.items() for each in _values(value)]
    if not isinstance(item, str):
        raise ConfigError(f"allow: {item!r} is not the name of a deviation; known are {', '.join(_EXAMPLES.values())}")
    kind, _, value = item.partition(":")
    return [_checked(kind.strip(), value.strip())]


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else ["" if value is None or value is True else value]


def _checked(kind: str, value: Any) -> Allowance:
    """Return a deviation. Raises `ConfigError` for an unknown name, and for a value that is missing or too much."""
    if kind not in KINDS:
        raise ConfigError(f"allow: there is no deviation `{kind}`{did_you_mean(kind, KINDS)}")
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # the name of a module in a Sequential, as YAML reads it
    if bool(value) != bool(KINDS[kind]) or not isinstance(value, str):
        needed = f"{KINDS[kind]} is needed" if KINDS[kind] else "nothing may follow the name"
        raise ConfigError(f"allow: `{kind}` has the value {value!r}; {needed}: `{_EXAMPLES[kind]}`")
    if kind == IDLE_RANKS:
        ranks_of(value)
    if kind == RANKS_DIFFER and value not in (names := (*_DIFFERING, *FIELD_NAMES)):
        raise ConfigError(
            f"allow: `{kind}` has the value {value!r}; {KINDS[kind]} is needed{did_you_mean(value, names)}"
        )
    if kind == FROZEN and value.removeprefix("torch.") in QUANTIZED:
        value = value.removeprefix("torch.")
    elif kind in (FROZEN, STATES):
        try:
            value = Dtype.parse(value).short
        except PolicyError as error:
            others = f", and none of {', '.join(QUANTIZED)}" if kind == FROZEN else ""
            raise ConfigError(f"allow: `{kind}`: {error}{others}") from None
    return Allowance(kind, value)


def ranks_of(text: str) -> range:
    """Return the ranks that a text such as `2` or `1-3` names. Raises `ConfigError`."""
    first, _, last = (part.strip() for part in text.partition("-"))
    if not first.isdigit() or (last and not last.isdigit()):
        raise ConfigError(f"allow: `{IDLE_RANKS}` has the value {text!r}; a rank or a range is needed: `1-3`")
    if int(first) == 0:
        raise ConfigError(f"allow: `{IDLE_RANKS}` names rank 0, which reports for all: let it train, and others act")
    return range(int(first), int(last or first) + 1)
