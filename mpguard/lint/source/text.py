"""A file's text: decoded, with positions in it.

Spans and edits are offsets in `Text.text`, in code points; what is parsed is `Text.normal`.
"""

from __future__ import annotations

import bisect
import codecs
import re
from functools import cached_property

from mpguard.core.lazy_pattern import lazy_pattern

#: A byte of dense code takes 800 bytes of tree and facts. The largest known file written by hand has 1.1 MB (in
#: PyTorch's tests).
MOST_BYTES = 1_500_000

#: The regex of a string literal. Nested quotes in f-strings, as since Python 3.12, are not recognized.
STRING = (
    r'"""(?:[^\\"]|\\.|"(?!""))*"""|\'\'\'(?:[^\\\']|\\.|\'(?!\'\'))*\'\'\''
    r'|"(?:[^\\"\n]|\\.)*"|\'(?:[^\\\'\n]|\\.)*\''
)

_COOKIE = lazy_pattern(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK = lazy_pattern(rb"^[ \t\f]*(?:#|$)")


class Unparsable(Exception):
    """A file that cannot be read as Python; line and column (code points) start at 1.

    path: the file, if it may be another than the one being checked: imported modules are parsed on demand.
    """

    def __init__(self, message: str, line: int = 1, column: int = 1, path: str = "") -> None:
        super().__init__(message)
        self.message, self.line, self.column, self.path = message, line, column, path


class Text:
    """A file's bytes and their text.

    text: decoded, with the file's line endings, without the BOM. encoding, bom: how it was decoded.
    normal: the text with line feeds as line endings, and without form feeds.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self.data, self.path = data, path
        self.bom = data.startswith(codecs.BOM_UTF8)
        if len(data) > MOST_BYTES:
            what = f"the file has {len(data):,} bytes, the linter reads up to {MOST_BYTES:,}"
            raise Unparsable(f"parse limit: {what}; exclude it if it is generated")
        body = data[3:] if self.bom else data
        self.encoding = "utf-8" if self.bom else _cookie(body)
        self.text = _decoded(body, self.encoding)
        nul = self.text.find("\0")
        if nul >= 0:
            raise Unparsable("a NUL byte; Python source cannot hold one", *self.position(nul))
        self.normal, self._dropped = _normalised(self.text)

    def offset(self, normal: int) -> int:
        """Return the offset in `text` of an offset in the normalized text."""
        if not self._dropped:
            return normal
        low = bisect.bisect_right(self._dropped, normal, key=lambda pair: pair[0])
        return normal + (self._dropped[low - 1][1] if low else 0)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer(r"\r\n?|\n", self.text))]

    def position(self, offset: int) -> tuple[int, int]:
        """Return (line, column) of an offset in `text`; both start at 1, columns count code points."""
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1


def _cookie(body: bytes) -> str:
    """Return the encoding of a file without a BOM, by PEP 263."""
    for line in re.split(rb"\r\n?|\n", body[:1000], maxsplit=2)[:2]:
        found = _COOKIE.match(line)
        if found:
            return found.group(1).decode("ascii")
        if not _BLANK.match(line):
            break
    return "utf-8"


def _decoded(body: bytes, encoding: str) -> str:
    try:
        codec = codecs.lookup(encoding)
        if not getattr(codec, "_is_text_encoding", True):
            raise LookupError(encoding)
        return codec.decode(body, "strict")[0]
    except LookupError:
        raise Unparsable(f"unknown encoding `{encoding}` in the coding line", 1) from None
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        begin = body.rfind(b"\n", 0, error.start) + 1
        column = len(body[begin : error.start].decode(encoding, "replace")) + 1
        raise Unparsable(
            f"not {encoding}: byte 0x{body[error.start]:02x}; save the file as UTF-8, or name its encoding (PEP 263)",
            line,
            column,
        ) from None


def _normalised(text: str) -> tuple[str, list[tuple[int, int]]]:
    r"""Return the text with `\n` alone, without form feeds; and pairs (offset in it, characters dropped before it)."""
    if "\r" not in text and "\f" not in text:
        return text, []
    parts: list[str] = []
    dropped: list[tuple[int, int]] = []
    last = length = removed = 0
    for match in re.finditer(r"\r\n?|\f", text):
        part = text[last : match.start()]
        parts.append(part)
        length += len(part)
        last = match.end()
        if match.group() == "\r":
            parts.append("\n")
            length += 1
            continue
        if match.group() == "\r\n":
            parts.append("\n")
            removed += 1
            dropped.append((length + 1, removed))
            length += 1
        else:
            removed += 1
            dropped.append((length, removed))
    parts.append(text[last:])
    return "".join(parts), dropped
