"""The events of the watch in words; the names themselves are keys of its file."""

from __future__ import annotations

#: One event of a kind, and several of it.
_WORDS = {
    "nonfinite": ("NaN or Inf", "reports of NaN or Inf"),
    "skipped_step": ("skipped step", "skipped steps"),
    "loss_scale_collapse": ("collapse of the loss scale", "collapses of the loss scale"),
    "grad_norm_jump": ("jump of the gradient norm", "jumps of the gradient norm"),
    "loss_divergence": ("diverging loss", "reports of a diverging loss"),
    "underflow": ("underflow of gradients", "underflows of gradients"),
    "zero_gradients": ("report of zero gradients", "reports of zero gradients"),
    "stuck_weights": ("report of weights that do not move", "reports of weights that do not move"),
    "fp8_saturation": ("saturated FP8 tensor", "saturated FP8 tensors"),
    "fp8_scale_drift": ("drifting FP8 scale", "drifting FP8 scales"),
    "fp8_noise": ("noisy FP8 layer", "noisy FP8 layers"),
    "ranks_apart": ("difference between ranks", "differences between ranks"),
}


def named(kind: str) -> str:
    """Return the words for an event; those of another program's event are its name without underscores."""
    return _WORDS[kind][0] if kind in _WORDS else kind.replace("_", " ")


def counted(kind: str, count: int) -> str:
    """Return a number of events of a kind in words, such as "11 skipped steps"."""
    if kind in _WORDS:
        return f"{count} {_WORDS[kind][count != 1]}"
    return f"{count} {named(kind)}" if count == 1 else f"{count} times {named(kind)}"
