"""Compare the losses of training runs with a baseline: same, different, diverged, or inconclusive with what is missing.

mpguard compare fp8.jsonl --baseline bf16.jsonl
mpguard compare runs/fp8 runs/fp16 --baseline runs/bf16 --html report.html
mpguard compare 'fp8=runs/fp8-seed*' --baseline 'bf16=runs/bf16-seed*'     several seeds are one arm

RUN is a file, or a folder with one log: of `mpguard launch --watch` (JSON lines), TensorBoard, the Trainer
(trainer_state.json), W&B offline, or CSV. NAME=RUN gives it a name; runs of one name, and files of one pattern, are
the seeds of one arm. The losses are never smoothed before they are tested. Exit status: 0 every run is the same as
the baseline, 1 a run is different, diverged or inconclusive, 2 a log cannot be used.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpguard.core import watch_events
from mpguard.core.console import Line, columns, folded, printable, shows_unicode, write_lines
from mpguard.core.errors import ConfigError

if TYPE_CHECKING:
    from mpguard.compare import Comparison, Criteria, Margin, RunLog, RunVerdict

_STYLES = {"same": "green", "different": "yellow", "diverged": "bold red", "inconclusive": "cyan"}
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH, _SPARK_NARROWEST = 24, 6
#: The columns that a narrow terminal has no room for; the first ones are in the page, and in JSON.
_LEFT_OUT_FIRST = ("events", "memory", "ms/step", "interval", "loss", "at the end")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a log or its folder, NAME=RUN, or a pattern")
    parser.add_argument(
        "--baseline", action="append", default=[], metavar="RUN", help="what to compare with; repeat it for seeds"
    )
    parser.add_argument(
        "--margin", default="0.5%", help="the largest difference that counts as the same: 0.5%% or 0.01 (of the loss)"
    )
    parser.add_argument("--warmup", default="10%", help="the beginning that is left out: 10%% (default) or 500 (steps)")
    parser.add_argument("--loss", metavar="COLUMN", help="column or tag of the loss, if it is not recognized")
    parser.add_argument(
        "--same-start", action="store_true", help="the runs began with the same weights, though the logs begin later"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def run(options: argparse.Namespace) -> int:
    from mpguard.compare import compare

    criteria = _criteria(options)
    if not options.baseline:
        raise ConfigError("no baseline: name the run to compare with, `--baseline RUN`")
    if not options.runs:
        raise ConfigError("no run: name what to compare with the baseline, `mpguard compare RUN --baseline RUN`")
    baseline, arms = _arms(options.runs, options.baseline, options.loss)
    report = compare(arms, baseline, criteria)
    if options.html is not None:
        _write_page(report, options.html)
    if options.format == "json":
        print(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        write_lines(_lines(report))
        if options.html is not None:
            write_lines([[(f"The page is {options.html}.", "dim")]])
    return int(not report.all_same)


def _criteria(options: argparse.Namespace) -> Criteria:
    from mpguard.compare import Criteria, Margin, WarmUp

    margin, relative = _amount("--margin", options.margin)
    warm_up, share = _amount("--warmup", options.warmup)
    if margin == 0:
        raise ConfigError("--margin 0: no two runs can be shown to be that equal; give the difference that matters")
    if share and warm_up >= 1:
        raise ConfigError(f"--warmup {options.warmup}: leaves no step to compare; give less than 100%")
    return Criteria(
        Margin(margin, relative), WarmUp(warm_up) if share else WarmUp(None, round(warm_up)), options.same_start
    )


def _amount(option: str, text: str) -> tuple[float, bool]:
    """Return a number, and True if it is a share, which is written with `%`."""
    share = text.endswith("%")
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{option} {text}: is not a number such as 0.5% or 10") from None
    return (value / 100, True) if share else (value, False)


def _arms(runs: Sequence[str], baseline: Sequence[str], loss: str | None) -> tuple[str, dict[str, list[RunLog]]]:
    """Return the name of the baseline, and the logs of each arm. Raises `ConfigError` if a log cannot be used."""
    base = [each for given in baseline for each in _logs(given, loss)]
    names = {arm or log.name for arm, log in base}
    base_name = names.pop() if len(names) == 1 else "baseline"
    arms: dict[str, list[RunLog]] = {base_name: [log for _, log in base]}
    others = [each for given in runs for each in _logs(given, loss)]
    used: set[Path] = set()
    for _, log in [*base, *others]:
        if log.path.resolve() in used:
            raise ConfigError(f"{log.path}: is named twice, as a run and as another run or the baseline")
        used.add(log.path.resolve())
    for arm, log in others:
        if arm and arm != base_name:
            arms.setdefault(arm, []).append(log)
        else:
            arms[_new_name(log, arms)] = [log]
    return base_name, arms


def _new_name(log: RunLog, arms: Mapping[str, object]) -> str:
    """Return a name for a run that no arm has: as many of its folders are put in front as it takes."""
    name = log.name
    for folder in log.path.resolve().parents:
        if name not in arms:
            break
        name = f"{folder.name}/{name}"
    return name


def _logs(given: str, loss: str | None) -> Iterator[tuple[str, RunLog]]:
    """Yield the logs of an argument, NAME=RUN, a pattern or a path, each with the name of its arm if it was given."""
    from mpguard.compare.readers import read_run

    arm, equals, rest = given.partition("=")
    if not equals or Path(given).exists():
        arm, rest = "", given
    paths = [Path(rest)]
    if not paths[0].exists() and glob.has_magic(rest):
        paths = [Path(path) for path in sorted(glob.glob(rest))]  # noqa: PTH207
        if not paths:
            raise ConfigError(f"{rest}: no file or folder has such a name")
        arm = arm or rest
    for path in paths:
        yield arm, read_run(path, loss=loss)


def _write_page(report: Comparison, path: Path) -> None:
    from mpguard.compare.page import html

    try:
        path.write_text(html(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the page cannot be written: {error.strerror or error}") from None


# -- the table --------------------------------------------------------------------------------------------------------


def _lines(report: Comparison) -> Iterator[Line]:
    base = report.arms[report.baseline]
    width = columns()
    for each in report.verdicts:
        yield from folded([(printable(report.sentence(each)), _STYLES[each.verdict])], 4, width)
    yield [("", "")]
    header, rows = _table(report, _SPARK_WIDTH)
    keep = [i for i in range(len(header)) if any(row[i] for row in rows)]
    widths = {i: max(len(printable(row[i])) for row in [header, *rows]) for i in keep}
    if width is not None and (excess := sum(widths.values()) + 2 * (len(keep) - 1) - width) > 0:
        header, rows = _table(report, max(_SPARK_NARROWEST, _SPARK_WIDTH - excess))
        widths = {i: max(len(printable(row[i])) for row in [header, *rows]) for i in keep}
        for title in _LEFT_OUT_FIRST:
            if sum(widths.values()) + 2 * (len(widths) - 1) <= width:
                break
            widths.pop(header.index(title), None)
        keep = list(widths)
    yield [("  ".join(f"{header[i]:{widths[i]}}" for i in keep).rstrip(), "bold")]
    for row in rows:
        cells = [(f"{printable(row[i]):{widths[i]}}  ", _STYLES.get(row[i], "") if i == 1 else "") for i in keep]
        yield [*cells[:-1], (cells[-1][0].rstrip(), cells[-1][1])]
    yield [("", "")]
    for each in report.verdicts:
        for line in _explanation(each):
            yield from folded(line, 4, width)
    notes = [note for log in base for note in log.notes]
    for note in dict.fromkeys(notes):
        yield from folded([(f"{printable(report.baseline)}: note: {printable(note)}", "dim")], 4, width)


def _table(report: Comparison, spark: int) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table. spark: the characters of a sparkline."""
    header = ["run", "verdict", "difference", "interval", "loss", "at the end", "ms/step", "memory", "events"]
    rows = [[report.baseline, "baseline", "", "", *_facts(report.arms[report.baseline], spark)]]
    rows += [[each.name, each.verdict, *_difference(each, report.margin), *_facts(report.arms[each.name], spark)]
             for each in report.verdicts]  # fmt: skip
    return header, rows


