"""What mpguard says of a run, on stderr (the script's stdout is the script's), and what it keeps silent about."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Iterator

from mpguard import hardware
from mpguard.errors import NotCarried, NotProven
from mpguard.runtime.plan import Plan


def say(text: str) -> None:
    """A line of mpguard's own."""
    sys.stderr.write(f"{text}\n")  # in one piece: ranks share it
    sys.stderr.flush()


def header(plan: Plan) -> str:
    """`mpguard 0.1.0 · recipe bf16_mixed · ddp · 2 processes · no GPU`."""
    from mpguard import __version__

    parts = [f"mpguard {__version__}", f"recipe {plan.policy.name}"]
    if plan.strategy:
        parts.append(plan.strategy)
    if plan.processes:
        parts.append(f"{plan.processes} process{'es' if plan.processes > 1 else ''}")
    return " · ".join([*parts, str(hardware.detect())])


def not_in_force(message: str) -> str:
    """A failure as it is said; what was not proven says so itself."""
    return message if re.match(r"(rank [\d, ]+: )?not proven", message) else f"not in force: {message}"


def warn_not_proven(message: str) -> None:
    """A script that makes errors of warnings does not mean this one."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", NotProven)
        warnings.warn(NotProven(message), stacklevel=3)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What one target cannot carry another one does; `require_carried` speaks where none does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotCarried)
        yield


def whole_lines() -> None:
    """torchrun starts workers unbuffered, so that lines of several ranks mix in one pipe; here each is one write."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
