"""Projects that mean no good, or are just odd: linted as a user would, in a process of its own that has to end."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import seconds

from mpguard.cli import main
from mpguard.core import entry_points
from mpguard.lint.formats.terminal import FORMATS
from mpguard.lint.model.rule import rules

#: A finding of MPG302, which has a safe fix.
TRAIN = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
FIXED = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
CONFIG = "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  amax_history_length: 16\n"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lint(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`mpguard lint` in a process; it fails where that takes longer than a minute."""
    command = [sys.executable, "-m", "mpguard", "lint", "--format", "concise", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(120), check=False, **more)
    assert "Traceback" not in done.stderr, done.stderr
    return done


# -- files that are none ------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
def test_fifos_where_files_are_looked_for() -> None:
    """No process writes into them: opening one as a file would block forever."""
    for name in (
        ".gitignore", "requirements.txt", "requirements-dev.txt", "setup.py", "setup.cfg", "mp.yaml", "ds_config.json",
        "README.md", "run.sh", "Makefile", "helper.py", "other.py", "page.ipynb",
    ):  # fmt: skip
        os.mkfifo(name)
    Path("train.py").write_text(f"from helper import scale\nfrom other import *\n{TRAIN}scale(torch)\n")
    Path("use.sh").write_text("accelerate launch --config_file mp.yaml train.py\n")
    done = lint(".")
    assert done.returncode == 1, done.stderr
    assert "train.py:4:10: MPG302" in done.stdout


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
@pytest.mark.parametrize("name", ["pyproject.toml", "mpguard.toml"])
def test_settings_that_are_a_fifo(name: str) -> None:
    os.mkfifo(name)
    Path("train.py").write_text(TRAIN)
    done = lint("train.py")
    assert done.returncode == 2
    assert f"{name}: cannot be read" in done.stderr and "is a FIFO" in done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
def test_a_config_that_is_a_fifo_or_a_device() -> None:
    os.mkfifo("mp.yaml")
    Path("train.py").write_text(TRAIN)
    for name in ("mp.yaml", "/dev/zero"):
        done = lint("--config", name, "train.py")
        assert done.returncode == 2
        assert f"{name}: cannot be read" in done.stderr


def test_links_that_loop() -> None:
    Path("train.py").write_text(TRAIN)
    Path("loop.py").symlink_to("loop.py")
    Path("ping.py").symlink_to("pong.py")
    Path("pong.py").symlink_to("ping.py")
    Path("down").symlink_to(".")
    Path("folder").mkdir()
    Path("folder/up").symlink_to("..")
    Path("mp.yaml").symlink_to("mp.yaml")
    Path("pyproject.toml").symlink_to("/nowhere/pyproject.toml")
    Path("requirements.txt").symlink_to("requirements.txt")
    Path("use.sh").write_text("accelerate launch --config_file mp.yaml train.py\n")
    done = lint(".")
    assert done.returncode == 1
    assert done.stdout.count("MPG302") == 1, "each file once"
    assert "loop.py:1:1: MPG000 the file is a broken link" in done.stdout


# -- nothing of the project is run ----------------------------------------------------------------------

