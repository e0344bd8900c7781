"""What every fix has to keep, whatever its rule is about.

`check_edits` compares a file before and after the edits of one or more fixes:

- The result parses: Python with `ast.parse`, YAML and JSON with the reader of `mpguard.document`.
- Python: every call of the original is still reached, in the same order. A call is identified by the name that is
  called (the last one of a dotted name), at its offset. A name outside all replaced spans must be called in the result
  at the offset that the edits shift it to, within the same functions, loops, branches and handlers. A name inside a
  replaced span is one that the fix replaces on purpose; if the replacement calls it as well, it takes that place.
  The order is that of evaluation: arguments before the call, the value before the target, a loop's iterable before
  its body. `with` blocks are not compared, since fixes add, change and leave them.
- Python: a fix adds no statement that leaves a block (`return`, `raise`, `continue`, `break`), and inserts no call that
  stands in the same block already.
- Configs: each key outside the replaced spans keeps its value and the order among the others.

`shared_lines` derives from a program the variants in which statements share a line.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from mpguard.core.text_edits import Edit, apply_edits
from mpguard.document import Document, parse
from mpguard.document.nodes import Node

_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_AROUND = (
    *(ast.For, ast.AsyncFor, ast.While, ast.If, ast.IfExp, ast.ExceptHandler),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
#: Fields in the order of evaluation, where it is not that of the grammar.
_ORDER = {
    ast.Assign: ("value", "targets"),
    ast.AnnAssign: ("annotation", "value", "target"),
    ast.IfExp: ("test", "body", "orelse"),
    ast.ListComp: ("generators", "elt"),
    ast.SetComp: ("generators", "elt"),
    ast.GeneratorExp: ("generators", "elt"),
    ast.DictComp: ("generators", "key", "value"),
    ast.comprehension: ("iter", "target", "ifs"),
    ast.For: ("iter", "target", "body", "orelse"),
    ast.FunctionDef: ("decorator_list", "args", "body"),
    ast.ClassDef: ("decorator_list", "bases", "keywords", "body"),
}
_Around = tuple[tuple[str, int, str], ...]


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call: the span of the name that is called, its code, and what it stands in (type, offset, field)."""

    name: str
    start: int
    end: int
    code: str
    around: _Around


