"""What was measured of a layer, and its ratios, drift and shares under a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mpguard.nn.format_names import FORMAT_OF

#: The ratio, in dB, that stands for no error at all, as in `layer_error`, which imports torch.
EXACT = 150.0

#: Where a format loses: a matmul of a layer, and its operands.
PRODUCTS = ("output", "weight_gradient")


@dataclasses.dataclass(frozen=True)
class LayerAtStep:
    """What was measured of a layer at a step. products: `PRODUCTS` -> format -> numbers of `layer_error.summary`."""

    step: int
    rank: int
    products: Mapping[str, Mapping[str, Any]]

    def snr(self, product: str, form: str) -> float | None:
        """Return the signal-to-noise ratio of a matmul in a format; None if it was not measured."""
        found = self.products.get(product, {}).get(form)
        return None if found is None else found["snr"]


@dataclasses.dataclass
class MeasuredLayer:
    """A Linear layer. rows: of its input in a step. left_out: why it is not FP8 under the policy; empty if it may be.

    unmeasured: why it could not be measured; empty if it could.
    """

    name: str
    size: int
    outputs: int
    rows: int
    left_out: str = ""
    unmeasured: str = ""
    steps: list[LayerAtStep] = dataclasses.field(default_factory=list)

    @property
    def work(self) -> float:
        """How much of the model's matmuls the layer is: multiplications of one matmul."""
        return float(self.size) * self.outputs * self.rows

    def product_snr(self, product: str, form: str, steps: Iterable[LayerAtStep] | None = None) -> float | None:
        """Return the signal-to-noise ratio of a matmul over all steps: that of the mean noise."""
        chosen = self.steps if steps is None else steps
        found = [snr for each in chosen if (snr := each.snr(product, form)) is not None]
        return -10 * math.log10(math.fsum(10 ** (-snr / 10) for snr in found) / len(found)) if found else None

    def snr(self, recipe: str, steps: Iterable[LayerAtStep] | None = None) -> float | None:
        """Return the ratio of the matmul that loses most under a recipe; None if nothing was measured."""
        chosen = self.steps if steps is None else list(steps)
        both = zip(PRODUCTS, FORMAT_OF[recipe], strict=True)
        found = [snr for product, form in both if (snr := self.product_snr(product, form, chosen)) is not None]
        return min(found, default=None)

    def worst(self, recipe: str) -> str:
        """Return which matmul loses most under a recipe: `output` or `weight gradient`; empty if none was measured."""
        both = zip(PRODUCTS, FORMAT_OF[recipe], strict=True)
        found = {name: snr for name, form in both if (snr := self.product_snr(name, form)) is not None}
        return min(found, key=lambda name: found[name]).replace("_", " ") if found else ""

    def drift(self, recipe: str) -> float | None:
        """Return how much the ratio has changed from the first to the last step, in dB; None for fewer than two."""
        found = [snr for each in self.steps if (snr := self.snr(recipe, [each])) is not None]
        return found[-1] - found[0] if len(found) > 1 else None

    def shares(self, recipe: str, kind: str) -> dict[str, float]:
        """Return the mean share of values that underflow, or that saturate, by operand. kind: the name of the share."""
        found: dict[str, list[float]] = {}
        for product, form in zip(PRODUCTS, FORMAT_OF[recipe], strict=True):
            for each in self.steps:
                for role, numbers in each.products.get(product, {}).get(form, {}).get("operands", {}).items():
                    found.setdefault(role, []).append(numbers[kind])
        return {role: math.fsum(values) / len(values) for role, values in found.items()}


def share_of(layers: Iterable[MeasuredLayer], whole: Iterable[MeasuredLayer]) -> float:
    """Return the share of some layers in the matmuls of all that may be FP8. whole: all layers."""
    total = math.fsum(layer.work for layer in whole if not layer.left_out)
    return math.fsum(layer.work for layer in layers) / total if total else 0.0
