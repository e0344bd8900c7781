"""Rules of another distribution, installed as by pip: its defects are named, and mpguard's own rules still run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
from mpguard.core import entry_points, moved
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


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "from mpguard.lint.rule import Rule",
            "imports `mpguard.lint.rule`, which moved: import from `mpguard.lint`",
        ),
        (
            "from mpguard.lint.facts.walk import Call",
            "imports `mpguard.lint.facts.walk`, which moved: import from `mpguard.lint`",
        ),
        (
            "from mpguard.lint import rule",
            "imports `mpguard.lint.rule`, which moved: import from `mpguard.lint`",
        ),
        (
            "from mpguard.lint import Moment",
            "imports `Moment` from `mpguard.lint`, where it is not defined; `Moment` is now `TraceStep`; "
            "the public names are in `mpguard.lint`",
        ),
        ("import mpguard.plugin", "imports `mpguard.plugin`, which moved: import from `mpguard.targets`"),
        ("from mpguard.errors import PolicyError", "imports `mpguard.errors`, which moved: import from `mpguard`"),
        ("from mpguard.recipes import register", "imports `mpguard.recipes`, which moved: import from `mpguard`"),
        ("from mpguard.dtype import Dtype", "imports `mpguard.dtype`, which moved: import from `mpguard.policy`"),
        (
            "from mpguard.conversion.swap import convert",
            "imports `mpguard.conversion`, which moved: import from `mpguard`",
        ),
        ("import mpguard.looks", "imports `mpguard.looks`, but this version of mpguard has no such module;"),
    ],
)
@pytest.mark.parametrize("group", ["mpguard.rules", "mpguard.plugins"])
def test_an_import_of_a_name_that_moved_names_the_new_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, line: str, reason: str
) -> None:
    """The module that is named is the one with the import line, also where another module of theirs imports it."""
    package = f"theirs_{tmp_path.name}".replace("-", "_").replace("[", "_").replace("]", "_")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "main.py").write_text(f"from {package} import user\n")
    (tmp_path / package / "user.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExtensionError) as raised:
        entry_points.walk(package, f"entry point `theirs` ({group}, of theirs)")
    assert str(raised.value).startswith(f"entry point `theirs` ({group}, of theirs): `{package}.user` {reason}")


def test_every_former_module_is_gone_and_its_new_place_exists() -> None:
    pytest.importorskip("torch", reason="modules of mpguard.nn are among them")
    for former, place in moved.MODULES.items():
        importlib.import_module(place)
        assert former in ("mpguard.policy", "mpguard.lint") or importlib.util.find_spec(former) is None


def test_a_failed_import_of_another_module_is_reported_as_it_is() -> None:
    assert moved.import_error(ModuleNotFoundError("No module named 'x'", name="x"), "theirs") is None
    assert moved.import_error(ImportError("cannot import name 'y' from 'x' (x.py)", name="x"), "theirs") is None


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
