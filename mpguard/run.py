"""`python -m mpguard.run [--config mp.yaml] SCRIPT [ARGS]`; `USAGE` in `mpguard.runtime.launch.worker` describes it."""

from __future__ import annotations

from collections.abc import Sequence

from mpguard.runtime.launch import worker
from mpguard.watching import api

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script under its policy, and watch it. Returns the status that the process should end with."""
    return worker.main(argv, around=api.watching)


if __name__ == "__main__":
    worker.run_and_exit(around=api.watching)
