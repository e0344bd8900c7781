"""Deviations that a run allows are shown, and do not end it; the same run without them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import mp_yaml, proof, ranks_in_fork, transcript
from short_programs import HEAD, run

import mpguard
from mpguard.core.errors import ConfigError, PolicyError
from mpguard.policy.allow import allowances, ranks_of
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


LOGITS = """
m = net(); w = nn.Parameter(torch.randn(64, m(x).shape[-1])); o = torch.optim.AdamW([*m.parameters(), w])
for _ in range(3):
    with amp(): h = m(x)
    F.cross_entropy(h.float() @ w.t(), torch.arange(16)).backward(); o.step(); o.zero_grad()
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_products_outside_of_modules(tmp_path: Path, allowed: bool) -> None:
    ended = run(tmp_path, LOGITS, *(["--allow", "fp32:code outside of modules"] if allowed else []))
    row = proof(tmp_path / "proof.json")["rows"]["compute"]
    assert (ended.returncode, row["ok"]) == ((0, None) if allowed else (1, False)), transcript(ended)
    assert allowed or "mpguard_allow: [{fp32: code outside of modules}]" in ended.stderr, transcript(ended)


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


#: As in nanochat: the embeddings have no exact copy, the matrices an optimizer of their own.
EMBEDDINGS_IN_BF16 = """
import torch.distributed as dist
class Matrices(torch.optim.Optimizer):
    def __init__(s, own): super().__init__(own, {"lr": 0.02})
    @torch.no_grad()
    def step(s, closure=None):
        for own in s.param_groups[0]["params"]:
            kept = s.state[own].setdefault("momentum", torch.zeros_like(own)).lerp_(own.grad, 0.1)
            own.sub_(0.02 * torch.linalg.qr(kept).Q)
class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.wte, s.body, s.head = nn.Embedding(64, 32).bfloat16(), net(), nn.Linear(32, 64)
    def forward(s, ids): return s.head(s.body(s.wte(ids)))
m = Net()
if PROCESSES > 1:
    dist.init_process_group("gloo")
    m = nn.parallel.DistributedDataParallel(m)
matrices = [own for name, own in m.named_parameters() if "body" in name and own.ndim == 2]
others = [own for own in m.parameters() if all(own is not each for each in matrices)]
optimizers = [Matrices(matrices), torch.optim.AdamW(others)]
for _ in range(5):
    ids = torch.randint(0, 64, (4, 8))
    with amp(): loss = F.cross_entropy(m(ids).float().flatten(0, 1), ids.flatten())
    loss.backward()
    for each in optimizers: each.step(); each.zero_grad()
if PROCESSES > 1: dist.destroy_process_group()
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_parameters_that_are_kept_in_bf16(tmp_path: Path, allowed: bool) -> None:
    script = EMBEDDINGS_IN_BF16.replace("PROCESSES", "1")
    ended = run(tmp_path, script, *(["--allow", "bf16:wte"] if allowed else []))
    if not allowed:
        assert ended.returncode == 1 and "mpguard_allow: [{bf16: wte}]" in ended.stderr, transcript(ended)
        return
    made = proof(tmp_path / "proof.json")
    assert ended.returncode == 0 and made["verdict"] == "in force", transcript(ended)
    rows = {row["name"]: row for row in made["optimizers"][1]["rows"]}
    assert (rows["kept in bf16"]["found"], rows["kept in bf16"]["allowed"]) == ("wte (2.05 k)", "bf16: wte")
    assert rows["optimizer"]["found"] == "AdamW, weights fp32, states fp32" and "allow" not in rows


@pytest.mark.parametrize(("pattern", "status"), [("wte", 0), ("head", 1)])
def test_parameters_that_are_kept_in_bf16_on_two_ranks(tmp_path: Path, pattern: str, status: int) -> None:
    (tmp_path / "t.py").write_text(HEAD + EMBEDDINGS_IN_BF16.replace("PROCESSES", "2"))
    own = f"{{mpguard_recipe: bf16_mixed, mpguard_allow: [{{bf16: '*{pattern}'}}]}}"
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2, fp8_config=own)
    first, second = ranks_in_fork(["--config", config, "t.py"], cwd=tmp_path)
    assert (first.returncode, second.returncode) == (status, status), transcript(first)


#: Rank 0 learns from what rank 1 plays with the weights that it gets.
ACTOR_AND_LEARNER = """
import torch.distributed as dist
dist.init_process_group("gloo"); m = net(); rank = dist.get_rank(); o = adam(m) if rank == 0 or BOTH else None
for _ in range(6):
    for own in m.parameters(): dist.broadcast(own.data, 0)
    played = torch.zeros(16, 32)
    if rank == 1:
        with torch.no_grad(): played = m(x)
    dist.broadcast(played, 1)
    if o: train(m, o, 1, enabled=ENABLED)
print("finished"); dist.barrier(); dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("names", "both", "enabled", "message"),
    [
        ("", False, True, "engine: no wrapper around the model"),
        ("idle_ranks: 1", False, True, ""),
        ("idle_ranks: 1", False, False, "compute: fp32; asked: bf16"),
        ("idle_ranks: 1", True, True, "idle_ranks names rank 1, and AdamW was stepped there"),
    ],
)
def test_ranks_that_only_act(tmp_path: Path, names: str, both: bool, enabled: bool, message: str) -> None:
    script = ACTOR_AND_LEARNER.replace("BOTH", str(both)).replace("ENABLED", str(enabled))
    (tmp_path / "t.py").write_text(HEAD + script)
    own = f"{{mpguard_recipe: bf16_mixed, mpguard_allow: [{f'{{{names}}}' if names else ''}]}}"
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2, fp8_config=own)
    ended = ranks_in_fork(["--config", config, "--proof-json", tmp_path / "proof.json", "t.py"], cwd=tmp_path)
    shown = "\n".join(map(transcript, ended))
    assert any(each.returncode for each in ended) == bool(message), shown
    if message:
        assert message in shown
        return
    row = proof(tmp_path / "proof.json")["rows"]["processes"]
    assert (row["found"], row["allowed"]) == ("2, of which 1 does not train", "idle_ranks: 1"), shown
    assert "in force at steps 1-4 of 6 (3 checks)" in ended[0].stderr, shown


def test_autocast_in_another_dtype_is_not_called_missing(tmp_path: Path) -> None:
    ended = run(tmp_path, "m = net(); train(m, adam(m), dtype=torch.float16)")
    advice = '`torch.autocast("cpu", dtype=torch.float16)` was entered: pass dtype=torch.bfloat16'
    assert ended.returncode == 1 and advice in ended.stderr, transcript(ended)


def test_workers_inherit_what_is_allowed() -> None:
    plan = Plan(mpguard.recipe("bf16_mixed"), allow=allowances(["local_sgd", "fp32: *head", {"fp32": 1}]))
    assert Plan.from_environment(plan.environment()) == plan
    with pytest.raises(PolicyError, match="local_sdg"):
        Plan.from_environment({POLICY: str(plan.policy), PLAN: '{"allow": ["local_sdg"]}'})
    assert [list(ranks_of(text)) for text in ("2", "1-3")] == [[2], [1, 2, 3]]
    for text, message in (("0", "names rank 0"), ("one", "a rank or a range is needed"), ("1-x", "a rank or a range")):
        with pytest.raises(ConfigError, match=message):
            allowances({"idle_ranks": text})
    with pytest.raises(ConfigError, match="did you mean `frozen`"):
        mpguard.activate("bf16_mixed", allow=["frozn: fp16"])
