"""Thirty faked machines, each with one fault: the doctor must name the cause, and the command that removes it."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

from fake_machines import FAKE_TORCH, H100, TORCH, Fake

from mpguard.doctor import MachineProblem, diagnose

#: name -> the machine, words that the cause contains, words of the command; no words: the machine has no fault.
MACHINES: dict[str, tuple[Fake, tuple[str, ...], tuple[str, ...]]] = {
    "healthy H100": (Fake([H100]), (), ()),
    "healthy laptop without GPU": (Fake(cuda=None, packages={**TORCH, "torch": "2.13.0+cpu"}), (), ()),
    "no torch": (Fake(packages={}), ("torch is not installed",), ("pip install 'mpguard[accelerate]'",)),
    "no torch on a GPU machine": (
        Fake([H100], packages={}),
        ("torch is not installed",),
        ("--extra-index-url", "whl/cu130"),
    ),
    "CPU wheel on a GPU machine": (
        Fake([H100], cuda=None, packages={**TORCH, "torch": "2.13.0+cpu"}),
        ("2.13.0+cpu is built without CUDA", "H100"),
        ("--force-reinstall torch", "whl/cu130"),
    ),
    "CPU wheel, old driver": (
        Fake([H100.replace("580.95.05", "535.54")], driver_cuda="12.2", cuda=None, packages={"torch": "2.13.0+cpu"}),
        ("is built without CUDA",),
        ("whl/cu126",),
    ),
    "torch newer than the driver": (
        Fake([H100.replace("580.95.05", "550.54")], driver_cuda="12.4"),
        ("needs a driver for CUDA 13", "550.54 supports CUDA 12.4"),
        ("whl/cu126", "580"),
    ),
    "AMD GPU, CPU wheel": (
        Fake(amd=True, cuda=None, packages={**TORCH, "torch": "2.13.0+cpu"}),
        ("an AMD GPU", "built without ROCm"),
        ("pytorch.org/get-started",),
    ),
    "AMD GPU, torch for ROCm": (Fake(amd=True, cuda=None, hip="6.4"), (), ()),
    "ROCm torch": (Fake([H100], cuda=None, hip="6.4"), ("built for AMD GPUs",), ("whl/cu130",)),
    "nvidia-smi hangs": (Fake(smi="sleep 60", limit=1.5), ("does not answer",), ("dmesg", "reboot")),
    "driver not loaded": (
        Fake(smi="echo 'NVIDIA-SMI has failed because it couldn'\"'\"'t communicate with the NVIDIA driver.'; exit 9"),
        ("kernel module is not loaded",),
        ("modprobe nvidia",),
    ),
    "driver updated without a reboot": (
        Fake(smi="echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", loaded="570.10"),
        ("570.10", "different versions"),
        ("reboot",),
    ),
    "another nvidia-smi": (Fake(smi="echo 'usage: smi'"), ("than a list of GPUs: usage",), ("type -a nvidia-smi",)),
    "no devices": (Fake(smi="echo 'No devices were found'; exit 6"), ("finds no GPU",), ("--gpus all", "lspci")),
    "GPU lost": (
        Fake(smi="echo 'Unable to determine the device handle for GPU0000:01:00.0: Unknown Error'; exit 15"),
        ("lost",),
        ("reboot",),
    ),
    "container that lost the GPU": (
        Fake(smi="echo 'Failed to initialize NVML: Unknown Error'; exit 255"),
        ("container has lost its access",),
        ("restart the container",),
    ),
    "no permission": (
        Fake(smi="echo 'Failed to initialize NVML: Insufficient Permissions'; exit 4"),
        ("may not open the GPU",),
        ("usermod",),
    ),
    "container without nvidia-smi": (
        Fake(loaded="580.95.05"),
        ("not on PATH", "580.95.05"),
        ("NVIDIA_DRIVER_CAPABILITIES=compute,utility",),
    ),
    "WSL without its PATH": (Fake(wsl=True), ("WSL",), ("/usr/lib/wsl/lib",)),
    "GPUs hidden": (Fake([H100], variables={"CUDA_VISIBLE_DEVICES": ""}), ("hides every GPU",), ("unset",)),
    "wrong GPU number": (
        Fake([H100], variables={"CUDA_VISIBLE_DEVICES": "7"}),
        ("names no GPU",),
        ("unset CUDA_VISIBLE_DEVICES",),
    ),
    "mixed GPUs": (
        Fake(["NVIDIA A100, 8.0, 580.95.05, 81920, GPU-0", H100]),
        ("different generations", "A100"),
        ("CUDA_VISIBLE_DEVICES=1",),
    ),
    "Blackwell with old CUDA": (
        Fake(["NVIDIA B200, 10.0, 580.95.05, 183000, GPU-1"], cuda="12.6"),
        ("no kernels for NVIDIA B200",),
        ("whl/cu130",),
    ),
    "V100 with new CUDA": (
        Fake(["Tesla V100, 7.0, 580.95.05, 16000, GPU-1"]),
        ("no kernels for Tesla V100",),
        ("whl/cu126",),
    ),
    "torch without a usable GPU": (
        Fake([H100], modules={"torch/version.py": "cuda = '13.0'\nhip = None\n",
                              "torch/__init__.py": FAKE_TORCH.replace("version.cuda is not None", "False")}),
        ("nvidia-smi shows NVIDIA H100", "torch finds no GPU"),
        ("torch.cuda.init()",),
    ),
    "a GPU that fails": (
        Fake([H100], modules={"torch/__init__.py": FAKE_TORCH.replace(
            "return 1.0", "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')")}),
        ("torch cannot compute on NVIDIA H100", "ECC"),
        ("torch.cuda.init()",),
    ),
    "old accelerate": (
        Fake([H100], packages={**TORCH, "accelerate": "0.34.2"}),
        ("accelerate 0.34.2 is older",),
        ("'accelerate>=1.15'",),
    ),
    "old DeepSpeed": (
        Fake([H100], packages={**TORCH, "deepspeed": "0.16.4"}),
        ("deepspeed 0.16.4", "skips BF16 steps"),
        ("'deepspeed>=0.19'",),
    ),
    "TE for another CUDA": (
        Fake([H100], packages={**TORCH, "transformer-engine": "2.20", "transformer-engine-torch": "2.20",
                               "transformer-engine-cu12": "2.20"}),
        ("for CUDA 12", "built for CUDA 13.0"),
        ("uninstall -y transformer-engine-cu12", "core_cu13"),
    ),
    "TE without torch's part": (
        Fake([H100], packages={**TORCH, "transformer-engine": "2.20", "transformer-engine-cu13": "2.20"}),
        ("without its part for torch",),
        ("--no-build-isolation 'transformer-engine[pytorch]'",),
    ),
    "TE compiled for another torch": (
        Fake(
            [H100],
            packages={**TORCH, "transformer-engine": "2.20", "transformer-engine-torch": "2.20"},
            modules={"transformer_engine/pytorch/__init__.py": "raise ImportError('te.so: undefined symbol: _ZN3c10')"},
        ),
        ("transformer_engine.pytorch cannot be imported", "undefined symbol"),
        ("--no-build-isolation", "--force-reinstall", "transformer-engine-torch"),
    ),
    "flash-attn compiled for another torch": (
        Fake(
            [H100],
            packages={**TORCH, "flash-attn": "2.8.3"},
            modules={"flash_attn/__init__.py": "raise ImportError('f.so: undefined symbol: _ZN3c104cuda9SetDeviceEa')"},
        ),
        ("flash_attn cannot be imported",),
        ("--no-build-isolation", "flash-attn"),
    ),
    "DeepSpeed without CUDA_HOME": (
        Fake(
            [H100],
            packages={**TORCH, "deepspeed": "0.19.8"},
            modules={"deepspeed/__init__.py": "raise RuntimeError('CUDA_HOME does not exist, unable to compile CUDA')"},
        ),
        ("deepspeed cannot be imported", "CUDA_HOME"),
        ("export CUDA_HOME=",),
    ),
    "torch crashes": (
        Fake([H100], modules={"torch/__init__.py": "import os\nos.abort()"}),
        ("torch cannot be imported", "SIGABRT"),
        ("pip install --force-reinstall torch",),
    ),
    "torch hangs": (
        Fake(
            [H100],
            modules={"torch/__init__.py": "import time\ntime.sleep(100)"},
            packages={"torch": "2.13.0+cu130"},
            limit=3.0,
        ),
        ("torch cannot be imported", "did not end"),
        ("pip install --force-reinstall torch",),
    ),
    "NCCL of another version": (
        Fake([H100], packages={**TORCH, "nvidia-nccl-cu13": "2.21.5"}, requires=["nvidia-nccl-cu13==2.28.9"]),
        ("nvidia-nccl-cu13 2.21.5", "needs ==2.28.9"),
        ("pip install 'nvidia-nccl-cu13==2.28.9'",),
    ),
    "torchao for another torch": (
        Fake([H100], packages={**TORCH, "torchao": "0.13.0"}),
        ("torchao 0.13.0 was compiled for an older torch",),
        ("pip install --upgrade torchao",),
    ),
    "TF32 switched off outside": (
        Fake([H100], variables={"NVIDIA_TF32_OVERRIDE": "0"}),
        ("NVIDIA_TF32_OVERRIDE=0",),
        ("unset NVIDIA_TF32_OVERRIDE",),
    ),
    "a missing dependency": (
        Fake([H100], modules={"accelerate/__init__.py": "import psutil_of_nobody"}),
        ("accelerate cannot be imported", "psutil_of_nobody"),
        ("pip install psutil-of-nobody",),
    ),
}  # fmt: skip


def is_right(problems: tuple[MachineProblem, ...], cause: tuple[str, ...], command: tuple[str, ...]) -> bool:
    """True if one problem names the cause and the command; without a cause, if nothing is reported."""
    if not cause:
        return not problems
    return any(
        all(word in each.what for word in cause) and all(word in each.fix for word in command) for each in problems
    )


def test_cause_and_command_are_right_on_faked_machines(tmp_path: Path) -> None:
    # All are written before one is run: a script that is open for writing while a thread forks is "Text file busy".
    systems = [fake.system(tmp_path / str(number)) for number, (fake, _, _) in enumerate(MACHINES.values())]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(diagnose, systems))
    wrong = {
        name: [(each.what, each.fix) for each in report.problems]
        for (name, (_, cause, command)), report in zip(MACHINES.items(), reports, strict=True)
        if not is_right(report.problems, cause, command)
    }
    assert len(MACHINES) >= 30
    assert wrong == {}, "two of thirty may be wrong; none is"
