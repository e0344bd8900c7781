"""The modules that a policy names in `fp32_modules`: what they computed in."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from mpguard.nn.fp8.filters import is_wrapper, pattern_around
from mpguard.policy.policy import Policy

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass
class Fp32Modules:
    """The modules of a model that compute in FP32. Plain data.

    The names of the fields are keys of the proof file.

    computed: names of modules, by the dtype of their outputs. weights: number of modules with parameters, by the dtype
    in which the engine holds them. idle: modules that were not called. left: modules that match, and are not computed
    in FP32: they were added later. unmatched: patterns that match no module. bypassed: modules that were not called,
    and by whose weights other code multiplied; these are in `computed`, too.
    """

    computed: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    weights: dict[str, int] = dataclasses.field(default_factory=dict)
    idle: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    unmatched: list[str] = dataclasses.field(default_factory=list)
    bypassed: list[str] = dataclasses.field(default_factory=list)


def find_fp32_modules(
    modules: list[tuple[str, nn.Module]], policy: Policy, multiplied: Collection[tuple[str, int]] = ()
) -> Fp32Modules | None:
    """Return the modules that the policy names in `fp32_modules`, among named modules; None if it names none.

    multiplied: the dtypes of the matmuls in autograd's graph, with the ids of the weights.
    """
    if not policy.fp32_modules:
        return None
    from mpguard.nn import fp32

    found = Fp32Modules()
    for name, module in modules:
        if pattern_around(name, policy.fp32_modules) is None or is_wrapper(module):
            continue
        own = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        if not own and any(True for _ in module.children()):
            continue  # a container: its modules are counted
        if not fp32.is_kept(module):
            found.left.append(name)
            continue
        state: fp32.Fp32State = vars(module)[fp32.MARK]
        for dtype in {*state.calls, *state.compiled}:
            found.computed.setdefault(dtype, []).append(name)
        for dtype in state.weights:
            found.weights[dtype] = found.weights.get(dtype, 0) + 1
        if not state.calls and not state.compiled:
            own_weight = id(module._parameters.get("weight"))
            dtypes = {dtype for dtype, weight in multiplied if weight == own_weight}
            if dtypes and sum(id(each._parameters.get("weight")) == own_weight for _, each in modules) == 1:
                found.bypassed.append(name)
                for dtype in dtypes:
                    found.computed.setdefault(dtype, []).append(name)
            else:
                found.idle.append(name)
    elsewhere = [vars(module)[fp32.MARK].name for module in fp32.kept()]
    names = [name for name, _ in modules] + elsewhere  # a script may train several models
    found.unmatched = [
        pattern for pattern in policy.fp32_modules if not any(pattern_around(name, (pattern,)) for name in names)
    ]
    return found
