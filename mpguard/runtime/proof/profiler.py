"""torch's profiler (Kineto) as the account of a step uses it: operators only, with their dtypes and shapes.

It is started and stopped in one thread. A profiler of the program has precedence.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import os
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from mpguard.runtime.ranks import is_forked_after_cuda

#: The variable with which Kineto prints no lines when it starts and stops.
QUIET = ("KINETO_LOG_LEVEL", "99")

#: The name of a range that is opened where the profiler stops. What is not finished has its end, or that of the range
#: around it that was closed; another clock does not tell, because that of the profiler is some microseconds off.
END = "mpguard::end"

#: The level of errors in torch's C++ code (`c10/util/Logging.h`).
ERROR = 2


@dataclasses.dataclass(eq=False)
class Recording:
    """A run of the profiler, in the thread that has started it.

    shapes: True if shapes and dtypes of operands are recorded. running: False from `stop`, or the thread's end, on.
    """

    thread: int
    shapes: bool = True
    running: bool = True

    @property
    def is_of_this_thread(self) -> bool:
        return self.thread == threading.get_ident()

    def stop(self, closed: Collection[str] = ()) -> tuple[list[Any], list[str], list[int]]:
        """Stop the profiler. Return its events, and the names and starts of those that are not finished.

        closed: names of ranges that were closed before: what is open in them has ended with them for the profiler.
        """
        global _running  # noqa: PLW0603  see there
        self.running = False
        record_on()
        try:
            return _disable(closed)
        finally:
            _running = None


#: The recording that runs in this process, in any thread: Kineto has one session per process, and crashes where two
#: threads stop theirs.
_running: Recording | None = None
_starting = threading.Lock()


class _Muting(threading.local):
    """True in a thread whose operators are not recorded now. whole: nor those of modules that it calls."""

    on = whole = False


_muting = _Muting()


@contextlib.contextmanager
def muted(*, whole: bool = False) -> Iterator[None]:
    """Record no operators of this thread in the block: what would be ignored later costs most when it is recorded.

    Does nothing unless a recording of mpguard runs. whole: also if a module is called, or a backward pass begins.
    """
    if _running is None or (_muting.on and not whole):
        yield
        return
    was_on = _muting.on
    _mute(True)
    _muting.whole = whole
    try:
        yield
    finally:
        _muting.whole = False
        if not was_on:
            record_on()


@contextlib.contextmanager
def only_range(name: str) -> Iterator[None]:
    """Record a range around the block, and none of the operators in it."""
    from torch._C._profiler import _RecordFunctionFast

    with _RecordFunctionFast(name), muted():
        yield


def record_on() -> None:
    """End what `muted` has begun in this thread, inside of its block, unless that is muted as a whole."""
    if _muting.on and not _muting.whole:
        _mute(False)


def _mute(on: bool) -> None:
    from torch._C._autograd import _enable_record_function

    _muting.on = on
    _enable_record_function(not on)


class _EndOfThread:
    """Stops the recording that is open when its thread ends: torch crashes if the profiler still runs then.

    Only a `threading.local` refers to it, so that it is deleted in the thread, when that has run its last statement.
    """

    def __init__(self) -> None:
        self.recording: Recording | None = None

    def __del__(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the recording of this thread, if there is one."""
        if self.recording is not None and self.recording.running:
            with contextlib.suppress(Exception):
                self.recording.stop()


_of_thread = threading.local()


def start(*, shapes: bool = True) -> Recording | None:
    """Start Kineto for the operators of this thread; None if a profiler is enabled already, or one of another thread.

    shapes: False to record no shapes and dtypes of operands, which are three quarters of what an event costs.
    """
    global _running  # noqa: PLW0603  see there
    from torch._C._autograd import _profiler_enabled

    if _profiler_enabled() or _other_profilers:
        return None
    recording = Recording(threading.get_ident(), shapes)
    with _starting:
        if _running is not None:
            return None
        _running = recording
    _stop_in_forks()
    try:
        _enable(shapes)
    except BaseException:
        _running = None
        raise
    if not hasattr(_of_thread, "end"):
        _of_thread.end = _EndOfThread()
    _of_thread.end.recording = recording
    return recording


def stop_in_this_thread() -> None:
    """Stop the recording of this thread that the account could not stop, because another thread has ended the step."""
    if hasattr(_of_thread, "end"):
        _of_thread.end.stop()


def _enable(shapes: bool) -> None:
    import torch
    from torch._C._autograd import _prepare_profiler
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

    config = ProfilerConfig(ProfilerState.KINETO, shapes, False, False, False, False, _ExperimentalConfig(), "")
    in_thread = threading.current_thread() is not threading.main_thread()
    with _quiet_kineto(), _without_stderr() if in_thread else contextlib.nullcontext():
        _prepare_profiler(config, {ProfilerActivity.MTIA if _leaves_out_cuda() else ProfilerActivity.CPU})
    with _quiet_kineto():
        torch._C._autograd._enable_profiler(config, {ProfilerActivity.CPU})
    torch.autograd.profiler._run_on_profiler_start()  # type: ignore[no-untyped-call]  # compiled code names its regions


