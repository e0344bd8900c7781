"""Text edits, which fixes of code, `apply` and fixes of configs share.

An `Edit` replaces a span of a file's decoded text (offsets in code points, line endings as in the file). Edits are
plain data; one function applies them, and one writes files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

#: A range of a text: its first offset, and the offset after its last.
Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, order=True)
class Edit:
    """Replace `text[start:end]` by `text`. `start == end` inserts."""

    start: int
    end: int
    text: str


class OverlappingEdits(ValueError):
    """Two edits touch the same text."""


class EditRefused(ValueError):
    """The edits cannot be applied: the text in their span belongs to something else."""


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits applied. Raises `OverlappingEdits` if two edits touch the same span.

    Equal edits are applied once (two fixes may add the same import). Insertions at one offset keep their order.
    """
    parts: list[str] = []
    position = 0
    last: Edit | None = None
    for edit in sorted(dict.fromkeys(edits), key=lambda e: (e.start, e.end)):
        if edit.start < position or (last is not None and last.end > edit.start):
            raise OverlappingEdits(f"{last} and {edit}")
        parts += (text[position : edit.start], edit.text)
        position, last = edit.end, edit
    parts.append(text[position:])
    return "".join(parts)


def compatible(edits: Iterable[Edit], more: Iterable[Edit]) -> bool:
    """True if the edits of one fix can be applied together with those of others.

    They must not overlap, and no two may insert different texts at one offset: the order of the two would decide what
    the result means (a key after the end of a YAML section belongs to the section before it).
    """
    edits, more = list(edits), list(more)
    inserted = {edit.start: edit.text for edit in edits if edit.start == edit.end}
    if any(edit.start == edit.end and inserted.get(edit.start, edit.text) != edit.text for edit in more):
        return False
    try:
        apply_edits(" " * (1 + max((e.end for e in (*edits, *more)), default=0)), (*edits, *more))
    except OverlappingEdits:
        return False
    return True


def _copy_metadata(new: Path, old: Path, status: os.stat_result) -> None:
    """Give a file the owner, group, extended attributes and mode of another, as far as that is permitted."""
    mode = stat.S_IMODE(status.st_mode)
    try:
        os.chown(new, status.st_uid, status.st_gid)
    except PermissionError:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)  # these bits were meant for another owner
        with contextlib.suppress(PermissionError):
            os.chown(new, -1, status.st_gid)
    if hasattr(os, "listxattr"):  # Linux only; access control lists are among them
        with contextlib.suppress(OSError):
            for name in os.listxattr(old):
                with contextlib.suppress(OSError):
                    os.setxattr(new, name, os.getxattr(old, name))
    new.chmod(mode)  # last, because changing the owner clears some of the bits


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content atomically: a reader sees the old content or the new one, complete.

    Mode, extended attributes and, where permitted, owner are kept. A symbolic link is kept, and its target written.
    A new file gets the mode that the umask gives. Raises `OSError`.
    """
    path = Path(os.path.realpath(path))
    try:
        before = path.stat()
    except FileNotFoundError:
        before = None
    if before is not None and not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(13, "the file is read-only", str(path))
    import tempfile  # takes 3 ms, and most runs write no file

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if before is None:
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
        else:
            _copy_metadata(temporary, path, before)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def line_starts(text: str) -> Iterator[int]:
    """Yield the offsets at which lines begin; a line ends with LF, CRLF or CR."""
    yield 0
    yield from (match.end() for match in re.finditer(r"\r\n?|\n", text))
