"""Regular expressions that are compiled at their first use."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import mpguard.lint
from mpguard.core.lazy_pattern import _LazyPattern, lazy_pattern


def test_it_is_used_like_a_compiled_pattern() -> None:
    words = lazy_pattern(rb"(?P<first>\w+) (\w+)", re.IGNORECASE)
    found = words.search(b"- One two")
    assert found is not None
    assert found["first"] == b"One"
    assert words.sub(rb"\2", b"one two") == b"two"
    assert [each[1] for each in words.finditer(b"a b, c d")] == [b"a", b"c"]
    assert list(map(words.fullmatch, [b"a"])) == [None]
    assert words.pattern == rb"(?P<first>\w+) (\w+)"
    assert words.flags == re.IGNORECASE
    assert words.groups == 2


def test_it_is_compiled_once_and_not_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = re.compile
    monkeypatch.setattr(re, "compile", lambda pattern, flags=0: compiled.append(pattern) or original(pattern, flags))
    words = lazy_pattern(r"\w+")
    assert compiled == []
    assert words.search("a")
    assert words.search("b")
    assert compiled == [r"\w+"]


def test_an_invalid_pattern_raises_at_its_first_use() -> None:
    invalid = lazy_pattern("(")
    with pytest.raises(re.error):
        invalid.search("")


def test_each_pattern_of_the_linter_is_valid() -> None:
    count = 0
    for module in pkgutil.walk_packages(mpguard.lint.__path__, "mpguard.lint."):
        names = vars(importlib.import_module(module.name))
        places = [names, *(vars(each) for each in names.values() if isinstance(each, type))]
        for value in (value for place in places for value in tuple(place.values())):
            if isinstance(value, _LazyPattern):
                assert value.flags is not None
                count += 1
    assert count > 300
