"""Deviations that a run allows are shown, and do not end it; the same run without them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import mp_yaml, proof, ranks_in_fork, transcript
from short_programs import run

import mpguard
from mpguard.core.errors import ConfigError, PolicyError
from mpguard.policy.allow import allowances
from mpguard.runtime.plan import PLAN, POLICY, Plan

#: The weights are averaged by hand, every second step.
LOCAL_SGD = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
for step in range(4):
    with model.no_sync():
        with torch.autocast("cpu", torch.bfloat16): loss = model(torch.randn(8, 16)).float().square().sum()
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
    for parameter in model.parameters() if step % 2 else ():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_local_sgd(tmp_path: Path, allowed: bool) -> None:
    (tmp_path / "t.py").write_text(LOCAL_SGD)
    own = f"{{mpguard_recipe: bf16_mixed, mpguard_allow: [{'local_sgd' if allowed else ''}]}}"
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2, fp8_config=own)
    words = ["--config", config, "--proof-json", tmp_path / "proof.json", "t.py"]
    first, second = ranks_in_fork(words, cwd=tmp_path)
    assert (first.returncode, second.returncode) == ((0, 0) if allowed else (1, 1)), transcript(first)
    if not allowed:
        assert "gradients differ between ranks" in first.stderr and "mpguard_allow: [local_sgd]" in first.stderr
        return
    row = proof(tmp_path / "proof.json")["rows"]["local sgd"]
    assert (row["found"], row["allowed"]) == ("the gradients differ between ranks", "local_sgd"), transcript(first)


INT8 = """
class Int8(nn.Module):
    def __init__(s): super().__init__(); s.register_buffer("w", torch.randint(-8, 8, (32, 32), dtype=torch.int8))
    def forward(s, x): return torch._int_mm((x.detach() * 8).to(torch.int8), s.w).float() / 64
x = torch.randn(32, 32); m = nn.Sequential(Int8(), nn.Linear(32, 8)); train(m, adam(m))
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_quantized_frozen_parts(tmp_path: Path, allowed: bool) -> None:
    ended = run(tmp_path, INT8, *(["--allow", "frozen:int8"] if allowed else []))
    row = proof(tmp_path / "proof.json")["rows"]["frozen parts"]
    assert (ended.returncode, row["ok"]) == ((0, None) if allowed else (1, False)), transcript(ended)
    assert allowed or "accept it: mpguard_allow: [{frozen: int8}]" in ended.stderr, transcript(ended)


OWN_SCALING = """
m = net(); o = adam(m)
for _ in range(3):
    with amp(torch.float16): loss = m(x).float().pow(2).mean()
    (loss * 1024).backward()
    for p in m.parameters(): p.grad /= 1024
    o.step(); o.zero_grad()
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_a_script_that_scales_the_loss_itself(tmp_path: Path, allowed: bool) -> None:
    ended = run(tmp_path, OWN_SCALING, *(["--allow", "loss_scaling"] if allowed else []), recipe="fp16_mixed")
    row = proof(tmp_path / "proof.json")["rows"]["scaler"]
    assert (ended.returncode, row["ok"]) == ((0, None) if allowed else (1, False)), transcript(ended)
    assert allowed or "mpguard_allow: [loss_scaling]" in ended.stderr, transcript(ended)


def test_autocast_in_another_dtype_is_not_called_missing(tmp_path: Path) -> None:
    ended = run(tmp_path, "m = net(); train(m, adam(m), dtype=torch.float16)")
    assert ended.returncode == 1 and "Remove the autocast or the cast there" in ended.stderr, transcript(ended)


def test_workers_inherit_what_is_allowed() -> None:
    plan = Plan(mpguard.recipe("bf16_mixed"), allow=allowances(["local_sgd", "fp32: *head"]))
    assert Plan.from_environment(plan.environment()) == plan
    with pytest.raises(PolicyError, match="local_sdg"):
        Plan.from_environment({POLICY: str(plan.policy), PLAN: '{"allow": ["local_sdg"]}'})
    with pytest.raises(ConfigError, match="did you mean `frozen`"):
        mpguard.activate("bf16_mixed", allow=["frozn: fp16"])
