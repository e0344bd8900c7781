"""`mpguard lint` and `mpguard rule` on the command line: exit statuses, formats, bad input, fixes on disk."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributions import install
from limits import seconds

from mpguard.cli import main
from mpguard.lint.formats.terminal import manual_url
from mpguard.lint.model.rule import rules

TRAIN = """\
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
WIZARD = "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  amax_history_length: 16  # keep\n"
READ = WIZARD.replace("length", "len")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


class Ran:
    """What one command did."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def mpguard(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str, stdin: str | bytes | None = None) -> Ran:
        if stdin is not None:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            stream = io.TextIOWrapper(io.BytesIO(data))
            before, sys.stdin = sys.stdin, stream
        try:
            status = main(arguments)
        finally:
            if stdin is not None:
                sys.stdin = before
        done = capsys.readouterr()
        assert "Traceback" not in done.out + done.err
        return Ran(status, done.out, done.err)

    return run


# -- exit statuses ------------------------------------------------------------------------------------


def test_clean_is_0(mpguard: Any) -> None:
    Path("a.py").write_text("print(1)\n")
    Path("b.py").write_text("print(2)\n")
    ran = mpguard("lint", "a.py", "b.py")
    assert (ran.status, ran.out, ran.err) == (0, "No problems in 2 files.\n", "")


def test_findings_are_1(mpguard: Any) -> None:
    Path("mp.yaml").write_text(WIZARD)
    assert mpguard("lint", "mp.yaml").status == 1
    assert mpguard("lint").status == 1, "this folder is the default"


def test_exit_zero_hides_findings_and_nothing_else(mpguard: Any) -> None:
    Path("mp.yaml").write_text(WIZARD)
    assert mpguard("lint", "--exit-zero", "mp.yaml").status == 0
    assert mpguard("lint", "--exit-zero", "gone.py", "mp.yaml").status == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.py"], "gone.py: no such file or folder"),
        (["nots.txt"], "nots.txt: no such file or folder; did you mean `notes.txt`?"),
        (["--config", "owm.yaml"], "owm.yaml: cannot be read: no such file; did you mean `own.yaml`?"),
        (["--formt", "json"], "there is no option `--formt`; did you mean `--format`?"),
        (["--formt=json"], "there is no option `--formt`; did you mean `--format`?"),
        (["--qqqqqq"], "there is no option `--qqqqqq`; --help lists them"),
        (["/dev/null"], "/dev/null: is a device"),
        (["--select", "MPG8O1"], "--select: there is no rule `MPG8O1`; did you mean `MPG8"),
        (["--ignore", "use-cpu-is-ignored"], "did you mean `MPG811` (use-cpu-is-ignored)?"),
        (["--select", ","], "no code is given"),
        (["--format", "jsn"], "there is no format `jsn`; did you mean `json`?"),
        (["--format", "sarrif"], "there is no format `sarrif`; did you mean `sarif`"),
        (["--output-file", "gone/report.txt"], "--output-file gone/report.txt: there is no folder `gone`"),
        (["--output-file", "."], "--output-file .: is a folder"),
        (["--output-file", "x", "--diff"], "--diff prints a patch"),
        (["--statistics", "--format", "sarif"], "--statistics has no --format sarif (only full, concise, json)"),
        (["--gpu", "h1000"], "there is no GPU `h1000`; did you mean `h100`"),
        (["--config", "gone.yaml"], "gone.yaml: cannot be read"),
        (["--config", "own.yaml"], "own.yaml: code is checked against configs of accelerate or DeepSpeed"),
        (["-j", "none"], "none is not a number of processes"),
        (["--stdin-filename", "x.py"], "--stdin-filename names the content of stdin"),
        (["notes.txt"], "notes.txt: mpguard reads Python (.py), notebooks (.ipynb), YAML (.yaml, .yml), JSON"),
        (["--add-noqa", "--fix"], "--add-noqa suppresses what --fix would fix"),
        (["--baseline", "b.json", "--fix"], "--fix applies to all findings, and --baseline selects some of them"),
        (["--baseline", "b.json"], "b.json: there is no such file; `--write-baseline b.json` writes one"),
        (["--baseline", "own.yaml"], "own.yaml: is not JSON, as a baseline must be"),
        (["--write-baseline", "notes.txt"], "notes.txt: is not a baseline, and is not overwritten"),
        (["--write-baseline", "b.json", "--diff-from", "main"], "--diff-from leaves some out"),
        (["--write-baseline", "b.json", "--output-file", "x"], "no report for --output-file"),
        (["--diff-from", "main", "-"], "stdin has no history"),
        (["--diff", "--format", "json"], "--format json is a report, and --diff prints a patch"),
        (["--diff", "--statistics"], "--statistics is a report, and --diff prints a patch"),
        (["--write-baseline", "b.json", "--format", "sarif"], "--format sarif is a report, and --write-baseline"),
        (["--config", ""], "`--config` has an empty value"),
        (["--baseline="], "`--baseline` has an empty value"),
        (["--gpu", ""], "`--gpu` has an empty value"),
        (["broken.py"], "broken.py: is a broken link\n"),
        ([""], "one of the paths is empty; use `.` for the current folder"),
    ],
)
def test_errors_exit_with_2_and_a_reason(mpguard: Any, arguments: list[str], message: str) -> None:
    Path("own.yaml").write_text("lr: 1\n")
    Path("notes.txt").write_text("notes")
    Path("broken.py").symlink_to("gone.py")
    ran = mpguard("lint", *arguments)
    assert ran.status == 2
    assert message in ran.err


@pytest.mark.parametrize("option", ["--select", "--extend-select", "--ignore"])
def test_an_unknown_code_is_one_where_there_is_nothing_to_check_too(mpguard: Any, option: str) -> None:
    ran = mpguard("lint", option, "MPG219")
    assert ran.status == 2
    assert f"{option}: there is no rule `MPG219`; did you mean `MPG21" in ran.err
    assert mpguard("lint", option, "MPG201").status == 0


def test_help_is_in_groups_with_examples_that_run(mpguard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpguard.cli import lint

    monkeypatch.setattr(lint, "run", lambda options: 7)
    ran = mpguard("lint", "--help")
    assert ran.status == 0
    for group in (
        "rule selection:",
        "fixes:",
        "adoption in an existing project:",
        "output:",
        "examples:",
        "exit status:",
    ):
        assert f"\n{group}\n" in ran.out
    examples = [line.split("   ")[0].split() for line in ran.out.splitlines() if line.startswith("  mpguard lint")]
    assert len(examples) > 5
    for _, *arguments in examples:
        assert mpguard(*arguments).status == 7, arguments


def test_messages_about_files_hold_no_control_characters(mpguard: Any) -> None:
    Path("\x1b[31mtrain.py").touch()
    ran = mpguard("lint", "\x1b[31mtrian.py")
    assert ran.status == 2 and "did you mean" in ran.err and "\x1b" not in ran.err


def test_bad_settings_are_2(mpguard: Any) -> None:
    Path("a.py").write_text("")
    Path("pyproject.toml").write_text("[tool.mpguard]\nignroe = ['MPG1']\n")
    ran = mpguard("lint", "a.py")
    assert ran.status == 2
    assert "pyproject.toml:2: there is no setting `ignroe`; did you mean `ignore`" in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("select = ['MPG777']\n", "there is no rule `MPG777`"),
        ("[per-file-ignores]\n'*.py' = ['MPG777']\n", "there is no rule `MPG777`"),
        ("configs = ['gone.yaml']\n", "which is not a file"),
        ("recipe = 'bf16_mixd'\n", "there is no recipe `bf16_mixd`; did you mean `bf16_mixed`"),
        ("gpu = 'h1000'\n", "there is no GPU `h1000`; did you mean `h100`"),
    ],
)
def test_settings_that_name_what_is_not_there_are_2(mpguard: Any, text: str, message: str) -> None:
    Path("a.py").write_text("")
    Path("mpguard.toml").write_text(text)
    ran = mpguard("lint", "a.py")
    assert ran.status == 2
    assert "mpguard.toml: " in ran.err and message in ran.err and len(ran.err.splitlines()) == 1


def test_the_other_files_are_checked_all_the_same(mpguard: Any) -> None:
    Path("mp.yaml").write_text(WIZARD)
    Path("broken.py").write_text("def f(:\n")
    ran = mpguard("lint", "--format", "concise", "gone.py", "broken.py", "mp.yaml")
    assert ran.status == 2
    assert "broken.py:1:7: MPG000" in ran.out and "mp.yaml:5:3: MPG801" in ran.out


def test_a_defect_of_a_rule_is_2_with_a_traceback_and_the_others_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(self: object, document: object) -> Any:
        raise RuntimeError("oops")

    monkeypatch.setattr(rules()["MPG811"], "check", check)
    Path("mp.yaml").write_text(WIZARD + "use_cpu: true\n")
    assert main(["lint", "--format", "concise", "mp.yaml"]) == 2
    done = capsys.readouterr()
    assert "mpguard: mp.yaml: defect in MPG811: RuntimeError: oops" in done.err
    assert "Traceback" in done.err
    assert "MPG801" in done.out


def test_a_rule_that_does_not_import_is_2(tmp_path: Path) -> None:
    """A distribution that brings rules, one of which is broken: never just fewer rules."""
    site = tmp_path / "site"
    install(site, {"__init__.py": "", "broken.py": "import no_such_module\n"})
    (tmp_path / "a.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "mpguard", "lint", "a.py"], cwd=tmp_path, capture_output=True, text=True,
        timeout=seconds(60),
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "`their_rules.broken` does not import: ModuleNotFoundError: No module named 'no_such_module'" in done.stderr
    assert "Traceback" not in done.stderr


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("latin.py", b"x = 1\ny = '\xe9'\n", "latin.py:2:6: MPG000 not utf-8: byte 0xe9"),
        ("cookie.py", b"# coding: klingon\n", "cookie.py:1:1: MPG000 unknown encoding `klingon`"),
        ("nul.py", b"x = 1\ny = \x00\n", "nul.py:2:5: MPG000 a NUL byte"),
        ("binary.py", b"\x00\xff\xfe" * 100, "binary.py:1:2: MPG000 not utf-8"),
        ("deep.py", b"x = " + b"(" * 10_000 + b")" * 10_000, "deep.py:1:205: MPG000 parse limit: more than 200 nested"),
        ("broken.py", b"import torch\n\ndef f(:\n", "broken.py:3:7: MPG000 syntax error"),
        ("python2.py", b"import sys\nprint 'x'\n", "python2.py:2:1: MPG000 syntax error: Missing parentheses"),
        ("tabs.py", b"if 1:\n\tx = 1\n        y = 2\n", "tabs.py:3:"),
        ("tags.yaml", b"distributed_type: !!python/object/apply:os.system ['touch x']\n", "tags.yaml:1:19: MPG003 the"),
        ("twice.yaml", b"distributed_type: FSDP\nuse_cpu: false\nuse_cpu: true\n", "twice.yaml:3:1: MPG003 `use_cpu`"),
        ("twice.json", b'{"bf16": {"enabled": true},\n "bf16": {"enabled": false}}', "twice.json:2:2: MPG003 `bf16`"),
        ("broken.yaml", b"distributed_type: FSDP\nfsdp_config: [\n", "broken.yaml:3:1: MPG003"),
        ("broken.json", b'{"bf16": {"enabled": true}', "broken.json:1:"),
        ("latin.yaml", b"distributed_type: FSDP # \xe9\n", "latin.yaml:1:26: MPG003 is not UTF-8 (byte 0xE9)"),
        ("nul.json", b'{"bf16": \x00}', "nul.json:1:"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_a_finding_at_its_place(
    mpguard: Any, name: str, data: bytes, expected: str
) -> None:
    Path(name).write_bytes(data)
    for arguments in (
        ["lint", "--format", "concise", name],
        ["lint", "--fix", "--unsafe-fixes", "--format", "concise", name],
    ):
        ran = mpguard(*arguments)
        assert ran.status == 1
        assert ran.out.startswith(expected)
        assert Path(name).read_bytes() == data
    assert sorted(os.listdir()) == [name], "nothing was executed or left behind"


def test_an_empty_file_and_an_empty_folder(mpguard: Any) -> None:
    for name in ("empty.py", "empty.yaml", "empty.json"):
        Path(name).touch()
    Path("docs").mkdir()
    Path("docs/notes.md").touch()
    assert mpguard("lint", "empty.py", "empty.yaml").status == 0
    ran = mpguard("lint", "docs")
    assert ran.status == 0
    why = "no Python, YAML or JSON files in this folder, or all are left out by `exclude` or .gitignore"
    assert ran.err == f"mpguard: docs: {why}; nothing was checked there\n"


def test_unrelated_yaml_and_json_in_folders_has_no_findings(mpguard: Any) -> None:
    Path("template.yaml").write_text("{{ if .Values.x }}\nkey: {{ .Values.y }}\n")
    Path("ci.yml").write_text("job: !reference [a, b]\njob: 2\n")
    Path("data.json").write_text('{"a": 1, "a": 2,}')
    assert mpguard("lint").status == 0
    assert mpguard("lint", "template.yaml").status == 1, "but not where they are named"
    assert mpguard("lint", "--force-exclude", "template.yaml", "ci.yml", "data.json").status == 0
    Path("mp.yaml").write_text("distributed_type: FSDP\nmixed_precision: {{ precision }\n")
    assert mpguard("lint").status == 1, "a config that was broken is reported wherever it is"


def test_what_git_lfs_has_not_fetched_is_no_python_unless_it_is_named(mpguard: Any) -> None:
    for name in ("model.py", "demo.ipynb"):
        Path(name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 45\n")
        assert mpguard("lint", "--select", "ALL").status == 0
        assert mpguard("lint", name).status == 1


def test_a_syntax_error_in_a_folder_is_found_when_selected(mpguard: Any) -> None:
    Path("broken.py").write_text("def f(:\n")
    assert mpguard("lint").status == 0
    assert mpguard("lint", "--select", "MPG000").status == 1
    assert mpguard("lint", "--extend-select", "MPG000").status == 1
    Path("broken.py").write_text("model.half()\nloss.backward()\ndef f(:\n")
    assert mpguard("lint").status == 1, "and if a rule applies to the file"


# -- formats ------------------------------------------------------------------------------------------


def test_json_has_the_documented_form(mpguard: Any) -> None:
    Path("mp.yaml").write_text(WIZARD)
    ran = mpguard("lint", "--format", "json", "mp.yaml")
    report = json.loads(ran.out)
    assert report["version"] == 1
    assert report["findings"] == [
        {
            "code": "MPG801",
            "name": "unknown-fp8-key",
            "severity": "error",
            "path": "mp.yaml",
            "line": 5,
            "column": 3,
            "end_line": 5,
            "end_column": 22,
            "message": "`fp8_config.amax_history_length`: nothing reads this key; "
            "the key that is read is `amax_history_len`",
            "help": rules()["MPG801"].help,
            "url": manual_url("MPG801"),
            "fix": {
                "title": "Rename it to `amax_history_len`",
                "applicability": "safe",
                "edits": [
                    {"start": {"line": 5, "column": 3}, "end": {"line": 5, "column": 22}, "text": "amax_history_len"}
                ],
            },
        }
    ]
    assert report["summary"]["files"] == 1
    assert report["summary"]["codes"] == {"MPG801": 1}


def test_json_without_findings_and_with_errors_is_still_json(mpguard: Any) -> None:
    Path("a.py").write_text("")
    ran = mpguard("lint", "--format", "json", "a.py", "gone.py")
    assert ran.status == 2
    assert json.loads(ran.out)["findings"] == []


def test_full_marks_the_place_and_has_a_help_line(mpguard: Any) -> None:
    Path("mp.yaml").write_text("# é\n" + WIZARD + "use_cpu: true\n")
    ran = mpguard("lint", "mp.yaml")
    lines = ran.out.splitlines()
    place = lines.index("6 |   amax_history_length: 16  # keep")
    assert lines[place + 1] == "  |   ^^^^^^^^^^^^^^^^^^^"
    assert "2 | distributed_type: FSDP" in lines
    assert "  |                   ---- this selects how the processes are started" in lines
    assert "  = fix: Rename it to `amax_history_len`" in lines
    assert any(line.startswith("  = help: ") and line.endswith("(mpguard rule MPG801)") for line in lines)
    assert lines[-1] == "Found 2 problems in 1 file (2 errors). 1 can be fixed with --fix."
    assert "\x1b" not in ran.out, "no colours in a pipe"


def test_full_with_wide_characters_tabs_and_control_characters(mpguard: Any) -> None:
    Path("mp.json").write_text('{"distributed_type": "FSDP",\n"fp8_config": {"说明\\n": 1,\t"margn\x1b": 2}}')
    Path("wide.yaml").write_text("distributed_type: FSDP\nfp8_config: {说明: 1, other: 2}\n")
    lines = mpguard("lint", "wide.yaml").out.splitlines()
    assert lines[lines.index("2 | fp8_config: {说明: 1, other: 2}") + 1] == "  |              ^^^^"
    assert "  |                       ^^^^^" in lines
    assert "\x1b" not in mpguard("lint", "mp.json").out


def test_a_very_long_line_is_cut_around_its_mark(mpguard: Any) -> None:
    Path("mp.yaml").write_text(f"distributed_type: FSDP\nfp8_config: {{backend: TE, note: {'x' * 5000}, margn: 0}}\n")
    assert max(map(len, mpguard("lint", "--select", "MPG801", "mp.yaml").out.splitlines()[1:4])) < 200


def test_concise_and_statistics(mpguard: Any) -> None:
    Path("mp.yaml").write_text(WIZARD + "  optimization_level: O1\nuse_cpu: true\n")
    ran = mpguard("lint", "--format", "concise", "mp.yaml")
    assert [line.split(" ")[:2] for line in ran.out.splitlines()[:3]] == [
        ["mp.yaml:5:3:", "MPG801"], ["mp.yaml:6:3:", "MPG801"], ["mp.yaml:7:1:", "MPG811"],
    ]  # fmt: skip
    ran = mpguard("lint", "--statistics", "mp.yaml")
    assert ran.out.splitlines()[:2] == [
        "2  MPG801 error   unknown-fp8-key  (safe fix)",
        "1  MPG811 error   use-cpu-is-ignored",
    ]


def test_a_terminal_gets_colours_unless_no_color() -> None:
    Path("mp.yaml").write_text(WIZARD)
    code = "import pty, sys; sys.exit(pty.spawn([sys.executable, '-m', 'mpguard', 'lint', 'mp.yaml']) >> 8)"
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    environment["TERM"] = "xterm-256color"

    def terminal(**more: str) -> str:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds(60),
            env={**environment, **more},
        )
        return done.stdout

    colours, plain = terminal(), terminal(NO_COLOR="1")
    assert "\x1b[" in colours and "MPG801" in colours
    assert "\x1b[" not in plain and "MPG801" in plain
    assert "\x1b[" in terminal(NO_COLOR="")
    assert "\x1b[" not in terminal(TERM="dumb")


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": ""}, False),
    ],
)
def test_requested_colours_are_written_to_a_pipe_too(
    mpguard: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], coloured: bool
) -> None:
    Path("mp.yaml").write_text(WIZARD)
    plain = mpguard("lint", "mp.yaml").out
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    shown = mpguard("lint", "mp.yaml").out
    assert ("\x1b[" in shown) is coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == plain
    assert ("\x1b[" in mpguard("rule", "MPG801").out) is coloured
    for name in ("json", "sarif", "github", "gitlab", "junit"):
        assert "\x1b" not in mpguard("lint", "mp.yaml", "--format", name).out
    assert mpguard("lint", "mp.yaml", "--output-file", "out.txt").status == 1
    assert Path("out.txt").read_text() == plain


def test_names_and_text_that_the_output_cannot_encode() -> None:
    Path(os.fsdecode(b"a\xff.yaml")).write_text(WIZARD + "  说明: 1\n")
    Path("new\nline.yaml").write_text(WIZARD)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for arguments in (["."], ["--format", "json", "."], ["--diff", "."]):
        command = [sys.executable, "-m", "mpguard", "lint", *arguments]
        done = subprocess.run(command, capture_output=True, timeout=seconds(60), env=environment)
        assert done.returncode == 1
        assert b"Traceback" not in done.stderr


# -- fixes on disk ------------------------------------------------------------------------------------


def test_fix_writes_and_reports_it(mpguard: Any) -> None:
    Path("mp.yaml").write_text(WIZARD)
    ran = mpguard("lint", "--fix", "mp.yaml")
    assert (ran.status, ran.out) == (0, "Fixed 1 problem in 1 file. No problems in 1 file.\n")
    assert Path("mp.yaml").read_text() == READ
    assert mpguard("lint", "--fix", "mp.yaml").out == "No problems in 1 file.\n", "twice is the same as once"


def test_diff_changes_nothing_and_is_a_patch(mpguard: Any) -> None:
    Path("mp.yaml").write_text(WIZARD)
    ran = mpguard("lint", "--diff", "mp.yaml")
    assert ran.status == 1
    assert Path("mp.yaml").read_text() == WIZARD
    assert ran.err == "Would fix 1 problem in 1 file.\n"
    subprocess.run(["patch", "-p0"], input=ran.out, text=True, check=True, capture_output=True, timeout=seconds(60))
    assert Path("mp.yaml").read_text() == READ
    ran = mpguard("lint", "--diff", "mp.yaml")
    assert (ran.status, ran.out) == (0, "")


def test_unsafe_fixes_of_python(mpguard: Any) -> None:
    Path("train.py").write_text(TRAIN)
    ran = mpguard("lint", "--fix", "train.py")
    assert ran.status == 1 and Path("train.py").read_text() == TRAIN
    ran = mpguard("lint", "--unsafe-fixes", "train.py")
    assert ran.status == 0
    assert "GradScaler" in Path("train.py").read_text()


def test_stdin(mpguard: Any) -> None:
    ran = mpguard("lint", "--format", "concise", "-", stdin=TRAIN)
    assert ran.status == 1 and ran.out.startswith("-:8:5: MPG201")
    ran = mpguard("lint", "--format", "concise", "-", "--stdin-filename", "conf/mp.yaml", stdin=WIZARD)
    assert ran.status == 1 and ran.out.startswith("conf/mp.yaml:5:3: MPG801")
    ran = mpguard("lint", "--fix", "-", "--stdin-filename", "mp.yaml", stdin=WIZARD)
    assert (ran.status, ran.out, ran.err) == (0, READ, "Fixed 1 problem in 1 file. No problems in 1 file.\n")
    ran = mpguard("lint", "--fix", "-", stdin="print(1)\n")
    assert ran.out == "print(1)\n", "what needs no fix comes out as it went in"
    ran = mpguard("lint", "-", "--stdin-filename", "x.csv", stdin="{}")
    assert ran.status == 2


def test_a_read_only_file_is_reported(mpguard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(13, "the file is read-only", str(path))

    monkeypatch.setattr("mpguard.core.text_edits.write_atomically", refuse)  # root may write anything
    Path("mp.yaml").write_text(WIZARD)
    found = mpguard("lint", "mp.yaml").out
    for option in ("--fix", "--add-noqa"):
        ran = mpguard("lint", option, "mp.yaml")
        assert (ran.status, ran.out) == (2, found), "what was not written is not fixed"
        assert ran.err == "mpguard: mp.yaml: cannot be written: the file is read-only\n"


# -- mpguard rule -------------------------------------------------------------------------------------


def test_rule_shows_the_page(mpguard: Any) -> None:
    by_code, by_name = mpguard("rule", "mpg801"), mpguard("rule", "unknown-fp8-key")
    assert by_code.status == 0
    assert by_code.out == by_name.out
    assert by_code.out.startswith("# unknown-fp8-key (MPG801)\n")
    assert "## Fix safety" in by_code.out and "amax_history_len: 16" in by_code.out


def test_rule_all_as_json(mpguard: Any) -> None:
    report = json.loads(mpguard("rule", "--all", "--format", "json").out)
    assert report["version"] == 1
    assert [rule["code"] for rule in report["rules"]] == sorted(rules())
    assert all(set(rule) == {"code", "name", "severity", "preview", "fix", "doc"} for rule in report["rules"])


def test_a_prefix_lists_its_rules(mpguard: Any) -> None:
    listed = mpguard("rule", "mpg21").out.splitlines()
    assert len(listed) > 3 and all(line.startswith("MPG21") for line in listed)
    assert mpguard("rule", "ALL").out == mpguard("rule", "--all").out
    report = json.loads(mpguard("rule", "MPG21", "--format", "json", "MPG801").out)
    assert [rule["code"] for rule in report["rules"]] == [*(line[:6] for line in listed), "MPG801"]
    pages = mpguard("rule", "MPG801", "MPG811").out
    assert "\n\n# use-cpu-is-ignored (MPG811)\n" in pages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MPG8011"], "`MPG801` (unknown-fp8-key)"),
        (["MPG999"], "there is no rule `MPG999`; `mpguard rule --all` lists them"),
        (["MPG219"], "there is no rule `MPG219`; did you mean `MPG21"),
        (["use-cpu-ignored"], "did you mean `MPG811` (use-cpu-is-ignored)?"),
        ([], "a rule or --all is needed, and not both"),
        (["--all", "MPG801"], "a rule or --all is needed, and not both"),
        (["--all", "--format", "yaml"], "there is no format `yaml`"),
    ],
)
def test_rule_that_is_not_there(mpguard: Any, arguments: list[str], message: str) -> None:
    ran = mpguard("rule", *arguments)
    assert ran.status == 2
    assert message in ran.err


# -- what is imported ---------------------------------------------------------------------------------

HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "transformer_engine", "torchao", "numpy")
MODULES = """
import sys
from mpguard.cli import main
main({arguments})
print("\\n", *sorted(module for module in sys.modules if "." not in module))
"""


def imported(arguments: list[str], code: str = MODULES) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code.format(arguments=arguments)],
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_nothing_heavy_is_imported_to_lint() -> None:
    Path("train.py").write_text(TRAIN)
    Path("mp.yaml").write_text(WIZARD)
    assert {"libcst", "mpguard"} <= imported(["lint", "train.py", "mp.yaml"])
    for arguments in (
        ["lint", "."],
        ["lint", "--fix", "mp.yaml"],
        ["rule", "--all"],
        ["lint", "--format", "json", "."],
    ):
        assert not imported(arguments) & set(HEAVY), arguments


def test_the_test_above_can_fail() -> None:
    pytest.importorskip("numpy", reason="one of the modules that are slow to import")
    Path("train.py").write_text(TRAIN)
    assert "numpy" in imported(["lint", "train.py"], "import numpy\n" + MODULES)


def test_what_is_not_needed_is_not_imported() -> None:
    Path("mp.yaml").write_text(WIZARD)
    assert not imported(["--version"]) & {"yaml", "libcst", "rich", "pathspec"}
    assert not imported(["lint", "mp.yaml"]) & {"rich", "pathspec", "multiprocessing"}
