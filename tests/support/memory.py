"""What a training step holds in memory, counted on the CPU: the storages that operators return, and when they end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Memory(TorchDispatchMode):
    """Count the bytes of storages that are made inside, without those that are known. peak: their largest sum.

    rounding: that of an allocator.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), rounding: int = 1) -> None:
        super().__init__()
        self.rounding, self.now, self.peak = rounding, 0, 0
        self._seen = {each.untyped_storage()._cdata for each in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self.count(each)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or not storage.nbytes():
            return
        size = -(-storage.nbytes() // self.rounding) * self.rounding
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class Saved:
    """A tensor that a node of autograd's graph has saved; it ends with the node."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextmanager
def saved_tensors(without: Iterable[torch.Tensor]) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes which autograd has saved inside, and still has, each storage once."""
    known = {each.untyped_storage().data_ptr() for each in without}
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        own = Saved(tensor)
        if tensor.untyped_storage().data_ptr() not in known:
            alive.add(own)
        return own

    def sizes() -> dict[int, int]:
        gc.collect()  # outputs that a model does not return may be in a cycle
        storages = (each.tensor.untyped_storage() for each in alive)
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda own: own.tensor):
        yield lambda: sum(sizes().values())
