"""What an expression may be: dtypes, kinds of objects, values that do not end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from lint_facts import facts_of

from mpguard.lint.facts.program.dtypes import AnyDtype
from mpguard.lint.facts.program.lattice import Object
from mpguard.lint.facts.syntax.path_condition import (
    Condition,
    Flag,
    Not,
)
from mpguard.policy.dtype import Dtype

A, B = Flag("amp"), Flag("fp16")
#: A helper that makes a dtype of its name.
NAMED = (
    "import torch\ndef named(s):\n    if s in ('fp16', 'float16'):\n        return torch.half\n"
    "    if s == 'bf16':\n        return torch.bfloat16\n    return None\n"
)


def dtypes(code: str) -> set[tuple[AnyDtype | None, frozenset[Condition]]]:
    """The dtypes of the argument of `use(...)`, with their guards."""
    facts = facts_of(code)
    (call,) = facts.calls["use"]
    return {(dtype, frozenset(guard)) for guard, dtype in facts.dtypes(call.positional[0], call)}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch\nuse(torch.half)", {Dtype.FP16}),
        ("import torch as th\nD = th.float16\nuse(D)", {Dtype.FP16}),
        ("from torch import float16 as f16\nuse(f16)", {Dtype.FP16}),
        ("import torch\nclass C:\n    dtype = torch.bfloat16\nuse(C.dtype)", {Dtype.BF16}),
        (
            "import torch\nclass C:\n    def __init__(self):\n        self.d = torch.half\n"
            "    def f(self):\n        use(self.d)",
            {Dtype.FP16},
        ),
        ("import torch\ndef f(d=torch.half):\n    use(d)", {None}),
        ("import torch\ndef f(d=torch.half):\n    use(d)\nf()", {Dtype.FP16}),
        ("import torch\ndef f(d):\n    use(d)\nf(torch.half)\nf(d=torch.bfloat16)", {Dtype.FP16, Dtype.BF16}),
        ("import torch\ndef d():\n    return torch.half\nuse(d())", {Dtype.FP16}),
        (f"{NAMED}use(named('bf16'))", {Dtype.BF16}),
        (f"{NAMED}use(named('half'))", {None}),
        (f"{NAMED}name = 'bf16' if x else 'tf32'\nuse(named(name))", {Dtype.BF16, None}),
        (f"{NAMED}use(named(x))", {Dtype.FP16, Dtype.BF16, None}),
        (
            f"{NAMED.replace('    if', '    s = s.lower()' + chr(10) + '    if', 1)}use(named('BF16'))",
            {Dtype.FP16, Dtype.BF16, None},
        ),
        ("import torch\na, b = torch.half, torch.float32\nuse(b)", {Dtype.FP32}),
        ("import torch\nuse({'fp16': torch.half}[x])", {Dtype.FP16}),
        ("import torch\nuse({'fp16': torch.half, 'bf16': torch.bfloat16}['bf16'])", {Dtype.BF16}),
        ("import torch\nd = {'a': torch.half, 'b': torch.bfloat16}\nn = 'a'\nuse(d[n])", {Dtype.FP16}),
        ("import torch\nd = {'a': torch.half}\nuse(d.get(x, torch.float32))", {Dtype.FP16, Dtype.FP32}),
        ("import torch\nd = {'a': torch.half}\nuse(d.get('b', torch.float32))", {Dtype.FP32}),
        ("import torch\nuse({name: torch.half}[x])", {None}),
        ("import torch\nuse(getattr(torch, x))", {None}),
        ("import torch\nd = torch.half\nd = torch.float32\nuse(d)", {Dtype.FP32}),
        ("import numpy as torch\nuse(torch.float16)", {None}),
        ("import jax.numpy as jnp\nuse(jnp.float16)", {None}),
        ("use(torch.float16)", {None}),
        ("import torch\nfor d in (torch.half, torch.bfloat16):\n    use(d)", {Dtype.FP16, Dtype.BF16}),
        ("import torch\ndef f(d):\n    use(d)\nrun(f)\nf(torch.half)", {Dtype.FP16, None}),
    ],
)
def test_dtypes_are_followed(code: str, expected: set[AnyDtype | None]) -> None:
    assert {dtype for dtype, _ in dtypes(code)} == expected


def test_a_conditional_dtype_has_a_path_condition() -> None:
    assert dtypes("import torch\nd = torch.half if args.fp16 else torch.float32\nuse(d)") == {
        (Dtype.FP16, frozenset([B])),
        (Dtype.FP32, frozenset([Not(B)])),
    }
    assert dtypes("import torch\nd = torch.float32\nif fp16:\n    d = torch.half\nuse(d)") == {
        (Dtype.FP16, frozenset([B])),
        (Dtype.FP32, frozenset()),
    }


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import torch\nx = torch.nn.Linear(1, 1).cuda().half()\nuse(x)", "model"),
        ("from torch import nn\nclass N(nn.Module): pass\nclass M(N): pass\nuse(M())", "model"),
        ("from torch.optim import AdamW\nuse(AdamW(p))", "optimizer"),
        ("import torch\nuse(getattr(torch.optim, args.optimizer)(p))", "optimizer"),
        ("import torch.optim as optim\ncls = getattr(optim, name)\nuse(cls(p, lr=1))", "optimizer"),
        ("import torch\nuse(getattr(torch.nn, 'Linear')(1, 1))", "model"),
        ("import torch\nuse(getattr(elsewhere, name)(p))", ""),
        ("from torch.cuda import amp\nuse(amp.GradScaler())", "scaler"),
        ("from accelerate import Accelerator\nimport torch\na = Accelerator()\n"
         "m, o = a.prepare(m, torch.optim.SGD(p))\nuse(o)", "optimizer"),
        ("import deepspeed\ne, *_ = x\ne, o, _, _ = deepspeed.initialize(model=m)\nuse(e)", "engine"),
        ("import torch\nm = torch.compile(torch.nn.Linear(1, 1))\nuse(m)", "model"),
        ("class Own: pass\nuse(Own())", "own"),
        ("from elsewhere import Base\nclass Own(Base): pass\nuse(Own())", ""),
        ("use(x)", ""),
    ],
)  # fmt: skip
def test_kinds_of_objects(code: str, kind: str) -> None:
    facts = facts_of(code)
    (call,) = facts.calls["use"]
    assert facts.kinds(call.positional[0], call) == {kind}


@pytest.mark.parametrize(
    "code",
    [
        "".join(f"def f{n}(x):\n    x = x.half()\n    return f{n + 1}(x) + f{n // 2}(x)\n" for n in range(300)),
        "".join(f"if a{n} and (b{n} or not c{n}):\n    x = x.half()\n" for n in range(120)),
        "class A:\n" + "".join(f"    def s{n}(self, x):\n        self.s{n + 1}(x.half())\n" for n in range(400)),
        "".join(f"x = (x.half() if a{n} else x.to(torch.float16)) if b{n} else x\n" for n in range(60)),
    ],
    ids=["functions", "flags", "methods", "conditional expressions"],
)
def test_values_that_grow_without_bound_are_unknown(code: str) -> None:
    facts = facts_of(f"import torch\nx = 1\n{code}\nloss(x).backward()\nopt.step()\n")
    for cast in facts.events("cast"):
        facts.guard_of(cast.call)
        facts.is_inference(cast.call)
        facts.flow.forward(cast.call.node, cast.call)
        assert all(len(guard) < 60 for guard, _ in cast.dtypes)


_ROUND = """
    from accelerate import Accelerator
    class Trainer:
        def __init__(self, model):
            self.model, self.optimizer, self.accelerator = model, None, None
        def start(self):
            self.model, self.optimizer, self.accelerator = self.wrap(self.model, self.optimizer, self.accelerator)
        def again(self):
            self.optimizer, self.model = self.wrap(self.optimizer, self.model, self.accelerator)[:2]
            self.start()
        def wrap(self, model, optimizer, accelerator):
            accelerator = accelerator or Accelerator()
            if model is not None:
                model = accelerator.prepare_model(model)
            else:
                model, optimizer = self.swapped(optimizer, model)
            return model, optimizer, accelerator
        def swapped(self, one, other):
            return self.model or other, self.optimizer or one
        def fit(self):
            use(self.model), use(self.optimizer), use(self.accelerator), use(self.swapped(self.model, 1))
