"""Findings that are kept between runs: never stale, whatever changes; and never in the way."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributions import install
from rule_cases import examples

from mpguard.cli import main
from mpguard.core import tracked_fs
from mpguard.lint.model.rule import rules
from mpguard.lint.run.cache import identity as rules_identity
from mpguard.lint.run.engine import Engine
from mpguard.lint.source.files import Target

LOW = """\
import torch
from settings import DTYPE

optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=DTYPE):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""
ENGINE = """\
import torch

def train(optimizer, loader):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
CALLER = """\
import torch
from accelerate import Accelerator
from engine import train

optimizer = torch.optim.SGD(model.parameters(), 0.1)
train({}, loader)
"""
ACCELERATED = "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision='fp16')\n"
CONFIG = "distributed_type: MULTI_GPU\nmixed_precision: {}\n"
OLD = "from torch.cuda import amp\n\nscaler = amp.GradScaler()\n"
SCALER = "import torch\n\nscaler = torch.cuda.amp.GradScaler()\n"

Codes = list[tuple[str, str]]


class Linted:
    """Runs of the linter in one process. checked: the files that the last one had to check."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.checked = capsys, list[str]()
        original = Engine._check

        def counted(engine: Engine, target: Target) -> Any:
            self.checked.append(target.path)
            return original(engine, target)

        monkeypatch.setattr(Engine, "_check", counted)

    def report(self, *arguments: str) -> tuple[int, Any, str]:
        self.checked.clear()
        status = main(["lint", "--format", "json", "-j", "1", *arguments])
        out, err = self.capsys.readouterr()
        return status, json.loads(out) if out else None, err

    def __call__(self, *arguments: str) -> Codes:
        """The findings (file, code); they are those of a run without a cache."""
        report = self.report(*arguments)
        checked = list(self.checked)
        assert report == self.report("--no-cache", *arguments)
        self.checked = checked
        return self._codes(report)

    def cached(self, *arguments: str) -> Codes:
        """The findings (file, code) of a run with a cache, where those of one without are known."""
        return self._codes(self.report(*arguments))

    @staticmethod
    def _codes(report: tuple[int, Any, str]) -> Codes:
        return [(each["path"], each["code"]) for each in report[1]["findings"]]


@pytest.fixture
def lint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Linted]:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("")
    yield Linted(capsys, monkeypatch)


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statuses vouch for contents at once, and not after two seconds."""
    monkeypatch.setattr(tracked_fs, "SETTLED_NS", -1)


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


# -- each way to go stale -----------------------------------------------------------------------------


def test_what_has_not_changed_is_not_checked_again(lint: Linted) -> None:
    write("train.py", SCALER)
    write("other.py", "import torch\n")
    assert lint(".") == [("train.py", "MPG302")]
    assert sorted(lint.checked) == ["other.py", "train.py"]
    assert lint(".") == [("train.py", "MPG302")]
    assert lint.checked == []
    write("other.py", SCALER)
    assert lint(".") == [("other.py", "MPG302"), ("train.py", "MPG302")]
    assert lint.checked == ["other.py"]


@pytest.mark.parametrize("vouched", [False, True])
def test_an_edit_of_the_same_size_with_its_time_restored(
    vouched: bool, lint: Linted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_fs, "SETTLED_NS", 0 if vouched else 1 << 62)
    write("train.py", SCALER)
    before = Path("train.py").stat()
    assert lint(".")
    time.sleep(0.02)  # the clock of the file system ticks
    write("train.py", SCALER.replace("GradScaler", "GradSkaler"))
    os.utime("train.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = Path("train.py").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert lint(".") == []


def test_a_young_file_is_read_whatever_its_status_says(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two edits within one tick of the file system's clock leave the same status."""
    write("train.py", SCALER)
    same = Path("train.py").stat()
    monkeypatch.setattr(tracked_fs, "status_of", lambda status: (same.st_mtime_ns, 0, same.st_size, 0))
    assert lint(".")
    write("train.py", SCALER.replace("GradScaler", "GradSkaler"))
    assert lint(".") == []


