"""The result of `convert`, as data and as text."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The result of `convert`. Names are qualified names; `print` shows everything.

    backend, recipe: the library that runs the FP8 layers ("te", "torchao"), and how they are scaled.
    compute: the compute dtype, in which the other layers run. emulated: FP8 is computed in software.
    converted: layers that became FP8. already: layers that an earlier call with the same policy had converted.
    skipped: Linear layers that stay in the compute dtype, each with the reason.
    others: classes of modules with weights that are not Linear layers, each with its share of all multiplied weights.
    compiled: if the model is compiled now, and why, as text; empty if the script decides.
    experts: with `fp8_experts`, modules with experts, each with the reason why it is not FP8; "" if it is.
    more: a clause about what another setting would convert.
    kept: the weights themselves are stored in FP8, and only an optimizer with FP32 master weights can train them.
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
    experts: tuple[tuple[str, str], ...] = ()
    more: str = ""

    def __str__(self) -> str:
        fp8 = len(self.converted) + len(self.already)
        how = f"{self.backend} {self.recipe}{', emulated' if self.emulated else ''}{', weights too' * self.kept}"
        lines = [f"{fp8} of {fp8 + len(self.skipped)} Linear layers in FP8 ({how})"]
        if self.already:
            lines[0] += f", {len(self.already)} of them converted before"
        if any(not reason for _, reason in self.experts):
            inside = sum(not reason for _, reason in self.experts)
            lines[0] += f"; experts in FP8 in {inside} of {len(self.experts)} modules (e4m3, a scale per row)"
        if self.others:
            shares = ", ".join(f"{kind} ({100 * share:.0f} %)" for kind, share in self.others)
            lines[0] += f"; of the weights, {shares} are in no Linear layers and stay in {self.compute}{self.more}"
        left = [*self.skipped, *((name, reason) for name, reason in self.experts if reason)]
        width = max((len(name) for name, _ in left), default=0)
        lines += [f"  {name:{width}}  stays in {self.compute}: {reason}" for name, reason in left]
        if self.compiled:
            lines.append(f"  compile: {self.compiled}")
        return "\n".join(lines)
