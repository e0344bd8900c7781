"""The lines of a refusal: what they begin with follows from the kinds of its failures."""

from __future__ import annotations

import pickle

import pytest

import mpguard
from mpguard.policy import hardware
from mpguard.runtime.messages import failure_message, header, not_in_force
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.verdict import Failure, FailureKind, Refusal
from mpguard.runtime.reporter import Reporter

WRONG = Failure(FailureKind.WRONG, "compute: fp32; asked: bf16", "compute", (1,))
UNPROVEN = Failure(FailureKind.UNPROVEN, "compute could not be observed; asked: bf16", "compute", (0,))

#: A text decides nothing: this failure is wrong.
MISLEADING = Failure(FailureKind.WRONG, "not proven: is the name of a module; asked: bf16", "compute")


@pytest.mark.parametrize(
    ("failures", "line"),
    [
        ((WRONG,), "not in force: rank 1: compute: fp32; asked: bf16"),
        ((UNPROVEN,), "not proven: rank 0: compute could not be observed; asked: bf16"),
        ((UNPROVEN, WRONG), "not in force: rank 1: compute: fp32; asked: bf16\n  rank 0: not proven: compute could"),
        ((WRONG, UNPROVEN), "not in force: rank 1: compute: fp32; asked: bf16\n  rank 0: not proven: compute could"),
        ((MISLEADING,), "not in force: not proven: is the name"),
    ],
)
def test_the_exit_line_begins_with_the_verdict(failures: tuple[Failure, ...], line: str) -> None:
    error = not_in_force(Refusal(failures))
    assert failure_message(error).startswith(line)
    assert failure_message(error).endswith("(use --enforce warn to continue)")
    assert failure_message(pickle.loads(pickle.dumps(error))) == failure_message(error)


def test_enforce_warn_prints_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    ten = Refusal((Failure(FailureKind.UNPROVEN, "compute could not be observed", "compute", tuple(range(10))),))
    with pytest.warns(
        mpguard.NotProven, match=r"^not proven \(continuing: enforce is warn\): rank 0, 1, .* and 2 more"
    ):
        Reporter().warn_failure(ten, "warn")
    Reporter().warn_failure(Refusal((UNPROVEN, WRONG)), "warn")
    printed = capsys.readouterr().err
    assert printed.startswith("mpguard: not in force (continuing: enforce is warn): rank 1: compute: fp32")


@pytest.mark.parametrize("width", [40, 60])
def test_the_header_fits_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpguard.runtime.messages.columns", lambda stream: width)
    plan = Plan(mpguard.recipe("bf16_with_fp8_current_scaling_mixed"), strategy="fsdp2", processes=8)
    first, *more = header(plan).splitlines()
    assert first.startswith("mpguard ") and more
    assert all(len(line) <= max(width, 46) for line in (first, *more))  # the name of the recipe is one word
    assert all(line.startswith("  ") for line in more)


def test_the_header_names_an_accelerator_that_is_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(hardware, "detect", hardware.Hardware)
    plan = Plan(mpguard.recipe("bf16_mixed"), strategy="ddp", processes=2)
    assert header(plan).endswith(" · no GPU")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for kind, name in (("xpu", "2 x Intel GPU"), ("mps", "2 x Apple GPU"), ("privateuseone", "type privateuseone")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind: torch.device(kind))
        assert header(plan).endswith(name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert header(plan).endswith(" · no GPU")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert header(plan).endswith(" · 2 x AMD GPU")
