"""Refuses code that would crash or stall libcst's parser: its stack overflows, and it cannot be interrupted."""

from __future__ import annotations

import functools
import re

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.source.text import STRING, Text, Unparsable

#: CPython itself refuses deeper brackets; libcst's parser overflows its stack near 1,265.
MOST_BRACKETS = 200
#: Links of one `.b().b()` chain: libcst is quadratic in them (300 take 0.1 s, 10,000 over 100 s).
MOST_LINKS = 300
#: The cost of all chains of a file, in squared links: some 5 s in which libcst cannot be interrupted.
MOST_SQUARES = 10_000_000
#: Terms of one expression, and branches of one `if`; libcst overflows between 3,000 and 10,000.
MOST_TERMS = 1000
#: CPython's own limit of indentation levels.
MOST_LEVELS = 100

#: The tokens that `check` counts: brackets, separators that end a chain, operators, links.
_COUNTED = lazy_pattern(
    rf"(?:{STRING}|#[^\n]*|\\\n)|([(\[{{])|([)\]}}])|([,;]|\n)|(\.(?=\s*[^\W\d]))|"
    r"(\*\*|//|[-+*/%@|&^~<>=!]+|\b(?:and|or|not|if|lambda|await)\b)",
    re.DOTALL,
)
#: All opening brackets as one, all closing ones as one, and all other bytes.
_BRACKETS = bytes.maketrans(b"[{]}", b"(())")
_NO_BRACKETS = bytes(set(range(256)) - set(b"()[]{}"))
_DEEP_INDENT = lazy_pattern(r"\n[ \t]{100}")
_CHAIN = lazy_pattern(r"(?:\.\w+(?:\([^()\n]*\))?){40}")
_OPERATORS = lazy_pattern(r"[-+*/%@|&^~<>.\[(]|\b(?:and|or|not|if|lambda)\b")
_OPERATOR_LINES = lazy_pattern(r"^[ \t]*(?:\.|[-+*/|&]|and\b|or\b)|(?:[-+*/|&\\.]|and|or)[ \t]*$", re.MULTILINE)


def check(source: Text) -> None:
    """Raise `Unparsable` at the first place that would crash or stall the parser."""
    text = source.normal
    if not suspect(text):
        return
    counts = [[0, 0]]
    branches = squares = 0
    for match in _COUNTED.finditer(text):
        kind, place = match.lastindex, match.start()
        if kind is None:
            continue
        if kind == 1:
            counts.append([0, 0])
            if len(counts) > MOST_BRACKETS + 1:
                raise _too_deep(source, f"more than {MOST_BRACKETS} nested brackets", place)
        elif kind == 2:
            if len(counts) > 1:
                counts.pop()
            counts[-1][1] += 1
        elif kind == 3:
            if match.group() != "\n" or len(counts) == 1:
                counts[-1] = [0, 0]
            if match.group() == "\n":
                branches = branches + 1 if text.startswith("elif", _indented(text, place + 1)) else branches
        elif kind == 4:
            counts[-1][1] += 1
        else:
            counts[-1][0] += len(match.group()) if len(match.group()) > 3 else 1
            counts[-1][1] = 0
        squares += counts[-1][1]  # 1 + 2 + ... + n: half the square
        if squares > MOST_SQUARES // 2:
            raise _too_deep(source, "chains that are too many and too long", place)
        if counts[-1][0] > MOST_TERMS or branches > MOST_TERMS:
            raise _too_deep(source, f"an expression of more than {MOST_TERMS} terms", place)
        if counts[-1][1] > 2 * MOST_LINKS:
            raise _too_deep(source, f"a chain of more than {MOST_LINKS} links", place)
    levels = [0]
    for match in re.finditer(r"^([ \t]*)[^\s#]", text, re.MULTILINE):
        width = len(match.group(1))
        while width < levels[-1]:
            levels.pop()
        if width > levels[-1]:
            levels.append(width)
        if len(levels) > MOST_LEVELS:
            raise _too_deep(source, f"more than {MOST_LEVELS} levels of indentation", match.end() - 1)


def _too_deep(source: Text, what: str, place: int) -> Unparsable:
    return Unparsable(f"parse limit: {what}", *source.position(source.offset(place)))


def _indented(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t"):
        place += 1
    return place


@functools.lru_cache(maxsize=128)
def suspect(text: str) -> bool:
    """True if the text may exceed a limit. This is cheap, and false for ordinary files of moderate size."""
    brackets = text.encode("utf-8", "replace").translate(_BRACKETS, _NO_BRACKETS)
    if b"(" * 61 in brackets or _DEEP_INDENT.search("\n" + text):
        return True
    if text.count("elif") > MOST_TERMS:
        return True
    found = run = 0
    for line in text.split("\n"):
        if len(line) >= 600 and len(_OPERATORS.findall(line)) > MOST_LINKS // 2:
            return True
        if line.count(".") >= 40 and _CHAIN.search(line):
            return True
        # chains over many lines: operators at line starts or ends
        code = line.strip(" \t")
        if code and (code[0] in ".-+*/|&ao" or code[-1] in ".-+*/|&\\dr") and _OPERATOR_LINES.search(line):
            found, run = found + 1, run + 1
            if found > 2 * MOST_TERMS or run > MOST_LINKS // 2:
                return True
        else:
            run = 0
    return False
