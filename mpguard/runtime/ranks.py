"""Which process this is: its rank and how many there are, from the process group, else from what a launcher has set."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable

#: The rank in the last process group: a script may destroy the group before its process ends.
_group_rank: int | None = None

#: Ranks that never train, as the run declares.
_idle: frozenset[int] = frozenset()


def known_rank() -> int | None:
    """Return the rank in the process group; before there is one, the launcher's; None if nothing defines it.

    Lightning's launcher sets LOCAL_RANK and NODE_RANK only: then the result is exact on the first node, and not 0 on
    others. `torch.multiprocessing.spawn` and a script's own processes set nothing.
    """
    global _group_rank  # noqa: PLW0603  there is one process group by default
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        _group_rank = int(distributed.get_rank())
    if _group_rank is not None:
        return _group_rank
    if os.environ.get("RANK"):
        return launcher_variable("RANK", 0)
    if os.environ.get("LOCAL_RANK"):
        node = launcher_variable("NODE_RANK", 0) * launcher_variable("LOCAL_WORLD_SIZE", 1)
        return node + launcher_variable("LOCAL_RANK", 0)
    return None


def is_forked_after_cuda() -> bool:
    """True in a process that was forked after CUDA had been initialized: it loads data, and cannot train.

    In it, freeing an object of CUDA that the parent has created ends the process, and Kineto waits for its threads.
    Where the parent has only counted the GPUs (`torch.cuda.is_available()`), torch calls it a bad fork, too; it can
    train on the CPU.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda._is_in_bad_fork() and cuda._initialized)


def had_group() -> bool:
    """True if this process is, or was, in a process group."""
    known_rank()
    return _group_rank is not None


def rank() -> int:
    """Return the rank of this process; 0 while nothing defines it."""
    return known_rank() or 0


def launcher_variable(name: str, default: int) -> int:
    """Return an environment variable of the launcher as a number. Raises `ConfigError` if it is none."""
    from mpguard.core.errors import ConfigError

    text = os.environ.get(name) or str(default)
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r}; a number is needed, as torchrun sets it. Correct or unset it")
    return int(text)


def declare_idle(ranks: Iterable[int]) -> None:
    """Declare which ranks never train: nobody waits for them. The others are the ranks that count."""
    global _idle  # noqa: PLW0603  one declaration per process
    _idle = frozenset(ranks)


def is_idle() -> bool:
    """True if this process is declared never to train."""
    return bool(_idle) and rank() in _idle


def numbers_of(count: int) -> list[int]:
    """Return the numbers of so many ranks that train: from 0 on, without those that are idle."""
    return list(itertools.islice((each for each in itertools.count() if each not in _idle), count))


def world_size() -> tuple[int, int]:
    """Return the number of ranks that train (1 without a process group), and the launcher's `WORLD_SIZE`."""
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size()) - idle_ranks(), launched
    return 1, launched


def processes() -> int:
    """Return the number of ranks that train, or will train once there is a process group."""
    return max(world_size())


def idle_ranks() -> int:
    """Return how many ranks of the process group are declared idle."""
    distributed = sys.modules.get("torch.distributed")
    if _idle and distributed is not None and distributed.is_available() and distributed.is_initialized():
        return sum(each < int(distributed.get_world_size()) for each in _idle)
    return 0


def is_reporting_rank() -> bool:
    """True if this process prints failures: rank 0 does for all, and each process does that never had a group."""
    return rank() == 0 or not had_group()


def is_started_by_script() -> bool:
    """True in a process that the script has started with `multiprocessing`, to train or to load data."""
    # While a spawned process imports the script, `multiprocessing` sets this attribute, and not the parent yet.
    imports_script = getattr(multiprocessing.current_process(), "_inheriting", False)
    return imports_script or multiprocessing.parent_process() is not None
