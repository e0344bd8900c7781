"""FP8 layers in a model of one's own: `convert` puts them in, `revert` takes them out.

    choice    which Linear layers become FP8, and why the others stay
    swap      the change itself, and back
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

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.conversion.history import fp8_state_dict, load_fp8_state_dict
    from mpguard.conversion.swap import convert, revert

__all__ = ["Conversion", "convert", "fp8_state_dict", "load_fp8_state_dict", "revert"]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert` did. Names are qualified ones; `print` shows all of it.

    backend, recipe: what runs the FP8 layers ("te", "torchao") and how they are scaled.
    converted: layers that became FP8. already: those that an earlier call with the same policy had made FP8.
    skipped: Linear layers that stay in the compute dtype, and why.
    others: what multiplies weights and is no Linear layer, by class, and its share of all weights that are multiplied.
    compiled: whether the model is compiled now, and why; empty where that is left to the script.
    """

    backend: str
    recipe: str
    compute: str
    emulated: bool = False
    converted: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    others: tuple[tuple[str, float], ...] = ()
    compiled: str = ""

    def __str__(self) -> str:
        fp8 = len(self.converted) + len(self.already)
        how = f"{self.backend} {self.recipe}{', emulated' if self.emulated else ''}"
        lines = [f"{fp8} of {fp8 + len(self.skipped)} Linear layers in FP8 ({how})"]
        if self.already:
            lines[0] += f", {len(self.already)} of them converted before"
        if self.others:
            shares = ", ".join(f"{kind} ({100 * share:.0f} %)" for kind, share in self.others)
            lines[0] += f"; of the weights, {shares} are in no Linear layers and stay in {self.compute}"
        wide = max((len(name) for name, _ in self.skipped), default=0)
        lines += [f"  {name:{wide}}  stays in {self.compute}: {reason}" for name, reason in self.skipped]
        if self.compiled:
            lines.append(f"  compile: {self.compiled}")
        return "\n".join(lines)


def __getattr__(name: str) -> object:
    if name in ("convert", "revert"):
        from mpguard.conversion import swap

        return getattr(swap, name)
    if name in ("fp8_state_dict", "load_fp8_state_dict"):
        from mpguard.conversion import history

        return getattr(history, name)
    raise AttributeError(f"module 'mpguard.conversion' has no attribute {name!r}")
