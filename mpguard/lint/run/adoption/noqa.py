"""Adds `# noqa: CODE` comments that suppress all present findings, for projects that adopt the linter.

Each comment is tried: one that does not suppress its finding, or changes another one, is not written.
"""

from __future__ import annotations

import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mpguard.core.text_edits import Edit, EditRefused, apply_edits
from mpguard.lint.model import suppressions
from mpguard.lint.model.finding import Lines
from mpguard.lint.model.result import CONFIG, SYNTAX, FileCheck, FixResult
from mpguard.lint.source.files import MARKDOWN, Target

#: Findings about the file itself, and about suppressions.
_NOT_SUPPRESSED = (SYNTAX, CONFIG, suppressions.UNKNOWN, suppressions.UNUSED)


def has_comment(code: str, target: Target) -> bool:
    """True if a comment in such a file can suppress a code: JSON and Markdown have no comments."""
    name = target.path.lower()
    none = name.endswith(".json") if target.kind == "config" else name.endswith(MARKDOWN)
    return code not in _NOT_SUPPRESSED and not none


def add_noqa(
    data: bytes, checked: FileCheck, check: Callable[[bytes], FileCheck], target: Target
) -> tuple[FixResult | None, FileCheck]:
    """Return the content with a comment for each finding that one can suppress, and the check of it."""
    edits = _edits(checked, target)
    if not edits or checked.encode is None:
        return None, checked
    best = _checked_edits(edits, data, checked, check)
    if best is None:  # one of them changes other findings: try each alone, the last first, so that offsets stay valid
        best = data, checked
        for edit in reversed(edits):
            best = _checked_edits([edit], data, checked, check, best) or best
    after, left = best
    suppressed = len(checked.findings) - len(left.findings)
    return (FixResult(data, after, suppressed), left) if suppressed else (None, checked)


def _checked_edits(
    edits: Sequence[Edit],
    data: bytes,
    checked: FileCheck,
    check: Callable[[bytes], FileCheck],
    before: tuple[bytes, FileCheck] | None = None,
) -> tuple[bytes, FileCheck] | None:
    """Return the content with the edits and its check; None if they do more than suppress findings."""
    content, reported = before or (data, checked)
    try:
        if reported.edited:
            after = reported.edited(list(edits))
        else:
            assert reported.encode is not None
            after = reported.encode(apply_edits(reported.lines.text, edits))
    except (EditRefused, UnicodeEncodeError):
        return None
    left = check(after)
    was, now = (Counter((each.code, each.message) for each in one.findings) for one in (reported, left))
    if after == content or left.encode is None or now - was or len(left.findings) >= len(reported.findings):
        return None
    return after, left


def _edits(checked: FileCheck, target: Target) -> list[Edit]:
    """Return the comments to add, in the order of the file."""
    lines = checked.lines
    codes: dict[int, set[str]] = {}
    for diagnostic in checked.diagnostics:
        if has_comment(diagnostic.code, target):
            codes.setdefault(lines.position(diagnostic.span[0])[0], set()).add(diagnostic.code)
    if not codes:
        return []
    if target.kind in ("python", "notebook"):
        return list(_at_line_ends(codes, lines, suppressions.in_python(lines), _python_ends(lines)))
    return list(
        _at_line_ends(codes, lines, suppressions.in_yaml(lines), {})
        if target.kind == "config"
        else _on_own_lines(codes, lines)
    )


def _at_line_ends(
    codes: dict[int, set[str]], lines: Lines, comments: suppressions.Comments, ends: dict[int, int]
) -> Iterator[Edit]:
    """Yield comments at line ends, or at the statement's end if the line cannot hold one; add to a `noqa` there."""
    present = {
        lines.position(each.span[0])[0]: each.codes for each in comments.suppressions if each.noqa and each.codes
    }
    by_place: dict[int, set[str]] = {}
    for line, reported in codes.items():
        by_place.setdefault(ends.get(line, line), set()).update(reported)
    for line, reported in sorted(by_place.items()):
        if known := present.get(line):
            end = known[-1].span[1]
            missing = sorted(reported - {code.code for code in known})
            yield Edit(end, end, "".join(f", {code}" for code in missing))
        else:
            end = lines.starts[line - 1] + len(lines.line(line))
            text = lines.line(line).rstrip()
            yield Edit(lines.starts[line - 1] + len(text), end, f"  # noqa: {', '.join(sorted(reported))}")


def _on_own_lines(codes: dict[int, set[str]], lines: Lines) -> Iterator[Edit]:
    """Yield comments on lines of their own above commands: after a command, one could be inside quotes."""
    by_place: dict[int, set[str]] = {}
    for number, reported in codes.items():
        line = number
        while line > 1 and lines.line(line - 1).rstrip(" \t").endswith("\\"):
            line -= 1
        by_place.setdefault(line, set()).update(reported)
    for line, reported in sorted(by_place.items()):
        text = lines.line(line)
        # make passes lines that begin with a tab to the shell, and prints them.
        indent = text[: len(text) - len(text.lstrip())].replace("\t", "")
        start = lines.starts[line - 1]
        ending = "\r\n" if lines.text[start:].partition("\n")[0].endswith("\r") else "\n"
        yield Edit(start, start, f"{indent}# noqa: {', '.join(sorted(reported))}{ending}")


def _python_ends(lines: Lines) -> dict[int, int]:
    """Return lines that cannot hold a comment (a backslash, a string) -> the last line of their statement."""
    source = iter([lines.line(number) + "\n" for number in range(1, len(lines.starts) + 1)])
    ends: dict[int, int] = {}
    closed: set[int] = set()
    first, opened = 0, [0]
    try:
        for token in tokenize.generate_tokens(lambda: next(source, "")):
            kind = tokenize.tok_name[token.type]
            if kind in ("FSTRING_START", "TSTRING_START"):
                opened.append(token.start[0])
            elif kind == "STRING" or kind in ("FSTRING_END", "TSTRING_END"):
                start = token.start[0] if kind == "STRING" else opened.pop()
                closed.update(range(start, token.end[0]))
            if kind == "NEWLINE":
                for line in range(first or token.start[0], token.start[0]):
                    if line in closed or lines.line(line).endswith("\\"):
                        ends[line] = token.start[0]
                first = 0
            elif kind not in ("NL", "COMMENT", "INDENT", "DEDENT", "ENDMARKER"):
                first = first or token.start[0]
    except (tokenize.TokenError, SyntaxError):
        pass
    return ends
