"""Where a value goes: backward, a checkpoint, or nowhere."""

from __future__ import annotations

import textwrap

import pytest
from lint_facts import facts_of


def sinks(code: str) -> list[str]:
    """What the result of `start()` reaches, in a program that steps an optimizer."""
    facts = facts_of("import torch\n" + textwrap.dedent(code) + "\noptimizer.step()\n")
    (call,) = facts.calls["start"]
    return [sink.kind for sink in facts.flow.forward(call.node, call).sinks]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = start()\n(model(x) - 1).sum().backward()", ["backward"]),
        ("def f(x):\n    return g(x)\nloss = f(start())\nloss.backward()", ["backward"]),
        ("def f(x):\n    return x * 2\nx = start()\nf(x)\ny = f(x)\ny.sum().backward()", ["backward"]),
        ("def f(x):\n    return 1, x * 2\nx = start()\nf(x)\n_, y = f(x)\ny.sum().backward()", ["backward"]),
        ("def f(x):\n    return 1, x * 2\nx = start()\nf(x)\ny, _ = f(x)\ny.sum().backward()", []),
        ("class C:\n    def a(self):\n        self.x = start()\n    def b(self):\n        self.x.sum().backward()\n"
         "        self.opt.step()",
         ["backward"]),
        ("losses = []\nlosses.append(start())\nsum(losses).backward()", ["backward"]),
        ("x = start().detach()\nx.sum().backward()", []),
        ("x = start()\nx = other()\nx.backward()", []),
        ("x = start()\nprint(x.shape, x > 0)\ny.backward()", []),
        ("with torch.no_grad():\n    y = f(start())\ny.backward()", []),
        ("if amp:\n    x = start()\nelse:\n    x.backward()", []),
        ("t = T().eval()\ny = t(start())\ny.backward()", ["frozen"]),
        ("accelerator.backward(start())", ["backward"]),
        ("torch.save(start(), 'x')", ["saved"]),
    ],
)  # fmt: skip
def test_flow(code: str, expected: list[str]) -> None:
    assert sinks(code) == expected


@pytest.mark.parametrize(
    ("rest", "steps"),
    [
        ("", False),
        ("    scheduler.step()", False),
        ("    scaler.step(opt)", True),
        ("    apply()\ndef apply():\n    self.opt.step()", True),
        ("def other():\n    opt.step()", False),
    ],
)
def test_backward_without_a_step_is_only_a_gradient(rest: str, steps: bool) -> None:
    facts = facts_of(f"def f(x):\n    x.half().backward()\n{rest}\n")
    (cast,) = facts.events("cast")
    expected = "backward" if steps else "gradient"
    assert [sink.kind for sink in facts.flow.forward(cast.call.node, cast.call).sinks] == [expected]
