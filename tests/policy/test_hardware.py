"""What a machine can do: one table, and never a guess."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types
from typing import Any

import pytest
from limits import seconds

import mpguard
from mpguard.core.errors import PolicyError
from mpguard.policy import hardware
from mpguard.policy.hardware import GENERATIONS, GPUS, NEEDS, Hardware, best, named
from mpguard.policy.policy import BACKENDS, Policy

BOTH = {"te": "2.20", "torchao": "0.18", "triton": "3.6"}


def gpu(capability: tuple[int, int], cuda: tuple[int, ...] | None = (12, 9), libraries: Any = None) -> Hardware:
    return Hardware("a GPU", capability, 1, cuda, BOTH if libraries is None else libraries)


def test_every_low_bit_recipe_has_its_needs() -> None:
    assert set(BACKENDS) <= set(NEEDS)
    assert all(needs.source for needs in NEEDS.values()), "a number without a source"


@pytest.mark.parametrize(
    ("recipe", "runs"),
    [
        # capability: Volta, Turing, Ampere, Ada, Hopper, Blackwell, consumer Blackwell
        ("fp32", (1, 1, 1, 1, 1, 1, 1)),
        ("tf32", (0, 0, 1, 1, 1, 1, 1)),
        ("fp16_mixed", (1, 1, 1, 1, 1, 1, 1)),
        ("bf16_mixed", (0, 0, 1, 1, 1, 1, 1)),
        ("bf16_with_fp8_delayed_scaling_mixed", (0, 0, 0, 1, 1, 1, 1)),
        ("bf16_with_fp8_current_scaling_mixed", (0, 0, 0, 1, 1, 1, 1)),
        ("bf16_with_fp8_rowwise_mixed", (0, 0, 0, 1, 1, 1, 1)),
        ("bf16_with_fp8_subchannel_scaling_mixed", (0, 0, 0, 0, 1, 1, 1)),
        ("bf16_with_mxfp8_mixed", (0, 0, 0, 0, 0, 1, 0)),
        ("bf16_with_nvfp4_mixed", (0, 0, 0, 0, 0, 1, 0)),
    ],
)
def test_what_each_generation_runs(recipe: str, runs: tuple[int, ...]) -> None:
    capabilities = ((7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
    policy = mpguard.recipe(recipe)
    assert tuple(int(gpu(capability).refuses(policy) is None) for capability in capabilities) == runs


@pytest.mark.parametrize(
    ("machine", "recipe", "reason"),
    [
        (gpu((9, 0)), "bf16_with_mxfp8_mixed", "needs compute capability 10.0 or higher for MXFP8 (a GPU has 9.0)"),
        (gpu((12, 0)), "bf16_with_mxfp8_mixed", "MXFP8 is not available from compute capability 12.0 on"),
        (gpu((12, 0)), "bf16_with_nvfp4_mixed", "NVFP4 is not available from compute capability 12.0 on"),
        (gpu((9, 0), (12, 8)), "bf16_with_fp8_subchannel_scaling_mixed",
         "needs CUDA 12.9 for FP8 block scaling (torch here is built with 12.8)"),
        (gpu((9, 0), None), "bf16_with_fp8_delayed_scaling_mixed", "the CUDA version of torch is unknown here"),
        (gpu((9, 0), libraries={"torchao": "1"}), "bf16_with_fp8_delayed_scaling_mixed",
         "needs Transformer Engine, which is not installed"),
        (gpu((9, 0), libraries={}), "bf16_with_fp8_current_scaling_mixed",
         "needs Transformer Engine or torchao, which is"),
        (Hardware(), "bf16_with_fp8_current_scaling_mixed", "needs compute capability 8.9 (this machine has no GPU)"),
        (Hardware("V100", (7, 0), 1), "bf16_mixed",
         "needs compute capability 8.0 or higher for BF16 tensor cores (V100 has 7.0)"),
        (Hardware("odd", None, 1), "bf16_mixed", "needs compute capability 8.0 (the one of odd could not be queried)"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_needed_and_what_is_here(machine: Hardware, recipe: str, reason: str) -> None:
    assert reason in (machine.refuses(mpguard.recipe(recipe)) or "")


def test_without_a_gpu_what_runs_in_software_is_not_refused() -> None:
    here = Hardware(libraries=BOTH)
    for policy in (Policy(), Policy(bf16=True), Policy(fp16=True), Policy(tf32=False)):
        assert here.refuses(policy) is None
    assert here.refuses(Policy(tf32=True)) == "needs compute capability 8.0 (this machine has no GPU)"
    emulated = Policy(bf16=True, fp8="hybrid", fp8_emulate=True)
    assert here.refuses(emulated) is None
    assert "needs torchao" in (Hardware().refuses(emulated) or "")


@pytest.mark.parametrize(
    ("machine", "recipe", "why"),
    [
        (Hardware(), "fp32", "no GPU"),
        (Hardware("odd", None, 1), "fp32", "could not be determined"),
        (gpu((9, 0)), "bf16_with_fp8_current_scaling_mixed", "Hopper: FP8, with torchao"),
        (gpu((9, 0), libraries={"te": "2"}), "bf16_with_fp8_current_scaling_mixed", "FP8, with Transformer Engine"),
        (gpu((9, 0), libraries={}), "bf16_mixed", "neither Transformer Engine nor torchao is installed"),
        (gpu((9, 0), (11, 8)), "bf16_mixed", "needs CUDA 12.1"),
        (gpu((10, 0)), "bf16_mixed", "Blackwell has FP8, but: where FP8 is faster was measured on Hopper only"),
        (gpu((8, 9)), "bf16_mixed", "Ada: BF16"),
        (gpu((8, 0)), "bf16_mixed", "Ampere: BF16"),
        (gpu((7, 0)), "fp16_mixed", "Volta has no BF16"),
        (gpu((6, 0)), "fp32", "Pascal has no tensor cores"),
    ],
)
def test_auto_selects_by_the_hardware_and_gives_the_reason(machine: Hardware, recipe: str, why: str) -> None:
    name, reason = best(machine)
    assert name == recipe
    assert why in reason
    assert machine.refuses(mpguard.recipe(name)) is None or machine.capability is None, "auto runs where it is chosen"


def test_generations_do_not_overlap_and_have_no_gap() -> None:
    for one, other in itertools.pairwise(GENERATIONS):
        assert one.high == other.low
    assert {named(name).generation for name in GPUS} == {generation.name for generation in GENERATIONS}
    assert gpu((13, 0)).generation == "compute capability 13.0"


@pytest.mark.parametrize("name", ["h100", "H100", "NVIDIA H100", "sm_90", "sm90a", "9.0", "90"])
def test_a_gpu_is_named_in_many_ways(name: str) -> None:
    assert named(name).capability == (9, 0)


def test_three_digit_capabilities() -> None:
    assert (named("sm_100").capability, named("sm_120").capability) == ((10, 0), (12, 0))


@pytest.mark.parametrize(("name", "near"), [("h10", "`h100`"), ("b20", "`b200`"), ("10", "sm_90"), ("", "sm_90")])
def test_unknown_gpus_are_refused(name: str, near: str) -> None:
    with pytest.raises(PolicyError) as raised:
        named(name)
    assert near in str(raised.value)


def test_this_machine_is_queried_once_and_without_torch() -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    code = (
        "import sys; from mpguard.policy import hardware; here = hardware.detect(); assert here is hardware.detect();"
        "assert not {'torch', 'accelerate'} & set(sys.modules); print(here, here.libraries['torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1].startswith("2.")


class Nvml:
    """NVML of a machine with some GPUs; no machine of ours has the driver."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: list[tuple[str, tuple[int, int]]], broken: str = "") -> None:
        self.gpus, self.broken, self.down = gpus, broken, False

    def nvmlInit(self) -> None:
        if self.broken == "init":
            raise self.NVMLError("driver not loaded")

    def nvmlShutdown(self) -> None:
        self.down = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetCudaComputeCapability(self, index: int) -> list[int]:
        if self.broken == "ask":
            raise self.NVMLError("GPU is lost")
        return list(self.gpus[index][1])

    def nvmlDeviceGetName(self, index: int) -> str:
        return self.gpus[index][0]


