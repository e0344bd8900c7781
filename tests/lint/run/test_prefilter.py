"""The prefilter: a rule runs wherever it could report something, and few files are parsed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rule_cases import examples, file_name

from mpguard.lint.facts.file import Facts
from mpguard.lint.model.rule import Rule, any_of, rules
from mpguard.lint.run import prefilter
from mpguard.lint.source.source import Source
from mpguard.lint.source.strip_comments import stripped

REASON = "the sample is the code of the frameworks"
accelerate = pytest.importorskip("accelerate", reason=REASON)
deepspeed = pytest.importorskip("deepspeed", reason=REASON)
torchao = pytest.importorskip("torchao", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

PYTHON = [rule for rule in rules(own_only=True).values() if issubclass(rule, Rule)]


def sources() -> Iterator[Path]:
    """Files of the libraries that this project is about; of transformers every thirtieth."""
    yield from sorted(Path(accelerate.__file__).parent.rglob("*.py"))
    yield from sorted(Path(torchao.__file__).parent.joinpath("float8").rglob("*.py"))
    yield from sorted(Path(deepspeed.__file__).parent.joinpath("runtime").rglob("*.py"))[::4]
    yield from sorted(Path(transformers.__file__).parent.rglob("*.py"))[::60]


def test_a_conjunction_of_alternatives() -> None:
    triggers = (any_of(b"half", b"float16"), any_of(b"backward"))
    assert prefilter.matches(triggers, b"x.half(); loss.backward()")
    assert not prefilter.matches(triggers, b"x.half()")
    assert prefilter.matches((), b"")


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (b"# x.half()\nx = 1", b"\nx = 1"),
        (b'"""x.half()"""\ny', b"\ny"),
        (b"'''a\n\"\"\" # '''z", b"z"),
        (b"x = '# half' # b", b"x = '# half' "),
        (b"x = \"'''\"; y.half() # '''", b"x = \"'''\"; y.half() "),
        (b'f"""{x.half()}"""', b'f"""{x.half()}"""'),
        (rb"x = '\'' # half", rb"x = '\'' "),
    ],
)
def test_comments_and_docstrings_do_not_count(code: bytes, left: bytes) -> None:
    assert stripped(code) == left


def test_a_rule_that_is_not_asked_has_nothing_to_say() -> None:
    """Triggers are necessary conditions: what all rules find without a gate, they find with it."""
    silent = 0
    for path in sources():
        data = path.read_bytes()
        asked = set(prefilter.relevant(data, PYTHON))
        others = [rule for rule in PYTHON if rule not in asked]
        if len(data) > 60_000 or not any(
            word in data for word in (b"half", b"float16", b"amp", b"Accelerator", b"step(")
        ):
            continue
        facts = Facts(Source.parse(data, str(path)))
        for rule in others:
            assert list(rule().check(facts)) == [], f"{path}: {rule.code}"
            silent += 1
    assert silent > 100


@pytest.mark.parametrize("rule", PYTHON, ids=lambda rule: rule.code)
def test_examples_pass_their_own_gate(rule: type[Rule]) -> None:
    """Those of its forms pass the gate of one of them."""
    forms = [each for each in (*rule.forms(), rule) if issubclass(each, Rule)]
    for example in examples(rule):
        if "# !" in example.code and file_name(rule, example).endswith(".py"):
            nearby = [text.encode() for text in example.files.values()]
            assert prefilter.relevant(example.code.encode(), forms, lambda nearby=nearby: nearby)


def test_little_is_parsed() -> None:
    """The regression to fear is a loose trigger: under 5 % of transformers may reach the parser, by whatever rule.

    A third of its files is read.
    """
    every = [each for rule in PYTHON for each in (*rule.forms(), rule) if issubclass(each, Rule)]
    read = parsed = 0
    for path in sorted(Path(transformers.__file__).parent.rglob("*.py"))[::3]:
        data = path.read_bytes()
        read += len(data)
        if prefilter.relevant(data, every):
            parsed += Facts(Source.parse(data, str(path))).parsed_bytes
    assert read > 6_000_000
    assert parsed < 0.05 * read
