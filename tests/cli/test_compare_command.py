"""`mpguard compare`: table, JSON, page, names of runs, exit status, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from log_files import log, losses, write_csv, write_jsonl

from mpguard.cli import main
from mpguard.cli.compare import _sparkline


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A baseline, a run like it, one that is 2 % worse, and one whose loss became NaN."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "bf16.csv", losses(seed=0))
    write_csv(tmp_path / "fp8.csv", losses(seed=1))
    write_csv(tmp_path / "worse.csv", losses(seed=2, factor=1.02))
    more = {"ms": 20.0, "memory": 3 << 30}
    rows = [
        {"event": "step", "step": step, "loss": value if step < 900 else float("nan"), **more}
        for step, value in losses(seed=3).items()
    ]
    overflow = {"event": "overflow", "step": 900, "rank": 0, "module": "lm_head", "value": 1.0, "suggestion": "FP32"}
    write_jsonl(tmp_path / "lost.jsonl", [*rows[:899], overflow, *rows[899:]])
    return tmp_path


@pytest.mark.usefixtures("runs")
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "fp8.csv", "worse.csv", "lost.jsonl", "--baseline", "bf16.csv"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("fp8 trains like bf16 (loss ") and ", within ±0.5 %)" in out.splitlines()[0]
    assert out.splitlines()[1].startswith("worse trains worse than bf16 (loss +") and out.splitlines()[3] == ""
    lines = out.splitlines()[4:]
    assert lines[0].split()[:2] == ["run", "verdict"] and "ms/step" in lines[0] and "memory" in lines[0]
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["bf16", "baseline"], ["fp8", "same"], ["worse", "different"], ["lost", "diverged"]
    ]  # fmt: skip
    assert "20" in lines[4] and "3 GiB" in lines[4] and "1 overflow" in lines[4] and "xxx" in lines[4]
    assert "fp8: same: inside of ±0.5 % (paired steps, steps 152 to 1500)" in out
    assert "lost: diverged: loss nan at step 900" in out
    assert len({len(line) for line in lines[:2]}) <= 2 and "\x1b" not in out


@pytest.mark.usefixtures("runs")
def test_the_exit_status_is_0_if_all_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "fp8.csv", "--baseline", "bf16.csv"]) == 0
    assert main(["compare", "fp8.csv", "--baseline", "bf16.csv", "--margin", "0.01%"]) == 1
    assert "inconclusive" in capsys.readouterr().out


@pytest.mark.usefixtures("runs")
def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "fp8.csv", "lost.jsonl", "--baseline", "bf16.csv", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["version"] == 1 and found["baseline"] == "bf16"
    same, lost = found["runs"]
    assert {"name", "verdict", "difference", "interval", "method", "needed", "coverage", "spikes"} <= same.keys()
    assert same["coverage"] == 1.0 and same["sentence"].startswith("fp8 trains like bf16 (loss ")
    assert same["verdict"] == "same" and same["interval"][0] < same["difference"] < same["interval"][1]
    assert lost["verdict"] == "diverged" and lost["difference"] is None and lost["interval"] is None
    assert lost["ms_per_step"] == 20 and lost["memory_bytes"] == 3 << 30 and lost["events"] == {"overflow": 1}
    assert lost["logs"] == [{"path": "lost.jsonl", "source": "watch", "notes": []}]


def test_the_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "fp8.csv", "--baseline", "bf16.csv", "--html", "report.html"]) == 0
    assert "The page is report.html." in capsys.readouterr().out
    assert (runs / "report.html").read_text("utf-8").startswith("<!doctype html>")
    assert main(["compare", "fp8.csv", "--baseline", "bf16.csv", "--html", "no/report.html"]) == 2
    assert "no/report.html: the page cannot be written" in capsys.readouterr().err


def test_names_patterns_and_seeds(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        write_csv(runs / f"base-{seed}" / "loss.csv", losses(order=seed, seed=seed))
        write_csv(runs / f"fp8-{seed}" / "loss.csv", losses(order=seed, seed=seed + 50))
    baselines = [option for seed in range(3) for option in ("--baseline", f"bf16=base-{seed}")]
    assert main(["compare", "fp8=fp8-*", *baselines]) == 0
    out = capsys.readouterr().out
    assert "fp8: same: inside of ±0.5 % (paired runs, 3 pairs" in out and "bf16  baseline" in out
    one_by_one = [f"fp8=fp8-{seed}" for seed in range(3)]
    assert main(["compare", *one_by_one, "--baseline", "base-*", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"][0]["logs"]) == 3


def test_files_of_one_name_get_their_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        write_csv(runs / folder / "bf16.csv", losses(seed=ord(folder)))
    assert main(["compare", "a/bf16.csv", "b/bf16.csv", "--baseline", "bf16.csv", "--format", "json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["runs"]] == ["a/bf16", "b/bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp8.csv"], "no baseline: name the run to compare with, `--baseline RUN`"),
        (["--baseline", "bf16.csv"], "no run: name what to compare"),
        (["fp9.csv", "--baseline", "bf16.csv"], "fp9.csv: does not exist; did you mean `fp8.csv`?"),
        (["x=none-*", "--baseline", "bf16.csv"], "none-*: no file or folder has such a name"),
        (["bf16.csv", "--baseline", "bf16.csv"], "bf16.csv: is named twice"),
        (["fp8.csv", "--baseline", "lost.jsonl"], "lost.jsonl: the baseline has diverged: loss nan at step 900"),
        (["fp8.csv", "--baseline", "bf16.csv", "--margin", "small"], "--margin small: is not a number"),
        (["fp8.csv", "--baseline", "bf16.csv", "--margin", "0%"], "no two runs can be shown to be that equal"),
        (["fp8.csv", "--baseline", "bf16.csv", "--warmup", "100%"], "leaves no step to compare"),
        (["fp8.csv", "--baseline", "bf16.csv", "--loss", "los"], "has no column `los`; did you mean `loss`?"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_what_cannot_be_compared(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_sparkline_shows_the_course() -> None:
    assert _sparkline([8, 4, 2, 1], 24) == "█▄▂▁"
    assert _sparkline([1.0, 1.0], 24) == "▁▁" and _sparkline([2.0, float("nan")], 24) == "▁x"
    assert len(_sparkline(list(log(losses()).loss.values()), 24)) == 24


@pytest.mark.usefixtures("runs")
def test_nothing_heavy_is_imported() -> None:
    import subprocess

    code = (
        "import sys; from mpguard.cli import main; main(['compare', 'fp8.csv', '--baseline', 'bf16.csv'])\n"
        "heavy = {'torch', 'numpy', 'scipy', 'tensorboard', 'wandb', 'libcst'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
