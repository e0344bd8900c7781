"""docs/findings.md, the tests and the code list the same findings."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

from stock import OURS, ROOT, fixed_upstream, numbers

from mpguard.lint.model.rule import rules

FINDINGS = ROOT / "docs" / "findings.md"


def rows() -> dict[int, str]:
    """Return the line of each finding."""
    lines = FINDINGS.read_text(encoding="utf-8").splitlines()
    return {int(found[1]): line for line in lines if (found := re.match(r"\| S(\d+) \|", line))}


def places() -> dict[int, set[Path]]:
    """Return the files that have a `test_sNN_...` for each number."""
    found: dict[int, set[Path]] = {}
    for path in (*Path(__file__).parent.glob("test_*.py"), ROOT / "tests" / "gpu" / "test_stock_gpu.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = re.match(r"test_s(\d\d)_", node.name) if isinstance(node, ast.FunctionDef) else None
            if name:
                found.setdefault(int(name[1]), set()).add(path)
    return found


def test_every_finding_has_its_tests_and_names_them() -> None:
    linked = {
        number: {(FINDINGS.parent / link).resolve() for link in re.findall(r"\]\(([^)]+\.py)\)", line)}
        for number, line in rows().items()
    }
    assert linked == places()
    assert list(linked) == list(range(1, len(linked) + 1))


def test_what_is_to_be_removed_after_an_upstream_fix_exists() -> None:
    assert OURS.keys() == rows().keys()
    known = rules(own_only=True)
    gone = [(number, name) for number, named in OURS.items() for name in named if not (name in known or exists(name))]
    assert gone == [], "moved or renamed: update OURS in tests/support/stock.py"
    assert fixed_upstream(29) == "upstream has fixed S29: remove MPG826 and docs/findings.md's line"


def exists(name: str) -> bool:
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


def test_every_rule_in_findings_md_is_listed_for_its_finding() -> None:
    for number, line in rows().items():
        assert set(re.findall(r"MPG\d{3}", line)) <= set(OURS[number]), f"S{number}"


def test_the_code_cites_existing_findings() -> None:
    cited = {
        number
        for folder in ("mpguard", "plugins", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for number in numbers(path.read_text(encoding="utf-8"))
    }
    assert cited and cited <= rows().keys(), cited - rows().keys()


def test_every_stock_assertion_lists_what_to_remove() -> None:
    """`fixed_upstream(NN)` is called with the number of its test, at least once where stock behaviour is asserted."""
    for number, paths in places().items():
        cited = set()
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.FunctionDef) or not node.name.startswith(f"test_s{number:02}_"):
                    continue
                calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                cited |= {
                    ast.literal_eval(each.args[0]) for each in calls if getattr(each.func, "id", "") == "fixed_upstream"
                }
        assert cited == {number}, f"S{number}: {cited}"
