"""The engine with rules made for the test: selection, defects, suppressions, fixes, workers."""

from __future__ import annotations

import faulthandler
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import seconds
from paths import TESTS

from mpguard.core.text_edits import Edit
from mpguard.lint.model import rule as registry
from mpguard.lint.model.result import FileReport
from mpguard.lint.model.rule import BaseRule, Diagnostic, Fix, Note, Rule, any_of, rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run import timeout
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target

Rules = dict[str, type[BaseRule]]
MakeRule = Callable[..., type[BaseRule]]

ENGINE = {code: rule for code, rule in rules(own_only=True).items() if code < "MPG100"}


@pytest.fixture
def make_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRule]:
    """A rule that reports each place where a word stands in code, registered for this test only."""
    made: list[str] = []

    def make(code: str, word: str, *, becomes: str | None = None, safe: bool = True, **more: Any) -> type[BaseRule]:
        def check(self: Rule, facts: Any) -> Iterator[Diagnostic]:
            start = -1
            while (start := facts.source.text.find(word, start + 1)) >= 0:
                fix = None
                if becomes is not None:
                    fix = Fix(
                        f"Write {becomes}", "safe" if safe else "unsafe", (Edit(start, start + len(word), becomes),)
                    )
                yield self.at((start, start + len(word)), fix=fix)

        body = {
            "__doc__": "Made for a test.", "code": code, "name": f"made-{code.lower()}", "severity": "error",
            "message": f"`{word}` is there", "triggers": (any_of(word.encode()),), "check": check, **more,
        }  # fmt: skip
        made.append(code)
        return type(f"Made{code}", (Rule,), body)

    yield make
    for code in made:
        registry._RULES.pop(code, None)


def engine(*made: type[BaseRule], **options: Any) -> Engine:
    return Engine({**ENGINE, **{rule.code: rule for rule in made}}, Options(**options))


def report(tmp_path: Path, code: str | bytes, *made: type[BaseRule], **options: Any) -> FileReport:
    path = tmp_path / "train.py"
    path.write_bytes(textwrap.dedent(code).lstrip("\n").encode() if isinstance(code, str) else code)
    (result,) = engine(*made, **options).run([Target(str(path), "python", named=True)])
    return result


def found(result: FileReport) -> list[tuple[str, int]]:
    assert not result.defects, result.defects[0].traceback
    return [(finding.code, finding.line) for finding in result.findings]


# -- what is reported ---------------------------------------------------------------------------------


def test_findings_are_in_the_order_of_the_file(tmp_path: Path, make_rule: MakeRule) -> None:
    one, two = make_rule("MPG901", "beta"), make_rule("MPG902", "alpha")
    assert found(report(tmp_path, "beta\nalpha\nbeta\n", one, two)) == [("MPG901", 1), ("MPG902", 2), ("MPG901", 3)]


def test_places_count_code_points_and_all_line_endings(tmp_path: Path, make_rule: MakeRule) -> None:
    result = report(tmp_path, "\ufeffé = '😀'\r\nπ = alpha\r".encode(), make_rule("MPG901", "alpha"))
    (finding,) = result.findings
    assert (finding.line, finding.column, finding.end_line, finding.end_column) == (2, 5, 2, 10)


def test_a_rule_reports_nothing_where_a_more_specific_rule_reports(tmp_path: Path, make_rule: MakeRule) -> None:
    general, specific = make_rule("MPG901", "alpha", yields_to=("MPG902",)), make_rule("MPG902", "alpha.beta")
    code = "alpha.beta\nalpha.gamma\n"
    assert found(report(tmp_path, code, general, specific)) == [("MPG902", 1), ("MPG901", 2)]
    alone = report(tmp_path, code, general, specific, selectors=Selectors(select=("MPG901",)))
    assert found(alone) == [("MPG901", 1), ("MPG901", 2)]


def test_a_rule_that_raises_is_a_defect_and_the_others_go_on(tmp_path: Path, make_rule: MakeRule) -> None:
    def check(self: Rule, facts: Any) -> Iterator[Diagnostic]:
        yield self.at((0, 1))
        raise ZeroDivisionError("oops")

    broken, other = make_rule("MPG901", "alpha", check=check), make_rule("MPG902", "alpha")
    result = report(tmp_path, "alpha  # mpguard: ignore[MPG901]\n", broken, other)
    assert [(f.code, f.line) for f in result.findings] == [("MPG902", 1)], "a rule that failed judges no suppression"
    (defect,) = result.defects
    assert f"{tmp_path / 'train.py'}: defect in MPG901 (of test_engine): ZeroDivisionError: oops" in str(defect)
    assert "ZeroDivisionError" in defect.traceback


