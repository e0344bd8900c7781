"""What belongs to a step, on two GPUs with NCCL, where autograd has threads of its own; and in a CUDA graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from limits import seconds
from paths import PROGRAMS
from processes import in_fork, mp_yaml, ranks_in_fork, results, transcript

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

#: By program: the beginning of a failure; None for one that is right.
EXPECTED = {
    "ddp": None,
    "ddp_accumulates": None,
    "ddp_compresses_as_asked": None,
    "by_hand_in_fp32": None,
    "tensor_parallel": None,
    "head_outside_reduced_by_hand": None,
    "ddp_clears_gradients_in_its_step": None,
    "ddp_updates_by_hand": None,
    "fsdp1": None,
    "fsdp2": None,
    "ddp_compresses_in_cpp": "reduction: fp16",
    "ddp_compresses_in_a_hook": "reduction: bf16",
    "by_hand_in_bf16": "reduction: bf16 by the script",
    "never_synchronized": "not proven: reduction could not be observed",
    "tensor_parallel_without_the_patch": "reduction: bf16 over tp",
    "ddp_ignores_a_weight": "coverage: the gradients of 2.weight",
    "fsdp1_adds_in_bf16": "accumulation: bf16",
}


def programs(words: list[str]) -> int:
    sys.path.insert(0, str(PROGRAMS))
    import step_cases

    return int(step_cases.main(words))


def test_the_step_is_proven_on_two_gpus(tmp_path: Path) -> None:
    ranks = ranks_in_fork(list(EXPECTED), cwd=tmp_path, program=programs, timeout=seconds(300), STEP_DEVICE="cuda")
    assert all(results(rank) for rank in ranks), "\n".join(map(transcript, ranks))
    for rank in ranks:
        cases = results(rank)[0]["cases"]
        for name, expected in EXPECTED.items():
            failures = cases[name]["failures"]
            if expected is None:
                assert (cases[name]["verdict"], failures) == ("in force", []), (name, cases[name])
            else:
                assert any(failure.startswith(expected) for failure in failures), (name, cases[name])


def test_tf32_of_cudnn_is_compared_on_a_gpu(tmp_path: Path) -> None:
    names = ["fp32", "tf32_in_cudnn", "bf16_in_onednn", "tf32_by_the_new_names", "own_buffers_in_bf16", "accumulates"]
    run = in_fork(names, cwd=tmp_path, program=programs, timeout=seconds(300), STEP_DEVICE="cuda")
    assert results(run), transcript(run)
    failures = {name: case["failures"] for name, case in results(run)[0]["cases"].items()}
    assert failures["fp32"] == failures["tf32_by_the_new_names"] == failures["accumulates"] == []
    assert failures["tf32_in_cudnn"][0].startswith("tf32: cuBLAS off, cuDNN convolutions on")
    assert failures["own_buffers_in_bf16"][0].startswith("accumulation: rounded to bf16")


def test_every_kind_of_step_is_proven_on_a_gpu(tmp_path: Path) -> None:
    right = ["another_optimizer_steps", "clears_gradients_in_its_step", "steps_once_late", "updates_by_hand"]
    wrong = ["another_optimizer_steps_in_fp32", "steps_once_late_in_fp32", "updates_by_hand_in_fp32"]
    run = in_fork([*right, *wrong], cwd=tmp_path, program=programs, timeout=seconds(300), STEP_DEVICE="cuda")
    assert results(run), transcript(run)
    cases = results(run)[0]["cases"]
    assert all(cases[name]["verdict"] == "in force" for name in right), cases
    assert all(cases[name]["failures"][0].startswith("compute: ") for name in wrong), cases


COMPILED = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
def update(): optimizer.step(); scheduler.step()
update = torch.compile(update)
for _ in range(4):
    with torch.autocast("cuda", torch.bfloat16): loss = net(torch.randn(16, 64, device="cuda")).float().pow(2).mean()
    loss.backward(); update(); optimizer.zero_grad()
"""


def test_a_compiled_step_is_proven_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(COMPILED)
    config = mp_yaml(tmp_path, recipe="bf16_mixed", mixed_precision="bf16", use_cpu="false")
    run = in_fork(["--config", config, "t.py"], cwd=tmp_path, timeout=seconds(300))
    assert run.returncode == 0 and "in force at steps 1-4 (3 checks)" in run.stderr, transcript(run)


GRAPH = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), capturable=True)
inputs = torch.randn(16, 64, device="cuda")
def step():
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False): loss = net(inputs).float().pow(2).mean()
    loss.backward()
side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3): step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): step()
for _ in range(3): graph.replay(); optimizer.step()
print("finished")
"""


def test_a_backward_pass_is_captured_in_a_cuda_graph(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(GRAPH)
    run = in_fork(["--config", mp_yaml(tmp_path, use_cpu="false"), "t.py"], cwd=tmp_path)
    assert run.returncode == 0 and "finished" in run.stdout, transcript(run)
