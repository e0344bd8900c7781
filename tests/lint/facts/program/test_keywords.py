"""The keyword arguments of a call, with those of its `**mapping`."""

from __future__ import annotations

import pytest
from lint_facts import facts_of

from mpguard.lint.facts.program import keywords
from mpguard.lint.facts.program.lattice import constants_of

TABLE = 'OPTIONS = {"a": 1, "b": 2}\n'


#: A call, and the arguments that are read of it; `...` among them if there may be others.
ITEMS = [
    ("use(a=1, **{'b': 2})", {"a": "1", "b": "2"}),
    ("use(**dict(a=1), **{'b': x})", {"a": "1", "b": "x"}),
    (TABLE + "use(**OPTIONS)", {"a": "1", "b": "2"}),
    (TABLE + "def f():\n    use(**OPTIONS)", {"a": "1", "b": "2"}),
    ("TABLES = {'one': {'a': x}}\ndef f():\n    use(**TABLES['one'])", {"a": "TABLES['one']['a']"}),
    (TABLE + "use(**{**OPTIONS, 'b': 3})", {"a": "1", "b": "3"}),
    (TABLE + "MORE = dict(OPTIONS, b=3)\nuse(**MORE)", {"a": "1", "b": "3"}),
    ("def f():\n    o = {'a': 1}\n    o['b'] = y\n    use(**o)", {"a": "1", "b": "y"}),
    (TABLE + "def f(options):\n    use(**options)\nf(OPTIONS)", {"a": "1", "b": "2"}),
    ("def make():\n    return {'a': 1}\nuse(**make())", {"a": "1"}),
    (TABLE + "def f(a, b):\n    pass\ndef g(**more):\n    use(**OPTIONS, **more)", {"a": "1", "b": "2", "...": ""}),
    # Changed, from outside, or one of several.
    ("use(**given)", {"...": ""}),
    (TABLE + "OPTIONS.update(more)\nuse(**OPTIONS)", {"...": ""}),
    (TABLE + "def f():\n    OPTIONS['a'] = 3\nuse(**OPTIONS)", {"...": ""}),
    (TABLE + "if x:\n    OPTIONS['a'] = 3\nuse(**OPTIONS)", {"...": ""}),
    (TABLE + "OPTIONS['a'] = 3\nmore = OPTIONS\nmore['b'] = 4\nuse(**OPTIONS)", {"...": ""}),
    (TABLE + "def f(o):\n    use(**o)\nmine = dict(OPTIONS)\nmine['a'] = 3\nf(mine)", {"...": ""}),
    (TABLE + "def f(o):\n    use(**o)\nf(OPTIONS)\nf({'a': 3})", {"...": ""}),
    ("use(**({'a': 1} if x else {'b': 2}))", {"...": ""}),
    ("def make():\n    o = {'a': 1}\n    o['a'] = x\n    return o\nuse(**make())", {"...": ""}),
    ("o = {'a': 1}\nfor o in many:\n    use(**o)", {"...": ""}),
    ("x = {'a': 1}\nfor _ in many:\n    x = use(**x)", {"...": ""}),
]


@pytest.mark.parametrize(("code", "expected"), ITEMS)
def test_items_of_a_mapping_are_keyword_arguments(code: str, expected: dict[str, str]) -> None:
    facts = facts_of(code)
    (call,) = facts.calls["use"]
    shown = {name: facts.short(value).replace('"', "'") for name, value in call.keywords.items()}
    assert shown | ({"...": ""} if call.starred else {}) == expected
    assert all(facts.span(value, call)[0] >= 0 for value in call.keywords.values())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("use(a=1)", [{"a": [1]}]),
        (TABLE + "use(**OPTIONS)", [{"a": [1], "b": [2]}]),
        (TABLE + "use(c=3, **OPTIONS)", [{"a": [1], "b": [2], "c": [3]}]),
        ("use(**dict(a=1))", [{"a": [1]}]),
        ("OPTIONS = dict(a=1)\nuse(**OPTIONS)", [{"a": [1]}]),
        ("def f(c, **kwargs):\n    use(**kwargs)\nf(c=3, a=1)\nf(4, b=2)", [{"a": [1]}, {"b": [2]}]),
        (TABLE + "def f(**kwargs):\n    use(**kwargs)\nf(**OPTIONS)", [{"a": [1], "b": [2]}]),
        (TABLE + "def f(options):\n    use(**options)\nf(OPTIONS)", [{"a": [1], "b": [2]}]),
        (TABLE + 'if x:\n    OPTIONS["a"] = 3\nuse(**OPTIONS)', [{"a": [1], "b": [2]}, {"a": [3], "b": [2]}]),
        ('more = {}\nmore["a"] = 1\nuse(c=2, **more)', [{"c": [2]}, {"c": [2], "a": [1]}]),
        # Unknown: changed in another way or place, from outside, or positional.
        (TABLE + "OPTIONS[name] = 3\nuse(**OPTIONS)", None),
        (TABLE + 'OPTIONS["a"] = 3\nif x:\n    OPTIONS["a"] = 4\nuse(**OPTIONS)', None),
        (TABLE + 'OPTIONS["a"] = 3\nmore = OPTIONS\nmore["b"] = 4\nuse(**OPTIONS)', None),
        (TABLE + 'def f():\n    OPTIONS["a"] = 3\nuse(**OPTIONS)', None),
        ('more = {"a": {}}\nmore["a"]["b"] = 1\nuse(**more)', None),
        (TABLE + "OPTIONS.update(more)\nuse(**OPTIONS)", None),
        ("def f(**kwargs):\n    use(**kwargs)", None),
        ("def f(**kwargs):\n    use(**kwargs)\nf(**given)", None),
        ("def f(**kwargs):\n    use(**kwargs)\nrun(f)\nf(a=1)", None),
        ("use(*given)", None),
    ],
)
def test_passed_keywords(code: str, expected: list[dict[str, list[object]]] | None) -> None:
    facts = facts_of(code)
    (call,) = facts.calls["use"]
    found = keywords.passed(call, facts)
    shown = None if found is None else [{name: constants_of(value()) for name, value in way.items()} for way in found]
    assert shown == expected
