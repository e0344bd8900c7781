"""Config files as nodes with places, and what is no config."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mpguard.core.errors import ConfigError
from mpguard.document import Document, parse, read

lenient = settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))

#: Pieces of which YAML and JSON are made, right and wrong. Names have two letters: PyYAML 6.0.4 merges a key of one
#: letter in another way (yaml/pyyaml#953), and no config has one.
PIECES = (
    "aa", "bb", "no", "true", "1", "1.5", "-1", "1e5", "~", "<<", "=", ":", ": ", ",", ", ", "-", "- ", "? ", "[", "]",
    "{", "}", "&x ", "*x", "!!str ", "!!int ", "!t ", "!!python/object:os.system ", "|\n", ">\n", "#c", " # c", "'",
    '"', "\\", "\n", "\r\n", "\n  ", "\n    ", "  ", "\t", "---\n", "...\n", "%YAML 1.1\n", "null", "NaN", "{}", "[]",
    '"k":', "2001-01-01", "é",
)  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=30)


def same(one: Any, other: Any) -> bool:
    """Equality with NaN equal to itself; recursion is safe, configs are shallow."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(map(repr, sorted(one, key=repr))) == list(map(repr, sorted(other, key=repr))) and all(
            same(one[key], other[key]) for key in one
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


@lenient
@given(texts)
@example("a: &x {bb: 1}\nc: {<<: *x, bb: 2}\n")
@example("a: &x {bb: 1}\nd: &y {bb: 2, e: 3}\nc: {<<: [*x, *y]}\n")
@example("a: &x {bb: 1}\nd: &y {bb: 2, e: 3}\nc: {<<: [*x, *y], bb: 3}\n")
@example("a: &x {bb: 1}\nd: &y {bb: 1, e: 3}\nc: {<<: [*x, *y]}\n")
@example("a: &x {bb: 1}\nd: &y {bb: 2, e: 3}\nc: {<<: *x, <<: *y}\n")
@example("\ufeffa: 1\n")
def test_yaml_is_what_accelerate_reads_or_a_problem(text: str) -> None:
    """accelerate reads with `yaml.safe_load`: without a problem the data are the same."""
    document = parse(text, "mp.yaml")
    spans = [problem.span for problem in document.problems]
    assert all(0 <= start <= end <= len(document.text) + 1 for start, end in spans)
    if document.problems:
        return
    assert same(document.data, yaml.safe_load(text)), document.data


@pytest.mark.parametrize("use", ["{<<: [*x, *y]}", "{<<: [*y, *x], own: 1}", "{<<: [{<<: *x}, *y]}"])
def test_a_list_of_merged_mappings_that_differ_is_a_problem(use: str) -> None:
    """PyYAML 6.0.3 takes the first, 6.0.4 the last (yaml/pyyaml#953)."""
    text = f"a: &x {{precision: fp16, same: 1}}\nb: &y {{precision: bf16, same: 1}}\nc: {use}\n"
    [problem] = parse(text, "mp.yaml").problems
    assert problem.message.startswith("`precision` has different values in the mappings of this list: PyYAML 6.0.4")
    assert text[slice(*problem.span)] == "<<"
    written = parse(text.replace("{<<", "{precision: fp32, <<"), "mp.yaml")
    assert not written.problems and written.data["c"]["precision"] == "fp32"


@lenient
@given(texts)
def test_what_accelerate_cannot_read_is_a_problem(text: str) -> None:
    try:
        yaml.safe_load(text)
    except Exception:
        assert parse(text, "mp.yaml").problems


def strict(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("duplicate")
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


@lenient
@given(
    texts | st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists).map(json.dumps)
)
@example('{"a": 1, "b": [true, null, -1.5e3]}')
def test_json_is_what_json_reads_or_a_problem(text: str) -> None:
    document = parse(text, "ds.json")
    try:
        expected = strict(text)
    except ValueError:
        assert document.problems or document.root is None
        return
    assert not document.problems
    assert same(document.data, expected)


@lenient
@given(texts, st.sampled_from(["mp.yaml", "ds.json", "any"]))
def test_every_entry_is_found_at_its_path_and_span(text: str, path: str) -> None:
    document = parse(text, path)
    for entry in document.entries():
        assert document.text[slice(*entry.key_span)] or entry.key in ("", "None")  # `? ` is a key, the null
        if all("." not in part for part in entry.path):
            found = document.entry(".".join(entry.path))
            assert found is None or found.path == entry.path


def test_types_are_those_of_yaml_1_1() -> None:
    document = parse("mixed_precision: no\nb: NO\nc: 'no'\nd: on\ne: 1e5\nf: 0o7\n", "mp.yaml")
    assert document.data == {"mixed_precision": False, "b": False, "c": "no", "d": True, "e": "1e5", "f": "0o7"}


def test_an_entry_has_the_spans_of_key_and_value() -> None:
    text = "# first\r\na: 1\r\nfp8_config:\r\n  backend: TE  # é\r\n"
    document = parse(text, "mp.yaml")
    entry = document.entry("fp8_config.backend")
    assert entry is not None
    assert (entry.key, entry.value, entry.path) == ("backend", "TE", ("fp8_config", "backend"))
    assert text[slice(*entry.key_span)] == "backend" and text[slice(*entry.value_span)] == "TE"
    assert entry.span == entry.key_span
    assert document.position(entry.key_span[0]) == (4, 3)
    assert document.place(entry.key_span[0]) == "mp.yaml:4"
    assert document.entry("fp8_config.nothing") is None and document.entry("a.b") is None


