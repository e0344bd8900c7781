"""The report as one HTML page, which loads nothing: a heat map of layers and steps, and the table of layers."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from mpguard.compare.page import framed
from mpguard.nn.format_names import FORMAT_OF, LABELS
from mpguard.numerics.layers import PRODUCTS, MeasuredLayer
from mpguard.numerics.proposal import Proposal
from mpguard.numerics.report import Sensitivity

_ASSETS = Path(__file__).with_name("assets")


def html(report: Sensitivity, proposal: Proposal) -> str:
    """Return the page."""
    columns = ["Layer", "Size", *(LABELS[form] for form in report.formats), "Loses in", "Share"]
    parts = {
        "title": escape(f"Sensitivity: {len(report.measured)} layers, {report.steps} steps"),
        "proposal": _proposal(report, proposal),
        "bound": f"{proposal.bound:g}",
        "recipe": escape(report.recipe),
        "columns": "".join(f'<th scope="col">{escape(column)}</th>' for column in columns),
        "rows": "\n".join(_row(layer, report, proposal) for layer in report.measured),
        "notes": _notes(report),
    }
    return framed(_ASSETS / "heat.html", parts, page_data(report, proposal))


def _proposal(report: Sensitivity, proposal: Proposal) -> str:
    if not proposal.modules:
        return f"<p>All layers of {escape(report.recipe)} keep {proposal.bound:g} dB: no fp8_modules is needed.</p>"
    entries = "\n".join(
        f"- {{pattern: {json.dumps(each['pattern'])}, recipe: {each['recipe']}}}" for each in proposal.modules
    )
    worst = "" if proposal.worst is None else f"; the worst of them keeps {proposal.worst:.1f} dB"
    return (
        f"<p>To keep {proposal.bound:g} dB in {escape(report.recipe)}; {proposal.share:.1%} of the matmuls of FP8 "
        f"layers stay in FP8{worst}. <code>--write</code> tries it first.</p>"
        f"<pre>mpguard_fp8_modules:\n{escape(entries)}</pre>"
    )


def _row(layer: MeasuredLayer, report: Sensitivity, proposal: Proposal) -> str:
    ratios = [layer.snr(form) for form in report.formats]
    own = layer.snr(report.recipe)
    mark = ' class="below"' if own is not None and own < proposal.bound and not layer.left_out else ""
    share = f"kept out: {layer.left_out}" if layer.left_out else f"{report.share([layer]):.1%}"
    numbers = "".join(f'<td class="number">{"" if snr is None else f"{snr:.1f}"}</td>' for snr in ratios)
    return (
        f'<tr{mark}><th scope="row">{escape(layer.name)}</th><td class="size">{layer.size} x {layer.outputs}</td>'
        f"{numbers}<td>{layer.worst(report.recipe)}</td><td>{escape(share)}</td></tr>"
    )


def _notes(report: Sensitivity) -> str:
    left = [(layer.name, layer.unmeasured) for layer in report.layers if layer.unmeasured]
    items = "".join(f"<li><b>{escape(name)}</b>: not measured: {escape(reason)}</li>" for name, reason in left)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""


def page_data(report: Sensitivity, proposal: Proposal) -> dict[str, Any]:
    """Return what the script draws."""
    form = FORMAT_OF[report.recipe][0]
    return {
        "format": form,
        "formats": {name: LABELS[name] for name in report.formats},
        "bound": proposal.bound,
        "steps": sorted({each.step for layer in report.layers for each in layer.steps}),
        "layers": [
            {
                "name": layer.name,
                "steps": [
                    {"step": each.step}
                    | {
                        product: {name: _rounded(each.snr(product, name)) for name in report.formats}
                        for product in PRODUCTS
                    }
                    for each in layer.steps
                ],
            }
            for layer in report.measured
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
