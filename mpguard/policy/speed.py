"""How fast FP8 is against BF16, predicted from a table of measurements by the width of the layers and the tokens.

The table, `fp8_speed.json`, is made by benchmarks/fp8_table.py from measurements of blocks of Llama on one H200.
Between its rows the ratio is interpolated in the logarithms of width and tokens. Outside it the nearest row is taken:
FP8 gains with both, so that it is slower than predicted only where the prediction is slow already.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpguard.policy.policy import Policy

#: The compute capabilities of the GPU generation that was measured, Hopper: from the first to below the second.
MEASURED = ((9, 0), (10, 0))

#: The reason for BF16 on others.
NOT_MEASURED = "where FP8 is faster was measured on Hopper only"

#: FP8 is worth it from this ratio on: intervals of the measurements are up to 3 % wide.
MARGIN = 1.03

#: The tokens of a step on one GPU that are assumed where they are not known.
USUAL_TOKENS = 4096

#: From this number of GPUs on, a wish for parameters in FP8 takes torchao's float8 all-gather under FSDP2. torchtitan
#: and torchao report gains from eight H100s on.
ALL_GATHER_RANKS = 8

#: What was measured below that number: benchmarks/results/fp8.json.
ALL_GATHER_MEASURED = (
    "6 blocks of Llama 8B with 2x4096 tokens on each of two H200s: 1.40 times as fast as compiled BF16 with it, 1.43 "
    "without"
)

#: torchao's own rule for layers whose matmul gains less than the casts cost (float8_linear_utils.py, tensorwise).
NARROW_IN, NARROW_OUT = 4096, 1024


@dataclasses.dataclass(frozen=True)
class Prediction:
    """How many times as fast as BF16 the FP8 layers of a model are. width, tokens: what was looked up."""

    ratio: float
    width: int
    tokens: int

    @property
    def pays(self) -> bool:
        return self.ratio >= MARGIN

    def __str__(self) -> str:
        layers, tokens = f"layers of width {self.width}", f"at {self.tokens} tokens (fp8_table)"
        return f"{layers} are {self.ratio:.2f} times as fast in FP8 as in BF16 {tokens}"


def is_measured_on(capability: Sequence[int] | None) -> bool:
    """True for GPUs of the generation that was measured."""
    return capability is not None and MEASURED[0] <= tuple(capability) < MEASURED[1]


def leaves_out_narrow(policy: Policy, backend: str | None) -> bool:
    """True if layers that are too narrow to gain stay out of FP8: it is a wish, with torchao's tensorwise scales."""
    return (
        not policy.fp8_required
        and backend == "torchao"
        and policy.fp8_recipe == "tensorwise"
        and not policy.fp8_emulate
        and not policy.fp8_modules  # they name layers
    )


def is_narrow(features_in: int, features_out: int) -> bool:
    """True for a layer that torchao's rule leaves in the compute dtype."""
    return features_in <= NARROW_IN and features_out <= NARROW_OUT


def predict(policy: Policy, backend: str, layers: Iterable[tuple[int, int]], tokens: int | None) -> Prediction | None:
    """Return the prediction for layers on a Hopper GPU; None for what was not measured.

    layers: features in, features out. tokens: None if they are not known.
    """
    if policy.fp8 is None or policy.recipes != ("tensorwise",) or policy.fp8_emulate:
        return None
    if backend == "torchao" and policy.compile is False:
        return None
    width = _mean_width(layers)
    if not width:
        return None
    kind = "torchao without narrow layers" if leaves_out_narrow(policy, backend) else backend
    tokens = USUAL_TOKENS if tokens is None else tokens
    return Prediction(ratio(kind, width, tokens), width, tokens)


def _mean_width(layers: Iterable[tuple[int, int]]) -> int:
    """Return the mean width of layers, weighted by the sizes of the weights; 0 without layers.

    The width of a layer is the smaller of its sizes.
    """
    sizes = list(layers)
    total = sum(one * other for one, other in sizes)
    return round(sum(min(one, other) * one * other for one, other in sizes) / total) if total else 0


def at_best(backend: str, layers: Iterable[tuple[int, int]]) -> Prediction | None:
    """Return the prediction for layers with the most tokens that were measured; None without layers."""
    width = _mean_width(layers)
    if not width:
        return None
    tokens = max(int(each) for row in _table()["ratios"][backend].values() for each in row)
    return Prediction(ratio(backend, width, tokens), width, tokens)


def all_gather_pays(processes: int | None) -> bool:
    """True unless float8 all-gather was not measured to pay with so many processes; None: the number is not known."""
    return processes is None or processes >= ALL_GATHER_RANKS


def ratio(kind: str, width: int, tokens: int) -> float:
    """Return how many times as fast as BF16 a kind of FP8 is."""
    rows = {
        int(each): _interpolate(math.log(max(tokens, 1)), {math.log(int(key)): value for key, value in row.items()})
        for each, row in _table()["ratios"][kind].items()
    }
    return _interpolate(math.log(max(width, 1)), {math.log(each): value for each, value in rows.items()})


@functools.cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("fp8_speed.json").read_text(encoding="utf-8"))
    return found


def _interpolate(at: float, points: dict[float, float]) -> float:
    """Return the value at a point between others, linear; that of the nearest one outside them."""
    known = sorted(points)
    if at <= known[0] or at >= known[-1]:
        return points[known[0] if at <= known[0] else known[-1]]
    right = bisect.bisect(known, at)
    low, high = known[right - 1], known[right]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)
