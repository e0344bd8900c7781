"""Run the examples of all rules, and the cases of `cases/`, through the engine as a user runs it.

Each example becomes files in a folder. Exactly the marked lines must be reported; all fixes together must make the
difference that the example has, and the rule must report nothing in what they make. An example without a difference
must have no fix: no fix goes unchecked. `rule_cases` says how a file of cases is written.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import rule_cases
from rule_cases import named_examples

from mpguard.lint.model.result import FileReport
from mpguard.lint.model.retired import RETIRED
from mpguard.lint.model.rule import Bad, BaseRule, EngineRule, Example, Good, rules
from mpguard.lint.model.rule_page import page, unmarked
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target, kind_of

RULES = rules(own_only=True)
WORDS = {
    "BF16": re.compile(r"(?i)bf_?16|bfloat_?16"),
    # An autocast on CUDA and a scaler are FP16 without saying so.
    "FP16": re.compile(r"(?i)(?<!b)fp_?16|(?<!b)float_?16|\bhalf|autocast\(|scaler|scale_loss|loss_scale|['\"=]16"),
}
#: Messages that name a dtype which the program chooses without naming it.
IMPLIED = {
    "MPG704": '"medium" is BF16',
    "MPG821": "the dtype that torch_autocast has by default",
}
EXAMPLES = [pytest.param(rule, example, id=name) for rule, example, name in named_examples(RULES)]


def lint(rule: type[BaseRule], example: Example, code: str, folder: Path, fix: str | None = None) -> FileReport:
    """Check an example with its rule alone; with all rules if the engine itself reports it (suppressions need them)."""
    path = rule_cases.write(rule, example, folder, code)
    selectors = Selectors() if issubclass(rule, EngineRule) else Selectors(select=(rule.code,))
    engine = Engine(RULES, Options(selectors, fix=fix))
    kind = kind_of(path.name)
    assert kind is not None
    (report,) = engine.run([Target(str(path), kind, named=True)])
    assert not report.defects, report.defects[0].traceback
    return report


def lines(rule: type[BaseRule], report: FileReport) -> list[int]:
    return [finding.line for finding in report.findings if finding.code == rule.code]


def check(rule: type[BaseRule], example: Example, folder: Path) -> None:
    marked = [number for number, line in enumerate(example.code.splitlines(), 1) if line.endswith("# !")]
    assert bool(marked) == isinstance(example, Bad), "a Bad marks its lines with `# !`, a Good has none"
    code = unmarked(example.code)
    report = lint(rule, example, code, folder)
    assert lines(rule, report) == marked
    assert all(finding.help for finding in report.findings if finding.code == rule.code), "a finding says what to do"
    if not isinstance(example, Bad):
        return
    result = lint(rule, example, code, folder, fix="unsafe").fix_result
    expected = rule_cases.expected_difference(example)
    if expected is None:
        assert result is None, "the rule has a fix for it, and the example does not say what it makes"
        return
    assert result is not None, "there is no fix"
    assert not result.problems
    made = rule_cases.difference(code, result.after.decode())
    assert made == expected, f"the fixes make this difference, which the case does not have:\n{made}"
    assert lines(rule, lint(rule, example, result.after.decode(), folder)) == []


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_example(rule: type[BaseRule], example: Example, tmp_path: Path) -> None:
    check(rule, example, tmp_path / "project")


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_rule_is_whole(rule: type[BaseRule]) -> None:
    assert re.fullmatch(r"MPG\d{3}", rule.code)
    assert rule.__module__.rsplit(".", 1)[1] == rule.name.replace("-", "_"), "a rule is named as its file"
    assert rule.severity in ("error", "warning", "info")
    summary, _, rest = rule.page().partition("\n\n")
    assert summary.endswith("."), "the docstring begins with a sentence"
    assert "## Why is this bad" in rest
    bad, *good = rule.examples
    assert isinstance(bad, Bad) and all(isinstance(example, Good) for example in good)
    assert len(good) == (bad.fixed is None), "a rule has the examples of its page; the other cases are in cases/"
    fixed = any(rule_cases.expected_difference(example) is not None for example in rule_cases.examples(rule))
    assert rule.fixable() == fixed, "a rule whose cases alone have fixes has `fixes = True`"
    assert ("## Fix safety" in rest) == fixed, "a rule with a fix says how safe it is, and only such a one"


def test_one_rule_is_one_file() -> None:
    modules = [rule.__module__ for rule in RULES.values()]
    assert len(set(modules)) == len(modules)
    for module in modules:
        own = [
            v for v in vars(importlib.import_module(module)).values() if isinstance(v, type) and v.__module__ == module
        ]
        assert len([each for each in own if issubclass(each, BaseRule)]) == 1


def test_released_codes_stay() -> None:
    """Codes are an interface: suppressions and settings name them, and a retired one has a line in `retired.py`.

    A new rule needs no line here before its release.

    311, 508 and the gaps of groups 6 and 8 were never assigned.
    """
    released = (
        (0, 3), (101, 111), (201, 217), (301, 310), (312, 313), (401, 417), (501, 507), (509, 515), (601, 606),
        (609, 609), (701, 704), (801, 815), (821, 828), (841, 844), (861, 866),
    )  # fmt: skip
    assert {f"MPG{number:03}" for first, last in released for number in range(first, last + 1)} <= {*RULES, *RETIRED}
    assert list(RULES) == sorted(RULES)


def test_names_are_unique() -> None:
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_page_shows_an_example_without_marks(rule: type[BaseRule]) -> None:
    text = page(rule)
    assert text.startswith(f"# {rule.name} ({rule.code})")
    assert "## Example" in text and "# !" not in text


def test_each_file_of_cases_is_of_a_rule() -> None:
    rules_and_forms = {each for rule in RULES.values() for each in (rule, *rule.forms())}
    assert set(rule_cases.CASES.rglob("*.*")) <= {rule_cases.path_of(each) for each in rules_and_forms}


def test_each_form_has_cases_and_a_row_of_the_page() -> None:
    forms = [(rule, form) for rule in RULES.values() for form in rule.forms()]
    assert forms
    for rule, form in forms:
        cases = list(rule_cases.parse(rule_cases.path_of(form).read_text("utf-8"), form.__module__))
        assert any(isinstance(case, Bad) for case in cases) and any(isinstance(case, Good) for case in cases)
        assert form.fixes == any(case.difference is not None for case in cases), form
        summary, _, why = form.page().partition("\n\n")
        assert summary.endswith(".") and why, form
        assert " ".join(summary.split()).replace("|", "\\|") in page(rule)


# -- the driver fails where it must ------------------------------------------------------------------

WIZARD = "distributed_type: FSDP\nfp8_config:\n  amax_history_length: 16{}\n"
READ = "distributed_type: FSDP\nfp8_config:\n  amax_history_len: 16\n"


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(Good(WIZARD.format("")), id="a finding in good code"),
        pytest.param(Bad(READ + "# !"), id="no finding at a marked line"),
        pytest.param(Bad("distributed_type: FSDP # !\n" + WIZARD.format("")[23:]), id="another line"),
        pytest.param(Bad(WIZARD.format("  # !"), fixed=READ + "\n"), id="another result"),
        pytest.param(Bad("distributed_type: FSDP\nfp8_config:\n  recipe: x  # !\n", fixed=READ), id="no fix at all"),
        pytest.param(Bad(READ), id="nothing marked"),
        pytest.param(Bad(WIZARD.format("  # !")), id="a fix that is not checked"),
    ],
)
def test_the_driver_fails_on(wrong: Example, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(RULES["MPG801"], wrong, tmp_path / "project")
    check(RULES["MPG801"], Bad(WIZARD.format("  # !"), fixed=READ), tmp_path / "project")


CASE = """\
# a-rule (MPG999)

