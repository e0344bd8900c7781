"""Lines as the probe records them, with chosen ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FORMATS = ("bf16", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")

#: The ratios of a layer that loses nothing more than rounding costs.
USUAL = {"bf16": 52.6, "tensorwise": 28.5, "rowwise": 28.5, "blockwise": 28.7, "mxfp8": 28.5, "nvfp4": 17.4}


def layers(*names: str, left_out: Mapping[str, str] | None = None, unmeasured: Mapping[str, str] | None = None) -> Any:
    """Return the line that lists the layers of a model."""
    return {
        "event": "layers", "rank": 0, "ranks": 1,
        "layers": [
            {"layer": name, "in": 64, "out": 64, "rows": 100, "left_out": (left_out or {}).get(name, ""),
             "unmeasured": (unmeasured or {}).get(name, "")}
            for name in names
        ],
    }  # fmt: skip


def layer(name: str, step: int = 2, rank: int = 0, **ratios: float | Sequence[float | None] | None) -> dict[str, Any]:
    """Return the line of a layer at a step. ratios: by format; one for both matmuls, or one for each."""
    both = {
        form: given if isinstance(given, Sequence) else (given, given) for form, given in {**USUAL, **ratios}.items()
    }
    operands = {"output": ("input", "weight"), "weight_gradient": ("gradient", "input")}
    return {"event": "layer", "step": step, "rank": rank, "layer": name, "rows": 100} | {
        product: {
            form: {
                "snr": both[form][i],
                "operands": {
                    role: {"underflow": 0.25 if role == "gradient" else 0.0, "saturated": 0.0, "snr": both[form][i]}
                    for role in operands[product]
                },
            }
            for form in FORMATS
        }
        for i, product in enumerate(operands)
    }
