"""`Facts`: path conditions, values, regions, callers, data flow, events, imports in the tree."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from mpguard.lint.facts.file import Facts
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
from mpguard.lint.project.project import Project
from mpguard.lint.source.source import Source

A, B = Flag("amp"), Flag("fp16")


def facts_of(code: str) -> Facts:
    return Facts(Source.parse(textwrap.dedent(code).encode(), "example.py"))


def dtypes(code: str) -> set[tuple[str | None, frozenset[Condition]]]:
    """The dtypes of the argument of `use(...)`, with their guards."""
    facts = facts_of(code)
    (call,) = facts.calls["use"]
    return {(name, frozenset(guard)) for guard, name in facts.dtypes(call.positional[0], call)}


# -- guards --------------------------------------------------------------------------------------------


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


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch\nuse(torch.half)", {"float16"}),
        ("import torch as th\nD = th.float16\nuse(D)", {"float16"}),
        ("from torch import float16 as f16\nuse(f16)", {"float16"}),
        ("import torch\nclass C:\n    dtype = torch.bfloat16\nuse(C.dtype)", {"bfloat16"}),
        (
            "import torch\nclass C:\n    def __init__(self):\n        self.d = torch.half\n"
            "    def f(self):\n        use(self.d)",
            {"float16"},
        ),
        ("import torch\ndef f(d=torch.half):\n    use(d)", {None}),
        ("import torch\ndef f(d=torch.half):\n    use(d)\nf()", {"float16"}),
        ("import torch\ndef f(d):\n    use(d)\nf(torch.half)\nf(d=torch.bfloat16)", {"float16", "bfloat16"}),
        ("import torch\ndef d():\n    return torch.half\nuse(d())", {"float16"}),
        ("import torch\na, b = torch.half, torch.float32\nuse(b)", {"float32"}),
        ("import torch\nuse({'fp16': torch.half}[x])", {None}),
        ("import torch\nuse(getattr(torch, x))", {None}),
        ("import torch\nd = torch.half\nd = torch.float32\nuse(d)", {"float32"}),
        ("import numpy as torch\nuse(torch.float16)", {None}),
        ("import jax.numpy as jnp\nuse(jnp.float16)", {None}),
        ("use(torch.float16)", {None}),
        ("import torch\nfor d in (torch.half, torch.bfloat16):\n    use(d)", {"float16", "bfloat16"}),
        ("import torch\ndef f(d):\n    use(d)\nrun(f)\nf(torch.half)", {"float16", None}),
    ],
)
def test_dtypes_are_followed(code: str, expected: set[str | None]) -> None:
    assert {name for name, _ in dtypes(code)} == expected


def test_a_conditional_dtype_has_a_path_condition() -> None:
    assert dtypes("import torch\nd = torch.half if args.fp16 else torch.float32\nuse(d)") == {
        ("float16", frozenset([B])),
        ("float32", frozenset([Not(B)])),
    }
    assert dtypes("import torch\nd = torch.float32\nif fp16:\n    d = torch.half\nuse(d)") == {
        ("float16", frozenset([B])),
        ("float32", frozenset()),
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


# -- regions -------------------------------------------------------------------------------------------


def region(code: str) -> list[tuple[str, str | None, bool]]:
    facts = facts_of("import torch\nfrom contextlib import *\n" + textwrap.dedent(code))
    (call,) = facts.calls["use"]
    return [
        (each.kind, each.dtypes[0][1] if each.dtypes else None, each.guard.possible) for each in facts.regions(call)
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("with torch.autocast('cuda'):\n    use()", [("autocast", "float16", True)]),
        ("with torch.autocast('cpu'):\n    use()", [("autocast", "bfloat16", True)]),
        ("with torch.autocast(device):\n    use()", [("autocast", None, True)]),
        ("with torch.autocast(torch.device('cuda').type):\n    use()", [("autocast", "float16", True)]),
        ("with torch.cuda.amp.autocast(True, torch.bfloat16):\n    use()", [("autocast", "bfloat16", True)]),
        ("with torch.cuda.amp.autocast(False):\n    use()", [("autocast", "float16", False)]),
        ("with torch.autocast('cuda', torch.half, True):\n    use()", [("autocast", "float16", True)]),
        ("with torch.no_grad(), torch.autocast('cuda'):\n    use()",
         [("no_grad", None, True), ("autocast", "float16", True)]),
        ("@torch.no_grad()\ndef f():\n    use()", [("no_grad", None, True)]),
        ("@torch.inference_mode\ndef f():\n    use()", [("no_grad", None, True)]),
        ("c = torch.autocast('cuda')\nwith c:\n    use()", [("autocast", "float16", True)]),
        ("with unknown():\n    use()", [("", None, True)]),
        ("with torch.autocast('cuda'):\n    pass\nuse()", []),
    ],
)  # fmt: skip
def test_regions(code: str, expected: list[tuple[str, str | None, bool]]) -> None:
    assert region(code) == expected


def test_enabled_is_a_path_condition() -> None:
    facts = facts_of("import torch\nwith torch.autocast('cuda', enabled=args.amp):\n    use()\n")
    (found,) = facts.regions(facts.calls["use"][0])
    assert found.guard == PathCondition([A])


# -- flow ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("code", "made"),
    [
        ("from accelerate import Accelerator\nAccelerator()", True),
        ("from accelerate import Accelerator as accelerator_class\naccelerator_class()", True),
        ("import accelerate\nmake = accelerate.Accelerator\nmake()", True),
        ("import accelerate as a\na.Accelerator()", True),
        ("from accelerate import Accelerator\ndef run(kind):\n    kind()\nrun(Accelerator)", True),
        ("from accelerate import Accelerator\ndef make():\n    return Accelerator\nmake()", False),
        ("from accelerate import init_empty_weights\ninit_empty_weights()", False),
    ],
)
def test_calls_that_create_an_accelerator(code: str, made: bool) -> None:
    assert bool(facts_of(code).events("accelerator")) is made


@pytest.mark.parametrize(
    ("code", "infers"),
    [
        ("def evaluate():\n    use()", True),
        ("def test_it():\n    use()", True),
        ("def train_and_eval():\n    use()", False),
        ("def helper():\n    use()\ndef predict():\n    helper()", True),
        ("def helper():\n    use()\ndef predict():\n    helper()\ndef train():\n    helper()", False),
        ("def main():\n    use()", False),
    ],
)
def test_inference_by_names_and_callers(code: str, infers: bool) -> None:
    facts = facts_of(code)
    assert facts.is_inference(facts.calls["use"][0]) is infers


# -- statements that are not parsed, and modules of the tree ---------------------------------------------


def test_only_the_relevant_statements_of_a_large_file_are_parsed() -> None:
    filler = "".join(f"def filler_{n}(x):\n    return x + {n}\n\n" for n in range(400))
    code = f"import torch\n{filler}class Net(torch.nn.Module):\n    pass\n\n"
    code += "def train(x):\n    Net()(x.half()).backward()\n    optimizer.step()\n"
    facts = facts_of(code)
    assert facts.parsed_bytes < 200
    (cast,) = facts.events("cast")
    assert [sink.kind for sink in facts.flow.forward(cast.call.node, cast.call).sinks] == ["backward"]


def test_only_the_relevant_methods_of_a_large_class_are_parsed() -> None:
    filler = "".join(f"    def filler_{n}(self):\n        return self.size + {n}\n\n" for n in range(400))
    code = f"""import torch
