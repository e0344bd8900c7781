"""Patches of FSDP2: gradients under tensor parallelism are reduced in the policy's dtype over each dimension.

What a hook makes of the reduced gradients is compared with what it got.

The gradient of a parameter that is replicated over tensor parallel ranks (a norm) is summed over them when FSDP takes
it, before FSDP casts it to its `reduce_dtype`: in the compute dtype.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks

#: The argument with the hook that changes gradients after their reduction.
HOOK = "all_reduce_hook"


@patch(
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._get_grad_inner_tensor",
    needs=("grad",),
    reason="gradients of norms are summed over tensor parallel ranks in the compute dtype, before FSDP casts "
    "them (S36)",
    lost="gradients of norms are summed over tensor parallel ranks in the compute dtype",
    check=checks.fsdp2,
)
def _take_gradient(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def _get_grad_inner_tensor(self: Any, grad: Any) -> Any:
        # Since torch 2.14 a plain gradient of a parameter with `spmd_types` becomes a DTensor inside of the original.
        spmd: Any = getattr(self, "_spmd_grad_placements", None) if getattr(self, "is_spmd_types", False) else None
        partial = any(placement.is_partial() for placement in spmd or getattr(grad, "placements", None) or ())
        wider = self.reduce_dtype is not None and self.reduce_dtype.itemsize > grad.dtype.itemsize
        if guards.current() is not None and partial and wider:
            grad = grad.to(self.reduce_dtype)
        return original(self, grad)

    return _get_grad_inner_tensor


@patch(
    "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce",
    needs=("fsdp_params", "unsharded_grads"),
    reason="FSDP2 refuses gradients of different dtypes: after the cast for the sum, the others are cast too (S36)",
    lost="gradients of norms are summed over tensor parallel ranks in the compute dtype",
    check=checks.fsdp2,
)
def _reduce(original: AnyFunction) -> AnyFunction:
    names = list(inspect.signature(original).parameters)
    place = names.index(HOOK) - 2 if HOOK in names else -1  # among those after the gradients

    @functools.wraps(original)
    def foreach_reduce(fsdp_params: Any, unsharded_grads: list[Any], *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        hook = kwargs.get(HOOK) or (args[place] if 0 <= place < len(args) else None)
        if hook is not None and guard is not None and guard.waiting:
            hook = guard.recorder.comm_hooks.around(hook, id(fsdp_params[0].sharded_param))
            if HOOK in kwargs:
                kwargs[HOOK] = hook
            else:
                args = (*args[:place], hook, *args[place + 1 :])
        if guards.current() is not None and len({grad.dtype for grad in unsharded_grads}) > 1:
            widest = max((grad.dtype for grad in unsharded_grads), key=lambda dtype: dtype.itemsize)
            # In place: the list owns the gradients, and FSDP frees them by clearing it.
            unsharded_grads[:] = [grad.to(widest) for grad in unsharded_grads]
        return original(fsdp_params, unsharded_grads, *args, **kwargs)

    return foreach_reduce
