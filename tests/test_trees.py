"""Trees that are taken over from the version before say what fresh ones do: after random edits of all kinds."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mpguard.lint import source as source_module
from mpguard.lint import trees as module
from mpguard.lint.engine import Engine, Options
from mpguard.lint.files import Target
from mpguard.lint.rule import Bad, Rule, rules
from mpguard.lint.source import Chunk, Source
from mpguard.lint.trees import Trees

EXAMPLES = [
    example.code.replace("# !", "")
    for rule in rules(own_only=True).values()
    if issubclass(rule, Rule)
    for example in rule.examples
    if isinstance(example, Bad) and not example.files
]


def versions(seed: int) -> Iterator[str]:
    """A program of several examples, edited as people do: lines doubled, removed, moved, broken, mended."""
    chance = random.Random(seed)
    lines = "\n".join(chance.sample(EXAMPLES, 3)).split("\n")
    yield "\n".join(lines)
    for _ in range(12):
        before = list(lines)
        for _ in range(chance.randint(1, 3)):
            place, other = chance.randrange(len(lines)), chance.randrange(len(lines))
            match chance.choice((0, 1, 2, 3, 3, 4, 4, 4)):
                case 0:
                    lines.insert(other, lines[place])
                case 1 if len(lines) > 5:
                    del lines[place]
                case 2:
                    lines[place], lines[other] = lines[other], lines[place]
                case 3:
                    lines[place] = lines[place].replace("float16", "bfloat16").replace("scaler", "other")
                case _:
                    lines += ["", *chance.choice(EXAMPLES).split("\n")]  # often the same statements again
        yield "\n".join(lines)
        if chance.random() < 0.2 or not parses("\n".join(lines)):
            lines = before
            yield "\n".join(lines)


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("seed", range(12))
def test_findings_are_those_of_a_fresh_engine(seed: int) -> None:
    kept = Engine(rules(own_only=True), Options())
    kept.trees = Trees()
    useful = 0
    for text in versions(seed):
        target = Target("train.py", "python", named=True, data=text.encode())
        report, fresh = kept.check(target), Engine(rules(own_only=True), Options()).check(target)
        assert (report.findings, report.defects) == (fresh.findings, fresh.defects), text
        useful += any(finding.code != "MPG000" for finding in report.findings)
    assert useful > 8, "not all of them are syntax errors"


def test_what_has_not_changed_is_not_parsed_again_and_serves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    trees, parse = Trees(), source_module._parsed

    def counted(code: str) -> Any:
        parsed.append(code)
        return parse(code)

    monkeypatch.setattr(source_module, "_parsed", counted)

    def chunks(text: str) -> tuple[Chunk, ...]:
        parsed.clear()
        source = Source.parse(text.encode(), "a.py")
        trees.begin(source)
        for chunk in source.chunks:
            assert chunk.module.code == chunk.text
            assert chunk.span(chunk.module.body[0])[0] >= chunk.start
        return source.chunks

    first = chunks("a = 1\nb = 2\n")
    second = chunks("a = 1\nc = 3\nb = 2\n")
    assert parsed == ["c = 3\n"]
    assert second[0].module is first[0].module
    third = chunks("a = 1\na = 1\nb = 2\n")
    assert parsed == ["a = 1\n"], "two statements never share nodes"
    assert third[0].module is not third[1].module


def test_only_so_many_files_are_kept() -> None:
    trees = Trees()
    for number in range(module.MOST + 3):
        trees.begin(Source.parse(b"a = 1\n", f"{number}.py"))
    assert len(trees._last) == module.MOST
