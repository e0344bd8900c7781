"""Regular expressions that are compiled when they are first used.

The linter has 350, of which a run uses a few dozen; compiling all took an eighth of the time of a run on one file.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


def lazy_pattern(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return what is used like `re.compile(pattern, flags)`: its methods and attributes, not `re.sub(it, ...)`.

    Raises `re.error`, for an invalid pattern, at the first use.
    """
    return cast("re.Pattern[AnyStr]", _LazyPattern(pattern, flags))


class _LazyPattern:
    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self.pattern, self._flags = pattern, flags

    def __getattr__(self, name: str) -> Any:
        """Take a method from the compiled pattern, and keep it: the next look-up does not come here."""
        found = getattr(re.compile(self.pattern, self._flags), name)
        setattr(self, name, found)
        return found
