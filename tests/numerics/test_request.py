"""The request: what a config means, and why nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from processes import mp_yaml
from sensitivity_lines import layers

from mpguard.core.errors import ConfigError
from mpguard.numerics import request as requests
from mpguard.numerics.request import NotMeasured, SensitivityRequest
from mpguard.tune import trial


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def make(configured: str = "bf16_mixed", **fields: Any) -> SensitivityRequest:
        config = mp_yaml(tmp_path, recipe=configured)
        return SensitivityRequest(config, ["--config", str(config), "train.py"], 0, **fields)

    return make


def test_a_config_without_fp8_is_sorted_by_tensorwise(made: Any) -> None:
    chosen = requests.plan(made())
    assert (chosen.recipe, chosen.is_configured, chosen.bound) == ("tensorwise", False, 20.0)
    assert chosen.policy.fp8 == "hybrid"
    assert chosen.overrides == {"compile": False}


def test_an_fp8_config_runs_without_fp8(made: Any) -> None:
    pytest.importorskip("torchao")
    chosen = requests.plan(made("bf16_with_fp8_rowwise_mixed", bound=25.0))
    assert (chosen.recipe, chosen.is_configured, chosen.bound) == ("rowwise", True, 25.0)
    assert chosen.overrides["fp8"] is None


def test_the_formats_of_the_recipe_are_always_measured(made: Any) -> None:
    assert requests.plan(made(formats=["mxfp8"], recipe="nvfp4")).formats == ("bf16", "mxfp8", "nvfp4")


def test_several_machines_are_refused(made: Any, tmp_path: Path) -> None:
    request = made()
    mp_yaml(tmp_path, num_machines=2)
    with pytest.raises(ConfigError, match="sensitivity starts and ends the processes of one machine"):
        requests.plan(request)


@pytest.mark.parametrize(
    ("status", "log", "lines", "message"),
    [
        (1, "Traceback\nRuntimeError: as asked\n", [], "exit status 1: RuntimeError: as asked"),
        (2, "mpguard: train.py: cannot be read\n", [], "train.py: cannot be read"),
        (None, "", [], "ended after 900 s \\(--time-limit\\), and no layer was measured"),
        (0, "", [], "the script ended without an optimizer step after a backward pass through a Linear layer"),
        (
            0,
            "",
            [layers("a"), {"event": "step", "step": 1, "seconds": 0.0, "total": 0.0}],
            "ended after 1 optimizer steps; 2 or more are needed",
        ),
        (0, "", [layers("a", unmeasured={"a": "is quantized"})], "no Linear layer can be measured: is quantized"),
    ],
)
def test_why_nothing_was_measured(
    status: int | None, log: str, lines: list[Any], message: str, made: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """The script's own run is replaced: only what it leaves is read."""

    def run(_command: Any, _environment: Any, path: Path, _limit: float, _on_wait: Any) -> int | None:
        path.write_text(log)
        (path.parent / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return status

    monkeypatch.setattr(trial, "run_processes", run)
    request = made()
    with pytest.raises(NotMeasured, match=message):
        requests.measure(request, requests.plan(request), tmp_path / "runs", lambda _done, _total: None)


@pytest.mark.parametrize(
    ("status", "failure"), [(None, "ended after 900 s (--time-limit)"), (1, "exit status 1"), (0, "")]
)
def test_a_run_that_ends_early_keeps_what_was_measured(
    status: int | None, failure: str, made: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    error = {"tensorwise": {"snr": 25.0}}
    lines = [
        layers("a"),
        {"event": "layer", "step": 2, "rank": 0, "layer": "a", "rows": 8, "output": error},
        {"event": "step", "step": 2, "seconds": 1.5, "total": 3.0},
    ]

    def run(_command: Any, _environment: Any, path: Path, _limit: float, _on_wait: Any) -> int | None:
        path.write_text("")
        (path.parent / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return status

    monkeypatch.setattr(trial, "run_processes", run)
    request = made()
    report = requests.measure(request, requests.plan(request), tmp_path / "runs", lambda _done, _total: None)
    assert report.steps == 1 and report.failure.startswith(failure) and bool(report.failure) == bool(failure)
    assert (report.seconds, report.total) == (1.5, 3.0), "the cost is known without the end of the run"
