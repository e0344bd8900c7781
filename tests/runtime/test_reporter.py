"""What a run reports: lines, overrides, the proof file, and the messages of a run that ends unproven."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

import mpguard
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.report import Proof
from mpguard.runtime.proof.verdict import Failure, FailureKind, Refusal
from mpguard.runtime.reporter import REPORTED_OPTIMIZERS, Reporter, unproven_at_exit
from mpguard.targets.inject import Change

PLAN = Plan(mpguard.recipe("bf16_mixed"))
PROOF = Proof("in force", PLAN, observed=Observed(step=3, optimizer="SGD"))


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_lines_and_overrides_are_reported_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter()
    for _ in range(2):
        reporter.print_once("a line")
        reporter.log_override("Accelerator", Change("mixed_precision", "no", "bf16"))
    assert capsys.readouterr().err == "a line\n"
    assert caplog.messages == ["Accelerator: mixed_precision: no -> bf16"]


def test_other_ranks_print_nothing_and_log_overrides_for_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("RANK", "1")
    caplog.set_level(logging.DEBUG, "mpguard")
    reporter, path = Reporter(), tmp_path / "proof.json"
    proof = dataclasses.replace(PROOF, plan=dataclasses.replace(PLAN, proof_json=str(path)))
    reporter.print_once("a line")
    reporter.report_proof(proof, first=True, repeated=False, optimizers=1)
    reporter.warn_failure(Refusal.wrong("compute: fp32"), "warn")
    reporter.report_no_training()
    reporter.log_override("Accelerator", Change("mixed_precision", "no", "bf16"))
    assert capsys.readouterr().err == "" and not path.exists()
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"first": True, "repeated": False, "optimizers": 1}, "step 3 proven in force on 1 process"),
        ({"first": True, "repeated": True, "optimizers": 1}, "proven in force again, after a checkpoint was loaded"),
        ({"first": False, "repeated": False, "optimizers": REPORTED_OPTIMIZERS}, "step 3 of SGD proven in force too"),
        ({"first": False, "repeated": False, "optimizers": REPORTED_OPTIMIZERS + 1}, ""),
    ],
)
def test_the_first_proof_is_a_table_and_later_ones_a_line(
    capsys: pytest.CaptureFixture[str], state: dict[str, bool], line: str
) -> None:
    Reporter().report_proof(PROOF, **state)  # type: ignore[arg-type]
    printed = capsys.readouterr().err
    assert printed.startswith(line) if line else printed == ""


def test_the_proof_file_is_removed_at_the_start_and_written_with_the_proof(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    plan = dataclasses.replace(PLAN, proof_json=str(path))
    Reporter().write_proof(dataclasses.replace(PROOF, plan=plan))
    assert json.loads(path.read_text())["verdict"] == "in force"
    Reporter().reset_proof_file(plan)
    assert not path.exists()
    unwritable = dataclasses.replace(PLAN, proof_json=str(tmp_path / "nowhere" / "proof.json"))
    for report in (
        lambda: Reporter().reset_proof_file(unwritable),
        lambda: Reporter().write_proof(dataclasses.replace(PROOF, plan=unwritable)),
    ):
        with pytest.raises(mpguard.ConfigError, match=r"proof\.json: the proof cannot be written: No such file"):
            report()


def test_nothing_is_removed_that_is_no_proof(tmp_path: Path) -> None:
    """A device was removed; a mistyped name must not cost a file."""
    script = tmp_path / "train.py"
    script.write_text("print('mine')")
    with pytest.raises(
        mpguard.ConfigError, match=r"train\.py: the proof cannot be written: the file exists, and is not"
    ):
        Reporter().reset_proof_file(dataclasses.replace(PLAN, proof_json=str(script)))
    assert script.read_text() == "print('mine')"
    pipe, empty, link = tmp_path / "pipe", tmp_path / "empty.json", tmp_path / "link.json"
    os.mkfifo(pipe)
    empty.touch()
    proof = tmp_path / "proof.json"
    proof.write_text('{"verdict": "in force"}')
    link.symlink_to(proof)
    for path in (pipe, empty, link, Path(os.devnull)):
        Reporter().reset_proof_file(dataclasses.replace(PLAN, proof_json=str(path)))
        assert path.exists(), path
    assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink() and proof.read_text() == ""


def test_the_table_begins_on_a_line_of_its_own_under_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    with tqdm(total=3, file=sys.stderr) as bar:
        bar.update()
        Reporter().report_proof(PROOF, first=True, repeated=False, optimizers=1)
    before, table = capsys.readouterr().err.split("step 3 proven", 1)
    assert before.endswith("\r") and before.rstrip("\r").endswith(" ") and "bf16_mixed\n" in table


def test_a_failure_that_does_not_end_the_run_is_a_warning_or_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    unproven = Failure(FailureKind.UNPROVEN, "reason")
    with pytest.warns(mpguard.NotProven, match=r"not proven \(continuing: enforce is warn\): reason"):
        Reporter().warn_failure(Refusal((unproven,)), "warn")
    Reporter().warn_failure(Refusal.wrong("compute: fp32; asked: bf16"), "warn")
    expected = "mpguard: not in force (continuing: enforce is warn): compute: fp32; asked: bf16\n"
    assert capsys.readouterr().err == expected


def test_what_is_wrong_outlasts_what_is_not_proven_and_later_proofs(tmp_path: Path) -> None:
    reporter, path = Reporter(), tmp_path / "proof.json"
    with pytest.warns(mpguard.NotProven):
        reporter.warn_failure(Refusal((Failure(FailureKind.UNPROVEN, "reason"),)), "warn")
    assert reporter.of_run(PROOF).in_force
    reporter.warn_failure(Refusal.wrong("compute: fp32", "compute"), "warn")
    reporter.warn_failure(Refusal.wrong("weights: bf16", "weights"), "warn")
    proof = dataclasses.replace(PROOF, plan=dataclasses.replace(PLAN, proof_json=str(path)))
    reporter.report_proof(proof, first=True, repeated=False, optimizers=1)
    written = json.loads(path.read_text())
    assert written["verdict"] == "not in force" and written["failures"] == ["compute: fp32"]
    assert [each["verdict"] for each in written["optimizers"]] == ["in force"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "not proven: the run computed gradients and ended before an optimizer step was applied; what"),
        ({"enforced": False}, "not proven: enforce is off; what"),
        ({"trained": False}, "not proven: no training was seen in this process; what"),
        ({"without_gradients": True}, "not proven: an optimizer was stepped, but none of its parameters had gradients"),
        ({"without_gradients": True, "why_none": "no pass"}, "none of its parameters had gradients: no pass; what was"),
        ({"without_optimizer": True}, "without an optimizer of torch, and its weights no longer exist"),
        ({"skipped": 2}, "applied (2 steps were skipped); what was in force could not be observed"),
        (
            {"skipped": 2, "first_scale": 2.0**32},
            "the loss scale began at 4.29497e+09 and is halved by a skip",
        ),
        (
            {"skipped": 2, "first_scale": 8.0, "hysteresis": 2},
            "8 and is halved by each skip from number 2 on",
        ),
        ({"status": 3}, "could not be observed; the script ended with status 3"),
    ],
)
def test_the_message_of_a_run_that_ends_unproven(changes: dict[str, Any], message: str) -> None:
    state = {"enforced": True, "trained": True, "without_gradients": False, "without_optimizer": False, **changes}
    state = {"skipped": 0, "status": 0, **state}
    assert message in str(unproven_at_exit(**state))
