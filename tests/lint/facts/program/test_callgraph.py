"""The calls of a function."""

from __future__ import annotations

import pytest
from lint_facts import facts_of

from mpguard.lint.facts.program.lattice import Class


@pytest.mark.parametrize(
    "code",
    [
        "net = Net()\nnet(x)",
        "Other = Net\nnet = Other()\nnet(x)",
        "def run(model):\n    model(x)\nrun(Net())",
        "class Trainer:\n    def __init__(self):\n        self.net = Net()\n    def step(self):\n        self.net(x)",
        "class Trainer:\n    kind = Net\n    def step(self):\n        net = self.kind()\n        net(x)",
        "class Trainer:\n    net = Net()\nTrainer.net(x)",
        "args.net = Net()\nargs.net(x)",
        "for net in (Net(), Net()):\n    net(x)",
        "from torch import compile\nnet = compile(Net())\nnet(x)",
        "net = Net()\nnet.forward(x)",
    ],
)
def test_callers_of_forward(code: str) -> None:
    facts = facts_of(
        "from helpers import x, log, wrap\n"
        "class Net(torch.nn.Module):\n    def __init__(self):\n        log(1)\n    def forward(self, x): ...\n"
        f"def own(x): ...\nlog(x)\nwrap(log)(x)\nx.log(x)\nown(x)\n{code}\n"
    )
    (forward,) = (scope for scope in facts.index.scopes if scope.name == "forward")
    (call,) = facts.callers(forward)
    assert call.positional and call.line is not None and facts.source.position(call.span[0])[0] > 9
    (init,) = (scope for scope in facts.index.scopes if scope.qualname == "Net.__init__")
    assert facts.callers(init)


def test_a_module_whose_name_gets_an_object_of_the_class_that_derives_from_it() -> None:
    """The base of `Loop` is looked up in the object, whose class is `Loop`."""
    facts = facts_of("import loop\nclass Loop(loop.Base):\n    steps = 1\nloop = Loop()\nloop.run()\n")
    (cls,) = (scope for scope in facts.index.scopes if scope.name == "Loop")
    assert not any(isinstance(base, Class) for base in facts.classes.bases(cls))
    assert facts.classes.inherited(cls, "run") is None


def test_what_a_class_is_given_is_known_while_its_callers_are_looked_for() -> None:
    """Whether `self.model()` creates a `Loop` depends on what the callers give `Loop`."""
    facts = facts_of(
        "import torch\nfrom helpers import wrap\n"
        "class Loop:\n    def __init__(self, model):\n        self.model = model\n        self.other = wrap(model)\n"
        "    def run(self, x):\n        self.other(x)\n        return self.model(x)\n"
        "loop = Loop(torch.nn.Linear(8, 8))\nloop.run(1)\n"
    )
    (use,) = facts.calls["model"]
    (init,) = (scope for scope in facts.index.scopes if scope.qualname == "Loop.__init__")
    assert len(facts.callers(init)) == 1
    assert [each.atom.path for each in facts.evaluate(use.func, use)] == ["torch.nn.Linear"]
