"""Changes of keys as edits of the text that holds them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpguard.core.errors import ConfigError, PolicyError
from mpguard.core.text_edits import apply_edits
from mpguard.document import parse
from mpguard.targets.inject import Change
from mpguard.targets.settings import ABSENT, Setting, lookup, merged

KEYS = ("bf16", "mixed_precision", "zero", "on", "a b", "x-y", "'q", "9", "é", "#k")
WORDS = (
    "bf16", "no", "NO", "on", "null", "~", "", "1", "1e5", "1.5", "0x10", "1:30", "2001-01-01", "a: b", "a #b", "- a",
    "{a", "[b", "*c", "&d", "!e", "'f'", '"g"', " lead", "trail ", "é", "%h", "@i", "`j", "two\nlines", "tab\there",
    "=", "<<", "\\",
)  # fmt: skip

numbers = st.integers(-(10**6), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.sampled_from(WORDS)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)
configs = st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=5)
changes = st.lists(
    st.tuples(
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(".".join),
        st.one_of(st.just(ABSENT), scalars, st.lists(scalars, max_size=2)),
    ),
    min_size=1,
    max_size=5,
)


class Yaml:
    """Writes plain data as YAML in one of the many ways in which people do."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.newline = draw(st.sampled_from(["\n", "\r\n"]))
        self.unit = draw(st.sampled_from([1, 2, 4]))
        self.comments = 0

    def chance(self) -> bool:
        return bool(self.draw(st.integers(0, 3)) == 0)

    def comment(self) -> str:
        self.comments += 1
        return f"# c{self.comments} é"

    def document(self, data: dict[str, Any]) -> str:
        text = "".join(line + self.newline for line in self.mapping(data, 0))
        if self.chance():
            text = "---" + self.newline + text
        return text.removesuffix(self.newline) if self.chance() else text

    def mapping(self, data: dict[str, Any], indent: int) -> list[str]:
        lines = []
        for key, value in data.items():
            if self.chance():
                lines.append(" " * self.draw(st.integers(0, 3)) + self.comment() if lines or indent == 0 else "")
            if self.chance():
                lines.append("")
            start = " " * indent + self.flow([key])[1:-1] + ":"
            end = f" {self.comment()}" if self.chance() else ""
            if isinstance(value, dict) and value and not self.chance():
                lines += [start + end, *self.mapping(value, indent + self.unit)]
            elif isinstance(value, list) and value and not self.chance():
                lines.append(start + end)
                deeper = " " * (indent + self.draw(st.sampled_from([0, self.unit])))
                lines += [f"{deeper}- {self.flow([item])[1:-1]}" for item in value]
            elif value is None and self.chance():
                lines.append(start + end)
            else:
                lines.append(f"{start}{' ' * self.draw(st.integers(1, 2))}{self.flow([value])[1:-1]}{end}")
        return lines

    def flow(self, value: list[Any]) -> str:
        style = self.draw(st.sampled_from([None, None, '"', "'"])) if isinstance(value[0], str) else None
        if isinstance(value[0], str) and "\n" in value[0]:
            style = '"'
        options = {"default_style": style, "width": 10**6, "allow_unicode": True, "sort_keys": False}
        return str(yaml.safe_dump(value, default_flow_style=True, **options)).rstrip("\n")


@st.composite
def yaml_texts(draw: Any) -> str:
    return Yaml(draw).document(draw(configs))


@st.composite
def json_texts(draw: Any) -> str:
    data = draw(configs)
    indent = draw(st.sampled_from([None, 2, 4, "\t"]))
    space = draw(st.sampled_from(["", " "]))
    separators = ("," + (space if indent is None else ""), ":" + space)
    text = json.dumps(data, indent=indent, separators=separators, ensure_ascii=draw(st.booleans()))
    text = text.replace("\n", draw(st.sampled_from(["\n", "\r\n"])))
    return text + draw(st.sampled_from(["", "\n"]))


