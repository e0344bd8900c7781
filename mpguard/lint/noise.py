"""What is no code in a Python file: comments and triple-quoted strings, which are full of precision words."""

import re

#: Strings are matched first, so that a `#` in one starts no comment. A triple-quoted string goes,
#: unless it is an f-string, whose braces hold code.
_NOISE = re.compile(
    rb'(?P<keep>[fFtT][rR]?"""(?:[^\\"]|\\.|"(?!""))*"""|[fFtT][rR]?\'\'\'(?:[^\\\']|\\.|\'(?!\'\'))*\'\'\')'
    rb'|(?P<drop>"""(?:[^\\"]|\\.|"(?!""))*"""|\'\'\'(?:[^\\\']|\\.|\'(?!\'\'))*\'\'\'|#[^\r\n]*)'
    rb'|"(?:[^\\"\r\n]|\\.)*"|\'(?:[^\\\'\r\n]|\\.)*\'',
    re.DOTALL,
)


def stripped(data: bytes) -> bytes:
    """The bytes without comments and triple-quoted strings."""
    return _NOISE.sub(lambda match: b"" if match.lastgroup == "drop" else match.group(), data)
