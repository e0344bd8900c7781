"""The objects of a class in this process, found among all those of the garbage collector."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def objects_of(kind: type[T]) -> list[T]:
    """Return the objects of a class and of its subclasses."""
    kinds = {kind, *_subclasses(kind)}
    objects = _found(kinds)
    if gc.get_freeze_count():  # the garbage collector returns no frozen objects
        gc.unfreeze()
        objects = _found(kinds)
        gc.freeze()
    return objects


def _found(kinds: set[type]) -> list[Any]:
    """Return the objects of some classes, without a list of all objects in which another thread of the program runs.

    A thread that builds a tuple fails (`SystemError`) where somebody else refers to it. So the classes that have
    objects are found in one call of C code, and then what refers to them. Not `isinstance`: it reads `__class__`, and
    lazy proxies of other libraries then load their objects.
    """
    all_objects: Iterator[list[Any]] = itertools.islice(iter(gc.get_objects, None), 1)  # it is called inside of `set`
    kinds = kinds & set(map(type, itertools.chain.from_iterable(all_objects)))
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(kind)
    for each in subclasses:
        yield each
        yield from _subclasses(each)
