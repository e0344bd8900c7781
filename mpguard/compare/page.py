"""The report as one HTML page, which loads nothing: style, script and data are inside; a policy forbids requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mpguard.compare.model import Comparison, Margin, RunLog, RunVerdict, count_events, median_of
from mpguard.core import watch_events
from mpguard.core.version import __version__

_ASSETS = Path(__file__).with_name("assets")
#: Longer series are thinned for the page, keeping the highest and lowest value of each part.
_MOST_POINTS = 3000
#: The lines over the points are means of so many parts.
_MEANS = 60
#: Events that are listed, for each run.
_MOST_EVENTS = 300

#: The columns about the runs themselves.
_COLUMNS = ("Last loss", "ms per step", "Memory", "Events")


def html(report: Comparison) -> str:
    """Return the page."""
    facts = {name: _facts(logs) for name, logs in report.arms.items()}
    kept = [column for column in _COLUMNS if any(each[column] for each in facts.values())]
    cells = {name: "".join(_cell(column, each[column]) for column in kept) for name, each in facts.items()}
    parts = {
        "columns": "".join(f'<th scope="col">{column}</th>' for column in kept),
        "title": escape(_title(report)),
        "rows": "\n".join([_baseline_row(report, cells), *(_row(report, each, cells) for each in report.verdicts)]),
        "sentences": _sentences(report),
        "notes": _notes(report),
        "margin": escape(str(report.margin)),
    }
    return framed(_ASSETS / "report.html", parts, page_data(report))


def framed(body: Path, parts: Mapping[str, str], data: Any) -> str:
    """Return a page of mpguard: its head and style, a body with its parts, the data, and the script that shows them.

    body: a template; a script and perhaps a style sheet of the same name are in the same folder.
    """
    styles = [_ASSETS / "report.css", *([own] if (own := body.with_suffix(".css")).exists() else [])]
    frame = {
        "title": parts["title"],
        "style": "\n".join(dict.fromkeys(each.read_text("utf-8") for each in styles)),
        "body": _filled(body.read_text("utf-8"), {"version": escape(__version__), **parts}),
        "data": as_script_data(data),
        "script": body.with_suffix(".js").read_text("utf-8"),
    }
    return _filled((_ASSETS / "frame.html").read_text("utf-8"), frame)


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Return the text of a template with a part in the place of each `{{name}}`."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def as_script_data(data: Any) -> str:
    """Return plain data as JSON that can stand in a script element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _cell(column: str, text: str) -> str:
    """Return a cell with the name of its column, which a narrow screen shows in the place of the header."""
    return f'<td data-label="{column}">{escape(text)}</td>' if text else "<td></td>"


def _title(report: Comparison) -> str:
    return report.title()


def _sentences(report: Comparison) -> str:
    """Return the verdicts as a list of sentences, where the title has only their number."""
    items = "".join(f'<li class="{each.verdict}">{escape(report.sentence(each))}</li>' for each in report.verdicts)
    return f'<ul class="sentences">{items}</ul>' if len(report.verdicts) > 1 else ""


# -- the table of verdicts --------------------------------------------------------------------------------------------


def _baseline_row(report: Comparison, facts: Mapping[str, str]) -> str:
    name = f'<th scope="row">{escape(report.baseline)}</th>'
    return f"<tr>{name}<td>baseline</td><td></td><td></td>{facts[report.baseline]}</tr>"


