"""`Facts`: regions, events, imports in the tree."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from lint_facts import facts_of

from mpguard.lint.facts.file import Facts
from mpguard.lint.facts.program.dtypes import AnyDtype
from mpguard.lint.facts.syntax.path_condition import (
    Flag,
    PathCondition,
)
from mpguard.lint.project.project import Project
from mpguard.lint.source.source import Source
from mpguard.policy.dtype import Dtype

A, B = Flag("amp"), Flag("fp16")


def region(code: str) -> list[tuple[str, AnyDtype | None, bool]]:
    facts = facts_of("import torch\nfrom contextlib import *\n" + textwrap.dedent(code))
    (call,) = facts.calls["use"]
    return [
        (each.kind, each.dtypes[0][1] if each.dtypes else None, each.guard.possible) for each in facts.regions(call)
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("with torch.autocast('cuda'):\n    use()", [("autocast", Dtype.FP16, True)]),
        ("with torch.autocast('cpu'):\n    use()", [("autocast", Dtype.BF16, True)]),
        ("with torch.autocast(torch.device('cuda').type):\n    use()", [("autocast", Dtype.FP16, True)]),
        ("with torch.cuda.amp.autocast(True, torch.bfloat16):\n    use()", [("autocast", Dtype.BF16, True)]),
        ("with torch.cuda.amp.autocast(False):\n    use()", [("autocast", Dtype.FP16, False)]),
        ("with torch.autocast('cuda', torch.half, True):\n    use()", [("autocast", Dtype.FP16, True)]),
        ("with torch.no_grad(), torch.autocast('cuda'):\n    use()",
         [("no_grad", None, True), ("autocast", Dtype.FP16, True)]),
        ("@torch.no_grad()\ndef f():\n    use()", [("no_grad", None, True)]),
        ("@torch.inference_mode\ndef f():\n    use()", [("no_grad", None, True)]),
        ("c = torch.autocast('cuda')\nwith c:\n    use()", [("autocast", Dtype.FP16, True)]),
        ("with unknown():\n    use()", [("", None, True)]),
        ("with torch.autocast('cuda'):\n    pass\nuse()", []),
    ],
)  # fmt: skip
def test_regions(code: str, expected: list[tuple[str, AnyDtype | None, bool]]) -> None:
    assert region(code) == expected


def test_without_a_dtype_an_unknown_device_gives_float16_if_it_is_a_gpu() -> None:
    facts = facts_of(
        "import torch\n\ndef f(device, kind):\n"
        "    if kind == 'cpu':\n        with torch.autocast(kind):\n            use()\n"
        "    with torch.autocast(device_type=device.type):\n        use()\n"
    )
    on_cpu, unknown = (facts.regions(call)[0] for call in facts.calls["use"])
    assert on_cpu.may_be(Dtype.FP16) == []
    assert unknown.may_be(Dtype.FP16) == [PathCondition({Flag("type", "cuda")})]
    assert [dtype for _, dtype in unknown.dtypes] == [Dtype.FP16, None]


def test_enabled_is_a_path_condition() -> None:
    facts = facts_of("import torch\nwith torch.autocast('cuda', enabled=args.amp):\n    use()\n")
    (found,) = facts.regions(facts.calls["use"][0])
    assert found.guard == PathCondition([A])


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


def test_names_of_the_tree_are_followed_into_their_modules(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "precision.py").write_text("import torch\nHALF = torch.float16\ndef unused():\n    return 1\n")
    (tmp_path / "again.py").write_text("from precision import HALF as F16\nimport precision\n")
    path = tmp_path / "train.py"
    path.write_text("import again\nfrom again import F16\nuse(F16, again.precision.HALF, again.missing)\n")
    facts = Facts(Source.parse(path.read_bytes(), str(path)), Project())
    (call,) = facts.calls["use"]
    assert [[dtype for _, dtype in facts.dtypes(given, call)] for given in call.positional] == [
        [Dtype.FP16],
        [Dtype.FP16],
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
    assert facts.dtypes(call.positional[0], call)[0][1] is Dtype.FP16


def test_import_cycles_terminate(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "a.py").write_text("from b import x\nuse(x)\n")
    (tmp_path / "b.py").write_text("from a import x\n")
    path = tmp_path / "a.py"
    facts = Facts(Source.parse(path.read_bytes(), str(path)), Project())
    (call,) = facts.calls["use"]
    assert facts.dtypes(call.positional[0], call)[0][1] is None


def test_a_kind_under_other_conditions_does_not_count() -> None:
    facts = facts_of(
        "import deepspeed\nfrom elsewhere import build\n\n"
        "def wrap(args, model, optimizer):\n"
        "    if args.deepspeed:\n"
        "        model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer)\n"
        "    return optimizer\n\n"
        "def train(args, model):\n"
        "    optimizer = wrap(args, model, build(model))\n"
        "    if args.deepspeed:\n"
        "        optimizer.step()\n"
        "    else:\n"
        "        optimizer.step()\n"
        "    optimizer.step()\n"
    )
    engine, plain, unknown = (facts.kinds(call.receiver, call) for call in facts.calls["step"])
    assert "engine_optimizer" in engine
    assert "engine_optimizer" not in plain
    assert {"engine_optimizer", ""} <= unknown


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
    assert (here, nowhere, half) == (Dtype.FP16, None, None)