def _explanation(verdict: RunVerdict) -> Iterator[Line]:
    how = [verdict.method] if verdict.method not in ("divergence", "none") else []
    if verdict.window and verdict.method != "divergence":
        how.append(f"steps {verdict.window[0]} to {verdict.window[1]}")
    method = f" ({', '.join(how)})" if how else ""
    yield [(f"{printable(verdict.name)}: ", "bold"), (verdict.verdict, _STYLES[verdict.verdict]),
           (f": {printable(verdict.reason)}{method}", "")]  # fmt: skip
    if verdict.needed:
        kind, count = next(iter(verdict.needed.items()))
        text = f"runs of about {count} steps" if kind == "steps" else f"{count} runs on each side"
        yield [(f"    needed for a verdict: {text}", "")]
    for note in verdict.notes:
        yield [(f"    note: {printable(note)}", "dim")]


def _difference(verdict: RunVerdict, margin: Margin) -> tuple[str, str]:
    if verdict.difference is None:
        return "", ""
    interval = verdict.interval
    shown = "" if interval is None else f"{margin.shown(interval[0])} to {margin.shown(interval[1])}"
    return margin.shown(verdict.difference), shown


def _facts(logs: Sequence[RunLog], spark: int) -> list[str]:
    """Return the cells about the runs themselves: of the first one's loss, and of all of them the rest."""
    from mpguard.compare.model import count_events, median_of

    losses = list(logs[0].loss.values())
    ms = median_of([value for log in logs for value in log.ms.values()])
    memory = max((log.memory for log in logs if log.memory is not None), default=None)
    events = count_events(tuple(logs))
    return [
        _sparkline(losses, spark) if _draws_bars() else "",
        f"{losses[-1]:.4g}",
        "" if ms is None else f"{ms:.3g}",
        "" if memory is None else f"{memory / 2**30:.3g} GiB",
        ", ".join(watch_events.counted(kind, count) for kind, count in events.items()),
    ]


def _sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of a loss in a few characters: the mean of each part, `x` where it is not finite."""
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] if math.isfinite(mean) else "x" for mean in means)


def _draws_bars() -> bool:
    """True if the output can show the characters of a sparkline."""
    return shows_unicode(sys.stdout)
