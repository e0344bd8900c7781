"""Low-rank adapters on a frozen model (LoRA), whose base may be quantized (QLoRA): what trains, and what is stored.

As peft 0.17 has them: two matrices for each target, in the dtype of the trained parameters; the base is in the compute
dtype. `prepare_model_for_kbit_training` makes what is not quantized FP32: embeddings, norms, the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpguard.core.errors import ConfigError, did_you_mean
from mpguard.estimate.weights import Weight

#: What the name of a matrix of an adapter contains.
MARK = ".lora_"
#: Target of all Linear layers but the head: peft's name.
ALL = "all-linear"

#: Bits of an element, and bytes of a scale for so many elements (0: for each row): bitsandbytes' NF4 (blocks of 64, one
#: FP32 number each) and INT8, torchao's FP8 by rows.
QUANTIZED = {"nf4": (4, 4, 64), "int8": (8, 4, 0), "fp8": (8, 4, 0)}
#: The formats of bitsandbytes, whose models `prepare_model_for_kbit_training` prepares.
PREPARED = ("nf4", "int8")


@dataclasses.dataclass(frozen=True)
class Adapters:
    """LoRA of a rank on the Linear layers whose names end in one of `targets`; `quantize`: the format of the base."""

    rank: int
    targets: tuple[str, ...] = (ALL,)
    quantize: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"--lora {self.rank}: the rank of LoRA is 1 or more")
        if self.quantize is not None and self.quantize not in QUANTIZED:
            near = did_you_mean(self.quantize, QUANTIZED)
            raise ConfigError(f"--quantize {self.quantize}: not a known format{near}; known are {', '.join(QUANTIZED)}")

    def on(self, name: str, in_block: bool) -> bool:
        """True if a Linear layer gets an adapter."""
        return any(
            in_block if target == ALL else name == target or name.endswith(f".{target}") for target in self.targets
        )

    def is_quantized(self, weight: Weight) -> bool:
        """True for a weight of the base that is stored in the quantized format: Linear layers of blocks."""
        return self.quantize is not None and weight.kind == "linear" and weight.block is not None

    def width(self, weight: Weight, compute: int) -> int:
        """Return the bytes of an element of a weight of the base, as the forward pass sees it."""
        return 4 if self.quantize in PREPARED and not self.is_quantized(weight) else compute

    def stored(self, weight: Weight, compute: int) -> int:
        """Return the bytes of a weight of the base."""
        if self.quantize is None or not self.is_quantized(weight):
            return weight.count * self.width(weight, compute)
        bits, scale, block = QUANTIZED[self.quantize]
        return weight.count * bits // 8 + scale * (weight.count // block if block else weight.shape[0])

    def check(self, weights: Iterable[Weight]) -> None:
        """Raise `ConfigError` for a target that no Linear layer has."""
        names = [each.name.removesuffix(".weight") for each in weights if each.kind == "linear"]
        known = sorted({name.rpartition(".")[2] for name in names if MARK not in name})
        for target in self.targets:
            if target != ALL and not any(name == target or name.endswith(f".{target}") for name in names):
                raise ConfigError(f"--targets {target}: no Linear layer has this name{did_you_mean(target, known)}")
