"""Runs that are resumed on a GPU continue bit for bit, Transformer Engine's history of maxima included.

    pytest tests/gpu/test_resume_te.py

programs/resume.py on one GPU: each framework trains, saves, goes on; a second model, which began with other weights,
loads and goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import seconds
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from paths import PROGRAMS
from processes import command, free_port, results, transcript

import mpguard
from mpguard.nn.fp8.amax_history import KEY
from mpguard.policy.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::mpguard.MpguardWarning")]

te = pytest.importorskip("transformer_engine.pytorch")

ENGINES = (
    "plain", "early", "forgetful", "safetensors", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "zero3-init",
    "accelerate", "trainer", "accelerate-fsdp2", "accelerate-zero2",
)  # fmt: skip

#: Under which parameters are kept in FP8.
KEPT_IN_FP8 = ("plain", "early", "safetensors", "ddp", "accelerate", "trainer")

DELAYED = Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=4, backend="te")


@pytest.fixture(scope="module", params=["te-delayed", "te-tensorwise", "te-delayed-kept", "te-tensorwise-kept"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("resume")
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "DS_ACCELERATOR": "cuda"}
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", 1, "--master_port", free_port())
    engines = KEPT_IN_FP8 if request.param.endswith("kept") else ENGINES
    words = (*launcher, PROGRAMS / "resume.py", request.param, *engines)
    run = command(Path(sys.executable).name, *words, cwd=folder, timeout=seconds(550), **fixed)
    assert run.returncode == 0, transcript(run)
    return {"policy": request.param, **{each["engine"]: each for each in results(run)}}


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "forgetful"])
def test_a_resumed_run_continues_bit_for_bit(runs: dict[str, Any], engine: str) -> None:
    if engine not in runs:
        pytest.skip("refused with parameters in FP8")
    found = runs[engine]
    assert found["error"] is None, found["error"]
    assert found["fp8"] == 2 and found["keys"], "FP8 layers, and the keys of the plain model"
    assert found["resumed"] == found["straight"] and found["equal"]
    assert found["messages"] == []


def test_a_lost_history_changes_the_run_and_is_warned_about(runs: dict[str, Any]) -> None:
    """The control: with delayed scaling, bare tensors are not enough."""
    if "forgetful" not in runs:
        pytest.skip("refused with parameters in FP8")
    found = runs["forgetful"]
    assert found["error"] is None, found["error"]
    lost = runs["policy"] == "te-delayed"
    assert found["equal"] is not lost and bool(found["messages"]) is lost


def converted() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))).cuda()
    mpguard.convert(net, DELAYED)
    return net


def train(net: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(torch.full((32, 64), 1.0 + step, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_history_is_transformer_engines(tmp_path: Path) -> None:
    """Saved before the layer has run it is nothing, afterwards what `fp8_meta` holds; loaded before it has run, too."""
    net = converted()
    assert KEY not in net.state_dict()._metadata["0"]
    train(net, 3)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    saved = torch.load(tmp_path / "net.pt", weights_only=True)
    assert sorted(saved) == sorted(nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))).state_dict())
    again = converted()
    again.load_state_dict(saved, strict=True)
    for layer, other in ((net[0], again[0]), (net[1][0], again[1][0])):
        for way in ("scaling_fwd", "scaling_bwd"):
            assert torch.equal(layer.fp8_meta[way].scale, other.fp8_meta[way].scale)
            assert torch.equal(layer.fp8_meta[way].amax_history, other.fp8_meta[way].amax_history)
        assert layer.fp8_meta["scaling_fwd"].amax_history.any() and (layer.fp8_meta["scaling_fwd"].scale != 1).any()
    train(net, 2)
    train(again, 2)
    ours, theirs = mpguard.fp8_state_dict(net), mpguard.fp8_state_dict(again)
    assert all(torch.equal(ours[layer][name], theirs[layer][name]) for layer in ours for name in ours[layer])
    assert torch.equal(net[0].weight, again[0].weight)


def test_a_history_loaded_into_a_running_model_is_the_one_in_use() -> None:
    """TE's own buffers hold the same tensors: TE would neither read nor overwrite a copy."""
    net = converted()
    train(net, 3)
    state = mpguard.fp8_state_dict(net)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    train(net, 2)
    first = mpguard.fp8_state_dict(net)
    net.load_state_dict(weights)
    mpguard.load_fp8_state_dict(net, state)
    train(net, 2)
    second = mpguard.fp8_state_dict(net)
    assert all(torch.equal(first[layer][name], second[layer][name]) for layer in first for name in first[layer])
