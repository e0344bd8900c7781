"""Branches that no call of the project takes: nothing is reported in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.cli import main
from mpguard.core import tracked_fs

POLICY = "MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)"
IMPORTS = "import torch\nfrom torch.distributed.fsdp import MixedPrecision\n"
#: The finding is in line 5.
WRAP = f"""{IMPORTS}def wrap(model, mp="fp32", shard=True):
    if mp == "fp16":
        policy = {POLICY}
    else:
        policy = None
    return FSDP(model, mixed_precision=policy)

"""
CLASS = f"""{IMPORTS}class Run:
    def __init__(self, model, mp="fp32"):
        self.mp = mp
    def policy(self):
        if self.mp == "fp16":
            return {POLICY}

"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mpguard.toml").touch()


def findings(files: dict[str, str], capsys: pytest.CaptureFixture[str], code: str = "MPG509") -> int:
    tracked_fs.clear_run_caches()
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    main(["lint", "--format", "concise", "--isolated", "--no-cache", "--select", code, "."])
    return sum(f" {code} " in line for line in capsys.readouterr().out.splitlines())


#: Without a scaler: `policy` is built in line 7.
SCALED = f"""{IMPORTS}class Run:
    def __init__(self, scaler=None):
        self.scaler = scaler
    def policy(self):
        return None if self.scaler else {POLICY}

def main():
    scaler = {{scaler}}
    return Run(scaler=scaler).policy()

main()
"""

UNTAKEN = {
    "a scaler is always passed": {"a.py": SCALED.replace("{scaler}", "torch.amp.GradScaler('cuda')")},
    "all calls pass other constants": {"a.py": WRAP + "wrap(m, 'bf16')\nwrap(m, mp='fp32')\n"},
    "no call passes it": {"a.py": WRAP + "wrap(m)\n"},
    "the caller passes its own parameter": {"a.py": WRAP + "def main_(mp):\n    wrap(m, mp=mp)\n\nmain_('bf16')\n"},
    "the name is a part of a module's": {"a.py": "import ops.wrap\n" + WRAP + "wrap(m)\n"},
    "an early return": {
        "a.py": f"{IMPORTS}def wrap(half=False):\n    if not half:\n        return None\n    return {POLICY}\n\n"
        "wrap()\n"
    },
    "an attribute of the object": {"a.py": CLASS + "Run(m, 'bf16').policy()\n"},
    "the calls are in other files": {
        "utils/fsdp.py": WRAP,
        "a.py": "from utils.fsdp import wrap\n\nwrap(m, mp='bf16')\n",
        "b.py": "import utils.fsdp as fsdp\n\nfsdp.wrap(m)\n",
    },
    "a method": {
        "a.py": f"{IMPORTS}class Run:\n    def build(self, mp):\n        if mp == 16:\n            return {POLICY}\n"
        "    def main(self):\n        self.build(32)\n\nRun().main()\n"
    },
}


