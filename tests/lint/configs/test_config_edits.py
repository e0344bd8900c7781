"""The edits of configs that fixes share: keys are renamed, set and removed, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from lint_facts import facts_of

from mpguard import document
from mpguard.core.text_edits import apply_edits
from mpguard.document import Document
from mpguard.lint import Fix, config_edits
from mpguard.lint.facts.domain.config_dicts import configs
from mpguard.targets import ABSENT


def applied(read: Document, fix: Fix | None) -> str | None:
    return None if fix is None else apply_edits(read.text, fix.edits)


def in_python(code: str) -> Document:
    """Return the DeepSpeed config that is a dict in Python code."""
    (found,) = configs(facts_of(f"import deepspeed\n{code}\ndeepspeed.initialize(model=model, config=CONFIG)\n"))
    return found


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("mp.yaml", "a: 1  # kept\n'bf_16': {x: 2}\n", "a: 1  # kept\n'bf16': {x: 2}\n"),
        ("ds.json", '{"bf_16": {"enabled": true}}', '{"bf16": {"enabled": true}}'),
        ("mp.yaml", "bf_16: yes\n", "bf16: yes\n"),
    ],
)
def test_a_renamed_key_keeps_its_quotes_and_value(path: str, text: str, expected: str) -> None:
    read = document.parse(text, path)
    entry = read.entry("bf_16")
    assert entry is not None
    fix = config_edits.rename_key("Rename", read, entry, "bf16")
    assert (applied(read, fix), fix.applicability) == (expected, "safe")


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("a: 1  # one\nb: 2\n", {"b": 3}, "a: 1  # one\nb: 3\n"),
        ("a: 1  # one\nb: 2\n", {"b": ABSENT}, "a: 1  # one\n"),
        ("a: 1\n", {"a": 1}, "a: 1\n"),
        ("a: {b: 1}\n", {"a.b": "bf16"}, "a: {b: bf16}\n"),
    ],
)
def test_values_of_a_file(text: str, values: dict[str, Any], expected: str) -> None:
    read = document.parse(text, "mp.yaml")
    assert applied(read, config_edits.set_values("Set", read, values)) in (expected, None if text == expected else "")


@pytest.mark.parametrize(
    ("code", "values", "expected"),
    [
        ('CONFIG = {"bf16": {"enabled": False}}', {"bf16.enabled": True}, 'CONFIG = {"bf16": {"enabled": True}}'),
        ('CONFIG = {"a": 1, "bf16": {}, "b": 2}', {"bf16": ABSENT}, 'CONFIG = {"a": 1, "b": 2}'),
        ('CONFIG = {"a": 1, "bf16": {}}', {"bf16": ABSENT}, 'CONFIG = {"a": 1}'),
        ('CONFIG = {"bf16": {}, }', {"bf16": ABSENT}, "CONFIG = { }"),
        ('CONFIG = {"bf16": {"x": 1}}', {"bf16.x": "fp16"}, 'CONFIG = {"bf16": {"x": "fp16"}}'),
        ('CONFIG = {"bf16": {}}', {"fp16": True}, 'CONFIG = {"bf16": {}, "fp16": True}'),
        ('CONFIG = {"a": 1,}', {"b.c": "x"}, 'CONFIG = {"a": 1, "b": {"c": "x"},}'),
        ('CONFIG = {\n    "a": 1,\n}', {"b": 2}, 'CONFIG = {\n    "a": 1,\n    "b": 2,\n}'),
        ('CONFIG = {"bf16": {}}', {"fp16": ABSENT}, None),
        ('CONFIG = {"bf16": {},  # why\n "b": 2}', {"bf16": ABSENT}, None),
        ('CONFIG = {"bf16": {}, **more}', {"bf16": ABSENT}, "CONFIG = { **more}"),
        ('CONFIG = {"a": 1, **more, "bf16": {}}', {"bf16": ABSENT}, None),
    ],
)
def test_values_of_a_dict_in_python(code: str, values: dict[str, Any], expected: str | None) -> None:
    """A comment or a `**spread` that would be lost with a key stays: there is no fix."""
    read = in_python(code)
    text = applied(read, config_edits.set_values("Set", read, values))
    assert text == (None if expected is None else read.text.replace(code, expected))
