"""AdamW for a parameter in low precision and its FP32 master, as one Triton kernel. Imports Triton.

The arithmetic is that of `torch.optim.AdamW`, in FP32. The kernel reads gradient, parameter, master and states once,
and writes all but the gradient: 30 bytes a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]  # noqa: PLR0917  arguments of a kernel
    parameters, gradients, masters, averages, squares,
    count, decay, first, second, beta2, step_size, root, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    p = tl.load(parameters + place, mask=inside)
    g = tl.load(gradients + place, mask=inside).to(tl.float32)
    w = tl.load(masters + place, mask=inside)
    m = tl.load(averages + place, mask=inside)
    v = tl.load(squares + place, mask=inside)
    # A parameter that is not its rounded master was written by other code: go on with its value.
    w = tl.where(w.to(p.dtype) == p, w, p.to(tl.float32))
    m = m + first * (g - m)
    v = v * beta2 + second * g * g
    w = w * decay - step_size * (m / (tl.sqrt(v) / root + eps))
    tl.store(averages + place, m, mask=inside)
    tl.store(squares + place, v, mask=inside)
    tl.store(masters + place, w, mask=inside)
    tl.store(parameters + place, w.to(p.dtype), mask=inside)


def adamw(
    parameter: torch.Tensor, gradient: torch.Tensor, master: torch.Tensor, state: Mapping[str, Any],
    *, group: Mapping[str, Any], step: int,
) -> None:  # fmt: skip
    """Update a parameter, its master and its states in place. step: its number, from 1. group: the optimizer's."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    count = parameter.numel()
    with torch.cuda.device_of(parameter):  # type: ignore[no-untyped-call]
        _adamw[(triton.cdiv(count, BLOCK),)](
            parameter.detach(), gradient.detach(), master.detach(), state["exp_avg"], state["exp_avg_sq"],
            count, 1 - lr * group["weight_decay"], 1 - beta1, 1 - beta2, beta2,
            lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, group["eps"],
            BLOCK=BLOCK,
        )  # fmt: skip
