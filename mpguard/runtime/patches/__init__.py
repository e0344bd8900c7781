"""What is wrapped, and why: a table for each library.

Each patch goes into the defining module as it is imported, and only where the target still has the
parameters that it relies on; where it has not, that is said, the patch is left out, and the proof
decides. Classes stay classes: methods are replaced, and `isinstance`, subclassing and pickling
work as before.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

from mpguard.runtime.patches import accelerate, deepspeed, import_hooks, torch, transformer_engine, transformers
from mpguard.runtime.patches.patch import Patch

log = logging.getLogger("mpguard")


PATCHES = (*accelerate.PATCHES, *transformers.PATCHES, *deepspeed.PATCHES, *torch.PATCHES, *transformer_engine.PATCHES)


def apply() -> None:
    """Has every patch made as its module is imported; at once where it has been."""
    for patch in PATCHES:
        import_hooks.after(patch.module, functools.partial(_make, patch))
    # Our frames are none of its; those of converted layers are.
    import_hooks.after("torch._dynamo.trace_rules", lambda module: module.add("mpguard.runtime"))


def _make(patch: Patch, module: ModuleType) -> None:
    *path, name = patch.target.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, name, None)
    if original is None or getattr(original, "__mpguard__", False):
        if original is None:
            log.warning(
                "mpguard: %s has no %s here: not wrapped; the proof decides (tested with %s)",
                patch.module,
                patch.target,
                patch.tested,
            )
        return
    missing = [parameter for parameter in patch.needs if parameter not in inspect.signature(original).parameters]
    if missing:
        log.warning(
            "mpguard: %s.%s has no parameter %s here: not wrapped; the proof decides (tested with %s)",
            patch.module, patch.target, ", ".join(missing), patch.tested,
        )  # fmt: skip
        return
    wrapped = patch.wrap(original)
    wrapped.__mpguard__ = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    if not path:
        _replace_imported(name, original, wrapped)


def _replace_imported(name: str, original: Any, wrapped: Any) -> None:
    """A function that other modules have taken already is replaced there too."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and namespace.get(name) is original:
            namespace[name] = wrapped
