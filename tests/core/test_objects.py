from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from mpguard.core.objects import objects_of


class Base:
    pass


class Derived(Base):
    pass


class Proxy:
    """It says that it is of another class."""

    __class__ = Derived  # type: ignore[assignment]


def test_objects_of_a_class_and_its_subclasses_are_found() -> None:
    made, proxy = [Base(), Derived()], Proxy()
    found = objects_of(Base)
    assert {id(each) for each in made} <= {id(each) for each in found}
    assert {type(each) for each in found} == {Base, Derived}, proxy
    assert objects_of(type("Unused", (), {})) == []


def test_frozen_objects_are_found() -> None:
    made = Derived()
    gc.freeze()
    try:
        assert made in objects_of(Derived)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


@pytest.fixture
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_threads_that_build_tuples_at_the_same_time_do_not_fail() -> None:
    failed, ended = list[SystemError](), threading.Event()

    def build() -> None:
        try:
            while not ended.is_set():
                tuple(number for number in range(50))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for each in threads:
        each.start()
    made = Derived()
    found = [objects_of(Derived) for _ in range(20)]
    ended.set()
    for each in threads:
        each.join()
    assert not failed
    assert all(made in each for each in found)
