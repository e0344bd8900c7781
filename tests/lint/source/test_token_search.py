"""The search for tokens: the same as one search for each, whatever overlaps and wherever the windows end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpguard.lint.source import token_search
from mpguard.lint.source.token_search import TokenSearch


@given(st.sets(st.binary(min_size=1, max_size=4).map(lambda each: bytes(b % 3 for b in each))), st.binary(max_size=60))
def test_finds_what_single_searches_find(tokens: set[bytes], data: bytes) -> None:
    data = bytes(byte % 3 for byte in data)
    assert TokenSearch(tokens).found_in(data) == {token for token in tokens if token in data}


@pytest.mark.parametrize("at", range(12))
def test_a_token_at_the_end_of_a_window_is_found(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_search, "_WINDOW", 4)
    assert TokenSearch({b"half", b"ha", b"autocast"}).found_in(b"." * at + b"half" + b"." * 9) == {b"half", b"ha"}


def test_no_token_and_no_data() -> None:
    assert TokenSearch(()).found_in(b"half") == set()
    assert TokenSearch({b"half"}).found_in(b"") == set()
