"""Diagnose a machine for mixed precision: GPU, driver, libraries, what works here, and what to do otherwise.

    report      plain data: `MachineProblem`, `RecipeCell`, `Diagnosis`
    system      where the facts come from: `System` (this machine's; tests replace it)
    machine     GPU, driver and CUDA, from `nvidia-smi` and /proc
    packages    installed packages, and the pairs of versions that are known to fail (known_bad.json)
    accelerators  devices of other makers, as torch and accelerate name them
    probe       a program that imports libraries and computes a small matmul per format, in a process of its own
    probes      runs it with a time limit: a crash or a hang is a result
    problems    causes, each with the command or the setting that removes it
    cells       recipe x backend x strategy: works here, or why not

Needs neither torch nor a GPU.
"""

from __future__ import annotations

from mpguard.doctor.diagnose import diagnose
from mpguard.doctor.report import Diagnosis, MachineProblem, RecipeCell
from mpguard.doctor.system import System

__all__ = ["Diagnosis", "MachineProblem", "RecipeCell", "System", "diagnose"]
