"""Suppressions: comments that accept a finding.

    x = x.half()  # noqa: MPG101
    x = x.half()  # mpguard: ignore[MPG101] the engine runs FP16 parameters
    # mpguard: ignore[MPG101] on a line of its own: for the next statement
    # mpguard: ignore-file[MPG101]

Without codes they cover all findings of mpguard. A comment covers findings that begin on its line, and those
that end there: it may follow the bracket that closes a call. `# noqa` is shared by all linters: one without
codes is never reported as unused, and codes of other linters in it are left alone.
"""

from __future__ import annotations

import dataclasses
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Sequence

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.text_edits import Edit, Span
from mpguard.lint.model.finding import Lines
from mpguard.lint.model.result import SYNTAX
from mpguard.lint.model.retired import RETIRED, successor
from mpguard.lint.model.rule import Diagnostic, Fix
from mpguard.lint.model.selection import Rules, suggestion

UNKNOWN, UNUSED = "MPG001", "MPG002"

#: What other linters write for `ignore`; any other word after `# mpguard:` is prose.
_FOREIGN = "allow|disable|noqa|nolint|off|skip|suppress"
_JUDGED = lazy_pattern(rb"mpguard\s*:\s*(?:i|" + _FOREIGN.encode() + rb")|noqa[^\n\r]*MPG", re.I)
_CODE = r"[A-Za-z]+[0-9]+"
_NOQA = lazy_pattern(rf"#\s*noqa\b(?:\s*:\s*(?P<codes>{_CODE}(?:[\s,]+{_CODE})*))?", re.I)
_OWN = lazy_pattern(rf"#\s*mpguard\s*:\s*(?P<verb>i[\w-]*|(?:{_FOREIGN})\b)\s*(?P<list>\[(?P<codes>[^\]#]*)\])?", re.I)
_VERBS = ("ignore", "ignore-file")


def may_be_reported(data: bytes) -> bool:
    """True if a file may contain a suppression that can be unknown or unused; others only cover findings."""
    return (b"mpguard" in data or b"MPG" in data) and _JUDGED.search(data) is not None


@dataclasses.dataclass(frozen=True)
class Code:
    """A code in a suppression, in upper case, and its place."""

    code: str
    span: Span


@dataclasses.dataclass(frozen=True)
class Suppression:
    """One directive of a comment. codes None: all.

    lines: it covers findings that begin on one of these; None: the whole file.
    statement: the first line of its logical line, and its own line: it covers findings that span both.
    noqa: it is `# noqa`. span: the directive with its reason. comment: the whole comment that holds it.
    """

    noqa: bool
    lines: range | None
    statement: tuple[int, int]
    codes: tuple[Code, ...] | None
    span: Span
    comment: Span

    def covers(self, code: str, line: int, end_line: int) -> bool:
        """True if it covers a finding with this code, from one line to another."""
        first, own = self.statement
        if self.lines is not None and line not in self.lines and not first <= line <= own <= end_line:
            return False
        return self.codes is None or any(code in (each.code, successor(each.code)) for each in self.codes)


@dataclasses.dataclass(frozen=True)
class Comments:
    """The suppressions of a file, and directives with an unknown word (`# mpguard: ingore[...]`)."""

    suppressions: tuple[Suppression, ...]
    misspelt: tuple[tuple[str, Span], ...] = ()

    @property
    def retired(self) -> tuple[str, ...]:
        """Return the retired codes in them."""
        codes = {code.code for each in self.suppressions for code in each.codes or ()}
        return tuple(sorted(codes & RETIRED.keys()))


NONE = Comments(())


@dataclasses.dataclass(frozen=True)
class _Comment:
    """A comment. line: its line. alone: the line has no code. first, last: its logical line; if alone, the next one."""

    start: int
    text: str
    line: int
    alone: bool
    first: int
    last: int


def in_python(lines: Lines) -> Comments:
    """Return the suppressions of Python code, up to the first place that Python cannot tokenize."""
    if not _NOQA.search(lines.text) and not _OWN.search(lines.text):
        return NONE
    return _read(_python_comments(lines))