## A key that accelerate does not read

```yaml
fp8_config:
  amax: 1  # !
```

Text for readers.

```json conf/ds.json no-final-newline
{}
```

````markdown README.md
```
```
````

```python empty.py
```

```diff
@@ -2 +2 @@
-  amax: 1
+  length: 1
```
"""


def test_a_file_of_cases() -> None:
    (case,) = rule_cases.parse(CASE, "case.md")
    assert isinstance(case, Bad) and case.title == "A key that accelerate does not read"
    assert (case.name, case.code) == ("", "fp8_config:\n  amax: 1  # !\n")
    assert case.files == {"conf/ds.json": "{}", "README.md": "```\n```\n", "empty.py": ""}
    assert case.difference == "@@ -2 +2 @@\n-  amax: 1\n+  length: 1\n"
    (other,) = rule_cases.parse(CASE.replace("  # !", ""), "case.md")
    assert isinstance(other, Good)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("conf/ds.json no", "no", id="another file without a name"),
        pytest.param("empty.py", "README.md", id="one name for two files"),
        pytest.param("````\n\n", "", id="a block without an end"),
        pytest.param("```yaml", "```yaml a b", id="words behind the name"),
        pytest.param("## A key", "A key", id="a block before the first heading"),
        pytest.param("# a-rule (MPG999)", CASE.partition("\n\n")[2], id="two of a title"),
        pytest.param("# a-rule (MPG999)", "## Another\n", id="a case without a program"),
    ],
)
def test_a_file_of_cases_is_refused(old: str, new: str) -> None:
    assert old in CASE
    with pytest.raises(ValueError, match=r"case\.md: "):
        list(rule_cases.parse(CASE.replace(old, new, 1), "case.md"))


def test_a_difference_tells_texts_apart() -> None:
    """It has the numbers of lines, and says where a text has no final newline."""
    made = {rule_cases.difference("a\na\na\n", text) for text in ("a\na\n", "a\nb\na\n", "a\na\na", "a\na\na\n\n")}
    assert len(made) == 4
    assert rule_cases.difference("a\n", "a") == "@@ -1 +1 @@\n-a\n+a\n\\ No newline at end of file\n"


def to_fp16(text: str) -> str:
    return re.sub("bf16", "fp16", re.sub("bfloat16", "float16", text)).replace("BF16", "FP16")


def to_bf16(text: str) -> str:
    text = text.replace(".half()", ".bfloat16()").replace("torch.half", "torch.bfloat16")
    return re.sub(r"(?<!b)fp16", "bf16", re.sub(r"(?<!b)float16\b", "bfloat16", text))


def absent(program: str) -> list[str]:
    return [word for word, of in WORDS.items() if not of.search(program if word == "BF16" else without_bf16(program))]


def without_bf16(program: str) -> str:
    return WORDS["BF16"].sub("", program)


def wrong_messages(rule: type[BaseRule], example: Bad, folder: Path) -> list[str]:
    missing = absent(example.code + "".join(example.files.values()))
    if not missing:
        return []
    findings = lint(rule, example, unmarked(example.code), folder).findings
    return [
        each.message
        for each in findings
        if each.code == rule.code
        and not re.search("(?i)fp8|float8", each.message)  # FP8 is compared with what the run would be without it
        and any(re.search(rf"\b{word}\b", each.message) for word in missing)
    ]


@pytest.mark.parametrize("code", [code for code in RULES if code not in IMPLIED])
def test_messages_name_the_dtype_of_the_program(code: str, tmp_path: Path) -> None:
    """Each bad example is linted as it is, and with FP16 and BF16 exchanged, which the rule may still report or not."""
    bad = [each for each in rule_cases.examples(RULES[code]) if isinstance(each, Bad)]
    for number, example in enumerate(bad):
        for change in (str, to_fp16, to_bf16):
            files = {name: change(text) for name, text in example.files.items()}
            changed = dataclasses.replace(example, code=change(example.code), files=files)
            if change is str or changed != example:
                assert wrong_messages(RULES[code], changed, tmp_path / f"{number}-{change.__name__}") == []
