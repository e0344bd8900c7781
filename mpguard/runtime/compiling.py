"""What `compile: auto` means for a run: on where it pays, off where it fails, and otherwise as the script has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpguard import hardware
from mpguard.policy import Policy

#: Engines under which a compiled model was seen to fail, and how (benchmarks/results/gpu_matrix.json).
FAILS: Mapping[tuple[str, str], str] = {}


@dataclasses.dataclass(frozen=True)
class Choice:
    """on: None where the script decides. why: in a few words."""

    on: bool | None
    why: str = ""


def choice(policy: Policy, strategy: str | None, backend: str | None = None) -> Choice:
    """What `auto` chooses for a policy under a strategy. backend: what runs its FP8; default: what this machine has."""
    recipe = policy.low_bit_recipe
    if recipe is None or policy.fp8_emulate:
        return Choice(None)
    if recipe == "delayed":
        return Choice(False, "Transformer Engine refuses delayed scaling under torch.compile")
    here = hardware.detect()
    if here.gpu is None:
        return Choice(None)
    backend = backend or next((each for each in policy.backends if each in here.libraries), None)
    if failing := FAILS.get((backend or "", strategy or "single")):
        return Choice(False, failing)
    if backend == "torchao":
        return Choice(True, "torchao's casts are slower than the FP8 products gain, unless they are compiled")
    if backend == "te" and recipe == "tensorwise":
        return Choice(True, "1.29 times as fast as compiled BF16 with Llama-3-8B's sizes")
    return Choice(None)
