"""A GradScaler with two settings that torch's lacks: hysteresis (a number of overflows), and a minimum scale.

Both work as in Megatron and DeepSpeed: each overflow skips its step; the scale is halved from the `hysteresis`-th
overflow on, never below the minimum, and the count is reset when the scale grows. Imports torch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import sharded_grad_scaler

from mpguard.core.patches import OWN, AnyFunction, fits, patch

__all__ = ["GradScaler", "ShardedGradScaler", "set_limits"]

#: The key in the `state_dict`; torch's own GradScaler ignores it when it loads one.
KEY = "mpguard_overflows_left"


def _halves() -> None:
    """`update` halves the scale after an overflow, and the scale is in `_scale`."""
    scaler, parameter = torch.amp.GradScaler("cpu", init_scale=4.0), nn.Parameter(torch.zeros(1))
    scaler.scale(parameter * float("inf")).backward()  # type: ignore[no-untyped-call]
    scaler.step(torch.optim.SGD([parameter]))
    scaler.update()
    assert scaler._scale is not None and float(scaler._scale) == 2.0, "an overflow does not halve `_scale`"


@patch(
    "torch.amp.grad_scaler:GradScaler.update",
    needs=("new_scale",),
    reason="torch's scaler has no minimum and no hysteresis: a scaler gets a class with this `update`",
    lost="the loss scale has no minimum and no hysteresis",
    check=_halves,
    part=OWN,
)
def _limited(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def update(scaler: Any, new_scale: float | torch.Tensor | None = None) -> None:
        if not isinstance(scaler, _LimitsMixin):
            original(scaler, new_scale)
            return
        before = (
            None if scaler._scale is None or not scaler._enabled or new_scale is not None else scaler._scale.clone()
        )
        original(scaler, new_scale)
        after = scaler._scale
        if before is None or after is None:
            scaler._last_change = after._version if after is not None else -1
            return
        left = before.new_full((), scaler._hysteresis) if scaler._left is None else scaler._left.to(before.device)
        overflow, grew = after < before, after > before  # compared on the device: `item` would synchronize with it
        left = torch.where(overflow, (left - 1).clamp(min=0), torch.where(grew, float(scaler._hysteresis), left))
        after.copy_(torch.where(overflow & (left > 0), before, after).clamp(min=scaler._minimum))
        scaler._left = left
        scaler._last_change = after._version

    return update


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
        def update_of_base(_scaler: Any, new_scale: Any) -> None:
            super(_LimitsMixin, self).update(new_scale)

        _limited(update_of_base)(self, new_scale)

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
    """Give a scaler, of torch's class or a subclass of it, a minimum scale and a hysteresis, by changing its class.

    With a library that has changed the scaler stays as it is, and the log has a line.
    """
    if not fits(_limited):
        return
    known = {torch.amp.GradScaler: GradScaler, sharded_grad_scaler.ShardedGradScaler: ShardedGradScaler}
    kind = type(scaler)
    if not issubclass(kind, _LimitsMixin):
        scaler.__class__ = known.get(kind) or type(kind.__name__, (_LimitsMixin, kind), {})
    assert isinstance(scaler, _LimitsMixin)
    scaler._minimum, scaler._hysteresis, scaler._left = minimum, hysteresis, None
    scaler._last_change = -1
