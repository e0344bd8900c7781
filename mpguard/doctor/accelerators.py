"""Accelerators that are not NVIDIA's: what torch finds, and what accelerate calls several of them.

mpguard is tested on NVIDIA GPUs and on CPUs. Of other devices the doctor shows what torch computes and what accelerate
can distribute.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from mpguard.doctor.probes import ProbeOutcome
from mpguard.doctor.system import System
from mpguard.policy.hardware import OTHER_ACCELERATORS


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device that is not NVIDIA's. type: torch's. distributed_type: accelerate's; None if it uses one at most."""

    name: str
    type: str
    distributed_type: str | None
    count: int = 1

    def __str__(self) -> str:
        how = f"accelerate's {self.distributed_type}" if self.distributed_type else "accelerate uses one"
        return f"{f'{self.count} x ' if self.count > 1 else ''}{self.name} (torch's `{self.type}`, {how})"

    def refuses(self, strategy: str) -> str:
        """Return why accelerate has no such strategy for it; empty if it has."""
        return f"accelerate uses one {self.name} at most" if not self.distributed_type and strategy != "single" else ""

    def facts(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self)


def found_by_torch(outcomes: Mapping[str, ProbeOutcome]) -> Accelerator | None:
    """Return the accelerator that torch has found and that is not NVIDIA's; None without one."""
    outcome = outcomes.get("device")
    if outcome is None or not outcome.ok:
        return None
    facts = json.loads(outcome.detail)
    kind = facts.get("accelerator")
    if kind is None or (kind == "cuda" and not facts.get("hip")):
        return None
    usual, distributed = OTHER_ACCELERATORS.get(kind, (f"device of type {kind}", None))
    return Accelerator(facts.get("device") or usual, kind, distributed, facts.get("count") or 1)


def amd_driver(system: System) -> bool:
    """True if the kernel has AMD's driver for computing, which no graphics card for a display alone needs."""
    return (system.root / "dev/kfd").exists()
