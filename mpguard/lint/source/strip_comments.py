"""Removes comments and triple-quoted strings from Python code: they are full of precision words."""

import re
from typing import AnyStr

#: Comments and triple-quoted strings, in the group; and other strings, so that a `#` in one starts no comment.
_COMMENT_OR_STRING = (
    r'("""[^\\"]*(?:(?:\\.|"(?!""))[^\\"]*)*"""|\'\'\'[^\\\']*(?:(?:\\.|\'(?!\'\'))[^\\\']*)*\'\'\'|#[^\r\n]*)'
    r'|"[^\\"\r\n]*(?:\\.[^\\"\r\n]*)*"|\'[^\\\'\r\n]*(?:\\.[^\\\'\r\n]*)*\''
)
#: Precedes the quotes of an f-string, which is kept: its braces contain code.
_FORMATTED = r"[fFtT][rR]?\Z"
_IN_TEXT = re.compile(_COMMENT_OR_STRING, re.DOTALL), re.compile(_FORMATTED)
_IN_BYTES = re.compile(_COMMENT_OR_STRING.encode(), re.DOTALL), re.compile(_FORMATTED.encode())


def stripped(code: AnyStr) -> AnyStr:
    """Return the code without comments and triple-quoted strings."""
    comment_or_string, formatted = _IN_TEXT if isinstance(code, str) else _IN_BYTES
    kept: list[AnyStr] = []
    last = 0
    for match in comment_or_string.finditer(code):
        start = match.start()
        is_comment = code[start] in ("#", ord("#"))
        if match.lastindex and (is_comment or not formatted.search(code, max(start - 2, last), start)):
            kept.append(code[last:start])
            last = match.end()
    kept.append(code[last:])
    return code[:0].join(kept)
