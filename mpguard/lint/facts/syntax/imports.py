"""Imports, and names bound to dotted names: their uses, and whether they are fallbacks for an older torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import Flag, Not, PathCondition
from mpguard.lint.source.files import NEVER

if TYPE_CHECKING:
    from mpguard.lint.facts.syntax.records import Binding, Record, Use
    from mpguard.lint.facts.syntax.view import SyntaxView

#: A condition on the version of torch, or on the presence of an attribute.
_VERSION_CHECK = lazy_pattern(
    r"(?i)version|hasattr|torch_?\w*\d|is_torch_\w*than|torch_(?:ge|gt|min)(?:_|\b)|has_\w*(?:amp|autocast|scaler)"
)
#: A branch for torch 1.x and newer is not a fallback: it is the one that runs today.
_TORCH_1 = lazy_pattern(r">=?\D*1\.\d")


def imports(facts: SyntaxView) -> Iterator[Binding]:
    """Yield every binding by an import."""
    for scope in facts.index.scopes:
        for bindings in scope.bindings.values():
            yield from (binding for binding in bindings if binding.kind in ("from", "import"))


def renamed(facts: SyntaxView) -> Iterator[Binding]:
    """Yield every binding of a plain name to a dotted one: `amp = torch.cuda.amp`."""
    for scope in facts.index.scopes:
        for key, bindings in scope.bindings.items():
            if "." not in key:
                yield from (each for each in bindings if each.kind == "assign" and "." in dotted(each.value))


def by_statement(bindings: list[Binding]) -> dict[cst.CSTNode, list[Binding]]:
    """Group bindings by their import statement."""
    found: dict[cst.CSTNode, list[Binding]] = {}
    for binding in bindings:
        found.setdefault(binding.statement or binding.node, []).append(binding)
    return found


def uses(facts: SyntaxView, binding: Binding) -> list[Use]:
    """Return the uses of a name that an import binds, in the scopes that see the binding."""
    scopes = facts.index.scopes if binding.scope.kind == "module" else list(binding.scope.descendants())
    return [
        use
        for scope in scopes
        if scope is binding.scope or binding.key not in scope.bindings
        for use in scope.uses.get(binding.key, ())
    ]


def stands_in(record: Record) -> bool:
    """True if a record is for an older torch only: in an `except` arm, or under a condition on the version."""
    for condition in record.guard:
        if isinstance(condition, Not) and isinstance(condition.inner, Flag) and condition.inner.name.startswith("try#"):
            return True
        if isinstance(condition, Flag) and _TORCH_1.search(condition.name):
            continue
        if any(
            _VERSION_CHECK.search(flag) for flag in PathCondition([condition]).flags() if not flag.startswith("try#")
        ):
            return True
    return False


def own(facts: SyntaxView, package: str) -> bool:
    """True if a file belongs to the source tree of a package itself, with its tests and examples: a fork of apex."""
    with tracked_fs.recording_for(facts.path):
        return _contains_package(Path(facts.path).absolute().parent, package)


@cached_per_run
def _contains_package(folder: Path, package: str) -> bool:
    """True if a folder, or one above it, holds the sources of a package."""
    if folder.name in NEVER or folder.parent == folder:  # an installed package: its neighbours are not of its tree
        return False
    here = tracked_fs.is_file(folder / "__init__.py")  # a sub-package with the same name: `theirs.torch`
    holds = not here and tracked_fs.is_file(folder / package / "__init__.py")
    return holds or _contains_package(folder.parent, package)
