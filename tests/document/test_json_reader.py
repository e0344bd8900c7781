"""The scanner of JSON objects and arrays, which the config reader and the notebook reader share."""

from __future__ import annotations

import json

import pytest

from mpguard.document.json_reader import JsonScanner
from mpguard.document.nodes import Unreadable

TEXT = '{ "a" : [1, {"b": NaN}, "\\u00e9"],\n "c": {} , "d": -2e3}'


def test_members_have_keys_values_and_spans() -> None:
    scanner = JsonScanner(TEXT)
    members = {key.value: value for key, value in scanner.members(0, scanner.decoded)}
    assert scanner.end == len(TEXT)
    assert list(members) == ["a", "c", "d"]
    assert all(
        json.dumps(json.loads(TEXT[each.start : each.end])) == json.dumps(each.value) for each in members.values()
    )


def test_items_have_values_and_spans() -> None:
    scanner = JsonScanner(TEXT)
    start = TEXT.index("[")
    items = list(scanner.items(start, scanner.decoded))
    assert [TEXT[each.start : each.end] for each in items] == ["1", '{"b": NaN}', '"\\u00e9"']
    assert TEXT[scanner.end - 1] == "]"


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ('{"a": 1,}', 7, "a comma before `}`"),
        ('{"a" 1}', 5, "'1' where `:` is needed"),
        ("{a: 1}", 1, 'where a key in double quotes (") is needed'),
        ('{"a": 1 "b": 2}', 8, "where `,` or `}` is needed"),
        ('{"a": 1', 7, "the file ends where `,` or `}` is needed"),
        ('{"a\n": 1}', 1, "no end on its line"),
    ],
)
def test_a_broken_object_is_unreadable_at_an_offset(text: str, offset: int, message: str) -> None:
    scanner = JsonScanner(text)
    with pytest.raises(Unreadable) as raised:
        list(scanner.members(0, scanner.decoded))
    assert raised.value.problem.span[0] == offset
    assert message in raised.value.problem.message


def test_a_broken_value_raises_as_json_does() -> None:
    scanner = JsonScanner('{"a": nul}')
    with pytest.raises(json.JSONDecodeError):
        list(scanner.members(0, scanner.decoded))
