"""What a GPU generation, CUDA and the installed libraries can compute.

The GPU is queried through NVML and the libraries through their metadata; torch is not imported. What could not be
determined is None and never guessed, and a check that depends on it reports that it is unknown.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpguard.core.errors import PolicyError, did_you_mean
from mpguard.policy import speed
from mpguard.policy.policy import FLOAT8_LINEAR, Backend, Policy

Version = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Generation:
    """A GPU generation: its name, and its compute capabilities, from `low` to below `high`."""

    name: str
    low: Version
    high: Version


GENERATIONS = (
    Generation("Pascal", (6, 0), (7, 0)),
    Generation("Volta", (7, 0), (7, 5)),
    Generation("Turing", (7, 5), (8, 0)),
    Generation("Ampere", (8, 0), (8, 9)),
    Generation("Ada", (8, 9), (9, 0)),
    Generation("Hopper", (9, 0), (10, 0)),
    Generation("Blackwell", (10, 0), (12, 0)),
    Generation("consumer Blackwell", (12, 0), (13, 0)),
)


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a kind of arithmetic requires.

    what: its name in messages. low, high: compute capabilities from `low` to below `high`; None: no upper limit.
    cuda: the lowest CUDA version that torch must be built with. source: where the requirement is documented.
    multiple: the sizes of a matmul must be multiples of it (its rows too, if the layer is trained).
    """

    what: str
    low: Version
    high: Version | None = None
    cuda: Version | None = None
    source: str = ""
    multiple: int = 1


#: The only table of requirements. Sources: Transformer Engine 2.20 `pytorch/quantization.py`, `is_*_available`;
#: torchao 0.18 (torch._scaled_mm); CUDA C++ Programming Guide, table of arithmetic by capability.
NEEDS: Mapping[str, Needs] = {
    "fp16": Needs("FP16 tensor cores", (7, 0), source="CUDA programming guide"),
    "bf16": Needs("BF16 tensor cores", (8, 0), source="CUDA programming guide"),
    "tf32": Needs("TF32 tensor cores", (8, 0), source="CUDA programming guide"),
    "delayed": Needs("FP8", (8, 9), cuda=(12, 1), source="TE is_fp8_available", multiple=16),
    "tensorwise": Needs("FP8", (8, 9), cuda=(12, 1), source="TE is_fp8_available, torch._scaled_mm", multiple=16),
    "rowwise": Needs("FP8 with a scale per row", (8, 9), cuda=(12, 1), source="torch._scaled_mm", multiple=16),
    "rowwise_with_gw_hp": Needs(
        "FP8 with a scale per row", (8, 9), cuda=(12, 1), source="torch._scaled_mm", multiple=16
    ),
    "blockwise": Needs(
        "FP8 block scaling", (9, 0), cuda=(12, 9), source="TE is_fp8_block_scaling_available", multiple=16
    ),
    "torchao_blockwise": Needs(
        "torchao's FP8 block scaling",
        (9, 0),
        (10, 0),
        cuda=(12, 9),
        source="torchao.prototype.blockwise_fp8_training, torch.nn.functional.scaled_mm",
        multiple=128,
    ),
    "grouped": Needs(
        "FP8 matmuls of experts",
        (9, 0),
        (10, 0),
        cuda=(12, 1),
        source="torch._scaled_grouped_mm, rowwise",
        multiple=16,
    ),
    "mxfp8": Needs("MXFP8", (10, 0), (12, 0), source="TE is_mxfp8_available", multiple=32),
    "tensorwise_with_bwd_hp": Needs("FP8", (8, 9), cuda=(12, 1), source="TE is_fp8_available", multiple=16),
    "blockwise_with_bwd_hp": Needs(
        "FP8 block scaling", (9, 0), cuda=(12, 9), source="TE is_fp8_block_scaling_available", multiple=16
    ),
    "mxfp8_with_bwd_hp": Needs("MXFP8", (10, 0), (12, 0), source="TE is_mxfp8_available", multiple=32),
    "nvfp4": Needs("NVFP4", (10, 0), (12, 0), source="TE is_nvfp4_available", multiple=16),
}

