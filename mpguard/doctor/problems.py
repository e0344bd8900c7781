"""Causes of failures, each with the command or the setting that removes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from mpguard.doctor import packages as package_facts
from mpguard.doctor.accelerators import amd_driver
from mpguard.doctor.machine import Machine, dotted
from mpguard.doctor.packages import Packages
from mpguard.doctor.probes import ProbeOutcome
from mpguard.doctor.report import MachineProblem
from mpguard.doctor.system import System
from mpguard.runtime.launch.build_locks import abandoned_locks, extensions_folder

_REBUILD = "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps {}"
#: Module -> the requirement that reinstalls it.
_REINSTALL = {
    "torch": "pip install --force-reinstall torch",
    "torchao": "pip install --force-reinstall --no-deps torchao",
    "accelerate": "pip install --force-reinstall --no-deps accelerate",
    "deepspeed": "pip install --force-reinstall --no-deps deepspeed",
    "transformers": "pip install --force-reinstall --no-deps transformers",
    "transformer_engine.pytorch": _REBUILD.format("transformer-engine-torch"),
    "flash_attn": _REBUILD.format("flash-attn"),
}


def find(
    system: System, machine: Machine, packages: Packages, outcomes: Mapping[str, ProbeOutcome]
) -> Iterator[MachineProblem]:
    """Yield the causes of failures on a machine; the deepest first: driver, torch, libraries."""
    yield from _driver(machine)
    yield from _visible(machine)
    yield from _torch(machine, packages, amd_driver(system))
    yield from package_facts.known_bad(packages, machine)
    yield from package_facts.broken_pins(packages)
    yield from _transformer_engine(packages)
    yield from _imports(packages, outcomes)
    yield from _gpu(machine, packages, outcomes)
    yield from _environment(system)


# -- the driver ---------------------------------------------------------------------------------------


def _driver(machine: Machine) -> Iterator[MachineProblem]:
    if machine.smi and machine.status is None:
        yield MachineProblem(
            "nvidia-smi does not answer: the driver, or a GPU, hangs",
            "sudo dmesg | grep -i -e nvrm -e xid   # names the GPU; then end what uses it, and reboot",
        )
    elif machine.failure or (machine.smi and not machine.gpus):
        yield _failed(machine)
    elif not machine.smi and machine.loaded is not None:
        yield MachineProblem(
            f"the driver {machine.loaded} is loaded, but nvidia-smi is not on PATH: a container without NVIDIA's tools",
            "start the container with: docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...",
        )
    elif not machine.smi and machine.wsl:
        yield MachineProblem(
            "this is WSL with a GPU, but nvidia-smi is not on PATH",
            "export PATH=$PATH:/usr/lib/wsl/lib",
        )
    if machine.driver and machine.loaded and machine.loaded not in ("unknown", machine.driver):
        yield _mismatch(machine)


def _mismatch(machine: Machine) -> MachineProblem:
    return MachineProblem(
        f"the loaded kernel module ({machine.loaded or 'unknown'}) and the driver's libraries have different versions: "
        "the driver was updated while it was in use",
        "sudo reboot",
    )


def _failed(machine: Machine) -> MachineProblem:
    text = machine.failure
    if "version mismatch" in text:
        return _mismatch(machine)
    if "couldn't communicate" in text or machine.status == 9:
        return MachineProblem(
            "nvidia-smi cannot communicate with the driver: its kernel module is not loaded",
            "sudo modprobe nvidia   # if that fails: reinstall the driver for the running kernel (dkms), and reboot",
        )
    if "No devices were found" in text or machine.status == 6:
        return MachineProblem(
            "the driver is loaded, but finds no GPU",
            "in a container: docker run --gpus all ...; otherwise: lspci | grep -i nvidia; sudo dmesg | grep -i nvrm",
        )
    if "Failed to initialize NVML: Unknown Error" in text:
        return MachineProblem(
            "the container has lost its access to the GPU: the host's systemd reloaded its rules",
            "restart the container; to keep the access: docker run --device /dev/nvidiactl --device /dev/nvidia0 ...",
        )
    if "lost" in text or "Unknown Error" in text or machine.status == 15:
        return MachineProblem(
            "a GPU fell off the bus or is lost",
            "sudo reboot   # if it comes back: the power supply, the slot or the GPU is at fault (dmesg: Xid 79)",
        )
    if "Insufficient Permissions" in text or machine.status == 4:
        return MachineProblem(
            "this user may not open the GPU",
            "sudo usermod -aG video,render $USER   # then log in again",
        )
    first = next(iter(text.splitlines()), "")
    if machine.status == 0:
        return MachineProblem(
            f"nvidia-smi prints something other than a list of GPUs: {first[:200]}",
            "type -a nvidia-smi   # another program of that name, or a wrapper; the driver's own must be the first",
        )
    return MachineProblem(f"nvidia-smi failed with status {machine.status}: {first[:200]}", "sudo dmesg | grep -i nvrm")


def _visible(machine: Machine) -> Iterator[MachineProblem]:
    if not machine.gpus or machine.visible is None:
        return
    if not machine.used:
        empty = machine.visible.strip() in ("", "-1")
        what = "hides every GPU" if empty else f"names no GPU of this machine, which has {len(machine.gpus)}"
        yield MachineProblem(f"CUDA_VISIBLE_DEVICES={machine.visible!r} {what}", "unset CUDA_VISIBLE_DEVICES")


# -- torch --------------------------------------------------------------------------------------------


def _torch(machine: Machine, packages: Packages, amd: bool) -> Iterator[MachineProblem]:
    version = packages.versions.get("torch")
    index = package_facts.wheel(machine)
    if version is not None and amd and not machine.gpus and packages.rocm is None:
        yield MachineProblem(
            f"this machine has an AMD GPU, and torch {version} is built without ROCm: everything runs on the CPU",
            "install torch for ROCm: https://pytorch.org/get-started/locally prints the command",
        )
    if version is None:
        extra = (
            "" if not machine.gpus or index is None else f" --extra-index-url https://download.pytorch.org/whl/{index}"
        )
        yield MachineProblem(
            "torch is not installed: nothing can be trained here", f"pip install 'mpguard[accelerate]'{extra}"
        )
        return
    if not machine.gpus:
        return
    install = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    if index is None:
        yield MachineProblem(
            f"the driver {machine.driver} supports CUDA {dotted(machine.cuda)}, which is too old for torch",
            "update the NVIDIA driver to 580 or newer",
        )
    elif packages.rocm is not None:
        yield MachineProblem(
            f"torch {version} is built for AMD GPUs (ROCm {packages.rocm}), this machine has NVIDIA's", install
        )
    elif packages.cuda is None:
        yield MachineProblem(
            f"torch {version} is built without CUDA, and this machine has {machine.gpus[0].name}", install
        )
    elif machine.cuda is not None and packages.cuda[0] > machine.cuda[0]:
        needed = {13: "580", 12: "525"}.get(packages.cuda[0], "a newer version")
        yield MachineProblem(
            f"torch {version} needs a driver for CUDA {packages.cuda[0]}, the driver {machine.driver} supports CUDA "
            f"{dotted(machine.cuda)}",
            f"{install}   # or update the NVIDIA driver to {needed} or newer",
        )


def _transformer_engine(packages: Packages) -> Iterator[MachineProblem]:
    versions = packages.versions
    if "transformer-engine" in versions and "transformer-engine-torch" not in versions and "torch" in versions:
        cores = [name for name in versions if name.startswith("transformer-engine-cu")]
        if cores:  # a build from source has everything in one package
            yield MachineProblem(
                "Transformer Engine is installed without its part for torch",
                "pip install --no-build-isolation 'transformer-engine[pytorch]'",
            )
    cores = sorted(name for name in versions if name.startswith("transformer-engine-cu"))
    if len(cores) > 1:
        wrong = next((each for each in cores if packages.cuda and not each.endswith(str(packages.cuda[0]))), cores[0])
        yield MachineProblem(f"{' and '.join(cores)} are both installed", f"pip uninstall -y {wrong}")


def _imports(packages: Packages, outcomes: Mapping[str, ProbeOutcome]) -> Iterator[MachineProblem]:
    """Yield the libraries that do not import, but not those that only fail because torch does."""
    torch = outcomes.get("import:torch")
    for name, outcome in outcomes.items():
        module = name.removeprefix("import:")
        if outcome.ok or module == name or (module != "torch" and torch is not None and not torch.ok):
            continue
        yield MachineProblem(f"{module} cannot be imported: {outcome.detail}", _import_fix(module, outcome, packages))


def _import_fix(module: str, outcome: ProbeOutcome, packages: Packages) -> str:
    text = outcome.detail
    if "CUDA_HOME" in text:
        return "export CUDA_HOME=/usr/local/cuda   # where the CUDA toolkit is; or: pip install nvidia-cuda-nvcc"
    if "cublasLt" in text and "undefined symbol" in text:
        cublas = next((name for name in packages.versions if name.startswith("nvidia-cublas")), "nvidia-cublas")
        return f"pip install --upgrade {cublas}"
    missing = text.partition("No module named ")[2].strip().strip("'\"").split(".")[0]
    if missing:
        return f"pip install {missing.replace('_', '-')}"
    return _REINSTALL.get(module, f"pip install --force-reinstall {module}")


# -- GPU and environment --------------------------------------------------------------------------------


def _gpu(machine: Machine, packages: Packages, outcomes: Mapping[str, ProbeOutcome]) -> Iterator[MachineProblem]:
    capabilities = {gpu.capability for gpu in machine.used}
    if len(capabilities) > 1:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.used))
        oldest = min((gpu for gpu in machine.used if gpu.capability), key=lambda gpu: gpu.capability or ())
        newest = max((gpu for gpu in machine.used if gpu.capability), key=lambda gpu: gpu.capability or ())
        places = ",".join(str(i) for i, gpu in enumerate(machine.gpus) if gpu.capability == newest.capability)
        yield MachineProblem(
            f"the GPUs are of different generations ({names}): every rank computes what {oldest.name} can",
            f"export CUDA_VISIBLE_DEVICES={places}",
        )
    device = outcomes.get("device")
    if device is None or not machine.used or packages.cuda is None:
        return
    gpu = machine.used[0].name
    if not device.ok:
        yield MachineProblem(f"torch cannot compute on {gpu}: {device.detail}", _SHOW_ERROR)
    elif "device" not in json.loads(device.detail):
        yield MachineProblem(f"nvidia-smi shows {gpu}, but torch finds no GPU", _SHOW_ERROR)


#: A command that prints why CUDA does not start.
_SHOW_ERROR = "python -c 'import torch; torch.cuda.init()'   # prints the driver's own error"


def _environment(system: System) -> Iterator[MachineProblem]:
    for name, value, why in _HARMFUL:
        if system.environment.get(name) == value:
            yield MachineProblem(f"{name}={value}: {why}", f"unset {name}")
    for lock in abandoned_locks(extensions_folder(system.environment)):
        yield MachineProblem(
            "a build of a torch extension was killed and left its lock: runs wait for it indefinitely", f"rm {lock}"
        )


#: Variables that silently change the precision, or its speed, of every run: name, value, effect.
_HARMFUL = (
    ("NVIDIA_TF32_OVERRIDE", "0", "TF32 is off in every library, whatever a program or a policy sets"),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "TF32 is on in torch, whatever a program or a policy sets"),
    ("CUDA_LAUNCH_BLOCKING", "1", "each kernel is waited for, which makes training slow"),
)
