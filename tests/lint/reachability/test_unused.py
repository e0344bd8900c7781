"""Code and configs that nothing in their project uses: nothing is reported in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.cli import main
from mpguard.core import tracked_fs

LOOP = """\
def {}:
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        optimizer.step()
"""
TRAIN = f"import torch\n\n{LOOP}"
CLASS = "import torch\n\nclass Run(Base):\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())
METHOD = "import torch\nclass Run:\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())
METHOD = METHOD.replace("{}", "fit(self, model, loader, optimizer)") + "    def other(self): ...\n\nRun().other()\n"
TRIAL = """\
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(10):
        with torch.autocast("cuda"): loss = model(x).sum()
        scaler.scale(loss).backward()
        optimizer.step()
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPGUARD_CACHE_DIR", str(tmp_path.parent / f"{tmp_path.name}-cache"))
    Path("mpguard.toml").touch()
    Path("other.py").touch()


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the places of the findings, as `path:line`."""
    tracked_fs.clear_run_caches()
    main(["lint", "--format", "concise", "--isolated", "--select", "ALL", *(arguments or (".",))])
    lines = (line for line in capsys.readouterr().out.splitlines() if " MPG" in line)
    return sorted(":".join(line.split(":")[:2]) for line in lines)


APEX = """\
try:
    from apex import amp
except ImportError:
    amp = None

class Apex:
    def __call__(self, loss, optimizer):
        with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()

