"""Compute the modules that a policy names in `fp32_modules` in FP32, in each engine.

The models are found when an engine takes them (DDP, FSDP, DeepSpeed cast or copy parameters) and when an optimizer is
created. FSDP casts parameters per unit, so such modules get units of their own.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mpguard.nn.fp8.filters import plain_name
from mpguard.runtime.guard import Guard
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.observe import updated_by

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Modules of models that have been searched: FSDP is applied to one part of a model after the other.
_searched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def keep_in_optimizer(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
    """Compute the modules that the policy names in FP32, in the models that an optimizer updates."""
    if guard.plan.policy.fp32_modules:
        for root in models_of(updated_by(optimizer)):
            _keep(guard, root)


def keep_in_model(guard: Guard, modules: Iterable[nn.Module]) -> None:
    """The same in the models that some modules belong to, before an engine takes them."""
    if not guard.plan.policy.fp32_modules:
        return
    new = [module for module in modules if module not in _searched]
    for root in models_of([parameter for module in new for parameter in module.parameters()]):
        _keep(guard, root)


def _keep(guard: Guard, root: nn.Module) -> None:
    from mpguard.nn import fp32

    modules = [(plain_name(name), module) for name, module in root.named_modules(remove_duplicate=False)]
    _searched.update(module for _, module in modules)
    rounded = fp32.keep(modules, guard.plan.policy)
    if rounded:
        more = f" and {len(rounded) - 3} more" if len(rounded) > 3 else ""
        guard.reporter.print_once(
            f"mpguard: fp32_modules: the buffers {', '.join(rounded[:3])}{more} were cast to low precision before, and "
            "have lost digits. Do not cast the whole model (`model.to(torch.bfloat16)`): cast its parameters"
        )


# -- FSDP1 ---------------------------------------------------------------------------------------


def fsdp1_arguments(guard: Guard, wrapper: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Change the arguments of FSDP1 so that the modules in FP32 become units of their own.

    wrapper: the class. arguments: by name, with the policy's mixed precision in them.
    """
    module = arguments["module"]
    keep_in_model(guard, [module])
    from mpguard.nn import fp32

    if not guard.plan.policy.fp32_modules:
        return
    if fp32.is_kept(module):
        arguments["mixed_precision"] = _in_fp32(arguments["mixed_precision"])
        return
    ignored = {each for name in ("ignored_modules", "ignored_states") for each in arguments.get(name) or ()}
    found = [part for part in fp32.separable(module) if not ignored & {*part[2].modules(), *part[2].parameters()}]
    if not found:
        return
    policy = arguments.get("auto_wrap_policy")
    if policy is not None:  # FSDP refuses one in which modules are wrapped already: the policy has to name them too
        arguments["auto_wrap_policy"] = _with_modules(policy, {child for _, _, child in found})
        return
    own = {name: value for name, value in arguments.items() if name not in ("self", "module")}
    for parent, name, child in found:
        setattr(parent, name, wrapper(child, **own))


def _in_fp32(mixed: Any) -> Any:
    """Return a MixedPrecision in which parameters, buffers and inputs are not cast; gradients are reduced as before."""
    import torch

    return dataclasses.replace(mixed, param_dtype=torch.float32, buffer_dtype=None, cast_forward_inputs=False)


def _with_modules(policy: Any, modules: set[nn.Module]) -> Any:
    """Return an auto-wrap policy that wraps some modules in addition to those of another policy."""
    from torch.distributed.fsdp.wrap import _Policy

    inside = {inner for module in modules for inner in module.modules()} - modules
    if not isinstance(policy, _Policy):

        def wrap(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            if module in modules:
                return True
            if module in inside:
                return recurse
            wanted = policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
            return bool(wanted) or (recurse and any(each in modules for each in module.modules()))

        return wrap

    class WithModules(_Policy):
        def _run_policy(self, root: nn.Module, ignored: set[nn.Module], kwargs: dict[str, Any]) -> dict[Any, Any]:
            targets = policy._run_policy(root, ignored, kwargs)
            kept = {module: own for module, own in targets.items() if module not in inside}
            return {**kept, **{module: dict(kwargs) for module in modules}}

    return WithModules()


# -- FSDP2 ---------------------------------------------------------------------------------------


def fully_shard_separately(guard: Guard, shard: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    """Shard the modules in FP32 as groups of their own, before the modules around them. False if nothing is left.

    shard: the original `fully_shard`. arguments: by name, with the policy's mixed precision in them.
    """
    given = arguments["module"]
    modules = list(given) if isinstance(given, (list, tuple)) else [given]
    keep_in_model(guard, modules)
    if not guard.plan.policy.fp32_modules:
        return True
    from torch.distributed.fsdp import FSDPModule

    from mpguard.nn import fp32

    whole = [module for module in modules if fp32.is_kept(module)]
    ignored = set(arguments.get("ignored_params") or ())
    inside = [
        child
        for module in modules
        if module not in whole
        for _, _, child in fp32.separable(module)
        if not ignored & set(child.parameters())
    ]
    own = {name: value for name, value in arguments.items() if name != "module"}
    own["mp_policy"] = _without_casts(own["mp_policy"])
    for module in (*whole, *inside):
        if not any(isinstance(each, FSDPModule) for each in module.modules()):
            shard(module, **own)
    rest = [module for module in modules if module not in whole]
    arguments["module"] = rest if isinstance(given, (list, tuple)) else given
    return bool(rest)


def _without_casts(policy: Any) -> Any:
    """Return a MixedPrecisionPolicy in which nothing is cast; gradients are reduced as before."""
    import torch

    return dataclasses.replace(policy, param_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)
