"""Compares the dependencies of findings with the file system, each one once per run."""

from __future__ import annotations

import os
import stat

from mpguard.core import tracked_fs
from mpguard.core.tracked_fs import Key, Seen
from mpguard.lint.project import tree_state

#: Times of change, size, inode, and the digest of the content.
Content = tuple[int, int, int, int, str]


class Dependencies:
    """Compares recorded reads with what is there now.

    contents: the digests of files by their status, so that they need not be read; kept up to date.
    changed: there is something new to store.
    """

    def __init__(self, contents: dict[str, Content]) -> None:
        self.contents = contents
        self.changed = False
        self._seen: dict[Key, Seen] = {}

    def unchanged(self, what: str, where: str, seen: Seen) -> bool:
        """True if a recorded read gives the same result now."""
        if what in ("imported", "referenced"):
            return self._answered(what, where, seen)
        key = (what, where)
        if key not in self._seen:
            self._seen[key] = self._read(what, where)
        return bool(self._seen[key] == seen)

    def _read(self, what: str, where: str) -> Seen:
        if what == "file":
            return self._content(where)
        if what == "type":
            return tracked_fs.type_in(tracked_fs.status_in_run(where))
        if what == "size":
            return tracked_fs.size_in(tracked_fs.status_in_run(where))
        if what == "names":
            folder, *endings = where.split("\0")
            return tracked_fs.names_digest(tracked_fs.names_in(folder, endings))
        if what == "real":
            return os.path.realpath(where)
        if what == "settings":
            from mpguard.core import settings

            return settings.of_folder(where).fingerprint
        if what == "launch files":
            from mpguard.lint.project import launch_lines

            return launch_lines.files_seen(where)
        return tracked_fs.CHANGED

    def _content(self, path: str) -> str | None:
        status = tracked_fs.status_in_run(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        now = tracked_fs.status_of(status)
        known = self.contents.get(path)
        if known is not None and tuple(known[:4]) == now:
            return known[4]
        try:
            with open(path, "rb") as file:  # noqa: PTH123
                digest = tracked_fs.digest(file.read())
        except (OSError, ValueError):
            return None
        if tracked_fs.is_settled(status):
            self.contents[path] = (*now, digest)
            self.changed = True
        return digest

    def _answered(self, what: str, where: str, seen: Seen) -> bool:
        """True if a question about the tree has the same answer: no file has changed, or a new search finds it."""
        top, file, question = where.split("\0")
        answer, before = seen
        now = tree_state.of_project(top) if what == "referenced" else tree_state.of_modules(top)
        if now is not None and now == before:
            return True
        from mpguard.lint.project import questions, summaries

        asked = questions if what == "referenced" else summaries
        if asked.answer(top, file, question) != answer:
            return False
        seen[1] = now  # the next run need not search
        self.changed = self.changed or now is not None
        return True