class Native: ...
"""
UNUSED = {
    "nothing refers to it": {"a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)")},
    "only a comment and prose mention it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)") + "# call fit() here\n",
        "README.md": "See the function fit (in a.py).\n",
    },
    "only itself, and a function that nothing calls, call it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)")
        + "    fit(model)\n\ndef other(): fit(1)\n"
    },
    "it is in a Function for autograd, and classes of other bases may be chosen by their names": {
        "a.py": METHOD.replace("Run:", "Run(torch.autograd.Function):").replace("Run().other()\n", ""),
        "b.py": "import importlib, sys\n\nrun = getattr(importlib.import_module('c'), sys.argv[1])\n",
    },
    "only the output of a notebook mentions it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.ipynb": '{"cells": [{"cell_type": "code", "source": ["x\\n"], "outputs": [{"text": ["fit(1)"]}]}]}',
    },
    "another file has its own": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "def fit(model): ...\n\nfit(1)\n",
    },
    "another file imports it, and does nothing with it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "from a import fit, other\n\nother(1)\n",
    },
    "another file imports that of a third": {
        "demo/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "a.py": "def fit(model): ...\n",
        "b.py": "from a import fit\n\nfit(1)\n",
    },
    "another file imports a module of a library that has the name of its folder": {
        "utils/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "from torchvision import utils\n\ndef fit(model): ...\n\nfit(1)\n",
    },
    "a module of a library has its name": {
        "a.py": "import torch\nimport torch.distributed.fit\n"
        + LOOP.format("fit(model, loader=loader, optimizer=optimizer)"),
    },
    "it is a method, and others have their own function or method of this name": {
        "a.py": METHOD,
        "b.py": "from c import fit\n\nclass Other:\n    def fit(self): self.fit()\n\nfit(1)\n",
    },
    "its file is a module that is tried on random tensors": {
        "a.py": "import torch\n\nif __name__ == '__main__':\n    x = torch.rand(8, 8)\n" + TRIAL,
        "b.py": "import a\n",
    },
    "it is an experiment in a package": {
        "setup.py": "",
        "pkg/__init__.py": "",
        "pkg/a.py": TRAIN.format("find_configuration()"),
    },
    "only a test in the folder of tests uses it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "tests/verify_a.py": "from a import fit\n\nfit(1)\n",
    },
    "only a test that pytest collects uses it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "test_a.py": "import pytest\nfrom a import fit\n\ndef test_fit(): fit(1)\n",
    },
    "the decorator that registers it never runs": {
        "a.py": TRAIN.replace("\n\ndef", "\n@REGISTRY.register()\ndef").format(
            "fit(model, loader=loader, optimizer=optimizer)"
        ),
        "b.py": "# import a\nrun = REGISTRY.get('fit')\n",
        "run.sh": "python b.py --weights weights/a/last.pth\n",
    },
    "it is in a package of a folder that the project does not build": {
        "setup.py": "setup(name='pkg', packages=find_packages())\n",
        "pkg/__init__.py": "",
        "demos/first/run/__init__.py": "",
        "demos/first/run/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
    },
    "the program of its package has its own version": {
        "setup.py": "",
        "pkg/__init__.py": "",
        "pkg/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)") + "\ndef context(): ...\n",
        "pkg/b.py": "from pkg.a import context\n\ndef fit(model): ...\n\nfit(context())\n",
    },
}
USED = {
    "what is imported is used in a class that is used": {"a.py": APEX, "b.py": "from a import Apex\n\nApex()\n"},
    "what is imported is used in a class only, which nothing uses, and another file imports it from here": {
        "a.py": APEX,
        "b.py": "from a import Native, amp\n\nNative()\namp.initialize(1)\n",
    },
    "what is imported is used where it is imported": {
        "a.py": APEX.replace("amp\nexcept", "amp\n    amp.register_half_function(torch, 'matmul')\nexcept"),
        "b.py": "from a import Native\n\nNative()\n",
    },
    "it is called in its file": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)") + "\nfit(1, 2, 3)\n"
    },
    "its file is run as a script, through a function": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)")
        + "\ndef main():\n    fit(1, 2, 3)\n\nif __name__ == '__main__':\n    main()\n"
    },
    "a cell of a notebook calls it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.ipynb": '{"cells": [{"cell_type": "code", "source": ["from a import fit\\n", "fit(1)"], "outputs": []}]}',
    },
    "another file imports it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "from a import fit\n\nfit(1)\n",
    },
    "it is in a package of a folder that setup.py names": {
        "setup.py": "setup(name='run', package_dir={'': 'python'})\n",
        "python/run/__init__.py": "",
        "python/run/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
    },
    "it is in a package of a folder without __init__ that setuptools finds": {
        "pyproject.toml": "[project]\nname = 'pkg'\n[tool.setuptools.packages.find]\nexclude = ['docs']\n",
        "demos/run/__init__.py": "",
        "demos/run/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
    },
    "a program that takes an assertion from a library of tests imports it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "main.py": "from torch.testing import assert_close\nfrom a import fit\n\nfit(1)\n",
    },
    "a program that is named like a test imports it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "test_time_training.py": "from a import fit\n\nfit(1)\n",
    },
    "another file imports it under another name": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "from a import fit as train\n\ntrain(1)\n",
    },
    "a third file gets it from one that imports it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "from a import fit\n",
        "c.py": "import b\n\nb.fit(1)\n",
    },
    "another file imports its module": {
        "src/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "import src.a as a\n\na.fit(1)\n",
    },
    "another file imports its module, and another name of it": {
        "src/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "import src.a as a\nfrom src.a import other\n\na.fit(1)\n",
    },
    "the library is in the tree": {
        "lib/torch/utils/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "from torch import utils\n\nutils.a.fit(1)\n",
    },
    "a package re-exports it": {
        "pkg/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "pkg/__init__.py": "from .a import *\n",
        "b.py": "from pkg import fit\n\nfit(1)\n",
    },
    "the search path is extended": {
        "demo/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "a.py": "def fit(model): ...\n",
        "b.py": "import sys\nsys.path.insert(0, 'demo')\nfrom a import fit\n\nfit(1)\n",
    },
    "a string names it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "b.py": "run = getattr(find('a'), 'fit')\n",
    },
    "a config names it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "conf/run.yaml": "_target_: a.fit\n",
    },
    "a shell script names it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "run.sh": "python -c 'import a; a.fit()'\n",
    },
    "a notebook names it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "run.ipynb": '{"cells": [{"cell_type": "code", "source": ["from a import fit"]}]}\n',
    },
    "a command in the README names it": {
        "a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "README.md": "Run:\n\n```\nfire a.py fit\n```\n",
    },
    "a decorator may register it": {
        "a.py": TRAIN.replace("def", "@app.command()\ndef").format("fit(model, loader=loader, optimizer=optimizer)")
    },
    "it is the interface of a package": {
        "setup.py": "",
        "pkg/__init__.py": "",
        "pkg/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
    },
    "it is the interface of a package, and a program that does not use it has a function of its name": {
        "setup.py": "",
        "pkg/__init__.py": "",
        "pkg/a.py": TRAIN.format("fit(model, loader=loader, optimizer=optimizer)"),
        "pkg/b.py": "def fit(model): ...\n\nfit(1)\n",
    },
    "another file imports the module in which a decorator registers it": {
        "a.py": TRAIN.replace("\n\ndef", "\n@REGISTRY.register()\ndef").format(
            "fit(model, loader=loader, optimizer=optimizer)"
        ),
        "b.py": "import a\nrun = REGISTRY.get('fit')\n",
    },
    "it is a method, and its name is called on an object": {
        "a.py": METHOD,
        "b.py": "def go(run, data): run.fit(1, data, 3)\n",
    },
    "it is a method, and a subclass may call it": {
        "a.py": METHOD,
        "b.py": "from a import Run\n\nclass Other(Run):\n    def go(self): self.fit(1, 2, 3)\n",
    },
    "it is a method, and a string names it": {"a.py": METHOD, "b.py": "getattr(run, 'fit')(1, 2, 3)\n"},
    "it is a method that may override another one": {"a.py": METHOD.replace("Run:", "Run(Base):")},
    "it is a method that is called by a name from outside": {
        "a.py": METHOD.replace("Run().other()", "getattr(Run(), input())()")
    },
    "it is a method of the interface of a package": {"setup.py": "", "pkg/__init__.py": "", "pkg/a.py": METHOD},
    "its class may be chosen by a name": {
        "a.py": CLASS.format("fit(self, model, loader, optimizer)"),
        "b.py": "import importlib, sys\n\nrun = getattr(importlib.import_module('a'), sys.argv[1])\n",
    },
}


@pytest.mark.parametrize("files", UNUSED.values(), ids=UNUSED)
def test_nothing_is_reported_in_a_function_that_nothing_refers_to(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(files)
    assert reported(capsys) == []
    named = next(name for name, text in files.items() if "GradScaler" in text)
    assert reported(capsys, named) == [f"{named}:9"], "a file that is named is checked by itself"


@pytest.mark.parametrize("files", USED.values(), ids=USED)
def test_a_function_that_something_may_refer_to_is_checked(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(files)
    assert len(reported(capsys)) == 1


def test_nothing_is_reported_of_an_import_that_only_unused_code_uses(capsys: pytest.CaptureFixture[str]) -> None:
    write({"a.py": APEX, "b.py": "from a import Native\n\nNative()\n"})
    assert reported(capsys) == []


FIT = TRAIN.format("fit(model, loader=(), optimizer=None)")
ONLY_BY_UNUSED = {
    "a function of another file": {"b.py": "from a import fit\n\ndef other(model): fit(model)\n\nprint(1)\n"},
    "a class of another file that a third file imports": {
        "b.py": "import a\n\nclass Runner:\n    def run(self): a.fit(self)\n",
        "c.py": "from b import Runner\n",
    },
    "functions of two files, one of which a test calls": {
        "b.py": "from a import fit\n\ndef first(model): fit(model)\n",
        "c.py": "from a import fit\n\ndef second(\n    model,\n): fit(model)\n",
        "tests/test_c.py": "from c import second\n\ndef test_second(): second(1)\n",
    },
}
BY_USED = {
    "a third file calls that function": {
        "b.py": "from a import fit\n\ndef other(model): fit(model)\n",
        "c.py": "from b import other\n\nother(1)\n",
    },
    "so does a statement": {"b.py": "from a import fit\n\ndef other(model): fit(model)\n\nfit(1)\n"},
    "the function calls itself": {"b.py": "from a import fit\n\ndef other(model): fit(model); other(model)\n"},
    "a decorator gets that function": {
        "b.py": "import atexit\nfrom a import fit\n\n@atexit.register\ndef other(): fit(1)\n"
    },
    "it has another name there": {"b.py": "from a import fit as run\n\ndef other(model): run(model)\n\nrun(1)\n"},
    "a launcher calls that function": {"b.py": "from a import fit\n\ndef _mp_fn(index): fit(index)\n"},
    "a config names that function": {
        "b.py": "from a import fit\n\ndef other(model): fit(model)\n",
        "c.yaml": "f: b.other",
    },
    "a cell calls that function": {
        "b.py": "from a import fit\n\ndef other(model): fit(model)\n",
        "c.ipynb": '{"cells": [{"cell_type": "code", "source": "from b import other\\nother(1)", "outputs": []}]}',
    },
    "the project is a library": {
        "b.py": "from a import fit\n\ndef other(model): fit(model)\n",
        "setup.py": "import setuptools\n\nsetuptools.setup()\n",
    },
    "a function of any name may be called": {
        "b.py": "from a import fit\n\ndef small(model): fit(model)\n",
        "c.py": "import sys\nimport b\n\ngetattr(b, sys.argv[1])(1)\n",
    },
    "a function whose name is computed may be called": {
        "b.py": "from a import fit\n\ndef run_small(model): fit(model)\n",
        "c.py": 'import sys\nimport b\n\ngetattr(\n    b, "run_" + sys.argv[1]\n)(1)\n',
    },
    "a cell may call a function whose name is computed": {
        "b.py": "from a import fit\n\ndef run_small(model): fit(model)\n",
        "c.ipynb": '{"cells": [{"cell_type": "code", "source": "import b\\ngetattr(b, f\'run_{k}\')(1)"}]}',
    },
    "a class is made with it": {"b.py": "from a import fit\n\nclass Run:\n    result = fit(1)\n", "c.py": "import b\n"},
    "a default is made with it": {"b.py": "from a import fit\n\ndef run(x=fit(1)): ...\n", "c.py": "import b\n"},
    "a hub gets that function": {"hubconf.py": "from a import fit\n\ndef tuned(model): return fit(model)\n"},
    "all functions are commands": {
        "b.py": "import fire\nfrom a import fit\n\ndef other(model): fit(model)\n\nfire.Fire()\n"
    },
    "a base class knows all derived classes": {
        "b.py": "import a\nimport c\n\nclass Second(c.Task):\n    def run(self): a.fit(self)\n",
        "c.py": "class Task:\n    def __init_subclass__(cls): TASKS.append(cls)\n",
    },
    "another module passes it on with all its names": {
        "b.py": "from a import *\n\ndef other(model): fit(model)\n",
        "c.py": "from b import *\n\nfit(1)\n",
    },
    "another module passes its module on": {
        "b.py": "import a\n\ndef other(model): a.fit(model)\n",
        "c.py": "import b\n\nb.a.fit(1)\n",
    },
}  # fmt: skip


@pytest.mark.parametrize("files", ONLY_BY_UNUSED.values(), ids=ONLY_BY_UNUSED)
def test_what_only_unused_code_of_other_files_uses_is_unused(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"a.py": FIT, **files}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    assert reported(capsys) == []
    Path("d.py").write_text("from a import fit\n\nfit(1)\n")
    assert reported(capsys) == ["a.py:9"]


@pytest.mark.parametrize("files", BY_USED.values(), ids=BY_USED)
def test_what_other_files_may_use_is_checked(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {"a.py": FIT, **files}.items():
        Path(name).write_text(text)
    assert "a.py:9" in reported(capsys)


def test_outside_of_a_project_nothing_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mpguard.toml").unlink()
    write(UNUSED["nothing refers to it"])
    assert reported(capsys) == ["a.py:9"]


def test_a_file_that_is_all_the_code_of_its_project_is_there_to_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    write(UNUSED["nothing refers to it"])
    assert reported(capsys) == []
    Path("other.py").unlink()
    assert reported(capsys) == ["a.py:9"]
    script = f"{UNUSED['nothing refers to it']['a.py']}\nprint(torch.randn(2))\n"
    write({"a.py": script})
    assert reported(capsys) == [], "a script calls what it needs"


def test_a_program_that_stops_before_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Its author will get past the import that fails, and the mistake is still there."""
    write({"train.py": "from other import missing\n" + TRAIN.format("main()") + "\nmain()\n"})
    assert reported(capsys) == ["train.py:10"]


