"""A rule's manual page, generated from its docstring, its attributes and its examples alone."""

from __future__ import annotations

import re
from typing import Any

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.model.rule import Bad, BaseRule, Example, Good

#: Suffix, or name, of an example's file -> the language of its block.
_LANGUAGES = {
    "yaml": "yaml",
    "yml": "yaml",
    "json": "json",
    "sh": "bash",
    "Makefile": "make",
    "md": "markdown",
    "toml": "toml",
}
_MARK = lazy_pattern(r"[ \t]*# !$", re.M)


def unmarked(code: str) -> str:
    """Return the code of an example without the marks of reported lines."""
    return _MARK.sub("", code)


def page(rule: type[BaseRule]) -> str:
    """Return the page as Markdown; its first line is the heading."""
    state = [
        rule.severity,
        "has a fix" if rule.fixable() else "no fix",
        *(["preview: off unless selected"] if rule.preview else []),
        *(f"for {library} {versions}" for library, versions in rule.versions.items()),
    ]
    parts = [f"# {rule.name} ({rule.code})", f"*{', '.join(state)}*", rule.page()]
    bad = next((example for example in rule.examples if isinstance(example, Bad)), None)
    good = next((example for example in rule.examples if isinstance(example, Good)), None)
    if bad is not None:
        parts += ["## Example", _block(bad, bad.code)]
        if bad.fixed is not None:
            parts += ["Use instead:", _block(bad, bad.fixed)]
    if good is not None and (bad is None or bad.fixed is None):
        parts += ["Use instead:", _block(good, good.code)]
    if forms := rule.forms():
        parts += ["## Other forms", "\n".join(("| form | about it |", "| --- | --- |", *map(_row, forms)))]
    return "\n\n".join(parts) + "\n"


def as_json(rule: type[BaseRule]) -> dict[str, Any]:
    """Return a rule as `mpguard rule --format json` prints it. fix: true if it has one."""
    return {
        "code": rule.code,
        "name": rule.name,
        "severity": rule.severity,
        "preview": rule.preview,
        "fix": rule.fixable(),
        "doc": page(rule),
    }


def _row(form: type[BaseRule]) -> str:
    what, _, why = form.page().replace("|", "\\|").partition("\n\n")
    return f"| {' '.join(what.split())} | {' '.join(why.split())} |"


def _block(example: Example, code: str) -> str:
    blocks = []
    for name, text in {example.name: code, **example.files}.items():
        language = _LANGUAGES.get(name.rsplit(".", 1)[-1], "python")
        title = f"`{name}`:\n\n" if example.files and name else ""
        blocks.append(f"{title}```{language}\n{unmarked(text).rstrip()}\n```")
    return "\n\n".join(blocks)
