"""Laws that hold for the fixes of all rules, over every example and over variants of it; see `fix_laws`."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import fix_laws
import pytest
import rule_cases
from rule_cases import named_examples

from mpguard.core.text_edits import Edit, apply_edits, compatible
from mpguard.lint.model.result import FileCheck
from mpguard.lint.model.rule import Bad, BaseRule, ConfigRule, EngineRule, Example, Fix, rules
from mpguard.lint.model.rule_page import unmarked
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.run.fixer import MOST_ROUNDS
from mpguard.lint.source.files import Target, kind_of

RULES = rules(own_only=True)
EXAMPLES = [
    pytest.param(rule, example, id=name)
    for rule, example, name in named_examples(RULES)
    if rule.fixable() and isinstance(example, Bad)
]


class _Engine(Engine):
    """An engine that takes the check of a text from those that other engines have made, if there is one."""

    checks: dict[str, FileCheck]

    def content(self, data: bytes, target: Target, with_project: bool = False) -> FileCheck:
        return self.checks.get(data.decode()) or super().content(data, target, with_project)


@dataclasses.dataclass
class Project:
    """An example as files in a folder, checked by some rules."""

    path: Path
    selectors: Selectors
    checks: dict[str, FileCheck] = dataclasses.field(default_factory=dict)

    def check(self, text: str) -> FileCheck:
        """Check a text with a new engine, once: the end of a round is the start of the next."""
        if text not in self.checks:
            self.path.write_text(text)
            engine = Engine(RULES, Options(self.selectors))
            checked = engine.content(text.encode(), self.target)
            assert not checked.defects, checked.defects[0].traceback
            self.checks[text] = checked
        return self.checks[text]

    def fixed(self, text: str) -> str | None:
        """Return what all fixes together make of a text; None where there is none to apply."""
        self.path.write_text(text)
        engine = _Engine(RULES, Options(self.selectors, fix="unsafe"))
        engine.checks = self.checks
        (report,) = engine.run([self.target])
        assert not report.defects, report.defects[0].traceback
        if report.fix_result is None:
            return None
        assert not report.fix_result.problems, report.fix_result.problems
        return report.fix_result.after.decode()

    @property
    def target(self) -> Target:
        kind = kind_of(self.path.name)
        assert kind is not None
        return Target(str(self.path), kind, named=True)


def project(rule: type[BaseRule], example: Example, folder: Path, selectors: Selectors) -> Project:
    return Project(rule_cases.write(rule, example, folder), selectors)


def fixes(checked: FileCheck) -> Iterator[tuple[str, int, Fix]]:
    for diagnostic in checked.diagnostics:
        if diagnostic.fix is not None and diagnostic.fix.edits:
            yield diagnostic.code, diagnostic.span[0], diagnostic.fix


def check_fixes(files: Project, text: str, *, independent: bool = False) -> None:
    """Apply the fixes in rounds, as the engine does, and check each of them alone and all of a round together.

    independent: let one engine do all rounds again without the checks that were made here.
    """
    name, before = files.path.name, text
    for _ in range(MOST_ROUNDS):
        checked = files.check(text)
        edits: list[Edit] = []
        chosen: list[tuple[str, int, Fix]] = []
        available = sorted(fixes(checked), key=lambda each: each[1])
        for code, start, fix in available:
            if len(available) > 1:  # a single fix is checked below
                fix_laws.check_edits(text, fix.edits, name)
            if compatible(edits, fix.edits):
                edits += fix.edits
                chosen.append((code, start, fix))
        if not chosen:
            break
        after = fix_laws.check_edits(text, edits, name)
        left = [(code, start) for code, start, _ in fixes(files.check(after))]
        shift = fix_laws.Shift(edits)
        for code, start, fix in chosen:
            assert (code, shift.offset(start, start + 1)) not in left, f"{code}: `{fix.title}` leaves its finding"
        text = after
    else:
        raise AssertionError(f"after {MOST_ROUNDS} rounds there are still fixes")
    if text != before:
        assert files.fixed(before) == text
        if independent:
            assert dataclasses.replace(files, checks={}).fixed(before) == text
        if name.endswith(".py"):
            ast.parse(text)
        assert files.fixed(text) is None, "fixes of a fixed file"


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_fixes(rule: type[BaseRule], example: Bad, tmp_path: Path) -> None:
    """The fixes of a rule's examples, by the rule alone and with all others."""
    text = unmarked(example.code)
    alone = Selectors() if issubclass(rule, EngineRule) else Selectors(select=(rule.code,))
    check_fixes(project(rule, example, tmp_path / "a" / "alone", alone), text, independent=True)
    check_fixes(project(rule, example, tmp_path / "b" / "all", Selectors()), text, independent=True)