def in_yaml(lines: Lines) -> Comments:
    """Return the suppressions of a YAML file; none if it is not valid YAML."""
    return _read(_yaml_comments(lines))


def in_shell(lines: Lines) -> Comments:
    """Return the suppressions of a shell script, a Makefile or a workflow, by their lines alone."""
    return _read(_shell_comments(lines))


def _python_comments(lines: Lines) -> Iterator[_Comment]:
    source = iter([lines.line(number) + "\n" for number in range(1, len(lines.starts) + 1)])
    found: list[tuple[int, str, int, bool]] = []
    first = 0
    has_code = False
    try:
        for token in tokenize.generate_tokens(lambda: next(source, "")):
            line, column = token.start
            if token.type == tokenize.COMMENT:
                alone = not lines.line(line)[:column].strip()
                found.append((lines.offset(line, column + 1), token.string, line, alone and not has_code))
            elif token.type == tokenize.NEWLINE:
                yield from (_Comment(*comment, first, line) for comment in found)
                found, first, has_code = [], 0, False
            elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
                first, has_code = first or line, True
    except (tokenize.TokenError, SyntaxError):
        pass
    yield from (_Comment(*comment, comment[2], comment[2]) for comment in found)


def _yaml_comments(lines: Lines) -> Iterator[_Comment]:
    import yaml

    scalars: list[Span] = []
    try:
        for token in yaml.scan(lines.text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.ScalarToken):
                scalars.append((token.start_mark.index, token.end_mark.index))
    except yaml.YAMLError:
        return
    content = [
        n
        for n in range(1, len(lines.starts) + 1)
        if lines.line(n).strip() and not lines.line(n).lstrip().startswith("#")
    ]
    for number in range(1, len(lines.starts) + 1):
        for match in re.finditer(r"(?:^|(?<=\s))#", lines.line(number)):
            start = lines.offset(number, match.start() + 1)
            if any(low <= start < high for low, high in scalars):
                continue
            text = lines.line(number)[match.start() :]
            alone = not lines.line(number)[: match.start()].strip()
            line = next((n for n in content if n > number), number) if alone else number
            yield _Comment(start, text, number, alone, line, line)
            break


def _shell_comments(lines: Lines) -> Iterator[_Comment]:
    """Yield comments. One belongs to all lines of the command that its line ends; one alone, to the next command."""
    number, count = 1, len(lines.starts)
    waiting: list[tuple[int, str, int, bool]] = []
    while number <= count:
        first = number
        while number < count and lines.line(number).rstrip(" \t").endswith("\\"):
            number += 1
        match = re.search(r"(?:^|(?<=\s))#.*", lines.line(number))
        alone = match is not None and first == number and not lines.line(number)[: match.start()].strip()
        if match is not None:
            waiting.append((lines.offset(number, match.start() + 1), match.group(), number, alone))
        if not alone and any(lines.line(each).strip() for each in range(first, number + 1)):
            yield from (_Comment(*each, first, number) for each in waiting)
            waiting = []
        number += 1
    yield from (_Comment(*each, each[2], each[2]) for each in waiting)


def _read(comments: Iterable[_Comment]) -> Comments:
    suppressions: list[Suppression] = []
    misspelt: list[tuple[str, Span]] = []
    for comment in comments:
        span = (comment.start, comment.start + len(comment.text))
        ends = comment.alone or comment.line == comment.last
        covered = range(comment.first, comment.last + 1) if ends else range(comment.line, comment.line + 1)
        statement = (comment.first, comment.line)
        for match in _NOQA.finditer(comment.text):
            codes = _codes(match, comment.start) if match["codes"] else None
            suppressions.append(Suppression(True, covered, statement, codes, _directive(match, comment), span))
        for match in _OWN.finditer(comment.text):
            verb = match["verb"].lower()
            where = _directive(match, comment)
            if verb not in _VERBS:
                misspelt.append((verb, where))
                continue
            codes = _codes(match, comment.start) if match["list"] is not None else None
            if codes == ():
                misspelt.append((f"{verb}[]", where))
                continue
            lines = None if verb == "ignore-file" else covered
            suppressions.append(Suppression(False, lines, statement, codes, where, span))
    return Comments(tuple(suppressions), tuple(misspelt))


