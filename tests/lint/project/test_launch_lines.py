"""Launch lines: what is one, what is known of it, and which config it ties a script to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpguard.cli import main
from mpguard.core import settings
from mpguard.lint.project import launch_lines, tree
from mpguard.lint.project.launch_lines import Launch, read
from mpguard.lint.project.project import Project


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    settings._of_folder.cache_clear()
    launch_lines.in_tree.cache_clear()
    return tmp_path


def one(text: str) -> Launch:
    (found,) = read(text.encode(), "run.sh")
    return found


def words(launch: Launch) -> tuple[str, dict[str, str | None], str | None, list[str | None]]:
    options = {name: None if word is None else word.text for name, word in launch.options.items()}
    script = None if launch.script is None else launch.script.text
    return launch.launcher, options, script, [word.text for word in launch.arguments]


# -- the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accelerate launch train.py\n", ("accelerate", {}, "train.py", [])),
        ("accelerate-launch train.py --lr 1\n", ("accelerate", {}, "train.py", ["--lr", "1"])),
        ("python -m accelerate.commands.launch --config_file a.yaml train.py",
         ("accelerate", {"config_file": "a.yaml"}, "train.py", [])),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config-file=a.yaml --multi_gpu train.py x",
         ("accelerate", {"config_file": "a.yaml", "multi_gpu": None}, "train.py", ["x"])),
        ("accelerate launch \\\n  --num_processes 2 \\\n  -m pkg.train \\\n  --config mp.yaml && echo done\n",
         ("accelerate", {"num_processes": "2", "m": None}, "pkg.train", ["--config", "mp.yaml"])),
        ("accelerate launch --mixed_precision='bf16' \"my train.py\" --name \"a b\" # why\n",
         ("accelerate", {"mixed_precision": "bf16"}, "my train.py", ["--name", "a b"])),
        ("torchrun --nproc_per_node=8 --standalone train.py --deepspeed ds.json",
         ("torchrun", {"nproc_per_node": "8", "standalone": None}, "train.py", ["--deepspeed", "ds.json"])),
        ("python3 -m torch.distributed.run --nproc_per_node 8 train.py",
         ("torchrun", {"nproc_per_node": "8"}, "train.py", [])),
        ("deepspeed --num_gpus 8 train.py --deepspeed_config ds.json > log.txt 2>&1",
         ("deepspeed", {"num_gpus": "8"}, "train.py", ["--deepspeed_config", "ds.json"])),
        ("mpguard launch --config mp.yaml train.py", ("mpguard", {"config": "mp.yaml"}, "train.py", [])),
        ("Run `accelerate launch train.py --lr 1` and wait.", ("accelerate", {}, "train.py", ["--lr", "1"])),
        ("      - run: accelerate launch train.py\n", ("accelerate", {}, "train.py", [])),
        ("train:\n\t@accelerate launch train.py; echo\n", ("accelerate", {}, "train.py", [])),
        ("$ accelerate launch train.py --config CONFIG", ("accelerate", {}, "train.py", ["--config", "CONFIG"])),
        ("accelerate launch --num_processes $N train.py --config ${CONFIG} --x a$b",
         ("accelerate", {"num_processes": None}, "train.py", ["--config", None, "--x", None])),
    ],
)  # fmt: skip
def test_what_is_known_of_a_launch_line(text: str, expected: Any) -> None:
    assert words(one(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "accelerate launch to start training", "use accelerate launch.", "pip install accelerate deepspeed train.py",
        "# accelerate launch train.py", "  # accelerate launch train.py", "accelerate config", "echo no",
        "import deepspeed train.py", "my-accelerate launch train.py", "deepspeed is a library", "accelerate launch",
    ],
)  # fmt: skip
def test_what_is_no_launch_line(text: str) -> None:
    assert read(text.encode(), "run.sh") == []


def test_what_a_variable_may_hide() -> None:
    assert one("accelerate launch $ARGS train.py").hidden
    assert one("accelerate launch $ARGS").script is None
    assert one("accelerate launch $SCRIPT --config a.yaml").script is None
    assert not one("accelerate launch train.py $ARGS").hidden


def test_places() -> None:
    text = "é\nFOO=1 accelerate launch --config_file a.yaml \\\n  train.py --x 'b c'\n"
    launch = one(text)
    assert launch.script is not None and launch.options["config_file"] is not None
    spans = (launch.script.span, launch.options["config_file"].span, launch.arguments[1].span, launch.span)
    assert [text[slice(*span)] for span in spans] == [
        "train.py", "a.yaml", "'b c'", "accelerate launch --config_file a.yaml \\\n  train.py --x 'b c'",
    ]  # fmt: skip


def test_options_of_the_script() -> None:
    launch = one("accelerate launch train.py $X --config=a.yaml --deepspeed ds.json --last")
    found = launch.argument("--config")
    assert found is not None and found[1].text == "a.yaml"
    found = launch.argument("--ds", "--deepspeed")
    assert found is not None and found[1].text == "ds.json"
    assert launch.argument("--last") is None and launch.argument("--none") is None


def test_switches_are_those_of_the_launchers() -> None:
    """An option that takes a value would swallow the script."""
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    for parser, launcher in ((launch_command_parser(), "accelerate"), (get_args_parser(), "torchrun")):
        switches = {
            option.lstrip("-").replace("-", "_")
            for action in parser._actions
            if action.nargs == 0
            for option in action.option_strings
        }
        assert switches <= launch_lines.SWITCHES[launcher]
        valued = {o.lstrip("-").replace("-", "_") for a in parser._actions if a.nargs != 0 for o in a.option_strings}
        assert not valued & launch_lines.SWITCHES[launcher]


def test_a_file_that_is_too_large_is_data() -> None:
    line = b"accelerate launch train.py\n"
    assert len(read(line * 10, "x.sh")) == 10
    assert read(line * 40_000, "x.sh") == []


# -- scripts and configs ------------------------------------------------------------------------------

ACCELERATE = "distributed_type: FSDP\nmixed_precision: {}\n"


def make(files: dict[str, str]) -> None:
    for name, text in {"pyproject.toml": "", **files}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def configs(script: str) -> list[tuple[str, str | None]]:
    launch_lines.in_tree.cache_clear()
    tree.top_of.cache_clear()
    return [(each.path, each.mixed_precision) for each in Project().configs_for(script)]


BF16, FP8 = ACCELERATE.format("bf16"), ACCELERATE.format("fp8")
TREE = {"conf/bf16.yaml": BF16, "conf/fp8.yaml": FP8, "src/train.py": "", "near.yaml": FP8, "train.py": "",
        "conf/ds.json": '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}'}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "line", "script", "expected"),
    [
        ("run.sh", "accelerate launch --config_file conf/bf16.yaml src/train.py", "src/train.py",
         [("conf/bf16.yaml", "bf16")]),
        ("Makefile", "\taccelerate launch --config_file=conf/bf16.yaml train.py", "train.py",
         [("conf/bf16.yaml", "bf16")]),
        (".github/workflows/ci.yml", "  - run: accelerate launch --config_file conf/fp8.yaml train.py", "train.py",
         [("conf/fp8.yaml", "fp8")]),
        ("README.md", "`accelerate launch --config_file conf/fp8.yaml -m src.train`", "src/train.py",
         [("conf/fp8.yaml", "fp8")]),
        ("scripts/run.sh", "accelerate launch --config_file ../conf/fp8.yaml ../train.py", "train.py",
         [("conf/fp8.yaml", "fp8")]),
        ("scripts/run.sh", "accelerate launch --config_file conf/fp8.yaml train.py", "train.py",
         [("conf/fp8.yaml", "fp8")]),
        ("run.sh", "mpguard launch --config conf/fp8.yaml train.py", "train.py", [("conf/fp8.yaml", "fp8")]),
        ("run.sh", "deepspeed train.py --deepspeed conf/ds.json", "train.py", [("conf/ds.json", "fp16")]),
        ("run.sh", "torchrun $ARGS train.py --deepspeed conf/ds.json", "train.py", [("conf/ds.json", "fp16")]),
        ("run.sh", "accelerate launch --config_file conf/fp8.yaml --mixed_precision BF16 train.py", "train.py",
         [("conf/fp8.yaml", "bf16")]),
        ("run.sh", "accelerate launch --config_file conf/bf16.yaml train.py\n"
                   "accelerate launch --config_file conf/fp8.yaml train.py", "train.py",
         [("conf/bf16.yaml", "bf16"), ("conf/fp8.yaml", "fp8")]),
        ("run.sh", "accelerate launch --mixed_precision=fp16 train.py", "train.py", [("run.sh", "fp16")]),
        # what is unknown may be right
        ("run.sh", "accelerate launch --config_file $C train.py", "train.py", []),
        ("run.sh", "accelerate launch --config_file conf/bf16.yaml train.py\naccelerate launch $A train.py",
         "train.py", []),
        ("run.sh", "accelerate launch --config_file gone.yaml train.py", "train.py", []),
        ("run.sh", "accelerate launch --config_file conf/fp8.yaml --mixed_precision $P train.py", "train.py", []),
        ("run.sh", "accelerate launch --config_file conf/fp8.yaml train.py --deepspeed conf/ds.json", "train.py", []),
        ("run.sh", "accelerate launch --mixed_precision $P train.py", "train.py", []),
        # lines without a config decide nothing: the configs in the folder of the script apply
        ("run.sh", "accelerate launch train.py\ntorchrun $A train.py", "train.py", [("near.yaml", "fp8")]),
        ("run.sh", "accelerate launch --config_file conf/bf16.yaml other.py", "train.py", [("near.yaml", "fp8")]),
        ("notes.md", "accelerate launch --config_file conf/bf16.yaml train.py", "train.py", [("near.yaml", "fp8")]),
    ],
)  # fmt: skip
def test_which_config_a_script_is_launched_with(
    file: str, line: str, script: str, expected: list[tuple[str, str]]
) -> None:
    make({**TREE, file: line + "\n"})
    assert configs(script) == expected


def test_settings_and_the_command_line_come_first() -> None:
    make({**TREE, "run.sh": "accelerate launch --config_file conf/bf16.yaml train.py\n",
          "mpguard.toml": "configs = ['conf/fp8.yaml']\n"})  # fmt: skip
    settings._of_folder.cache_clear()
    assert configs("train.py") == [("conf/fp8.yaml", "fp8")]


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    make({**TREE, "run.sh": "accelerate launch --config_file conf/bf16.yaml train.py\n", "other.sh": ""})
    assert configs("train.py") == [("conf/bf16.yaml", "bf16")]
    monkeypatch.setattr(launch_lines, "MOST_READ", 1)
    assert configs("train.py") == [("near.yaml", "fp8")]


def test_a_config_beside_belongs_to_the_code_that_uses_accelerate() -> None:
    make({"a/mp.yaml": BF16, "a/ddp.py": "import torch\n", "b/mp.yaml": BF16, "b/ddp.py": "import torch\n",
          "b/acc.py": "from accelerate import Accelerator\n"})  # fmt: skip
    assert configs("a/ddp.py") == [("a/mp.yaml", "bf16")], "there is no other code"
    assert configs("b/ddp.py") == []
    assert configs("b/acc.py") == [("b/mp.yaml", "bf16")]


# -- MPG866 -------------------------------------------------------------------------------------------


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    main(["lint", "--format", "json", "--select", "MPG866,MPG002", *arguments])
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return findings


@pytest.mark.parametrize("name", ["run.sh", "Makefile", "README.md", ".github/workflows/ci.yml", "jobs/x.slurm"])
def test_where_a_config_behind_the_script_is_reported(capsys: pytest.CaptureFixture[str], name: str) -> None:
    make({"mp.yaml": BF16, name: "first:\n\taccelerate launch train.py --config mp.yaml --lr 1\n"})
    (found,) = lint(capsys)
    assert (found["path"], found["line"], found["column"], found["end_column"]) == (name, 2, 29, 45)
    assert main(["lint", "--select", "MPG866", "--fix"]) == 0
    assert Path(name).read_text() == "first:\n\taccelerate launch --config_file mp.yaml train.py --lr 1\n"


def test_suppressions_of_shell_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    line = "accelerate launch train.py \\\n  --config mp.yaml"
    make({"mp.yaml": BF16, "a.sh": f"{line}  # noqa: MPG866\n", "b.sh": f"# mpguard: ignore[MPG866] meant\n{line}\n",
          "c.sh": f"# mpguard: ignore-file[MPG866]\n{line}\n", "d.sh": "accelerate launch train.py  # noqa: MPG866\n",
          "e.sh": f"echo '# mpguard: ignore[MPG866]'\n{line}\n"})  # fmt: skip
    found = [(each["path"], each["code"]) for each in lint(capsys)]
    assert ("a.sh", "MPG866") not in found and ("b.sh", "MPG866") not in found and ("c.sh", "MPG866") not in found
    assert ("d.sh", "MPG002") in found and ("e.sh", "MPG866") in found


def test_files_without_a_launch_line_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    make({"a.py": "x = 1\n", "run.sh": "echo accelerate\n", "README.md": "# Title\n", "b.sh": "torchrun train.py\n"})
    assert main(["lint"]) == 0
    assert capsys.readouterr().out == "No problems in 2 files.\n", "a.py, b.sh"


def test_fixes_of_quoted_names_and_bytes_that_are_not_utf8() -> None:
    make({"my conf/mp.yaml": BF16})
    Path("run.sh").write_bytes(b"# \xff\r\naccelerate launch train.py '--config' 'my conf/mp.yaml'\r\n")
    assert main(["lint", "--select", "MPG866", "--fix"]) == 0
    expected = b"# \xff\r\naccelerate launch --config_file 'my conf/mp.yaml' train.py\r\n"
    assert Path("run.sh").read_bytes() == expected


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ('CFG="ds.yaml"\naccelerate launch --config_file "${CFG}" train.py', "ds.yaml"),
        ("export CFG=ds\naccelerate launch --config_file conf/$CFG.yaml train.py", "conf/ds.yaml"),
        ("CFG=ds.yaml\nCFG=mp.yaml\naccelerate launch --config_file $CFG train.py", None),
        ("if [ $1 ]; then\n  CFG=ds.yaml\nfi\naccelerate launch --config_file $CFG train.py", None),
        ("CFG=${1:-ds.yaml}\naccelerate launch --config_file $CFG train.py", None),
        ("CFG=ds.yaml\naccelerate launch --config_file $CFG$2 train.py", None),
        ("CFG=ds.yaml\naccelerate launch --config_file $(find . -name $CFG) train.py", None),
    ],
)
def test_a_config_may_be_named_by_a_variable_that_is_set_once(text: str, expanded: str | None) -> None:
    word = one(text).options["config_file"]
    assert word is not None
    assert (word.text, word.expanded) == (None, expanded)
