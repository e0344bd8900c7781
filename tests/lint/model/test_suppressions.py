"""Comments that suppress findings: which findings they suppress, and what is reported about them."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_rules import MakeRule, found, report

from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target


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
