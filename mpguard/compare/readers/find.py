"""Find the log of a run in a file or a folder, and read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mpguard.compare.model import RunLog
from mpguard.compare.readers import csv_file, jsonl, tensorboard, trainer_state, wandb
from mpguard.compare.readers.columns import ColumnStore
from mpguard.core.errors import ConfigError, did_you_mean_file

#: What a log's file is called, in a folder of a run.
_PATTERNS = {
    "wandb": "*.wandb",
    "trainer_state": "trainer_state.json",
    "tensorboard": "*tfevents*",
    "jsonl": "*.jsonl",
    "csv": "*.csv",
}
#: Where logs are, below a run's folder: TensorBoard's of the Trainer, W&B's, and the last checkpoint's state.
_DEEPER = ("", "checkpoint-*/", "runs/*/", "wandb/latest-run/", "wandb/offline-run-*/")


def read_run(path: Path, name: str | None = None, loss: str | None = None) -> RunLog:
    """Return the log of a run. `loss` names the column of the loss.

    Raises `ConfigError` if there is none, or if it cannot be used.
    """
    if not path.exists():
        raise ConfigError(f"{path}: does not exist{did_you_mean_file(str(path))}")
    try:
        source, files = _in_folder(path) if path.is_dir() else (_format(path), [path])
        found, source = _read(source, files)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    log = found.as_run(name or _name(path), files[0], source, loss)
    if not log.loss:
        raise ConfigError(f"{path}: has no loss; is the log empty, or not written yet?")
    return log


def _read(source: str, files: Sequence[Path]) -> tuple[ColumnStore, str]:
    if source == "jsonl":
        return jsonl.read(files[0])
    if source == "tensorboard":
        return tensorboard.read(files), source
    reader = {"wandb": wandb.read, "trainer_state": trainer_state.read, "csv": csv_file.read}[source]
    return reader(files[0]), source


def _format(path: Path) -> str:
    """Return the format of a file, by its name, else by its first bytes."""
    for source, pattern in _PATTERNS.items():
        if path.match(pattern):
            return source
    with path.open("rb") as stream:
        start = stream.read(512)
    if start.startswith(b":W&B"):
        return "wandb"
    if tensorboard.is_event_file(path):
        return "tensorboard"
    if start.lstrip().startswith(b"{"):
        whole = path.suffix == ".json" and b'"event"' not in start
        return "trainer_state" if whole else "jsonl"
    if path.suffix in (".txt", ".tsv") and re.search(rb"\bstep\b", start.split(b"\n")[0], re.I):
        return "csv"
    raise ConfigError(
        f"{path}: is no log that is known: JSON lines (of `mpguard launch --watch-json`), TensorBoard event files,"
        " trainer_state.json, W&B offline files (.wandb) and CSV are"
    )


def _in_folder(folder: Path) -> tuple[str, list[Path]]:
    """Return format and files of the log in a folder: in itself, else in a checkpoint or where the Trainer writes."""
    for deeper in _DEEPER:
        found = {
            source: paths
            for source, pattern in _PATTERNS.items()
            if (paths := sorted(path for path in folder.glob(deeper + pattern) if path.is_file()))
        }
        if deeper.startswith("checkpoint") and found:
            newest = max(found.get("trainer_state", []), key=_checkpoint, default=None)
            found = {"trainer_state": [newest]} if newest is not None else {}
        if found:
            return _only(folder, found)
    raise ConfigError(f"{folder}: has no log: no {', '.join(_PATTERNS.values())}, nor a checkpoint of the Trainer")


def _only(folder: Path, found: dict[str, list[Path]]) -> tuple[str, list[Path]]:
    """Return the one log; event files in one folder are of one run. Raises `ConfigError` if there are several."""
    paths = [path for each in found.values() for path in each]
    together = len(found) == 1 and (len(paths) == 1 or (set(found) == {"tensorboard"} and _one_folder(paths)))
    if not together:
        names = ", ".join(str(path.relative_to(folder)) for path in paths[:6])
        more = f" and {len(paths) - 6} more" if len(paths) > 6 else ""
        raise ConfigError(f"{folder}: has several logs; name the file to compare: {names}{more}")
    return next(iter(found)), paths


def _one_folder(paths: Sequence[Path]) -> bool:
    return len({path.parent for path in paths}) == 1


def _checkpoint(path: Path) -> int:
    digits = path.parent.name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


def _name(path: Path) -> str:
    """Return a name for a run: that of its file, or of its folder where all files are named alike."""
    path = path.resolve()
    if path.is_dir():
        return path.name
    if path.name == "trainer_state.json" or "tfevents" in path.name:
        return _name(path.parent.parent if path.parent.name.startswith("checkpoint-") else path.parent)
    return path.stem
