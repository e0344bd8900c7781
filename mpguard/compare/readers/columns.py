"""Values by step and column, as a reader finds them, and which column is the loss of the training."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path

from mpguard.compare.model import FP8_COLUMNS, LoggedEvent, RunLog
from mpguard.core.errors import ConfigError, did_you_mean

#: A log that goes back to an earlier step more often than this has several runs in it.
_MOST_RESTARTS = 50
#: Names of columns, as `_plain` spells them, in order of preference.
_LOSS = (
    "loss", "train_loss", "training_loss", "loss_train", "train_loss_step", "lm_loss", "train_lm_loss",
    "lm_loss_training_lm_loss", "loss_metrics_global_avg_loss", "train_samples_train_loss", "value",
)  # fmt: skip
_NOT_TRAINING = re.compile(r"eval|val_|valid|test|scale|best|min|max|aux|_std")
_GRAD_NORM = ("grad_norm", "gradient_norm", "global_grad_norm", "total_norm")
_LOSS_SCALE = ("loss_scale", "loss_scaler_scale", "grad_scale")
#: Column of a step's time -> milliseconds per unit.
_MS = {"ms": 1.0, "step_ms": 1.0, "ms_per_step": 1.0, "step_time_ms": 1.0, "step_time_s": 1000.0,
       "time_metrics_end_to_end_s": 1000.0}  # fmt: skip
#: Column of memory -> bytes per unit.
_MEMORY = {"memory": 1.0, "memory_bytes": 1.0, "max_memory_allocated": 1.0, "memory_max_reserved_gib": 2.0**30,
           "memory_max_active_gib": 2.0**30}  # fmt: skip
#: Seconds since an epoch.
CLOCK = "wall_time"
_CLOCKS = (CLOCK, "timestamp", "runtime")


class ColumnStore:
    """Collects values in the order of the file. After a restart, later values replace those of the same steps."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[int, float]] = {}
        self.events: list[LoggedEvent] = []
        self.notes: list[str] = []
        self._last: dict[str, int] = {}
        self._restarts: dict[str, list[int]] = {}
        self._repeated: dict[str, int] = {}

    def add(self, step: int, name: str, value: float) -> None:
        column = self.columns.setdefault(name, {})
        last = self._last.get(name, step)
        if step < last:
            self._restarts.setdefault(name, []).append(step)
            if len(self._restarts[name]) <= _MOST_RESTARTS:
                for old in [each for each in column if each >= step]:
                    del column[old]
        elif step in column and column[step] != value:
            self._repeated[name] = self._repeated.get(name, 0) + 1
        column[step] = value
        self._last[name] = step

    def as_run(self, name: str, path: Path, source: str, loss: str | None = None) -> RunLog:
        """Return the run. `loss` names its column.

        Raises `ConfigError` if there is no such column, if several may be the loss, or if several runs are mixed.
        """
        chosen = self._loss_column(path, loss)
        values = self.columns[chosen]
        restarts = self._restarts.get(chosen, [])
        if len(restarts) > _MOST_RESTARTS or self._repeated.get(chosen, 0) > max(3, len(values) // 10):
            raise ConfigError(
                f"{path}: `{chosen}` has several values for one step, again and again: several runs, or several"
                " ranks, are mixed in one file. Give a file per run, with one loss per step"
            )
        notes = list(self.notes)
        if restarts:
            notes.append(f"restarted at step {', '.join(map(str, restarts))}: the later values of a step are used")
        memory = self._first(_MEMORY)
        return RunLog(
            name,
            path,
            source,
            dict(sorted(values.items())),
            grad_norm=self._scaled(self._first(dict.fromkeys(_GRAD_NORM, 1.0))),
            loss_scale=self._scaled(self._first(dict.fromkeys(_LOSS_SCALE, 1.0))),
            ms=self._scaled(self._first(_MS)) or self._times(values),
            fp8={name: self._scaled((f"fp8_{name}", 1.0)) for name in FP8_COLUMNS if f"fp8_{name}" in self.columns},
            memory=int(max(self._scaled(memory).values(), default=0)) or None,
            events=tuple(self.events),
            notes=tuple(notes),
        )

    def _loss_column(self, path: Path, wanted: str | None) -> str:
        if wanted is not None:
            if wanted not in self.columns:
                raise ConfigError(f"{path}: has no column `{wanted}`{did_you_mean(wanted, self.columns)}")
            return wanted
        plain = {_plain(name): name for name in reversed(self.columns)}
        for known in _LOSS:
            if known in plain:
                return plain[known]
        maybe = [name for key, name in plain.items() if "loss" in key and not _NOT_TRAINING.search(key)]
        if len(maybe) == 1:
            return maybe[0]
        names = ", ".join(f"`{name}`" for name in list(self.columns)[:12]) or "nothing"
        problem = "several columns may be the loss" if maybe else "no column is known as the loss"
        raise ConfigError(f"{path}: {problem}; name one with `--loss COLUMN`. The log has {names}")

    def _first(self, names: Mapping[str, float]) -> tuple[str, float] | None:
        """Return the first column with one of these names, at its end too (`train/grad_norm`), and its unit."""
        for known, unit in names.items():
            for name in self.columns:
                if _plain(name) == known or _plain(name).endswith(f"_{known}"):
                    return name, unit
        return None

    def _scaled(self, column: tuple[str, float] | None) -> dict[int, float]:
        if column is None:
            return {}
        name, unit = column
        return {step: value * unit for step, value in sorted(self.columns[name].items())}

    def _times(self, loss: Mapping[int, float]) -> dict[int, float]:
        """Return milliseconds per step between records, from the clock of the log."""
        plain = {_plain(name): name for name in self.columns}
        clock = next((self.columns[plain[name]] for name in _CLOCKS if name in plain), {})
        steps = [step for step in sorted(loss) if step in clock]
        return {
            step: (clock[step] - clock[before]) / (step - before) * 1000
            for before, step in itertools.pairwise(steps)
            if clock[step] > clock[before]
        }


def _plain(name: str) -> str:
    """Return a column's name in the spelling of the tables: W&B's CSV files put the run's name in front."""
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(" - ")[2].lower()).strip("_")


def number(value: object) -> float | None:
    """Return a value as a number; text only if it spells NaN or infinity, which JSON has no numbers for."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str):
        if value.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity"):
            return None
        return float(value)
    try:
        return float(value)
    except OverflowError:
        return math.inf
