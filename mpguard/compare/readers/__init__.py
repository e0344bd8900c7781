"""Read the log of a run, whatever wrote it.

    columns        values by step and column; restarts; which column is the loss (`ColumnStore`)
    jsonl          one JSON object a line: `--watch-json`, and others
    tensorboard    event files
    trainer_state  the Trainer's trainer_state.json
    wandb          W&B's offline files
    csv_file       tables with a header
    wire_format    protocol buffers, as far as the last two binary formats need them

A log that is being written is read as far as it goes; a damaged one is refused with the place.
"""

from __future__ import annotations

from mpguard.compare.readers.find import read_run

__all__ = ["read_run"]
