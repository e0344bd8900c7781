"""The linter under each Python from 3.10 to 3.14 that this machine has: it finds the same in every one.

An interpreter needs mpguard and its dependencies: one that lacks them is skipped, unless `MPGUARD_INSTALL=1` has them
installed into an environment of its own. `MPGUARD_PYTHONS` names more interpreters (separated as in PATH).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import seconds
from paths import REPOSITORY
from rule_cases import examples

from mpguard.lint.model.rule import Rule, rules
from mpguard.lint.source.source import Source
from mpguard.lint.source.text import Unparsable

MINORS = range(10, 15)
#: Syntax of 3.12, 3.13 and 3.14 around a finding of MPG302: parsed, whichever Python runs the linter.
NEWER = {
    "aliases.py": "import torch\ntype Pair[T] = tuple[T, T]\ndef f[T](x: T) -> T:\n    return x\n",
    "strings.py": "import torch\nx = f'{'a' + f\"{'b'}\"}'\n",
    "templates.py": "import torch\nx = t'{1}'\n",
    "defaults.py": "import torch\nclass A[T = int]:\n    pass\n",
    "groups.py": "import torch\ntry:\n    pass\nexcept* ValueError:\n    pass\n",
    "unpacked.py": "import torch\ndef f(*x: *tuple[int]):\n    return x[*x]\n",
}
SCALER = "scaler = torch.cuda.amp.GradScaler()\n"


def interpreter(minor: int) -> Path | None:
    """Return a Python of that version, preferably one that has what mpguard needs."""
    name = f"python3.{minor}"
    given = [Path(path) for path in os.environ.get("MPGUARD_PYTHONS", "").split(os.pathsep) if path]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*given, *pyenv.glob(f"3.{minor}.*/bin/python"), *map(Path, filter(None, [shutil.which(name)]))]
    if sys.version_info[1] == minor:
        found.insert(0, Path(sys.executable))
    right = [
        path for path in found if path.exists() and output(path, "import sys; print(sys.version_info[1])") == f"{minor}"
    ]
    return next((path for path in right if usable(path)), right[0] if right else None)


def output(python: Path, code: str) -> str:
    """Return what a Python prints for a program."""
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd="/").stdout.strip()


def usable(python: Path) -> bool:
    """True if a Python has what mpguard needs, and its entry points: without them there are no rules."""
    needs = "from importlib.metadata import version; import libcst, yaml, rich, pathspec; version('mpguard'); print(1)"
    return output(python, needs) == "1"


def installed(python: Path, folder: Path) -> Path:
    """Return the Python of a new environment with what mpguard needs, or skip the test."""
    if os.environ.get("MPGUARD_INSTALL") != "1":
        pytest.skip(f"{python} has no mpguard, or not what it needs; MPGUARD_INSTALL=1 installs it")
    subprocess.run([python, "-m", "venv", folder], check=True)
    made = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    done = subprocess.run([made, "-m", "pip", "install", "-q", REPOSITORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples of all rules, and newer syntax."""
    top = tmp_path_factory.mktemp("project")
    for code, rule in rules(own_only=True).items():
        for number, example in enumerate(examples(rule)):
            folder = top / f"{code}_{number}"
            folder.mkdir()
            (folder / "pyproject.toml").touch()
            name = example.name or ("example.py" if issubclass(rule, Rule) else "config.yaml")
            for file, text in {name: example.code, **example.files}.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text, "utf-8")
    write_newer(top)
    return top


def write_newer(folder: Path) -> None:
    for file, text in NEWER.items():
        (folder / file).write_text(text + SCALER)


def assert_newer_syntax_is_read(found: list[dict[str, Any]]) -> None:
    assert {each["path"] for each in found if each["code"] == "MPG302"} >= set(NEWER)


def findings(python: Path, project: Path) -> list[dict[str, Any]]:
    options = ["--isolated", "--no-cache", "--select", "ALL", "--preview", "--format", "json"]
    done = subprocess.run(
        [str(python), "-m", "mpguard", "lint", *options, "."],
        cwd=project, capture_output=True, text=True, timeout=seconds(300), check=False,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'plugins'}"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)["findings"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(project: Path) -> list[dict[str, Any]]:
    return findings(Path(sys.executable), project)


def test_newer_syntax_is_read_by_this_python(tmp_path: Path) -> None:
    write_newer(tmp_path)
    assert_newer_syntax_is_read(findings(Path(sys.executable), tmp_path))


@pytest.mark.parametrize("minor", [minor for minor in MINORS if minor != sys.version_info[1]], ids=lambda it: f"3.{it}")
def test_every_python_finds_the_same(minor: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"there is no Python 3.{minor} on PATH, in pyenv or in MPGUARD_PYTHONS")
    if not usable(python):
        python = installed(python, tmp_path / "venv")
    # Both fixtures lint all examples, which takes a while: not where the test is skipped.
    project, expected = (request.getfixturevalue(name) for name in ("project", "expected"))
    found = findings(python, project)
    assert_newer_syntax_is_read(found)
    assert len({each["code"] for each in found}) > 80
    assert found == expected


def test_syntax_that_the_parser_does_not_know_is_a_limit() -> None:
    """As under a Python newer than libcst, which sees no syntax error there."""
    source = Source.parse(b"import torch\n\nx = torch ?? None\n", "train.py", check_syntax=False)
    with pytest.raises(Unparsable, match="parse limit: Python accepts this, the linter's parser") as caught:
        _ = [chunk.module for chunk in source.chunks]
    assert caught.value.line == 3