def test_a_rule_that_recurses_without_end_is_a_defect_of_its_own(tmp_path: Path, make_rule: MakeRule) -> None:
    def endless(self: Rule, facts: Any) -> Any:
        return endless(self, facts)

    result = report(tmp_path, "alpha\n", make_rule("MPG901", "alpha", check=endless), make_rule("MPG902", "alpha"))
    assert [(f.code, f.line) for f in result.findings] == [("MPG902", 1)]
    (defect,) = result.defects
    assert f"{tmp_path / 'train.py'}: defect in MPG901 (of test_engine): RecursionError" in str(defect)


@pytest.mark.skipif(not hasattr(signal, "SIGVTALRM"), reason="there is no limit here")
def test_a_file_that_takes_too_long_is_left_and_the_next_one_is_checked(
    tmp_path: Path, make_rule: MakeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(self: Rule, facts: Any) -> Iterator[Diagnostic]:
        while "slow" in facts.source.text:
            pass
        yield self.at((0, 1))

    monkeypatch.setattr(timeout, "SECONDS", 0.05)
    made = engine(make_rule("MPG901", "alpha", check=hang))
    slow, quick = (
        made.check(Target(str(tmp_path / name), "python", data=data, named=True))
        for name, data in (("slow.py", b"slow.alpha\n"), ("quick.py", b"alpha\n"))
    )
    assert [finding.code for finding in slow.findings] == ["MPG000"]
    assert "parse limit: still not checked after" in slow.findings[0].message
    assert not slow.defects
    assert found(quick) == [("MPG901", 1)]


def test_a_note_may_point_into_another_file(tmp_path: Path, make_rule: MakeRule) -> None:
    other = tmp_path / "losses.py"
    other.write_text("import torch\nscale = 1024\n")

    def check(self: Rule, facts: Any) -> Iterator[Diagnostic]:
        yield self.at((0, 5), notes=(Note("scaled here", (13, 18), str(other)), Note("and a remark")))

    (finding,) = report(tmp_path, "alpha\n", make_rule("MPG901", "alpha", check=check)).findings
    there, remark = finding.notes
    assert (there.start, there.end, there.source) == ((2, 1), (2, 6), "scale = 1024")
    assert remark.start is None


# -- suppressions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "alpha  # noqa\n",
        "alpha  # noqa: MPG901\n",
        "alpha  # NOQA:E501,MPG901\n",
        "alpha  # type: ignore # noqa: E501 MPG901\n",
        "alpha  # mpguard: ignore\n",
        "alpha  # mpguard: ignore[MPG901] it is meant\n",
        "alpha  #mpguard:ignore[mpg901, MPG902]  # noqa: E501\n",
        "# mpguard: ignore[MPG901] it is meant\n\nalpha\n",
        "# mpguard: ignore[MPG901] for all of the statement\nf(\n    alpha,\n)\n",
        "f(\n    alpha,  # noqa: MPG901\n)\n",
        "f(\n    alpha,\n)  # noqa: MPG901\n",
        "alpha = '''\n'''  # noqa: MPG901\n",
        "# mpguard: ignore-file\nalpha\n",
        "alpha\n# mpguard: ignore-file[MPG901] generated\n",
    ],
)
def test_suppressed(tmp_path: Path, make_rule: MakeRule, code: str) -> None:
    assert found(report(tmp_path, code, make_rule("MPG901", "alpha"), selectors=Selectors(ignore=("MPG00",)))) == []


