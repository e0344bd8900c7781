"""A patch: one function of a library that is wrapped, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Patch:
    """One wrapped function.

    module, target: where it is defined (`Class.method` or `function`). needs: the parameters that
    the wrapper relies on, its fingerprint. why: with the numbers of the findings behind it (S1 to S25).
    tested: the versions that it was tried with.
    """

    module: str
    target: str
    needs: tuple[str, ...]
    reason: str
    tested: str
    wrap: Callable[[Function], Function]
