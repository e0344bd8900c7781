"""Shares of weights that a step leaves as they are: an update below a weight's last bit is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Elements that are sampled of each parameter, contiguous.
SAMPLE = 256


@dataclasses.dataclass(frozen=True)
class Kept:
    """Samples of parameters before a step, and which of these elements have a gradient that is not zero."""

    names: list[str]
    parameters: list[torch.Tensor]
    before: list[torch.Tensor]
    wanted: list[torch.Tensor]
    starts: list[int]

    def counts(self) -> torch.Tensor:
        """Return, for each parameter, the elements that had to move and those of them that did not."""
        import torch

        rows = []
        for own, before, wanted, start in zip(self.parameters, self.before, self.wanted, self.starts, strict=True):
            stayed = (_sample(own, start) == before) & wanted
            rows.append(torch.stack([wanted.sum(), stayed.sum()]))
        return torch.stack(rows).to(torch.float32)


def keep(names: Sequence[str], parameters: Sequence[torch.Tensor], optimizer: Any, step: int) -> Kept | None:
    """Return samples of the parameters that an optimizer is about to update; None if there are none on one device.

    Parameters of which it keeps master weights, or whose learning rate is 0, do not have to move.
    """
    from mpguard.watching import gradients

    still = {id(own) for group in optimizer.param_groups if not float(group.get("lr", 1.0)) for own in group["params"]}
    state = getattr(optimizer, "state", {})
    found = []
    for name, own in zip(names, parameters, strict=True):
        local, gradient = gradients.local(own), own.grad
        masters = any("master" in str(key) for key in state.get(own, ()))
        if gradient is None or id(own) in still or masters or local.numel() == 0 or gradient.is_sparse:
            continue
        start = step * SAMPLE * 7919 % max(1, local.numel() - SAMPLE + 1)
        wanted = _sample(gradients.local(gradient), start) != 0
        found.append((name, local, _sample(local, start).clone(), wanted, start))
    if not found or len({each[1].device for each in found}) > 1:
        return None
    names_, own_, before, wanted_, starts = (list(each) for each in zip(*found, strict=True))
    return Kept(names_, own_, before, wanted_, starts)


def _sample(tensor: torch.Tensor, start: int) -> torch.Tensor:
    return tensor.detach().reshape(-1)[start : start + SAMPLE]
