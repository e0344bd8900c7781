"""Find the precision in which a script trains fastest on this machine, and write it into its mp.yaml.

mpguard tune --config mp.yaml train.py --lr 3e-4           measures the candidates, writes the winner
mpguard tune --config mp.yaml --no-write train.py          writes nothing
mpguard tune --config mp.yaml train.py --output {out}      {out}: an empty folder for what the script writes

The script is run unchanged under each candidate (BF16 compiled, FP8 recipes and libraries, the policy as configured),
in processes of its own, for a few optimizer steps; then it is ended without its remaining lines. What cannot run here,
is not proven in force, fails, needs too much memory or does not end is a row with the reason. The winner is never
slower than BF16. Put tune's options, and accelerate's, before SCRIPT. Exit status: 0 there is a winner, 1 there is
none, 2 could not start.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpguard.cli import launch, script_runs
from mpguard.core.console import Line, columns, print_line, printable, rich_console, write_lines
from mpguard.core.errors import MissingExtra

if TYPE_CHECKING:
    from rich.table import Table

    from mpguard.tune.candidates import TuneCandidate
    from mpguard.tune.model import TuneReport, TuneRow
    from mpguard.tune.request import TuneRequest

_HEADER = ("candidate", "ms/step", "interval", "speed", "memory", "loss", "")
_STYLES = {"measured": "", "refused": "yellow", "failed": "red"}

parse_arguments = launch.parse_arguments


def configure(parser: argparse.ArgumentParser) -> None:
    script_runs.configure(parser, "tune", _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the mp.yaml to tune")
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="optimizer steps that are timed in each run (default: 20)"
    )
    parser.add_argument(
        "--warmup", type=int, default=10, metavar="N", help="steps before them, not timed (default: 10)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="runs of a candidate that may win, at most (default: 3)"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=900,
        metavar="SECONDS",
        help="a run that takes longer is ended (default: 900)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin no run after so many seconds, and decide with what is known",
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a candidate to try (repeatable)")
    parser.add_argument("--exhaustive", action="store_true", help="run every candidate in every round")
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="keep the output of each run in this folder")
    parser.add_argument("--no-write", action="store_true", help="do not change the mp.yaml")
    parser.add_argument("--list", action="store_true", help="list the candidates, and which cannot run here; run none")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "accelerate", "mpguard tune")
    from mpguard.tune.request import plan, tune

    options, request = _parsed(options.argv)
    chosen = plan(request)
    if options.list:
        _print_list(chosen, options.format)
        return 0
    with script_runs.signals() as received, script_runs.scratch(options.scratch, "tune") as folder:
        with _shown() as on_change:
            report = tune(request, chosen, folder, on_change)
        failed = any(row.state == "failed" and row.trials for row in report.rows)
        script_runs.remove_output(folder, keep_all=options.scratch is not None, keep_logs=failed)
    winner = report.winner
    if winner is not None and winner.candidate.overrides and not options.no_write:
        _write(request, report)
    if options.format == "json":
        print(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        write_lines(_lines(report, request, written=not options.no_write))
    if failed or options.scratch is not None:
        kept = f"The output of the runs is in {folder}."
        print_line(f"mpguard tune: {kept}") if options.format == "json" else write_lines([[(kept, "dim")]])
    if received:
        return 128 + received[0]
    return int(winner is None)


def _parsed(argv: list[str]) -> tuple[argparse.Namespace, TuneRequest]:
    """Return tune's options, and what they ask for. Raises `ConfigError`."""
    from mpguard.tune.request import TuneRequest

    options, words, count = script_runs.parsed(argv, "tune", _add_options)
    request = TuneRequest(
        Path(options.config), words, count, options.warmup, options.steps, options.rounds, options.time_limit,
        options.only, options.exhaustive, options.budget,
    )  # fmt: skip
    return options, request


def _write(request: TuneRequest, report: TuneReport) -> None:
    from mpguard.tune.write import write

    winner = report.winner
    assert winner is not None  # the caller has checked it
    write(request.config, winner.candidate, _figures(report, winner))


def _figures(report: TuneReport, winner: TuneRow) -> str:
    """Return the comment for mp.yaml."""
    from mpguard.policy import hardware

    rows = [winner, *([report.baseline] if report.baseline not in (None, winner) else [])]
    times = [f"{row.candidate.name} {_time(row)} ms ({_interval(row)})" for row in rows if row is not None]
    return f"{datetime.date.today()}, {hardware.detect()}, per step: {', '.join(times)}"


# -- output -----------------------------------------------------------------------------------------------------------


def _print_list(chosen: Sequence[TuneCandidate], form: str) -> None:
    if form == "json":
        rows = [{"name": each.name, "overrides": dict(each.overrides), "reason": each.refused} for each in chosen]
        print(json.dumps({"version": 1, "candidates": rows}, indent=2))
        return
    width = max(len(each.name) for each in chosen)
    reasons: dict[str, list[str]] = {}
    for each in chosen:
        state = ("refused", "yellow") if each.refused else ("runs here", "")
        write_lines([[(f"{each.name:{width}}  ", "bold"), state]])
        if why := each.refused or each.cost:
            reasons.setdefault(why, []).append(each.name)
    write_lines(_grouped(reasons))


