"""Failures of mpguard's own code in a training process: reported once per place, and the training continues.

`MpguardError` is not such a failure: it is what mpguard decided, and passes. The training's own exceptions pass too.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mpguard.core.console import print_line
from mpguard.core.errors import MpguardError
from mpguard.runtime.ranks import is_reporting_rank, rank

log = logging.getLogger("mpguard")


#: Modules of which functions are called by libraries, around their own.
_WRAPPERS = (__name__, "mpguard.runtime.patches", "mpguard.watching.patches")


class _Call:
    """How the call of a wrapped function's original has ended. It keeps no exception, because that keeps frames."""

    __slots__ = ("raised", "result", "returned")

    def __init__(self) -> None:
        self.raised = self.returned = False
        self.result: Any = None


class _Contained:
    """A block whose failure is reported. A class, because a generator costs twice the time, several times a step."""

    __slots__ = ("_containment", "_where")

    def __init__(self, containment: Containment, where: str) -> None:
        self._containment, self._where = containment, where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        if kind is None or not isinstance(error, Exception) or isinstance(error, MpguardError):
            return False
        self._containment.report_own_failure(self._where, error)
        return True


class Containment:
    """What happens when the own code of one part of mpguard fails. `has_failed` and the others below are the proof's.

    part: how its messages begin. effect: what a failure means for the run. mark: the attribute of functions that this
    part has wrapped. every_rank: each rank reports its own failures; otherwise rank 0 does.
    """

    def __init__(self, part: str, effect: str, *, mark: str, every_rank: bool = False) -> None:
        self.mark = mark
        self._part, self._effect, self._every_rank = part, effect, every_rank
        self._reported: set[str] = set()

    def has_failed(self) -> bool:
        """True if this part's own code has failed in this process."""
        return bool(self._reported)

    def forget(self) -> None:
        """Forget failures: this part begins again."""
        self._reported.clear()

    def report_own_failure(self, where: str, error: Exception) -> None:
        """Report, once per place, that mpguard's own code failed; the traceback goes to the log at level debug."""
        if where in self._reported:
            return
        self._reported.add(where)
        log.debug("mpguard: its own code failed in %s", where, exc_info=error)
        if is_reporting_rank() or self._every_rank:
            on_rank = "" if is_reporting_rank() else f"rank {rank()}: "
            print_line(
                f"{self._part}: {on_rank}its own code failed in {where} ({type(error).__name__}: {error}); "
                f'{self._effect}. Please report it; logging.getLogger("mpguard") has the traceback at DEBUG'
            )

    def contained(self, where: str) -> _Contained:
        """Return a context that reports a failure of mpguard's own code in its block instead of raising it."""
        return _Contained(self, where)

    def contained_hook(self, function: Callable[..., None], where: str) -> Callable[..., None]:
        """Return a hook that calls a function, and whose failure does not reach the library that calls it."""

        def hook(*args: Any, **kwargs: Any) -> None:
            with self.contained(where):
                function(*args, **kwargs)

        return hook

    def contain(self, where: str, original: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
        """Return `wrap(original)`; where the wrapper itself fails, the original alone.

        If the wrapper fails before it has called the original, the original is called with the caller's arguments; if
        it fails afterwards, the original's result is returned.
        """
        calls = threading.local()

        @functools.wraps(original)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            call: _Call = calls.open[-1]
            try:
                call.result = original(*args, **kwargs)
            except BaseException:
                call.raised = True
                raise
            call.returned = True
            return call.result

        wrapped = wrap(tracked)

        @functools.wraps(original)
        def contained_wrapper(*args: Any, **kwargs: Any) -> Any:
            if not hasattr(calls, "open"):
                calls.open = []
            call = _Call()
            calls.open.append(call)
            try:
                return wrapped(*args, **kwargs)
            except MpguardError:
                raise
            except Exception as error:
                if call.raised:
                    raise
                self.report_own_failure(where, error)
            finally:
                calls.open.pop()
            return call.result if call.returned else original(*args, **kwargs)

        return contained_wrapper


def without_wrappers(error: BaseException) -> BaseException:
    """Remove the frames of wrappers from the traceback of an error, and of those behind it; return the error.

    What an error of mpguard's own code was raised in is kept.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__]
        each.__traceback__ = _without_wrappers(each.__traceback__)
    return error


def _without_wrappers(trace: TracebackType | None) -> TracebackType | None:
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept = [each for each in frames if not _is_wrapper(each)]
    if not kept or _is_wrapper(frames[-1]):
        return frames[0] if frames else None
    for each, following in zip(kept, [*kept[1:], None], strict=True):
        each.tb_next = following
    return kept[0]


def _is_wrapper(trace: TracebackType) -> bool:
    """True for a frame of a wrapper of a library's function."""
    return str(trace.tb_frame.f_globals.get("__name__")).startswith(_WRAPPERS)


#: Of the proof: where it has failed, what is not observed is no failure of the run.
PROOF = Containment("mpguard", 'the training continues. What depends on it is "not observed"', mark="__mpguard__")

has_failed = PROOF.has_failed
report_own_failure = PROOF.report_own_failure
contained = PROOF.contained
contained_hook = PROOF.contained_hook
contain = PROOF.contain
