"""Help texts fit the terminal; in a pipe they are as they are written."""

import importlib

import pytest

from mpguard.cli import COMMANDS, _overview
from mpguard.cli.help_texts import fitted


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_the_terminal(command: str, width: int) -> None:
    text = importlib.import_module(f"mpguard.cli.{command}").__doc__
    shown = fitted(text, width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.split() == text.split()
    assert fitted(text, None) == text


def test_the_second_column_continues_below_itself() -> None:
    lines = fitted(_overview(), 80).splitlines()
    assert max(map(len, lines)) <= 80
    start = next(number for number, line in enumerate(lines) if line.startswith("  compare "))
    assert lines[start + 1].startswith(" " * 15 + "diverged")


def test_a_paragraph_is_refilled_as_a_whole() -> None:
    assert fitted("one two three four\nfive six\n\nseven", 9) == "one two\nthree\nfour five\nsix\n\nseven"