def test_findings_follow_the_references_between_runs(capsys: pytest.CaptureFixture[str]) -> None:
    write(UNUSED["nothing refers to it"])
    assert reported(capsys) == []
    for name in ("run.sh", "run.yaml", "b.py"):
        write({name: "from a import fit\n\nfit(1)\n"})
        assert reported(capsys) == ["a.py:9"], name
        Path(name).unlink()
        assert reported(capsys) == [], name


def test_a_suppression_in_unused_code_is_not_unused(capsys: pytest.CaptureFixture[str]) -> None:
    code = UNUSED["nothing refers to it"]["a.py"].replace("optimizer.step()", "optimizer.step()  # noqa: MPG203")
    write({"a.py": code})
    assert reported(capsys) == []


def test_fixes_leave_unused_code_as_it_is() -> None:
    write(UNUSED["nothing refers to it"])
    main(["lint", "--isolated", "--select", "ALL", "--fix", "."])
    assert Path("a.py").read_text() == UNUSED["nothing refers to it"]["a.py"]


CONFIG = '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "amp": {"enabled": true}}\n'


@pytest.mark.parametrize(
    "reader",
    [
        {},
        {"train.py": "import deepspeed\n\nengine = deepspeed.initialize(config='ds.json')\n"},
        {"train.py": "from transformers import HfArgumentParser\n"},
        {"README.md": "Run it with `--deepspeed ds.json`.\n"},
    ],
)
def test_a_deepspeed_config_counts_where_something_may_read_it(
    reader: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write({"ds.json": CONFIG, "options.py": f"import json\n\nDS = {CONFIG.replace('true', 'True')}", **reader})
    assert reported(capsys) == (["ds.json:1", "options.py:3"] if reader else [])


SCALED = """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()
scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


def test_an_option_that_nothing_in_the_project_sets_may_be_set_by_who_runs_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write({"train.py": SCALED, "run.sh": "python train.py --lr 0.1\n"})
    assert len(reported(capsys)) == 1


COPY = {
    "lib/setup.py": "",
    "lib/LICENSE": "",
    "lib/README.md": "    python examples/tune.py\n",
    "lib/examples/tune.py": TRAIN.format("main()") + "\nmain()\n",
}


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        (COPY, []),
        ({**COPY, "lib/pyproject.toml": "[project]\n"}, []),
        ({**COPY, "b/setup.py": "", "b/LICENSE": "", "b/README.md": "    python examples/tune.py\n"}, []),
        ({**COPY, "LICENSE": "MIT License", "lib/LICENSE": "Apache License"}, []),
        ({**COPY, "LICENSE": "MIT\n License", "lib/LICENSE": "MIT License"}, ["lib/examples/tune.py:9"]),
        ({**COPY, "run.sh": "cd lib/examples && python tune.py\n"}, ["lib/examples/tune.py:9"]),
        ({name: text for name, text in COPY.items() if "LICENSE" not in name}, ["lib/examples/tune.py:9"]),
        ({name.removeprefix("lib/"): text for name, text in COPY.items()}, ["examples/tune.py:9"]),
    ],
)
def test_an_example_of_a_copied_package_counts_where_the_project_runs_it(
    files: dict[str, str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(files)
    assert reported(capsys) == lines


@pytest.mark.parametrize(
    ("license", "expected"),
    [
        ("Copyright 2023 B\ntheirs", []),
        ("Copyright 2023 B\nours", ["dep/tests/test_a.py:1"]),
        ("Copyright 2024 A\nours", ["dep/tests/test_a.py:1"]),
    ],
)
def test_nothing_is_reported_in_the_tests_of_a_copied_package(
    license: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are no code of the project that contains it; its other code is."""
    deprecated = "from apex import amp\n\namp.initialize(model)\n"
    write(
        {
            "LICENSE": "Copyright 2024 A\nours",
            "dep/LICENSE": license,
            "dep/setup.py": "",
            "dep/tests/test_a.py": deprecated,
        }
    )
    assert reported(capsys) == expected
    write({"dep/dep/__init__.py": "", "dep/dep/a.py": deprecated})
    assert [each for each in reported(capsys) if "tests" not in each] == ["dep/dep/a.py:1"]
