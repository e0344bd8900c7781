"""Copies of numbers from the device that never wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

if TYPE_CHECKING:
    import torch

#: A number that is on the host already, or a tensor of numbers.
HostOrDevice: TypeAlias = Union["torch.Tensor", float]


class Readout:
    """Numbers of a step: computed on a device, copied to the host without waiting, read when they have arrived.

    On the CPU they are there at once.
    """

    def __init__(self, tensors: Sequence[HostOrDevice]) -> None:
        """Start the copies. tensors: with one or more elements each, on any devices."""
        self._copies: list[tuple[list[int], list[int], torch.Tensor]] = []
        self._arrivals: list[Any] = []
        self._values: list[list[float]] = [[] for _ in tensors]
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, float):
                self._values[index] = [tensor]
            elif tensor.is_cpu:
                self._values[index] = tensor.detach().reshape(-1).tolist()
            else:
                by_device.setdefault(tensor.device, []).append((index, tensor))
        for device, found in by_device.items():
            self._copy([index for index, _ in found], [tensor for _, tensor in found], device)

    def _copy(self, indices: list[int], tensors: list[torch.Tensor], device: torch.device) -> None:
        import torch

        packed = torch.cat([tensor.detach().reshape(-1).to(torch.float32) for tensor in tensors])
        host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=device.type == "cuda")
        host.copy_(packed, non_blocking=True)
        arrival = torch.Event(device)
        arrival.record()
        self._arrivals.append(arrival)
        self._copies.append((indices, [tensor.numel() for tensor in tensors], host))

    def arrived(self) -> bool:
        """True if the numbers can be read without waiting."""
        return all(arrival.query() for arrival in self._arrivals)

    def wait(self) -> None:
        """Wait for the device."""
        for arrival in self._arrivals:
            arrival.synchronize()

    def values(self) -> list[list[float]]:
        """Return the numbers of each tensor. Call it after `arrived` or `wait`."""
        for indices, sizes, packed in self._copies:
            numbers, start = packed.tolist(), 0
            for index, size in zip(indices, sizes, strict=True):
                self._values[index] = numbers[start : start + size]
                start += size
        self._copies = []
        return self._values
