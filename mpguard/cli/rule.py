"""Explain a rule: what it reports, why that is a mistake, and what to write instead."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpguard.core.console import columns, print_message, wrapped
from mpguard.core.errors import did_you_mean

if TYPE_CHECKING:
    from mpguard.lint.model.rule import BaseRule
    from mpguard.lint.model.selection import Rules

FORMATS = ("text", "json")
#: Columns of a page on a terminal; longer lines are hard to read.
_MAX_WIDTH = 100
#: Where the marks of a rule go on a narrow terminal.
_MARKS = 17


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code",
        nargs="*",
        metavar="CODE",
        help="a code (MPG201) or a name (missing-grad-scaler); a prefix (MPG2) lists its rules",
    )
    parser.add_argument("--all", action="store_true", help="list all rules; with --format json, their full pages")
    parser.add_argument(
        "--format", type=_format, default="text", metavar="|".join(FORMATS), help="output format (default: text)"
    )


def run(options: argparse.Namespace) -> int:
    from mpguard.lint.model import rule_page
    from mpguard.lint.model.rule import rules as load
    from mpguard.lint.model.selection import covers, suggestion

    rules = load()
    if bool(options.code) == options.all:
        print_message("a rule or --all is needed, and not both; `mpguard rule MPG201` explains one rule")
        return 2
    codes = [code for given in options.code for code in _current(given, rules)] or ["ALL"] * options.all
    chosen: dict[str, type[BaseRule]] = {}
    for code in codes:
        covered = {code: rules[code]} if code in rules else {c: rule for c, rule in rules.items() if covers(code, c)}
        if not covered:
            print_message(f"there is no rule `{code}`{suggestion(code, rules)}")
            return 2
        chosen |= covered
    if options.format == "json":
        print(json.dumps({"version": 1, "rules": [rule_page.as_json(rule) for rule in chosen.values()]}, indent=2))
    elif chosen and all(code in rules for code in codes):
        _print_pages("\n".join(map(rule_page.page, chosen.values())))
    elif chosen:
        _print_list(chosen.values())
    return 0


def _current(given: str, rules: Rules) -> list[str]:
    """Return the codes that a code, a prefix or a name stands for, and name those of them that are retired."""
    from mpguard.lint.model import retired
    from mpguard.lint.model.selection import retired_by

    by_name = {rule.name: code for code, rule in rules.items()}
    code = by_name.get(given) or retired.by_name(given) or given.upper()
    former = retired_by(code, rules)
    for each in former:
        print_message(retired.explanation(each))
    if former:
        return sorted(retired.successors(former))
    return [code]


def _print_list(rules: Iterable[type[BaseRule]]) -> None:
    width = max(len(rule.name) for rule in rules)
    for rule in rules:
        marks = [*(["preview"] if rule.preview else []), *(["fix"] if rule.fixable() else [])]
        line = f"{rule.code}  {rule.severity:7}  {rule.name:{width}}  {', '.join(marks)}".rstrip()
        print(wrapped(line, _MARKS, columns()))


def _print_pages(text: str) -> None:
    from mpguard.core.console import rich_console, use_color, write_text

    if not use_color(sys.stdout):
        write_text(f"{text.rstrip()}\n")
        return
    from rich.markdown import Markdown

    console = rich_console(sys.stdout)
    console.print(Markdown(text), width=min(console.width, _MAX_WIDTH))


def _format(text: str) -> str:
    if text not in FORMATS:
        raise argparse.ArgumentTypeError(f"there is no format `{text}`{did_you_mean(text, FORMATS)}")
    return text
