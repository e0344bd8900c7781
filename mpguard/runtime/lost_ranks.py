"""Name the rank whose end has ended this one: a rank that died leaves the others with an error of a collective.

A rank that ends with an error of its own publishes it in the process group's store. One whose collective has failed
reads it there; if there is none, the rank that has not failed either was killed, or its node was lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from typing import Any

from mpguard.core.errors import NotInForce
from mpguard.runtime.last_lines import print_last
from mpguard.runtime.plan_exchange import place, place_of
from mpguard.runtime.proof.consensus import default_store
from mpguard.runtime.proof.verdict import NOT_PROVEN, Failure, FailureKind, names_of, read_failure
from mpguard.runtime.ranks import had_group, rank

#: Seconds that a rank whose collective has failed waits for the error of the rank that ended first.
CAUSE_WAIT = 3.0

#: Errors of collectives are plain RuntimeErrors in part: which library they are of.
_LIBRARY = re.compile(r"\bgloo\b|\bNCCL\b|\bnccl[A-Z]")

#: What they say if another rank has ended, or does not answer. Other errors of collectives are this rank's own.
_PEER = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|remote|timed? ?out", re.I)

#: The key of torchelastic's error file that has the refusal which the launcher of another node prints at its end.
LAST_LINE = "mpguard_last_line"

#: Characters of an error that a line repeats.
_LENGTH = 200

_KEY = "mpguard/lost"

#: Why the store of a process group no longer exists.
_GONE = "the node of rank 0 was lost, or its launcher ended"


_last_line: str | None = None

#: The failures with which another rank was refused alone; empty if this rank does not end because of them.
_refused: tuple[Failure, ...] = ()


def describe(error: BaseException) -> str | None:
    """Return a line that names the rank because of which a collective has failed here, and keep it for the end.

    None for an error of this rank's own, which is published for the others, and without a process group.
    """
    if not had_group():
        return None
    if not _is_of_a_peer(error):
        publish(error)
        return None
    try:
        found, refused = _lost_rank(default_store())
    except Exception:  # the store is gone, and with it the process that hosts it
        address = f"{os.environ.get('MASTER_ADDR', 'its address')}:{os.environ.get('MASTER_PORT', '')}"
        found, refused = f"the process group's store at {address} is gone: {_GONE}", ()
    if found is None:
        return None
    global _last_line, _refused  # noqa: PLW0603  a process ends once
    _refused = refused
    _last_line = f"mpguard: rank {rank()} ({place()}) ended because of another one: {found}"
    return _last_line


def print_last_line() -> None:
    """Print, as the last line, the rank because of which this one ends."""
    if _last_line is not None:
        print_last(_last_line)


def refusal() -> tuple[Failure, ...]:
    """Return the failures with which another rank was refused alone, so that this one ends; empty if it does not."""
    return _refused


def publish(error: BaseException) -> None:
    """Publish the error that this rank ends with, for the ranks that wait for it in a collective."""
    if not had_group():
        return
    with contextlib.suppress(Exception):
        store = default_store()
        how, failures = f"ended with {type(error).__name__}: {error}", list[Any]()
        if isinstance(error, NotInForce):
            kind = FailureKind.UNPROVEN if error.verdict == NOT_PROVEN else FailureKind.WRONG
            found = [read_failure(each) for each in error.failures] or [Failure(kind, error.reasons)]
            how = f"was refused: {error.verdict}: {'; '.join(each.line(error.verdict) for each in found)}"
            failures = [dataclasses.replace(each, ranks=each.ranks or (rank(),)).data() for each in found]
        text = f"rank {rank()} ({place()}) {' '.join(how.split())[:_LENGTH]}"
        if not store.check([f"{_KEY}/cause"]):  # the first one is the cause
            store.set(f"{_KEY}/cause", json.dumps({"text": text, "failures": failures}))


def _is_of_a_peer(error: BaseException) -> bool:
    """True for an error of a collective, or of the store, that another rank has caused by its end."""
    known = getattr(sys.modules["torch.distributed"], "DistError", None)
    text = str(error)
    of_library = isinstance(error, RuntimeError) and _LIBRARY.search(text) is not None
    return (of_library or (known is not None and isinstance(error, known))) and _PEER.search(text) is not None


def _lost_rank(store: Any) -> tuple[str | None, tuple[Failure, ...]]:
    """Return which rank has ended first, and how, and its failures if it was refused.

    Raises torch's error if the store no longer exists.
    """
    size = world_of()
    store.set(f"{_KEY}/failed/{rank()}", "")
    first = store.add(f"{_KEY}/failed", 1) == 1
    deadline = time.monotonic() + CAUSE_WAIT * (1 if first else 2)
    while time.monotonic() < deadline:
        for key in ("cause", "found"):
            if store.check([f"{_KEY}/{key}"]):
                known = json.loads(store.get(f"{_KEY}/{key}"))
                return str(known["text"]), tuple(map(read_failure, known.get("failures", ())))
        if size and store.add(f"{_KEY}/failed", 0) >= size:
            return None, ()  # all have failed in the same way, and none before the others
        time.sleep(0.1)
    if not first:
        return None, ()
    # One rank asks for all: the others read what it finds.
    lost = [each for each in range(size) if not store.check([f"{_KEY}/failed/{each}"])]
    if not lost:
        return None, ()
    where = "; ".join(dict.fromkeys(place_of(store, each) for each in lost[:4]))
    # A rank that waits for one of those that have failed has not failed yet.
    one_of = "one of " if len(lost) > 1 else ""
    found = f"{one_of}{names_of(lost)} ({where}) was killed, or does not answer any more"
    store.set(f"{_KEY}/found", json.dumps({"text": found}))
    return found, ()


def world_of() -> int:
    """Return how many ranks the process group has, with those that never train; 0 without one."""
    distributed: Any = sys.modules["torch.distributed"]
    return int(distributed.get_world_size()) if distributed.is_initialized() else 0
