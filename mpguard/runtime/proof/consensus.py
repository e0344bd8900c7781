"""One verdict over all ranks: each says what it found, rank 0 decides, all are told.

Through the process group's store, not a collective: it needs no device, and a rank that has ended, or
sits in another collective, is named after a while instead of waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

from mpguard.core.console import print_line
from mpguard.runtime.proof.observe import world_size

#: Seconds that ranks wait for each other's verdict, after how many they say so, and how long rank 0,
#: whose process may hold the store, waits for the others to have read.
PATIENCE, NOTICE, FAREWELL = 120.0, 10.0, 10.0

#: Seconds for which a rank that trains a model of its own waits, once, to see whether all others do.
ALONE = 5.0

#: How far apart gradients may be that are the same but for the order of sums.
SAME = 1e-3

Fingerprint = tuple[float, float]


def rank() -> int:
    """This process among all, as its launcher numbers them; 0 alone."""
    return number("RANK", 0)


def number(variable: str, default: int) -> int:
    """A launcher's variable. Raises `ConfigError` for what is no number."""
    from mpguard.core.errors import ConfigError

    text = os.environ.get(variable) or str(default)
    if not text.isdigit():
        raise ConfigError(f"{variable} is {text!r}; a number is needed, as torchrun sets it")
    return int(text)


def is_reporting_rank() -> bool:
    """Whether this process says what is wrong: rank 0 for all, and each one where they do not know of each other."""
    return rank() == 0 or "torch" not in sys.modules or world_size()[0] == 1


def agree_on_failures(turn: int, failures: list[str], replicated: Fingerprint | None) -> list[str]:
    """The failures of all ranks, on all ranks; with those that only show between ranks.

    turn: the number of this verdict, the same on every rank. replicated: a fingerprint of gradients
    that must be the same everywhere.
    """
    size, me = world_size()[0], rank()
    if size == 1:
        return failures
    store = default_store()
    if store is None:
        return _gathered(failures, replicated, size)
    try:
        store.set(f"mpguard/{turn}/{me}", json.dumps([failures, replicated]))
        if me != 0:
            everywhere = _read(store, f"mpguard/{turn}/verdict", "rank 0")
            store.add(f"mpguard/{turn}/read", 1)
            return list(everywhere)
    except Exception as error:
        return [*failures, f"not proven: rank 0 gave no verdict: {_reason(error)}"]
    return _decide(store, turn, size, failures, replicated)


def _decide(store: Any, turn: int, size: int, failures: list[str], replicated: Fingerprint | None) -> list[str]:
    said: list[tuple[list[str], Fingerprint | None]] = [(failures, replicated)]
    heard = 0
    for other in range(1, size):
        try:
            theirs, print_, *ended = _read(store, f"mpguard/{turn}/{other}", f"rank {other}")
            said.append((theirs, print_))
            heard += not ended
        except Exception as error:
            said.append(([f"not proven: gave no verdict: {_reason(error)}"], None))
    everywhere = combined(said)
    with contextlib.suppress(Exception):
        store.set(f"mpguard/{turn}/verdict", json.dumps(everywhere))
        deadline = time.monotonic() + FAREWELL
        while store.add(f"mpguard/{turn}/read", 0) < heard and time.monotonic() < deadline:
            time.sleep(0.01)
    return everywhere


def combined(said: list[tuple[list[str], Fingerprint | None]]) -> list[str]:
    """The failures of ranks as one list, each with the ranks that it is of."""
    collected: dict[str, list[int]] = {}
    for rank_, (failures, _) in enumerate(said):
        for failure in failures:
            collected.setdefault(failure, []).append(rank_)
    everywhere = [
        text if len(ranks) == len(said) else f"rank {', '.join(map(str, ranks))}: {text}"
        for text, ranks in collected.items()
    ]
    prints = [print_ for _, print_ in said if print_ is not None]
    if len(prints) == len(said) and any(_differ(prints[0], other) for other in prints[1:]):
        norms = ", ".join(f"{norm:.4g} on rank {rank_}" for rank_, (norm, _) in enumerate(prints[:4]))
        everywhere.append(
            f"reduction: the gradients differ between ranks after the step (norm {norms}); asked: reduced over all. "
            "Each rank trains a model of its own: call the wrapped model, outside no_sync()"
        )
    return everywhere


def _differ(one: Fingerprint, other: Fingerprint) -> bool:
    scale = max(one[0], other[0], 1e-30)
    return any(abs(a - b) > SAME * max(scale, abs(a), abs(b)) for a, b in zip(one, other, strict=True))


def publish_failure(turn: int, message: str) -> None:
    """A rank that ends: those that wait for its verdict must not wait long."""
    if world_size()[0] == 1:
        return
    with contextlib.suppress(Exception):
        store = default_store()
        store.set(f"mpguard/{turn}/{rank()}", json.dumps([[message], None, "ended"]))
        if rank() == 0:
            store.set(f"mpguard/{turn}/verdict", json.dumps([f"rank 0: {message}"]))


def all_ranks_reached(what: str, wait: float = 0.0) -> bool:
    """Says that this rank has come to a point; whether all have, within some seconds."""
    store = default_store()
    if store is None:
        return True
    store.set(f"mpguard/{what}/{rank()}", "1")
    keys = [f"mpguard/{what}/{other}" for other in range(world_size()[0])]
    deadline = time.monotonic() + wait
    while not store.check(keys):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def default_store() -> Any:
    """The store of the default process group; None where it has none (MPI)."""
    from torch.distributed import distributed_c10d

    with contextlib.suppress(Exception):
        return distributed_c10d._get_default_store()
    return None


def _read(store: Any, key: str, who: str) -> Any:
    """What a rank has written; raises `TimeoutError`, and what torch raises where the store is gone.

    Looks for it again and again: a `wait` that times out has torch print warnings.
    """
    began, pause, said = time.monotonic(), 0.001, False
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited > PATIENCE:
            raise TimeoutError
        if waited > NOTICE and not said:
            said = True
            print_line(f"mpguard: rank {rank()} waits for {who}, which has not come to this optimizer step yet")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return json.loads(store.get(key))


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not come to this step within {PATIENCE:g} s"
    return f"its process has ended ({type(error).__name__})"


def _gathered(failures: list[str], replicated: Fingerprint | None, size: int) -> list[str]:
    """The same over a collective, for process groups without a store."""
    import torch.distributed as dist

    found: list[Any] = [None] * size
    dist.all_gather_object(found, (failures, replicated))
    return combined(found)
