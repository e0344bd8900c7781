"""Which lines have changed since a revision, as git says: what is not committed yet, and new files, included."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from mpguard.errors import ConfigError, near
from mpguard.lint.finding import Finding

_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Changes:
    """The lines of the working tree that differ from `revision`. Raises `ConfigError`.

    `main...` is where the branch left `main`. A file that git does not know is new in all its lines.
    """

    def __init__(self, revision: str) -> None:
        self.root = Path(os.fsdecode(_git(Path.cwd(), "rev-parse", "--show-toplevel").rstrip(b"\n")))
        commit = self._commit(revision)
        diff = ("diff", "--unified=0", "--no-color", "--no-ext-diff", "--no-textconv", "--find-renames")
        names = ("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules", commit, "--")
        self._changed = {self._real(path): lines for path, lines in _hunks(_git(self.root, *diff, *names)).items()}
        tracked = _git(self.root, "ls-files", "-z").split(b"\0")
        self._tracked = {self._real(os.fsdecode(path)) for path in tracked if path}

    def touch(self, finding: Finding) -> bool:
        """Whether what a finding marks has changed: its own lines, or a second place that makes it one."""
        if self._in(finding.path, finding.line, finding.end_line, finding.cell is not None):
            return True
        return any(
            note.start is not None
            and self._in(
                note.path or finding.path, note.start[0], (note.end or note.start)[0], ":cell " in str(note.path)
            )
            for note in finding.notes
        )

    def _in(self, path: str, first: int, last: int, notebook: bool) -> bool:
        """notebook: the lines are those of a cell, which git does not count: any change of the file is one of them."""
        real = os.path.realpath((path.rpartition(":cell ")[0] or path) if notebook else path)
        if real not in self._changed:
            return real not in self._tracked
        return notebook or any(low <= last and first <= high for low, high in self._changed[real])

    def _commit(self, revision: str) -> str:
        name = revision.removesuffix("...")
        try:
            commit = _git(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
            if name != revision:
                commit = _git(self.root, "merge-base", commit.decode().strip(), "HEAD")
        except ConfigError:
            names = _git(self.root, "for-each-ref", "--format=%(refname:short)").decode(errors="replace").split()
            clause = (
                f"; did you mean {' or '.join(f'`{each}`' for each in found)}?" if (found := near(name, names)) else ""
            )
            raise ConfigError(f"--diff-from {revision}: git knows no such revision in {self.root}{clause}") from None
        return commit.decode().strip()

    def _real(self, path: str) -> str:
        return os.path.realpath(self.root / path)


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(folder), "-c", "core.quotePath=false", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        raise ConfigError("--diff-from needs git, which is not installed") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip() or f"`git {arguments[0]}` failed"
        raise ConfigError(f"--diff-from: {said.splitlines()[0]}")
    return done.stdout


def _hunks(diff: bytes) -> dict[str, list[tuple[int, int]]]:
    """Path -> first and last of its changed lines, out of `git diff --unified=0`."""
    found: dict[str, list[tuple[int, int]]] = {}
    lines = iter(diff.split(b"\n"))
    current: list[tuple[int, int]] = []
    for line in lines:
        if line.startswith(b"+++ "):
            current = found.setdefault(_name(line[4:]), [])
        elif hunk := _HUNK.match(line):
            old, new = (int(group if group is not None else 1) for group in hunk.group(1, 3))
            if new:
                current.append((int(hunk[2]), int(hunk[2]) + new - 1))
            for _ in range(old + new):  # what a file holds may look like a header
                if next(lines, b"").startswith(b"\\"):
                    next(lines, b"")
    return found


def _name(written: bytes) -> str:
    """A path as a diff writes it: behind `b/`, in quotes where it has characters that would end it."""
    text = written.removesuffix(b"\t")
    if text.startswith(b'"'):
        text = (
            text[1:-1].decode("latin-1").encode("ascii", "backslashreplace").decode("unicode_escape").encode("latin-1")
        )
    return os.fsdecode(text.removeprefix(b"b/"))
