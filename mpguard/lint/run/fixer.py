"""Applies fixes in rounds, until none is left: one fix may make another possible.

The result of a round must parse. A fix that would break the file is not applied, and is reported.
"""

from __future__ import annotations

from collections.abc import Callable

from mpguard.core.text_edits import Edit, EditRefused, apply_edits, compatible
from mpguard.lint.model.result import CONFIG, SYNTAX, FileCheck, FixResult
from mpguard.lint.model.rule import Applicability, Diagnostic, Fix

#: Rules that undo each other's fixes would never end; in practice, three rounds suffice.
MOST_ROUNDS = 20

Check = Callable[[bytes], FileCheck]


def apply_fixes(
    data: bytes, checked: FileCheck, check: Check, allowed: Applicability
) -> tuple[FixResult | None, FileCheck]:
    """Apply all fixes that are allowed, and those that become possible then.

    check: checks a content; `checked` is its result for `data`. Return the result (None: nothing was fixed), and the
    check of the new content.
    """
    fixer = _Fixer(data, checked, check, allowed)
    for _ in range(MOST_ROUNDS):
        if not fixer.round():
            break
    else:
        fixer.problems.append(f"1:1: after {MOST_ROUNDS} rounds of fixes there are still more; run it again")
    if fixer.data == data and not fixer.problems:
        return None, checked
    return FixResult(data, fixer.data, fixer.fixes, tuple(fixer.problems)), fixer.checked


def fix_one(data: bytes, checked: FileCheck, check: Check, diagnostic: Diagnostic) -> FixResult | None:
    """Apply the fix of one diagnostic, safe or not; None if it has no fix. Arguments as for `apply_fixes`."""
    if diagnostic.fix is None or not diagnostic.fix.edits:
        return None
    fixer = _Fixer(data, checked, check, "unsafe")
    problem = fixer.only(diagnostic.fix)
    return FixResult(data, fixer.data, fixer.fixes, (problem,) if problem else ())


class _Fixer:
    def __init__(self, data: bytes, checked: FileCheck, check: Check, allowed: Applicability) -> None:
        self.data, self.checked, self.fixes = data, checked, 0
        self.problems: list[str] = []
        self._check, self._allowed = check, allowed
        self._refused: set[tuple[str, Fix]] = set()

    def round(self) -> bool:
        """Apply all fixes that are compatible, in the order of the file. False: there was none to apply."""
        chosen: list[tuple[Diagnostic, Fix]] = []
        edits: list[Edit] = []
        for diagnostic in sorted(self.checked.diagnostics, key=lambda each: each.span):
            fix = diagnostic.fix
            if fix is not None and self._may(diagnostic.code, fix) and compatible(edits, fix.edits):
                chosen.append((diagnostic, fix))
                edits += fix.edits
        if not chosen:
            return False
        if self._try(edits, len(chosen)) is None:
            return True
        # One of them breaks the file: try each alone, and continue with the first that does not.
        lines = self.checked.lines
        for diagnostic, fix in chosen:
            problem = self._try(list(fix.edits), 1)
            if problem is None:
                return True
            line, column = lines.position(diagnostic.span[0])
            self.problems.append(
                f"{line}:{column}: the fix of {diagnostic.code} ({fix.title}) was not applied: {problem}"
            )
            self._refused.add((diagnostic.code, fix))
        return False

    def only(self, fix: Fix) -> str | None:
        """Apply one fix, or return why it cannot be applied."""
        return self._try(list(fix.edits), 1)

    def _may(self, code: str, fix: Fix) -> bool:
        allowed = fix.applicability == "safe" or self._allowed == "unsafe"
        return allowed and bool(fix.edits) and (code, fix) not in self._refused

    def _try(self, edits: list[Edit], fixes: int) -> str | None:
        """Replace the content by the edited one, or return why it cannot be used."""
        before = self.checked
        assert before.encode is not None  # it has diagnostics with fixes, so it could be read
        ending = _ending(before.lines.text)
        edits = [Edit(e.start, e.end, _with_ending(e.text, ending)) for e in edits]
        try:
            data = before.edited(edits) if before.edited else before.encode(apply_edits(before.lines.text, edits))
        except EditRefused as error:
            return str(error)
        except UnicodeEncodeError as error:
            return f"the file's encoding ({error.encoding}) cannot hold {error.object[error.start : error.end]!r}"
        if data == self.data:
            return "it changes nothing"
        after = self._check(data)
        if after.encode is None or _broken(after) > _broken(before):
            return "the result does not parse"
        if any(each.code == CONFIG for each in after.findings) and not any(e.code == CONFIG for e in before.findings):
            return "the result is not a valid config"
        self.data, self.checked, self.fixes = data, after, self.fixes + fixes
        return None


def _broken(checked: FileCheck) -> int:
    """Return the number of syntax errors: one for a file, or for each cell of a notebook that does not parse."""
    return sum(each.code == SYNTAX for each in checked.diagnostics)


def _ending(text: str) -> str:
    """Return the most frequent line ending of a file."""
    crlf = text.count("\r\n")
    lf, cr = text.count("\n") - crlf, text.count("\r") - crlf
    return max((lf, "\n"), (crlf, "\r\n"), (cr, "\r"), key=lambda pair: pair[0])[1]


def _with_ending(text: str, ending: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", ending) if "\n" in text else text
