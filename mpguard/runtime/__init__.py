"""The policy at run time: injection and proof.

    plan      what a run was asked to be, and how workers are told
    launcher  the launcher half: resolve once, refuse what can be refused, start the workers
    checks    what can be known before training
    hooked    what the hook's .pth line imports
    imports   patches are made as modules come in
    patches   the few things that are wrapped, and why: a table for each library
    products  the matrix products behind a backward pass, and their dtypes
    recorder  what is only visible while it happens
    observe   what a process really does, as plain data
    proof     that data against the policy: rows, table, JSON
    verdict   one verdict over all ranks
    guard     when to prove, and what follows

Importing this package imports nothing else: the hook does it at interpreter start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.runtime.guard import activate, prove

__all__ = ["activate", "prove"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from mpguard.runtime import guard

        return getattr(guard, name)
    raise AttributeError(f"module 'mpguard.runtime' has no attribute {name!r}")
