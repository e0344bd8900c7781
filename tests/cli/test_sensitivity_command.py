"""`mpguard sensitivity`: the command with real scripts, Ctrl-C, and command lines that cannot be used."""

from __future__ import annotations

import json
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("torchao")

from limits import seconds
from paths import PROGRAMS, REPOSITORY
from processes import command, mp_yaml, started, transcript

from mpguard.cli import main, sensitivity
from mpguard.document import mp_yaml as keys

SCRIPT = PROGRAMS / "outliers.py"
EXAMPLES = REPOSITORY / "examples"


def measured(folder: Path, *words: object, status: int = 0, **keys: Any) -> dict[str, Any]:
    config = mp_yaml(folder, **keys)
    run = command("mpguard", "sensitivity", "--config", config, "--format", "json", *words, cwd=folder,
                  timeout=seconds(200))  # fmt: skip
    assert run.returncode == status, transcript(run)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_the_proposal_is_tried_and_written(tmp_path: Path) -> None:
    """A plain loop, whose file is in the folder that it is given."""
    overrides = "{backend: torchao, first_last_layers_bf16: false, compile: false}"
    section = f"{{mpguard_recipe: bf16_with_fp8_current_scaling_mixed, mpguard_overrides: {overrides}}}  # ours"
    page, config = tmp_path / "page.html", tmp_path / "mp.yaml"
    options = ("--steps", 4, "--every", 2, "--html", page, "--write", config)
    words = (*options, SCRIPT, "--eager", "--out", "{out}")
    found = measured(tmp_path, *words, mixed_precision="fp8", fp8_config=section)
    assert found["recipe"] == "tensorwise"
    assert found["steps"] == 4
    names = [each["layer"] for each in found["layers"]]
    assert sorted(names) == ["blocks.0.down", "blocks.0.up", "blocks.1.down", "blocks.1.up", "head"]
    assert all(len(each["steps"]) == 2 for each in found["layers"])
    worst = found["layers"][0]
    assert worst["layer"] == "blocks.1.down", "its input has outliers"
    assert worst["formats"]["tensorwise"]["underflow"]["input"] > 0.1
    assert found["proposal"]["fp8_modules"] == [{"pattern": "blocks.1.down", "recipe": "none"}]
    assert found["proposal"]["proven"] is True
    assert 0 < found["overhead"]["seconds"] < found["overhead"]["total"]
    assert "blocks.1.down" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mp.yaml", "page.html"]
    assert [each.plain() for each in keys.load_policy(config).fp8_modules] == found["proposal"]["fp8_modules"]
    text = config.read_text()
    assert "# ours" in text
    assert "# mpguard sensitivity: " in text


@pytest.mark.parametrize(
    "script",
    [
        "train_fsdp2.py",
        pytest.param("train_deepspeed.py", marks=pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed")),
    ],
)
def test_two_ranks_measure_all_layers(script: str, tmp_path: Path) -> None:
    """FSDP2, whose weights are whole in a layer's forward only; ZeRO-2, whose optimizer has flat parameters.

    DDP: `test_ctrl_c_keeps_what_was_measured`.
    """
    options = ("--steps", 4, "--every", 2, "--only", "tensorwise")
    found = measured(
        tmp_path, *options, EXAMPLES / script, "--steps", 100, distributed_type="MULTI_CPU", num_processes=2
    )
    kinds = [f"blocks.{i}.{kind}" for i in range(4) for kind in ("qkv", "out", "up", "down")]
    assert sorted(each["layer"] for each in found["layers"]) == sorted([*kinds, "lm_head"])
    assert found["unmeasured"] == []
    for each in found["layers"]:
        assert {step["rank"] for step in each["steps"]} <= {0, 1}
        assert each["formats"]["tensorwise"]["output"] == pytest.approx(29, abs=5)
        assert each["formats"]["tensorwise"]["weight_gradient"] > 20
    assert {step["rank"] for each in found["layers"] for step in each["steps"]} == {0, 1}


@pytest.mark.skipif(not find_spec("transformers"), reason="Trainer")
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    """Two ranks of the Trainer: the table, JSON and the page are of what was measured by then, its cost included."""
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    words = ("sensitivity", "--config", config, "--steps", 100_000, "--scratch", "runs", "--html", "page.html",
             "--only", "tensorwise", "--format", "json", EXAMPLES / "train_trainer.py", "--steps", 100_000)  # fmt: skip
    with started("mpguard", *words, cwd=tmp_path) as process:
        lines = tmp_path / "runs" / "rank-0.jsonl"
        end = time.monotonic() + seconds(100)
        while not (lines.exists() and lines.read_text().count('"event": "step"') >= 6) and time.monotonic() < end:
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=seconds(60))
    assert process.returncode == 128 + signal.SIGINT
    found = json.loads(output)
    assert found["interrupted"] is True and found["failure"] == ""
    assert len(found["layers"]) == 17 and {step["rank"] for each in found["layers"] for step in each["steps"]} == {0, 1}
    assert 0 < found["overhead"]["seconds"] <= found["overhead"]["total"]
    assert "gpt.blocks.0.qkv" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "mp.yaml"], "no script is given"),
        (["t.py"], "no --config is given"),
        (["--config", "mp.yaml", "--steps", "0", "t.py"], "--steps 0: 1 or more is needed"),
        (["--config", "mp.yaml", "--only", "mxfp9", "t.py"], "there is no such format; did you mean"),
        (["--config", "mp.yaml", "--recipe", "rowwize", "t.py"], "there is no such recipe; did you mean"),
        (["--config", "mp.yaml", "--write", "mp.yaml", "t.py"], "mp.yaml has no FP8"),
        (["--config", "mp.yaml", "nothing.py"], "there is no such file"),
    ],
)
def test_command_lines_that_cannot_be_used(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mp_yaml(tmp_path)
    (tmp_path / "t.py").write_text("")
    assert main(["sensitivity", *words]) == 2
    assert message in capsys.readouterr().err


def test_many_entries_are_yaml_that_can_be_copied() -> None:
    entries = [{"pattern": f"*.{i}.up", "recipe": "none"} for i in range(3)]
    for count in (1, 2, 3):
        lines = ["".join(text for text, _ in line) for line in sensitivity._entries(entries[:count])]
        assert yaml.safe_load("\n".join(lines)) == {"fp8_modules": entries[:count]}
        assert len(lines) == (1 if count < 3 else 4)