def _disable(closed: Collection[str]) -> tuple[list[Any], list[str], list[int]]:
    import torch
    from torch.autograd.profiler import record_function

    # Not `_RecordFunctionFast`, which writes into the memory of its event when it is closed without a profiler.
    marker: Any = record_function(END)
    marker.__enter__()
    torch.autograd.profiler._run_on_profiler_stop()  # type: ignore[no-untyped-call]
    with _quiet_torch() if _leaves_out_cuda() else contextlib.nullcontext():
        result = torch._C._autograd._disable_profiler()
    marker.__exit__(None, None, None)
    events, own = list(result.events()), {END, *closed}
    ends = {event.end_ns() for event in events if event.name() in own}
    unfinished = [
        (event.name(), event.start_ns()) for event in events if event.end_ns() in ends and not event.is_async()
    ]
    if not _has_unfinished_events():
        unfinished += _without_end(result.experimental_event_tree())
    unfinished = [(name, start) for name, start in unfinished if name not in own]
    events = [event for event in events if event.name() != END]
    return events, [name for name, _ in unfinished], [start for _, start in unfinished]


def ranges_named(names: list[str]) -> list[weakref.ref[Any]]:
    """Return the `record_function` objects of the program with some names; none unless there is one for each name.

    A range that a `with` statement has opened lives until it is closed.
    """
    if not names:
        return []
    from torch.autograd.profiler import record_function

    found = [each for each in gc.get_referrers(record_function) if type(each) is record_function and each.name in names]
    return [weakref.ref(each) for each in found] if {each.name for each in found} == set(names) else []


@functools.cache
def _has_unfinished_events() -> bool:
    """True if the events of torch's profiler have those without an end; in torch 2.11 only their tree has them."""
    import torch

    return bool(torch.torch_version.TorchVersion(torch.__version__) >= "2.12")


def _without_end(level: list[Any]) -> list[tuple[str, int]]:
    """Return name and start of what was not finished: torch 2.11 leaves it out of the events, and in their tree."""
    found = []
    while level:
        opened = [node for node in level if node.end_time_ns < node.start_time_ns]
        found += [(node.name, node.start_time_ns) for node in opened]
        level = [child for node in opened for child in node.children]
    return found


def _leaves_out_cuda() -> bool:
    """True if Kineto is asked for the activities of MTIA, a device that is not there, in place of the CPU's.

    With the CPU's, it also traces the calls of the CUDA runtime, through CUPTI, which then stays attached: for the rest
    of the process each launch of a kernel takes longer (benchmarks/results/launches.json). The operators are recorded
    by torch itself in both cases. torch warns that Kineto has not seen them, so that this needs `_quiet_torch`.
    """
    import torch

    return torch.version.cuda is not None and _log_level() is not None


@functools.cache
def _log_level() -> Any:
    """Return the least level of the messages that torch's C++ code prints; None if it is not found."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so", mode=os.RTLD_NOLOAD), "FLAGS_caffe2_log_level")
    except (AttributeError, OSError, ValueError):
        return None


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Let torch's C++ code print errors, but no warnings."""
    level = _log_level()
    usual = level.value
    level.value = max(usual, ERROR)
    try:
        yield
    finally:
        level.value = usual


@contextlib.contextmanager
def _quiet_kineto() -> Any:
    """Set Kineto's log level for its start, unless the user has set it."""
    name, level = QUIET
    if name in os.environ:
        yield
        return
    os.environ[name] = level
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop what is written to stderr: in a thread, Kineto prints an error that has no effect on what is recorded."""
    errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(errors, 2)
        os.close(errors)
        os.close(nowhere)


#: Profilers of the program that are prepared or running.
_other_profilers: set[int] = set()


def is_prepared_by_program() -> bool:
    """True if a profiler of the program is prepared or running."""
    return bool(_other_profilers)


def other_profiler_starts(profiler: Any) -> None:
    """Record that a profiler of the program is prepared."""
    _other_profilers.add(id(profiler))


def other_profiler_ends(profiler: Any) -> None:
    """Record that a profiler of the program has ended."""
    _other_profilers.discard(id(profiler))


_forks_are_safe = False


def _stop_in_forks() -> None:
    """Let forked processes, such as those that load data, not record: nobody would collect their events."""
    global _forks_are_safe  # noqa: PLW0603  registered once per process
    if not _forks_are_safe:
        _forks_are_safe = True
        os.register_at_fork(after_in_child=_stop_recording)


def _stop_recording() -> None:
    global _running
    _running, _muting.on = None, False
    import torch
    from torch._C._autograd import _profiler_enabled, _toggle_collection_dynamic
    from torch._C._profiler import ProfilerActivity

    with contextlib.suppress(Exception):
        if not _profiler_enabled():
            return
        if is_forked_after_cuda():
            torch._C._autograd._enable_record_function(False)
            return
        with _without_stderr():  # Kineto warns about GPU activity, whether or not there is any
            _toggle_collection_dynamic(False, {ProfilerActivity.CPU})
