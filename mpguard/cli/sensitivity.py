"""Measure how much each layer of a script's model loses in each low-precision format, and propose a recipe per layer.

mpguard sensitivity --config mp.yaml train.py --lr 3e-4          a table, the layer that loses most first
mpguard sensitivity --config mp.yaml --html page.html train.py   a heat map of layers and steps
mpguard sensitivity --config mp.yaml --write mp.yaml train.py    tries the proposal, and writes it as fp8_modules

The script is run unchanged, uncompiled and without FP8, in processes of its own, for a few optimizer steps; then it is
ended without its remaining lines. At each step a share of the Linear layers is measured: what their output and their
weight gradient would lose in BF16, FP8 (tensorwise, rowwise, blockwise), MXFP8 and NVFP4. The formats are computed in
software, so any machine can measure all of them; what is printed are their numbers, not their speed. Put the options of
sensitivity, and accelerate's, before SCRIPT. Exit status: 0 measured, 1 the proposal does not work, 2 could not run.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpguard.cli import launch, progress, script_runs
from mpguard.core.console import Line, columns, folded, print_line, printable, write_lines
from mpguard.core.errors import ConfigError, MissingExtra, PolicyError

if TYPE_CHECKING:
    from mpguard.numerics.layers import MeasuredLayer
    from mpguard.numerics.proposal import Proposal
    from mpguard.numerics.report import Sensitivity
    from mpguard.numerics.request import SensitivityPlan, SensitivityRequest

#: How many layers the table has without `--all`.
_ROWS = 20
#: The columns that a narrow terminal has no room for, the least needed first; the recipe that sorts always stays.
_LEFT_OUT_FIRST = ("underflow", "in x out", "drift", "loses in", "share", "bf16", "blockwise", "mxfp8")
_LEFT_ALIGNED = ("layer", "in x out", "loses in", "underflow")
#: Names of layers are not made shorter than this.
_SHORTEST_NAME = 16

parse_arguments = launch.parse_arguments


def configure(parser: argparse.ArgumentParser) -> None:
    script_runs.configure(parser, "sensitivity", _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the mp.yaml of the run")
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="optimizer steps that are measured (default: 20)"
    )
    parser.add_argument(
        "--skip",
        type=int,
        default=1,
        metavar="N",
        help="steps before them; the first one is always skipped (default: 1)",
    )
    parser.add_argument(
        "--every", type=int, default=4, metavar="N", help="measure one in N layers at each step, in turn (default: 4)"
    )
    parser.add_argument("--only", action="append", metavar="FORMAT", help="a format to measure (repeatable)")
    parser.add_argument("--recipe", metavar="NAME", help="sort by this FP8 recipe (default: that of the config)")
    parser.add_argument(
        "--bound", type=float, metavar="DB", help="propose a recipe per layer that keeps this ratio (default: 20)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the proposal into this mp.yaml")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page")
    parser.add_argument("--all", action="store_true", help=f"show all layers, not the first {_ROWS}")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=900,
        metavar="SECONDS",
        help="a run that takes longer is ended (default: 900)",
    )
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="keep the output of the runs in this folder")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "accelerate", "mpguard sensitivity")
    from mpguard.numerics import request as requests

    options, request = _parsed(options.argv)
    chosen = requests.plan(request)
    _check_write(options, chosen)
    with script_runs.signals() as received, script_runs.scratch(options.scratch, "sensitivity") as folder:
        tried = ""
        try:
            with progress.bar("measuring", "steps") as on_step:
                report = requests.measure(request, chosen, folder, on_step or (lambda _done, _total: None))
            proposal = report.propose(chosen.bound, chosen.finer)
            if options.write is not None and not report.interrupted:
                tried = _write(options.write, request, chosen, proposal, folder / "tried")
        except ConfigError:
            script_runs.remove_output(folder, keep_all=False, keep_logs=True)
            print_line(f"mpguard sensitivity: the output of the script is in {folder}")
            raise
        script_runs.remove_output(folder, keep_all=options.scratch is not None, keep_logs=bool(tried))
    if options.html is not None:
        _write_page(report, proposal, options.html)
    if options.format == "json":
        proven = not tried if _was_tried(options, report, proposal) else None
        found = {**report.as_json(), "proposal": {**proposal.as_json(), "proven": proven}}
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        write_lines(_lines(report, chosen, proposal, options, tried))
    if tried:
        print_line(f"mpguard sensitivity: nothing is written: the proposal was tried, and {tried}. See {folder}")
        return 1
    return 128 + received[0] if received else 0


def _was_tried(options: argparse.Namespace, report: Sensitivity, proposal: Proposal) -> bool:
    return options.write is not None and not report.interrupted and bool(proposal.modules)


def _parsed(argv: list[str]) -> tuple[argparse.Namespace, SensitivityRequest]:
    """Return the options, and what they ask for. Raises `ConfigError`."""
    from mpguard.numerics.request import SensitivityRequest

    options, words, count = script_runs.parsed(argv, "sensitivity", _add_options)
    request = SensitivityRequest(
        Path(options.config), words, count, options.steps, options.skip, options.every, options.only, options.recipe,
        options.bound, options.time_limit,
    )  # fmt: skip
    return options, request


def _check_write(options: argparse.Namespace, chosen: SensitivityPlan) -> None:
    """Raise `ConfigError` if a proposal would not fit the config that it is to be written to."""
    from mpguard.document import mp_yaml

    if options.write is None:
        return
    if not chosen.is_configured:
        raise ConfigError(
            f"--write {options.write}: the proposal is for the recipe {chosen.recipe}, and {options.config} has "
            f"{chosen.configured.low_bit_recipe or 'no FP8'}. `mpguard apply` writes a recipe with FP8; or leave out "
            "--recipe"
        )
    if not chosen.configured.fp8:
        raise ConfigError(f"--write {options.write}: {chosen.configured.name} has no FP8, and fp8_modules is about FP8")
    if mp_yaml.load_policy(options.write) != chosen.configured:
        raise ConfigError(f"--write {options.write}: has another policy than {options.config}; name one with the same")


def _write(path: Path, request: SensitivityRequest, chosen: SensitivityPlan, proposal: Proposal, folder: Path) -> str:
    """Try a proposal in the script, and write it if it is proven there; return why it does not work, else nothing."""
    from mpguard.numerics import request as requests
    from mpguard.numerics.write import write

    if not proposal.modules:
        return ""
    try:
        candidate = requests.candidate_of(proposal, chosen)
    except PolicyError as error:
        return str(error)
    found = requests.tried(request, candidate, folder)
    if found.state != "measured":
        return f"{found.state}: {found.reason}"
    write(path, candidate, proposal)
    return ""


def _write_page(report: Sensitivity, proposal: Proposal, path: Path) -> None:
    from mpguard.numerics.page import html

    try:
        path.write_text(html(report, proposal), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the page cannot be written: {error.strerror or error}") from None


# -- the table --------------------------------------------------------------------------------------------------------


def _lines(
    report: Sensitivity, chosen: SensitivityPlan, proposal: Proposal, options: argparse.Namespace, tried: str
) -> Iterator[Line]:
    if report.interrupted:
        yield [("Interrupted: this was measured by then.", "yellow")]
    if report.failure:
        failed = f"Only {report.steps} steps were measured: {report.failure}"
        yield from folded([(printable(failed), "yellow")], 2, columns())
    if not report.measured:
        return
    yield from _table(report, proposal, None if options.all else _ROWS)
    yield [("", "")]
    for name, reason in _unmeasured(report):
        yield [(f"{printable(name)}: ", "bold"), (printable(f"not measured: {reason}"), "")]
    yield from folded(_overhead(report), 2, columns())
    for line in _proposed(report, chosen, proposal, options, tried):
        yield from folded(line, 2, columns())


def _table(report: Sensitivity, proposal: Proposal, most: int | None) -> Iterator[Line]:
    """Yield the layers, the one that loses most first: ratios in dB, where it loses, and underflow."""
    head = ("layer", "in x out", "share", *report.formats, "loses in", "underflow", "drift")
    shown = report.measured[:most]
    rows = [[printable(cell) for cell in row] for row in (head, *(_cells(layer, report) for layer in shown))]
    widths = {title: max(len(row[i]) for row in rows) for i, title in enumerate(head)}
    width, omitted = columns(), list[str]()
    for title in (*_LEFT_OUT_FIRST, "layer"):
        excess = sum(widths.values()) + 2 * (len(widths) - 1) - (width or math.inf)
        if excess <= 0:
            break
        if title == "layer":
            widths[title] = max(_SHORTEST_NAME, widths[title] - int(excess))
        elif title in widths and title != report.recipe:
            omitted.append(title)
            del widths[title]
    for number, row in enumerate(rows):
        cells = [
            f"{_shortened(cell, widths[title]):{'<' if title in _LEFT_ALIGNED else '>'}{widths[title]}}"
            for title, cell in zip(head, row, strict=True)
            if title in widths
        ]
        snr = shown[number - 1].snr(report.recipe) if number else None
        style = "bold" if not number else "yellow" if snr is not None and snr < proposal.bound else ""
        yield [("  ".join(cells).rstrip(), style)]
    if len(shown) < len(report.measured):
        yield [(f"... and {len(report.measured) - len(shown)} more, which lose less (--all)", "dim")]
    if omitted:
        yield [(f"Left out, as the terminal is narrow: {', '.join(omitted)}", "dim")]


def _shortened(text: str, width: int) -> str:
    """Return a name of at most `width` characters, without its middle: the ends of names of layers differ."""
    if len(text) <= width:
        return text
    start = (width - 2) // 3
    return f"{text[:start]}..{text[len(text) - (width - 2 - start) :]}"


def _cells(layer: MeasuredLayer, report: Sensitivity) -> tuple[str, ...]:
    from mpguard.numerics.layers import EXACT

    ratios = [layer.snr(form) for form in report.formats]
    drift = layer.drift(report.recipe)
    underflow = layer.shares(report.recipe, "underflow")
    role = max(underflow, key=lambda name: underflow[name], default="")
    return (
        layer.name,
        f"{layer.size} x {layer.outputs}",
        "kept out" if layer.left_out else f"{report.share([layer]):.1%}",
        *("" if snr is None else "exact" if snr >= EXACT else f"{snr:.1f}" for snr in ratios),
        layer.worst(report.recipe),
        f"{role} {_percent(underflow[role])}" if role and underflow[role] else "",
        "" if drift is None else f"{drift:+.1f}",
    )


def _percent(share: float) -> str:
    return "<0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def _unmeasured(report: Sensitivity) -> list[tuple[str, str]]:
    """Return the layers that were not measured, with the reason; many with one reason together."""
    seen = {layer.name for layer in report.measured}
    reasons: dict[str, list[str]] = {}
    for layer in report.layers:
        if layer.name not in seen:
            never = "its turn did not come (--steps), or no finite gradient"
            default = "interrupted before its turn" if report.interrupted else never
            reasons.setdefault(layer.unmeasured or default, []).append(layer.name)
    return [
        (", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""), reason)
        for reason, names in reasons.items()
    ]


def _overhead(report: Sensitivity) -> Line:
    text = f"dB, the lower of output and weight gradient, over {report.steps} steps; 20 dB is an error of 10 %."
    if report.total > 0:
        text += f" Measuring took {report.seconds:.1f} s of {report.total:.1f} s ({report.seconds / report.total:.0%})."
    return [(text, "dim")]


def _proposed(
    report: Sensitivity, chosen: SensitivityPlan, proposal: Proposal, options: argparse.Namespace, tried: str
) -> Iterator[Line]:
    below = [layer for layer in report.measured if not layer.left_out and _is_below(layer.snr(report.recipe), proposal)]
    reasons = collections.Counter(layer.left_out for layer in report.measured if layer.left_out)
    if reasons:
        yield [(f"Kept out of FP8: {', '.join(f'{printable(why)} ({n})' for why, n in reasons.items())}.", "dim")]
    if all(layer.left_out for layer in report.measured):
        yield [(f"The policy has no layer in {chosen.recipe}: no fp8_modules is needed.", "bold")]
        return
    if not below:
        yield [(f"All layers of {chosen.recipe} keep {proposal.bound:g} dB: no fp8_modules is needed.", "bold")]
        return
    count = f"{len(below)} of {sum(not layer.left_out for layer in report.layers)} layers"
    yield [(f"{count} are below {proposal.bound:g} dB in {chosen.recipe}. Proposal:", "bold")]
    yield from _entries(proposal.modules)
    worst = "" if proposal.worst is None else f"; the worst of them keeps {proposal.worst:.1f} dB"
    yield [(f"{proposal.share:.1%} of the matmuls of FP8 layers stay in FP8{worst}.", "")]
    if tried:
        yield [(f"It was tried, and does not work: {printable(tried)}. Nothing is written.", "red")]
    elif options.write is not None and not report.interrupted:
        yield [(f"It was tried, and is proven in force. Written to {options.write}.", "green")]
    elif chosen.is_configured and chosen.configured.fp8:
        yield [("Not tried: --write FILE runs it, and writes it if it is proven in force.", "dim")]


def _is_below(snr: float | None, proposal: Proposal) -> bool:
    return snr is not None and snr < proposal.bound - math.ulp(proposal.bound)


def _entries(modules: Sequence[Any]) -> Iterator[Line]:
    """Yield `fp8_modules` as YAML: in one line, or more than two entries in a line each."""
    entries = [f'{{pattern: "{each["pattern"]}", recipe: {each["recipe"]}}}' for each in modules]
    if len(entries) <= 2:
        yield [(printable(f"fp8_modules: [{', '.join(entries)}]"), "")]
        return
    yield [("fp8_modules:", "")]
    for entry in entries:
        yield [(printable(f"  - {entry}"), "")]