def test_entries_go_through_lists_aliases_and_merges() -> None:
    document = parse("base: &b {x: 1}\nuse: *b\nlist:\n- k: 2\nown: {<<: *b, y: 3}\n", "mp.yaml")
    found = {".".join(entry.path): entry.value for entry in document.entries()}
    assert found == {
        "base": {"x": 1}, "base.x": 1, "use": {"x": 1}, "use.x": 1, "list": [{"k": 2}], "list.0.k": 2,
        "own": {"x": 1, "y": 3}, "own.x": 1, "own.y": 3,
    }  # fmt: skip
    assert document.entry("list.0.k") is not None and document.entry("list.1.k") is None


def test_a_tag_is_never_executed(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    text = f"a: 1\nb: !!python/object/apply:os.system ['touch {target}']\nc: !custom {{x: 1}}\n"
    document = parse(text, "mp.yaml")
    document.data  # noqa: B018
    assert not target.exists()
    assert [document.position(problem.span[0])[0] for problem in document.problems] == [2, 3]
    assert "never executed" in document.problems[0].message and "!!python/object/apply" in document.problems[0].message


@pytest.mark.parametrize(
    ("path", "text", "line", "message"),
    [
        ("mp.yaml", "a: 1\nb:\n  c: 2\n  c: 3\n", 4, "`c` is a duplicate key"),
        ("mp.yaml", "a: 1\n---\nb: 2\n", 2, "second document"),
        ("mp.yaml", "a: 1\nb: {c: 2\n", 3, "invalid YAML"),
        ("mp.yaml", "a:\n\tb: 1\n", 2, "indented with spaces"),
        ("mp.yaml", "a: \0\n", 1, "NUL"),
        ("mp.yaml", "a: 1\nb: *nothing\n", 2, "no anchor `&nothing`"),
        ("mp.yaml", "a: &a {b: *a}\n", 1, "contains itself"),
        ("mp.yaml", "a: 2001-13-45\n", 1, "is not a valid timestamp"),
        ("mp.yaml", "a: " + "[" * 10_000, 1, "nested more than 100"),
        ("ds.json", '{\n  "a": 1,\n}\n', 2, "a comma before `}`"),
        ("ds.json", '{\n  "a": {"b": 1}\n  "c": 1\n}\n', 3, "no comma before this line"),
        ("ds.json", '{\n  "a": {"b": 1} "c": 1\n}\n', 2, "where `,` or `}` is needed"),
        ("ds.json", '{\n  "a": 1,\n  "a": 2\n}\n', 3, "`a` is a duplicate key"),
        ("ds.json", '{"a": NaN}', 1, "`NaN` is not valid JSON"),
        ("ds.json", '{"a": True}', 1, "write `true`"),
        ("ds.json", '{\n// why\n"a": 1}', 2, "no comments"),
        ("ds.json", "{'a': 1}", 1, "double quotes"),
        ("ds.json", '{"a": 1', 1, "the file ends"),
        ("ds.json", '{"a": "\0"}', 1, "no end on its line"),
        ("ds.json", "[" * 10_000, 1, "nested more than 100"),
        ("ds.json", '{"a": ' + "1" * 5000 + "}", 1, "5000 digits"),
        ("ds.json", '\ufeff{"a": 1}', 1, "byte-order mark"),
    ],
)  # fmt: skip
def test_a_problem_has_a_message_and_a_line(path: str, text: str, line: int, message: str) -> None:
    document = parse(text, path)
    assert len(document.problems) == 1
    assert message in document.problems[0].message
    assert document.position(document.problems[0].span[0])[0] == line
    with pytest.raises(ConfigError, match=f"^{path}:{line}: "):
        document.require()


def test_a_bomb_of_aliases_is_not_expanded() -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    document = parse("\n".join(lines), "mp.yaml")
    assert document.root is None and "100000 values" in document.problems[0].message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n", "is a list"),
        (b"word\n", "is a single value"),
        (b"a: \xff\n", ":1: is not UTF-8 \\(byte 0xFF\\)"),
        (b"a: 1\nb: \x00\n", ":2: a NUL byte"),
        (b"x" * (2 << 20), "has 2,097,152 characters"),
    ],
)
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "mp.yaml"
    path.write_bytes(data)
    with pytest.raises(
        ConfigError, match=f"mp.yaml:? ?{message}" if message.startswith(":") else f"mp.yaml(:1)?: {message}"
    ):
        read(path).require()


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(tmp_path)


def test_a_byte_order_mark_is_kept_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "mp.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\n")
    document = read(path)
    assert document.text == "a: 1\r\n" and document.data == {"a": 1} and document.bom
    assert document.encoded("a: 2\r\n") == b"\xef\xbb\xbfa: 2\r\n"


def kind(text: str, path: str = "x.yaml") -> str | None:
    document: Document = parse(text, path)
    return document.kind


def test_a_file_is_recognised_by_its_content() -> None:
    assert kind("distributed_type: 'NO'\nmixed_precision: bf16\n") == "accelerate"
    assert kind('{"zero_optimization": {"stage": 2}}', "x.json") == "deepspeed"
    assert kind("base_model: x\ndatasets:\n- path: y\nbf16: auto\n") == "axolotl"
    assert kind('{"name": "package"}', "package.json") is None
    assert kind("") is None and kind("- a") is None
