"""Which lines have changed since a revision, as git says: what is not committed yet, and new files, included."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from mpguard.core.errors import ConfigError, near
from mpguard.lint.model.finding import Finding

#: Whatever git's settings and .gitattributes say: each changed line and no other, of "binary" files too.
_EXACTLY = (
    "--unified=0", "--inter-hunk-context=0", "--text", "--no-color", "--no-ext-diff", "--no-textconv", "--find-renames",
    "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short", "--ignore-submodules=none",
)  # fmt: skip
_SUBMODULE = b"160000 "
_COMMIT = re.compile(rb"[0-9a-f]{40,64}")
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Changes:
    """The lines of the working tree that differ from `revision`. Raises `ConfigError`.

    `main...` is where the branch left `main`. A file that git does not know is new in all its lines, and
    one of a submodule has changed if the submodule has.
    """

    def __init__(self, revision: str) -> None:
        self.root = Path(os.fsdecode(_git(Path.cwd(), "rev-parse", "--show-toplevel").rstrip(b"\n")))
        commit = self._commit(revision)
        diff = _git(self.root, "diff", *_EXACTLY, commit, "--")
        self._changed = {self._real(path): lines for path, lines in _hunks(diff).items()}
        self._tracked: set[str] = set()
        self._submodules: set[str] = set()
        for entry in _git(self.root, "ls-files", "--stage", "-z").split(b"\0"):
            mode, _, path = entry.partition(b"\t")
            kind = self._submodules if mode.startswith(_SUBMODULE) else self._tracked
            kind.add(self._real(os.fsdecode(path)))

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
            submodule = next((top for top in self._submodules if real.startswith(top + os.sep)), None)
            return submodule in self._changed if submodule is not None else real not in self._tracked
        return notebook or any(low <= last and first <= high for low, high in self._changed[real])

    def _commit(self, revision: str) -> str:
        name = revision.removesuffix("...")
        found = _said(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if found is None or not _COMMIT.fullmatch(found):  # `^main` is what is not in main
            names = _git(self.root, "for-each-ref", "--format=%(refname:short)").decode(errors="replace").split()
            nearest = " or ".join(f"`{each}`" for each in near(name, names))
            clause = f"; did you mean {nearest}?" if nearest else ""
            raise ConfigError(
                f"--diff-from {revision}: git knows no such revision in {self.root}{clause}{self._shallow()}"
            )
        if name == revision:
            return found.decode()
        base = _said(self.root, "merge-base", found.decode(), "HEAD")
        if base is None:
            raise ConfigError(
                f"--diff-from {revision}: git finds no commit that `{name}` and HEAD have in common{self._shallow()}"
            )
        return base.decode()

    def _shallow(self) -> str:
        if _said(self.root, "rev-parse", "--is-shallow-repository") != b"true":
            return ""
        return (
            "; this clone is shallow: `git fetch --unshallow`, or `fetch-depth: 0` of actions/checkout, gets the rest"
        )

    def _real(self, path: str) -> str:
        return os.path.realpath(self.root / path)


def _git(folder: Path, *arguments: str) -> bytes:
    """What git prints. Raises `ConfigError` where it fails."""
    done = _run(folder, *arguments)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip() or f"`git {arguments[0]}` failed"
        raise ConfigError(f"--diff-from: {' '.join(said.split())}")  # of an owner it does not trust git says what to do
    return done.stdout


def _said(folder: Path, *arguments: str) -> bytes | None:
    """The line that git prints; None where it fails."""
    done = _run(folder, *arguments)
    return done.stdout.strip() if done.returncode == 0 else None


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(folder), "-c", "core.quotePath=false", "-c", "core.fsmonitor=false", *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # somebody may be committing
    try:
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, check=False)
    except FileNotFoundError:
        raise ConfigError("--diff-from needs git, which is not installed") from None


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