def check(text: str, path: str, wanted: list[tuple[str, Any]]) -> None:
    """The law: what the edits make of the text reads as what `merged` makes of the data."""
    document = parse(text, path)
    assert not document.problems, (text, document.problems)
    made = [Change(key, ABSENT, value) for key, value in wanted]
    try:
        expected = document.data
        for change in made:
            expected = merged(expected, {change.key: Setting(change.new)})
    except PolicyError:
        with pytest.raises(PolicyError):
            document.edits(made)
        return
    edits = document.edits(made)
    after = apply_edits(text, edits)
    again = parse(after, path)
    assert not again.problems, (text, after, again.problems)
    assert again.data == expected, (text, after)
    settled = [change for change in made if lookup(expected, change.key) == change.new]
    assert again.edits(settled) == (), "twice is not once"
    breaks = re.compile(r"\r\n|\r|\n")
    if breaks.search(text):
        assert set(breaks.findall(after)) <= set(breaks.findall(text)), "line endings"
    replaced = [lookup(document.data, change.key) for change in made]
    if not any(isinstance(old, (dict, list)) for old in replaced) and all(each.new is not ABSENT for each in made):
        comments = re.compile(r"# c\d+ é")
        assert comments.findall(after) == comments.findall(text), "comments"


lenient = settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@lenient
@given(yaml_texts(), changes)
def test_yaml_edits_have_the_result_of_merged(text: str, wanted: list[tuple[str, Any]]) -> None:
    check(text, "mp.yaml", wanted)


@lenient
@given(json_texts(), changes)
def test_json_edits_have_the_result_of_merged(text: str, wanted: list[tuple[str, Any]]) -> None:
    check(text, "ds.json", wanted)


def changed(text: str, *wanted: tuple[str, Any], path: str = "mp.yaml") -> str:
    return apply_edits(text, parse(text, path).edits([Change(key, ABSENT, value) for key, value in wanted]))


def test_a_value_keeps_its_line() -> None:
    text = "# ours\nmixed_precision:   fp16   # old\nuse_cpu: false\n"
    assert changed(text, ("mixed_precision", "bf16")) == text.replace("fp16", "bf16")


@pytest.mark.parametrize(
    ("old", "new", "written"),
    [
        ("fp16", "no", "'no'"),  # unquoted it would be False
        ("fp16", "1", "'1'"),
        ('"fp16"', "bf16", '"bf16"'),  # quotes that were not needed are somebody's style
        ("'fp16'", "no", "'no'"),
        ("'no'", "bf16", "bf16"),  # these were needed, and are not any more
        ("16", 1e-7, "1.0e-07"),  # without the point YAML 1.1 reads text
        ("true", None, "null"),
        ("[1, 2]", ["no", 3], "['no', 3]"),
    ],
)
def test_a_value_is_quoted_where_it_must_be(old: str, new: Any, written: str) -> None:
    assert changed(f"key: {old} # why\n", ("key", new)) == f"key: {written} # why\n"


def test_a_key_is_added_after_its_siblings() -> None:
    text = "a:\n   x: 1 # one\n   # of a\n\n# of b\nb: 2"
    assert changed(text, ("a.y", 2), ("c.d.e", True)) == (
        "a:\n   x: 1 # one\n   y: 2\n   # of a\n\n# of b\nb: 2\nc:\n   d:\n      e: true"
    )


def test_a_section_without_a_value_becomes_one() -> None:
    assert changed("fp8_config: # later\nb: ~ # none\n", ("fp8_config.x", 1), ("b.y", 2)) == (
        "fp8_config: # later\n  x: 1\nb: # none\n  y: 2\n"
    )


def test_a_key_goes_with_its_line_and_an_empty_section_too() -> None:
    text = "a: 1\n# of b\nb:\n  c:\n    d: 1 # gone\n  # stays\ne: 2\n"
    assert changed(text, ("b.c.d", ABSENT)) == "a: 1\n# of b\n  # stays\ne: 2\n"


def test_flow_mappings_stay_flow_mappings() -> None:
    text = "fp8_config: {backend: TE, margin: 0}  # short\n"
    assert changed(text, ("fp8_config.x", "no")) == "fp8_config: {backend: TE, margin: 0, x: 'no'}  # short\n"
    assert changed(text, ("fp8_config.backend", ABSENT)) == "fp8_config: {margin: 0}  # short\n"
    assert changed(text, ("fp8_config.margin", ABSENT)) == "fp8_config: {backend: TE}  # short\n"
    assert changed("a: {}\nb: {x: }\n", ("a.k", 1), ("b.x", 2)) == "a: {k: 1}\nb: {x: 2 }\n"


