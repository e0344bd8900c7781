"""Samples of tensors: the same elements at each time, drawn by a fixed pseudo-random index.

Never by a stride: `flat[:: numel // 64]` lies in one column of a matrix whose number of rows is a multiple of 64, as
those of most vocabularies are.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger("mpguard")

#: From how many tensors of a model samples are taken, and how many values each has: from all over it, and of one row,
#: which shows if it lies on a grid with a scale for each row.
LEAVES, VALUES, ROW = 32, 64, 64


@dataclasses.dataclass(frozen=True)
class Index:
    """Which elements of a tensor are sampled.

    flat: their positions in the flattened tensor. places: their positions in each dimension, for tensors that are not
    contiguous. row: the part of the sample that is one row of the tensor, or the beginning of one.
    """

    flat: torch.Tensor
    places: tuple[torch.Tensor, ...]
    row: slice


@functools.lru_cache(maxsize=2048)
def index_of(shape: tuple[int, ...], device: torch.device) -> Index:
    """Return the index of the tensors of a shape: the same in each process."""
    import torch

    size, columns = 1, shape[-1] if shape else 1
    for each in shape:
        size *= each
    if size <= VALUES + ROW:
        positions, row = list(range(size)), slice(0, min(columns, size))
    else:
        draw = random.Random(size)
        begin = draw.randrange(size // columns) * columns
        positions = [draw.randrange(size) for _ in range(VALUES)]
        positions += range(begin, begin + min(columns, ROW))
        row = slice(VALUES, len(positions))
    flat = torch.tensor(positions, dtype=torch.int64)
    places = tuple(each.to(device) for each in torch.unravel_index(flat, shape)) if shape else ()
    return Index(flat.to(device), places, row)


@functools.lru_cache(maxsize=256)
def drawn(size: int, count: int, device: torch.device) -> torch.Tensor:
    """Return positions in a flattened tensor of a size, all over it: the same at each time."""
    import torch

    positions = random.Random(size).sample(range(size), count) if size > count else range(size)
    return torch.tensor(positions, dtype=torch.int64, device=device)


def sample(tensor: Any) -> torch.Tensor:
    """Return a copy of some values of a tensor, or of its part in this process."""
    own: torch.Tensor = local(tensor).detach()
    if not own.numel():
        return own.reshape(-1)
    index = index_of(tuple(own.shape), own.device)
    if own.is_contiguous():
        return own.reshape(-1).index_select(0, index.flat)
    return own[index.places]


def place(tensor: Any, number: int) -> list[int]:
    """Return the position in a tensor, or in its part in this process, of a value of its sample."""
    own = local(tensor)
    return [int(each[number]) for each in index_of(tuple(own.shape), own.device).places]


def row_of(tensor: Any) -> slice:
    """Return which values of a sample are those of one row."""
    own = local(tensor)
    return index_of(tuple(own.shape), own.device).row


def choose(tensors: Sequence[Any], most: int = LEAVES) -> list[int]:
    """Return the positions of the tensors of which samples are taken; of those with many values first."""
    large = [number for number, each in enumerate(tensors) if local(each).numel() >= VALUES]
    numbers = large if len(large) >= min(most, len(tensors)) else list(range(len(tensors)))
    return sorted(random.Random(len(tensors)).sample(numbers, most)) if len(numbers) > most else numbers


def are_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """True if two lists of samples have the same values. Each device is read once."""
    import torch

    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, values in enumerate(one):
        if values.shape != other[number].shape or values.dtype != other[number].dtype:
            return False
        places.setdefault((values.device, values.dtype), []).append(number)
    return all(
        torch.equal(torch.cat([one[number] for number in numbers]), torch.cat([other[number] for number in numbers]))
        for numbers in places.values()
    )


def are_set(values: Sequence[torch.Tensor]) -> list[bool]:
    """Return which samples have a value other than zero. Each device is read once."""
    import torch

    found = [False] * len(values)
    for device in {each.device for each in values}:
        numbers = [number for number, each in enumerate(values) if each.device == device]
        flags = torch.stack([values[number].ne(0).any() for number in numbers]).tolist()
        for number, flag in zip(numbers, flags, strict=True):
            found[number] = bool(flag)
    return found


def local(tensor: Any) -> Any:
    """Return the part of a DTensor that is in this process; other tensors unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def is_allocated(tensor: Any) -> bool:
    """True if a tensor has its memory: between uses FSDP frees that of its parameters."""
    own = local(tensor)
    return bool(own.numel()) and own.untyped_storage().nbytes() >= own.numel() * own.element_size()


def is_capturing() -> bool:
    """True while a CUDA graph is captured: reading values would end that."""
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def safely(look: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function that reads values of the training; an error in it does not end the training."""
    import torch

    from mpguard.runtime.proof.profiler import muted

    try:
        with torch.no_grad(), muted():
            return look(*arguments, **options)
    except Exception as error:
        log.debug("mpguard: values were not observed: %r", error)
        return None