"""


def test_values_do_not_depend_on_earlier_requests() -> None:
    """What a definition in a circle may be is cut short at the place that asked, and that is not kept for others."""

    def asked(order: Iterable[int]) -> dict[int, set[str]]:
        facts = facts_of(_ROUND)
        uses = facts.calls["use"]
        return {place: facts.kinds(uses[place].positional[0], uses[place]) for place in order}

    first = asked(range(4))
    assert "accelerator" in first[2]
    assert all(asked(order) == first for order in itertools.permutations(range(4)))


@pytest.mark.parametrize(
    ("loop", "layer", "expected"),
    [
        ("for layer in self.two", "layer", ["B"]),
        ("for a, b in zip(self.one, self.two)", "a", ["A"]),
        ("for a, b in zip(self.one, self.two)", "b", ["B"]),
        ("for i, (a, b) in enumerate(zip(self.one, self.two))", "b", ["B"]),
        ("for a, (i, b) in zip(self.one, enumerate(self.two))", "b", ["B"]),
        ("for layer in reversed(self.two)", "layer", ["B"]),
        ("for i, layer in enumerate(list(reversed(self.two)))", "layer", ["B"]),
        ("for a, b in zip(reversed(self.one), self.two, strict=True)", "a", ["A"]),
        ("for i, b in enumerate(self.two)", "i", []),
        ("for a, b in zip(*self.pairs)", "b", []),
        ("for a, b in zip(self.one)", "b", []),
        ("for a, b in reversed(self.two)", "b", []),
    ],
)
def test_a_loop_yields_the_layers_of_lists(loop: str, layer: str, expected: list[str]) -> None:
    facts = facts_of(
        f"""
        from torch import nn

        class A(nn.Module):
            pass

        class B(nn.Module):
            pass

        class Net(nn.Module):
            def __init__(self):
                self.one = nn.ModuleList(A() for _ in range(3))
                self.two = nn.ModuleList([B() for _ in range(3)])

            def forward(self, x):
                {loop}:
                    use({layer})
        """
    )
    (call,) = facts.calls["use"]
    atoms = [each.atom for each in facts.evaluate(call.argument(0), call)]
    assert [atom.cls.name for atom in atoms if isinstance(atom, Object) and atom.cls is not None] == expected
