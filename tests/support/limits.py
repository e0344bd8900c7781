"""Time limits of tests: they end what hangs, and never what is only slow."""

from __future__ import annotations

import os
import time

#: Seconds that `_work` takes on an idle machine of the kind on which the limits were chosen.
REFERENCE = 0.05
#: Set by the session for its workers, or by hand for a machine that is slower than it seems.
VARIABLE = "MPGUARD_TEST_TIME_SCALE"
#: No limit becomes shorter than it is written, and none longer than this many times.
SMALLEST, LARGEST = 4.0, 20.0


def scale() -> float:
    """How many times longer the limits are than they are written: measured once per session."""
    given = os.environ.get(VARIABLE)
    if given is None:
        given = os.environ[VARIABLE] = f"{measured():.2f}"
    return float(given)


def measured() -> float:
    """Return the slowness of this machine: of one core, and of more runnable processes than it has cores."""
    began = time.perf_counter()
    _work()
    slowness = (time.perf_counter() - began) / REFERENCE
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
    return min(max(SMALLEST * slowness, SMALLEST * waiting, SMALLEST), LARGEST)


def seconds(limit: float) -> float:
    """Return a limit for this machine. limit: generous on an idle machine with two cores."""
    return limit * scale()


def _work() -> int:
    total = 0
    for number in range(700_000):
        total += number & 7
    return total