class _Program:
    """The calls of a program in the order of evaluation."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.calls = list(self._walk(self.tree, ()))
        self.exits = sum(isinstance(node, _EXITS) for node in ast.walk(self.tree))

    def offset(self, line: int, column: int) -> int:
        """Return the offset in code points of a position of `ast`, whose columns are UTF-8 bytes."""
        start = self._lines[line - 1]
        return start + len(self.text[start : self._lines[line]].encode()[:column].decode())

    def _walk(self, node: ast.AST, around: _Around) -> Iterator[_Call]:
        fields = _ORDER.get(type(node), node._fields)
        for field in fields:
            value = getattr(node, field, None)
            inside = around
            if isinstance(node, _AROUND) and field not in ("test", "iter", "decorator_list", "generators"):
                inside = (*around, (type(node).__name__, self.offset(node.lineno, node.col_offset), field))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, inside)
        if isinstance(node, ast.Call):
            func = node.func
            assert func.end_lineno is not None and func.end_col_offset is not None
            end = self.offset(func.end_lineno, func.end_col_offset)
            name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ")"
            yield _Call(name, end - len(name), end, ast.unparse(node), around)


class Shift:
    """Where the offsets of a text are after edits."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self.edits = sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.end))

    def offset(self, start: int, end: int) -> int | None:
        """Return the new start of a span; None where an edit replaces some of it."""
        moved = start
        for edit in self.edits:
            if edit.start < end and start < edit.end:
                return None
            if edit.end <= start:
                moved += len(edit.text) - (edit.end - edit.start)
        return moved

    def insertions(self) -> Iterator[tuple[int, int]]:
        """Yield the spans that are new and replace nothing."""
        moved = 0
        for edit in self.edits:
            if edit.start == edit.end:
                yield edit.start + moved, edit.start + moved + len(edit.text)
            moved += len(edit.text) - (edit.end - edit.start)

    def inserted(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the span of the new text of the edit that replaces a span."""
        moved = 0
        for edit in self.edits:
            if edit.start < end and start < edit.end:
                return edit.start + moved, edit.start + moved + len(edit.text)
            moved += len(edit.text) - (edit.end - edit.start)
        return None


def check_edits(before: str, edits: Sequence[Edit], name: str) -> str:
    """Apply edits to the text of a file; raise `AssertionError` where they break what the module's docstring states."""
    after = apply_edits(before, edits)
    if name.endswith((".yaml", ".yml", ".json")):
        _check_config(parse(before, name), parse(after, name), edits)
    elif name.endswith(".py"):
        _check_python(before, after, edits)
    return after


#: The result of one round of fixes is the program before the next.
_program = functools.lru_cache(maxsize=16)(_Program)


def _check_python(before: str, after: str, edits: Sequence[Edit]) -> None:
    old, new, shift = _program(before), _program(after), Shift(edits)
    places = {call.start: index for index, call in enumerate(new.calls)}
    sequence: list[int] = []
    for call in old.calls:
        moved = shift.offset(call.start, call.end)
        if moved is None:
            index = _rewritten(call, shift, new, sequence)
            if index is None:
                continue
        else:
            assert moved in places, f"the fix loses the call `{call.code}`"
            index = places[moved]
        _check_around(call, new.calls[index], shift)
        sequence.append(index)
    assert sequence == sorted(sequence), f"the fix changes the order of {[new.calls[i].code for i in sequence]}"
    assert len(sequence) == len(set(sequence))
    assert new.exits <= old.exits, "the fix adds a statement that leaves a block"
    there = {(new.calls[index].code, new.calls[index].around) for index in sequence}
    for index in set(range(len(new.calls))) - set(sequence):
        call = new.calls[index]
        inserted = any(start <= call.start < end for start, end in shift.insertions())
        assert not inserted or (call.code, call.around) not in there, (
            f"the fix adds `{call.code}` to a block that has it"
        )


def _rewritten(call: _Call, shift: Shift, new: _Program, used: list[int]) -> int | None:
    """Return the call of the same name in the text that replaces a call."""
    span = shift.inserted(call.start, call.end)
    assert span is not None
    for index, each in enumerate(new.calls):
        if each.name == call.name and span[0] <= each.start and each.end <= span[1] and index not in used:
            return index
    return None


def _check_around(old: _Call, new: _Call, shift: Shift) -> None:
    def moved(place: tuple[str, int, str]) -> tuple[str, int | None, str]:
        return place[0], shift.offset(place[1], place[1] + 1), place[2]

    expected = [moved(place) for place in old.around]
    found = [(kind, start if wanted[1] is not None else None, field)
             for (kind, start, field), wanted in zip(new.around, expected, strict=False)]  # fmt: skip
    assert len(new.around) == len(expected) and found == expected, f"the fix moves `{old.code}` to another block"


def _check_config(before: Document, after: Document, edits: Sequence[Edit]) -> None:
    assert not after.problems, [problem.message for problem in after.problems]
    shift = Shift(edits)
    kept = [(name, value) for name, value, span in _leaves(before.root) if shift.offset(*span) is not None]
    remaining = iter([(name, value) for name, value, _ in _leaves(after.root)])
    for leaf in kept:
        assert leaf in remaining, f"the fix loses, or moves, `{leaf[0]}: {leaf[1]}`"


def _leaves(node: Node | None) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield key, value and span of all keys whose value is no section."""
    for pair in node.pairs if node is not None else ():
        if pair.value.pairs:
            yield from _leaves(pair.value)
        else:
            yield pair.name, repr(pair.value.value), (pair.start, max(pair.end, pair.start + 1))


# -- variants ----------------------------------------------------------------------------------------


def shared_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield variants of a program, with names, in which statements share a line.

    Two neighbouring simple statements are joined with `;` (once the first with the second, the third with the
    fourth, once the second with the third); a block of one simple statement goes to the line of its header.
    """
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    fields = [getattr(node, name, None) for node in ast.walk(tree) for name in ("body", "orelse", "finalbody")]
    blocks = [each for each in fields if isinstance(each, list) and each and isinstance(each[0], ast.stmt)]
    for parity, name in ((0, "first with second"), (1, "second with third")):
        joins = [
            (one.lineno, two.lineno, "; ")
            for body in blocks
            for one, two in list(itertools.pairwise(body))[parity::2]
            if _simple(one, lines) and _simple(two, lines) and two.lineno == one.lineno + 1
        ]
        if joins:
            yield name, _joined(lines, joins)
    suites = [
        (node.lineno, node.body[0].lineno, " ")
        for node in ast.walk(tree)
        if isinstance(node, (ast.If, ast.For, ast.While, ast.With))
        and len(node.body) == 1
        and _simple(node.body[0], lines)
        and node.body[0].lineno == node.lineno + 1
        and lines[node.lineno - 1].rstrip().endswith(":")
    ]
    if suites:
        yield "block on the line of its header", _joined(lines, suites)


def _simple(node: ast.stmt, lines: list[str]) -> bool:
    """True if a statement has no block, and a line of its own without a comment."""
    line = lines[node.lineno - 1]
    rest = line.encode()[node.end_col_offset :].decode().strip()
    return (
        not hasattr(node, "body") and not isinstance(node, ast.Try)
        and node.lineno == node.end_lineno and not line[: node.col_offset].strip() and not rest
    )  # fmt: skip


def _joined(lines: list[str], joins: list[tuple[int, int, str]]) -> str:
    after = {first: sign for first, _, sign in joins}
    second = {number for _, number, _ in joins}
    parts = []
    for number, line in enumerate(lines, 1):
        part = line.lstrip() if number in second else line
        parts.append(part.rstrip("\r\n") + after[number] if number in after else part)
    return "".join(parts)
