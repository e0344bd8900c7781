"""Which files a run is about: folders, .gitignore, include and exclude, and what is never opened."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from limits import seconds

from mpguard.core import tracked_fs
from mpguard.lint.source import files
from mpguard.lint.source.files import collect


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*names: str, **texts: str) -> None:
    for name, text in {**dict.fromkeys(names, ""), **texts}.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def found(*paths: str, force_exclude: bool = False) -> list[str]:
    result = collect(paths or (".",), force_exclude)
    assert not result.refused
    return [target.path for target in result.targets]


def test_python_yaml_and_json_in_order() -> None:
    make("b.py", "a.py", "pkg/c.pyi", "mp.yaml", "x.yml", "ds.json", "notes.md", "run", "data.csv", "n.ipynb")
    assert found() == ["a.py", "b.py", "ds.json", "mp.yaml", "n.ipynb", "pkg/c.pyi", "x.yml"]


def test_what_may_hold_launch_lines() -> None:
    make("run.sh", "Makefile", "README.md", "docs/readme.md", "docs/guide.md", ".github/workflows/ci.yml", "ci.yml")
    kinds = {target.path: target.kind for target in collect(["."]).targets}
    assert kinds == {
        "run.sh": "launch", "Makefile": "launch", "README.md": "launch", "docs/readme.md": "launch",
        ".github/workflows/ci.yml": "launch", "ci.yml": "config",
    }  # fmt: skip
    with_markdown = {target.path: target.kind for target in collect(["."], include_markdown=True).targets}
    assert with_markdown["docs/guide.md"] == with_markdown["README.md"] == "markdown"
    assert [target.kind for target in collect(["docs/guide.md"]).targets] == ["launch"], "named"


def test_folders_of_tools_hold_nothing_of_ours_unless_named() -> None:
    make("a.py", ".venv/lib/site-packages/torch/b.py", "node_modules/c.py", "__pycache__/d.py", ".git/e.py")
    assert found() == ["a.py"]
    assert found(".venv/lib/site-packages/torch") == [".venv/lib/site-packages/torch/b.py"]


def test_gitignore_at_all_levels() -> None:
    make("a.py", "out/b.py", "pkg/c.py", "pkg/gen.py", "pkg/keep/gen.py", "pkg/deep/gen.py", "root.py", "pkg/root.py")
    make(
        **{
            ".gitignore": "out/\ngen.py\n/root.py\n# a.py\n",
            "pkg/keep/.gitignore": "!gen.py\n",
            "pkg/deep/.gitignore": "*\n",
        }
    )
    assert found() == ["a.py", "pkg/c.py", "pkg/keep/gen.py", "pkg/root.py"]


IGNORES = {
    "folders and one kind of file are brought back": "*\n!*/\n!*.py\n",
    "a folder is brought back with all in it": "/*\n!/pkg/\n",
    "a folder that is left out keeps its files": "pkg/\n!pkg/a.py\n",
    "the last pattern wins": "*.py\n!a.py\npkg/inner/\n",
    "folders alone": "pkg/*/\n!pkg/deep/\n",
    "all of a folder but one": "pkg/**\n!pkg/inner/\n!pkg/inner/b.py\n",
    "spaces and characters": "[ab].py\n!pkg/inner/?.py\n#x.py\n",
}


@pytest.mark.parametrize("text", IGNORES.values(), ids=IGNORES)
def test_what_git_ignores_is_ignored(text: str) -> None:
    names = {"a.py", "pkg/a.py", "pkg/b.py", "pkg/inner/a.py", "pkg/inner/b.py", "pkg/deep/pkg/a.py", "x.json"}
    make(*names, **{".gitignore": text})
    subprocess.run(["git", "init", "-q", "."], check=True)
    listed = ["git", "ls-files", "--others", "--exclude-standard"]
    kept = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    assert found() == sorted(name for name in kept if name != ".gitignore")


def test_gitignore_above_a_named_folder_holds_in_a_repository() -> None:
    make("pkg/a.py", "pkg/gen.py", **{".gitignore": "gen.py\n"})
    assert found("pkg") == ["pkg/a.py", "pkg/gen.py"]  # no repository: nothing above counts
    Path(".git").mkdir()
    assert found("pkg") == ["pkg/a.py"]


def test_a_named_folder_is_checked_though_it_is_ignored() -> None:
    make("out/a.py", "out/inner/b.py", **{".gitignore": "out/\n"})
    Path(".git").mkdir()
    assert found() == []
    assert found("out") == ["out/a.py", "out/inner/b.py"]
    assert found("out/inner") == ["out/inner/b.py"]


def test_a_named_file_is_checked_though_it_is_ignored_and_excluded() -> None:
    make("gen.py", "mpguard.toml", **{".gitignore": "gen.py\n", "mpguard.toml": "exclude = ['gen.py']\n"})
    assert found("gen.py") == ["gen.py"]
    assert found("gen.py", force_exclude=True) == []


def test_exclude_and_include() -> None:
    make("a.py", "third/b.py", "pkg/third/c.py", "pkg/d.py", "run.cfg", **{"mpguard.toml": "exclude = ['third']\n"})
    assert found() == ["a.py", "pkg/d.py"]
    tracked_fs.clear_run_caches()
    make(**{"mpguard.toml": "include = ['pkg/**', 'run.cfg']\n"})
    assert found() == ["pkg/d.py", "pkg/third/c.py", "run.cfg"]


def test_links_do_not_loop_and_nothing_comes_twice() -> None:
    make("pkg/a.py", "other/b.py")
    Path("pkg/up").symlink_to("..")
    Path("pkg/other").symlink_to("../other")
    Path("pkg/z_again.py").symlink_to("a.py")
    assert found() == ["other/b.py", "pkg/a.py"]
    assert found("pkg/other") == ["pkg/other/b.py"], "a link that is named is followed"
    assert found("pkg/a.py", "pkg", ".") == ["pkg/a.py", "other/b.py"]


def test_broken_links() -> None:
    make("a.py")
    Path("b.py").symlink_to("gone.py")
    Path(".#a.py").symlink_to("user@host.123")  # Emacs locks a file so
    Path("data.json").symlink_to("gone.json")
    targets = collect(["."]).targets
    assert [(target.path, target.problem) for target in targets] == [
        ("a.py", None),
        ("b.py", "the file is a broken link"),
    ]


def test_fifos_sockets_and_devices_are_never_opened() -> None:
    make("a.py")
    os.mkfifo("pipe.py")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock.py")
        assert found() == ["a.py"]
        refused = collect(["pipe.py", "sock.py", "/dev/zero", "a.py"]).refused
    assert [message.split(", not a regular file")[0] for message in refused] == [
        "pipe.py: is a FIFO", "sock.py: is a socket", "/dev/zero: is a device",
    ]  # fmt: skip


def test_what_is_named_and_is_not_there_or_not_ours() -> None:
    make("notes.txt", "a.py", "empty/notes.md")
    result = collect(["gone.py", "notes.txt", "a.py", "empty"])
    assert [target.path for target in result.targets] == ["a.py"]
    assert result.refused == (
        "gone.py: no such file or folder",
        f"notes.txt: mpguard reads {files.READS}",
    )
    (empty,) = result.empty
    assert empty.startswith("empty: no Python, YAML or JSON files in this folder, or all are left out by")


def test_a_folder_without_permission_is_a_problem_of_its_own(tmp_path: Path) -> None:
    make("open/a.py", "closed/b.py", "named.py")
    code = (
        "import os, sys\nos.chmod('closed', 0); os.chmod('named.py', 0)\n"
        "from mpguard.lint.source.files import collect\nos.geteuid() or os.seteuid(65534)\n"
        "found = collect(['.', 'named.py'])\n"
        "print([(t.path, t.problem) for t in found.targets], found.refused)"
    )
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60))
    Path("closed").chmod(0o755)
    assert "('closed', 'the folder cannot be read: no permission to read it')" in done.stdout, done.stderr
    assert "('open/a.py', None)" in done.stdout
    assert "named.py: no permission to read it" in done.stdout


def test_scripts_without_a_suffix_are_what_their_first_line_says() -> None:
    make(train="#!/usr/bin/env python3\n", plain="x = 1\n", run="#!/bin/bash\n", tool="#!/usr/bin/ruby\n")
    result = collect(["train", "plain", "run", "tool"])
    assert [(target.path, target.kind) for target in result.targets] == [
        ("train", "python"), ("plain", "python"), ("run", "launch"),
    ]  # fmt: skip
    assert result.refused == (f"tool: mpguard reads {files.READS}",)


def test_what_is_not_read_is_passed_over_for_pre_commit() -> None:
    make("x.zsh", "notes.txt", "a.py")
    result = collect(["x.zsh", "notes.txt", "a.py"], force_exclude=True)
    assert ([target.path for target in result.targets], result.refused) == (["a.py"], ())
