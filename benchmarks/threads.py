"""Count how many troubles that users reported in public threads the linter, or a launch, tells them of.

    python benchmarks/threads.py lint           # the findings in each case, as JSON lines
    python benchmarks/threads.py lint NAME      # those of one case
    python benchmarks/threads.py page           # the section of docs/evidence.md

A case is a folder of tests/lint/threads: the program and the configs of one thread, written anew and reduced to what
matters, and case.json:

- url, title, reported (what the user saw), mistake, where (its lines), fix, command, versions;
- first: the codes of the default rules whose message told the mistake before any rule was changed because of it;
- codes: those that tell it today (tests/lint/test_threads.py checks them);
- launch: what `mpguard launch` said when it refused the program or reported its mistake, or null;
- scope: why no tool that reads files or watches dtypes can know it, or null.

A case counts as caught if the message names the mistake of the thread: a finding about something else does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mpguard.lint.model.finding import Finding
from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import collect

CASES = Path(__file__).resolve().parent.parent / "tests" / "lint" / "threads"


def cases() -> dict[str, dict[str, Any]]:
    """Return case.json of each case, by the name of its folder."""
    return {path.parent.name: json.loads(path.read_text("utf-8")) for path in sorted(CASES.glob("*/case.json"))}


def findings(name: str, selectors: Selectors) -> list[Finding]:
    """Return what the linter reports in a copy of a case that is a project of its own: tests are judged differently."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        shutil.copytree(CASES / name, project, ignore=shutil.ignore_patterns("case.json"))
        (project / ".git").mkdir()
        reports = Engine(rules(own_only=True), Options(selectors)).run(collect([str(project)]).targets)
        for report in reports:
            assert not report.defects, report.defects[0].traceback
        return [
            dataclasses.replace(finding, path=str(Path(finding.path).relative_to(project)))
            for report in reports
            for finding in report.findings
        ]


def section() -> list[str]:
    """Return the lines of docs/evidence.md about the threads."""
    everything = cases()
    scope = {name: case for name, case in everything.items() if not case["scope"]}
    first = sum(bool(case["first"]) for case in scope.values())
    launch = sum(bool(case["launch"]) for case in scope.values() if not case["codes"])
    lint = sum(bool(case["codes"]) for case in scope.values())
    rows = [
        (
            f"[{case['title']}]({case['url']})".replace("|", "/"),
            case["mistake"].replace("|", "/"),
            ", ".join(case["first"]) or "-",
            ", ".join(case["codes"]) or ("launch" if case["launch"] else "-"),
        )
        for case in scope.values()
    ]
    return [
        "## Troubles that users reported",
        "",
        f"{len(everything)} troubles with precision from public threads were written anew as small programs and configs"
        " ([tests/lint/threads](../tests/lint/threads)), by writers who did not know the rules; "
        f"{len(scope)} of them can be known from the files or from the dtypes of a run."
        f" **At first the default rules told {first} of {len(scope)}.** Rules were changed because of them; today they"
        f" tell {lint}, and `mpguard launch` {launch} more. `python benchmarks/threads.py lint` repeats it.",
        "",
        "| thread | mistake | at first | today |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("lint", "page"))
    parser.add_argument("names", nargs="*", help="cases; all by default")
    parser.add_argument("--preview", action="store_true", help="preview rules too")
    options = parser.parse_args()
    if options.command == "page":
        print("\n".join(section()))
        return 0
    for name in options.names or cases():
        for finding in findings(name, Selectors(preview=options.preview)):
            print(json.dumps({"case": name, "place": f"{finding.path}:{finding.line}", "code": finding.code,
                              "message": finding.message}))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
