"""Code that is reached only through a statement which raises: nothing is reported in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpguard.cli import main
from mpguard.core import tracked_fs

POLICY = "MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)"
IMPORTS = "import sys\nimport torch\nfrom torch.distributed.fsdp import MixedPrecision\n"
MAIN = (
    "def main():\n{before}    policy = "
    + POLICY
    + "\n    model = FSDP(build(), policy)\n{after}    train(model)\n\nmain()\n"
)
DEFINED = "from m import FSDP, build, train\n"
#: The modules that all programs here may import.
MODULES = {
    "m.py": "def build():\n    return 1\n\n\ndef train(m, epochs=1):\n    return m\n\n\ndef FSDP(m, p):\n    return m\n"
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mpguard.toml").touch()


def findings(files: dict[str, str], capsys: pytest.CaptureFixture[str], code: str = "MPG509") -> int:
    tracked_fs.clear_run_caches()
    for name, text in {**MODULES, **files}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    main(["lint", "--format", "concise", "--isolated", "--no-cache", "--select", code, "."])
    return sum(f" {code} " in line for line in capsys.readouterr().out.splitlines())


def program(before: str = "", after: str = "", top: str = "") -> str:
    def indented(code: str) -> str:
        return "".join(f"    {line}\n" for line in code.splitlines())

    return IMPORTS + DEFINED + top + MAIN.format(before=indented(before), after=indented(after))


CLASS = (
    """class Run:
{init}
    def train(self):
{body}        return """
    + POLICY
    + """


Run().train()
"""
)


def method(body: str = "", init: str = "    def __init__(self):\n        self.rate = 1\n", base: str = "") -> str:
    code = CLASS.format(init=init, body="".join(f"        {line}\n" for line in body.splitlines()))
    return IMPORTS + code.replace("class Run:", f"class Run{base}:")


PARSER = """def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", "-b", type=int)
    group = parser.add_argument_group("more")
    group.add_argument("--rate", dest="lr")
    args = parser.parse_args()
    return args