@pytest.mark.parametrize(
    ("nvml", "found"),
    [
        (Nvml([("NVIDIA H100", (9, 0))]), ("NVIDIA H100", (9, 0), 1)),
        (Nvml([("NVIDIA H100", (9, 0)), ("Tesla T4", (7, 5))]), ("Tesla T4", (7, 5), 2)),  # the weakest decides
        (Nvml([]), (None, None, 0)),
        (Nvml([], "init"), (None, None, 0)),
        (Nvml([("x", (9, 0))], "ask"), ("a GPU that NVML cannot describe (GPU is lost)", None, 1)),
    ],
)
def test_gpus_are_queried_through_nvml(nvml: Nvml, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(hardware, "Path", lambda _: type("Nowhere", (), {"exists": lambda self: False})())
    assert hardware._gpu() == found
    assert nvml.down is (nvml.broken != "init")


@pytest.mark.parametrize(
    ("fields", "libraries", "backend"),
    [
        ({"fp8_recipe": "tensorwise"}, BOTH, "torchao"),
        ({"fp8_recipe": "tensorwise"}, {"te": "2.20", "torchao": "0.18"}, "te"),
        ({"fp8_recipe": "tensorwise", "compile": False}, BOTH, "te"),
        ({"fp8_recipe": "tensorwise", "backend": "te"}, BOTH, "te"),
        ({"fp8_recipe": "tensorwise", "fp8_param": True}, BOTH, "te"),
        ({"fp8_recipe": "tensorwise", "fp8_param": "auto"}, BOTH, "torchao"),
        ({"fp8_recipe": "tensorwise"}, {"te": "2.20"}, "te"),
        ({"fp8_recipe": "tensorwise", "compile": False}, {"torchao": "0.18"}, "torchao"),
        ({"fp8_recipe": "delayed"}, BOTH, "te"),
        ({"fp8_recipe": "tensorwise"}, {}, None),
    ],
)
def test_auto_takes_the_faster_backend(
    fields: dict[str, Any],
    libraries: dict[str, str],
    backend: str | None,
) -> None:
    policy = Policy(bf16=True, fp8="hybrid", **fields)
    assert hardware.backend_of(policy, gpu((9, 0), libraries=libraries)) == backend


class _Accelerator:
    """torch's `torch.accelerator` of a build for some device, with two of them."""

    def __init__(self, kind: str) -> None:
        self.kind, self.counted = kind, 0

    def current_accelerator(self) -> Any:
        return types.SimpleNamespace(type=self.kind)

    def is_available(self) -> bool:
        self.counted += 1
        return True

    def device_count(self) -> int:
        self.counted += 1
        return 2


@pytest.mark.parametrize(
    ("kind", "hip", "name"), [("xpu", None, "2 x Intel GPU"), ("cuda", "6.4", "2 x AMD GPU"), ("cuda", None, "")]
)
def test_another_accelerator_is_named_and_gpus_of_nvidia_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, kind: str, hip: str | None, name: str
) -> None:
    """Once torch has counted CUDA's devices, processes that the script forks cannot use them."""
    accelerator = _Accelerator(kind)
    torch = types.SimpleNamespace(accelerator=accelerator, version=types.SimpleNamespace(hip=hip))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert hardware.other_accelerator() == name
    assert bool(accelerator.counted) == bool(name)
