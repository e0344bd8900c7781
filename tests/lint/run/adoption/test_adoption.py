"""Taking mpguard up in an old project: baselines, changed lines, comments that suppress, settings turned off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributions import install
from limits import seconds

from mpguard.cli import main
from mpguard.core import settings
from mpguard.lint.model.rule import rules

TRAIN = """\
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = (model(x.half()) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
CAST = "    loss = (model(x.half()) - y).pow(2).mean()\n"
CONFIG = "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  amax_history_length: 16  # keep\n"

Lint = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lint:
    monkeypatch.chdir(tmp_path)
    settings._of_folder.cache_clear()

    def run(*arguments: str) -> tuple[int, str, str]:
        settings._of_folder.cache_clear()
        status = main(["lint", "--format", "concise", *arguments])
        done = capsys.readouterr()
        return status, done.out, done.err

    return run


def git(*arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *identity, "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds(60)).stdout.strip()


# -- baseline ----------------------------------------------------------------------------------------------


def test_only_what_the_baseline_does_not_know_counts(lint: Lint) -> None:
    Path("sub").mkdir()
    Path("sub/train.py").write_text(TRAIN)
    assert lint("--write-baseline", "base.json") == (
        0, "Wrote 1 finding to base.json. Next: mpguard lint --baseline base.json\n", "",
    )  # fmt: skip
    assert json.loads(Path("base.json").read_text())["findings"] == [
        {"path": "sub/train.py", "code": "MPG101", "line": CAST.strip(), "count": 1}
    ]
    status, out, err = lint("--baseline", "base.json")
    assert (status, err) == (0, "") and "No new problems in 1 file (1 known by base.json)." in out
    moved = TRAIN.replace("import torch\n", "# moved\n\nimport torch\n").replace(CAST, "    if x:\n    " + CAST)
    Path("sub/train.py").write_text(moved)
    assert lint("--baseline", "base.json")[0] == 0, "lines above it, and indentation, are not what it is"
    Path("sub/train.py").write_text(TRAIN.replace(CAST, CAST + "    loss.backward()\n" + CAST))
    status, out, _ = lint("--baseline", "base.json")
    assert status == 1 and out.startswith("sub/train.py:8:19: MPG101"), "the same line once more is new"
    assert "Found 1 problem in 1 file (1 error). Left out: 1 known by base.json." in out
    os.chdir("sub")
    Path("train.py").write_text(TRAIN)
    assert lint("--baseline", "../base.json", "train.py")[0] == 0, "paths are from the baseline's folder"


def test_what_is_gone_is_said_where_it_was_looked_for(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    Path("mp.yaml").write_text(CONFIG)
    lint("--write-baseline", "base.json")
    Path("train.py").write_text("")
    assert lint("--baseline", "base.json", "mp.yaml")[2] == ""
    assert "base.json: 1 known finding is gone; --write-baseline removes it" in lint("--baseline", "base.json")[2]
    lint("--write-baseline", "base.json")
    assert lint("--baseline", "base.json")[2] == ""


def test_a_baseline_is_not_written_where_something_was_not_checked_or_over_another_file(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    assert lint("--write-baseline", "base.json", "train.py", "gone.py")[0] == 2
    assert not Path("base.json").exists()
    assert lint("--write-baseline", "train.py")[0] == 2
    assert Path("train.py").read_text() == TRAIN


def test_what_was_not_asked_for_is_not_gone_and_a_file_that_is_no_longer_there_is(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    Path("mp.yaml").write_text(CONFIG)
    lint("--write-baseline", "base.json")
    for options in (["--select", "MPG2"], ["--ignore", "MPG101,MPG8"], ["--select", "ALL", "--ignore", "ALL"]):
        assert lint("--baseline", "base.json", *options)[::2] == (0, "")
    Path("train.py").unlink()
    assert "1 known finding is gone" in lint("--baseline", "base.json", "mp.yaml")[2]
    assert "1 known finding is gone" in lint("--baseline", "base.json", "--select", "MPG1", "mp.yaml")[2]
    assert lint("--baseline", "base.json", "--select", "MPG8", "mp.yaml")[2] == ""


def test_writing_a_part_over_the_whole_is_said(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    Path("mp.yaml").write_text(CONFIG)
    lint("--write-baseline", "a b.json")
    output = "Wrote 1 finding to a b.json (1 earlier one removed). Next: mpguard lint --baseline 'a b.json'"
    assert lint("--write-baseline", "a b.json", "train.py")[1] == f"{output}\n"


def broken(entry: str) -> str:
    return f'{{"mpguard_baseline": 1, "findings": {entry}}}'


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "[" * 5000,
        '{"mpguard_baseline": 2}',
        '{"mpguard_baseline": true, "findings": []}',
        '{"mpguard_baseline": 1.0, "findings": []}',
        '{"mpguard_baseline": 1}',
        broken("{}"),
        broken("[1]"),
        *(
            broken(f'[{{"path": "a", "code": "b", "line": "c", "count": {count}}}]')
            for count in ("[]", '"2"', "0", "-1", "1.5", "1e999", "true", "9" * 5000)
        ),
        broken('[{"path": ["a"], "code": "b", "line": "c", "count": 1}]'),
        broken("[]").replace('"findings"', '<<<<<<< HEAD\n"findings"'),
    ],
)
def test_what_is_no_baseline_is_refused(lint: Lint, text: str) -> None:
    Path("base.json").write_text(text)
    status, _, err = lint("--baseline", "base.json")
    assert status == 2 and err.startswith("mpguard: base.json: ") and "--write-baseline" in err
    status, _, err = lint("--write-baseline", "base.json")
    if "mpguard_baseline" in text:
        assert status == 0, "it is damaged, or of another version, but a baseline"
    else:
        assert status == 2 and "not overwritten" in err and Path("base.json").read_text() == text


def test_what_never_ends_is_no_baseline(lint: Lint) -> None:
    os.mkfifo("fifo")
    for option in ("--baseline", "--write-baseline"):
        for name in ("fifo", "/dev/zero", "."):
            status, _, err = lint(option, name)
            assert status == 2 and err.startswith(f"mpguard: {name}: cannot be read: "), err


def test_a_baseline_of_an_editor_on_windows_is_read(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    lint("--write-baseline", "base.json")
    text = Path("base.json").read_text()
    Path("base.json").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert lint("--baseline", "base.json")[0] == 0
    assert lint("--write-baseline", "base.json")[0] == 0


def test_an_empty_file_takes_a_baseline(lint: Lint) -> None:
    Path("base.json").touch()
    assert lint("--write-baseline", "base.json")[0] == 0


def test_names_that_no_encoding_holds_are_known_again(lint: Lint) -> None:
    Path(os.fsdecode(b"\xff\n.py")).write_text(TRAIN)
    assert lint("--write-baseline", "base.json")[0] == 0
    assert lint("--baseline", "base.json")[0] == 0


# -- changed lines -----------------------------------------------------------------------------------------


@pytest.fixture
def repository(lint: Lint) -> None:
    git("init", "-q")
    for name in ("train.py", "with space.py", 'tab\tquote".py', "é.py", "old.py"):
        Path(name).write_text(TRAIN)
    git("add", ".")
    git("commit", "-qm", "first")


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("name", ["train.py", "with space.py", 'tab\tquote".py', "é.py"])
def test_only_changed_lines_count(lint: Lint, name: str) -> None:
    status, out, _ = lint("--diff-from", "HEAD")
    assert status == 0 and "No new problems in 5 files (5 on lines unchanged since HEAD)." in out
    Path(name).write_text(TRAIN.replace("8, 8", "9, 9"))
    assert lint("--diff-from", "HEAD")[0] == 0
    Path(name).write_text(TRAIN.replace("x.half() ", "x.half()").replace("- y", "- y + 0"))
    status, out, _ = lint("--diff-from", "HEAD")
    assert status == 1 and out.count(":6:19: MPG101") == 1
    git("commit", "-qam", "second")
    assert lint("--diff-from", "HEAD")[0] == 0
    assert lint("--diff-from", "HEAD~1")[0] == 1


@pytest.mark.usefixtures("repository")
def test_new_and_renamed_files_and_those_git_does_not_know(lint: Lint, tmp_path: Path) -> None:
    git("mv", "old.py", "renamed.py")
    assert lint("--diff-from", "HEAD")[0] == 0, "renamed is not changed"
    Path("new.py").write_text(TRAIN + "# new\n")
    assert lint("--diff-from", "HEAD")[1].startswith("new.py:6:19: MPG101")
    git("add", "new.py")
    assert lint("--diff-from", "HEAD")[1].startswith("new.py:6:19: MPG101")
    os.chdir("/")
    assert lint("--diff-from", "HEAD", str(tmp_path))[0] == 2, "the repository is that of the working folder"


@pytest.mark.usefixtures("repository")
def test_a_changed_second_place_counts(lint: Lint) -> None:
    autocast = TRAIN.replace("    loss = (model(x.half())", '    with torch.autocast("cuda", dtype=torch.bfloat16):\n'
                             "        loss = (model(x)")  # fmt: skip
    Path("train.py").write_text(autocast)
    git("commit", "-qam", "bf16")
    Path("train.py").write_text(autocast.replace("bfloat16", "float16"))
    status, out, _ = lint("--diff-from", "HEAD", "train.py")
    assert status == 1 and "train.py:8:5: MPG201" in out, "backward() is an old line; what it lacks a scaler for is new"


@pytest.mark.usefixtures("repository")
def test_since_branching(lint: Lint) -> None:
    git("checkout", "-qb", "ours")
    git("checkout", "-q", "main")
    Path("train.py").write_text(TRAIN.replace("x.half()", "x"))
    git("commit", "-qam", "theirs")
    git("checkout", "-q", "ours")
    assert lint("--diff-from", "main")[0] == 1, "what main has fixed since differs"
    assert lint("--diff-from", "main...")[0] == 0


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("attribute", ["binary", "-diff", "-text", "diff=none"])
def test_what_attributes_hide_has_changed_all_the_same(lint: Lint, attribute: str) -> None:
    Path(".gitattributes").write_text(f"*.py {attribute}\n")
    git("config", "diff.none.command", "true")
    git("config", "diff.interHunkContext", "100")
    Path("train.py").write_text(f"import os\n{TRAIN}x = 1\n")
    assert lint("--diff-from", "HEAD")[0] == 0, "only the lines around it"
    Path("train.py").write_text(TRAIN.replace("- y", "- y + 0"))
    assert lint("--diff-from", "HEAD")[1].startswith("train.py:6:19: MPG101")


@pytest.mark.usefixtures("repository")
def test_a_submodule_has_changed_or_not(lint: Lint, tmp_path: Path) -> None:
    allow = ("-c", "protocol.file.allow=always")
    git(*allow, "submodule", "--quiet", "add", str(tmp_path), "theirs")
    git("commit", "-qm", "theirs")
    assert lint("--diff-from", "HEAD")[1] == "No new problems in 10 files (10 on lines unchanged since HEAD).\n"
    Path("theirs/train.py").write_text(TRAIN + "# changed\n")
    assert lint("--diff-from", "HEAD", "theirs/train.py")[0] == 1
    git("-C", "theirs", "commit", "-qam", "second")
    assert lint("--diff-from", "HEAD", "theirs/train.py")[0] == 1
    git("commit", "-qam", "newer")
    assert lint("--diff-from", "HEAD", "theirs/train.py")[0] == 0
    assert lint("--diff-from", "HEAD~1", "theirs/train.py")[0] == 1


@pytest.mark.usefixtures("repository")
def test_a_shallow_clone_is_said(lint: Lint, tmp_path: Path) -> None:
    Path("train.py").write_text(TRAIN + "# second\n")
    git("commit", "-qam", "second")
    git("checkout", "-q", "--orphan", "unrelated")
    git("commit", "-qam", "unrelated")
    git("checkout", "-q", "main")
    message = "git finds no commit that `unrelated` and HEAD have in common"
    assert lint("--diff-from", "unrelated...")[2] == f"mpguard: --diff-from unrelated...: {message}\n"
    git("clone", "-q", "--depth", "1", tmp_path.as_uri(), "shallow")
    os.chdir("shallow")
    status, _, err = lint("--diff-from", "HEAD~1")
    assert status == 2 and "git has no such revision in " in err and "; this clone is shallow: `git fetch" in err


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    "revision", ["^main", "-x", "--output=pwned", "main..HEAD", "HEAD:train.py", "...", "HEAD^{tree}"]
)
def test_a_revision_is_one_commit(lint: Lint, revision: str) -> None:
    status, _, err = lint(f"--diff-from={revision}")
    assert status == 2 and err.startswith(f"mpguard: --diff-from {revision}: git has no such revision"), err
    assert not Path("pwned").exists()


@pytest.mark.usefixtures("repository")
def test_revisions_that_are_none(lint: Lint, tmp_path: Path) -> None:
    status, _, err = lint("--diff-from", "mian")
    assert status == 2 and "git has no such revision in" in err and "did you mean `main`?" in err
    assert lint("--diff-from=--output=x")[0] == 2 and not Path("x").exists()
    assert lint("--diff-from", "main^{tree}")[0] == 2


def test_without_a_repository(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    status, _, err = lint("--diff-from", "HEAD")
    assert (
        status == 2 and err.startswith("mpguard: --diff-from: ") and "is not in a git repository; run it in one" in err
    )
    assert "fatal" not in err


@pytest.mark.usefixtures("repository")
def test_lines_that_look_like_headers_and_files_without_a_last_line_end(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN + "++ b/with space.py\n@@ -1 +1,9 @@\n")
    Path("é.py").write_text(TRAIN.rstrip())
    git("commit", "-qam", "second")
    Path("train.py").write_text(TRAIN)
    Path("é.py").write_text(TRAIN.rstrip() + " ")
    assert lint("--diff-from", "HEAD")[0] == 0
    assert lint("--diff-from", "HEAD~1")[0] == 0


# -- comments ----------------------------------------------------------------------------------------------


def suppressed(lint: Lint, name: str, text: str) -> str:
    """The file with comments; there is nothing left to report, and nothing more to add."""
    Path(name).write_bytes(text.encode())
    status, out, err = lint("--add-noqa", name)
    assert (status, err) == (0, ""), out
    after = Path(name).read_bytes().decode()
    assert lint(name)[0] == 0 and lint("--add-noqa", name)[0] == 0
    assert Path(name).read_bytes().decode() == after
    return after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CAST, CAST.rstrip() + "  # noqa: MPG101\n"),
        (CAST.rstrip() + "  # the loss\n", CAST.rstrip() + "  # the loss  # noqa: MPG101\n"),
        (CAST.rstrip() + "  # noqa: E501\n", CAST.rstrip() + "  # noqa: E501, MPG101\n"),
        ("    loss = (model(\n        x.half()\n    ) - y).mean()\n",
         "    loss = (model(\n        x.half()  # noqa: MPG101\n    ) - y).mean()\n"),
        ("    loss = model(x.half()) - y + \\\n        0\n",
         "    loss = model(x.half()) - y + \\\n        0  # noqa: MPG101\n"),
        ("    loss = model(x.half()) - y + len('''\n    # text''')\n",
         "    loss = model(x.half()) - y + len('''\n    # text''')  # noqa: MPG101\n"),
        ("    loss = model(x.half()) - y + len(f'''{x}\n    {y:\n    } text''')\n",
         "    loss = model(x.half()) - y + len(f'''{x}\n    {y:\n    } text''')  # noqa: MPG101\n"),
        (CAST.replace("\n", "\r\n"), CAST.rstrip() + "  # noqa: MPG101\r\n"),
        (CAST.rstrip() + " ;  \n", CAST.rstrip() + " ;  # noqa: MPG101\n"),
    ],
)  # fmt: skip
def test_python(lint: Lint, before: str, after: str) -> None:
    ending = "\r\n" if "\r\n" in before else "\n"
    text = TRAIN.replace("\n", ending)
    old = CAST.replace("\n", ending)
    assert suppressed(lint, "train.py", text.replace(old, before)) == text.replace(old, after)


def test_several_on_a_line_are_one_comment(lint: Lint) -> None:
    text = TRAIN.replace(CAST, "    with torch.cuda.amp.autocast(dtype=torch.float16): loss = model(x.half()).mean()\n")
    after = suppressed(lint, "train.py", text)
    assert "mean()  # noqa: MPG" in after and after.count("noqa") == len({3, 7}), "one there, one at backward()"


def test_yaml_gets_comments_and_keeps_its_values(lint: Lint) -> None:
    assert suppressed(lint, "mp.yaml", CONFIG) == CONFIG.replace("# keep", "# keep  # noqa: MPG801")
    folded = CONFIG.replace("16  # keep", "one\n    two")
    Path("mp.yaml").write_text(folded)
    assert lint("--add-noqa", "mp.yaml")[0] == 1
    assert Path("mp.yaml").read_text() == folded, "a comment there would cut the value in two"


def test_json_has_no_comments_and_stays(lint: Lint) -> None:
    text = '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}'
    Path("ds_config.json").write_text(text)
    status, out, err = lint("--add-noqa", "ds_config.json")
    assert status == 1 and "ds_config.json:1:" in out and Path("ds_config.json").read_text() == text
    assert err.startswith("mpguard: 1 finding is left, which no comment can suppress") and "per-file-ignores" in err


def test_a_notebook(lint: Lint) -> None:
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": 1, "source": TRAIN.splitlines(True)}
    Path("a.ipynb").write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert lint("--add-noqa", "a.ipynb")[0] == 0
    (after,) = json.loads(Path("a.ipynb").read_text())["cells"]
    assert "".join(after["source"]) == TRAIN.replace(CAST, CAST.rstrip() + "  # noqa: MPG101\n")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("run.sh", "set -e\nif true; then\n  accelerate launch train.py \\\n    --config mp.yaml\nfi\n",
         "set -e\nif true; then\n  # noqa: MPG866\n  accelerate launch train.py \\\n    --config mp.yaml\nfi\n"),
        ("Makefile", "train:\n\taccelerate launch train.py --config mp.yaml\n",
         "train:\n# noqa: MPG866\n\taccelerate launch train.py --config mp.yaml\n"),
    ],
)  # fmt: skip
def test_launch_lines(lint: Lint, name: str, before: str, after: str) -> None:
    Path("mp.yaml").write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    Path("train.py").write_text("print(1)\n")
    assert suppressed(lint, name, before) == after


