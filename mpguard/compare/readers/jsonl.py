"""Logs with one JSON object a line: those of `--watch-json`, and others that have a step and a loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpguard.compare.model import FP8_COLUMNS, LoggedEvent
from mpguard.compare.readers.columns import ColumnStore, number
from mpguard.core.errors import ConfigError

#: The version of watch's file that is read; a file that states none is of this version.
VERSION = 1
#: Lines of watch that are no events of the training: its head, and statistics.
_NO_EVENTS = ("run", "underflow_shares", "fp8_statistics")
_STEP_KEYS = ("step", "global_step", "iteration", "_step")


def read(path: Path) -> tuple[ColumnStore, str]:
    """Return the values of a log, and its format: watch or jsonl."""
    found = ColumnStore()
    source, foreign, ranks, left_out = "jsonl", 0, _Ranks(), tuple[str, ...]()
    for line, row in _rows(path, found.notes):
        _check_version(path, line, row)
        if "event" in row:
            source = "watch"
            if row["event"] != "step":
                if row["event"] == "run" and row.get("emulated") is True:
                    left_out = ("ms",)
                    found.notes.append("its FP8 was computed in software: the time of its steps is left out")
                if row["event"] == "fp8_statistics":
                    _add_statistics(found, row)
                found.events += [_event(row)] if row["event"] not in _NO_EVENTS else []
                continue
        step = next((row[key] for key in _STEP_KEYS if isinstance(row.get(key), int)), None)
        if step is None or isinstance(step, bool):
            foreign += 1
        elif ranks.counts(row):
            no_columns = (*_STEP_KEYS, *left_out, "event", "rank", "version")
            for key, value in row.items():
                if key not in no_columns and (as_number := number(value)) is not None:
                    found.add(step, key, as_number)
    if foreign:
        found.notes.append(f"{foreign} lines without a step are left out")
    if ranks.left_out:
        found.notes.append(f"{ranks.left_out} lines of other ranks than {ranks.kept} are left out")
    return found, source


def _add_statistics(found: ColumnStore, row: dict[str, Any]) -> None:
    """Add what the watch has written of FP8 layers at a step."""
    value, step = row.get("value"), row.get("step")
    if not isinstance(value, dict) or not isinstance(step, int):
        return
    for name in FP8_COLUMNS:
        if (as_number := number(value.get(name))) is not None:
            found.add(step, f"fp8_{name}", as_number)


class _Ranks:
    """Of the lines of several ranks, those of the first one count."""

    def __init__(self) -> None:
        self.kept: int | None = None
        self.left_out = 0

    def counts(self, row: dict[str, Any]) -> bool:
        rank = row.get("rank")
        if not isinstance(rank, int):
            return True
        if self.kept is None:
            self.kept = rank
        self.left_out += rank != self.kept
        return rank == self.kept


def _rows(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects with their line numbers. A last line without its end is left out: it is being written."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    for number_, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number_ == len(lines):
                notes.append("the last line is cut off (still being written?) and left out")
                return
            raise ConfigError(
                f"{path}:{number_}: is not JSON: `{line.strip()[:60]}`. A log has one JSON object a line;"
                " remove lines that another program wrote into it"
            ) from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number_}: is not a JSON object: `{line.strip()[:60]}`")
        yield number_, row


def _check_version(path: Path, line: int, row: dict[str, Any]) -> None:
    if "version" in row and "event" in row and row["version"] != VERSION:
        raise ConfigError(
            f"{path}:{line}: is a watch file of version {row['version']!r}; this mpguard reads version {VERSION}."
            " Use the mpguard that wrote it"
        )


def _event(row: dict[str, Any]) -> LoggedEvent:
    step = row.get("step")
    parts = [str(row["module"])] if row.get("module") is not None else []
    parts += [_shown(row["value"])] if row.get("value") is not None else []
    parts += [f"rank {row['rank']}"] if row.get("rank") else []
    parts += [str(row["suggestion"])] if row.get("suggestion") is not None else []
    valid = isinstance(step, int) and not isinstance(step, bool)
    return LoggedEvent(str(row["event"]), step if valid else None, ": ".join(parts))


def _shown(value: Any) -> str:
    """Return the value of an event in a line: of an object what is a text or a number."""
    if not isinstance(value, dict):
        return str(value)
    plain = {key: each for key, each in value.items() if isinstance(each, (str, int, float))}
    return ", ".join(f"{key} {each}" for key, each in plain.items())
