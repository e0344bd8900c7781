"""Put the parts together: from the facts of a machine to its report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mpguard.doctor import accelerators, cells, machine, packages, probes, problems
from mpguard.doctor.report import Diagnosis
from mpguard.doctor.system import System
from mpguard.runtime.patches import windows


def diagnose(system: System | None = None, *, probe: bool = True) -> Diagnosis:
    """Return the report of a machine; by default this one. probe: import libraries and compute small matmuls."""
    system = System() if system is None else system
    here = machine.inspect(system)
    installed = packages.inspect(system)
    outcomes = probes.run(cells.probes_for(here, installed), system) if probe else {}
    facts = here.facts()
    facts["torch_cuda"] = machine.dotted(installed.cuda)
    facts |= _from_torch(outcomes)
    if not here.used and (other := accelerators.found_by_torch(outcomes)) is not None:
        facts["accelerator"] = {**other.facts(), "shown": str(other)}
    return Diagnosis(
        machine=facts,
        packages=installed.shown,
        libraries={each.name: each for each in windows.inspect(installed.versions, system.packages)},
        problems=tuple(dict.fromkeys(problems.find(system, here, installed, outcomes))),
        cells=tuple(cells.cells(here, installed, outcomes)),
    )


def _from_torch(outcomes: Mapping[str, probes.ProbeOutcome]) -> dict[str, Any]:
    """Return the versions of cuDNN and NCCL that torch loaded; none if it was not asked, or failed."""
    device = outcomes.get("device")
    if device is None or not device.ok:
        return {}
    facts = json.loads(device.detail)
    return {name: facts[name] for name in ("cudnn", "nccl") if facts.get(name) is not None}
