"""JUnit XML, which most CI systems display: a suite per file with findings, a failed case per finding."""

from __future__ import annotations

from itertools import groupby
from xml.etree import ElementTree as ET

from mpguard.core.console import printable
from mpguard.lint.formats.terminal import Outcome
from mpguard.lint.model.finding import Finding


def report(outcome: Outcome) -> str:
    """Return the findings, and what could not be checked, as JUnit XML."""
    cases, errors = len(outcome.findings), len(outcome.trouble)
    suites = ET.Element(
        "testsuites", name="mpguard", tests=str(cases + errors or 1), failures=str(cases), errors=str(errors)
    )
    for path, group in groupby(outcome.findings, key=lambda finding: finding.path):
        found = list(group)
        name = printable(path)
        suite = _suite(suites, name, len(found), failures=len(found))
        for finding in found:
            _case(suite, name, finding)
    if errors:
        suite = _suite(suites, "mpguard", errors, errors=errors)
        for number, problem in enumerate(outcome.trouble, 1):
            case = ET.SubElement(suite, "testcase", name=f"could not check {number}", classname="mpguard")
            ET.SubElement(case, "error", message=printable(problem.partition("\n")[0]))
    if not cases and not errors:  # CI takes a report without a case for a broken one
        ET.SubElement(_suite(suites, "mpguard", 1), "testcase", name="no problems", classname="mpguard")
    ET.indent(suites)
    # In ASCII, so that the declared encoding is right whatever encoding the report is written in.
    data: bytes = ET.tostring(suites, encoding="us-ascii", xml_declaration=True)
    return data.decode("ascii")


def _suite(suites: ET.Element, name: str, tests: int, failures: int = 0, errors: int = 0) -> ET.Element:
    return ET.SubElement(
        suites, "testsuite", name=name, tests=str(tests), failures=str(failures), errors=str(errors), skipped="0"
    )


def _case(suite: ET.Element, path: str, finding: Finding) -> None:
    cell = "" if finding.cell is None else f"cell {finding.cell}:"
    place = f"{cell}{finding.line}:{finding.column}"
    message = printable(finding.message)
    case = ET.SubElement(
        suite,
        "testcase",
        name=f"{finding.code} {finding.name} {place}",
        classname=path,
        file=path,
        line=str(finding.line),
    )
    failure = ET.SubElement(case, "failure", message=message, type=finding.severity)
    help_ = f"\n{printable(finding.help)}" if finding.help else ""
    failure.text = f"{path}:{place}: {finding.code} {message}{help_}"