@pytest.mark.parametrize(
    "code",
    [
        "alpha  # noqa: E501\n",
        "alpha  # noqa: MPG902\n",
        "alpha  # mpguard: ignore[MPG902]\n",
        "alpha  # see mpguard rule MPG901\n",
        "alpha; '# noqa'\n",
        "'''\n# mpguard: ignore-file\n'''\nalpha\n",
        "beta  # noqa: MPG901\nalpha\n",
        "f(  # noqa: MPG901\n    alpha,\n)\n",
        "if alpha:\n    pass  # noqa: MPG901\n",
        "beta  # mpguard: ignore[MPG901]\nalpha\n",
    ],
)
def test_not_suppressed(tmp_path: Path, make_rule: MakeRule, code: str) -> None:
    result = report(tmp_path, code, make_rule("MPG901", "alpha"), selectors=Selectors(ignore=("MPG00",)))
    assert [code for code, _ in found(result)] == ["MPG901"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x  # noqa: MPG901\n", "x\n"),
        ("x  # noqa: E501, MPG901\n", "x  # noqa: E501\n"),
        ("x  # mpguard: ignore[MPG901, MPG902] why\nalpha  # mpguard: ignore[MPG902, MPG901] why\n",
         "x\nalpha  # mpguard: ignore[MPG901] why\n"),
        ("x  # mpguard: ignore\n", "x\n"),
        ("x  # mpguard: ignore-file[MPG901] old  # type: ignore\n", "x  # type: ignore\n"),
        ("# mpguard: ignore-file[MPG901]\nx\n", "x\n"),
        ("def f():\n    # mpguard: ignore[MPG901]\n    return 1\n", "def f():\n    return 1\n"),
        ("x  # mpguard: ignore[MPG901]", "x"),
    ],
)  # fmt: skip
def test_unused_suppressions_are_removed(tmp_path: Path, make_rule: MakeRule, code: str, expected: str) -> None:
    made = make_rule("MPG901", "alpha"), make_rule("MPG902", "beta")
    result = report(tmp_path, code.encode(), *made)
    assert {code for code, _ in found(result)} == {"MPG002"}
    fixed = report(tmp_path, code.encode(), *made, fix="safe")
    assert fixed.fix_result is not None
    assert fixed.fix_result.after.decode() == expected
    assert fixed.findings == ()


@pytest.mark.parametrize(
    "code",
    ["x  # noqa\n", "x  # noqa: E501\n", "alpha  # noqa\n", "x  # mpguard: ignore[MPG002]\n", "x = '# noqa: MPG901'\n"],
)
def test_suppressions_that_are_not_judged(tmp_path: Path, make_rule: MakeRule, code: str) -> None:
    assert found(report(tmp_path, code, make_rule("MPG901", "alpha"))) == []


def test_codes_that_did_not_run_are_not_judged(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha"), make_rule("MPG902", "beta")
    some = Selectors(select=("MPG902", "MPG002"))
    assert found(report(tmp_path, "x  # noqa: MPG901\ny  # mpguard: ignore\n", *made, selectors=some)) == []
    assert found(report(tmp_path, "x  # noqa: MPG902\n", *made, selectors=some)) == [("MPG002", 1)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x  # noqa: MPG9001\n", "there is no rule `MPG9001`; did you mean `MPG901` (made-mpg901)"),
        ("x  # mpguard: ignore[F401]\n", "there is no rule `F401`"),
        ("x  # mpguard: ignoer[MPG901]\n", "`mpguard: ignoer` is not a suppression and has no effect"),
        ("x  # mpguard: disable=MPG901\n", "`mpguard: disable` is not a suppression and has no effect"),
        ("x  # mpguard: noqa\n", "`mpguard: noqa` is not a suppression and has no effect"),
        ("x  # mpguard: ignore[] \n", "`mpguard: ignore[]` names no code and has no effect"),
    ],
)
def test_suppressions_that_mean_nothing(tmp_path: Path, make_rule: MakeRule, code: str, message: str) -> None:
    (finding,) = report(tmp_path, code, make_rule("MPG901", "alpha")).findings
    assert (finding.code, finding.message[: len(message)]) == ("MPG001", message)


def test_yaml_comments_suppress(tmp_path: Path) -> None:
    path = tmp_path / "mp.yaml"
    path.write_text(
        "distributed_type: FSDP\n# mpguard: ignore[MPG801] an older accelerate reads it\nfp8_config:\n"
        "  recipe: x  # noqa: MPG801\n  note: 'a # noqa: MPG801'\n  # mpguard: ignore[MPG801]\n  other: y\n"
    )
    (result,) = Engine(rules(own_only=True), Options()).run([Target(str(path), "config", named=True)])
    assert found(result) == [("MPG002", 2), ("MPG801", 5)]


# -- fixes --------------------------------------------------------------------------------------------


