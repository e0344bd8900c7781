"""Reading Python files: encodings, line endings, places, statements, and what must never reach the parser."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import libcst as cst
import pytest
from samples import package_files

from mpguard.lint.source.source import Source
from mpguard.lint.source.text import Unparsable

SAMPLE = package_files("accelerate", "rich")


def call_spans(source: Source) -> list[tuple[int, int]]:
    """Where all calls of a file stand."""

    def calls(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        if isinstance(node, cst.Call):
            yield node
        for child in node.children:
            yield from calls(child)

    return [chunk.span(node) for chunk in source.chunks for node in calls(chunk.module)]


def unparsable(data: bytes | str) -> Unparsable:
    with pytest.raises(Unparsable) as caught:
        Source.parse(data if isinstance(data, bytes) else data.encode(), "example.py")
    return caught.value


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        (b"x = 1\n", "utf-8", "x = 1\n"),
        (b"\xef\xbb\xbfx = 1\r\n", "utf-8", "x = 1\r\n"),
        ("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"), "latin-1", "# -*- coding: latin-1 -*-\nx = 'é'\n"),
        (b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n", "cp1252", None),
        (b"x = 1\n# coding: latin-1\n", "utf-8", None),
        (b"", "utf-8", ""),
    ],
)
def test_decodes_according_to_pep_263(data: bytes, encoding: str, text: str | None) -> None:
    source = Source.parse(data, "example.py")
    assert source.encoding == encoding
    if text is not None:
        assert source.text == text


@pytest.mark.parametrize(
    "text",
    [
        "import a\r\nclass B:\r\n    def f(self):\r\n        return x.half()\r\n",
        "import a\rclass B:\r\tdef f(self):\r\t\treturn x.half()\r",
        "import a\r\nclass B:\n\tdef f(self):\r\n\t\treturn (x.half())\n",
        "import a\n\f\nclass B:\n    def f(self):\n        return  x.half()",
        'a = """\r\n\r\n"""\r\n\fb = {\r\n  1: x.half()}\r\n',
        "é = 'ü🙂'; b = x.half()  # ä\n",
    ],
)
def test_spans_are_places_in_the_text_as_it_is(text: str) -> None:
    source = Source.parse(text.encode(), "example.py")
    assert source.text == text
    assert [text[first:last] for first, last in call_spans(source)] == ["x.half()"]


def test_positions_are_those_of_the_python_parser() -> None:
    """Each call of 40 files: line and column are those that `ast` gives."""
    compared = 0
    for path in SAMPLE[:40]:
        source = Source.parse(path.read_bytes(), str(path))
        mine = [source.position(first) for first, _ in call_spans(source)]
        theirs = [
            (node.lineno, len(source.text.splitlines()[node.lineno - 1].encode()[: node.col_offset].decode()) + 1)
            for node in ast.walk(ast.parse(source.text))
            if isinstance(node, ast.Call)
        ]
        # in f-strings the Python of this test may count otherwise
        if "f'" not in source.text and 'f"' not in source.text:
            assert sorted(mine) == sorted(theirs), path
            compared += len(mine)
    assert compared > 100


def test_statements_are_those_of_the_python_parser() -> None:
    for path in SAMPLE:
        source = Source.parse(path.read_bytes(), str(path))
        starts = {source.position(source.offset(chunk.start))[0] for chunk in source.chunks}
        for node in ast.parse(source.text).body:
            line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            assert line in starts, f"{path}:{line}"
        assert "".join(chunk.text for chunk in source.chunks) == source.normal


@pytest.mark.parametrize(
    "code",
    [
        "x = " + "(" * 10_000 + ")" * 10_000,
        "x = " + "[" * 1_500 + "]" * 1_500,
        "x = " + "f(" * 2_000 + ")" * 2_000,
        "x = " + " + ".join(["a"] * 10_000),
        "x = (\n" + "\n+ ".join(["a"] * 10_000) + ")",
        "x = a" + ".b()" * 10_000,
        "x = (a" + "\n.b()" * 10_000 + ")",
        "x = a" + "[0]" * 5_000,
        "x = " + "not " * 10_000 + "a",
        "x = " + "-" * 10_000 + "1",
        "x = " + "lambda: " * 5_000 + "1",
        "x = " + "a if b else " * 10_000 + "c",
        "if a:\n  pass\n" + "elif b:\n  pass\n" * 5_000,
        "\n".join(" " * depth + "if a:" for depth in range(300)) + "\n" + " " * 300 + "pass",
        "def f():\n" + ("    a" + ".b" * 250 + "\n") * 500,
        "def f():\n" + ("    a" + ".b()" * 100 + "\n") * 3000,
    ],
)
def test_what_would_crash_the_parser_is_refused_at_its_place(code: str) -> None:
    error = unparsable("a = 1\n" + code + "\n")
    assert "parse limit" in error.message
    assert error.line >= 1


def test_what_libcst_parses_and_its_nodes_refuse_is_read() -> None:
    source = Source.parse(b"a = 1\n\ndef f():\n    return.5\n", "a.py")
    (function,) = [chunk for chunk in source.chunks if chunk.defines == "f"]
    assert function.module.code.strip() == "def f():\n    return.5"


def test_the_first_bad_place_is_named() -> None:
    error = unparsable("a = 1\nx = " + "(" * 10_000 + ")" * 10_000)
    assert (error.line, error.column) == (2, 205)


@pytest.mark.parametrize("terms", [100, 600])  # Python 3.12 has no stack for 800, others for 1,100
def test_long_code_that_the_parser_bears_is_read(terms: int) -> None:
    source = Source.parse(("x = " + " + ".join(["a.half()"] * terms) + "\n").encode(), "example.py")
    assert source.chunks[-1].span(source.chunks[-1].module.body[0])[0] == 0


@pytest.mark.parametrize(
    ("code", "line", "column"),
    [
        ("def f(:\n", 1, 7),
        ("x = 1\nprint 'hello'\n", 2, 1),
        ("x = 0777\n", 1, 5),
        ("if x:\n        a\n\tb\n", 3, None),
        ("x = 1\ny = '\n", 2, 5),
        ("x = (1,\n", 1, 5),
    ],
)
def test_a_syntax_error_is_where_python_sees_it(code: str, line: int, column: int | None) -> None:
    error = unparsable(code)
    assert error.message.startswith("syntax error: ")
    assert error.line == line
    assert column is None or error.column == column


def test_a_nul_byte_has_a_place() -> None:
    error = unparsable(b"x = 1\ny = '\0'\n")
    assert (error.line, error.column) == (2, 6)
    assert "NUL" in error.message


def test_bytes_that_are_not_utf_8_have_a_place() -> None:
    error = unparsable("x = 1\nyä = ".encode() + b"\xff\n")
    assert (error.line, error.column) == (2, 6)
    assert "0xff" in error.message and "PEP 263" in error.message


def test_an_unknown_encoding_is_named() -> None:
    assert "`klingon`" in unparsable(b"# coding: klingon\n").message


def test_newer_syntax_than_the_running_python_is_no_syntax_error() -> None:
    Source.parse(b"type A[T] = list[T]\ndef f[T](x: T) -> T: return x\n", "example.py")


CLASS = '''\
@decorated
class Big(Base):
    """Not a method:
    def text(self): ...
    """

    size = (
        1,
    )

    @property
    def one(self):
        # a comment
        return """
