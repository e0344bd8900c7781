"""The numbers of a run: `Sensitivity`, its layers sorted by loss, and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpguard.nn.format_names import default_bound
from mpguard.numerics.layers import PRODUCTS, LayerAtStep, MeasuredLayer, share_of
from mpguard.numerics.proposal import Proposal, propose


@dataclasses.dataclass
class Sensitivity:
    """What was measured of a run.

    recipe: of the policy, by which layers are sorted. formats: that were measured. steps: how many were measured.
    seconds, total: that measuring has taken, of the time of those steps, on the rank that took longest. interrupted:
    True after Ctrl-C. failure: how the script has failed after that was measured; empty if it has not.
    """

    recipe: str
    formats: Sequence[str]
    layers: list[MeasuredLayer]
    steps: int = 0
    seconds: float = 0.0
    total: float = 0.0
    interrupted: bool = False
    failure: str = ""

    @property
    def measured(self) -> list[MeasuredLayer]:
        """The layers that were measured, the one that loses most under the recipe first."""
        found = [layer for layer in self.layers if layer.snr(self.recipe) is not None]
        return sorted(found, key=lambda layer: layer.snr(self.recipe) or 0.0)

    def share(self, layers: Iterable[MeasuredLayer]) -> float:
        """Return the share of some layers in the matmuls of all Linear layers that may be FP8."""
        return share_of(layers, self.layers)

    def propose(self, bound: float | None = None, finer: Sequence[str] = ()) -> Proposal:
        """Return a recipe per layer that keeps a bound, in dB. finer: recipes that a layer may get instead of none."""
        bound = default_bound(self.recipe) if bound is None else bound
        return propose(self.layers, self.recipe, bound, finer)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        measured = self.measured
        seen = {layer.name for layer in measured}
        return {
            "version": 1,
            "recipe": self.recipe,
            "formats": list(self.formats),
            "steps": self.steps,
            "interrupted": self.interrupted,
            "failure": self.failure,
            "overhead": {"seconds": self.seconds, "total": self.total},
            "layers": [self._layer_json(layer) for layer in measured],
            "unmeasured": [
                {"layer": layer.name, "reason": layer.unmeasured or "had no finite gradient"}
                for layer in self.layers
                if layer.name not in seen
            ],
        }

    def _layer_json(self, layer: MeasuredLayer) -> dict[str, Any]:
        return {
            "layer": layer.name,
            "in": layer.size,
            "out": layer.outputs,
            "rows": layer.rows,
            "left_out": layer.left_out,
            "share": 0.0 if layer.left_out else self.share([layer]),
            "formats": {
                form: {
                    "snr": layer.snr(form),
                    **{product: layer.product_snr(product, form) for product in PRODUCTS},
                    "underflow": layer.shares(form, "underflow"),
                    "saturated": layer.shares(form, "saturated"),
                    "drift": layer.drift(form),
                }
                for form in self.formats
            },
            "steps": [
                {"step": each.step, "rank": each.rank}
                | {product: {form: each.snr(product, form) for form in self.formats} for product in PRODUCTS}
                for each in layer.steps
            ],
        }


def gathered(lines: Iterable[Mapping[str, Any]], recipe: str, formats: Sequence[str]) -> Sensitivity:
    """Return the report of lines that the probes of all ranks have recorded."""
    found = Sensitivity(recipe, formats, [])
    layers: dict[str, MeasuredLayer] = {}
    measured: list[Mapping[str, Any]] = []
    for line in lines:
        if line["event"] == "layers":
            for each in line["layers"]:
                own = MeasuredLayer(each["layer"], each["in"], each["out"], each["rows"], each["left_out"],
                                    each["unmeasured"])  # fmt: skip
                layers.setdefault(own.name, own)
        elif line["event"] == "layer":
            measured.append(line)
        elif line["event"] in ("step", "end") and line["seconds"] >= found.seconds:
            found.seconds, found.total = line["seconds"], line["total"]
    for line in sorted(measured, key=lambda each: (each["step"], each["rank"])):
        if line["layer"] in layers:
            products = {product: line[product] for product in PRODUCTS if product in line}
            layers[line["layer"]].steps.append(LayerAtStep(line["step"], line["rank"], products))
    found.layers = list(layers.values())
    found.steps = len({line["step"] for line in measured})
    return found


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that all ranks have written to a folder; the last one of a file may be incomplete."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            yield line