def test_diff_shows_the_comments_and_adds_none(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    status, out, err = lint("--add-noqa", "--diff", "train.py")
    assert (status, err) == (1, "Would suppress 1 problem in 1 file.\n")
    assert "+" + CAST.rstrip() + "  # noqa: MPG101\n" in out
    assert Path("train.py").read_text() == TRAIN
    assert lint("--add-noqa", "train.py")[1] == "Suppressed 1 problem in 1 file. No problems in 1 file.\n"


# -- settings ----------------------------------------------------------------------------------------------


def test_per_file_ignores_and_extend_select(lint: Lint) -> None:
    Path("legacy").mkdir()
    for name in ("legacy/train.py", "train.py"):
        Path(name).write_text(TRAIN)
    Path("pyproject.toml").write_text("[tool.mpguard.per-file-ignores]\n'legacy/' = ['MPG1']\n")
    status, out, _ = lint(".")
    assert status == 1 and "legacy" not in out and out.startswith("train.py:6:19: MPG101")
    Path("pyproject.toml").write_text("[tool.mpguard]\nselect = ['MPG8']\n")
    assert lint(".")[0] == 0
    Path("pyproject.toml").write_text("[tool.mpguard]\nselect = ['MPG8']\nextend-select = ['MPG101']\n")
    assert lint(".")[1].count("MPG101") == 2
    assert lint("--ignore", "MPG101", ".")[0] == 0


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("./legacy", "train.py"),
        ("legacy/**/*.py", "train.py"),
        ("!legacy/", "legacy/train.py"),
        ("!train.py", "legacy/train.py train.py"),
        ("!/train.py", "train.py"),
    ],
)
def test_per_file_ignores_of_all_other_files(lint: Lint, pattern: str, left: str) -> None:
    Path("legacy").mkdir()
    for name in ("legacy/train.py", "train.py"):
        Path(name).write_text(TRAIN)
    Path("mpguard.toml").write_text(f"per-file-ignores = {{'{pattern}' = ['MPG101']}}\n")
    assert [line.partition(":")[0] for line in lint(".")[1].splitlines()[:-1]] == left.split()