#: Modules that mpguard, its libraries or Python's own would import, or a tool in the same folder run.
SHADOWS = (
    "torch", "yaml", "libcst", "rich", "pathspec", "accelerate", "sitecustomize", "usercustomize", "conftest", "setup",
    "argparse", "dataclasses", "enum", "json", "random", "tokenize", "tomllib", "typing", "typing_extensions",
    "mpguard_plugins", "mpguard_hook",
)  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [["-m", "mpguard"], ["-Bm", "mpguard"], ["-mmpguard"], ["-W", "ignore::m", "-Xdev", "-Bmmpguard"], ["mpguard"]],
    ids=" ".join,
)
def test_nothing_of_the_project_is_imported(command: list[str]) -> None:
    for name in (*SHADOWS, *(["mpguard"] if command == ["mpguard"] else [])):
        Path(f"{name}.py").write_text(f"open('{name}.run', 'w').close()\nraise SystemExit('run: {name}')\n")
    Path("train.py").write_text(f"import conftest, yaml\nfrom torch import *\n{TRAIN}")
    Path("mp.yaml").write_text(CONFIG)
    Path("theirs.egg-info").mkdir()
    Path("theirs.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    Path("theirs.egg-info/entry_points.txt").write_text("[mpguard.rules]\ntheirs = conftest\n")
    program = [sys.executable] if command[0] != "mpguard" else []
    script = str(Path(sys.executable).with_name("mpguard"))
    done = subprocess.run(
        [*program, *(script if part == "mpguard" and not program else part for part in command), "lint",
         "--format", "concise", "--select", "ALL", "."],
        capture_output=True, text=True, timeout=seconds(60), check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "MPG302" in done.stdout and "run: " not in done.stdout + done.stderr
    assert not list(Path().glob("*.run"))


def test_the_test_above_can_fail() -> None:
    Path("yaml.py").write_text("open('yaml.run', 'w').close()\n")
    subprocess.run([sys.executable, "-c", "import yaml"], check=True)
    assert Path("yaml.run").exists()


def test_isolated_takes_no_settings() -> None:
    Path("pyproject.toml").write_text("[tool.mpguard]\nignore = ['ALL']\nconfigs = ['gone.yaml']\n")
    Path("train.py").write_text(TRAIN)
    assert lint(".").returncode == 2
    done = lint("--isolated", ".")
    assert done.returncode == 1
    assert "MPG302" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 100_000 + "]" * 100_000,
        "x = " + "{a=" * 5_000 + "1" + "}" * 5_000,
        "x = " + "9" * 10_000,
        "tool = 3\n[other]\nmpguard = 1\n",
        "[tool]\nmpguard = 'x'\n",
        "[tool.mpguard]\nselect = 'MPG\\u001b[31m'\n",
        "[tool.mpguard]\nselect = ['MPG\\u001b[31m']\n",
        "[tool.mpguard]\nexclude = ['(((((((((((((((((((((((((((((((((', '**/**/**/**/**/**/**/**/**/**/x']\n",
        "[tool.mpguard\n",
        "\x00",
    ],
    ids=["lists", "tables", "digits", "no table", "text", "escape", "escape in a list", "patterns", "broken", "nul"],
)
def test_hostile_settings(text: str) -> None:
    Path("pyproject.toml").write_text("# mpguard\n" + text)
    Path("a/b/c/d/e/f/g/h/i/j/k/l/m/n").mkdir(parents=True)
    Path("a/b/c/d/e/f/g/h/i/j/k/l/m/n/train.py").write_text(TRAIN)
    done = lint(".")
    assert done.returncode in (1, 2)
    assert "\x1b" not in done.stdout + done.stderr
    if done.returncode == 2:
        assert "pyproject.toml" in done.stderr
    else:
        assert "MPG302" in done.stdout


# -- fixes are written whole ----------------------------------------------------------------------------

#: `MPGUARD_KILLS=200 pytest -k killed` for a longer look.
KILLS = int(os.environ.get("MPGUARD_KILLS", "2"))
COMMAND = [sys.executable, "-m", "mpguard", "lint", "--fix", "-j", "1", "--no-cache", "."]


def many(count: int) -> tuple[bytes, bytes]:
    """Yield files to fix, with their contents before and after."""
    old, new = (
        b"\xef\xbb\xbf" + (text + "# \u00e9\n" * 2000).replace("\n", "\r\n").encode() for text in (TRAIN, FIXED)
    )
    for number in range(count):
        Path(f"train{number}.py").write_bytes(old)
        Path(f"train{number}.py").chmod(0o640)
    return old, new


#: `mpguard lint --fix`, killed as it is about to put the fixed text of its n-th file in place.
KILLED_WHILE_WRITING = """
import itertools, os, signal, sys
number = itertools.count(1)
def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith(".py") and next(number) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
from mpguard.cli import main
main(sys.argv[2:])
"""


def assert_whole(old: bytes, new: bytes) -> int:
    """Return how many files have their new text; each file is old or new, with the permissions it had."""
    contents = [path.read_bytes() for path in Path().glob("train*.py")]
    assert set(contents) <= {old, new}
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path().glob("train*.py")} == {0o640}
    for left in Path().glob(".train*"):
        left.unlink()
    return contents.count(new)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no such signal here")
def test_a_run_that_is_killed_leaves_each_file_old_or_new() -> None:
    old, _ = many(30)
    begin = time.monotonic()
    assert subprocess.run(COMMAND, capture_output=True, check=False).returncode == 0
    whole = time.monotonic() - begin
    new = Path("train0.py").read_bytes()
    assert new.startswith(b"\xef\xbb\xbf") and new != old and new.count(b"\n") == new.count(b"\r\n")
    for number in (1, 7, 30):
        many(30)
        command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(number), *COMMAND[3:]]
        assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
        assert assert_whole(old, new) == number - 1
    for _ in range(KILLS):  # anywhere else
        many(30)
        with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(random.uniform(0, 1.2) * whole)
            process.kill()
        assert_whole(old, new)


