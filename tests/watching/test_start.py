"""The watch of a run: its level from mp.yaml, and a file that cannot be written. For the flag see test_launcher.py."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from paths import PROGRAMS
from processes import in_fork, mp_yaml, transcript

import mpguard

SCRIPT = PROGRAMS / "scripted.py"


def watched(folder: Path, level: str, file: str) -> tuple[int, str]:
    config = mp_yaml(folder, fp8_config=f"{{mpguard_recipe: bf16_mixed, mpguard_watch: {level}}}")
    run = in_fork(["--config", config, "--watch-json", file, SCRIPT, "--always-inf", "--scaler", 1024], cwd=folder)
    return run.returncode, transcript(run)


def test_the_level_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my own\n")
    for level in ("full", "off"):
        status, printed = watched(tmp_path, level, f"{level}.jsonl")
        assert "not proven" in printed, "all steps were skipped"
        assert (printed.count("the step was skipped: overflow") == 3) is (level == "full"), printed
    assert not (tmp_path / "off.jsonl").exists()
    head, *lines = map(json.loads, (tmp_path / "full.jsonl").read_text().splitlines())
    assert head["level"] == "full"
    assert [line["step"] for line in lines if line["event"] == "skipped_step"] == [1, 2, 3]
    status, printed = watched(tmp_path, "full", "notes.txt")
    assert status == 2 and "notes.txt: the watch cannot be written: the file exists, and is not one of a" in printed
    assert "finished" not in printed and (tmp_path / "notes.txt").read_text() == "my own\n"


def test_a_watch_that_has_ended_leaves_no_hooks_and_no_batch() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2, 4)
    kept = weakref.ref(batch)
    for _ in range(2):
        mpguard.watch(model)
        assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
        model(batch).sum().backward()
        optimizer.step()
        mpguard.watch(level="off")
        assert not model._forward_pre_hooks and not model._forward_hooks
    del batch
    gc.collect()
    assert kept() is None


def test_a_step_that_dynamo_traces_is_watched(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    mpguard.watch(model, jsonl=str(tmp_path / "run.jsonl"))
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        step()
        optimizer.zero_grad()
    mpguard.watch(level="off")
    torch.compiler.reset()
    _, *lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert [(line["step"], line["grad_norm"] is not None) for line in lines] == [(1, True), (2, True), (3, True)]


def test_a_compiled_output_that_the_loss_does_not_use_is_watched(tmp_path: Path) -> None:
    """Autograd calls its hooks with None: transformers' models return a cache, which has no gradient."""

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": super().forward(x), "cache": x @ self.weight.t()}

    model = Model(4, 4)
    model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpguard.watch(model, jsonl=str(tmp_path / "run.jsonl"))
    for _ in range(3):
        model(torch.randn(2, 4))["logits"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mpguard.watch(level="off")
    torch.compiler.reset()
    _, *lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert [line["event"] for line in lines] == ["step"] * 3


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_of_torchscript_is_watched_but_not_replayed(whole: bool, tmp_path: Path) -> None:
    """It takes no hooks: its NaN is found, and the event says plainly why no module is named."""
    scripted = torch.jit.script(torch.nn.Linear(4, 4))
    model = scripted if whole else torch.nn.Sequential(scripted, torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpguard.watch(model, jsonl=str(tmp_path / "run.jsonl"))
    for step in range(3):
        (model(torch.randn(2, 4)).sum() * (float("nan") if step else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    mpguard.watch(level="off")
    _, *lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    (event,) = [line for line in lines if line["event"] == "nonfinite"]
    assert event["step"] == 2 and event["module"] is None
    assert event["value"]["reason"] == "the batch cannot be replayed: it has a ScriptModule, which takes no hooks"
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3]