def test_fixes_of_one_round_and_of_the_next(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha", becomes="beta"), make_rule("MPG902", "beta", becomes="gamma")
    result = report(tmp_path, "alpha = beta\n", *made, fix="safe")
    assert result.fix_result is not None
    assert (result.fix_result.after, result.fix_result.fixes, found(result)) == (b"gamma = gamma\n", 3, [])


def test_unsafe_fixes_only_when_asked(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha", becomes="beta", safe=False)
    result = report(tmp_path, "alpha\n", made, fix="safe")
    assert (result.fix_result, found(result)) == (None, [("MPG901", 1)])
    result = report(tmp_path, "alpha\n", made, fix="unsafe")
    assert result.fix_result is not None and result.fix_result.after == b"beta\n"


def test_rules_that_undo_each_other_end(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha", becomes="beta"), make_rule("MPG902", "beta", becomes="alpha")
    result = report(tmp_path, "alpha\n", *made, fix="safe")
    assert result.fix_result is not None
    assert "rounds of fixes there are still more" in result.fix_result.problems[0]


def test_a_fix_that_breaks_the_file_is_not_applied_and_the_others_are(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha", becomes="(("), make_rule("MPG902", "beta", becomes="gamma")
    result = report(tmp_path, "beta\nalpha\nbeta\n", *made, fix="safe")
    assert result.fix_result is not None
    assert result.fix_result.after == b"gamma\nalpha\ngamma\n"
    assert result.fix_result.problems == (
        "2:1: the fix of MPG901 (Write (() was not applied: the result does not parse",
    )
    assert found(result) == [("MPG901", 2)]


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfalpha = 1\nx = 1\n",
        b"# coding: latin-1\nx = '\xe9'\nalpha = 1\n",
        b"x = 1\r\nalpha = 2\r\ny = 3\r\n",
        b"x = 1\ralpha = 2\r",
        b"x = 1\r\nalpha = 2\ny = 3\r",
        b"x = 1\n\x0calpha = 2",
    ],
    ids=["bom", "latin-1", "crlf", "cr", "mixed", "form feed, no final newline"],
)
def test_bytes_around_a_fix_are_kept(tmp_path: Path, make_rule: MakeRule, data: bytes) -> None:
    result = report(tmp_path, data, make_rule("MPG901", "alpha", becomes="beta"), fix="safe")
    assert result.fix_result is not None
    assert result.fix_result.after == data.replace(b"alpha", b"beta")


def test_new_lines_end_as_the_others_do(tmp_path: Path, make_rule: MakeRule) -> None:
    result = report(tmp_path, b"x = 1\r\nalpha\r\n", make_rule("MPG901", "alpha", becomes="y = 1\nbeta"), fix="safe")
    assert result.fix_result is not None
    assert result.fix_result.after == b"x = 1\r\ny = 1\r\nbeta\r\n"


def test_a_fix_that_the_encoding_cannot_hold(tmp_path: Path, make_rule: MakeRule) -> None:
    result = report(tmp_path, b"# coding: latin-1\nalpha\n", make_rule("MPG901", "alpha", becomes="'π'"), fix="safe")
    assert result.fix_result is not None
    assert result.fix_result.after == result.fix_result.before
    assert "the file's encoding (latin-1) cannot hold 'π'" in result.fix_result.problems[0]


# -- selection ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (Selectors(), {"MPG901", "MPG911"}),
        (Selectors(select=("MPG901",)), {"MPG901"}),
        (Selectors(select=("MPG9",)), {"MPG901", "MPG911"}),
        (Selectors(select=("ALL",), ignore=("MPG91",)), {"MPG901"}),
        (Selectors(ignore=("MPG9",), extend_select=("MPG901",)), {"MPG901"}),
        (Selectors(ignore=("MPG901",)), {"MPG911"}),
        (Selectors(extend_select=("MPG921",)), {"MPG901", "MPG911", "MPG921"}),
        (Selectors(extend_select=("MPG92",)), {"MPG901", "MPG911"}),
        (Selectors(extend_select=("MPG92",), preview=True), {"MPG901", "MPG911", "MPG921"}),
        (Selectors(select=("ALL",), preview=True), {"MPG901", "MPG911", "MPG921"}),
    ],
)
def test_selection(tmp_path: Path, make_rule: MakeRule, selectors: Selectors, expected: set[str]) -> None:
    made = make_rule("MPG901", "alpha"), make_rule("MPG911", "beta"), make_rule("MPG921", "gamma", preview=True)
    assert {code for code, _ in found(report(tmp_path, "alpha, beta, gamma\n", *made, selectors=selectors))} == expected


def test_settings_select_and_the_command_line_replaces_it(tmp_path: Path, make_rule: MakeRule) -> None:
    (tmp_path / "mpguard.toml").write_text("select = ['MPG901']\n[per-file-ignores]\n'gen/*' = ['MPG9']\n")
    made = make_rule("MPG901", "alpha"), make_rule("MPG911", "beta")
    assert found(report(tmp_path, "alpha\nbeta\n", *made)) == [("MPG901", 1)]
    assert found(report(tmp_path, "alpha\nbeta\n", *made, selectors=Selectors(select=("MPG911",)))) == [("MPG911", 2)]
    (tmp_path / "gen").mkdir()
    (tmp_path / "gen" / "a.py").write_text("alpha\n")
    (result,) = engine(*made).run([Target(str(tmp_path / "gen" / "a.py"), "python")])
    assert found(result) == []


# -- workers ------------------------------------------------------------------------------------------


def many(tmp_path: Path, count: int) -> list[Target]:
    targets = []
    for number in range(count):
        path = tmp_path / f"f{number:03}.py"
        path.write_text("alpha\n" * (number % 7 + 1))
        targets.append(Target(str(path), "python", size=path.stat().st_size))
    return targets


def test_workers_find_the_same_in_the_same_order(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha")
    targets = many(tmp_path, 60)
    alone = engine(made).run(targets, jobs=1)
    assert sum(len(each.findings) for each in alone) == sum(number % 7 + 1 for number in range(60))
    assert engine(made).run(targets, jobs=3) == alone


def test_a_worker_that_dies_takes_only_its_file_with_it(tmp_path: Path, make_rule: MakeRule) -> None:
    def check(self: Rule, facts: Any) -> Iterator[Diagnostic]:
        if facts.path.endswith(("f005.py", "f011.py")):
            faulthandler.disable()  # pytest's, which would print a traceback
            os.kill(os.getpid(), signal.SIGSEGV)
        yield self.at((0, 5))

    reports = engine(make_rule("MPG901", "alpha", check=check)).run(many(tmp_path, 40), jobs=2)
    dead = [each for each in reports if each.findings[0].code == "MPG000"]
    assert [Path(each.target.path).name for each in dead] == ["f005.py", "f011.py"]
    assert "was killed by SIGSEGV" in dead[0].findings[0].message
    assert all(found(each) == [("MPG901", 1)] for each in reports if each not in dead)


BESIDE_AN_IDLE_ONE = """
import os, selectors
from mpguard.lint.run import workers
pool = workers._Pool(range(4), lambda task: task, None, lambda task: 1, 2, on_progress=None)
idle = workers._Worker(0, -1, os.pipe()[0], [], bytearray())
pool._workers.append(idle)
with selectors.DefaultSelector() as selector:
    pool._start(selector)
    pool._workers.remove(idle)
    while pool._workers:
        for key, _ in selector.select():
            pool._receive(key.data, selector)
print(sorted(pool._results))
"""


def test_a_worker_is_started_beside_one_that_has_nothing_left_to_do() -> None:
    """Where one has died. The pipe of the other is closed, and what raises in a child makes it a second parent."""
    command = [sys.executable, "-c", BESIDE_AN_IDLE_ONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3]\n", "")


CTRL_C = """
import sys, time
sys.path[:0] = {tests!r}
from pathlib import Path
from test_engine import engine, many
from mpguard.lint.model.rule import Rule
class Slow(Rule):
    code, name, severity, message = "MPG999", "slow", "error", "slow"
    def check(self, facts):
        Path(facts.path + ".begun").touch()
        time.sleep(60)
        return iter(())
from mpguard.cli import main
engine(Slow).run(many(Path({folder!r}), 12), jobs=2)
"""


@pytest.mark.parametrize("whole_group", [True, False], ids=["Ctrl-C", "only the parent"])
def test_an_interrupt_ends_all_workers(tmp_path: Path, whole_group: bool) -> None:
    code = CTRL_C.format(tests=[str(TESTS / "lint" / "run"), str(TESTS / "support")], folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.begun"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(workers) == 2
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=seconds(30))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert error.rstrip().endswith("KeyboardInterrupt"), "one traceback at most, of the parent"
    assert error.count("Traceback") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_unreadable_files_in_a_folder_are_findings(tmp_path: Path, make_rule: MakeRule) -> None:
    gone = Target(str(tmp_path / "gone.py"), "python")
    closed = Target(str(tmp_path), "python", problem="the folder cannot be read: no permission to read it")
    first, second = engine(make_rule("MPG901", "alpha")).run([gone, closed])
    assert [(f.code, f.message) for f in first.findings] == [
        ("MPG000", "the file cannot be read: No such file or directory")
    ]
    assert second.findings[0].message == closed.problem


def test_mode_bits_are_a_files_own(tmp_path: Path) -> None:
    """`--fix` keeps them: through the command line, since the engine writes nothing."""
    from mpguard.cli import main

    path = tmp_path / "mp.yaml"
    path.write_text("distributed_type: FSDP\nfp8_config: {amax_history_length: 16}\n")
    path.chmod(0o640)
    assert main(["lint", "--fix", str(path)]) == 0
    assert path.read_text() == "distributed_type: FSDP\nfp8_config: {amax_history_len: 16}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
