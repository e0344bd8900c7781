"""A resumed run reports in which dtypes its checkpoint was saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from processes import in_fork, mp_yaml, transcript

from mpguard.runtime.checkpoints import Loaded

HEAD = """
import torch
def made():
    model = torch.nn.Linear(16, 16)
    return model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=FP16)
def train(model, optimizer, scaler, steps=6):
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16 if FP16 else torch.bfloat16): loss = model(torch.randn(8, 16)).sum()
        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
def halved(state): return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.bfloat16(), state)
model, optimizer, scaler = made()
"""


def resumed(folder: Path, script: str, recipe: str) -> list[str]:
    """Return the lines about what was loaded."""
    (folder / "t.py").write_text(f"FP16 = {recipe == 'fp16_mixed'}\n{HEAD}{script}\ntrain(model, optimizer, scaler)")
    own = f"{{mpguard_recipe: {recipe}, mpguard_overrides: {{initial_loss_scale: 1024.0}}}}"
    keys = {"fp8_config": own, "mixed_precision": "fp16"} if recipe == "fp16_mixed" else {}
    ended = in_fork(["--config", mp_yaml(folder, **keys), "t.py"], cwd=folder)
    assert ended.returncode == 0, transcript(ended)
    return [line.removeprefix("mpguard: resumed: ") for line in ended.stderr.splitlines() if "resumed: " in line]


LOAD = "train(model, optimizer, scaler); weights, states = model.state_dict(), optimizer.state_dict()\n"


def test_what_was_saved_and_loaded_is_reported_once(tmp_path: Path) -> None:
    script = LOAD + "model, optimizer, _ = made(); model.load_state_dict(weights); optimizer.load_state_dict(states)"
    assert resumed(tmp_path, script, "bf16_mixed") == [
        "weights saved and loaded in fp32",
        "states of AdamW saved and loaded in fp32",
    ]


def test_states_in_another_dtype_are_named(tmp_path: Path) -> None:
    script = LOAD + (
        "model, optimizer, _ = made(); model.load_state_dict(halved(weights))\n"
        "states['state'] = halved(states['state']); optimizer.load_state_dict(states)"
    )
    assert resumed(tmp_path, script, "bf16_mixed") == [
        "weights saved in bf16, loaded into fp32",
        "states of AdamW saved in bf16, loaded into fp32",
    ]


def test_the_last_line_names_weights_and_states_that_were_loaded_from_16_bits(tmp_path: Path) -> None:
    script = HEAD + (
        "train(model, optimizer, scaler)\n"
        "model.load_state_dict(halved(model.state_dict())); train(model, optimizer, scaler)\n"
        "optimizer.load_state_dict(halved(optimizer.state_dict())); train(model, optimizer, scaler)"
    )
    (tmp_path / "t.py").write_text(f"FP16 = False\n{script}")
    ended = in_fork(["--config", mp_yaml(tmp_path), "t.py"], cwd=tmp_path)
    line = "observed: what weights lost that were loaded from bf16, what states lost that were loaded from bf16"
    assert ended.returncode == 0 and ended.stderr.splitlines()[-1].endswith(line), transcript(ended)


def test_weights_that_are_restored_after_an_evaluation_are_not_narrow() -> None:
    """The average of the weights is loaded in BF16, and after it the weights themselves."""
    model, loaded = torch.nn.Linear(4, 4), Loaded()
    exact = dict(model.state_dict())
    narrow = {name: each.bfloat16() for name, each in exact.items()}
    loaded.weights(model, narrow)
    assert loaded.narrower(model) == "bf16"
    loaded.weights(model, exact)
    assert loaded.narrower(model) == "" and loaded.report(None) == []
    loaded.weights(model, exact)
    loaded.weights(model, narrow)
    assert loaded.report(None) == ["mpguard: resumed: weights saved in bf16, loaded into fp32"]
    assert loaded.narrower(model) == "", "it is forgotten"


def test_a_missing_scaler_is_named(tmp_path: Path) -> None:
    script = (
        LOAD + "model, optimizer, scaler = made(); model.load_state_dict(weights)\noptimizer.load_state_dict(states)"
    )
    lines = resumed(tmp_path, script, "fp16_mixed")
    assert lines[-1].startswith("no state of the GradScaler was loaded: its scale starts again"), lines


def test_a_loaded_scaler_and_pretrained_weights(tmp_path: Path) -> None:
    script = "model.load_state_dict(halved(model.state_dict())); " + LOAD + "saved = scaler.state_dict()\n"
    script += "model, optimizer, scaler = made(); optimizer.load_state_dict(states); scaler.load_state_dict(saved)"
    assert resumed(tmp_path, script, "fp16_mixed") == [
        "weights saved in bf16, loaded into fp32",  # before the first step; no line about weights in the same dtype
        "states of AdamW saved and loaded in fp32",
        "GradScaler loaded, scale 1024",
    ]
