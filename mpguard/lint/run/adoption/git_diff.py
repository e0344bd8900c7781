"""The lines that have changed since a revision, according to git, with uncommitted changes and new files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mpguard.core.errors import ConfigError, near
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.model.finding import Finding

#: Exactly the changed lines, in "binary" files too, whatever git's settings and .gitattributes are.
_EXACTLY = (
    "--unified=0", "--inter-hunk-context=0", "--text", "--no-color", "--no-ext-diff", "--no-textconv", "--find-renames",
    "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short", "--ignore-submodules=none",
)  # fmt: skip
_SUBMODULE = b"160000 "
_COMMIT = lazy_pattern(rb"[0-9a-f]{40,64}")
_HUNK = lazy_pattern(rb"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Changes:
    """The lines of the working tree that differ from `revision`. Raises `ConfigError`.

    `main...` is the commit at which the branch left `main`. All lines of a file that git does not track are new. A
    file of a submodule has changed if the submodule has.
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
        """True if the lines of a finding have changed, or those of its second places."""
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
        """True if lines of a file have changed. notebook: they are a cell's lines, so any change of the file counts."""
        real = os.path.realpath((path.rpartition(":cell ")[0] or path) if notebook else path)
        if real not in self._changed:
            submodule = next((top for top in self._submodules if real.startswith(top + os.sep)), None)
            return submodule in self._changed if submodule is not None else real not in self._tracked
        return notebook or any(low <= last and first <= high for low, high in self._changed[real])

    def _commit(self, revision: str) -> str:
        name = revision.removesuffix("...")
        found = _line(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if found is None or not _COMMIT.fullmatch(found):  # `^main` excludes what is in main
            names = _git(self.root, "for-each-ref", "--format=%(refname:short)").decode(errors="replace").split()
            nearest = " or ".join(f"`{each}`" for each in near(name, names))
            clause = f"; did you mean {nearest}?" if nearest else ""
            raise ConfigError(
                f"--diff-from {revision}: git has no such revision in {self.root}{clause}{self._shallow()}"
            )
        if name == revision:
            return found.decode()
        base = _line(self.root, "merge-base", found.decode(), "HEAD")
        if base is None:
            raise ConfigError(
                f"--diff-from {revision}: git finds no commit that `{name}` and HEAD have in common{self._shallow()}"
            )
        return base.decode()

    def _shallow(self) -> str:
        if _line(self.root, "rev-parse", "--is-shallow-repository") != b"true":
            return ""
        return "; this clone is shallow: `git fetch --unshallow`, or `fetch-depth: 0` of actions/checkout, completes it"

    def _real(self, path: str) -> str:
        return os.path.realpath(self.root / path)


def _git(folder: Path, *arguments: str) -> bytes:
    """Return the output of a git command. Raises `ConfigError` if it fails."""
    done = _run(folder, *arguments)
    if done.returncode != 0:
        # git's own message has the remedy, for example for a repository of another owner.
        message = done.stderr.decode(errors="replace").strip() or f"`git {arguments[0]}` failed"
        if "not a git repository" in message:
            raise ConfigError(
                f"--diff-from: {folder} is not in a git repository; run it in one, or leave the option out"
            )
        raise ConfigError(f"--diff-from: git failed in {folder}: {' '.join(message.split())}")
    return done.stdout


def _line(folder: Path, *arguments: str) -> bytes | None:
    """Return the line that git prints; None if it fails."""
    done = _run(folder, *arguments)
    return done.stdout.strip() if done.returncode == 0 else None


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(folder), "-c", "core.quotePath=false", "-c", "core.fsmonitor=false", *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # another process may be committing
    try:
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, check=False)
    except FileNotFoundError:
        raise ConfigError("--diff-from needs git, which is not installed") from None


def _hunks(diff: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return path -> first and last line of each change, from the output of `git diff --unified=0`."""
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
            for _ in range(old + new):  # a line of a file may look like a header
                if next(lines, b"").startswith(b"\\"):
                    next(lines, b"")
    return found


def _name(written: bytes) -> str:
    """Return a path from a diff: after `b/`, and in quotes if it has characters that would end it."""
    text = written.removesuffix(b"\t")
    if text.startswith(b'"'):
        text = (
            text[1:-1].decode("latin-1").encode("ascii", "backslashreplace").decode("unicode_escape").encode("latin-1")
        )
    return os.fsdecode(text.removeprefix(b"b/"))
