"""The finders of events: casts, backward passes, optimizer steps, scaler calls and others, one small function per kind.

    event.py        `Event`, `EventKind`, the decorator `finds`, helpers of the finders
    autocast.py     autocast regions
    casts.py        explicit casts, layers and weights created in a dtype, default dtypes
    checkpoints.py  states that are saved and restored
    compile.py      torch.compile and options that enable it
    fp8.py          FP8 conversions, recipes and configs of torchao, Transformer Engine and accelerate
    scaling.py      GradScaler: creation, scale, unscale, step, update; gradient clipping
    training.py     backward passes, optimizer steps, Accelerate, DeepSpeed, FSDP, trainers

A new kind of event is a function in a module of this package, decorated with `@finds("kind")`, that yields `Event`s,
and its name in `EventKind`; `Facts.events` sorts and caches them.
"""

from mpguard.lint.facts.behaviour.events import autocast, casts, checkpoints, compile, fp8, scaling, training
from mpguard.lint.facts.behaviour.events.event import FINDERS, Event, EventKind, Finder, finds, is_optimizer, is_scaler

__all__ = [
    "FINDERS",
    "Event",
    "EventKind",
    "Finder",
    "autocast",
    "casts",
    "checkpoints",
    "compile",
    "finds",
    "fp8",
    "is_optimizer",
    "is_scaler",
    "scaling",
    "training",
]
