"""The last lines of a launch: each text once, after the workers have ended."""

from __future__ import annotations

import os

import pytest

from mpguard.runtime.last_lines import VARIABLE, print_last, printed_at_the_end


def test_ranks_leave_their_lines_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with printed_at_the_end():
        for number, text in ((2, "other"), (1, "same"), (0, "same"), (0, "a second line of rank 0")):
            monkeypatch.setenv("RANK", str(number))
            print_last(text)
        print("torchrun's own lines")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "same\nother\n"
    assert VARIABLE not in os.environ


def test_without_that_launcher_a_rank_prints_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    print_last("a line")
    monkeypatch.setenv(VARIABLE, "/a/folder/that/is/gone")
    print_last("another line")
    assert capsys.readouterr().err == "a line\nanother line\n"


def test_lines_are_printed_if_the_launch_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), printed_at_the_end():
        print_last("why")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "why\n"
