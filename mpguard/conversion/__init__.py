"""FP8 layers in a model of one's own: `convert` puts them in, `revert` takes them out.

    choice    which Linear layers become FP8, and why the others stay
    swap      the change itself, and back
    report    what was changed, and what was not
    padding   rows that are no multiple of what FP8 needs
    history   what delayed scaling remembers, in checkpoints
    weights   parameters that are kept in FP8, and their exact values
    torchao   the layer of torchao
    te        the layer of Transformer Engine

A layer is changed where it stands: the module object, its `Parameter`s, names, hooks, device and
training flag stay, so optimizers that were built before go on, tied weights stay tied, and the
`state_dict` is that of the plain model.

Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.conversion.report import Conversion

if TYPE_CHECKING:
    from mpguard.conversion.history import fp8_state_dict, load_fp8_state_dict
    from mpguard.conversion.swap import convert, revert

__all__ = ["Conversion", "convert", "fp8_state_dict", "load_fp8_state_dict", "revert"]


def __getattr__(name: str) -> object:
    if name in ("convert", "revert"):
        from mpguard.conversion import swap

        return getattr(swap, name)
    if name in ("fp8_state_dict", "load_fp8_state_dict"):
        from mpguard.conversion import history

        return getattr(history, name)
    raise AttributeError(f"module 'mpguard.conversion' has no attribute {name!r}")