"""


def with_options(before: str, top: str = "import argparse\n" + PARSER, after: str = "") -> str:
    """Return a program whose `main` gets what its parser returns."""
    code = program(before, after, top=top).replace("def main():", "def main(args):")
    return code.replace("\nmain()", "\nif __name__ == '__main__':\n    args = parse()\n    main(args)")


RAISES = {
    "a variable that is assigned further down": {"a.py": program("print(model)")},
    "a variable in its own first assignment": {"a.py": program("model = print(model)")},
    "a variable of a function that is called": {
        "a.py": program("f()", top="model = 1\ndef f():\n    model.eval()\n    model = build()\n")
    },
    "an option that the parser lacks": {"a.py": with_options("x = args.epochs")},
    "an option that the parser of another file lacks": {
        "options.py": "import argparse\n" + PARSER,
        "a.py": with_options("x = args.epochs", "from options import parse\n")
    },
    "an option that a function reads": {
        "data.py": "def load(size, opt):\n    if opt.kind == 'a':\n        return 1\n    return 2\n",
        "a.py": with_options("load(args.batch_size, args)", "import argparse\nfrom data import load\n" + PARSER),
    },
    "an option that is read after the place": {"a.py": with_options("x = args.lr", after="x = args.epochs")},
    "a name that nothing binds": {"a.py": program("x = undefined")},
    "in a condition": {"a.py": program("if undefined:\n    pass")},
    "in a context manager": {"a.py": program("with torch.no_grad():\n    x = undefined")},
    "in a default": {"a.py": program("def inner(x=undefined):\n    pass")},
    "a name in the same statement": {"a.py": program().replace("FP16", "").replace(POLICY, f"f({POLICY}, undefined)")},
    "above all functions": {"a.py": program(top="x = undefined\n")},
    "below the function, before its call": {"a.py": program().replace("\nmain()", "\nx = undefined\nmain()")},
    "in the caller": {"a.py": program().replace("\nmain()", "\ndef run():\n    x = undefined\n    main()\n\nrun()")},
    "an unknown keyword": {"a.py": program("train(1, rate=2)")},
    "too many arguments": {"a.py": program("train(1, 2, 3)")},
    "a missing argument": {"a.py": program("train()")},
    "a missing argument of a module's function": {"a.py": program("m.train()", top="import m\n")},
    "a function that raises": {"a.py": program("stop()", top="def stop():\n    raise ValueError('no')\n")},
    "a function that a module lacks": {"a.py": program("m.fit()", top="import m\n")},
    "a name that a module lacks": {"a.py": program(top="from m import fit\n")},
    "a module that imports what is missing": {"b.py": "from m import fit\n", "a.py": program(top="import b\n")},
    "a name that a module above lacks": {
        "src/b.py": "",
        "scripts/a.py": program(top="sys.path.append('..')\nfrom src.b import fit\n").replace("from m", "from src.m"),
        "src/m.py": MODULES["m.py"],
    },
    "the end of the program": {"a.py": program("sys.exit(1)")},
    "after the place, before training": {"a.py": program(after="x = undefined")},
    "in the caller, after the function": {
        "a.py": IMPORTS + f"def policy():\n    return {POLICY}\n\n"
                "def main():\n    p = policy()\n    x = undefined\n\nif __name__ == '__main__':\n    main()\n",
    },
    "an attribute that nothing sets": {"a.py": method("self.scaler.step()")},
    "an attribute that a class lacks": {"a.py": program("x = CFG.device", top="class CFG:\n    rate = 1\n")},
    "an attribute that a class of another file lacks": {
        "config.py": "class CFG:\n    rate = 1\n",
        "a.py": program("x = CFG.device", top="from config import CFG\n"),
    },
    "an attribute that a known base does not set": {
        "a.py": "class Base:\n    pass\n\n" + method("self.x()", base="(Base)")
    },
    "a method that is not there": {"a.py": method("self.setup()")},
    "a method with other parameters": {"a.py": method("self.train(1)")},
    "an object that cannot be made": {
        "a.py": method(init="    def __init__(self):\n        raise NotImplementedError\n")
    },
    "a field that a dataclass lacks": {
        "a.py": program("C(amp=1)", top="import dataclasses\n@dataclasses.dataclass\nclass C:\n    rate: int = 1\n")
    },
    "a wrap policy without a partial": {
        "a.py": program(
            "p = transformer_auto_wrap_policy(transformer_layer_cls={int})",
            top="from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\n",
        )
    },
    "a module missing from the package": {
        "p/__init__.py": "", "p/a.py": program(top="from .losses import f\n").replace("from m", "from ..m"),
    },
    "a submodule missing from a package": {"u/__init__.py": "", "a.py": program(top="from u.x import f\n")},
    "a module missing from the package of a package": {
        "u/__init__.py": "", "u/v/__init__.py": "", "a.py": program(top="import u.v.x.y\n"),
    },
    "a module missing from the package that the project builds": {
        "setup.py": "", "u/__init__.py": "", "scripts/a.py": program(top="from u.x import f\n"),
    },
}  # fmt: skip
RUNS = {
    "a variable of the module": {"a.py": program("print(other)", top="other = 1\n")},
    "a variable that is declared global": {"a.py": program("global model\nprint(model)", top="model = 1\n")},
    "a variable that a branch assigns": {"a.py": program("if sys.argv:\n    model = 1\nprint(model)")},
    "a variable of a comprehension": {"a.py": program("print([model for model in sys.argv])")},
    "a variable that a loop assigns": {"a.py": program("for model in sys.argv:\n    print(model)")},
    "a variable that an inner function reads": {"a.py": program("f = lambda: model\nprint(f)")},
    "options of the parser": {"a.py": with_options("x = args.lr, args.batch_size, args.__class__")},
    "an attribute that a class has": {
        "a.py": program("x = CFG.rate, CFG.__name__, CFG.mro()", top="class CFG:\n    rate = 1\n")
    },
    "an attribute that another file sets on a class": {
        "config.py": "class CFG:\n    rate = 1\n",
        "device.py": "from config import CFG\nCFG.device = 0\n",
        "a.py": program("x = CFG.device", top="import device\nfrom config import CFG\n"),
    },
    "an attribute of a class that a loop sets": {
        "a.py": program(
            "x = CFG.device", top="class CFG:\n    rate = 1\nfor key in ('device',):\n    setattr(CFG, key, 1)\n"
        )
    },
    "an attribute of a class with an unknown base": {
        "a.py": program("x = CFG.device", top="from enum import Enum\nclass CFG(Enum):\n    rate = 1\n")
    },
    "an option that is set": {"a.py": with_options("args.epochs = 1\nx = args.epochs")},
    "an option that another file sets": {
        "m.py": MODULES["m.py"] + "def more(args):\n    args.epochs = 1\n",
        "a.py": with_options("m.more(args)\nx = args.epochs", "import argparse\nimport m\n" + PARSER),
    },
    "options that another file adds": {
        "m.py": MODULES["m.py"] + "def more(args, d):\n    for k in d:\n        setattr(args, k, d[k])\n",
        "a.py": with_options("x = args.epochs", "import argparse\nimport m\n" + PARSER),
    },
    "an option that is tested first": {"a.py": with_options("x = hasattr(args, 'epochs') and args.epochs")},
    "options that are added in a loop": {
        "a.py": with_options("x = args.epochs", "import argparse\n" + PARSER.replace(
            "    group =", "    for name in sys.argv:\n        parser.add_argument(name)\n    group =")),
    },
    "options that another function adds": {
        "a.py": with_options("x = args.epochs", "import argparse\n" + PARSER.replace(
            "    group =", "    sys.add(parser)\n    group =")),
    },
    "options of another parser": {
        "a.py": with_options("x = args.epochs", "import argparse\n" + PARSER.replace("er()", "er(parents=[sys.base])")),
    },
    "another object of the name": {"a.py": with_options("args = build()\nx = args.epochs")},
    "a function that others call too": {"a.py": with_options("x = args.epochs") + "\nmain(build())\n"},
    "nothing": {"a.py": program()},
    "names of a snippet": {
        "a.py": IMPORTS + f"def policy():\n    return {POLICY}\n\n"
                "def main():\n    p = policy()\n    x = undefined\n\nmain()\n",
    },
    "handled": {"a.py": program("try:\n    x = undefined\nexcept NameError:\n    pass")},
    "suppressed": {
        "a.py": program("with contextlib.suppress(NameError):\n    x = undefined", top="import contextlib\n")
    },
    "in a branch": {"a.py": program("if sys.argv:\n    x = undefined")},
    "in the other operand": {"a.py": program("x = sys.argv or undefined")},
    "a call of a parameter": {
        "a.py": program().replace("main()", "main(model=1)").replace("build()", "model(1, 2)"),
    },
    "in a lambda": {"a.py": program("x = lambda: undefined")},
    "in a loop that may not run": {"a.py": program("for x in sys.argv:\n    undefined")},
    "from a star import": {"a.py": program("x = undefined", top="from somewhere import *\n")},
    "from exec": {"a.py": program("x = undefined", top="exec(open('c.py').read())\n")},
    "a global of another function": {
        "a.py": program("x = undefined", top="def set():\n    global undefined\n    undefined = 1\n")
    },
    "a class in a function whose __init__ reads its own name": {
        "a.py": program("class A(dict):\n    def __init__(self):\n        super(A, self).__init__()\nA()")
    },
    "an inner function that is not called": {"a.py": program("def inner():\n    return undefined")},
    "after training": {"a.py": program().replace("    train(model)\n", "    train(model)\n    x = undefined\n")},
    "after a return": {"a.py": program(after="if sys.argv:\n    return\nx = undefined")},
    "keywords that are not known": {"a.py": program("train(**vars(sys))")},
    "a decorator that changes the signature": {"a.py": program("f()", top="@sys.d\ndef f(x):\n    pass\n")},
    "defined twice": {"a.py": program("f()", top="def f():\n    pass\ndef f(x=1):\n    pass\n")},
    "a generator": {"a.py": program("f()", top="def f():\n    raise ValueError\n    yield\n")},
    "a module above that may not be imported": {
        "src/b.py": "", "src/c.py": "", "scripts/a.py": program(top="from src.b import fit\n"),
    },
    "a module with __getattr__": {
        "b.py": "def __getattr__(name):\n    return 1\n", "a.py": program(top="from b import fit\n"),
    },
    "a module of another package": {"a.py": program(top="from torch.nowhere import f\n")},
    "a module with the name of Python's own": {
        "p/__init__.py": "",
        "p/logging.py": "import logging\nlog = logging.getLogger()\nif __name__ == '__main__':\n    pass\n",
        "p/a.py": program(top="from p.logging import log\n").replace("from m", "from ..m"),
    },
    "a missing module of a package that sys.path may find elsewhere": {
        "u/__init__.py": "", "src/u/x.py": "f = 1\n",
        "scripts/a.py": program(top="sys.path.insert(0, 'src')\nfrom u.x import f\n"),
    },
    "a missing module of a package that a folder around has too": {
        "u/__init__.py": "", "u/x.py": "f = 1\n", "scripts/u/__init__.py": "", "scripts/m.py": MODULES["m.py"],
        "scripts/a.py": program(top="from u.x import f\n"),
    },
    "a missing module that Git ignores": {
        ".gitignore": "/u/*.py\n!__init__.py\n", "u/__init__.py": "", "a.py": program(top="from u.x import f\n"),
    },
    "a missing package that Git ignores": {
        ".gitignore": "x/\n", "u/__init__.py": "", "a.py": program(top="import u.x.y\n"),
    },
    "a package that searches elsewhere": {
        "u/__init__.py": "__path__.append('/opt/u')\n", "a.py": program(top="from u.x import f\n"),
    },
    "a missing module of a package without __init__": {"u/y.py": "", "a.py": program(top="from u.x import f\n")},
    "a missing module of a package that another project builds": {
        "u/__init__.py": "", "scripts/a.py": program(top="from u.x import f\n"),
    },
    "a module that a build of Cython puts into the package": {
        "align/__init__.py": "from .align.core import path\n", "align/core.pyx": "",
        "a.py": program(top="import align\n"),
    },
    "a module that a setup.py in the package builds": {
        "align/__init__.py": "from .align.core import path\n", "a.py": program(top="import align\n"),
        "align/setup.py": "from setuptools import setup\nsetup(ext_modules=cythonize('core.pyx'))\n",
    },
    "a module with a syntax error": {"b.py": "def f(:\n", "a.py": program(top="import b\n")},
    "a version that a build writes": {
        "p/__init__.py": "", "p/a.py": program(top="from ._version import v\n").replace("from m", "from ..m"),
    },
    "an attribute that another file sets": {"a.py": method("self.scaler.step()"), "b.py": "run.scaler = 1\n"},
    "an attribute that setattr sets": {
        "a.py": method("self.scaler.step()", init="    def __init__(self, k='x'):\n        setattr(self, k, 1)\n")
    },
    "an attribute that a subclass sets": {"a.py": method("self.scaler.step()") + "class Other(Run):\n    scaler = 1\n"},
    "an attribute of another object": {
        "a.py": method("def inner(self):\n    self.scaler.step()\n    return policy")
        .replace(f"return {POLICY}\n\n\nRun", "return inner\n\n\nRun").replace("return policy", f"return {POLICY}")
    },
    "a library with the name of a folder around": {
        "p/__init__.py": "", "p/torch/__init__.py": "", "p/torch/a.py": program().replace("from m", "from ...m"),
    },
    "an attribute of an unknown base": {"a.py": method("self.scaler.step()", base="(sys.Base)")},
    "the same wrap policy, with the module": {
        "a.py": program(
            "p = transformer_auto_wrap_policy(1, True, 2, transformer_layer_cls={int})",
            top="from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\n",
        )
    },
    "one caller is not affected": {
        "a.py": program().replace("\nmain()", "\ndef run():\n    no()\n    main()\n\nif sys.argv:\n    run()\nmain()")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", RAISES)
def test_nothing_is_reported_where_the_program_raises(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(RAISES[case], capsys) == 0


@pytest.mark.parametrize("case", RUNS)
def test_code_that_may_run_is_reported(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(RUNS[case], capsys) == 1


def test_code_outside_of_a_project_may_be_a_part_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mpguard.toml").unlink()
    assert findings({"a.py": program("x = undefined")}, capsys) == 1


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["x = undefined\n", f"p = {POLICY}\n"], 1),  # cells run in any order
        ([f"x = undefined\np = {POLICY}\n"], 0),
        ([f"x = datetime.now()\np = {POLICY}\n"], 1),  # a module of Python's own may be imported by hand
        (["%run setup.py\n", f"x = undefined\np = {POLICY}\n"], 1),
    ],
)
def test_cells_of_a_notebook(cells: list[str], expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in [IMPORTS, *cells]]
    notebook = {"cells": found, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    assert findings({"a.ipynb": json.dumps(notebook)}, capsys) == expected


TRAINER = """import torch
from names import *