def fake(self):
    pass
"""

    def short(self): return 1

    async def two(
        self, x=")", *, y={"a": [1]},
    ):
        if x:
            def inner():
                pass
        return y  # the end

    # about three
    def three(self):
        return 3
'''


def test_the_methods_of_a_class() -> None:
    (chunk,) = Source.parse(CLASS.encode(), "x.py").chunks
    assert [(each.name, CLASS[each.body : each.end].rsplit(maxsplit=1)[-1]) for each in chunk.methods] == [
        ("one", '"""'),
        ("two", "three"),
        ("three", "3"),
    ]


def test_skipped_bodies_leave_all_else_in_its_place() -> None:
    (chunk,) = Source.parse(CLASS.encode(), "x.py").chunks
    chunk.skipped = tuple(each for each in chunk.methods if each.name != "three")
    assert len(chunk.code) == len(CLASS)
    assert "fake" not in chunk.code and "inner" not in chunk.code
    cls = cst.ensure_type(chunk.module.body[0], cst.ClassDef)
    methods = [each for each in cls.body.body if isinstance(each, cst.FunctionDef)]
    assert [each.name.value for each in methods] == ["one", "short", "two", "three"]
    first, last = chunk.span(methods[-1])
    assert CLASS[first:last].strip() == "def three(self):\n        return 3"


STATEMENTS = (
    "import torch\n",
    "\n@torch.compile\ndef f(x):\n    return x\n",
    "if f:\n    y = 1\nelse:\n    y = 2\n",
    "z = (\n    1,\n)\n",
)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "broken",
    ["z = = 1\n", "  indented = 1\n", "def f(:\n    pass\n", "@torch\nx = 1\n", "else:\n    pass\n", "x = (\n"],
)
def test_a_syntax_error_is_reported_as_python_does_after_other_statements_were_accepted(
    broken: str, ending: str
) -> None:
    whole = "".join(STATEMENTS).replace("\n", ending)
    Source.parse(whole.encode(), "a.py")
    for place in range(len(STATEMENTS) + 1):
        text = "".join((*STATEMENTS[:place], broken, *STATEMENTS[place:])).replace("\n", ending)
        with pytest.raises(SyntaxError) as python:
            ast.parse(text)
        with pytest.raises(Unparsable) as found:
            Source.parse(text.encode(), "a.py")
        assert found.value.message == f"syntax error: {python.value.msg}"
        assert (found.value.line, found.value.column) == (python.value.lineno, max(python.value.offset or 1, 1))
    Source.parse(whole.encode(), "a.py")
