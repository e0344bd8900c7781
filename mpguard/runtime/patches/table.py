"""All patches and adjustments of the proof, and how they are applied.

Each patch is applied to the module that defines its target when that module is imported, and only if the target still
has the parameters that the wrapper relies on. Otherwise one line says what is lost, the proof has a row for it, and it
shows whether the policy is in force. Classes stay classes: methods are replaced, so `isinstance`, subclassing and
pickling work as before.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from mpguard.core import patches
from mpguard.core.patches import PROOF as PART
from mpguard.core.patches import Adjustment, Patch
from mpguard.runtime.containment import PROOF, Containment, contained_hook
from mpguard.runtime.patches import (  # noqa: F401  # importing them fills the table
    accelerate_plugins,
    compile_models,
    deepspeed_engine,
    fit,
    import_hooks,
    te_optimizer_masters,
    torch_autocast_regions,
    torch_backward_recording,
    torch_build_locks,
    torch_checkpoint_recording,
    torch_compiled_recording,
    torch_ddp_conversion,
    torch_fsdp_dtypes,
    torch_fsdp_gradients,
    torch_gradient_factors,
    torch_module_casts,
    torch_optimizer_conversion,
    torch_plan_exchange,
    torch_profiler_precedence,
    torch_rnn_autocast,
    torch_scaler_settings,
    transformers_kernels,
    transformers_trainer,
)

log = logging.getLogger("mpguard")

ADJUSTMENTS = tuple(patches.ADJUSTMENTS)

PATCHES = tuple(each for each in patches.PATCHES if each.part == PART)


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
        _report(adjustment, f"{adjustment.what}: {reason}")


def apply_patch(patch: Patch, module: ModuleType, containment: Containment = PROOF) -> None:
    """Replace the target of a patch in its module, unless that was done before or the target has changed.

    containment: of the part of mpguard that the patch belongs to.
    """
    owner, name, original = patches.resolve(patch, module)
    if getattr(original, containment.mark, False):
        return
    reason = patches.misfit(patch, module)
    if reason is not None:
        _report(patch, reason)
        return
    if patch.traced:
        wrapped = patch.wrap(original)
    else:
        wrapped = containment.contain(patch.name, original, patch.wrap)
    setattr(wrapped, containment.mark, True)
    fit.replace(owner, name, original, wrapped)


def _report(each: Patch | Adjustment, reason: str) -> None:
    """Log once what a run loses without a patch; the proof has a row for it."""
    line = patches.record_not_applied(each, reason)
    if line is not None:
        log.warning("mpguard: %s", line)
