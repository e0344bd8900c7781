"""`compile_mode`: whoever compiles a model, it is in the policy's mode, and the proof says so. inductor on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from processes import in_fork, mp_yaml, proof, transcript
from torch import nn

from mpguard.nn import cuda_graphs

TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
{}
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16):
        y = net(torch.randn(4, 16))
    y.float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

#: By the line of the script that compiles: `compile` of the policy, the row, and what it is worth.
MODE = "max-autotune-no-cudagraphs"
CASES = {
    "": ("true", MODE, True),
    "net = torch.compile(net)": ("auto", MODE, True),
    "net = torch.compile(mode='default')(net)": ("auto", MODE, True),
    "net.compile()": ("auto", MODE, True),
    "net = torch.compile(net, backend='aot_eager')": ("auto", "the script's own options or compiler", False),
    "net.forward = torch.compile(net.forward, backend='aot_eager')": ("auto", "no model is compiled", None),
    "pass": ("auto", "no model is compiled", None),
}


@pytest.mark.parametrize("line", CASES)
def test_a_model_is_compiled_in_the_mode_of_the_policy(line: str, tmp_path: Path) -> None:
    compiles, expected, ok = CASES[line]
    (tmp_path / "train.py").write_text(TRAIN.format(line))
    overrides = f"{{compile: {compiles}, compile_mode: {MODE}}}"
    config = mp_yaml(tmp_path, fp8_config=f"{{mpguard_recipe: bf16_mixed, mpguard_overrides: {overrides}}}")
    run = in_fork(["--config", config, "--proof-json", "proof.json", "train.py"], cwd=tmp_path)
    row = proof(tmp_path / "proof.json")["rows"]["compile mode"]
    assert row["found"].startswith(expected) and row["ok"] is ok, transcript(run)
    assert run.returncode == (ok is False), transcript(run)


def test_gradients_are_copied_before_the_call_of_any_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a teacher without gradients too; once after a backward pass, and not what was copied before."""
    student, teacher, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    monkeypatch.setattr(cuda_graphs, "_models", {student, teacher})
    has_graph = lambda own: own.grad is not None and not hasattr(own.grad, cuda_graphs.COPIED)  # noqa: E731
    monkeypatch.setattr(cuda_graphs, "_is_in_a_graph", has_graph)
    student(torch.randn(2, 4)).sum().backward()
    monkeypatch.setattr(cuda_graphs._Backward, "ended", False)  # after it: another test may have applied the patches
    found = student.weight.grad
    assert found is not None
    cuda_graphs.keep_gradients(teacher)
    assert student.weight.grad is found, "no backward pass has ended"
    cuda_graphs.backward_ended()
    cuda_graphs.keep_gradients(other)
    assert student.weight.grad is found, "it has no graph"
    cuda_graphs.keep_gradients(teacher)
    copied = student.weight.grad
    assert copied is not None and copied is not found and torch.equal(copied, found)
    student(torch.randn(2, 4)).sum().backward()
    cuda_graphs.backward_ended()
    cuda_graphs.keep_gradients(student)
    assert student.weight.grad is copied, "passes add to a copy in place"
