"""YAML and JSON: which files are configs, what is reported of a broken one, suppressions, and how it is encoded."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_rules import context, places

from mpguard.lint.run.readers import config

BOTH = b'{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "fp16": {"enabled": true}}\n'


@pytest.mark.parametrize("named", [True, False])
def test_a_config_is_checked_by_the_rules_of_its_kind(tmp_path: Path, named: bool) -> None:
    checked = config.check(BOTH, context(tmp_path / "ds.json", "config", named=named))
    assert places(checked) == [("MPG821", 1)]
    assert checked.recognized


@pytest.mark.parametrize(
    ("data", "named", "recognized"),
    [
        (b"lr: 1\nsteps: 3\n", False, False),
        (b"lr: 1\nsteps: 3\n", True, True),
        (b"services:\n  web: {image: x}\nfp16: true\n", False, False),
    ],
)
def test_other_files_have_no_findings(tmp_path: Path, data: bytes, named: bool, recognized: bool) -> None:
    checked = config.check(data, context(tmp_path / "a.yaml", "config", named=named))
    assert (places(checked), checked.recognized) == ([], recognized)


@pytest.mark.parametrize(
    ("data", "named", "reported"),
    [
        (b"distributed_type: [\n", False, True),
        (b"fp16: [\n", False, False),  # a program's own YAML may have this key
        (b"fp16: [\n", True, True),
        (b"{{ template }}: [\n", False, False),
    ],
)
def test_a_broken_file_is_reported_if_it_is_surely_a_config(
    tmp_path: Path, data: bytes, named: bool, reported: bool
) -> None:
    checked = config.check(data, context(tmp_path / "a.yaml", "config", named=named))
    assert [code for code, _ in places(checked)] == (["MPG003"] if reported else [])
    assert checked.recognized is reported
    assert not reported or checked.encode is None, "what cannot be read is not fixed"


@pytest.mark.parametrize("value", [b"{{ stage }}", b"ZERO_STAGE", b"STAGE", b"${STAGE}", b"<stage>"])
def test_a_template_is_reported_only_if_it_is_named(tmp_path: Path, value: bytes) -> None:
    data = b'{\n  "bf16": {"enabled": true},\n  "zero_optimization": {"stage": %s}\n}\n' % value
    found = config.check(data, context(tmp_path / "ds.json", "config", named=False))
    assert (places(found), found.recognized) == ([], False)
    assert places(config.check(data, context(tmp_path / "ds.json", "config", named=True))) == [("MPG003", 3)]
    for mistake in (b"2,", b"NONE"):
        mistaken = data.replace(value, mistake)
        found = config.check(mistaken, context(tmp_path / "ds.json", "config", named=False))
        assert places(found) == [("MPG003", 3)]


def test_comments_suppress_findings_in_yaml_and_unused_ones_are_reported(tmp_path: Path) -> None:
    text = "compute_environment: LOCAL_MACHINE\nmixed_precision: no{}\nnum_processes: 1{}\n"
    here = context(tmp_path / "mp.yaml", "config")
    (finding,) = places(config.check(text.format("", "").encode(), here))
    assert finding == ("MPG802", 2)
    assert places(config.check(text.format("  # mpguard: ignore[MPG802]", "").encode(), here)) == []
    unused = places(config.check(text.format("", "  # mpguard: ignore[MPG802]").encode(), here))
    assert unused == [("MPG802", 2), ("MPG002", 3)]


def test_a_new_text_keeps_the_byte_order_mark(tmp_path: Path) -> None:
    checked = config.check(b"\xef\xbb\xbf" + BOTH, context(tmp_path / "ds.json", "config"))
    assert checked.encode is not None
    assert checked.encode("{}\n") == b"\xef\xbb\xbf{}\n"