def _fitted(
    rows: list[tuple[str, ...]], widths: list[int], width: int | None
) -> tuple[list[tuple[str, ...]], list[int]]:
    """Return the columns that a terminal has room for, with the state: the interval, memory and loss go first."""
    for title in ("interval", "memory", "loss"):
        if width is None or sum(widths) + 2 * len(widths) + len("refused") <= width:
            break
        at = rows[0].index(title)
        rows = [row[:at] + row[at + 1 :] for row in rows]
        widths = widths[:at] + widths[at + 1 :]
    return rows, widths


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[TuneReport], None]]:
    """Yield what shows a report while it grows: a table on a terminal, else a line per run."""
    if not sys.stderr.isatty():
        yield _LinePerRun()
        return
    from rich.live import Live

    with Live(console=rich_console(sys.stderr), transient=True, refresh_per_second=4) as live:
        yield lambda report: live.update(_table(report))


class _LinePerRun:
    """Prints each run when it has ended."""

    def __init__(self) -> None:
        self._printed: set[tuple[str, int]] = set()

    def __call__(self, report: TuneReport) -> None:
        for row in report.rows:
            number = len(row.trials)
            key = row.candidate.name, number
            if number and key not in self._printed:
                self._printed.add(key)
                ms = row.trials[-1].ms
                found = f"{statistics.median(ms):.4g} ms per step" if ms else f"{row.state}: {row.reason}"
                print_line(printable(f"mpguard tune: {row.candidate.name}, run {number}: {found}"))


def _table(report: TuneReport) -> Table:
    from rich.table import Table

    table = Table(*_HEADER, box=None, pad_edge=False)
    table.columns[-1].no_wrap = True
    for row in report.rows:
        running = row.candidate.name == report.running
        cells = [*_cells(row, report), f"running, round {len(row.trials) + 1}" if running else _why(row, report)]
        table.add_row(*map(printable, cells), style="bold" if running else _style(row))
    return table


def _style(row: TuneRow) -> str:
    return _STYLES[row.state] if row.trials or row.reason else "dim"  # dim: not yet started


def _lines(report: TuneReport, request: TuneRequest, *, written: bool) -> Iterator[Line]:
    rows = [_HEADER[:-1], *(tuple(_cells(row, report)) for row in report.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows, widths = _fitted(rows, widths, columns())
    yield [("  ".join(f"{cell:{width}}" for cell, width in zip(rows[0], widths, strict=True)).rstrip(), "bold")]
    for row, cells in zip(report.rows, rows[1:], strict=True):
        text = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
        state = "" if row.measured else row.note.partition(":")[0] or row.state
        yield [(f"{text}  {state}".rstrip(), _STYLES[row.state])]
    yield [("", "")]
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        for why in (_why(row, report), row.candidate.cost):
            reasons.setdefault(why, []).append(row.candidate.name)
    yield from _grouped(reasons)
    yield from _verdict(report, request, written)


def _grouped(reasons: Mapping[str, Sequence[str]]) -> Iterator[Line]:
    """Yield each reason once, with the candidates that it is about."""
    for why, names in reasons.items():
        if why:
            yield [(f"{', '.join(names)}: ", "bold"), (printable(why), "")]


def _verdict(report: TuneReport, request: TuneRequest, written: bool) -> Iterator[Line]:
    winner = report.winner
    if winner is None:
        yield [("Interrupted: no winner." if report.interrupted else "No candidate could be measured.", "bold")]
        return
    yield [(f"The winner is {winner.candidate.name}: {_time(winner)} ms per step.", "bold green")]
    if report.baseline is None:
        yield [("No run in 16 bits could be measured, so it is not known whether FP8 is faster.", "yellow")]
    if not winner.candidate.overrides:
        yield [(f"{request.config} stays as it is.", "")]
        return
    fields = ", ".join(f"{name}: {json.dumps(value)}" for name, value in winner.candidate.overrides.items())
    yield [(f"{request.config}: {'written' if written else 'not written'}: mpguard_overrides: {{{fields}}}", "")]


def _cells(row: TuneRow, report: TuneReport) -> list[str]:
    from mpguard.tune.model import loss_gap

    baseline = report.baseline
    if not row.measured:
        return [row.candidate.name, *[""] * 5]
    gap = loss_gap(row, baseline)
    return [
        row.candidate.name,
        _time(row),
        _interval(row),
        _speed(row, baseline),
        f"{row.bytes / 2**30:.2f} GiB" if row.bytes is not None else "",
        "" if gap is None else "baseline" if row is baseline else f"{gap:+.1%}",
    ]


def _time(row: TuneRow) -> str:
    time = row.time
    return f"{time.ms:.4g}" if time is not None else ""


def _interval(row: TuneRow) -> str:
    time = row.time
    return f"{time.low:.4g} to {time.high:.4g}" if time is not None else ""


def _speed(row: TuneRow, baseline: TuneRow | None) -> str:
    time, other = row.time, baseline.time if baseline is not None else None
    return f"x{other.ms / time.ms:.2f}" if time is not None and other is not None else ""


def _why(row: TuneRow, report: TuneReport) -> str:
    """Return what is to be known of a row: why it has no figures, or why it cannot win."""
    from mpguard.tune.model import broken_loss

    if row.measured:
        return broken_loss(row, report.baseline)
    if not row.trials and not row.reason:
        return ""
    return row.reason if row.note else f"{row.state}: {row.reason}"
