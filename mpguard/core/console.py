"""Output: messages on stderr, text and colored lines on a stream.

Names and contents of files may be printed, so control characters and CI commands in them are made harmless.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

#: What is printed in the place of characters that a terminal with the locale C does not show.
_PLAIN = str.maketrans({
    "\N{MULTIPLICATION SIGN}": "x", "\N{EN DASH}": "-",
    "±": "+-", "·": "-", "—": "-", "…": "...", "≥": ">=", "≤": "<=", "→": "->", "─": "-", "│": "|",
    "├": "|", "└": "`", "█": "#", **dict.fromkeys("▏▎▍▌▋▊▉", ""),
})  # fmt: skip
#: A line of output: pieces of text, each with a rich style (empty: none).
Line = list[tuple[str, str]]


def print_line(text: str) -> None:
    """Write one line to stderr in a single write, because several ranks may share the stream."""
    sys.stderr.write(f"{_fitted(shown(text, sys.stderr), sys.stderr)}\n")
    sys.stderr.flush()


def print_message(message: str) -> None:
    """Print `mpguard: message` to stderr; control characters are replaced, and `::` commands of CI are disarmed."""
    text = "mpguard: " + "\n".join(map(_harmless, message.split("\n")))
    print(_fitted(shown(text, sys.stderr), sys.stderr), file=sys.stderr)


def _fitted(text: str, stream: TextIO) -> str:
    """Return lines of text as a terminal's width takes them; unchanged if the stream is no terminal."""
    width = columns(stream)
    if width is None:
        return text
    return "\n".join(wrapped(line, _indent_of(line), width) for line in text.split("\n"))


def _indent_of(text: str) -> int:
    """Return how far the lines that continue a line are indented."""
    return len(text) - len(text.lstrip(" ")) + 2


def _harmless(line: str) -> str:
    """Return a line that a terminal or a CI system does not execute."""
    line = printable(line)
    return f"> {line}" if line.lstrip().startswith("::") else line


def printable(text: str) -> str:
    """Return text without control characters, which a terminal executes: names and contents of files are untrusted."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_lines(lines: Iterable[Line], stream: TextIO | None = None, *, fold: bool = True) -> None:
    """Print lines, in color where `use_color` is true; the text is the same either way.

    fold: break lines that are wider than the terminal at spaces; not for source code, whose columns are marked below.
    """
    stream = sys.stdout if stream is None else stream
    width = columns(stream) if fold else None
    if width is not None:
        lines = (part for line in lines for part in folded(line, _indent_of("".join(text for text, _ in line)), width))
    if not use_color(stream):
        write_text(shown("".join("".join(text for text, _ in line) + "\n" for line in lines), stream), stream)
        return
    from rich.text import Text

    console = rich_console(stream)
    for line in lines:
        console.print(Text.assemble(*((text, style) for text, style in line)), soft_wrap=True)


def shows_unicode(stream: TextIO) -> bool:
    """True if a stream can show all characters: not in the locale C, where Python itself would write UTF-8."""
    if _locale() in ("C", "POSIX"):
        return False
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") in ("utf8", "utf16", "utf32")


def _locale() -> str:
    """Return the locale that was asked for; Python sets LC_CTYPE itself where LANG is C (PEP 538)."""
    ctype = os.environ.get("LC_CTYPE", "")
    asked = "" if ctype in ("C.UTF-8", "C.utf8", "UTF-8") else ctype
    return os.environ.get("LC_ALL") or asked or os.environ.get("LANG") or ""


def plain(text: str) -> str:
    """Return text with ASCII in the place of the signs and lines that mpguard prints."""
    return text.translate(_PLAIN)


def shown(text: str, stream: TextIO | None = None) -> str:
    """Return text as a stream, by default stdout, can show it: plain where it shows ASCII only."""
    return text if shows_unicode(sys.stdout if stream is None else stream) else plain(text)


def columns(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal that a stream, by default stdout, is; None if it is none: any length is fine."""
    stream = sys.stdout if stream is None else stream
    return _terminal_width(stream) if stream.isatty() else None


def _terminal_width(stream: TextIO) -> int:
    """Return COLUMNS if it is set, else the width of a terminal: that of stderr where stdout is a file."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"]) or 80
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # a terminal of an editor or a notebook has no descriptor
        return 80


def folded(line: Line, indent: int, width: int | None) -> Iterator[Line]:
    """Yield a line in parts of at most `width` characters, broken at spaces; all but the first are indented."""
    part: Line = []
    used = 0
    for piece, style in line:
        for word in re.findall(r"\s*\S+|\s+$", piece) if width is not None else [piece]:
            breaks = width is not None and used > indent and used + len(word) > width
            if breaks:
                yield part
                part, used = [(" " * indent, "")], indent
            text = word.lstrip() if breaks else word
            if part and part[-1][1] == style:
                part[-1] = (part[-1][0] + text, style)
            else:
                part.append((text, style))
            used += len(text)
    yield part


def wrapped(text: str, indent: int, width: int | None) -> str:
    """Return a line of text in lines of at most `width` characters; all but the first are indented."""
    return "\n".join("".join(piece for piece, _ in part) for part in folded([(text, "")], indent, width))


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Print text unchanged: a report for another program has no colors, whatever the environment requests."""
    stream = sys.stdout if stream is None else stream
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # the text may have characters that the terminal's encoding lacks
    stream.write(text)


def use_color(stream: TextIO) -> bool:
    """True on a terminal, or with FORCE_COLOR; never with NO_COLOR. An empty variable counts as unset."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def rich_console(stream: TextIO) -> Console:
    """Return a rich console that writes colors to a stream."""
    from rich.console import Console

    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    forced = bool(os.environ.get("FORCE_COLOR"))
    return Console(
        file=stream if shows_unicode(stream) else cast("TextIO", _PlainStream(stream)),
        highlight=False, force_terminal=forced or None, color_system="standard" if forced else "auto",
    )  # fmt: skip


class _PlainStream:
    """A stream for rich where only ASCII is shown: rich draws boxes by the encoding, and `plain` replaces the rest."""

    encoding = "ascii"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def enable_line_buffering() -> None:
    """Buffer stdout by line where it is unbuffered, as in torchrun's workers, whose lines would mix in one pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
