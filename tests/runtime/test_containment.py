"""A failure of mpguard's own code: reported once, the row is not observed, and the training continues."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import in_fork, mp_yaml, proof, transcript

from mpguard.core.errors import NotInForce
from mpguard.runtime import containment

#: Breaks functions of the proof, then runs the script: a program for `in_fork`.
BROKEN = {
    "tf32": ("mpguard.runtime.proof.tf32", "read"),
    "models": ("mpguard.runtime.proof.observe", "models_of"),
    "compare": ("mpguard.runtime.proof.checks.gradients", "reduction"),
    "consensus": ("mpguard.runtime.proof.consensus", "Round"),
    "backward": ("mpguard.runtime.proof.recorder", "Recorder.record_backward"),
    "exit": ("mpguard.runtime.run_end", "finalize"),
}


def run_broken(words: list[str]) -> int:
    """Run `python -m mpguard.run WORDS` with a part of the proof that raises KeyError. words: the part, then WORDS."""
    import importlib

    from mpguard import run
    from mpguard.runtime.proof import checks

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("broken")

    module, path = BROKEN[words[0]]
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    former = getattr(owner, name)
    setattr(owner, name, broken)
    for row, function in checks.CHECKS.items():
        if function is former:
            checks.CHECKS[row] = broken
    return run.main(words[1:])


@pytest.mark.parametrize("part", BROKEN)
def test_the_training_continues(tmp_path: Path, part: str) -> None:
    config = mp_yaml(tmp_path)
    # The watch would have found the models before the proof needs them.
    words = [part, "--config", config, "--watch", "off", "--proof-json", "proof.json", PROGRAMS / "scripted.py"]
    run = in_fork([*words, "--steps", 3], cwd=tmp_path, program=run_broken)
    assert run.returncode == 0 and "finished" in run.stdout, transcript(run)
    assert run.stderr.count("mpguard: its own code failed in ") == 1, transcript(run)
    assert "KeyError: 'broken'" in run.stderr and "Traceback" not in run.stderr
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == ("in force" if part in ("tf32", "exit") else "not proven")
    if part in ("models", "compare"):
        row = "compute" if part == "models" else "reduction"
        assert made["rows"][row]["found"] == "not observed"
        assert made["observed"]["errors"][row] == "KeyError: 'broken'"


@pytest.fixture
def forgetting() -> Iterator[None]:
    """A failure in this process must not change what later tests of it see."""
    yield
    containment.PROOF.forget()


@pytest.mark.usefixtures("forgetting")
def test_the_traceback_is_logged(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.DEBUG, logger="mpguard"):
        for _ in range(2):
            with containment.contained("a test"):
                raise KeyError("broken")
    assert caplog.text.count("Traceback") == 1 and capsys.readouterr().err.count("failed in a test") == 1
    with pytest.raises(NotInForce), containment.contained("a test"):
        raise NotInForce("passes")


def wrapped(original: Any, before: Any = None, after: Any = None) -> Any:
    def wrap(function: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            if before:
                raise before
            result = function(*args)
            if after:
                raise after
            return result

        return wrapper

    return containment.contain(f"a wrapper {before!r} {after!r}", original, wrap)


def test_a_wrapper_that_fails_leaves_the_original() -> None:
    calls: list[int] = []

    def original(value: int) -> int:
        calls.append(value)
        return value + 1 if value < 3 else original_of[0](value - 1)

    original_of = [original]
    for failure in ({"before": KeyError()}, {"after": KeyError()}, {}):
        original_of[0] = wrapped(original, **failure)
        assert original_of[0](4) == 3 and calls == [4, 3, 2], failure
        calls.clear()


def test_errors_of_the_original_and_decisions_pass() -> None:
    def original() -> None:
        raise ValueError("of the library")

    with pytest.raises(ValueError, match="of the library"):
        wrapped(original)()
    with pytest.raises(NotInForce):
        wrapped(lambda: None, before=NotInForce("decided"))()


def test_a_traceback_has_no_frames_of_wrappers() -> None:
    def original() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("of the library") from error

    with pytest.raises(ValueError, match="of the library") as raised:
        wrapped(wrapped(original))()
    before = "".join(traceback.format_exception(raised.value))
    after = "".join(traceback.format_exception(containment.without_wrappers(raised.value)))
    own = "mpguard/runtime/containment.py"
    assert own in before and own not in after
    assert "in original" in after and "KeyError: 'first'" in after