#: The usual name of a GPU (`--gpu h100`) -> its compute capability (developer.nvidia.com/cuda-gpus).
GPUS: Mapping[str, Version] = {
    "p100": (6, 0), "v100": (7, 0), "t4": (7, 5), "rtx2080": (7, 5), "a100": (8, 0), "a10": (8, 6), "a40": (8, 6),
    "a6000": (8, 6), "rtx3090": (8, 6), "l4": (8, 9), "l40": (8, 9), "l40s": (8, 9), "rtx4090": (8, 9), "h100": (9, 0),
    "h200": (9, 0), "h800": (9, 0), "h20": (9, 0), "gh200": (9, 0), "b100": (10, 0), "b200": (10, 0), "gb200": (10, 0),
    "b300": (10, 3), "gb300": (10, 3), "rtx5090": (12, 0),
}  # fmt: skip

_LIBRARIES = {
    "te": "transformer_engine",
    "torchao": "torchao",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "torch": "torch",
    "triton": "triton",
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The hardware and libraries of one machine.

    gpu: the GPU's name; None without a GPU. capability: None without a GPU, or if it could not be queried. gpus: how
    many there are. cuda: the CUDA version that torch was built with. libraries: backend, or other library -> version.
    other: an accelerator that is not NVIDIA's, for messages.
    """

    gpu: str | None = None
    capability: Version | None = None
    gpus: int = 0
    cuda: Version | None = None
    libraries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other: str = ""

    @property
    def generation(self) -> str:
        """The name of the GPU generation, for messages."""
        if self.capability is None:
            return "no GPU" if self.gpu is None else "unknown GPU"
        for generation in GENERATIONS:
            if generation.low <= self.capability < generation.high:
                return generation.name
        return f"compute capability {_dotted(self.capability)}"

    def __str__(self) -> str:
        if self.gpu is None:
            return "no GPU"
        return f"{self.gpus} x {self.gpu}" if self.gpus > 1 else self.gpu

    def lacks(self, kind: str) -> str | None:
        """Return why this machine does not meet a row of `NEEDS`; None if it does."""
        needs = NEEDS[kind]
        none = f"this machine has {self.other}, and no GPU of NVIDIA" if self.other else "this machine has no GPU"
        here = none if self.gpu is None else f"{self.gpu} has {_dotted(self.capability)}"
        if self.capability is None:
            unknown = here if self.gpu is None else f"the one of {self.gpu} could not be queried"
            return f"needs compute capability {_dotted(needs.low)} ({unknown})"
        if self.capability < needs.low:
            return f"needs compute capability {_dotted(needs.low)} or higher for {needs.what} ({here})"
        if needs.high is not None and self.capability >= needs.high:
            return f"{needs.what} is not available from compute capability {_dotted(needs.high)} on ({here})"
        if needs.cuda is not None:
            if self.cuda is None:
                return f"needs CUDA {_dotted(needs.cuda)} for {needs.what} (the CUDA version of torch is unknown here)"
            if self.cuda < needs.cuda:
                return (
                    f"needs CUDA {_dotted(needs.cuda)} for {needs.what} (torch here is built with {_dotted(self.cuda)})"
                )
        return None

    @property
    def cpu(self) -> Hardware:
        """This machine without its GPUs: what a run on its CPU has."""
        return dataclasses.replace(self, gpu=None, capability=None, gpus=0)

    def refuses(self, policy: Policy) -> str | None:
        """Return why a policy cannot run on this machine; None if it can.

        Without a GPU, BF16, FP32 and FP16 (with a GradScaler) run in software; TF32 and FP8 do not exist there. A wish
        for FP8 (`fp8_required: false`) refuses nothing: the run goes without it.
        """
        if policy.low_bit_recipe is not None and policy.fp8_required:
            return self.refuses_low_bits(policy)
        missing = self.lacks("bf16") if policy.bf16 and self.gpu is not None else None
        return missing or (self.lacks("tf32") if policy.tf32 else None)

    def refuses_low_bits(self, policy: Policy) -> str | None:
        """Return why a policy's FP8 or FP4 cannot run on this machine; None if it can, or the policy has none."""
        if policy.low_bit_recipe is None:
            return None
        if not policy.fp8_emulate and (reason := next(filter(None, map(self.lacks, policy.recipes)), None)):
            return reason
        if not any(backend in self.libraries for backend in policy.backends):
            return f"needs {' or '.join(LIBRARY_NAMES[b] for b in policy.backends)}, which is not installed here"
        if backend_of(policy, self) == "torchao":
            return next(filter(None, (self._torchao_lacks(policy, recipe) for recipe in policy.recipes)), None)
        return None

    def _torchao_lacks(self, policy: Policy, recipe: str) -> str | None:
        """Return why torchao's prototypes cannot run a recipe here, which other libraries can; None if they can."""
        if recipe not in ("mxfp8", "blockwise"):
            return None
        form = policy.with_recipe(recipe).fp8
        if policy.fp16 or form != "e4m3":
            what = NEEDS[recipe].what
            return (
                f"torchao has {what} in E4M3 and with BF16 compute only (this policy: fp8={form}, "
                f"{policy.compute_dtype})"
            )
        if recipe == "blockwise":
            triton = None if "triton" in self.libraries else "torchao's FP8 block scaling needs Triton"
            return self.lacks("torchao_blockwise") or triton
        return None


def needs_of(recipe: str, backend: str | None) -> Needs:
    """Return what a recipe requires with a library."""
    return NEEDS["torchao_blockwise" if (recipe, backend) == ("blockwise", "torchao") else recipe]


#: Backend -> the name of the library in messages.
LIBRARY_NAMES = {"te": "Transformer Engine", "torchao": "torchao"}


def named(name: str) -> Hardware:
    """Return the hardware for `--gpu NAME`: a name (`h100`) or a capability (`sm_90`, `9.0`).

    CUDA and the libraries are assumed to be installed. Raises `PolicyError` for an unknown name.
    """
    text = re.sub(r"^nvidia|[\s_-]", "", name.lower())
    match = re.fullmatch(r"(?:sm)?(\d{1,2})\.?(\d)a?", text)
    capability = (int(match[1]), int(match[2])) if match else GPUS.get(text)
    if capability is None or capability < GENERATIONS[0].low:
        raise PolicyError(f"there is no GPU `{name}`{did_you_mean(name, GPUS)} (or a capability such as sm_90)")
    return Hardware(name, capability, 1, (99,), dict.fromkeys((*LIBRARY_NAMES, "triton"), "any"))


#: Accelerators that are not NVIDIA's: torch's type of a device -> its usual name, and `distributed_type` of several
#: (accelerate 1.15 `DistributedType`).
OTHER_ACCELERATORS: Mapping[str, tuple[str, str | None]] = {
    "cuda": ("AMD GPU", "MULTI_GPU"),  # ROCm has torch's names of CUDA
    "mps": ("Apple GPU", None),
    "xpu": ("Intel GPU", "MULTI_XPU"),
    "hpu": ("Intel Gaudi", "MULTI_HPU"),
    "npu": ("Ascend NPU", "MULTI_NPU"),
    "mlu": ("Cambricon MLU", "MULTI_MLU"),
    "musa": ("Moore Threads GPU", "MULTI_MUSA"),
    "sdaa": ("Tecorigin SDAA", "MULTI_SDAA"),
    "neuron": ("AWS Neuron core", "MULTI_NEURON"),
}


def other_accelerator() -> str:
    """Return the name of an accelerator that is not NVIDIA's, if torch is imported and has found one; else ""."""
    torch = sys.modules.get("torch")
    accelerator = getattr(torch, "accelerator", None)
    if torch is None or accelerator is None:
        return ""
    device = accelerator.current_accelerator()
    # If torch counts the GPUs, CUDA can no longer be used in processes that the script forks: NVIDIA's are not counted.
    if device is None or (device.type == "cuda" and torch.version.hip is None) or not accelerator.is_available():
        return ""
    kind = device.type
    name, count = OTHER_ACCELERATORS.get(kind, (f"device of type {kind}", None))[0], accelerator.device_count()
    return f"{count} x {name}" if count > 1 else name


@functools.cache
def detect() -> Hardware:
    """Return the hardware of this machine. If NVML fails though there is a driver, the capability is None."""
    libraries = {name: version for name, module in _LIBRARIES.items() if (version := installed_version(module))}
    gpu, capability, count = _gpu()
    return Hardware(gpu, capability, count, _torch_cuda(), libraries)


def best(hardware: Hardware | None = None) -> tuple[str, str]:
    """Return the recipe that `auto` selects on some hardware (default: this machine's), and the reason."""
    here = detect() if hardware is None else hardware
    if here.gpu is None:
        return "fp32", "no GPU"
    if here.capability is None:
        return "fp32", f"{here.gpu}: its compute capability could not be determined"
    if here.capability >= (9, 0):
        reason = here.lacks("tensorwise")
        backend = backend_of(Policy(bf16=True, fp8="hybrid"), here)
        if backend is None:
            reason = "neither Transformer Engine nor torchao is installed"
        if reason is None and not speed.is_measured_on(here.capability):
            reason = f"{speed.NOT_MEASURED}; name an FP8 recipe to have it"
        if reason is None and backend is not None:
            return (
                "bf16_with_fp8_current_scaling_mixed",
                f"{here.generation}: FP8, with {LIBRARY_NAMES[backend]}, for models that are faster in it",
            )
        return "bf16_mixed", f"{here.generation} has FP8, but: {reason}"
    if here.lacks("bf16") is None:
        return "bf16_mixed", f"{here.generation}: BF16"
    if here.lacks("fp16") is None:
        return "fp16_mixed", f"{here.generation} has no BF16: FP16 with loss scaling"
    return "fp32", f"{here.generation} has no tensor cores: FP32"


def backend_of(policy: Policy, hardware: Hardware) -> Backend | None:
    """Return the library that runs a policy's FP8 here; None if none of its libraries is installed.

    With `backend: auto` and two that can, it is the faster one: torchao where it is compiled, which was the faster one
    in every model measured, else Transformer Engine. FP8 copies of weights, and parameters in FP8, are Transformer
    Engine's where the policy allows it: torchao's are the float8 all-gather of FSDP2. A wish for the latter does not
    count: it is granted to scripts that have their optimizer from there.
    """
    if (policy.fp8_param is True or policy.fp8_weight_cache) and "te" in policy.backends:
        return "te"
    installed = [each for each in policy.backends if each in hardware.libraries]
    faster = all(recipe in FLOAT8_LINEAR for recipe in policy.recipes)  # the others are prototypes of torchao
    if faster and "torchao" in installed and policy.compile is not False and "triton" in hardware.libraries:
        return "torchao"
    return next(iter(installed), None)


def _gpu() -> tuple[str | None, Version | None, int]:
    """Return name and capability of the visible GPU with the lowest capability, and the number of visible GPUs."""
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None, None, 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (None, None, 0) if not Path("/proc/driver/nvidia/version").exists() else ("unknown GPU", None, 1)
    try:
        handles = _visible_devices(visible)
        found = sorted(
            (tuple(pynvml.nvmlDeviceGetCudaComputeCapability(each)), str(pynvml.nvmlDeviceGetName(each)))
            for each in handles
        )
    except (pynvml.NVMLError, ValueError) as error:
        return f"a GPU that NVML cannot describe ({error})", None, 1
    finally:
        pynvml.nvmlShutdown()
    if not found:
        return None, None, 0
    capability, name = found[0]
    return name, capability, len(found)


def _visible_devices(visible: str | None) -> list[Any]:
    """Return NVML's handles of the GPUs in `CUDA_VISIBLE_DEVICES` (indices or UUIDs); all GPUs if it is not set.

    As in CUDA, the list ends at the first entry that is not a GPU.
    """
    import pynvml

    count = pynvml.nvmlDeviceGetCount()
    handles: list[Any] = []
    entries = map(str, range(count)) if visible is None else map(str.strip, visible.split(","))
    for entry in entries:
        if entry.startswith(("GPU-", "MIG-")):
            handles.append(pynvml.nvmlDeviceGetHandleByUUID(entry))
        elif entry.isdigit() and int(entry) < count:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(entry)))
        else:
            break
    return handles


def _torch_cuda() -> Version | None:
    """Return the CUDA version that torch was built with, read from `torch/version.py` without importing torch."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return tuple(int(part) for part in match[1].split(".")) if match else None


def installed_version(module: str) -> str | None:
    """Return the installed version of a module's distribution; None if the module is not installed."""
    import importlib.metadata  # takes 20 ms
    import importlib.util

    if importlib.util.find_spec(module) is None:
        return None
    for name in (module, module.replace("_", "-")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _dotted(version: Version | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))
