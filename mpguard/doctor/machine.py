"""GPU, driver and CUDA of a machine, from `nvidia-smi` and /proc. Nothing is imported, and nothing can hang it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from mpguard.doctor.system import System
from mpguard.policy.hardware import Version

_QUERY = "name,compute_cap,driver_version,memory.total,uuid"
_CUDA = re.compile(r"CUDA (?:UMD )?Version: *(\d+)\.(\d+)")
_DRIVER = re.compile(r"(?:Kernel Module|NVRM version:.*?)\s+(\d+\.\d+(?:\.\d+)?)")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. capability: None if the driver is too old to tell. memory: in MiB."""

    name: str
    capability: Version | None
    memory: int | None
    uuid: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """GPU and driver. driver: None without. cuda: the newest CUDA version that the driver supports.

    loaded: the version of the driver's kernel module, from /proc. failure: the text of `nvidia-smi` if it failed, with
    `status` (None: it did not end in time). smi: it is on PATH. visible: CUDA_VISIBLE_DEVICES.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: Version | None = None
    loaded: str | None = None
    smi: bool = False
    status: int | None = 0
    failure: str = ""
    visible: str | None = None
    wsl: bool = False

    @property
    def used(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA shows to a program. As in CUDA, the list ends at the first entry that is none."""
        if self.visible is None or "MIG-" in self.visible:  # nvidia-smi's rows do not say which GPU a MIG is part of
            return self.gpus
        found: list[Gpu] = []
        for entry in map(str.strip, self.visible.split(",")):
            matching = [
                gpu
                for place, gpu in enumerate(self.gpus)
                if entry == str(place) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
            ]
            if len(matching) != 1:
                break
            found.append(matching[0])
        return tuple(found)

    def facts(self) -> dict[str, Any]:
        """Return the machine as plain data."""
        return {
            "gpu": self.used[0].name if self.used else None,
            "gpus": [
                {"name": gpu.name, "capability": dotted(gpu.capability), "memory_mib": gpu.memory} for gpu in self.gpus
            ],
            "visible_gpus": len(self.used),
            "driver": self.driver or self.loaded,
            "driver_cuda": dotted(self.cuda),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        }


def dotted(version: Version | None) -> str | None:
    """Return a version as text."""
    return None if version is None else ".".join(map(str, version))


def inspect(system: System) -> Machine:
    """Return the GPU and the driver of a machine."""
    loaded = _loaded(system)
    visible = system.environment.get("CUDA_VISIBLE_DEVICES")
    wsl = (system.root / "dev/dxg").exists()
    path = shutil.which("nvidia-smi", path=system.environment.get("PATH", os.defpath))
    if path is None:
        return Machine(loaded=loaded, visible=visible, wsl=wsl)
    status, text = _output([path, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], system)
    if status != 0:
        return Machine(loaded=loaded, smi=True, status=status, failure=text.strip(), visible=visible, wsl=wsl)
    gpus, drivers = [], []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5:
            gpus.append(Gpu(fields[0], _version(fields[1]), int(fields[3]) if fields[3].isdigit() else None, fields[4]))
            drivers.append(fields[2])
    if not gpus:
        none = not text.strip() or "No devices" in text
        return Machine(loaded=loaded, smi=True, status=6 if none else 0, failure=text.strip(), visible=visible, wsl=wsl)
    _, header = _output([path], system)
    match = _CUDA.search(header)
    cuda = (int(match[1]), int(match[2])) if match else None
    return Machine(tuple(gpus), drivers[0], cuda, loaded, True, visible=visible, wsl=wsl)


def _loaded(system: System) -> str | None:
    """Return the version of the loaded kernel module; None without a driver."""
    try:
        text = (system.root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = _DRIVER.search(text)
    return match[1] if match else "unknown"


def _version(text: str) -> Version | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def start(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a program in a session of its own, with its output in one pipe. Raises `OSError`."""
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env=dict(environment), text=True, errors="replace",
    )  # fmt: skip


def _output(words: Sequence[str], system: System) -> tuple[int | None, str]:
    """Run a program and return its status and output; status None if it did not end in time."""
    try:
        process = start(words, system.environment)
    except OSError as error:
        return 127, f"{words[0]}: {error.strerror or error}"
    try:
        output, _ = process.communicate(timeout=system.smi_limit)
    except subprocess.TimeoutExpired:
        kill(process)
        return None, ""
    return process.returncode, output


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a program with its children, and do not wait for one that hangs in a driver: it cannot be killed."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    with contextlib.suppress(subprocess.TimeoutExpired):  # in uninterruptible sleep in the driver
        process.wait(timeout=1)
