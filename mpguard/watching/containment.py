"""A failure of the watch's own code: reported once, then the run continues unwatched. It does not concern the proof."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from mpguard.core.console import print_line
from mpguard.core.errors import NotInForce
from mpguard.runtime.ranks import had_group, rank

log = logging.getLogger("mpguard")

_failed: list[str] = []


def has_failed() -> bool:
    """True if the watch has failed: it does nothing any more."""
    return bool(_failed)


def reset() -> None:
    """Forget a failure: a watch begins."""
    _failed.clear()


@contextlib.contextmanager
def contained(where: str) -> Iterator[None]:
    """End the watch if its code in the block fails, and report that once."""
    try:
        yield
    except NotInForce:
        raise
    except Exception as error:
        if has_failed():
            return
        _failed.append(where)
        log.debug("mpguard: the watch failed in %s", where, exc_info=error)
        prefix = f"rank {rank()}: " if had_group() and rank() else ""
        print_line(
            f"mpguard watch: {prefix}its own code failed in {where} ({type(error).__name__}: {error}); the run "
            'continues and is no longer watched. Please report it; logging.getLogger("mpguard") has the traceback at '
            "DEBUG"
        )
