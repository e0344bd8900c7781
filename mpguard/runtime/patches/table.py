"""All patches and adjustments, and how they are applied.

Each patch is applied to the module that defines its target when that module is imported, and only if the
target still has the parameters that the wrapper relies on; otherwise a warning is logged, the patch is
skipped, and the proof shows whether the policy is in force. Classes stay classes: methods are replaced, so
`isinstance`, subclassing and pickling work as before.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

from mpguard.runtime.containment import PROOF, Containment, contained_hook
from mpguard.runtime.patches import (
    accelerate,
    autocast,
    checkpointing,
    deepspeed,
    fsdp_gradients,
    grad_scaler,
    gradient_factors,
    import_hooks,
    process_group,
    torch,
    transformer_engine,
    transformers,
)
from mpguard.runtime.patches.patch import Adjustment, Patch

log = logging.getLogger("mpguard")

ADJUSTMENTS = torch.ADJUSTMENTS

PATCHES = (
    *accelerate.PATCHES,
    *transformers.PATCHES,
    *deepspeed.PATCHES,
    *torch.PATCHES,
    *grad_scaler.PATCHES,
    *autocast.PATCHES,
    *checkpointing.PATCHES,
    *fsdp_gradients.PATCHES,
    *process_group.PATCHES,
    *gradient_factors.PATCHES,
    *transformer_engine.PATCHES,
)


def apply_patches() -> None:
    """Apply each patch when its module is imported; at once if it has been imported already."""
    for patch in PATCHES:
        import_hooks.after(patch.module, contained_hook(functools.partial(apply_patch, patch), patch.module))
    for adjustment in ADJUSTMENTS:
        import_hooks.after(adjustment.module, contained_hook(functools.partial(_adjust, adjustment), adjustment.module))
    # Dynamo must not trace frames of this package. It must trace those of converted layers, which are in mpguard.nn.
    import_hooks.after("torch._dynamo.trace_rules", lambda module: module.add("mpguard.runtime"))


def _adjust(adjustment: Adjustment, module: ModuleType) -> None:
    """Make an adjustment, or log why not."""
    reason = adjustment.apply(module)
    if reason is not None:
        log.warning(
            "mpguard: %s: %s: not changed; the proof shows whether the policy is in force (tested with %s)",
            adjustment.what,
            reason,
            adjustment.tested,
        )


def apply_patch(patch: Patch, module: ModuleType, containment: Containment = PROOF) -> None:
    """Replace the target of a patch in its module, unless that was done before or the target has changed.

    containment: of the part of mpguard that the patch belongs to.
    """
    *path, name = patch.target.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, name, None)
    if original is None or getattr(original, containment.mark, False):
        if original is None:
            log.warning(
                "mpguard: %s has no %s in the installed version: not wrapped; the proof shows whether the policy is in "
                "force (tested with %s)",
                patch.module,
                patch.target,
                patch.tested,
            )
        return
    missing = [parameter for parameter in patch.needs if parameter not in inspect.signature(original).parameters]
    if missing:
        log.warning(
            "mpguard: %s.%s has no parameter %s in the installed version: not wrapped; the proof shows whether the "
            "policy is in force (tested with %s)",
            patch.module, patch.target, ", ".join(missing), patch.tested,
        )  # fmt: skip
        return
    if patch.traced:
        wrapped = patch.wrap(original)
    else:
        wrapped = containment.contain(f"{patch.module}.{patch.target}", original, patch.wrap)
    setattr(wrapped, containment.mark, True)
    setattr(owner, name, wrapped)
    if not path:
        _replace_imported(name, original, wrapped)


def _replace_imported(name: str, original: Any, wrapped: Any) -> None:
    """Replace a function in the modules that have imported it by name already."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and namespace.get(name) is original:
            namespace[name] = wrapped