class Trainer:
    def __init__(self, cfg, model, optimizer):
        self.cfg, self.model, self.optimizer = cfg, model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def epoch(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            if self.cfg["clips"]:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()

"""
RUN = "from trainer import Trainer\nfrom names import *\n\ncfg = {}\nTrainer(cfg, model, optimizer).epoch(loader)\n"


@pytest.mark.parametrize(
    ("trainer", "config", "expected"),
    [
        (TRAINER, "yaml.safe_load(open('a.yaml'))", 0),
        (TRAINER, "json.load(open('a.json'))", 0),
        (TRAINER, "EasyDict(yaml.safe_load(open('a.yaml')))", 1),
        (TRAINER, "json.load(open('a.json'), object_hook=to_namespace)", 1),
        (TRAINER, "OmegaConf.load('a.yaml')", 1),
        (TRAINER.replace("self.cfg.norm", "self.cfg['norm']"), "yaml.safe_load(open('a.yaml'))", 1),
        (
            TRAINER.replace("self.scaler.scale", "log(self.cfg.norm)\n            self.scaler.scale"),
            "json.load(file)",
            0,
        ),
        (TRAINER.replace("self.cfg.norm", "self.cfg.get('norm')"), "yaml.safe_load(open('a.yaml'))", 1),
    ],
)
def test_a_call_that_reads_an_attribute_of_a_plain_dict_raises(
    trainer: str, config: str, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"trainer.py": trainer, "main.py": "import json\nimport yaml\n" + RUN.format(config)}
    assert findings(files, capsys, "MPG205") == expected


RESUMES = """\
import argparse
import torch

def main(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    if args.resume:
        path = args.checkpoint_folder + "/last.pt"
        optimizer.load_state_dict(torch.load(path)["optimizer"])
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    main(args, torch.nn.Linear(8, 8), [torch.rand(8, 8)])
"""


def test_a_checkpoint_is_reported_only_where_resuming_may_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The option of the folder is missing, so nothing is loaded from a checkpoint."""
    option = '    parser.add_argument("--checkpoint-folder")\n'
    assert findings({"a.py": RESUMES}, capsys, "MPG208") == 0
    with_option = RESUMES.replace("    args = parser", option + "    args = parser")
    assert findings({"a.py": with_option}, capsys, "MPG208") == 1
