"""What `compile: auto` means for a run: on where it pays, off where it fails, and otherwise as the script has it.

Measured in benchmarks/results/compile_auto.json. Every engine trains compiled models (gpu_matrix.json).
"""

from __future__ import annotations

import dataclasses

from mpguard import hardware
from mpguard.policy import Policy


@dataclasses.dataclass(frozen=True)
class Choice:
    """on: None where the script decides. why: in a few words."""

    on: bool | None
    why: str = ""


#: Of delayed scaling, whose histories are updated between steps (S19).
NEVER = "Transformer Engine refuses delayed scaling under torch.compile"


def refused(policy: Policy) -> str | None:
    """Why a policy that says `compile: true` cannot be in force; None where it can."""
    if policy.compile is not True or policy.low_bit_recipe != "delayed":
        return None
    return f"`{policy.name}` has compile=True, and {NEVER}. Leave `compile` out, or set fp8_recipe to tensorwise"


def choice(policy: Policy) -> Choice:
    """What `auto` chooses for a policy on this machine."""
    recipe = policy.low_bit_recipe
    if recipe == "delayed":
        return Choice(False, NEVER)
    here = hardware.detect()
    if recipe is None or policy.fp8_emulate or here.gpu is None:
        return Choice(None)
    backend = next((each for each in policy.backends if each in here.libraries), None)
    if backend == "torchao":
        return Choice(True, "torchao's casts cost more than its products gain, unless they are compiled")
    return Choice(None)  # Transformer Engine: a little faster with wide layers, slower with narrow ones
