"""Record the backward passes of autograd."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.nn import cuda_graphs
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks, required
from mpguard.runtime.proof.gradients import are_applicable
from mpguard.runtime.proof.samples import safely

#: The position of the inputs among the arguments of a backward pass, after the outputs.
INPUTS = 3


#: The position of `create_graph` among them.
CREATE_GRAPH = 2


@patch(
    "torch.autograd.graph:_engine_run_backward",
    needs=("t_outputs",),
    reason="a backward pass ends a part of the account of matmuls; its leaves are in autograd's graph, which it frees",
    lost="the proof cannot observe what a backward pass computes",
    check=checks.step,
    required=required.any_policy,
)
def _backward(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        accumulates = bool(kwargs.get("accumulate_grad"))
        if guard is not None and guard.meter is not None and accumulates:
            guard.meter.record_loss(t_outputs, scaled=guard.plan.policy.fp16)
        if guard is None or not guard.waiting:
            applicable = guard is not None and guard.counts_passes and _are_applicable(args, accumulates)
            result = original(t_outputs, *args, **kwargs)
            cuda_graphs.backward_ended()
            if guard is not None and guard.listening and accumulates:
                guard.backward_unrecorded(t_outputs)
            if guard is not None and applicable:
                guard.backward_ended([], accumulates=accumulates)
            return result
        guard.check_limits()
        applicable, recorder = _are_applicable(args, accumulates), guard.recorder  # another thread may replace it
        watched = recorder.gradients.during_backward(t_outputs, accumulates)
        with recorder.record_backward(t_outputs, accumulates, list(guard.optimizers)), watched as leaves:
            recorder.by_hand.record_pass(leaves, guard.optimizers)
            scaled = recorder.scaled_passes
            fp16 = guard.plan.policy.fp16 and leaves
            own = safely(scaled.begin_pass, t_outputs, leaves, guard.optimizers) if fp16 else None
            result = original(t_outputs, *args, **kwargs)
            scaled.end_pass(own or ())
        cuda_graphs.backward_ended()
        if not accumulates and len(args) > INPUTS and args[INPUTS]:
            leaves = recorder.gradients.record_returned(args[INPUTS], result)
        if applicable:
            guard.backward_ended(leaves, accumulates=accumulates)
        return result

    return run


def _are_applicable(args: tuple[Any, ...], accumulates: bool) -> bool:
    """True if a backward pass makes gradients that can be applied. args: of the call, after the outputs."""
    if accumulates:
        return True
    inputs = args[INPUTS] if len(args) > INPUTS else None
    return bool(inputs and safely(are_applicable, inputs, create_graph=bool(args[CREATE_GRAPH])))
