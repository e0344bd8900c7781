"""action.yml: its steps, run as GitHub's runner runs them. Needs a package index."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from limits import seconds
from paths import REPOSITORY

ROOT = REPOSITORY
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
CONFIG = "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  amax_history_length: 16\n"


def run(step: dict[str, Any], folder: Path, environment: dict[str, str], **inputs: str) -> tuple[int, str]:
    """One step of the composite action, with its inputs filled in."""
    values = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | inputs

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: values[match[1]], text)

    assert "${{" not in step["run"], "an input would be run as shell code"
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    own = {name: filled(value) for name, value in step["env"].items()}
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds(400),
        env={**os.environ, **environment, **own},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    action, runner = tmp_path_factory.mktemp("action"), tmp_path_factory.mktemp("runner")
    for name in ("pyproject.toml", "README.md", "LICENSE", "mpguard", "plugins"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, action / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, action / name)
    environment = {"RUNNER_TEMP": str(runner), "GITHUB_ACTION_PATH": str(action)}
    status, output = run(STEPS[0], runner, environment, python=sys.executable)
    assert status == 0, output
    return environment


def test_the_action(installed: dict[str, str], tmp_path: Path) -> None:
    environment = {**installed, "GITHUB_WORKSPACE": str(tmp_path)}
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "mp.yaml").write_text(CONFIG)
    (tmp_path / "train.py").write_text("print(1)\n")
    status, output = run(STEPS[1], tmp_path, environment)
    assert status == 1 and output.startswith("::error title=MPG801 (unknown-fp8-key),file=a folder/mp.yaml,line=5,")
    assert run(STEPS[1], tmp_path, environment, paths="train.py\n")[0] == 0
    assert run(STEPS[1], tmp_path, environment, arguments="--ignore MPG801\n  --preview")[0] == 0
    assert run(STEPS[1], tmp_path, environment, paths="\na folder\ntrain.py\n")[0] == 1
    status, output = run(STEPS[1], tmp_path, environment, sarif="out.sarif")
    assert status == 1 and "::error " in output
    assert len(json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]) == 1


def test_names_with_spaces_and_quotes(installed: dict[str, str], tmp_path: Path) -> None:
    for name in ("a folder", "it's"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mp.yaml").write_text(CONFIG)
    (tmp_path / "my base.json").write_text('{"mpguard_baseline": 1, "findings": []}')
    arguments = "--baseline 'my base.json' --select \"MPG801\""
    status, output = run(STEPS[1], tmp_path, installed, paths="  a folder \r\nit's\n\n", arguments=arguments)
    assert status == 1 and output.count("::error title=MPG801") == 2
    status, output = run(STEPS[1], tmp_path, installed, arguments="--baseline 'my base.json")
    assert (status, output) == (2, "::error title=mpguard::the input `arguments` has an unclosed quote\n")
    assert run(STEPS[1], tmp_path, installed, paths=" \n")[1].count("::error title=MPG801") == 2, "all"


def test_annotations_come_where_the_sarif_file_says_that_something_was_not_checked(
    installed: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mp.yaml").write_text(CONFIG)
    status, output = run(STEPS[1], tmp_path, installed, paths="mp.yaml\nmp.yml", sarif="out.sarif")
    assert status == 2 and "::error title=MPG801" in output and "mp.yml: no such file or folder" in output
    (run_,) = json.loads((tmp_path / "out.sarif").read_text())["runs"]
    assert not run_["invocations"][0]["executionSuccessful"] and len(run_["results"]) == 1


def test_nothing_that_the_bash_of_macos_lacks() -> None:
    """It is 3.2: no `mapfile`, no `readarray`, no associative arrays, no `${name^^}`, no `&>>`."""
    for step in STEPS:
        assert not re.search(r"mapfile|readarray|declare -A|\^\^|,,\}|&>>|\$\{\w+@", step["run"])


def test_inputs_are_no_shell_code(installed: dict[str, str], tmp_path: Path) -> None:
    status, _ = run(
        STEPS[1], tmp_path, installed, paths="$(touch x)\n`touch x`", arguments="; touch x $(touch x) --select"
    )
    assert status == 2 and not list(tmp_path.iterdir())
