"""Trees that are taken over from the version before, whole or in pieces, equal fresh ones, and give equal findings."""

from __future__ import annotations

import ast
import gc
import random
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libcst as cst
import pytest
from rule_cases import examples
from samples import package_files

from mpguard.lint.model.rule import Bad, Rule, rules
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source import incremental as module
from mpguard.lint.source import libcst_internals, suites
from mpguard.lint.source.files import Target
from mpguard.lint.source.incremental import FileVersion, Tree, Trees
from mpguard.lint.source.source import Chunk, Source

EXAMPLES = [
    example.code.replace("# !", "")
    for rule in rules(own_only=True).values()
    if issubclass(rule, Rule)
    for example in examples(rule)
    if isinstance(example, Bad) and not example.files
]


@pytest.fixture(autouse=True)
def no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is checked as a file of an empty folder: rules would search this repository for what uses it."""
    monkeypatch.chdir(tmp_path)


def versions(seed: int) -> Iterator[str]:
    """A program of several examples, edited as people do: lines doubled, removed, moved, broken, fixed."""
    chance = random.Random(seed)
    while not reported(start := "\n".join(chance.sample(EXAMPLES, 3))):
        pass  # one of them begins with `from __future__`, or is an example of a preview rule
    lines = start.split("\n")
    yield start
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


def reported(text: str) -> bool:
    """True if a program has findings other than a syntax error."""
    report = Engine(rules(own_only=True), Options()).check(Target("train.py", "python", named=True, data=text.encode()))
    return any(finding.code != "MPG000" for finding in report.findings)


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def edited(seed: int) -> Iterator[str]:
    """Functions and classes with a suite in a suite, edited a character or a few lines at a time, and not fixed."""
    chance = random.Random(seed)
    around = ("class Trainer:\n", "class Trainer(Base):  # one\n    # two\n\n    def fit(self):\n", "def main():\n", "")
    parts = []
    for example in chance.sample(EXAMPLES, 5):
        opened = chance.choice(around)
        parts.append(opened + textwrap.indent(example, " " * 4 * (opened.count("    def") + bool(opened))))
    lines = "\n".join(parts).split("\n")
    typed = (
        '"""',
        "'",
        "(",
        ")",
        "#",
        ":",
        "\\",
        "x",
        " ",
        "    ",
        "\t",
        "]",
        "async ",
        "\n",
        "else:",
        "\n        # c\n",
    )
    good = list(lines)
    for _ in range(32):
        yield "\n".join(lines)
        place = chance.randrange(len(lines))
        end = min(place + chance.randint(1, 6), len(lines))
        match chance.choice(range(7)):
            case 0 | 1:
                line, at = lines[place], chance.randint(0, len(lines[place]))
                lines[place] = line[:at] + chance.choice(typed) + line[at:]
            case 2:
                lines[place:end] = [f"    {line}" for line in lines[place:end]]
            case 3:
                lines[place:end] = [line.removeprefix("    ") for line in lines[place:end]]
            case 4:
                lines.insert(place, f"{' ' * 4 * chance.randint(0, 3)}@torch.no_grad()")
            case 5:
                del lines[place:end]
            case _:
                lines.insert(
                    place, chance.choice(("", "# at the margin", "        # deep", "    ", "    def more(self):"))
                )
        if parses("\n".join(lines)):
            good = list(lines)
        elif chance.random() < 0.6:
            yield "\n".join(lines)
            lines = list(good)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "LEAST", 25)


def compare_with_fresh(texts: Iterator[str]) -> int:
    """Compare the findings with kept trees and with fresh ones; return the number of texts that have some."""
    kept = Engine(rules(own_only=True), Options())
    kept.trees = Trees()
    useful = 0
    for text in texts:
        target = Target("train.py", "python", named=True, data=text.encode())
        report, fresh = kept.check(target), Engine(rules(own_only=True), Options()).check(target)
        assert (report.findings, report.defects) == (fresh.findings, fresh.defects), text
        useful += any(finding.code != "MPG000" for finding in report.findings)
    return useful


@pytest.mark.parametrize("seed", range(8))
def test_findings_are_those_of_a_fresh_engine(seed: int) -> None:
    # The programs are drawn from the examples of the rules, so how many have findings changes with each new example.
    assert compare_with_fresh(versions(seed)) > 0, "not all of them are syntax errors"


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("first", range(0, 6, 3))
def test_findings_are_those_of_a_fresh_engine_whatever_is_typed_into_suites(first: int) -> None:
    # Examples may silence each other, so not each program has findings.
    assert sum(compare_with_fresh(edited(seed)) for seed in range(first, first + 3)) > 0


def nodes(tree: Tree) -> list[cst.CSTNode]:
    found, waiting = [], [tree.module]
    while waiting:
        found.append(node := waiting.pop())
        waiting += reversed(node.children)
    return found


def same(tree: Tree, fresh: Tree) -> None:
    """Two trees have the same nodes in the same places."""
    assert tree.module.deep_equals(fresh.module)
    for mine, theirs in zip(nodes(tree), nodes(fresh), strict=True):
        if not isinstance(mine, cst.MaybeSentinel) and theirs in fresh.placed[0].piece.spans:
            assert tree.spans(mine) == fresh.spans(theirs)