class Run:
    def __init__(self, model):
        self.model = model

{filler}    def sets(self, loss):
        self.loss = loss

    def helps(self, x):
        return x

    def epoch(self, loader):
        for x in loader:
            self.train(x)

    def train(self, x):
        self.model(self.helps(x.half())).backward()
        optimizer.step()
"""
    facts = facts_of(code)
    (chunk,) = [each for each in facts.source.chunks if each.methods]
    skipped = {each.name for each in chunk.skipped}
    assert skipped == {f"filler_{n}" for n in range(400)}
    assert facts.parsed_bytes < len(code) * 0.65
    (cast,) = facts.events("cast")
    assert [sink.kind for sink in facts.flow.forward(cast.call.node, cast.call).sinks] == ["backward"]
    assert facts.source.position(cast.span[0])[0] == code[: code.index("x.half")].count("\n") + 1


def test_names_of_the_tree_are_followed_into_their_modules(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "precision.py").write_text("import torch\nHALF = torch.float16\ndef unused():\n    return 1\n")
    (tmp_path / "again.py").write_text("from precision import HALF as F16\nimport precision\n")
    path = tmp_path / "train.py"
    path.write_text("import again\nfrom again import F16\nuse(F16, again.precision.HALF, again.missing)\n")
    facts = Facts(Source.parse(path.read_bytes(), str(path)), Project())
    (call,) = facts.calls["use"]
    assert [[name for _, name in facts.dtypes(given, call)] for given in call.positional] == [
        ["float16"],
        ["float16"],
        [None],
    ]


def test_a_huge_imported_class_is_indexed_by_name_and_bases(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    method = "    def m{}(self):\n        return self.half()\n"
    body = "".join(map(method.format, range(3000)))
    table = "T = {\n" + "".join(f"    {i}: 'a',\n" for i in range(3000)) + "}\n"
    (tmp_path / "huge.py").write_text(f"import torch\nclass Huge(torch.nn.Module):\n{body}{table}")
    path = tmp_path / "train.py"
    path.write_text("from huge import Huge, T\nuse(Huge(), T)\n")
    facts = Facts(Source.parse(path.read_bytes(), str(path)), Project())
    (call,) = facts.calls["use"]
    assert [facts.kinds(given, call) for given in call.positional] == [{"model"}, {""}]
    other = facts.imported("huge")
    assert other is not None and other.parsed_bytes < 100


def test_a_folder_named_like_a_library_is_not_that_library(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("float16 = 1\n")
    path = tmp_path / "train.py"
    path.write_text("import torch\nuse(torch.float16)\n")
    facts = Facts(Source.parse(path.read_bytes(), str(path)), Project())
    (call,) = facts.calls["use"]
    assert facts.dtypes(call.positional[0], call)[0][1] == "float16"


def test_import_cycles_terminate(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "a.py").write_text("from b import x\nuse(x)\n")
    (tmp_path / "b.py").write_text("from a import x\n")
    path = tmp_path / "a.py"
    facts = Facts(Source.parse(path.read_bytes(), str(path)), Project())
    (call,) = facts.calls["use"]
    assert facts.dtypes(call.positional[0], call)[0][1] is None


def test_an_unknown_kind_of_event_is_an_error() -> None:
    with pytest.raises(KeyError):
        facts_of("x = 1").events("cats")


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ("from compat import autocast\n", True),
        ("from pkg.compat import (\n    ctx,  # kept\n    autocast as cast,\n)\n", True),
        ("from .compat import *\n", True),
        ("from . import compat\ncompat.autocast()\n", True),
        ("import compat\n", True),
        ("from torch.cuda.amp import autocast\nfrom compat import ctx\n", False),
        ("", False),
    ],
)
def test_a_name_that_another_file_imports_is_exported(tmp_path: Path, other: str, taken: bool) -> None:
    code = "from torch.cuda.amp import autocast\n\ndef ctx():\n    return autocast()\n"
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "compat.py").write_text(code)
    (tmp_path / "train.py").write_text(other)
    facts = Facts(Source.parse(code.encode(), str(tmp_path / "compat.py")), Project())
    assert facts.exported("autocast") is taken


def test_paths_that_contradict_a_constant_flag_are_impossible() -> None:
    facts = facts_of("ON = False\nif ON:\n    f()\nelse:\n    g()\nif args.ON2:\n    h()\nON2 = False\n")
    possible = {name: facts.calls[name][0].guard.possible for name in "fgh"}
    assert possible == {"f": False, "g": True, "h": True}


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


def test_modules_that_import_each_other_with_a_star(tmp_path: Path) -> None:
    """What neither binds is looked for in each once, and not without end."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "one.py").write_text("from two import *\nhalf = nowhere\n")
    (tmp_path / "two.py").write_text("from one import *\nfrom three import *\nfrom two import *\n")
    (tmp_path / "three.py").write_text("from one import *\nimport torch\nhere = torch.float16\n")
    path = tmp_path / "train.py"
    source = Source.parse(b"from one import *\nx.to(here)\nx.to(nowhere)\nx.to(half)\n", str(path))
    facts = Facts(source, Project((), None))
    here, nowhere, half = (facts.dtypes(call.argument(0), call)[0][1] for call in facts.calls["to"])
    assert (here, nowhere, half) == ("float16", None, None)


def test_nested_named_conditions_terminate() -> None:
    lines = ["c0 = a0 and b0", *(f"c{n} = c{n - 1} and not d{n} or c{n - 1} and e{n}" for n in range(1, 60))]
    facts = facts_of("import torch\n" + "\n".join(lines) + "\nif c59:\n    loss.backward()\n")
    (backward,) = facts.events("backward")
    assert backward.guard.possible


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


def test_a_former_attribute_names_the_new_one() -> None:
    facts = facts_of("x = 1\n")
    with pytest.raises(AttributeError, match=r"Facts\.walker is called Facts\.index now"):
        facts.walker  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'indexes'"):
        facts.indexes  # noqa: B018
