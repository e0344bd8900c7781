"""A process with several runs can clear every cache of the linter that depends on the disk."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mpguard
from mpguard.core import settings
from mpguard.core.tracked_fs import clear_run_caches

PACKAGE = Path(mpguard.__file__).parent
#: Cached functions whose result depends on their arguments and the installation alone.
PURE = {
    "_code",
    "_found_nearby",
    "_nearby_search",
    "_fields",
    "_joined",
    "_consistent",
    "documentation_url",
    "_parser",
    "_plan",
    "_accepted",
    "_bounds",
    "_compiled",
    "_is_node",
    "_methods",
    "_names_masters",
    "_text_constant",
    "suspect",
}


def test_every_cached_function_of_the_lint_path_is_pure_or_cached_per_run() -> None:
    found = set()
    for file in (
        PACKAGE / "core/settings.py",
        PACKAGE / "core/documentation.py",
        *PACKAGE.glob("lint/**/*.py"),
        *PACKAGE.glob("document/**/*.py"),
    ):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in map(ast.unparse, node.decorator_list):
                if re.match(r"(functools\.)?(lru_)?cache\b", decorator):
                    found.add(node.name)
                    assert node.name in PURE, (
                        f"{file}: the result of {node.name} may depend on the disk: use @cached_per_run"
                    )
    assert found == PURE, "each of these functions exists"


def test_clearing_the_caches_reads_the_settings_again(tmp_path: Path) -> None:
    file = tmp_path / "mpguard.toml"
    file.write_text('ignore = ["MPG101"]\n')
    assert settings.nearest(tmp_path).ignore == ("MPG101",)
    file.write_text('ignore = ["MPG102"]\n')
    assert settings.nearest(tmp_path).ignore == ("MPG101",), "one run sees one state"
    clear_run_caches()
    assert settings.nearest(tmp_path).ignore == ("MPG102",)
