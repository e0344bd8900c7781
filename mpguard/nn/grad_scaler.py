"""A GradScaler with what torch's has no place for: how many overflows it takes (hysteresis), and the least scale.

Both as Megatron and DeepSpeed have them: each overflow skips its step; the scale is halved from the `hysteresis`-th
one on, never below the minimum, and the count begins anew when the scale grows. Imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import sharded_grad_scaler

__all__ = ["GradScaler", "ShardedGradScaler", "set_limits"]

#: In the `state_dict`, beside torch's own keys, which pass over it.
KEY = "mpguard_overflows_left"


class _LimitsMixin(torch.amp.GradScaler):
    _least: float
    _hysteresis: int
    _left: torch.Tensor | None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        before = None if self._scale is None or not self._enabled or new_scale is not None else self._scale.clone()
        super().update(new_scale)
        after = self._scale
        if before is None or after is None:
            return
        left = before.new_full((), self._hysteresis) if self._left is None else self._left.to(before.device)
        overflow, grew = after < before, after > before  # compared on the device: `item` would wait for it
        left = torch.where(overflow, (left - 1).clamp(min=0), torch.where(grew, float(self._hysteresis), left))
        after.copy_(torch.where(overflow & (left > 0), before, after).clamp(min=self._least))
        self._left = left

    def state_dict(self) -> dict[str, Any]:
        own = {KEY: float(self._left)} if self._enabled and self._left is not None else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._left = torch.tensor(state_dict[KEY]) if KEY in state_dict else None


class GradScaler(_LimitsMixin):
    """torch's own."""


class ShardedGradScaler(_LimitsMixin, sharded_grad_scaler.ShardedGradScaler):
    """FSDP1's."""


def set_limits(scaler: torch.amp.GradScaler, minimum: float, hysteresis: int) -> None:
    """Has a scaler of torch's, or one of a class derived from it, heed both from here on."""
    known = {torch.amp.GradScaler: GradScaler, sharded_grad_scaler.ShardedGradScaler: ShardedGradScaler}
    kind = type(scaler)
    if not issubclass(kind, _LimitsMixin):
        scaler.__class__ = known.get(kind) or type(kind.__name__, (_LimitsMixin, kind), {})
    assert isinstance(scaler, _LimitsMixin)
    scaler._least, scaler._hysteresis, scaler._left = minimum, hysteresis, None