@pytest.mark.parametrize(("rule", "example"), [each for each in EXAMPLES if not each.values[1].name])  # type: ignore[union-attr]
def test_fixes_of_statements_that_share_a_line(rule: type[BaseRule], example: Bad, tmp_path: Path) -> None:
    if issubclass(rule, (ConfigRule, EngineRule)):
        pytest.skip("the example is a config")
    for number, (name, text) in enumerate(fix_laws.shared_lines(unmarked(example.code))):
        files = project(rule, example, tmp_path / "a" / str(number), Selectors(select=(rule.code,)))
        try:
            check_fixes(files, text)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}\n{text}") from error


def test_two_fixes_that_insert_at_one_place(tmp_path: Path) -> None:
    """A new key of the last section, and a new section after it: the key must not end up in the new section."""
    files = project(RULES["MPG413"], Bad("", name="mp.yaml"), tmp_path / "a" / "b", Selectors())
    config = "distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config:\n  backend: AO\n"
    assert [finding.code for finding in files.check(config).findings] == ["MPG401", "MPG413"]
    assert files.fixed(config) == (
        f"{config}  enable_fsdp_float8_all_gather: false\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"
    )


# -- the laws fail where they must -------------------------------------------------------------------

STEP = """\
for x in loader:
    loss = model(x)
    loss.backward()
    if clip:
        clip_grad_norm_(parameters)
    optimizer.step()
"""
TWO = "first()\nsecond()\n"
CONFIG = "one: 1\nsection:\n  two: 2\n"


def edit(text: str, old: str, new: str) -> Edit:
    start = text.index(old)
    return Edit(start, start + len(old), new)


def inserted(before: str, new: str) -> Edit:
    return Edit(STEP.index(before), STEP.index(before), new)


@pytest.mark.parametrize(
    "edits",
    [
        [edit(STEP, "    optimizer.step()\n", "")],  # removed on purpose
        [edit(STEP, "loss.backward()", "scaler.scale(loss).backward()")],
        [inserted("for x", "scaler = GradScaler()\n"), edit(STEP, "optimizer.step()", "scaler.step(optimizer)")],
        [inserted("loss.backward", "1; ")],
    ],
)
def test_the_law_of_programs_permits(edits: list[Edit]) -> None:
    assert fix_laws.check_edits(STEP, edits, "example.py") == apply_edits(STEP, edits)


@pytest.mark.parametrize(
    ("edits", "problem"),
    [
        ([edit(STEP, "optimizer.step()", "optimizer.step(")], "was never closed"),
        ([edit(STEP, "    if clip:\n", "    while clip:\n")], "to another block"),
        ([edit(STEP, "    if clip:\n    ", "")], "to another block"),
        ([inserted("    if clip:", "    if x:\n        continue\n")], "leaves a block"),
        ([inserted("    optimizer", "    loss.backward()\n")], "that has it"),
        ([inserted("loss.backward", "text = '''"), inserted("    if clip", "    '''\n")], "loses the call"),
    ],
)
def test_the_law_of_programs_refuses(edits: list[Edit], problem: str) -> None:
    with pytest.raises((AssertionError, SyntaxError), match=problem):
        fix_laws.check_edits(STEP, edits, "example.py")


def test_the_law_of_the_order() -> None:
    with pytest.raises(AssertionError, match="order"):
        fix_laws.check_edits(TWO, [edit(TWO, TWO.rstrip(), "second()\nfirst()")], "example.py")
    with pytest.raises(AssertionError, match="order"):
        fix_laws.check_edits(TWO, [edit(TWO, TWO.rstrip(), "first(second())")], "example.py")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("two: 2\n", "two: 2\n  three: 3\n", None),
        ("section", "part", None),
        ("one: 1\n", "", None),
        ("one: 1\n", "one: [\n", "."),
        ("one: 1\nsection:\n", "section: |\n", "loses"),
    ],
)
def test_the_law_of_configs(old: str, new: str, problem: str | None) -> None:
    if problem is None:
        fix_laws.check_edits(CONFIG, [edit(CONFIG, old, new)], "mp.yaml")
        return
    with pytest.raises(AssertionError, match=problem):
        fix_laws.check_edits(CONFIG, [edit(CONFIG, old, new)], "mp.yaml")


def test_statements_that_share_a_line() -> None:
    variants = dict(fix_laws.shared_lines("a = 1  # comment\nb()\nc()\nd()\nif d:\n    e()\n"))
    assert variants == {
        "first with second": "a = 1  # comment\nb()\nc(); d()\nif d:\n    e()\n",
        "second with third": "a = 1  # comment\nb(); c()\nd()\nif d:\n    e()\n",
        "block on the line of its header": "a = 1  # comment\nb()\nc()\nd()\nif d: e()\n",
    }
