"""What `convert` did, for people to read and for programs to ask."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert` did. Names are qualified ones; `print` shows all of it.

    backend, recipe: what runs the FP8 layers ("te", "torchao") and how they are scaled.
    converted: layers that became FP8. already: those that an earlier call with the same policy had made FP8.
    skipped: Linear layers that stay in the compute dtype, and why.
    others: what multiplies weights and is no Linear layer, by class, and its share of all weights that are multiplied.
    compiled: whether the model is compiled now, and why; empty where that is left to the script.
    kept: whether the weights themselves are in FP8, and only an optimizer with FP32 masters can train them.
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
    kept: bool = False

    def __str__(self) -> str:
        fp8 = len(self.converted) + len(self.already)
        how = f"{self.backend} {self.recipe}{', emulated' if self.emulated else ''}{', weights too' * self.kept}"
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
