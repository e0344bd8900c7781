"""A GradScaler with two settings that torch's lacks: hysteresis (a number of overflows), and a minimum scale.

Both work as in Megatron and DeepSpeed: each overflow skips its step; the scale is halved from the `hysteresis`-th
overflow on, never below the minimum, and the count is reset when the scale grows. Imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import sharded_grad_scaler

__all__ = ["GradScaler", "ShardedGradScaler", "set_limits"]

#: The key in the `state_dict`; torch's own GradScaler ignores it when it loads one.
KEY = "mpguard_overflows_left"


class _LimitsMixin(torch.amp.GradScaler):
    """Overrides `update`.

    _minimum: of the scale. _left: overflows until the scale is halved; None before the first. _last_change: the version
    of the scale's tensor after the last update.
    """

    _minimum: float
    _hysteresis: int
    _left: torch.Tensor | None
    _last_change: int

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        before = None if self._scale is None or not self._enabled or new_scale is not None else self._scale.clone()
        super().update(new_scale)
        after = self._scale
        if before is None or after is None:
            self._last_change = after._version if after is not None else -1
            return
        left = before.new_full((), self._hysteresis) if self._left is None else self._left.to(before.device)
        overflow, grew = after < before, after > before  # compared on the device: `item` would synchronize with it
        left = torch.where(overflow, (left - 1).clamp(min=0), torch.where(grew, float(self._hysteresis), left))
        after.copy_(torch.where(overflow & (left > 0), before, after).clamp(min=self._minimum))
        self._left = left
        self._last_change = after._version

    def state_dict(self) -> dict[str, Any]:
        own = {KEY: float(self._left)} if self._enabled and self._left is not None else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._left = torch.tensor(state_dict[KEY]) if KEY in state_dict else None


class GradScaler(_LimitsMixin):
    """`torch.amp.GradScaler` with the limits."""


class ShardedGradScaler(_LimitsMixin, sharded_grad_scaler.ShardedGradScaler):
    """FSDP1's `ShardedGradScaler` with the limits."""


def set_limits(scaler: torch.amp.GradScaler, minimum: float, hysteresis: int) -> None:
    """Give a scaler, of torch's class or a subclass of it, a minimum scale and a hysteresis, by changing its class."""
    known = {torch.amp.GradScaler: GradScaler, sharded_grad_scaler.ShardedGradScaler: ShardedGradScaler}
    kind = type(scaler)
    if not issubclass(kind, _LimitsMixin):
        scaler.__class__ = known.get(kind) or type(kind.__name__, (_LimitsMixin, kind), {})
    assert isinstance(scaler, _LimitsMixin)
    scaler._minimum, scaler._hysteresis, scaler._left = minimum, hysteresis, None
    scaler._last_change = -1
