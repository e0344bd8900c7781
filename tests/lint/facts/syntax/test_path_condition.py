"""Path conditions: under which flags a call runs, and which conditions exclude each other."""

from __future__ import annotations

import pytest
from lint_facts import facts_of

from mpguard.lint.facts.syntax.path_condition import (
    ALWAYS,
    All,
    Any,
    Condition,
    Fixed,
    Flag,
    Not,
    PathCondition,
    compatible,
    implies,
    negated,
)

A, B = Flag("amp"), Flag("fp16")


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ([A], [A], True),
        ([A], [Not(A)], False),
        ([A], [B], True),
        ([A], [negated(All((A, B)))], True),
        ([A, B], [negated(All((A, B)))], False),
        ([Not(A), Not(B)], [Any((A, B))], False),
        ([Not(A)], [Any((A, B))], True),
        ([Flag("precision", "fp16")], [Flag("precision", "bf16")], False),
        ([Flag("precision", "fp16")], [Not(Flag("precision", "bf16"))], True),
        ([Flag("precision", "fp16")], [Not(Flag("precision"))], False),
        ([Fixed(False)], [], False),
    ],
)
def test_exclusive_branches(one: list[Condition], other: list[Condition], together: bool) -> None:
    assert compatible(ALWAYS.given(*one), ALWAYS.given(*other)) is together


def test_implication() -> None:
    assert implies(ALWAYS.given(A, B), ALWAYS.given(A))
    assert not implies(ALWAYS.given(A), ALWAYS.given(A, B))
    assert implies(ALWAYS.given(Flag("x", "fp16")), ALWAYS.given(Flag("x")))


@pytest.mark.parametrize(
    ("code", "guard"),
    [
        ("if args.amp:\n    f()", [A]),
        ("if amp:\n    pass\nelse:\n    f()", [Not(A)]),
        ("if self.args.amp is not None:\n    f()", [A]),
        ("if not cfg.amp or fp16:\n    pass\nelse:\n    f()", [A, Not(B)]),
        ("if args.precision == 'fp16':\n    f()", [Flag("precision", "fp16")]),
        ("def g():\n    if amp:\n        return\n    f()", [Not(A)]),
        ("for x in y:\n    if not amp:\n        continue\n    f()", [A]),
        ("use = args.amp and fp16\nif use:\n    f()", [A, B]),
        ("x = f() if amp else None", [A]),
        ("amp and f()", [A]),
        ("if getattr(args, 'amp', False):\n    f()", [A]),
        ("if cfg['amp']:\n    f()", [A]),
        ("f()", []),
    ],
)
def test_the_path_condition_of_a_call(code: str, guard: list[Condition]) -> None:
    facts = facts_of(code)
    assert facts.calls["f"][0].guard == PathCondition(guard)


def test_a_branch_that_sets_its_own_flag_does_not_constrain_it_later() -> None:
    facts = facts_of("if scaler is None:\n    scaler = f()\nif scaler is not None:\n    g()\n")
    assert compatible(facts.calls["f"][0].guard, facts.calls["g"][0].guard)


def test_except_excludes_try() -> None:
    facts = facts_of("try:\n    f()\nexcept ImportError:\n    g()\nh()\n")
    f, g, h = (facts.calls[name][0].guard for name in "fgh")
    assert not compatible(f, g)
    assert compatible(f, h) and compatible(g, h)


def test_a_function_has_the_conditions_that_its_callers_share() -> None:
    facts = facts_of("""
        def inner():
            f()
        def outer():
            if args.amp:
                inner()
            elif other:
                pass
        if args.amp and debug:
            inner()
    """)
    assert facts.guard_of(facts.calls["f"][0]) == PathCondition([A])


def test_paths_that_contradict_a_constant_flag_are_impossible() -> None:
    facts = facts_of("ON = False\nif ON:\n    f()\nelse:\n    g()\nif args.ON2:\n    h()\nON2 = False\n")
    possible = {name: facts.calls[name][0].guard.possible for name in "fgh"}
    assert possible == {"f": False, "g": True, "h": True}


def test_nested_named_conditions_terminate() -> None:
    lines = ["c0 = a0 and b0", *(f"c{n} = c{n - 1} and not d{n} or c{n - 1} and e{n}" for n in range(1, 60))]
    facts = facts_of("import torch\n" + "\n".join(lines) + "\nif c59:\n    loss.backward()\n")
    (backward,) = facts.events("backward")
    assert backward.guard.possible


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("GradScaler() if amp else None", {A}),
        ("None if amp else torch.amp.GradScaler('cuda')", {Not(A)}),
        ("find() if amp else None", {Flag("scaler")}),
        ("GradScaler() if amp else Other()", {Flag("scaler")}),
    ],
)
def test_an_object_or_none_is_a_condition(value: str, expected: set[Condition]) -> None:
    code = f"class Base:\n    def __init__(self, amp):\n        self.scaler = {value}\n"
    code += "class Own(Base):\n    def step(self):\n        if self.scaler is not None:\n            use()\n"
    (call,) = facts_of(code).calls["use"]
    assert call.guard == expected
