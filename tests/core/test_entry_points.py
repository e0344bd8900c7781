"""Rules of another distribution, installed as by pip: its defects are named, and mpguard's own rules still run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributions
import pytest
from limits import seconds

from mpguard.core import distributions as installed
from mpguard.core import entry_points
from mpguard.core.errors import ExtensionError

#: A rule of theirs; each test supplies the body of its `check`.
RULE = """
from mpguard.lint import ConfigRule, Diagnostic, LaunchRule, Note, Rule, any_of

class Theirs({base}):
    '''What it does.'''
    code, name, severity, message = "OUR001", "theirs", "error", "of theirs"
    triggers = ()
    {more}
    def check(self, about):
        {check}
"""
RAISES = "raise ZeroDivisionError('oops')"
#: A finding of ours in each, so that it can be missing.
PYTHON = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
CONFIG = "distributed_type: FSDP\nmixed_precision: fp16\nuse_cpu: true\nfp8_config:\n  no_such_key: 1\n"
LAUNCH = "accelerate launch train.py --config mp.yaml\n"

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with one module of rules on the path of the processes that a test starts."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.chdir(work)

    def install(module: str) -> None:
        distributions.install(site, {"__init__.py": "", "theirs.py": module})

    return install


def lint(*arguments: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "mpguard", "lint", "--format", "concise", *arguments],
        capture_output=True, text=True, timeout=seconds(120),
    )  # fmt: skip


def rule(base: str = "Rule", check: str = RAISES, more: str = "pass") -> str:
    return RULE.format(base=base, check=check, more=more)


def test_a_rule_of_theirs_finds(install: Install) -> None:
    install(rule(check="yield self.at((0, 6))"))
    Path("train.py").write_text(PYTHON)
    done = lint("train.py")
    assert done.returncode == 1, done.stderr
    assert "train.py:1:1: OUR001 of theirs" in done.stdout
    assert "MPG302" in done.stdout


@pytest.mark.parametrize(
    ("base", "more", "name", "content", "ours"),
    [
        ("Rule", "pass", "train.py", PYTHON, "MPG302"),
        ("ConfigRule", "kinds = ('accelerate',)", "mp.yaml", CONFIG, "MPG801"),
        ("LaunchRule", "pass", "run.sh", LAUNCH, "MPG866"),
    ],
)
def test_one_that_raises_is_named_and_ours_are_printed(
    install: Install, base: str, more: str, name: str, content: str, ours: str
) -> None:
    install(rule(base, RAISES, more))
    Path("mp.yaml").write_text(CONFIG)
    Path("train.py").write_text(PYTHON)
    Path(name).write_text(content)
    done = lint("--select", "ALL", "--preview", name)
    assert done.returncode == 2
    assert f"{name}: defect in OUR001 (of their_rules.theirs): ZeroDivisionError: oops" in done.stderr
    assert "to its authors" in done.stderr
    assert 'theirs.py", line' in done.stderr, "the traceback says where"
    assert f"{name}:" in done.stdout and ours in done.stdout, done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_one_that_raises_in_workers(install: Install) -> None:
    install(rule(check="if 'f7' in about.path: raise ZeroDivisionError('oops')\n        yield self.at((0, 6))"))
    for number in range(20):
        Path(f"f{number}.py").write_text(PYTHON)
    done = lint("-j", "2", ".")
    assert done.returncode == 2
    assert done.stderr.count("defect in OUR001") == 1
    assert "f7.py: defect in OUR001" in done.stderr
    assert done.stdout.count("OUR001") == 19
    assert done.stdout.count("MPG302") == 20


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return None", "TypeError: 'NoneType' object is not iterable"),
        ("yield 'a text'", "TypeError: `check` yields 'a text'; a `Diagnostic` with the code OUR001 is needed"),
        ("yield Diagnostic('OUR002', (0, 1), 'other')", "TypeError: `check` yields Diagnostic(code='OUR002'"),
        ("yield [1]", "TypeError"),
        ("yield self.at((0, 10_000))", "ValueError: it names a place that is not in the file"),
        ("yield self.at((-1, 3))", "ValueError: it names a place that is not in the file"),
        ("yield self.at((0, 1), notes=(Note('there', (999, 1000)),))", "ValueError: it names a place"),
        ("return self.check(about)", "RecursionError"),
    ],
)
def test_one_that_does_not_keep_to_the_rules(install: Install, check: str, message: str) -> None:
    install(rule(check=check))
    Path("train.py").write_text(PYTHON)
    done = lint("train.py")
    assert done.returncode == 2, done.stderr
    assert f"train.py: defect in OUR001 (of their_rules.theirs): {message}" in done.stderr
    assert "MPG302" in done.stdout


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(0)\n", "SystemExit: 0"),
        ("from mpguard.lint import Rule\nclass Taken(Rule):\n    code = 'OUR001'\n", "a rule needs `name`"),
        (rule().replace("OUR001", "MPG302"), "code MPG302 is taken by mpguard.lint.rules"),
    ],
    ids=["import", "syntax", "exit", "incomplete", "taken"],
)
def test_one_that_does_not_import_ends_the_run(install: Install, module: str, message: str) -> None:
    """Fewer rules than there are would look like clean code."""
    install(module)
    Path("train.py").write_text(PYTHON)
    done = lint("train.py")
    assert done.returncode == 2
    assert "their_rules.theirs" in done.stderr and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_rule_of_theirs_is_selected_and_ignored_like_ours(install: Install) -> None:
    install(rule(check="yield self.at((0, 6))"))
    Path("train.py").write_text(PYTHON)
    for selector in ("OUR001", "OUR", "our0"):
        found = lint("--select", selector, "train.py").stdout
        assert "OUR001" in found and "MPG302" not in found
    found = lint("--ignore", "OUR", "train.py").stdout
    assert "OUR001" not in found and "MPG302" in found
    for selector in ("OU", "OUR2", "OUR0011"):
        assert f"there is no rule `{selector}`" in lint("--select", selector, "train.py").stderr


def test_an_import_that_fails_names_the_module_and_the_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"theirs_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "user.py").write_text("from mpguard.lint import NoSuchName\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExtensionError) as raised:
        entry_points.walk(package, "entry point `theirs`")
    expected = f"entry point `theirs`: `{package}.user` does not import: ImportError: cannot import name 'NoSuchName'"
    assert str(raised.value).startswith(expected)


def test_without_its_own_entry_points_mpguard_does_not_call_code_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is run out of a clone that was never installed."""
    monkeypatch.setattr(installed, "entry_points", lambda _: [])
    with pytest.raises(ExtensionError, match=r"is not installed for .*mpguard\.rules.*pip install"):
        entry_points._load.__wrapped__("mpguard.rules", True)


def test_isolated_leaves_them_out(install: Install) -> None:
    install("raise RuntimeError\n")
    Path("train.py").write_text(PYTHON)
    Path("mpguard.toml").write_text("ignore = ['ALL']\nno_such_setting = 1\n")
    done = lint("--isolated", "train.py")
    assert done.returncode == 1, done.stderr
    assert "MPG302" in done.stdout
    assert not done.stderr


def test_where_a_rule_failed_the_rest_is_not_called_clean(install: Install) -> None:
    install(rule())
    Path("train.py").write_text("import torch\n")
    done = lint("train.py")
    assert done.returncode == 2
    assert done.stdout == "No problems in 1 file, but not all could be done.\n"
