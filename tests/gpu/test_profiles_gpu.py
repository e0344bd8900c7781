"""torch's profiler on a GPU: what the proof's use of it leaves behind, and what the program's own profiles show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import seconds
from processes import in_fork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def program(words: list[str]) -> int:
    """Train; words: `proof` for a guard, `first`, `between` and `after` for profiles of CUDA at these times."""
    from torch import nn
    from torch.profiler import ProfilerActivity, profile

    import mpguard
    from mpguard.runtime.proof import trace

    kernels: dict[str, int] = {}
    recorded: set[str] = set()
    read = trace.read

    def read_and_keep(events: Any, *arguments: Any, **more: Any) -> Any:
        recorded.update(event.name() for event in events)
        return read(events, *arguments, **more)

    trace.read = read_and_keep

    def profiled(name: str) -> None:
        if name not in words:
            return
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            (x @ x).sum().item()
        kernels[name] = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events() or [])

    if "proof" in words:
        mpguard.activate("bf16_mixed")
    x: Any = torch.randn(64, 64, device="cuda")
    profiled("first")
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(12):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            profiled("between")
    profiled("after")
    print(json.dumps({"kernels": kernels, "recorded": sorted(recorded)}))
    return 0


@pytest.mark.parametrize("words", [["first"], ["between"], ["after"], ["first", "between", "after"]])
def test_the_programs_own_profiles_show_the_kernels(words: list[str], tmp_path: Path) -> None:
    with_proof, alone = (
        in_fork([*more, *words], cwd=tmp_path, program=program, timeout=seconds(100)) for more in (["proof"], [])
    )
    assert with_proof.returncode == 0, with_proof.stdout + with_proof.stderr
    shown, expected = (json.loads(run.stdout.splitlines()[-1])["kernels"] for run in (with_proof, alone))
    assert shown == expected and all(shown.values()), "as many kernels as without mpguard"


def test_the_proof_does_not_trace_the_cuda_runtime(tmp_path: Path) -> None:
    run = in_fork(["proof"], cwd=tmp_path, program=program, timeout=seconds(100))
    assert run.returncode == 0, run.stdout + run.stderr
    recorded = json.loads(run.stdout.splitlines()[-1])["recorded"]
    assert "aten::addmm" in recorded
    assert not [name for name in recorded if name.startswith("cu")], "CUPTI stays: each launch would take longer"
    assert "proven in force" in run.stdout + run.stderr and "Warning" not in run.stderr, run.stderr
