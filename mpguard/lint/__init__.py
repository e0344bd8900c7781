"""The linter. Rules import what they need from here:

    from mpguard.lint import Bad, Diagnostic, Facts, Fix, Good, Rule, any_of

`interface.py` has all names. It is imported when the first of them is used: importing this package alone imports
neither libcst nor the facts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.lint.interface import *  # noqa: F403


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    interface = importlib.import_module("mpguard.lint.interface")
    try:
        found: object = getattr(interface, name)
    except AttributeError:
        raise AttributeError(f"module 'mpguard.lint' has no attribute {name!r}") from None
    globals()[name] = found
    return found
