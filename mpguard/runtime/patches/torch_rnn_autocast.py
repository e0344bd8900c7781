"""Compute RNNs in the dtype of autocast."""

from __future__ import annotations

from types import ModuleType

from mpguard.core.patches import adjustment
from mpguard.runtime.patches import checks


@adjustment(
    "torch",
    "aten::_cudnn_rnn under autocast",
    reason="it computes RNNs in FP16 whatever the dtype of autocast is (S33)",
    lost="RNNs under autocast compute in FP16, whatever its dtype is",
    check=checks.rnn,
)
def _rnn(torch: ModuleType) -> str | None:
    """Compute RNNs under autocast in its dtype."""
    if not torch.backends.cuda.is_built():
        return None
    from mpguard.nn import rnn

    return rnn.register()
