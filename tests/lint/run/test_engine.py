"""The engine with rules made for the test: what is reported, defects, files that cannot be checked."""

from __future__ import annotations

import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_rules import MakeRule, engine, found, report

from mpguard.lint.facts.file import Facts
from mpguard.lint.model.rule import Diagnostic, Note, Rule
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run import timeout
from mpguard.lint.source.files import Target


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
    assert f"{tmp_path / 'train.py'}: defect in MPG901 (of {broken.__module__}): ZeroDivisionError: oops" in str(defect)
    assert "ZeroDivisionError" in defect.traceback


def test_versions_that_cannot_be_found_out_are_a_defect_of_the_rule_that_names_them(
    tmp_path: Path, make_rule: MakeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(facts: Facts, library: str) -> None:
        raise ZeroDivisionError(library)

    monkeypatch.setattr(Facts, "required", fail)
    one, other = make_rule("MPG901", "alpha", versions={"torch": ">=2.4"}), make_rule("MPG902", "alpha")
    result = report(tmp_path, "alpha\n", one, other)
    assert [(finding.code, finding.line) for finding in result.findings] == [("MPG902", 1)]
    assert [(defect.code, "ZeroDivisionError: torch" in str(defect)) for defect in result.defects] == [("MPG901", True)]


def test_a_rule_that_recurses_without_end_is_a_defect_of_its_own(tmp_path: Path, make_rule: MakeRule) -> None:
    def endless(self: Rule, facts: Any) -> Any:
        return endless(self, facts)

    broken, other = make_rule("MPG901", "alpha", check=endless), make_rule("MPG902", "alpha")
    result = report(tmp_path, "alpha\n", broken, other)
    assert [(f.code, f.line) for f in result.findings] == [("MPG902", 1)]
    (defect,) = result.defects
    assert f"{tmp_path / 'train.py'}: defect in MPG901 (of {broken.__module__}): RecursionError" in str(defect)


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
