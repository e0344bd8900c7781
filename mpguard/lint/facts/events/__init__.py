"""Events: what happens to models, losses, optimizers and scalers, each kind found by one small function.

A new kind of event is a function in a module of this package, decorated with `@finds("kind")`, that yields
`Event`s; `Facts.events` sorts and remembers them.
"""

from mpguard.lint.facts.events import autocast, casts, checkpoints, compile, fp8, scaling, training
from mpguard.lint.facts.events.compile import compiled
from mpguard.lint.facts.events.event import FINDERS, Event, Finder, finds, is_optimizer, is_scaler

__all__ = [
    "FINDERS",
    "Event",
    "Finder",
    "autocast",
    "casts",
    "checkpoints",
    "compile",
    "compiled",
    "finds",
    "fp8",
    "is_optimizer",
    "is_scaler",
    "scaling",
    "training",
]
