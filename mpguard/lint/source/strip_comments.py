"""Removes comments and triple-quoted strings from Python code: they are full of precision words."""

import re

#: Comments and triple-quoted strings, in the group; and other strings, so that a `#` in one starts no comment.
_COMMENT_OR_STRING = re.compile(
    rb'("""[^\\"]*(?:(?:\\.|"(?!""))[^\\"]*)*"""|\'\'\'[^\\\']*(?:(?:\\.|\'(?!\'\'))[^\\\']*)*\'\'\'|#[^\r\n]*)'
    rb'|"[^\\"\r\n]*(?:\\.[^\\"\r\n]*)*"|\'[^\\\'\r\n]*(?:\\.[^\\\'\r\n]*)*\'',
    re.DOTALL,
)
#: Precedes the quotes of an f-string, which is kept: its braces contain code.
_FORMATTED = re.compile(rb"[fFtT][rR]?\Z")


def stripped(data: bytes) -> bytes:
    """Return the bytes without comments and triple-quoted strings."""
    kept: list[bytes] = []
    last = 0
    for match in _COMMENT_OR_STRING.finditer(data):
        start = match.start()
        if match.lastindex and (data[start] == ord("#") or not _FORMATTED.search(data, max(start - 2, last), start)):
            kept.append(data[last:start])
            last = match.end()
    kept.append(data[last:])
    return b"".join(kept)
