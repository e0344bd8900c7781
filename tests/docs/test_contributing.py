"""The examples of CONTRIBUTING.md, installed as another package: a rule, a recipe and a plugin."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import install
from limits import seconds
from paths import REPOSITORY

TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
RULE, RECIPE, PLUGIN = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
GROUPS = ("mpguard.rules", "mpguard.recipes", "mpguard.plugins")

CHECK = """
from mpguard.lint import Bad
from mpguard.lint.model.rule import rules

rule = rules()["MPG299"]
for number, example in enumerate(rule.examples):
    open(f"{type(example).__name__.lower()}{number}.py", "w").write(example.code)
    if isinstance(example, Bad):
        open("fixed.txt", "w").write(example.fixed)
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    modules = {"__init__.py": "", "rule.py": RULE, "recipe.py": RECIPE, "target.py": PLUGIN}
    install(tmp_path / "site", modules, "their_package", GROUPS)
    (tmp_path / "work").mkdir()
    return tmp_path


def run(theirs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(theirs / "site"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=theirs / "work",
        capture_output=True,
        text=True,
        timeout=seconds(100),
        env=environment,
    )


def test_the_rule_reports_what_its_examples_mark_and_fixes_it(theirs: Path) -> None:
    done = run(theirs, "-c", CHECK)
    assert done.returncode == 0, done.stderr
    lint = ("-m", "mpguard", "lint", "--no-cache", "--select", "MPG299")
    found = json.loads(run(theirs, *lint, "--format", "json").stdout)["findings"]
    bad = (theirs / "work" / "bad0.py").read_text()
    marked = [number for number, line in enumerate(bad.splitlines(), 1) if line.endswith("# !")]
    assert [(Path(each["path"]).name, each["line"]) for each in found] == [("bad0.py", line) for line in marked]
    done = run(theirs, *lint, "--unsafe-fixes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (theirs / "work" / "bad0.py").read_text() == (theirs / "work" / "fixed.txt").read_text()


LAWS = """
import sys, warnings
sys.path[:0] = sys.argv[1:]
import test_plugin_laws as laws
warnings.simplefilter("ignore")
assert "ours" in laws.TARGETS
laws.test_carries_is_exactly_what_the_target_acts_upon("ours")
laws.test_inject_reaches_the_policy_from_anywhere_and_stays_there("ours")
laws.test_a_contradiction_is_reported_with_key_found_and_wanted("ours")
laws.test_settings_and_arguments_are_plain_data("ours")
laws.test_not_carried_is_warned_for_what_matters_and_for_nothing_else("ours")
"""


def test_the_plugin_obeys_the_laws(theirs: Path) -> None:
    done = run(theirs, "-c", LAWS, str(REPOSITORY / "tests/support"), str(REPOSITORY / "tests/targets"))
    assert done.returncode == 0, done.stderr


def test_the_recipe_and_the_plugin_work(theirs: Path) -> None:
    config = theirs / "work" / "config.yaml"
    config.write_text("our_trainer: 1\nprecision:\n  compute: fp32 # as before\n")
    done = run(theirs, "-m", "mpguard", "apply", "ours", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert config.read_text() == (
        "our_trainer: 1\nprecision:\n  compute: bf16 # as before\n  reduce: bf16\n"
    ), done.stdout  # fmt: skip
