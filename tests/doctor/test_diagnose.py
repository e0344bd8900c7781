"""The parts of a diagnosis: the machine, cells, probes that crash or hang, and this machine's own libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_machines import H100, TORCH, Fake
from limits import seconds

from mpguard.cli import main
from mpguard.doctor import diagnose, probes
from mpguard.doctor.accelerators import found_by_torch
from mpguard.doctor.cells import cells, hardware_of
from mpguard.doctor.machine import inspect
from mpguard.doctor.packages import inspect as inspect_packages
from mpguard.doctor.probes import ProbeOutcome
from mpguard.doctor.system import System
from mpguard.policy.recipes import recipes
from mpguard.targets.plugin import STRATEGIES

TE = {"transformer-engine": "2.20", "transformer-engine-torch": "2.20", "transformer-engine-cu13": "2.20"}


def test_facts_of_the_machine(tmp_path: Path) -> None:
    machine = inspect(Fake([H100, H100.replace("GPU-1", "GPU-2")], loaded="580.95.05").system(tmp_path))
    assert (machine.driver, machine.loaded, machine.cuda, len(machine.used)) == ("580.95.05", "580.95.05", (13, 0), 2)
    assert machine.gpus[0].capability == (9, 0) and machine.gpus[0].memory == 81559


@pytest.mark.parametrize(
    ("visible", "used"), [(None, 2), ("1", 1), ("0,1", 2), ("0,7,1", 1), ("GPU-2", 1), ("", 0), ("-1", 0), ("MIG-7", 2)]
)
def test_visible_gpus_are_those_of_cuda(visible: str | None, used: int, tmp_path: Path) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    machine = inspect(Fake([H100, H100.replace("GPU-1", "GPU-2")], variables=variables).system(tmp_path))
    assert len(machine.used) == used


def test_a_cell_for_each_recipe_backend_and_strategy(tmp_path: Path) -> None:
    packages = {**TORCH, **TE, "torchao": "0.18.0", "deepspeed": "0.19.8"}
    system = Fake([H100], packages=packages).system(tmp_path)
    machine, installed = inspect(system), inspect_packages(system)
    outcomes = {"te:delayed": ProbeOutcome(False, "the process crashed with SIGSEGV", True),
                "torchao:rowwise": ProbeOutcome(True, "sm90_xmma_gemm_e4m3")}  # fmt: skip
    found = list(cells(machine, installed, outcomes))
    assert {cell.recipe for cell in found} == set(recipes()) - {"auto"}
    assert {cell.strategy for cell in found} == set(STRATEGIES)
    by_key = {(cell.recipe, cell.backend, cell.strategy): cell for cell in found}
    delayed = by_key["bf16_with_fp8_delayed_scaling_mixed", "te", "single"]
    assert not delayed.works and "SIGSEGV" in delayed.reason
    rowwise = by_key["bf16_with_fp8_rowwise_mixed", "torchao", "fsdp2"]
    assert rowwise.works and rowwise.shown and "sm90_xmma_gemm_e4m3" in rowwise.reason
    mxfp8 = by_key["bf16_with_mxfp8_mixed", "te", "ddp"]
    assert not mxfp8.works and "compute capability 10.0" in mxfp8.reason
    assert by_key["bf16_with_fp8_current_scaling_mixed", "te", "deepspeed-zero3"].works, "its fp8_param is a wish"
    assert hardware_of(machine, installed).gpu == "NVIDIA H100 80GB HBM3"


def test_a_crash_or_a_hang_ends_one_probe(tmp_path: Path) -> None:
    fake = Fake(packages={}, limit=seconds(1), modules={
        "crashes.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "hangs.py": "import time\ntime.sleep(600)",
        "exits.py": "import os\nprint('out of memory')\nos._exit(3)",
        "fine.py": "__version__ = '1.0'",
    })  # fmt: skip
    names = ["import:fine", "import:crashes", "import:hangs", "import:exits", "import:absent", "import:fine"]
    found = probes.run(names, fake.system(tmp_path))
    assert found["import:fine"] == ProbeOutcome(True, "1.0")
    assert found["import:crashes"] == ProbeOutcome(False, "the process crashed with SIGSEGV", True)
    assert found["import:hangs"].crashed and "and was killed" in found["import:hangs"].detail
    assert found["import:exits"] == ProbeOutcome(False, "the process ended with status 3: out of memory", True)
    assert "No module named 'absent'" in found["import:absent"].detail and not found["import:absent"].crashed


def test_broken_metadata_is_skipped(tmp_path: Path) -> None:
    system = Fake([H100]).system(tmp_path)
    for name, text in (("empty-1.0.dist-info", ""), ("bad-1.0.dist-info", "Name: bad\nVersion: not a version\n")):
        folder = Path(system.packages[0], name)
        folder.mkdir()
        (folder / "METADATA").write_text(text)
    report = diagnose(system, probe=False)
    assert report.problems == () and report.packages["torch"] == "2.13.0+cu130"


def test_every_row_of_known_versions_has_its_source() -> None:
    rows = json.loads(Path(probes.__file__).with_name("known_bad.json").read_text(encoding="utf-8"))["rows"]
    assert all(row["source"].startswith(("https://", "mpguard")) and row["what"] and row["fix"] for row in rows)


def test_this_machine_computes_what_it_says() -> None:
    """Real torch and torchao: a matmul in each format that a CPU has."""
    pytest.importorskip("torch", reason="the real library runs here")
    system = System()
    names = ["device", "product:fp32", "product:bf16", "product:fp16", "torchao:tensorwise", "torchao:rowwise"]
    found = probes.run(names, system)
    assert all(each.ok for each in found.values()), found
    assert "cudnn" in json.loads(found["device"].detail)


@pytest.mark.parametrize(
    ("facts", "shown", "strategies"),
    [
        ({"accelerator": "cuda", "hip": "6.4", "device": "AMD Instinct MI300X", "count": 8},
         "8 x AMD Instinct MI300X (torch's `cuda`, accelerate's MULTI_GPU)", set(STRATEGIES)),
        ({"accelerator": "mps", "count": 1}, "Apple GPU (torch's `mps`, accelerate uses one)", {"single"}),
        ({"accelerator": "xpu", "count": 2, "device": "Intel(R) Data Center GPU Max 1550"},
         "2 x Intel(R) Data Center GPU Max 1550 (torch's `xpu`, accelerate's MULTI_XPU)", set(STRATEGIES)),
        ({"accelerator": "npu", "count": 8, "device": "Ascend910B3"},
         "8 x Ascend910B3 (torch's `npu`, accelerate's MULTI_NPU)", set(STRATEGIES)),
    ],
)  # fmt: skip
def test_devices_of_other_makers(facts: dict[str, object], shown: str, strategies: set[str], tmp_path: Path) -> None:
    packages = {**TORCH, "torch": "2.13.0", "torchao": "0.18.0", "deepspeed": "0.19.8"}
    system = Fake(cuda=None, packages=packages).system(tmp_path)
    machine, installed = inspect(system), inspect_packages(system)
    outcomes = {"device": ProbeOutcome(True, json.dumps(facts)), "product:bf16": ProbeOutcome(True, "on the device"),
                "product:fp16": ProbeOutcome(False, "RuntimeError: not implemented")}  # fmt: skip
    other = found_by_torch(outcomes)
    assert str(other) == shown
    found = list(cells(machine, installed, outcomes))
    assert {cell.strategy for cell in found if cell.recipe == "bf16_mixed" and cell.works} == strategies
    assert not any(cell.works for cell in found if cell.recipe == "fp16_mixed"), "its matmul failed"
    (fp8,) = {cell.reason for cell in found if cell.recipe == "bf16_with_fp8_rowwise_mixed"}
    assert "this machine has" in fp8 and "no GPU of NVIDIA" in fp8


def test_an_nvidia_gpu_and_a_cpu_are_no_other_devices(tmp_path: Path) -> None:
    for facts in ({"accelerator": "cuda", "hip": None, "device": "NVIDIA H100", "count": 1}, {"torch": "2.13.0"}):
        assert found_by_torch({"device": ProbeOutcome(True, json.dumps(facts))}) is None
    assert found_by_torch({"device": ProbeOutcome(False, "RuntimeError")}) is None and found_by_torch({}) is None


def test_the_text_names_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    system = Fake(cuda=None, packages={**TORCH, "torch": "2.13.0"}).system(tmp_path)
    facts = {"accelerator": "xpu", "count": 1, "device": "Intel(R) Arc(TM) B580"}
    monkeypatch.setattr(probes, "run", lambda _names, _system: {"device": ProbeOutcome(True, json.dumps(facts))})
    report = diagnose(system)
    monkeypatch.setattr("mpguard.doctor.diagnose", lambda **_: report)
    main(["doctor"])
    printed = capsys.readouterr().out
    assert "GPU         Intel(R) Arc(TM) B580 (torch's `xpu`, accelerate's MULTI_XPU)\n" in printed
    assert "mpguard is tested on NVIDIA GPUs and CPUs" in printed and "\nfp32  " in printed