def test_two_runs_at_once() -> None:
    old, _ = many(30)
    runs = [subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for run in runs:
        _, output = run.communicate(timeout=seconds(120))
        assert run.returncode in (0, 2)
        assert all("changed by another program" in line or "roblem" in line for line in output.splitlines()), output
    (content,) = {path.read_bytes() for path in Path().glob("train*.py")}
    assert content != old and b'torch.amp.GradScaler("cuda")' in content
    assert not list(Path().glob(".train*"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may write in, with everything imported that a run imports.

    The other user may not be able to read this installation: it may lie below a folder that only root may enter.
    """
    for package in ("mpguard.core", "mpguard.cli", "mpguard.lint", "rich.console", "yaml"):
        entry_points.walk(package, "the test")
    rules()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        os.chdir(folder)
        yield Path(folder)
        os.chdir("/")


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="there are no users here")
def test_a_read_only_file_is_reported_and_kept(open_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first.py", "train.py"):
        (open_folder / name).write_text(TRAIN)
        (open_folder / name).chmod(0o444)
    assert main(["lint", "--fix", "--isolated", "--no-cache", "first.py"]) == (0 if os.geteuid() == 0 else 2)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        status = main(["lint", "--fix", "--isolated", "--no-cache", "train.py"])
    finally:
        os.seteuid(before)
    assert status == 2
    assert "train.py: cannot be written: the file is read-only" in capsys.readouterr().err
    assert (open_folder / "train.py").read_text() == TRAIN


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root only can become another user")
def test_a_folder_that_may_not_be_entered(open_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is named in it: `Path.exists` and its like raise there."""
    (open_folder / "train.py").write_text("x = 1\n")
    (open_folder / "closed").mkdir(mode=0o700)
    closed = ("closed", "closed/x.py", "closed/x", "--config=closed/mp.yaml", "--baseline=closed/b.json",
              "--write-baseline=closed/b.json", "--output-file=closed/out", "--stdin-filename=closed/x.py")  # fmt: skip
    main(["lint", "train.py"])
    os.seteuid(65534)
    try:
        for argument in closed:
            status = main(["lint", "--no-cache", argument, *(["train.py"] if argument.startswith("--") else [])])
            assert status == (1 if argument == "closed" else 2), argument
    finally:
        os.seteuid(0)
    assert "closed:1:1 MPG000 error [syntax-error] the folder cannot be read" in capsys.readouterr().out


def test_folders_without_end(tmp_path: Path) -> None:
    top = Path("d" * 3)
    top.mkdir()
    deep = os.open(top, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    inner_file = Path(top, *"d" * 150, "train.py")
    for path in (Path("train.py"), Path(top, *"d" * 50, "train.py"), inner_file):
        path.write_text(TRAIN)
    try:
        done = lint(".")
        assert done.returncode == 1 and done.stdout.count("MPG302") == 2, done.stdout
        assert "MPG000 the folder lies below more than 100 folders, and is not read" in done.stdout
        done = lint(str(inner_file))
        assert done.returncode == 2 and "lies below more than 100 folders, and is not read" in done.stderr
        done = lint("-", "--stdin-filename", "d/" * 1900 + "x.py", input="x = 1\n")
        assert done.returncode == 2 and "lies below more than 100 folders, and is not read" in done.stderr
        done = lint("train.py", cwd=inner_file.parent)
        assert done.returncode == 2 and "the current folder lies below more than 100 folders" in done.stderr
    finally:
        subprocess.run(["rm", "-rf", top], check=True)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = "import os, sys; from mpguard.cli import main; os.rmdir(os.getcwd()); sys.exit(main(['lint']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "gone", capture_output=True, text=True, timeout=seconds(60)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mpguard: the current folder does not exist or cannot be entered: "), done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give a file away")
def test_the_owner_stays() -> None:
    Path("train.py").write_text(TRAIN)
    os.chown("train.py", 1234, 2345)
    Path("link.py").symlink_to("train.py")
    assert main(["lint", "--fix", "link.py"]) == 0
    status = Path("train.py").stat()
    assert (status.st_uid, status.st_gid) == (1234, 2345)
    assert Path("train.py").read_text() == FIXED
    assert Path("link.py").is_symlink()


def test_files_that_change_and_go_while_they_are_read() -> None:
    """What is written is made of one of the contents that there were, and no newer file is lost."""
    contents = {f"{TRAIN}x = {number}\n": f"{FIXED}x = {number}\n" for number in range(3)}
    over = threading.Event()

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            for name in ("train.py", "other.py"):
                Path("new").write_text(list(contents)[number % 3])
                Path("new").replace(name)
            Path("other.py").unlink()

    for name in ("train.py", "other.py"):
        Path(name).write_text(TRAIN)
    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(30):
            assert main(["lint", "--fix", "--no-cache", "--format", "concise", "."]) in (0, 1, 2)
            content = Path("train.py").read_text()
            assert content in {*contents, *contents.values()}
    finally:
        over.set()
        changing.join()


# -- what is printed ------------------------------------------------------------------------------------

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"


@pytest.mark.parametrize(
    "arguments", [*(["--format", name] for name in FORMATS), ["--diff"], ["--fix"], ["--statistics"]]
)
def test_no_escape_sequence_is_printed(arguments: list[str]) -> None:
    """Of names of files, of code around a finding, of keys, of messages about what cannot be read."""
    name = f"a\n::error::b\r{ESCAPES}"
    Path(f"{name}.py").write_text(f"import torch\n# {ESCAPES}\nscaler = torch.cuda.amp.GradScaler('{ESCAPES}')\n")
    Path(f"{name}2.py").write_text(f"def f({ESCAPES}:\n")
    Path(f"{name}.yaml").write_text(CONFIG.replace("amax_history_length", json.dumps(f"amax_history_length{ESCAPES}")))
    Path(f"{name}3.py").symlink_to("nowhere")
    Path(f"{name}.ipynb").write_text(json.dumps({"cells": ESCAPES}))
    done = subprocess.run(
        [sys.executable, "-m", "mpguard", "lint", *arguments, ".", f"gone{ESCAPES}.py"],
        capture_output=True, timeout=seconds(60), check=False, env={**os.environ, "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    output = (done.stdout if arguments != ["--diff"] else b"").decode() + done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert not [sign for sign in output if sign in "\x1b\x07\x9b\r"]
    assert not [line for line in output.splitlines() if line.lstrip().startswith("::error::b")]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals here")
def test_a_patch_is_shown_on_a_terminal_and_whole_in_a_pipe() -> None:
    name = f"a\n::error::b{ESCAPES}.py"
    Path(name).write_text(f"import torch\nscaler = torch.cuda.amp.GradScaler()  # {ESCAPES}\n")
    command = [sys.executable, "-m", "mpguard", "lint", "--diff", "."]
    patch = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    assert ESCAPES.encode() in patch, "what is not the patch's to change"
    assert b'\n+++ "a\\n::error::b\\033[2J' in patch
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        process.wait(seconds(60))
        shown = os.read(ours, 100_000)
    os.close(ours)
    assert b"+scaler = torch.amp.GradScaler" in shown
    assert not set(ESCAPES[0]) & set(shown.decode().replace("\x1b[0m", "").replace("\x1b[1m", ""))
    subprocess.run(["git", "apply", "-p0"], input=patch, check=True)
    assert "torch.amp.GradScaler" in Path(name).read_text()


# -- bombs ----------------------------------------------------------------------------------------------


def bomb(first: str, each: str) -> str:
    """Nine aliases of nine aliases of ...: three billion entries in a few lines."""
    return first + "".join(each.format(i=i, before=", ".join([f"*a{i - 1}"] * 9)) for i in range(1, 12))


BOMBS = {
    "laughs.yaml": bomb("distributed_type: FSDP\na0: &a0 [x, x]\n", "a{i}: &a{i} [{before}]\n"),
    "merged.yaml": bomb("mixed_precision: fp16\na0: &a0 {x: 1}\n", "a{i}: &a{i} {{<<: [{before}]}}\n"),
    "deep.yaml": "distributed_type: FSDP\nx: " + "[" * 50_000 + "]" * 50_000,
    "deep.json": '{"fp16": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "digits.json": '{"fp16": {"initial_scale_power": ' + "9" * 100_000 + "}}",
    "deep.ipynb": '{"cells": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "none.ipynb": "null",
    "odd.ipynb": '{"cells": [1, {"cell_type": "code", "source": {}}, {"cell_type": "code", "source": [1, null]}]}',
    "half.ipynb": '{"cells": [{"cell_type": "code", "source": ["import torch',
    "line.py": TRAIN + "x = '" + "a" * 5_000_000 + "'\n",
    "long.py": TRAIN + "x = [" + "1, " * 100_000 + "]\n",
    "lines.py": TRAIN + "\n" * 300_000,
    "parens.py": TRAIN + "x = " + "(" * 100_000 + ")" * 100_000 + "\n",
    "terms.py": TRAIN + "x = " + " + ".join(["y"] * 100_000) + "\n",
    "calls.py": TRAIN + "x = y" + ".z()" * 100_000 + "\n",
    "elif.py": TRAIN + "if x:\n    pass\n" + "elif y:\n    pass\n" * 50_000,
    "strings.py": TRAIN + "x = " + "f'{" * 100 + "1" + "}'" * 100 + "\n",
    "nul.py": TRAIN + "\0" * 1_000_000,
    "big.py": TRAIN + "    # x\n" * 2_500_000,
    "run.sh": "accelerate launch " + "$(" * 50_000 + ")" * 50_000 + " train.py --config mp.yaml\n",
    "README.md": "```python\n" * 100_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_with_a_finding_or_without_output(name: str) -> None:
    Path(name).write_text(BOMBS[name])
    done = lint("--include-markdown", name)
    assert done.returncode in (0, 1), done.stderr
    for line in done.stdout.splitlines()[:-1]:
        assert line.startswith(name) and len(line) < 1000
