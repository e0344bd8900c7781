"""The JSONL file, its bad cases, the lines on the terminal, and the settings of the watch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

import mpguard
from mpguard.core.errors import ConfigError
from mpguard.core.watch_levels import watch_level
from mpguard.document import mp_yaml, read
from mpguard.runtime.plan import Plan
from mpguard.watching import output
from mpguard.watching.output import JsonLines, Terminal, WatchEvent, plain


def test_lines_are_valid_json_with_nan(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    file = JsonLines(str(path), "light")
    file.write_step(
        {"event": "step", "step": 1, "loss": math.nan, "grad_norm": math.inf, "loss_scale": None, "ms": 1.5}
    )
    file.write_event(WatchEvent("nonfinite", 1, "blocks.2", {"low": -math.inf}, "do this").line())
    file.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    head, step, event = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert (head["event"], head["version"], head["level"], head["ranks"]) == ("run", 1, "light", 1)
    assert step == {"event": "step", "step": 1, "loss": "NaN", "grad_norm": "Infinity", "loss_scale": None, "ms": 1.5}
    assert math.isnan(float(step["loss"])) and float(step["grad_norm"]) == math.inf
    assert set(event) == {"event", "step", "rank", "module", "value", "suggestion"}
    assert event["value"] == {"low": "-Infinity"} == plain({"low": -math.inf})


def test_the_head_says_that_fp8_is_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `compare` shows no times of it: tests/compare/test_readers.py."""
    low = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao")
    for policy, emulated in ((low.replace(fp8_emulate=True), True), (low, None)):
        monkeypatch.setattr(output.guards, "current", lambda own=policy: SimpleNamespace(plan=Plan(own)))
        file = JsonLines(str(tmp_path / "run.jsonl"), "light")
        file.write_step({"event": "step", "step": 1})
        file.close()
        assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0]).get("emulated") is emulated


def test_only_a_file_of_a_watch_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for number in (1, 2):
        file = JsonLines(str(path), "light")
        file.write_step({"event": "step", "step": number})
        file.close()
    assert len(path.read_text().splitlines()) == 2, "that of the second run only"
    path.write_text("my own notes\n")
    with pytest.raises(ConfigError, match=r"run\.jsonl: .*the file exists, and is not one of a watch"):
        JsonLines(str(path), "light")
    assert path.read_text() == "my own notes\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        JsonLines(str(tmp_path / "nowhere" / "run.jsonl"), "light")


def test_many_events_are_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    for step in range(1, 101):
        terminal.report(WatchEvent("skipped_step", step, text="the step was skipped"))
        terminal.report(WatchEvent("underflow_shares", step))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("step ")[1].split(":")[0] for line in lines] == ["1", "2", "3", "4", "8", "16", "32", "64"]
    assert lines[-1].endswith("(64 times so far)")
    terminal.summarize(100, 100)
    assert capsys.readouterr().err == "mpguard watch: 100 steps: 100 skipped\n"
    Terminal().summarize(100, 0)
    assert capsys.readouterr().err == "", "nothing happened"


def test_another_rank_prints_only_what_is_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "is_reporting_rank", lambda: False)
    terminal = Terminal()
    for event, module in (("skipped_step", None), ("nonfinite", None), ("nonfinite", "blocks.2")):
        terminal.report(WatchEvent(event, 3, module, text=f"{event} {module}"))
    assert capsys.readouterr().err == "mpguard watch: step 3: nonfinite blocks.2\n"
    assert terminal.counts == {"skipped_step": 1, "nonfinite": 2}


def test_lines_stand_above_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=10) as bar:
        bar.update(3)
        Terminal().report(WatchEvent("skipped_step", 3, text="the step was skipped", suggestion="do this"))
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().err.splitlines()]
    assert "mpguard watch: step 3: the step was skipped" in lines and "  do this" in lines


@pytest.mark.parametrize(("text", "level"), [("off", "off"), ("full", "full"), ("'light'", "light")])
def test_levels_in_a_config(tmp_path: Path, text: str, level: str) -> None:
    path = tmp_path / "mp.yaml"
    path.write_text(f"fp8_config:\n  mpguard_recipe: bf16_mixed\n  mpguard_watch: {text}\n")
    assert mp_yaml.stored(read(path)).watch == level
    plan = Plan.from_config(path)
    handed = Plan.from_environment(plan.environment())
    assert plan.watch == level and handed is not None and handed.watch == level


def test_unknown_levels_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mp.yaml"
    path.write_text("fp8_config:\n  mpguard_recipe: bf16_mixed\n  mpguard_watch: lite\n")
    with pytest.raises(
        ConfigError, match=r"mp\.yaml:3: .*mpguard_watch`: watch is 'lite'; it must be one of off, light"
    ):
        mp_yaml.stored(read(path))
    with pytest.raises(ConfigError):
        watch_level(2)
