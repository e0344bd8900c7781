"""The autocast that is active at a place, and fixes that move code out of a region."""

from __future__ import annotations

import textwrap

import pytest

from mpguard.lint.facts.file import Facts
from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target
from mpguard.lint.source.source import Source


def in_force(code: str) -> set[str | None]:
    """The devices of the autocasts in force where `use()` is called."""
    facts = Facts(Source.parse(textwrap.dedent(code).encode(), "example.py"))
    (call,) = facts.calls["use"]
    return {region.device for region, _ in facts.autocasts(call)}


@pytest.mark.parametrize(
    ("code", "devices"),
    [
        ("import torch\nwith torch.autocast('cuda'):\n    use()", {"cuda"}),
        ("import torch\nwith torch.autocast('cuda'), torch.autocast('cpu'):\n    use()", {"cpu"}),
        ("import torch\nwith torch.autocast('cuda'), torch.autocast('cuda', enabled=False):\n    use()", set()),
        ("import torch\nwith torch.autocast('cuda'), open(path):\n    use()", {"cuda"}),
        ("import torch\nwith torch.autocast('cuda'), my_amp():\n    use()", set()),
        ("import torch\nwith my_amp(), torch.autocast('cuda'):\n    use()", {"cuda"}),
        ("import torch\n@torch.autocast('cuda')\ndef f():\n    use()", {"cuda"}),
        ("import torch\nwith torch.autocast('cuda', enabled=amp):\n    if not amp:\n        use()", set()),
        ("import torch\ndef f():\n    use()\nwith torch.autocast('cuda'):\n    f()\nf()", {"cuda"}),
        ("import torch\n@custom_fwd\ndef f():\n    use()\nwith torch.autocast('cuda'):\n    f()", set()),
        (
            "import torch\ndef f():\n    use()\ndef g(x):\n    f()\nwith torch.autocast('cpu'):\n    g(1)\n    f()",
            {"cpu"},
        ),
        (
            "import torch\ndef f():\n    with torch.autocast('cuda', enabled=False):\n        use()\n"
            "with torch.autocast('cuda'):\n    f()",
            set(),
        ),
    ],
)
def test_the_active_autocast(code: str, devices: set[str | None]) -> None:
    assert in_force(code) == devices


def test_recursive_functions_terminate() -> None:
    code = "import torch\ndef f():\n    use()\n    g()\ndef g():\n    f()\nwith torch.autocast('cuda'):\n    f()"
    assert in_force(code) == {"cuda"}


def fixed(code: str) -> str:
    rule = rules(own_only=True)
    engine = Engine(rule, Options(Selectors(select=("MPG301",)), fix="unsafe"))
    report = engine.check(Target("example.py", "python", named=True, data=code.encode()))
    assert not report.defects, report.defects[0].traceback
    assert bool(report.findings) == (report.fix_result is None)  # a fixed finding is no longer reported
    return code if report.fix_result is None else report.fix_result.after.decode()


REGION = """\
import torch
for x in loader:
    with torch.autocast("cuda"):
        loss = model(x)  # forward

        # backward,
      # with a comment further out
        loss.backward()  # !
        if step:
            optimizer.step(
    closure=None,
            )
        # the end
    after()
"""
MOVED = """\
import torch
for x in loader:
    with torch.autocast("cuda"):
        loss = model(x)  # forward

    # backward,
      # with a comment further out
    loss.backward()  # !
    if step:
        optimizer.step(
    closure=None,
        )
        # the end
    after()
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("tabs", [False, True])
def test_backward_is_moved_out_of_its_region(newline: str, tabs: bool) -> None:
    def written(code: str) -> str:
        return (code.replace("    ", "\t") if tabs else code).replace("\n", newline)

    assert fixed(written(REGION)) == written(MOVED)


@pytest.mark.parametrize(
    "body",
    [
        "loss.backward()",  # nothing would stay
        "loss = model(x)\n        loss.backward()\n        again = model(x)",  # a forward pass behind it
        'loss = model(x)\n        loss.backward()\n        print("""a\n        b""")',  # text would change
    ],
)
def test_no_fix_if_it_would_change_more(body: str) -> None:
    code = f"import torch\nfor x in loader:\n    with torch.autocast('cuda'):\n        {body}\n    optimizer.step()\n"
    assert fixed(code) == code


def test_no_fix_if_another_context_would_be_left() -> None:
    code = (
        "import torch\nfor x in loader:\n    with accelerator.accumulate(model), torch.autocast('cuda'):\n"
        "        loss = model(x)\n        loss.backward()\n    optimizer.step()\n"
    )
    assert fixed(code) == code
