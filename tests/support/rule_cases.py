"""Examples of mpguard's own rules: those of their pages, and the cases of `tests/lint/rules/cases`.

A file of cases, `<group>/<rule>.md`, is Markdown. A case is a heading of the second level, which says what it shows,
and fenced blocks:

- first the program, with `# !` at the end of each line that is reported;
- the other files of its folder, each named behind the language of its block;
- a `diff` of what all fixes together change, if there are fixes.

The program has the name of the rule's own examples unless its block names another. A text without a final newline says
so behind its name. Text between the blocks is for readers.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from paths import REPOSITORY

from mpguard.lint.model.rule import Bad, BaseRule, ConfigRule, Example, Good
from mpguard.lint.model.rule_page import unmarked

CASES = REPOSITORY / "tests" / "lint" / "rules" / "cases"
_NO_NEWLINE = "no-final-newline"
_FENCE = re.compile(rf"(`{{3,}})(\w+)(?: (?!{_NO_NEWLINE}$)(\S+))?( {_NO_NEWLINE})?")


@dataclasses.dataclass(frozen=True)
class Case(Example):
    """A case of a file. difference: what its fixes change; None where there are none."""

    title: str = ""
    difference: str | None = None


@dataclasses.dataclass(frozen=True)
class Reported(Case, Bad):
    """A case with reported lines."""


@dataclasses.dataclass(frozen=True)
class Silent(Case, Good):
    """A case without a finding."""


def path_of(rule: type[BaseRule]) -> Path:
    group, name = rule.__module__.split(".")[-2:]
    return CASES / group / f"{name}.md"


@functools.cache
def examples(rule: type[BaseRule]) -> tuple[Example, ...]:
    """Return the examples of a rule's page, then its cases, and those of its forms."""
    cases: list[Example] = []
    for each in (rule, *rule.forms()):
        path = path_of(each)
        for case in parse(path.read_text("utf-8"), str(path)) if path.exists() else ():
            cases.append(case if each is rule else dataclasses.replace(case, name=file_name(each, case)))
    return (*rule.examples, *cases)


def named_examples(rules: dict[str, type[BaseRule]]) -> Iterator[tuple[type[BaseRule], Example, str]]:
    """Yield each example with its rule and an identifier for a test."""
    for code, rule in rules.items():
        for number, example in enumerate(examples(rule)):
            words = re.findall(r"\w+", example.title.lower()) if isinstance(example, Case) else [kind(example)]
            yield rule, example, f"{code}-{number}-{'-'.join(words)}"


def kind(example: Example) -> str:
    return "bad" if isinstance(example, Bad) else "good"


def file_name(rule: type[BaseRule], example: Example) -> str:
    return example.name or ("mp.yaml" if issubclass(rule, ConfigRule) else "example.py")


def write(rule: type[BaseRule], example: Example, folder: Path, code: str | None = None) -> Path:
    """Write the files of an example, without marks, into a folder; return the path of the program."""
    path = folder / file_name(rule, example)
    texts = {folder / name: text for name, text in example.files.items()}
    for file, text in {**texts, path: example.code if code is None else code}.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(unmarked(text), "utf-8")
    return path


def expected_difference(example: Example) -> str | None:
    """Return what the fixes of an example change, as `difference` has it; None if there are no fixes."""
    if isinstance(example, Case):
        return example.difference
    if isinstance(example, Bad) and example.fixed is not None:
        return difference(unmarked(example.code), example.fixed)
    return None


def difference(before: str, after: str) -> str:
    """Return a unified diff without file names."""
    lines = list(difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), n=1))[2:]
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return "".join("\n" if line == " \n" else line for line in ended)


@dataclasses.dataclass(frozen=True)
class _Block:
    language: str
    name: str
    text: str


def parse(text: str, path: str) -> Iterator[Case]:
    """Yield the cases of a file. Raises ValueError where it is not as the first lines of this module say."""
    titles: set[str] = set()
    for title, blocks in _sections(text, path):
        place = f"{path}: ## {title}"
        if not title or title in titles:
            raise ValueError(f"{place}: a case needs a heading of its own")
        titles.add(title)
        if not blocks or blocks[0].language == "diff":
            raise ValueError(f"{place}: the first block is the program")
        program, *others = blocks
        changes = others.pop().text if others and others[-1].language == "diff" else None
        files = {each.name: each.text for each in others}
        if "" in files or len(files) < len(others):
            raise ValueError(f"{place}: each other file needs a name of its own, and the diff comes last")
        shape = Reported if unmarked(program.text) != program.text else Silent
        yield shape(program.text, files=files, name=program.name, title=title, difference=changes)


def _sections(text: str, path: str) -> Iterator[tuple[str, list[_Block]]]:
    title: str | None = None
    blocks: list[_Block] = []
    lines = iter(text.split("\n"))
    for line in lines:
        if line.startswith("## "):
            if title is not None:
                yield title, blocks
            title, blocks = line[3:].strip(), []
        elif line.startswith("```"):
            opening = _FENCE.fullmatch(line)
            if title is None:
                raise ValueError(f"{path}: {line}: each case begins with a line `## what it shows`, and none is above")
            if opening is None:
                raise ValueError(f"{path}: {line}: a block of a case begins with ```language, or ```language name")
            fence, language, name, unfinished = opening.groups()
            content: list[str] = []
            for inner in lines:
                if inner == fence:
                    break
                content.append(inner)
            else:
                raise ValueError(f"{path}: {line}: the block has no end")
            whole = "".join(f"{each}\n" for each in content)
            blocks.append(_Block(language, name or "", whole.removesuffix("\n") if unfinished else whole))
    if title is not None:
        yield title, blocks
