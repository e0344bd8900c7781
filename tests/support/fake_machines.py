"""Faked machines for the doctor: an `nvidia-smi` on PATH, metadata of packages, modules that crash or hang, /proc."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from pathlib import Path

from mpguard.doctor import System

H100 = "NVIDIA H100 80GB HBM3, 9.0, 580.95.05, 81559, GPU-1"
TORCH = {"torch": "2.13.0+cu130", "accelerate": "1.15.0"}

#: A torch that finds a GPU if its CUDA version is set. It has no products: those are cells of the report.
FAKE_TORCH = """\
from types import SimpleNamespace as _Namespace
from torch import version

__version__ = "2.13.0"
cuda = _Namespace(
    is_available=lambda: version.cuda is not None,
    get_device_name=lambda _: "a GPU",
    get_device_capability=lambda _: (9, 0),
    nccl=_Namespace(version=lambda: (2, 28, 9)),
)
backends = _Namespace(cudnn=_Namespace(version=lambda: 91300))


class zeros:
    def __init__(self, *_, **__):
        pass

    def add_(self, _):
        return self

    def item(self):
        return 1.0
"""

DRIVER_FILE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Oct 21 01:00:00 UTC 2025\n"


@dataclasses.dataclass
class Fake:
    """A machine. gpus: rows of `nvidia-smi --query-gpu`; None: it is not on PATH.

    smi: a shell script instead of an answer with `gpus`. driver_cuda: as nvidia-smi's header shows it. loaded: the
    kernel module in /proc. packages: name -> version. cuda: in torch/version.py; None for a CPU wheel. hip: its ROCm.
    requires: requirements in torch's metadata. modules: path -> code, importable by probes.
    variables: environment variables. wsl, amd: it has their devices.
    limit: seconds after which a probe is killed; low where one must be.
    """

    gpus: list[str] | None = None
    driver_cuda: str = "13.0"
    smi: str | None = None
    loaded: str | None = None
    packages: dict[str, str] = dataclasses.field(default_factory=lambda: dict(TORCH))
    cuda: str | None = "13.0"
    hip: str | None = None
    requires: list[str] = dataclasses.field(default_factory=list)
    modules: dict[str, str] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    wsl: bool = False
    amd: bool = False
    limit: float = 60.0

    def system(self, folder: Path) -> System:
        """Write the machine below a folder, and return it as the doctor sees it."""
        site, binaries, root = folder / "site", folder / "bin", folder / "root"
        for each in (site, binaries, root):
            each.mkdir(parents=True)
        self._add_smi(binaries)
        self._add_packages(site)
        if self.loaded is not None:
            path = root / "proc" / "driver" / "nvidia" / "version"
            path.parent.mkdir(parents=True)
            path.write_text(DRIVER_FILE.format(version=self.loaded), encoding="utf-8")
        for name in [name for name, given in (("dxg", self.wsl), ("kfd", self.amd)) if given]:
            (root / "dev").mkdir(exist_ok=True)
            (root / "dev" / name).touch()
        variables = {
            "PATH": f"{binaries}:/usr/bin:/bin", "PYTHONPATH": str(site), "HOME": str(folder),
            "TORCH_EXTENSIONS_DIR": str(folder), **self.variables,
        }  # fmt: skip
        # -S: no site-packages, so that probes see the fake packages only.
        return System(variables, (str(site),), root, (sys.executable, "-S"), limit=self.limit, smi_limit=self.limit)

    def _add_smi(self, binaries: Path) -> None:
        script = self.smi
        if script is None and self.gpus is not None:
            rows = "\n".join(self.gpus)
            header = f"| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: {self.driver_cuda}     |"
            script = f'case "$*" in *query-gpu*) cat <<END\n{rows}\nEND\n;; *) echo "{header}";; esac'
        if script is not None:
            path = binaries / "nvidia-smi"
            path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            path.chmod(0o755)

    def _add_packages(self, site: Path) -> None:
        for name, version in self.packages.items():
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            requires = "".join(f"Requires-Dist: {each}\n" for each in self.requires) if name == "torch" else ""
            info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        if "torch" in self.packages:
            cuda, hip = (repr(each) if each else "None" for each in (self.cuda, self.hip))
            self._write(site / "torch" / "version.py", f"cuda: str = {cuda}\nhip = {hip}\n")
            self._write(site / "torch" / "__init__.py", FAKE_TORCH)
        for name in self.packages:
            module = {"transformer-engine": "transformer_engine", "flash-attn": "flash_attn"}.get(name, name)
            if name in ("accelerate", "deepspeed", "transformers", "torchao", "flash-attn"):
                self._write(site / module / "__init__.py", "")
            if name == "transformer-engine":
                self._write(site / module / "__init__.py", "")
                self._write(site / module / "pytorch" / "__init__.py", "")
        for path, code in self.modules.items():
            self._write(site / path, textwrap.dedent(code))

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