@pytest.mark.parametrize("files", UNTAKEN.values(), ids=UNTAKEN)
def test_a_branch_that_no_call_takes(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(files, capsys) == 0


TAKEN = {
    "a scaler is passed with an option": {
        "a.py": SCALED.replace("{scaler}", "torch.amp.GradScaler('cuda') if torch.x() else None")
    },
    "a call passes it": {"a.py": WRAP + "wrap(m, 'bf16')\nwrap(m, mp='fp16')\n"},
    "a call passes an option": {"a.py": WRAP + "wrap(m)\nwrap(m, args.mp)\n"},
    "a call passes arguments that are not known": {"a.py": WRAP + "wrap(m)\nwrap(m, **options)\n"},
    "it is passed on": {"a.py": WRAP + "wrap(m)\nFire(wrap)\n"},
    "it has another name": {"a.py": WRAP + "wrap(m)\nother = wrap\nother(m, 'fp16')\n"},
    "a script calls it": {"a.py": WRAP + "wrap(m)\n", "b.py": "from a import wrap\nwrap(m, mp='fp16')\n"},
    "another script calls it too": {
        "utils.py": WRAP,
        "a.py": "from utils import wrap\n\nwrap(m)\n",
        "b.py": "import utils\n\nutils.wrap(m, mp=args.mp)\n",
    },
    "another file gives it another name": {
        "utils.py": WRAP,
        "a.py": "from utils import wrap\n\nwrap(m)\nother = wrap\nother(m, mp='fp16')\n",
    },
    "another file imports it by another name": {
        "utils.py": WRAP,
        "a.py": "from utils import wrap as other\n\nother(m, mp='fp16')\n",
    },
    "another file does not parse": {
        "utils.py": WRAP,
        "a.py": "from utils import wrap\n\nwrap(m)\n",
        "b.py": "from utils import wrap\n\nwrap(m, 'fp16'\n",
    },
    "a README calls it": {"a.py": WRAP + "wrap(m)\n", "README.md": "```python\nwrap(model, 'fp16')\n```\n"},
    "it is a part of a library": {"pkg/a.py": WRAP + "wrap(m)\n", "pkg/__init__.py": "", "setup.py": ""},
    "a decorator may call it": {"a.py": WRAP.replace("def wrap", "@app.command\ndef wrap") + "wrap(m)\n"},
    "the attribute is not the parameter": {
        "a.py": f"{IMPORTS}class Run:\n    def __init__(self):\n        self.mp = read()\n    def build(self, mp):\n"
        f"        if self.mp == 16:\n            return {POLICY}\n    def main(self):\n        self.build(32)\n\n"
        "Run().main()\n"
    },
    "the flag is another object's": {"a.py": WRAP.replace("if mp ==", "if args.mp ==") + "wrap(m)\n"},
    "the parameter is set again": {"a.py": WRAP.replace("    if mp", "    mp = read()\n    if mp", 1) + "wrap(m)\n"},
    "the attribute is set again": {"a.py": CLASS + "run = Run(m)\nrun.mp = 'fp16'\nrun.policy()\n"},
    "a subclass passes it": {"a.py": CLASS + "class Half(Run):\n    def __init__(self):\n"
                             "        super().__init__(m, 'fp16')\n\nRun(m).policy()\nHalf().policy()\n"},
}  # fmt: skip


@pytest.mark.parametrize("files", TAKEN.values(), ids=TAKEN)
def test_a_branch_that_a_call_may_take(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(files, capsys) == 1


def test_a_finding_in_the_last_statement_of_a_large_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Definitions that no rule needs are not parsed, and have no place of their own."""
    large = "def other(x):\n    return x\n\n" * 1_000
    wrap = WRAP.rstrip().removeprefix(IMPORTS)
    assert findings({"a.py": IMPORTS + large + wrap, "b.py": "from a import wrap\n\nwrap(m, args.mp)\n"}, capsys) == 1


def test_a_new_call_is_seen_with_the_cache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPGUARD_CACHE_DIR", str(Path.cwd().parent / "cache"))
    Path("a.py").write_text(WRAP + "wrap(m)\n")
    for text, expected in (("", 0), ("from a import wrap\nwrap(m, mp='fp16')\n", 1), ("", 0)):
        Path("b.py").write_text(text)
        tracked_fs.clear_run_caches()
        main(["lint", "--format", "concise", "--isolated", "--select", "MPG509", "."])
        assert capsys.readouterr().out.count(" MPG509 ") == expected


SAVES = """\
import torch

def main(model, loader, path=None, amp=False):
    optimizer = torch.optim.AdamW(model.parameters())
    if amp:
        scaler = torch.amp.GradScaler("cuda")
    if path is not None:
        optimizer.load_state_dict(torch.load(path)["optimizer"])
    for x in loader:
        if amp:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            model(x).sum().backward()
            optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, "last.pt")

"""


def test_a_finding_whose_evidence_is_in_a_branch_that_no_call_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The state of a scaler that is never created is not missing in a checkpoint, nor of one that nothing loads."""
    for given, expected in (("'last.pt'", 0), ("amp=True", 0), ("'last.pt', amp=True", 1)):
        assert findings({"a.py": f"{SAVES}main(model, loader, {given})\n"}, capsys, "MPG208") == expected


#: The gradients of line 14 are those of the autocast in line 5, which only a call with `half=True` enters.
STEPS = """\
import torch

def loss_of(model, x, half=False):
    if half:
        with torch.autocast("cuda", dtype=torch.float16):
            return model(x).sum()
    return model(x).sum()

def train(model, loader, half=False):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        loss = loss_of(model, x, half=half)
        loss.backward()
        optimizer.step()

def tune(model, loader):
    for x in loader:
        print(loss_of(model, x, half=True))

"""


@pytest.mark.parametrize(
    ("main", "reported"),
    [
        ("train(model, loader, half=False)\n", 0),
        ("train(model, loader)\n", 0),
        ("train(model, loader, half=True)\n", 1),
        ("train(model, loader, half=args.half)\n", 1),
    ],
)
def test_an_autocast_that_no_call_enters_is_no_evidence(
    main: str, reported: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert findings({"train.py": STEPS + main}, capsys, "MPG201") == reported
