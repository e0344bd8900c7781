"""Looks again at what findings rest on, each thing once."""

# Thousands of paths are looked at here, which strings do several times faster than Path.
# ruff: noqa: PTH116

from __future__ import annotations

import os
import stat

from mpguard.core import tracked_fs
from mpguard.core.tracked_fs import Key, Seen

#: Times of change, size, inode, and the digest of the content.
Content = tuple[int, int, int, int, str]


class Again:
    """Compares what was seen with what is there. contents: files whose content a status vouches for; kept up to date.

    changed: whether something was learnt that is worth keeping.
    """

    def __init__(self, contents: dict[str, Content]) -> None:
        self.contents = contents
        self.changed = False
        self._seen: dict[Key, Seen] = {}

    def unchanged(self, what: str, where: str, seen: Seen) -> bool:
        """Whether a look shows the same again."""
        if what == "imported":
            return self._imported(where, seen)
        key = (what, where)
        if key not in self._seen:
            self._seen[key] = self._look(what, where)
        return bool(self._seen[key] == seen)

    def _look(self, what: str, where: str) -> Seen:
        if what == "file":
            return self._content(where)
        if what == "type":
            return tracked_fs.type_of(where)
        if what == "size":
            return tracked_fs.size_of(where)
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
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return None
            now = tracked_fs.status_of(status)
            known = self.contents.get(path)
            if known is not None and tuple(known[:4]) == now:
                return known[4]
            with open(path, "rb") as file:  # noqa: PTH123
                digest = tracked_fs.digest(file.read())
        except (OSError, ValueError):
            return None
        if tracked_fs.is_settled(status):
            self.contents[path] = (*now, digest)
            self.changed = True
        return digest

    def _imported(self, where: str, seen: Seen) -> bool:
        """Whether the tree still answers the same: surely where its files have not changed, else by asking it."""
        from mpguard.lint.project import reverse_imports

        top, file, name = where.split("\0")
        answer, before = seen
        now = reverse_imports.state(top)
        if now is not None and now == before:
            return True
        if reverse_imports.asked(top, file, name) is not answer:
            return False
        seen[1] = now  # the next run need not ask
        self.changed = self.changed or now is not None
        return True
