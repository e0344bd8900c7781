"""Former names of modules, classes and functions that an extension may import, and where they are now.

The table has only what the author of a plugin, a recipe or a rule would import; any other module of an older mpguard
gets a general sentence. A class whose attributes were renamed derives from `FormerNames`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from mpguard.core.lazy_pattern import lazy_pattern

#: Former module (and everything below it) -> where its public names are imported from now.
MODULES = {
    "mpguard.plugin": "mpguard.targets",
    "mpguard.carried": "mpguard.targets.capabilities",
    "mpguard.policy": "mpguard.policy",
    "mpguard.dtype": "mpguard.policy",
    "mpguard.typed": "mpguard.policy.coerce",
    "mpguard.hardware": "mpguard.policy.hardware",
    "mpguard.recipes": "mpguard",
    "mpguard.errors": "mpguard",
    "mpguard.conversion": "mpguard",
    "mpguard.scaling": "mpguard.nn.grad_scaler",
    "mpguard.mpyaml": "mpguard.document.mp_yaml",
    "mpguard.edits": "mpguard.lint",
    "mpguard.lint": "mpguard.lint",
    "mpguard.lint.rule": "mpguard.lint",
}

#: Former name in such a module -> its name now.
NAMES = {
    "Guard": "PathCondition",
    "Meeting": "ScalarUse",
    "Moment": "TraceStep",
    "Of": "TensorDtype",
    "Overlap": "OverlappingEdits",
    "Unwritable": "EditRefused",
    "fields_that_matter": "required_fields",
    "require_carried": "require_supported",
}

#: For modules that the table does not have.
_ELSEWHERE = (
    "this version of mpguard has no such module; public names are in `mpguard`, `mpguard.policy`, `mpguard.targets` "
    "(plugins) and `mpguard.lint` (rules)"
)

_MISSING_NAME = lazy_pattern(r"cannot import name '(\w+)' from '(mpguard[\w.]*)'")


class FormerNames:
    """Base of a class whose attributes or arguments were renamed: an error about a former name gives its name now.

    class Setting(FormerNames, former={"why": "reason"}): ...
    """

    former_names: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, former: Mapping[str, str] | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if former is not None:
            cls.former_names = former

    if not TYPE_CHECKING:  # for a type checker any attribute would exist, and any argument

        def __new__(cls, *_args: Any, **keywords: Any) -> FormerNames:
            for old in keywords.keys() & cls.former_names.keys():
                raise TypeError(f"{cls.__name__}({old}=...): the argument is now `{cls.former_names[old]}`")
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Any:
            now = self.former_names.get(name)
            hint = f"; the attribute is now `{now}`" if now else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


def new_place(module: str) -> str | None:
    """Return the module that has the public names of a former one now; None if the table does not have it."""
    while module and module not in MODULES:
        module = module.rpartition(".")[0]
    return MODULES.get(module)


def import_error(error: ImportError, importer: str) -> str | None:
    """Return a message for a failed import of a name of mpguard that moved; None for any other failed import.

    importer: the module that was being imported. If the import failed in a module that it imports, the message names
    that one.
    """
    importer = _failing_module(error.__traceback__) or importer
    missing = _MISSING_NAME.match(str(error))
    if missing is not None:
        name, module = missing[1], missing[2]
        submodule = f"{module}.{name}"
        if submodule in MODULES:
            return f"`{importer}` imports `{submodule}`, {_advice(submodule)}"
        renamed = f"; `{name}` is now `{NAMES[name]}`" if name in NAMES else ""
        place = new_place(module)
        where = f"the public names are in `{place}`" if place else _ELSEWHERE
        return f"`{importer}` imports `{name}` from `{module}`, where it is not defined{renamed}; {where}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mpguard."):
        return f"`{importer}` imports `{error.name}`, {_advice(str(error.name))}"
    return None


def _advice(module: str) -> str:
    place = new_place(module)
    return f"which moved: import from `{place}`" if place else f"but {_ELSEWHERE}"


def _failing_module(traceback: TracebackType | None) -> str | None:
    """Return the module whose import statement failed: the innermost frame outside of importlib and this package."""
    found = None
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if not name.startswith(("importlib", "_frozen_importlib", __package__)):
            found = name
        traceback = traceback.tb_next
    return found
