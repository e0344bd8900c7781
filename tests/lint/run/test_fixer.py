"""Rounds of fixes, fixes that cannot be applied, and the bytes around a fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_rules import MakeRule, found, report


def test_fixes_of_one_round_and_of_the_next(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha", becomes="beta"), make_rule("MPG902", "beta", becomes="gamma")
    result = report(tmp_path, "alpha = beta\n", *made, fix="safe")
    assert result.fix_result is not None
    assert (result.fix_result.after, result.fix_result.fixes, found(result)) == (b"gamma = gamma\n", 3, [])


def test_unsafe_fixes_only_when_asked(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha", becomes="beta", safe=False)
    result = report(tmp_path, "alpha\n", made, fix="safe")
    assert (result.fix_result, found(result)) == (None, [("MPG901", 1)])
    result = report(tmp_path, "alpha\n", made, fix="unsafe")
    assert result.fix_result is not None and result.fix_result.after == b"beta\n"


def test_rules_that_undo_each_other_end(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha", becomes="beta"), make_rule("MPG902", "beta", becomes="alpha")
    result = report(tmp_path, "alpha\n", *made, fix="safe")
    assert result.fix_result is not None
    assert "rounds of fixes there are still more" in result.fix_result.problems[0]


def test_a_fix_that_breaks_the_file_is_not_applied_and_the_others_are(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha", becomes="(("), make_rule("MPG902", "beta", becomes="gamma")
    result = report(tmp_path, "beta\nalpha\nbeta\n", *made, fix="safe")
    assert result.fix_result is not None
    assert result.fix_result.after == b"gamma\nalpha\ngamma\n"
    assert result.fix_result.problems == (
        "2:1: the fix of MPG901 (Write (() was not applied: the result does not parse",
    )
    assert found(result) == [("MPG901", 2)]


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfalpha = 1\nx = 1\n",
        b"# coding: latin-1\nx = '\xe9'\nalpha = 1\n",
        b"x = 1\r\nalpha = 2\r\ny = 3\r\n",
        b"x = 1\ralpha = 2\r",
        b"x = 1\r\nalpha = 2\ny = 3\r",
        b"x = 1\n\x0calpha = 2",
    ],
    ids=["bom", "latin-1", "crlf", "cr", "mixed", "form feed, no final newline"],
)
def test_bytes_around_a_fix_are_kept(tmp_path: Path, make_rule: MakeRule, data: bytes) -> None:
    result = report(tmp_path, data, make_rule("MPG901", "alpha", becomes="beta"), fix="safe")
    assert result.fix_result is not None
    assert result.fix_result.after == data.replace(b"alpha", b"beta")


def test_new_lines_end_as_the_others_do(tmp_path: Path, make_rule: MakeRule) -> None:
    result = report(tmp_path, b"x = 1\r\nalpha\r\n", make_rule("MPG901", "alpha", becomes="y = 1\nbeta"), fix="safe")
    assert result.fix_result is not None
    assert result.fix_result.after == b"x = 1\r\ny = 1\r\nbeta\r\n"


def test_a_fix_that_the_encoding_cannot_hold(tmp_path: Path, make_rule: MakeRule) -> None:
    result = report(tmp_path, b"# coding: latin-1\nalpha\n", make_rule("MPG901", "alpha", becomes="'π'"), fix="safe")
    assert result.fix_result is not None
    assert result.fix_result.after == result.fix_result.before
    assert "the file's encoding (latin-1) cannot hold 'π'" in result.fix_result.problems[0]
