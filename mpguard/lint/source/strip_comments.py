"""What is no code in a Python file: comments and triple-quoted strings, which are full of precision words."""

import re

#: Noise, in the group, and other strings, which are matched so that a `#` in one starts no comment.
_NOISE = re.compile(
    rb'("""[^\\"]*(?:(?:\\.|"(?!""))[^\\"]*)*"""|\'\'\'[^\\\']*(?:(?:\\.|\'(?!\'\'))[^\\\']*)*\'\'\'|#[^\r\n]*)'
    rb'|"[^\\"\r\n]*(?:\\.[^\\"\r\n]*)*"|\'[^\\\'\r\n]*(?:\\.[^\\\'\r\n]*)*\'',
    re.DOTALL,
)
#: Before the quotes of an f-string, whose braces hold code: it is kept.
_FORMATTED = re.compile(rb"[fFtT][rR]?\Z")


def stripped(data: bytes) -> bytes:
    """The bytes without comments and triple-quoted strings."""
    kept: list[bytes] = []
    last = 0
    for match in _NOISE.finditer(data):
        start = match.start()
        if match.lastindex and (data[start] == ord("#") or not _FORMATTED.search(data, max(start - 2, last), start)):
            kept.append(data[last:start])
            last = match.end()
    kept.append(data[last:])
    return b"".join(kept)
