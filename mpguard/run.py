"""`python -m mpguard.run [--config mp.yaml] SCRIPT [ARGS]`; `USAGE` in `mpguard.runtime.launch.worker` describes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from mpguard.numerics import session
from mpguard.runtime.launch import worker
from mpguard.runtime.plan import Plan
from mpguard.watching import api

__all__ = ["main"]


@contextlib.contextmanager
def _observed(plan: Plan) -> Iterator[None]:
    """Watch the block, and measure it in a run of `mpguard sensitivity`."""
    with api.watching(plan), session.measuring(plan):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script under its policy, and watch it. Returns the status that the process should end with."""
    return worker.main(argv, around=_observed)


if __name__ == "__main__":
    worker.run_and_exit(around=_observed)