def _codes(match: re.Match[str], start: int) -> tuple[Code, ...]:
    base = start + match.start("codes")
    return tuple(Code(m[0].upper(), (base + m.start(), base + m.end())) for m in re.finditer(r"[\w-]+", match["codes"]))


def _directive(match: re.Match[str], comment: _Comment) -> Span:
    """Return the span from the `#` of a directive to the next `#`, or the end of the comment, with its reason."""
    following = comment.text.find("#", match.end())
    end = len(comment.text) if following < 0 else following
    return comment.start + match.start(), comment.start + end


def split(
    diagnostics: Iterable[Diagnostic], comments: Comments, lines: Lines
) -> tuple[list[Diagnostic], dict[Suppression, set[str]]]:
    """Return the diagnostics that no suppression covers, and the codes that each suppression has covered."""
    kept: list[Diagnostic] = []
    used: dict[Suppression, set[str]] = {}
    for diagnostic in diagnostics:
        line, end_line = (lines.position(offset)[0] for offset in diagnostic.span)
        covering = [each for each in comments.suppressions if each.covers(diagnostic.code, line, end_line)]
        for each in covering:
            used.setdefault(each, set()).add(diagnostic.code)
        if not covering:
            kept.append(diagnostic)
    return kept, used


def report_unused(
    comments: Comments, used: dict[Suppression, set[str]], rules: Rules, ran: Collection[str], lines: Lines
) -> Iterator[Diagnostic]:
    """Yield MPG001 for codes that no rule has, MPG002 for suppressions that cover nothing.

    ran: the codes whose rules ran to the end in this file; suppressions of other codes may be needed. Retired codes are
    not reported: they suppress their successor, and `mpguard lint` names them once for all files.
    """
    for verb, span in comments.misspelt:
        problem = "names no code" if verb.endswith("[]") else "is not a suppression"
        message = f"`mpguard: {verb}` {problem} and has no effect"
        yield Diagnostic(UNKNOWN, span, message, "write `# mpguard: ignore[CODE] reason` or `ignore-file[CODE]`")
    everything_ran = all(code in ran for code, rule in rules.items() if not rule.preview)
    for each in comments.suppressions:
        if each.codes is None:
            if not each.noqa and everything_ran and each not in used:
                yield _unused(each, (), lines)
            continue
        for code in each.codes:
            if code.code not in rules and code.code not in RETIRED and (code.code.startswith("MPG") or not each.noqa):
                yield Diagnostic(UNKNOWN, code.span, f"there is no rule `{code.code}`{suggestion(code.code, rules)}")
        unused = [
            c
            for c in each.codes
            if c.code in ran and c.code not in used.get(each, ()) and c.code not in (UNKNOWN, UNUSED, SYNTAX)
        ]
        if unused:
            yield _unused(each, unused, lines)


def _unused(each: Suppression, unused: Sequence[Code], lines: Lines) -> Diagnostic:
    kept = [code for code in each.codes or () if code not in unused]
    names = ", ".join(f"`{code.code}`" for code in unused)
    what = f"{names} {'is' if len(unused) == 1 else 'are'} not reported here" if unused else "nothing is reported here"
    span = (unused[0].span[0], unused[-1].span[1]) if kept else each.span
    if kept and each.codes:
        whole = (each.codes[0].span[0], each.codes[-1].span[1])
        edit = Edit(*whole, ", ".join(lines.text[slice(*code.span)] for code in kept))
    else:
        edit = _removal(each, lines)
    return Diagnostic(UNUSED, span, f"unused suppression: {what}", fix=Fix("Remove the suppression", "safe", (edit,)))


def _removal(each: Suppression, lines: Lines) -> Edit:
    """Remove a directive: with its line if the line has nothing else, or with the spaces before it."""
    start, end = each.span
    if end < each.comment[1]:
        return Edit(start, end, "")
    number = lines.position(start)[0]
    begin = lines.starts[number - 1]
    before = lines.text[begin:start]
    if not before.strip():
        following = lines.starts[number] if number < len(lines.starts) else len(lines.text)
        return Edit(begin, following, "")
    return Edit(start - (len(before) - len(before.rstrip())), end, "")