def test_a_file_from_the_future_is_read(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    write("train.py", SCALER)
    ahead = time.time() + 86400
    os.utime("train.py", (ahead, ahead))
    assert lint(".")
    reads: list[str] = []
    original = tracked_fs.digest
    monkeypatch.setattr(tracked_fs, "digest", lambda data: reads.append("") or original(data))
    assert not tracked_fs.is_settled(Path("train.py").stat())
    assert lint(".")
    assert lint.checked == []
    assert reads


def test_a_file_of_old_is_not_even_read(lint: Linted, trusting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    write("train.py", SCALER)
    time.sleep(0.02)
    assert lint(".")
    monkeypatch.setattr("mpguard.lint.run.cache.dependencies.open", None, raising=False)  # any call of it fails
    status, report, _ = lint.report(".")
    assert (status, len(report["findings"]), lint.checked) == (1, 1, [])


def test_a_config_appears_beside_changes_and_goes(lint: Linted) -> None:
    write("train.py", ACCELERATED)
    assert lint("train.py") == []
    write("mp.yaml", CONFIG.format("bf16"))
    assert lint("train.py") == [("train.py", "MPG862")]
    write("mp.yaml", CONFIG.format("fp16"))
    assert lint("train.py") == [("train.py", "MPG514")]
    write("mp.yaml", CONFIG.format("bf16"))
    write("b.yaml", CONFIG.format("fp16"))
    assert "MPG862" not in str(lint("train.py"))
    Path("b.yaml").unlink()
    assert lint("train.py") == [("train.py", "MPG862")]
    Path("mp.yaml").unlink()
    assert lint("train.py") == []
    assert lint("train.py") == []
    assert lint.checked == []


def test_an_imported_module_appears_changes_and_goes(lint: Linted) -> None:
    write("src/train.py", LOW)
    assert lint("src/train.py") == []
    write("src/settings.py", "import torch\nDTYPE = torch.float16\n")
    assert lint("src/train.py") == [("src/train.py", "MPG201")]
    write("src/settings.py", "import torch\nDTYPE = torch.bfloat16\n")
    assert lint("src/train.py") == []
    Path("src/settings.py").unlink()
    write("settings.py", "import torch\nDTYPE = torch.float16\n")  # in the folder above
    assert lint("src/train.py") == [("src/train.py", "MPG201")]
    write("src/settings/__init__.py", "import torch\nDTYPE = torch.bfloat16\n")  # nearer
    assert lint("src/train.py") == []


def test_a_module_that_an_imported_module_imports(lint: Linted) -> None:
    write("deep.py", "import torch\nDTYPE = torch.float16\n")
    write("settings.py", "from deep import DTYPE\n")
    for name in ("a", "b"):  # what was learnt of settings.py for one of them, counts for both
        write(f"{name}.py", LOW)
    assert lint("a.py", "b.py") == [("a.py", "MPG201"), ("b.py", "MPG201")]
    write("deep.py", "import torch\nDTYPE = torch.bfloat16\n")
    assert lint("a.py", "b.py") == []
    assert lint.checked == ["a.py", "b.py"]
    write("unrelated.txt", "")
    assert lint("a.py", "b.py") == []
    assert lint.checked == []


def test_a_caller_in_another_module_appears_changes_and_goes(lint: Linted) -> None:
    """A loop that another file calls: its findings depend on what that file passes, and on nothing else."""
    write("engine.py", ENGINE)
    write("run.sh", "python -c 'import engine; engine.train(1, 2)'\n")
    write("unrelated.py", "import torch\n\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n")
    select, found = ("--select", "MPG201", "."), [("engine.py", "MPG201")]
    plain, prepared = CALLER.format("optimizer"), CALLER.format("Accelerator().prepare(optimizer)")
    assert lint(*select) == found
    write("main.py", prepared)
    assert lint(*select) == []
    assert "engine.py" in lint.checked
    assert lint(*select) == []
    assert lint.checked == []
    write("unrelated.py", "import torch\n\noptimizer = torch.optim.SGD(model.parameters(), 0.2)\n")
    assert lint(*select) == []
    assert lint.checked == ["unrelated.py"]
    write("main.py", plain)
    assert lint(*select) == found
    write("main.py", prepared)
    assert lint(*select) == []
    Path("main.py").unlink()
    assert lint(*select) == found
    write("package/main.py", prepared)
    assert lint(*select) == [], "imported from the folder above"
    write("package/engine.py", "def train(optimizer, loader): pass\n")
    assert lint(*select) == found, "another module of that name is nearer"


def test_a_launch_line_appears_changes_and_goes(lint: Linted) -> None:
    write("src/train.py", ACCELERATED)
    write("conf/a.yaml", CONFIG.format("bf16"))
    write("conf/b.yaml", CONFIG.format("fp16"))
    assert lint("src/train.py") == []
    write("run.sh", "accelerate launch --config_file conf/a.yaml src/train.py\n")
    assert lint("src/train.py") == [("src/train.py", "MPG862")]
    write("run.sh", "accelerate launch --config_file conf/b.yaml src/train.py\n")
    assert lint("src/train.py") == [("src/train.py", "MPG514")]
    write("conf/b.yaml", CONFIG.format("bf16"))
    assert lint("src/train.py") == [("src/train.py", "MPG862")]
    Path("run.sh").unlink()
    assert lint("src/train.py") == []


def test_settings_change(lint: Linted) -> None:
    write("src/train.py", SCALER)
    assert lint(".") == [("src/train.py", "MPG302")]
    write("pyproject.toml", "[tool.mpguard]\nignore = ['MPG302']\n")
    assert lint(".") == []
    write("src/mpguard.toml", "")  # nearer
    assert lint(".") == [("src/train.py", "MPG302")]
    write("src/mpguard.toml", "[per-file-ignores]\n'train.py' = ['MPG3']\n")
    assert lint(".") == []
    write("src/mpguard.toml", "exclude = ['train.py']\n")
    assert lint(".") == []
    write("src/mpguard.toml", "no-such-key = 1\n")
    assert lint.report(".")[0] == 2


def test_a_config_of_the_settings_goes(lint: Linted) -> None:
    write("pyproject.toml", "[tool.mpguard]\nconfigs = ['conf/a.yaml']\n")
    write("conf/a.yaml", CONFIG.format("bf16"))
    write("train.py", ACCELERATED)
    write("plain.py", "import torch\n")
    assert lint("train.py", "plain.py") == [("train.py", "MPG862")]
    Path("conf/a.yaml").unlink()
    assert lint.report("plain.py")[0] == 2


def test_requirements_change(lint: Linted) -> None:
    write("train.py", OLD)
    found = lint(".")
    assert found
    write("requirements.txt", "torch==2.2\n")
    assert lint(".") == []
    Path("requirements.txt").unlink()
    write("requirements/base.txt", "torch==2.2\n")
    assert lint(".") == []
    write("requirements/base.txt", "torch<3\n")
    assert lint(".") == found


def test_rules_are_selected(lint: Linted) -> None:
    write("train.py", SCALER)
    assert lint(".") == [("train.py", "MPG302")]
    assert lint("--select", "MPG2", ".") == []
    assert lint("--ignore", "MPG302", ".") == []
    assert lint("--select", "MPG302", ".") == [("train.py", "MPG302")]
    assert lint("--isolated", ".") == [("train.py", "MPG302")]
    assert lint("--preview", "--select", "ALL", ".")
    assert lint(".") == [("train.py", "MPG302")]
    assert lint.checked == []
    assert lint.report("--select", "MPG9999", ".")[0] == 2


def test_a_given_config_changes(lint: Linted) -> None:
    write("train.py", ACCELERATED)
    write("conf/given.yaml", CONFIG.format("bf16"))
    write("conf/fp16.yaml", CONFIG.format("fp16"))
    assert lint("train.py", "--config", "conf/given.yaml") == [("train.py", "MPG862")]
    assert lint("train.py", "--config", "conf/fp16.yaml") == [("train.py", "MPG514")]
    write("conf/given.yaml", CONFIG.format("fp16"))
    assert lint("train.py", "--config", "conf/given.yaml") == [("train.py", "MPG514")]
    Path("conf/given.yaml").unlink()
    assert lint.report("train.py", "--config", "conf/given.yaml")[0] == 2


def test_a_named_file_and_one_that_is_found(lint: Linted) -> None:
    write("broken.py", "x = = 1\n")  # nothing that a rule could report: its syntax counts where it is named
    assert lint(".") == []
    assert lint("broken.py") == [("broken.py", "MPG000")]
    assert lint(".") == []


def test_the_working_directory_is_in_the_paths(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    write("src/train.py", SCALER)
    assert lint("src") == [("src/train.py", "MPG302")]
    monkeypatch.chdir("src")
    assert lint(".") == [("train.py", "MPG302")]


def test_fixes_and_comments(lint: Linted) -> None:
    write("train.py", SCALER)
    write("clean.py", "import torch\n")
    lint(".")
    assert lint.report("--fix", ".")[1]["summary"]["fixed"] == 1
    assert lint.checked == ["train.py"]
    assert 'torch.amp.GradScaler("cuda")' in Path("train.py").read_text()
    assert lint(".") == []
    write("train.py", SCALER)
    assert lint(".")
    assert lint.report("--add-noqa", ".")[1]["summary"]["suppressed"] == 1
    assert lint(".") == []


def test_a_baseline_and_unchanged_lines_are_taken_out_afterwards(lint: Linted) -> None:
    write("train.py", SCALER)
    assert lint(".")
    main(["lint", "--write-baseline", "known.json", "."])
    lint.capsys.readouterr()
    assert lint("--baseline", "known.json", ".") == []
    assert lint(".") == [("train.py", "MPG302")]
    subprocess.run("git init -q . && git add -A && git -c user.name=a -c user.email=a@b.c commit -qm x",
                   shell=True, check=True)  # fmt: skip
    assert lint("--diff-from", "HEAD", ".") == []
    assert lint(".") == [("train.py", "MPG302")]


# -- the code of the rules ----------------------------------------------------------------------------


def test_mpguards_own_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpguard.lint.run.cache.identity import identity

    package = tmp_path / "theirs"
    package.mkdir()
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    identities = [identity()]
    monkeypatch.syspath_prepend(tmp_path)
    identities.append(identity())
    assert identities[0] == identities[1], "it has no plugin, recipe or rule"
    (info / "entry_points.txt").write_text("[mpguard.rules]\ntheirs = theirs\n")
    (package / "__init__.py").write_text("")
    identities.append(identity())
    (package / "rule.py").write_text("X = 1\n")
    identities.append(identity())
    (package / "rule.py").write_text("X = 2\n")
    identities.append(identity())
    (tmp_path / "another-2.0.dist-info").mkdir()  # their rule may ask it
    identities.append(identity())
    assert None not in identities
    assert len(set(identities)) == len(identities) - 1


def test_a_rule_of_others_is_installed_changed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    write(f"{work}/train.py", "import torch\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a module changes twice in one second

    def codes() -> list[str]:
        done = subprocess.run([sys.executable, "-m", "mpguard", "lint", "--format", "json", "."],
                              cwd=work, capture_output=True, text=True)  # fmt: skip
        return [each["code"] for each in json.loads(done.stdout)["findings"]]

    rule = (
        "from mpguard.lint.model.rule import Rule\n\nclass Theirs(Rule):\n    '''What it does.'''\n"
        "    code, name, severity, message = 'OUR001', 'theirs', 'error', 'of theirs'\n"
        "    def check(self, facts):\n        yield self.at((0, 6))\n"
    )
    assert codes() == []
    info = install(site, rule)
    assert codes() == ["OUR001"]
    (site / "their_rules" / "__init__.py").write_text(rule.replace("OUR001", "OUR002"))
    assert codes() == ["OUR002"]
    (info / "entry_points.txt").unlink()
    assert codes() == []


# -- as without a cache, whatever happens -------------------------------------------------------------


#: The parts into which examples are divided: a run over several is cheaper than a run for each.
_PARTS = 16


@pytest.fixture
def unchanged_linter(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule is installed or changed meanwhile: mpguard's own files are read once, and not twice per run."""
    monkeypatch.setattr(rules_identity, "identity", functools.cache(rules_identity.identity))


@pytest.mark.usefixtures("unchanged_linter")
@pytest.mark.parametrize("part", range(_PARTS))
def test_every_file_a_rule_reads_is_a_dependency(part: int, lint: Linted) -> None:
    """All examples with other files, each in a project of its own: without each file, with another, with it again."""
    of_rules = (example for _, rule in sorted(rules(own_only=True).items()) for example in examples(rule))
    chosen = [example for example in of_rules if example.files][part::_PARTS]
    names = [f"{number}/{example.name or 'train.py'}" for number, example in enumerate(chosen)]
    others = [
        [(f"{number}/{name}", text) for name, text in example.files.items()] for number, example in enumerate(chosen)
    ]
    for number, (name, example) in enumerate(zip(names, chosen, strict=True)):
        for path, text in ((f"{number}/pyproject.toml", ""), (name, example.code), *others[number]):
            write(path, text)
    select = ("--select", "ALL", "--preview")
    whole = lint(*select, *names)
    assert whole
    lint(*select, ".")
    for place in range(max(map(len, others))):
        files = [each[place] for each in others if place < len(each)]
        for path, _ in files:
            Path(path).unlink()
        lint(*select, ".")
        for path, text in files:
            changed = text.replace("bf16", "fp16").replace("FSDP", "MULTI_GPU").replace("2", "1")
            write(path, text if path.endswith(".toml") else changed)  # there is no GPU b100, and no recipe fp16_full
        lint(*select, ".")
        for path, text in files:
            write(path, text)
        assert lint.cached(*select, *names) == whole


@pytest.mark.usefixtures("unchanged_linter")
@pytest.mark.parametrize("seed", range(4))
def test_any_edits_of_any_tree(seed: int, lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples of all rules in a few folders, that import each other by chance; files come, change and go."""
    chance = random.Random(seed)
    monkeypatch.setattr(tracked_fs, "SETTLED_NS", -1 if seed % 2 else tracked_fs.SETTLED_NS)
    texts: list[tuple[str, str]] = []
    for rule in rules(own_only=True).values():
        for example in examples(rule):
            texts.append((example.name or "train.py", example.code))
            texts += example.files.items()
    folders = ["", "src", "src/inner", "conf"]

    def put() -> None:
        name, text = chance.choice(texts)
        name = name if chance.random() < 0.5 else f"{chance.choice('abc')}{Path(name).suffix}"
        if chance.random() < 0.3 and name.endswith(".py"):
            text = f"from {chance.choice(['', '.', 'src.'])}{chance.choice('abc')} import *\n{text}"
        write(str(Path(chance.choice(folders), Path(name).name)), text)

    for _ in range(25):
        put()
    checked = 0
    for _ in range(12):
        files = [each for each in Path().rglob("*") if each.is_file() and each.name != "known.json"]
        act, file = chance.choice(["put", "put", "remove", "touch", "settings", "append"]), chance.choice(files)
        if act == "put":
            put()
        elif act == "remove":
            file.unlink()
        elif act == "touch":
            file.touch()
        elif act == "append" and file.suffix == ".py":
            file.write_text(file.read_text() + f"# {chance.random()}\n")
        elif act == "settings":
            text = chance.choice(["", "[tool.mpguard]\nignore = ['MPG3']\n", "[tool.mpguard]\ngpu = 'h100'\n"])
            write("pyproject.toml", text)
        time.sleep(0.01)
        lint(".")
        checked += len(lint.checked)
        lint(".")
        assert lint.checked == [], "nothing has changed in between"
    assert 0 < checked < 12 * 25, "some of it was known"


# -- runs side by side, runs that are killed, and what else befalls a file -----------------------------


def _many(count: int = 60) -> None:
    for number in range(count):
        write(f"src/f{number}.py", SCALER + "x = 1\n" * number)


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mpguard", "lint", "--format", "concise", *arguments, "."]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_runs_side_by_side(lint: Linted, own_cache: Path) -> None:
    _many(20)
    runs = [_start() for _ in range(4)]
    outputs = {run.communicate() for run in runs}
    assert len(outputs) == 1
    (out, err) = outputs.pop()
    assert (out.count(b"MPG302"), err) == (20, b"")
    assert len(lint(".")) == 20
    assert lint.checked == []
    assert [each.name for each in own_cache.iterdir() if each.name.startswith(".lint")] == []


def test_a_run_that_is_killed(lint: Linted, own_cache: Path) -> None:
    _many()
    for seconds in (0.2, 0.5, 0.8, 1.2, 1.6, 2.0, 2.5):
        run = _start()
        time.sleep(seconds)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        write("src/f0.py", SCALER + f"y = {seconds}\n")
    assert len(lint(".")) == 60


def test_killed_while_it_writes(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is half written is ignored."""
    write("train.py", SCALER)
    lint(".")
    write("train.py", "import torch\n")
    original = Path.replace

    def killed(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    assert main(["lint", "."]) == 130
    monkeypatch.setattr(Path, "replace", original)
    assert lint(".") == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\0" * len(data),
        lambda data: data.replace(b"MPG302", b"MPG303"),
        lambda data: data + b" ",
        lambda data: tracked_fs.digest(b"[]").encode() + b"\n[]",
        lambda data: tracked_fs.digest(b'{"files": 1}').encode() + b'\n{"files": 1}',
        lambda data: tracked_fs.digest(data.partition(b"\n")[2].replace(b"[[0", b"[[99")).encode()
        + b"\n" + data.partition(b"\n")[2].replace(b"[0", b"[99"),
        lambda data: b"\xff\xfe\n{}",
    ],
)  # fmt: skip
def test_a_damaged_file_counts_for_nothing(damage: Callable[[bytes], bytes], lint: Linted, own_cache: Path) -> None:
    write("train.py", SCALER)
    lint(".")
    (file,) = own_cache.glob("lint-*.json")
    file.write_bytes(damage(file.read_bytes()))
    assert lint(".") == [("train.py", "MPG302")]
    assert lint.checked == ["train.py"]
    lint(".")
    assert lint.checked == [], "it was written again"


def test_a_folder_in_the_place_of_the_file(lint: Linted, own_cache: Path) -> None:
    write("train.py", SCALER)
    lint(".")
    (file,) = own_cache.glob("lint-*.json")
    file.unlink()
    file.mkdir()
    status, report, err = lint.report(".")
    assert (status, len(report["findings"])) == (1, 1)
    assert "cannot be written" in err


def test_a_folder_that_cannot_be_written(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requested cache that cannot be written is reported; without a request, a read-only checkout is not."""
    write("train.py", SCALER)
    write("file", "")
    monkeypatch.setenv("MPGUARD_CACHE_DIR", "file/cache")
    status, report, err = lint.report(".")
    assert (status, len(report["findings"])) == (1, 1)
    assert (
        err.startswith("mpguard: ") and "file/cache: cannot be written: Not a directory; findings are not cached" in err
    )
    monkeypatch.delenv("MPGUARD_CACHE_DIR")
    write(".mpguard_cache", "a file")
    assert lint.report(".")[::2] == (1, "")


def test_a_rule_that_fails_is_asked_again(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    write("train.py", SCALER)
    rule = rules(own_only=True)["MPG302"]
    original = rule.check  # type: ignore[attr-defined]

    def fails(self: Any, facts: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(rule, "check", fails)
    assert lint.report(".")[0] == 2
    monkeypatch.setattr(rule, "check", original)
    assert lint(".") == [("train.py", "MPG302")]


def test_a_file_that_took_too_long_is_checked_again(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpguard.lint.run import timeout

    write("train.py", SCALER)
    rule = rules(own_only=True)["MPG302"]
    original = rule.check  # type: ignore[attr-defined]

    def slow(self: Any, facts: Any) -> Any:
        raise timeout.TimeoutExceeded

    monkeypatch.setattr(rule, "check", slow)
    assert "parse limit" in lint.report(".")[1]["findings"][0]["message"]
    monkeypatch.setattr(rule, "check", original)
    assert lint(".") == [("train.py", "MPG302")]


# -- where it lies ------------------------------------------------------------------------------------


def test_the_folder_is_no_part_of_the_project(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPGUARD_CACHE_DIR")
    write("src/train.py", SCALER)
    monkeypatch.chdir("src")
    lint(".")
    folder = Path("../.mpguard_cache")
    assert (folder / ".gitignore").read_text() == "*\n"
    assert (folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert len(list(folder.glob("lint-*.json"))) == 1
    assert not Path(".mpguard_cache").exists()


def test_the_settings_say_where(lint: Linted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPGUARD_CACHE_DIR")
    write("pyproject.toml", "[tool.mpguard]\ncache-dir = 'build/cache'\n")
    write("train.py", SCALER)
    lint(".")
    assert len(list(Path("build/cache").glob("lint-*.json"))) == 1
    assert not Path(".mpguard_cache").exists()


def test_no_cache_reads_and_writes_none(lint: Linted, own_cache: Path) -> None:
    write("train.py", SCALER)
    lint.report("--no-cache", ".")
    assert list(own_cache.iterdir()) == []


def test_a_link_in_a_repository_is_not_followed(lint: Linted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPGUARD_CACHE_DIR")
    write("elsewhere/keep.txt", "")
    Path(".mpguard_cache").symlink_to("elsewhere")
    write("train.py", SCALER)
    lint(".")
    assert [each.name for each in Path("elsewhere").iterdir()] == ["keep.txt"]


def test_old_files_go(lint: Linted, own_cache: Path) -> None:
    write("train.py", SCALER)
    (own_cache / ".lint-x.json.1").write_text("")
    os.utime(own_cache / ".lint-x.json.1", (1, 1))
    (own_cache / "notes.txt").write_text("not ours")
    gpus = ("h100", "a100", "b200", "l4", "v100")
    for number in range(20):
        lint.report("--ignore", f"MPG{number % 4 + 1}", "--gpu", gpus[number % 5], ".")
    kept = {each.name for each in own_cache.iterdir()}
    assert len([name for name in kept if name.startswith("lint-")]) == 16
    assert ".lint-x.json.1" not in kept
    assert "notes.txt" in kept


def test_a_known_file_is_answered_without_the_parser(tmp_path: Path) -> None:
    """What takes time to import is not: libcst, PyYAML, the rules, importlib.metadata."""
    program = """
import sys
from mpguard.cli import main
assert main(["lint", "train.py"]) == 1
heavy = {"libcst", "yaml", "importlib.metadata", "pathspec", "rich", "tempfile", "multiprocessing", "pickle"}
print(sorted(heavy & set(sys.modules)), [name for name in sys.modules if name.startswith("mpguard.lint.model.rule")])
"""
    (tmp_path / "train.py").write_text(SCALER)
    outputs = [
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert "libcst" in outputs[0], "the test can fail"
    assert outputs[1].splitlines()[-1] == "[] []"
