"""Code that nothing in its project uses: modules that are neither imported nor run, and names that nothing reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.facts.syntax.records import Call

#: Modules that tools import by their names.
_BY_TOOLS = frozenset({"__init__", "__main__", "conftest", "hubconf", "setup", "sitecustomize", "usercustomize"})
#: Modules of the standard library whose calls start a program's work.
_RUNS = frozenset(
    {"argparse", "asyncio", "concurrent", "multiprocessing", "runpy", "subprocess", "threading", "unittest"}
)
_HARMLESS = re.compile(r"torch\.(?:set_|device$|manual_seed$|cuda\.is_available$)")


def is_unused_module(facts: Facts) -> bool:
    """True if nothing imports or runs a file: the project does not mention it, and all that it does is to define."""
    stem = Path(facts.path).stem
    return (
        facts.path.endswith(".py")
        and stem not in _BY_TOOLS
        and not facts.is_test
        and not facts.may_train
        and all(_is_preparation(call, facts) for call in facts.module.calls)
        and not facts.project.launches_of(facts.path)
        and not facts.project.used_elsewhere(facts.path, stem)
    )


def _is_preparation(call: Call, facts: Facts) -> bool:
    """True if a call at the top level of a module prepares, as in `sys.path.append(...)`; scripts call more."""
    path = facts.called_path(call)
    root = path.partition(".")[0]
    return bool(_HARMLESS.match(path)) or (root in sys.stdlib_module_names and root not in _RUNS)


def is_unused_value(call: Call, facts: Facts) -> bool:
    """True if a call's result is assigned to a top-level name that neither the file nor its project mentions again."""
    names = [key for key, bound in facts.module.bindings.items() if any(each.value is call.node for each in bound)]
    return (
        len(names) == 1
        and facts.path.endswith(".py")
        and len(re.findall(rf"\b{re.escape(names[0])}\b", facts.file_text)) == 1
        and not facts.project.used_elsewhere(facts.path, names[0])
    )
