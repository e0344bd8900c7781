"""The keyword arguments of a call, with those of its `**mapping`."""

from __future__ import annotations

import pytest
from lint_facts import facts_of

from mpguard.lint.facts.program import keywords
from mpguard.lint.facts.program.lattice import constants_of

TABLE = 'OPTIONS = {"a": 1, "b": 2}\n'


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
