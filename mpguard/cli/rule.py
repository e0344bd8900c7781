"""The manual page of a rule: what it reports, why, and what to write instead."""

from __future__ import annotations

import argparse
import json
import sys

from mpguard.errors import did_you_mean

FORMATS = ("text", "json")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="*", metavar="CODE", help="MPG201, or the rule's name (missing-grad-scaler)")
    parser.add_argument("--all", action="store_true", help="a line for each rule; with --format json their pages")
    parser.add_argument("--format", type=_format, default="text", metavar="|".join(FORMATS), help="default: text")


def run(options: argparse.Namespace) -> int:
    from mpguard.lint import pages
    from mpguard.lint.rule import rules as load
    from mpguard.lint.selection import suggestion

    rules = load()
    if bool(options.code) == options.all:
        print("mpguard: name a rule, or give --all", file=sys.stderr)
        return 2
    by_name = {rule.name: code for code, rule in rules.items()}
    chosen = list(rules.values())
    if options.code:
        codes = [by_name.get(given, given.upper()) for given in options.code]
        for given, code in zip(options.code, codes, strict=True):
            if code not in rules:
                print(f"mpguard: there is no rule `{given}`{suggestion(given, rules)}", file=sys.stderr)
                return 2
        chosen = [rules[code] for code in codes]
    if options.format == "json":
        print(json.dumps({"version": 1, "rules": [pages.as_json(rule) for rule in chosen]}, indent=2))
    elif options.all:
        width = max(len(rule.name) for rule in chosen)
        for rule in chosen:
            marks = [*(["preview"] if rule.preview else []), *(["fix"] if rule.fixable() else [])]
            print(f"{rule.code}  {rule.severity:7}  {rule.name:{width}}  {', '.join(marks)}".rstrip())
    else:
        for rule in chosen:
            _show(pages.page(rule))
    return 0


def _show(page: str) -> None:
    from mpguard.lint.report import coloured, write

    if not coloured(sys.stdout):
        write([(line, "")] for line in page.splitlines())
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(page))


def _format(text: str) -> str:
    if text not in FORMATS:
        raise argparse.ArgumentTypeError(f"there is no format `{text}`{did_you_mean(text, FORMATS)}")
    return text
