"""Which patches apply to the installed libraries: by reading their files, and by running a program of each.

`python -m mpguard.runtime.patches.fit` runs the programs, prints a line of JSON for each patch, and ends with status 1
if one does not apply. A patch is `obsolete` where its program passes without it: the library has the behaviour itself.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import itertools
import json
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mpguard.core.patches import (
    ADJUSTMENTS,
    PATCHES,
    Adjustment,
    AnyFunction,
    NotHere,
    Obsolete,
    Patch,
    misfit,
    resolve,
)

#: The states of a patch.
APPLIES, OBSOLETE, ABSENT, LOST = "applies", "obsolete", "library absent", "does not apply"

#: The modules whose import fills the table. By name: those of `watching` are not imported in a run without it.
TABLES = (
    "mpguard.runtime.patches.table", "mpguard.runtime.exit_hooks", "mpguard.nn.fp8.weights", "mpguard.nn.grad_scaler",
    "mpguard.watching.patches",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fit:
    """If a patch applies. reason: why not; empty if it does."""

    patch: Patch | Adjustment
    state: str
    reason: str = ""

    def as_json(self) -> dict[str, str]:
        return {
            "patch": self.patch.name, "library": self.patch.package, "state": self.state, "reason": self.reason,
            "lost": "" if self.state in (APPLIES, OBSOLETE) else self.patch.lost,
        }  # fmt: skip


# -- without an import: the files of the libraries -----------------------------------------------


def read(patches: Iterable[Patch | Adjustment], paths: Sequence[str]) -> Iterator[Fit]:
    """Yield the fit of each patch, from the files of the libraries; nothing is imported. paths: as `sys.path`.

    What is no `def` in its file (an alias, an inherited method) counts as applying: only an import would show it.
    """
    for patch in patches:
        path = _file(patch.module, tuple(paths))
        if patch.module in sys.builtin_module_names:
            yield Fit(patch, APPLIES)
            continue
        if path is None:
            absent = _file(patch.package, tuple(paths)) is None
            reason = "" if absent else f"there is no module {patch.module}"
            yield Fit(patch, ABSENT if absent else LOST, reason)
            continue
        found = _definitions(path)
        missing = _missing(patch, found) if found is not None else None
        yield Fit(patch, APPLIES if missing is None else LOST, missing or "")


@functools.lru_cache(maxsize=256)
def _file(module: str, paths: tuple[str, ...]) -> str | None:
    """Return the file of a module, without importing the packages that it is in."""
    places: Sequence[str] | None = paths
    found = None
    *packages, last = module.split(".")
    name = ""
    for part in [*packages, last]:
        name = f"{name}.{part}" if name else part
        found = importlib.machinery.PathFinder.find_spec(name, places)
        if found is None:
            return None
        places = found.submodule_search_locations
    return found.origin if found is not None else None


@functools.lru_cache(maxsize=256)
def _definitions(path: str) -> dict[str, frozenset[str] | None] | None:
    """Return the names that a file binds, with the parameters of functions; None if it cannot be read.

    None for a class that has bases, and for what is no `def`.
    """
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    found: dict[str, frozenset[str] | None] = {}
    _collect(tree.body, "", found)
    return found


def _collect(body: Sequence[ast.stmt], prefix: str, found: dict[str, frozenset[str] | None]) -> None:
    for each in body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own = each.args
            arguments = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
            found[prefix + each.name] = frozenset(argument.arg for argument in arguments if argument is not None)
        elif isinstance(each, ast.ClassDef):
            found[prefix + each.name] = None if each.bases else frozenset()
            _collect(each.body, f"{prefix}{each.name}.", found)
        elif isinstance(each, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody"):
                _collect(getattr(each, block, []), prefix, found)
        else:
            for node in ast.walk(each):
                name = node.asname or node.name if isinstance(node, ast.alias) else getattr(node, "id", None)
                if name:
                    found.setdefault(prefix + name, None)


def _missing(patch: Patch | Adjustment, found: dict[str, frozenset[str] | None]) -> str | None:
    if isinstance(patch, Adjustment):
        return None if patch.option in ("", *found) else f"there is no {patch.option} in {patch.module}"
    owner = patch.target.rpartition(".")[0]
    if patch.target not in found and owner in found and found[owner] is None:
        return None  # a class with bases may inherit it
    if patch.target not in found:
        return f"there is no {patch.target} in {patch.module}"
    parameters = found[patch.target]
    lacking = [] if parameters is None else [each for each in patch.needs if each not in parameters]
    return f"{patch.name} has no parameter {', '.join(lacking)}" if lacking else None


# -- with the library ----------------------------------------------------------------------------


def replace(owner: Any, name: str, original: Any, wrapped: Any) -> None:
    """Replace a function, also in the modules that have imported it by name already."""
    setattr(owner, name, wrapped)
    if isinstance(owner, type):
        return
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and namespace.get(name) is original:
            namespace[name] = wrapped


@contextlib.contextmanager
def _with(patches: Iterable[tuple[Patch, AnyFunction]]) -> Iterator[None]:
    """Apply wrappers to targets for a while."""
    undo = []
    try:
        for patch, wrap in patches:
            owner, name, original = resolve(patch, importlib.import_module(patch.module))
            wrapped = wrap(original)
            replace(owner, name, original, wrapped)
            undo.append((owner, name, wrapped, original))
        yield
    finally:
        for owner, name, wrapped, original in reversed(undo):
            replace(owner, name, wrapped, original)


def behaviours(patches: Sequence[Patch]) -> Iterator[Fit]:
    """Yield the fit of each patch, by running its program with the installed library; each program runs once."""
    programs: dict[Any, list[Patch]] = {}
    for patch in patches:
        state, reason = _signature_here(patch)
        if patch.traced and state != ABSENT:
            yield _established(patch, [each for each in patches if each.traced], reason)
        elif state != APPLIES:
            yield Fit(patch, state, reason or "")
        else:
            programs.setdefault(patch.check, []).append(patch)
    for check, sharing in programs.items():
        yield from _called(check, sharing)


def _signature_here(patch: Patch) -> tuple[str, str | None]:
    """Return the state of a patch as far as its module and signature show it, with the reason."""
    try:
        reason = misfit(patch, importlib.import_module(patch.module))
    except ModuleNotFoundError as error:
        if error.name == patch.package:
            return ABSENT, None
        return LOST, f"{type(error).__name__}: {error}"
    return (APPLIES if reason is None else LOST), reason


def _called(check: Callable[[], None], patches: Sequence[Patch]) -> Iterator[Fit]:
    """Run a program, and yield for each of its patches if the target was called."""
    first = {patch.name: patch for patch in patches}
    called = mmap.mmap(-1, len(first))  # a program may call a target in a process that it forks

    def spying(place: int) -> Callable[[AnyFunction], AnyFunction]:
        def spy(original: AnyFunction) -> AnyFunction:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                called[place] = 1
                return original(*args, **kwargs)

            return call

        return spy

    failure = ""
    try:
        with _with((patch, spying(place)) for place, patch in enumerate(first.values())):
            check()
    except Obsolete as error:
        yield from (Fit(patch, OBSOLETE, str(error)) for patch in patches)
        return
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    reached = {name for place, name in enumerate(first) if called[place]}
    for patch in patches:
        reason = failure or ("" if patch.name in reached else f"it is not called in: {check.__doc__}")
        yield Fit(patch, LOST if reason else APPLIES, reason)


def _established(patch: Patch, traced: Sequence[Patch], reason: str | None) -> Fit:
    """Run the program of a traced patch, without patches and with them."""
    try:
        patch.check()
    except Exception:
        obsolete = False
    else:
        obsolete = True
    if obsolete:
        return Fit(patch, OBSOLETE)
    if reason is not None:
        return Fit(patch, LOST, reason)
    applied = [
        (each, each.wrap)
        for each in traced
        if each.module == patch.module and misfit(each, importlib.import_module(each.module)) is None
    ]
    try:
        with _with(applied):
            patch.check()
    except Exception as error:
        return Fit(patch, LOST, f"{type(error).__name__}: {error}")
    return Fit(patch, APPLIES)


def adjusted(adjustments: Iterable[Adjustment]) -> Iterator[Fit]:
    """Yield the fit of each adjustment, by running its program without it and with it. It stays in force."""
    for each in adjustments:
        try:
            each.check()
        except NotHere as error:
            yield Fit(each, ABSENT, str(error))
            continue
        except Exception:
            reason = each.apply(importlib.import_module(each.module)) or _failure(each.check)
            yield Fit(each, LOST if reason else APPLIES, reason)
        else:
            yield Fit(each, OBSOLETE)


def _failure(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Run the programs of all patches, then those of the adjustments."""
    for name in TABLES:
        importlib.import_module(name)
    found = []
    for each in itertools.chain(behaviours(PATCHES), adjusted(ADJUSTMENTS)):
        found.append(each)
        print(json.dumps(each.as_json()), flush=True)
    return int(any(each.state == LOST for each in found))


if __name__ == "__main__":
    sys.exit(main())