def _row(report: Comparison, verdict: RunVerdict, facts: Mapping[str, str]) -> str:
    needed = ""
    if verdict.needed:
        kind, count = next(iter(verdict.needed.items()))
        needed = f"<br>Needed: {'runs of about ' if kind == 'steps' else ''}{count} {kind}"
        needed += " on each side" if kind == "runs" else ""
    steps = f", steps {verdict.window[0]} to {verdict.window[1]}" if verdict.window else ""
    cells = [
        f'<th scope="row">{escape(verdict.name)}</th>',
        f'<td><span class="verdict {verdict.verdict}">{verdict.verdict}</span></td>',
        f'<td class="gap">{_interval(verdict, report.margin)}</td>',
        f'<td class="why">{escape(verdict.reason)}{needed}<br><small>{escape(verdict.method + steps)}</small></td>',
        facts[verdict.name],
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _facts(logs: Sequence[RunLog]) -> dict[str, str]:
    """Return the cells about the runs themselves, by `_COLUMNS`; a column without any is left out."""
    ms = median_of([value for log in logs for value in log.ms.values()])
    memory = max((log.memory for log in logs if log.memory is not None), default=None)
    events = ", ".join(watch_events.counted(kind, count) for kind, count in count_events(tuple(logs)).items())
    last = list(logs[0].loss.values())[-1]
    cells = [f"{last:.4g}", "" if ms is None else f"{ms:.3g}",
             "" if memory is None else f"{memory / 2**30:.3g} GiB", events]  # fmt: skip
    return dict(zip(_COLUMNS, cells, strict=True))


def _interval(verdict: RunVerdict, margin: Margin) -> str:
    """Return the difference as text, and its interval as a drawing over the margin."""
    if verdict.difference is None:
        return ""
    shown = f"<b>{escape(margin.shown(verdict.difference))}</b>"
    if verdict.interval is None:
        return shown
    low, high = verdict.interval
    reach = 1.15 * max(abs(low), abs(high), 1.5 * margin.value)

    def at(value: float) -> str:
        return f"{60 + 58 * max(-1.0, min(1.0, value / reach)):.1f}"

    width = float(at(margin.value)) - float(at(-margin.value))
    return (
        f"{shown}<br><small>{escape(margin.shown(low))} to {escape(margin.shown(high))}</small>"
        f'<svg class="interval" viewBox="0 0 120 16" width="120" height="16" aria-hidden="true">'
        f'<rect class="band" x="{at(-margin.value)}" y="0" width="{width:.1f}" height="16"/>'
        f'<line class="zero" x1="60" x2="60" y1="0" y2="16"/>'
        f'<line class="bar" x1="{at(low)}" x2="{at(high)}" y1="8" y2="8"/>'
        f'<circle cx="{at(verdict.difference)}" cy="8" r="3"/></svg>'
    )


def _notes(report: Comparison) -> str:
    notes = [(each.name, note) for each in report.verdicts for note in each.notes]
    notes += [(report.baseline, note) for log in report.arms[report.baseline] for note in log.notes]
    items = "".join(f"<li><b>{escape(name)}</b>: {escape(note)}</li>" for name, note in dict.fromkeys(notes))
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""


# -- the data of the plots --------------------------------------------------------------------------------------------


def page_data(report: Comparison) -> dict[str, Any]:
    """Return what the script draws: series of points and of means for each plot, and the events."""
    arms = {report.baseline: report.arms[report.baseline], **report.arms}
    compared = {each.name: each.compared for each in report.verdicts}
    color = {name: number for number, name in enumerate(arms)}
    plots: dict[str, list[dict[str, Any]]] = {"loss": [], "difference": [], "grad_norm": [], "loss_scale": []}
    arms = {name: (compared.get(name) or (logs,))[0] for name, logs in arms.items()}  # drawn on the baseline's steps
    for name, logs in arms.items():
        for log in logs:
            label = name if len(logs) == 1 else f"{name}: {log.name}"
            for plot, values in (("loss", log.loss), ("grad_norm", log.grad_norm), ("loss_scale", log.loss_scale)):
                if values:
                    plots[plot].append(_series(label, name, color[name], values))
            for column, values in log.fp8.items():
                if any(values.values()):  # nothing saturates with scales of the tensor itself
                    plots.setdefault(f"fp8_{column}", []).append(_series(label, name, color[name], values))
        runs, base = compared.get(name) or (logs, report.arms[report.baseline])
        gaps = _gaps(runs, base, report.margin)
        if name != report.baseline and gaps:
            plots["difference"].append(_series(name, name, color[name], gaps))
    return {
        "baseline": report.baseline,
        "margin": report.margin.value * (100 if report.margin.relative else 1),
        "unit": "%" if report.margin.relative else "",
        "from": min((each.window[0] for each in report.verdicts if each.window), default=None),
        "plots": plots,
        "events": [
            {
                "run": name,
                "color": color[name],
                "step": event.step,
                "kind": watch_events.named(event.kind),
                "text": event.text,
            }
            for name, logs in arms.items()
            for log in logs
            for event in log.events[:_MOST_EVENTS]
        ],
        "left_out": sum(max(0, len(log.events) - _MOST_EVENTS) for logs in arms.values() for log in logs),
    }


def _gaps(runs: Sequence[RunLog], base: Sequence[RunLog], margin: Margin) -> dict[int, float]:
    """Return the difference of the mean losses of two arms by step, in per cent if the margin is."""
    steps = sorted(set.intersection(*(set(log.loss) for log in (*runs, *base))))
    found = {}
    for step in steps:
        ours, theirs = (math.fsum(log.loss[step] for log in logs) / len(logs) for logs in (runs, base))
        found[step] = ours - theirs
        if margin.relative:
            found[step] = 100 * (ours - theirs) / abs(theirs) if theirs else math.nan
    return found


def _series(label: str, arm: str, color: int, values: Mapping[int, float]) -> dict[str, Any]:
    points = thinned(list(values.items()))
    means = _part_means(list(values.items())) if len(values) > 2 * _MEANS else []
    return {
        "label": label,
        "arm": arm,
        "color": color,
        "steps": [step for step, _ in points],
        "values": [_number(value) for _, value in points],
        "mean_steps": [step for step, _ in means],
        "means": [_number(value) for _, value in means],
        "thinned": len(points) < len(values),
    }


def thinned(points: Sequence[tuple[int, float]], most: int = _MOST_POINTS) -> list[tuple[int, float]]:
    """Return at most about `most` points: of each part the highest, the lowest, and the first that is not finite."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        finite = [point for point in part if math.isfinite(point[1])]
        lost = [point for point in part if not math.isfinite(point[1])][:1]
        ends = [min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])] if finite else []
        kept += sorted({*ends, *lost}, key=lambda point: point[0])
    return kept


def _part_means(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    size = math.ceil(len(points) / _MEANS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[len(part) // 2][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def _number(value: float) -> float | str:
    """Return a number of six digits; NaN and infinities, which JSON does not have, as text."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
