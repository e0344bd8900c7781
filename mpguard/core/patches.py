"""The table of patches: what is changed in libraries, why, and what is lost without it.

`@patch("torch.optim.optimizer:Optimizer.__init__", ...)` stands on the wrapper; the table is what was decorated.
Importing this module imports no library.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from mpguard.core.tested import DISTRIBUTIONS, SHOWN, TESTED, Window

log = logging.getLogger("mpguard")

#: A function of a library, or a wrapper of one.
AnyFunction = Callable[..., Any]

_Wrap = TypeVar("_Wrap", bound=AnyFunction)

#: The parts of mpguard that apply patches. OWN: applied with `apply_own` by the module that declares it.
PROOF, WATCHING, OWN = "proof", "watching", "own"


@dataclasses.dataclass(frozen=True)
class Patch:
    """A function of a library that is wrapped.

    module: the module that defines it. target: `Class.method` or `function` in that module. needs: the parameters that
    the wrapper relies on; without one of them the patch is not applied. reason: why it is wrapped, with the S-numbers
    of docs/findings.md. lost: what a run does without it; patches with the same text are reported in one line.
    wrap: takes the original function and returns the wrapper. check: a small program of the library: the target is
    called in it, and it raises `AssertionError` if the library behaves in another way than the wrapper relies on.
    required: takes a policy and a strategy, and returns True if a run cannot have them without the patch. tested: the
    versions, if others than those of the library in `TESTED`.
    traced: True for a function that a model's forward pass calls: dynamo must trace its wrapper, which therefore is not
    in `mpguard.runtime`, whose frames dynamo skips, and whose own failures are not contained. `check` then shows a
    behaviour that only the wrapped library has; where it has it anyway, the patch is obsolete.
    """

    module: str
    target: str
    needs: tuple[str, ...]
    reason: str
    lost: str
    wrap: AnyFunction
    check: Callable[[], None]
    part: str = PROOF
    required: Callable[[Any, str | None], bool] | None = None
    tested: Window | None = None
    traced: bool = False

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def name(self) -> str:
        return f"{self.module}.{self.target}"

    @property
    def window(self) -> Window | None:
        """The versions that it was tested with; None for Python's own modules."""
        return self.tested or TESTED.get(self.package)


@dataclasses.dataclass(frozen=True)
class Adjustment:
    """A change of a library that is no wrapped function: an option, an operator's kernel.

    module: the module after whose import it is made. what: the option or the operator. reason, lost, tested: as in
    `Patch`. apply: takes the module, and returns why it could not make the change, None if it did; it leaves a user's
    own value. check: a small program that raises `AssertionError` without the change, and none with it; `NotHere` where
    this machine cannot run it. option: the name in the module's file that the change relies on.
    """

    module: str
    what: str
    reason: str
    lost: str
    apply: Callable[[ModuleType], str | None]
    check: Callable[[], None]
    tested: Window | None = None
    option: str = ""

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def name(self) -> str:
        return self.what

    @property
    def target(self) -> str:
        return self.what.removeprefix(f"{self.module}.")

    @property
    def required(self) -> None:
        """No policy needs one: the proof reads the dtypes that it is for."""

    @property
    def window(self) -> Window | None:
        return self.tested or TESTED.get(self.package)


class Obsolete(Exception):
    """Raised by the program of a patch where the installed library no longer needs it, with the reason."""


class NotHere(Exception):
    """Raised by the program of an adjustment that this machine cannot run, with the reason."""


PATCHES: list[Patch] = []
ADJUSTMENTS: list[Adjustment] = []

#: Why patches and adjustments were not applied in this process, by what is lost.
not_applied: dict[str, str] = {}


def patch(
    target: str,
    *,
    needs: tuple[str, ...],
    reason: str,
    lost: str,
    check: Callable[[], None],
    part: str = PROOF,
    required: Callable[[Any, str | None], bool] | None = None,
    tested: Window | None = None,
    traced: bool = False,
) -> Callable[[_Wrap], _Wrap]:
    """Put a wrapper into the table. target: `module:Class.method` or `module:function`; the rest as in `Patch`."""
    module, _, name = target.partition(":")

    def collect(wrap: _Wrap) -> _Wrap:
        PATCHES.append(Patch(module, name, needs, reason, lost, wrap, check, part, required, tested, traced))
        return wrap

    return collect


def adjustment(
    module: str,
    what: str,
    *,
    reason: str,
    lost: str,
    check: Callable[[], None],
    tested: Window | None = None,
    option: str = "",
) -> Callable[[Callable[[ModuleType], str | None]], Callable[[ModuleType], str | None]]:
    """Put a change that is no wrapped function into the table; the arguments are those of `Adjustment`."""

    def collect(apply: Callable[[ModuleType], str | None]) -> Callable[[ModuleType], str | None]:
        ADJUSTMENTS.append(Adjustment(module, what, reason, lost, apply, check, tested, option))
        return apply

    return collect


def resolve(patch: Patch, module: Any) -> tuple[Any, str, Any]:
    """Return the owner of a patch's target, the name in it, and the target, None if it is not there."""
    *path, name = patch.target.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part, None)
    return owner, name, getattr(owner, name, None)


def misfit(patch: Patch, module: Any) -> str | None:
    """Return why a patch cannot be applied to a module; None if it can."""
    original = resolve(patch, module)[2]
    if original is None:
        return f"there is no {patch.target} in {patch.module}"
    missing = [name for name in patch.needs if name not in inspect.signature(original).parameters]
    return f"{patch.name} has no parameter {', '.join(missing)}" if missing else None


def fits(wrap: AnyFunction) -> bool:
    """Return True if the patch of a wrapper, of part OWN, can be applied; else log what is lost."""
    own = next(each for each in PATCHES if each.wrap is wrap)
    reason = misfit(own, importlib.import_module(own.module))
    line = record_not_applied(own, reason) if reason is not None else None
    if line is not None:
        log.warning("mpguard: %s", line)
    return reason is None


def apply_own(wrap: AnyFunction) -> None:
    """Apply the patch of a wrapper, of part OWN, once per process, if the library has what it needs."""
    own = next(each for each in PATCHES if each.wrap is wrap)
    owner, name, original = resolve(own, importlib.import_module(own.module))
    if getattr(original, _APPLIED, None) is not wrap and fits(wrap):
        wrapped = wrap(original)
        setattr(wrapped, _APPLIED, wrap)
        setattr(owner, name, wrapped)


#: The attribute of what `apply_own` has wrapped: its wrapper.
_APPLIED = "applied_by_mpguard"


def installed(library: str) -> str:
    """Return `transformers 5.30.0`: the library as messages name it, with its version if that is known."""
    shown = SHOWN.get(library, library)
    try:
        return f"{shown} {importlib.metadata.version(DISTRIBUTIONS.get(library, library))}"
    except importlib.metadata.PackageNotFoundError:
        return shown


def record_not_applied(each: Patch | Adjustment, reason: str) -> str | None:
    """Record that a patch is not applied, and return the line to print; None if its loss was recorded before."""
    if each.lost in not_applied:
        return None
    tested = f" (tested with {SHOWN.get(each.package, each.package)} {each.window})" if each.window is not None else ""
    not_applied[each.lost] = f"{installed(each.package)}: {reason}"
    return f"{installed(each.package)}: {reason}: {each.lost}{tested}"