def test_preview_is_a_setting_too(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    preview = next(code for code, rule in sorted(rules().items()) if rule.preview)
    Path("train.py").write_text(f"x = 1  # noqa: {preview}\n")
    Path("mpguard.toml").write_text("select = ['ALL']\n")
    assert lint("train.py")[0] == 0
    Path("mpguard.toml").write_text("select = ['ALL']\npreview = true\n")
    assert "MPG002" in lint("train.py")[1]


def test_isolated_ignores_settings(lint: Lint) -> None:
    Path("train.py").write_text(TRAIN)
    Path("excluded.py").write_text(TRAIN)
    Path("pyproject.toml").write_text("[tool.mpguard]\nignore = ['MPG101']\nexclude = ['excluded.py']\n")
    assert lint(".")[0] == 0
    assert lint("--isolated", ".")[1].count("MPG101") == 2
    assert lint(".")[0] == 0, "and they are back"
    Path("pyproject.toml").write_text("[tool.mpguard]\nbroken = [\n")
    assert lint(".")[0] == 2
    assert lint("--isolated", ".")[0] == 1


def test_isolated_imports_no_rules_of_others(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "print('imported')\n", groups=("mpguard.rules", "mpguard.recipes", "mpguard.plugins"))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "mp.yaml").write_text(CONFIG + "  mpguard_recipe: nonsense\n")

    def status(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "mpguard", "lint", "--preview", "--select", "ALL", *arguments, "."]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=seconds(60), env=environment
        )
        return done.returncode, done.stdout + done.stderr

    assert "imported" in status()[1]
    done, text = status("--isolated")
    assert done == 1 and "imported" not in text
