"""The manual in docs/rules/, generated from the rules alone.

    python -m mpguard.lint.model.rule_docs [docs]

tests/lint/model/test_rule_docs.py fails where a committed page differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from mpguard.lint.model.retired import RETIRED
from mpguard.lint.model.rule import BaseRule, rules
from mpguard.lint.model.rule_page import page

#: The groups of rules, by the beginning of their codes.
GROUPS = {
    "MPG0": "The linter itself",
    "MPG1": "Casts and dtypes",
    "MPG2": "Loss scaling",
    "MPG3": "Autocast",
    "MPG4": "FP8",
    "MPG5": "Frameworks",
    "MPG6": "Numerics",
    "MPG7": "TF32 and backends",
    "MPG8": "Configs",
}
_RETIRED_NOTE = (
    "A retired code stands for its successor wherever a code is accepted (`--select`, `--ignore`, the settings,"
    " suppressions, baselines, `mpguard rule`), and a message names both. Codes are not used again."
)


def pages() -> dict[str, str]:
    """Return the files below docs/: name -> text."""
    own = rules(own_only=True)
    return {"rules/README.md": _index(own)} | {f"rules/{code}.md": page(rule) for code, rule in own.items()}


def write(folder: Path) -> None:
    """Write the pages that differ, and remove pages of rules that no longer exist."""
    expected = pages()
    (folder / "rules").mkdir(parents=True, exist_ok=True)
    for path in (folder / "rules").glob("*.md"):
        if f"rules/{path.name}" not in expected:
            path.unlink()
    for name, text in expected.items():
        path = folder / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def _index(own: dict[str, type[BaseRule]]) -> str:
    parts = [
        "# Rules",
        f"{len(own)} rules; `mpguard rule CODE` shows a page in the terminal. *preview*: off unless selected by its"
        " full code, or together with `--preview`.",
    ]
    for prefix, title in GROUPS.items():
        rows = ["| code | name | severity | fix | what it reports |", "| --- | --- | --- | --- | --- |"]
        for code, rule in own.items():
            if code.startswith(prefix):
                severity = f"{rule.severity}{', preview' if rule.preview else ''}"
                summary = " ".join(rule.page().partition("\n\n")[0].split()).replace("|", "\\|")
                fix = "yes" if rule.fixable() else ""
                rows.append(f"| [{code}]({code}.md) | {rule.name} | {severity} | {fix} | {summary} |")
        parts += [f"## {title}", "\n".join(rows)]
    parts += ["## Retired codes", _RETIRED_NOTE, "\n".join(_retired_rows())]
    return "\n\n".join(parts) + "\n"


def _retired_rows() -> Iterator[str]:
    yield from ("| code | name | now | why |", "| --- | --- | --- | --- |")
    for code, retired in sorted(RETIRED.items()):
        now = f"[{retired.successor}]({retired.successor}.md)" if retired.successor else "removed"
        yield f"| {code} | {retired.name} | {now} | {retired.why} |"


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    write(Path(given[0] if given else "docs"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