def test_a_flow_mapping_over_several_lines_keeps_them_and_their_comments() -> None:
    text = "a: {\n  x: 1, # one\n  y: 2 # two\n}\n"
    assert changed(text, ("a.z", 3)) == "a: {\n  x: 1, # one\n  y: 2, # two\n  z: 3\n}\n"
    assert changed("a: {\n  x: 1, # one\n}\n", ("a.z", 3)) == "a: {\n  x: 1, # one\n  z: 3\n}\n"
    after = changed(text, ("a.x", ABSENT))
    assert parse(after, "mp.yaml").data == {"a": {"y": 2}}
    assert "# two" in after


def test_text_over_several_lines_is_replaced_as_a_whole() -> None:
    assert changed("a: |\n  one\n  two\n\n# b\nb: 1\n", ("a", "x")) == "a: x\n\n# b\nb: 1\n"
    assert changed("a: one\n  two\nb: 1\n", ("a", "x")) == "a: x\nb: 1\n"
    assert changed("b: 1\na: |\n  one\n", ("c", 2)) == "b: 1\na: |\n  one\nc: 2\n"


def test_json_keeps_its_layout() -> None:
    wide = '{\r\n\t"fp16": {"enabled": true},\r\n\t"x": {}\r\n}'
    assert changed(wide, ("fp16.enabled", False), ("bf16.enabled", True), ("x.y", 1), path="ds.json") == (
        '{\r\n\t"fp16": {"enabled": false},\r\n\t"x": {\r\n\t\t"y": 1\r\n\t},'
        '\r\n\t"bf16": {\r\n\t\t"enabled": true\r\n\t}\r\n}'
    )
    assert changed('{"a":{"b":1},"c":2}', ("a.d", [1, 2]), ("c", ABSENT), path="x.json") == '{"a":{"b":1,"d":[1,2]}}'
    assert changed("{}\n", ("a.b", 1), path="x.json") == '{\n  "a": {\n    "b": 1\n  }\n}\n'
    assert changed('{"a": 1}\n', ("a", ABSENT), path="x.json") == "{}\n"


ANCHORED = "base: &fp8\n  backend: TE\n  margin: 0\nfp8_config: *fp8\nmode: &m fp16\nmixed_precision: *m\n"


def test_an_alias_is_written_out_and_its_anchor_stays() -> None:
    assert changed(ANCHORED, ("mixed_precision", "bf16")) == ANCHORED.replace(
        "mixed_precision: *m", "mixed_precision: bf16"
    )


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("mode", "bf16", "mp.yaml:6"),  # its alias would follow
        ("base.backend", "AO", "mp.yaml:4"),
        ("fp8_config.backend", "AO", "mp.yaml:4"),
        ("fp8_config.new", 1, "mp.yaml:4"),
        ("base", ABSENT, "mp.yaml:4"),
        ("mode", ABSENT, "mp.yaml:6"),
    ],
)
def test_a_change_that_would_reach_further_is_refused(key: str, value: Any, place: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(place)):
        changed(ANCHORED, (key, value))


def test_what_a_merge_brings_can_be_overridden_but_not_removed() -> None:
    text = "base: &b {x: 1, s: {t: 1}}\nsection:\n  <<: *b\n  y: 2\n"
    assert changed(text, ("section.x", 5)) == text + "  x: 5\n"
    for key, value in (("section.x", ABSENT), ("section.s.t", 2)):
        with pytest.raises(ConfigError, match="comes through `<<`"):
            changed(text, (key, value))


def test_an_anchor_without_users_stays() -> None:
    assert changed("a: &x fp16 # c\n", ("a", "bf16")) == "a: &x bf16 # c\n"


def test_a_document_with_problems_is_not_changed() -> None:
    with pytest.raises(ConfigError, match=r"mp\.yaml:2: `a` is a duplicate key"):
        changed("a: 1\na: 2\n", ("a", 3))


def test_a_value_where_a_section_must_be_is_refused() -> None:
    with pytest.raises(PolicyError, match="`fp8_config` is TE"):
        changed("fp8_config: TE\n", ("fp8_config.backend", "TE"))
