"""Norms of gradients, and the shares of them that underflow a format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    import torch

#: The smallest normal number of each format, and its largest; FP8 is scaled so that the largest gradient becomes that.
FORMATS = {
    dtype.short: (dtype.smallest_normal, dtype.largest if dtype.bits == 8 else None)
    for dtype in (Dtype.FP16, Dtype.BF16, Dtype.FP8_E4M3, Dtype.FP8_E5M2)
}

#: Elements that are sampled of each parameter: contiguous, from another place each time.
SAMPLE = 1024

#: Columns of the table that `underflow` returns.
COLUMNS = ("elements", "zero", *FORMATS)


def local(gradient: torch.Tensor) -> torch.Tensor:
    """Return the part of a gradient that this rank has, as a dense tensor; nothing is communicated."""
    gradient = gradient.detach()
    own: Any = getattr(gradient, "_local_tensor", gradient)
    return own._values() if own.is_sparse else own  # type: ignore[no-any-return]


def norms(gradients: Sequence[torch.Tensor], groups: list[list[int]] | None = None) -> list[torch.Tensor]:
    """Return the norm of each gradient: one tensor per device and dtype, in the order of `grouped`, or of `groups`."""
    import torch

    groups = grouped(gradients) if groups is None else groups
    return [torch.stack(torch._foreach_norm([gradients[index] for index in indices])) for indices in groups]


def grouped(gradients: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of gradients by device and dtype: `_foreach_norm` needs them alike to be fast."""
    groups: dict[Any, list[int]] = {}
    for index, gradient in enumerate(gradients):
        groups.setdefault((gradient.device, gradient.dtype), []).append(index)
    return list(groups.values())


def underflow(
    gradients: Sequence[torch.Tensor], step: int, scale: torch.Tensor | float, whole: bool
) -> list[torch.Tensor]:
    """Return one row per gradient, with `COLUMNS`: counts of sampled elements, one table per group of `grouped`.

    scale: the loss scale, by which FP16 gradients were larger while they were computed. whole: take all elements.
    """
    import torch

    tables = []
    for indices in grouped(gradients):
        own = [gradients[index] for index in indices]
        largest = torch.stack(torch._foreach_norm(own, float("inf"))).to(torch.float32)
        if whole:
            rows = [_counts(each.reshape(1, -1).to(torch.float32), largest[i : i + 1], scale)
                    for i, each in enumerate(own)]  # fmt: skip
            tables.append(torch.cat(rows))
        else:
            tables.append(_counts(torch.stack([_sample(each, step) for each in own]), largest, scale))
    return tables


def _sample(gradient: torch.Tensor, step: int) -> torch.Tensor:
    """Return `SAMPLE` elements in FP32; a smaller tensor is filled up with NaN, which no comparison counts."""
    import torch

    size = gradient.numel()
    flat = gradient.reshape(-1)
    if size < SAMPLE:
        return torch.nn.functional.pad(flat.to(torch.float32), (0, SAMPLE - size), value=float("nan"))
    start = step * SAMPLE * 7919 % (size - SAMPLE + 1)
    return flat[start : start + SAMPLE].to(torch.float32)


def _counts(sample: torch.Tensor, largest: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return the counts of rows of elements. largest: the largest magnitude in each row's tensor."""
    import torch

    size = sample.abs()
    columns = [(size >= 0).sum(1), (size == 0).sum(1)]
    for name, (smallest, top) in FORMATS.items():
        if top is not None:
            bound: Any = (largest * (smallest / top)).unsqueeze(1)
        else:
            bound = smallest / scale if name == "fp16" else smallest
        columns.append(((size > 0) & (size < bound)).sum(1))
    return torch.stack(columns, 1).to(torch.float32)


def shares(rows: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return, by module, the share of elements that are zero, and of the others those that underflow each format.

    rows: `COLUMNS` by the name of a module, already summed over its parameters.
    """
    found = {}
    for name, (elements, zero, *below) in rows.items():
        if elements:
            others = max(elements - zero, 1.0)
            found[name] = {
                "zero": zero / elements,
                **{kind: count / others for kind, count in zip(FORMATS, below, strict=True)},
            }
    return found