SAMPLE = [path for path in package_files("accelerate", "rich") if path.parent.name in ("accelerate", "rich")]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("path", SAMPLE, ids=lambda path: path.name)
def test_what_is_put_together_is_what_the_parser_makes_of_the_whole(path: Path) -> None:
    version = FileVersion({})
    for chunk in Source.parse(path.read_bytes(), str(path)).chunks:
        if len(chunk.text) < 20_000:
            same(version.parse(chunk.code), module.parse(chunk.code))


TRICKY = (
    '''\
@decorated
class Model(Base):  # one
    # two

    size = 1
    def first(self):
        if self.a:  # three
            for each in self.all:
                match each:
                    case 1:
                        return """
    not indented
"""
                    # of the case
                # of the for
            # of the if
        # of the function

        # the same

    # of the next
    async def second(self): return 1

    def third(
        self, a=(
            1,
        ),
    ):
'''
    "        \n" + """
        try:
            x = a \\
                + 1
        except* ValueError as error:
            raise
        else:
            pass
        finally: x = 2
"""
    "        \n    # of the class\n  # of nobody\n# of the module\n\n"
)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("step", range(0, len(TRICKY), 11))
def test_comments_and_blank_lines_go_where_the_parser_puts_them(step: int) -> None:
    """With the code as it is, and with a line or a comment put in anywhere."""
    version = FileVersion({})
    same(version.parse(TRICKY), module.parse(TRICKY))
    at = TRICKY.index("\n", step - 1) + 1 if "\n" in TRICKY[step:] else 0
    for put in ("\n", "# new\n", "        # new\n", "    # new\n", "            # new\n", " \n", "         \n"):
        code = TRICKY[:at] + put + TRICKY[at:]
        code = code[: len(code) - step % 7]  # the last newline, and a part of the last comment, may be gone
        version = FileVersion(version.known)
        try:
            fresh = module.parse(code)
        except cst.ParserSyntaxError:
            with pytest.raises(cst.ParserSyntaxError):
                version.parse(code)
        else:
            same(version.parse(code), fresh)


def test_what_has_not_changed_is_not_parsed_again_and_serves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    trees, parse = Trees(), libcst_internals.parse_module

    def counted(code: str) -> Any:
        parsed.append(code)
        return parse(code)

    monkeypatch.setattr(libcst_internals, "parse_module", counted)

    def chunks(text: str) -> tuple[Chunk, ...]:
        parsed.clear()
        source = Source.parse(text.encode(), "a.py")
        source.tree_of = trees.begin("a.py").parse
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


@pytest.mark.usefixtures("small_pieces")
def test_of_a_changed_class_one_suite_is_parsed_also_after_a_syntax_error(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = libcst_internals.parse_module
    monkeypatch.setattr(libcst_internals, "parse_module", lambda code: (parsed.append(code), parse(code))[1])
    methods = [f"    def f{n}(self):\n        x = {n}\n        return x + {n} + {n}\n\n" for n in range(9)]
    code = "class A:\n" + "".join(methods)
    version = FileVersion({})
    version.parse(code)
    assert len(parsed) == 2 + len(methods), "the statement, its suite, and theirs"
    for typed in (
        code.replace("x = 5", "x = 55"),
        code.replace("x = 5", "x = 5 +"),
        code.replace("x = 5", "x = 5 + 1"),
    ):
        parsed.clear()
        version = FileVersion(version.known)
        try:
            same(version.parse(typed), module.parse(typed))
        except cst.ParserSyntaxError:
            assert len(parsed) == 2 and parsed[1] == typed, "the whole statement is parsed, for the place of the error"
        else:
            assert len(parsed) == 2 and "x = 5" in parsed[0] and "x = 4" not in parsed[0]
    twice = f"{code}\n    def f5(self):\n        x = 5\n        return x + 5 + 5\n"
    version = FileVersion(version.known)
    one, other = version.parse(twice), version.parse(twice)
    assert not {*map(id, nodes(one))} & {*map(id, nodes(other))}, "no two statements, and no two suites share nodes"
    assert len({*map(id, nodes(one))}) == len(nodes(one))


@pytest.mark.usefixtures("small_pieces")
def test_what_was_typed_over_is_forgotten() -> None:
    trees, made = Trees(), []
    for number in range(9):
        code = "class A:\n    def f(self):\n        x = 0\n        return x + 1 + 1 + 1\n".replace("0", str(number))
        made += [weakref.ref(each.piece) for each in trees.begin("a.py").parse(code).placed]
    gc.collect()
    alive = {id(piece) for each in made if (piece := each()) is not None}
    assert len(alive) <= 4, "those of this version, and the suite of the one before"


def test_only_so_many_files_are_kept() -> None:
    trees = Trees()
    for number in range(module.MOST + 3):
        trees.begin(f"{number}.py").parse("a = 1\n")
    assert len(trees._last) == module.MOST
