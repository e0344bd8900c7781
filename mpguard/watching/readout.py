"""Copies of numbers from the device that never wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Readout:
    """Numbers of a step: computed on a device, copied to the host without waiting, read when they have arrived.

    On the CPU they are there at once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start the copies. tensors: with one or more elements each, on any devices."""
        import torch

        self._sizes = [tensor.numel() for tensor in tensors]
        self._copies: list[tuple[list[int], torch.Tensor]] = []
        self._arrivals: list[Any] = []
        self._values: list[list[float]] = [[] for _ in tensors]
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.is_cpu:
                self._values[index] = tensor.detach().reshape(-1).tolist()
            else:
                by_device.setdefault(tensor.device, []).append(index)
        for device, indices in by_device.items():
            packed = torch.cat([tensors[index].detach().reshape(-1).to(torch.float32) for index in indices])
            self._copies.append((indices, self._copied(packed, device)))

    def _copied(self, packed: torch.Tensor, device: torch.device) -> torch.Tensor:
        import torch

        host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=device.type == "cuda")
        host.copy_(packed, non_blocking=True)
        arrival = torch.Event(device)
        arrival.record()
        self._arrivals.append(arrival)
        return host

    def arrived(self) -> bool:
        """True if the numbers can be read without waiting."""
        return all(arrival.query() for arrival in self._arrivals)

    def wait(self) -> None:
        """Wait for the device."""
        for arrival in self._arrivals:
            arrival.synchronize()

    def values(self) -> list[list[float]]:
        """Return the numbers of each tensor. Call it after `arrived` or `wait`."""
        for indices, packed in self._copies:
            numbers, start = packed.tolist(), 0
            for index in indices:
                self._values[index] = numbers[start : start + self._sizes[index]]
                start += self._sizes[index]
        self._copies = []
        return self._values
