"""Convert the models of an optimizer to FP8 when the optimizer is created, if the policy requires it.

Every training loop creates an optimizer, whatever framework it uses, and its parameters show which models are trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpguard.core.console import print_line
from mpguard.core.errors import NotInForce, PolicyError
from mpguard.nn.fp8 import filters
from mpguard.nn.fp8.filters import plain_name
from mpguard.policy import hardware, speed
from mpguard.policy.policy import Policy
from mpguard.runtime.containment import contained_hook
from mpguard.runtime.guard import Guard
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.observe import engine_of, updated_by
from mpguard.runtime.proof.verdict import Refusal
from mpguard.runtime.ranks import processes, rank, world_size
from mpguard.targets.capabilities import FP8_WEIGHTS, fp8_weights, without_fp8_weights

if TYPE_CHECKING:
    import torch
    from torch import nn


def convert(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
    """Convert to FP8 the models that an optimizer will update, if the policy requires it.

    A model that the script has converted is not changed; the proof compares it. Raises `NotInForce` if this
    machine has no FP8, `PolicyError` if the first and last blocks that the policy excludes are not found.
    """
    if guard.plan.policy.low_bit_recipe is None or not guard.converts_models:
        return
    roots = models_of(updated_by(optimizer))
    engine = engine_of(roots, guard.recorder, world_size()[0])
    strategy = guard.plan.strategy or ("ddp" if engine == "none" else engine)
    policy = guard.plan.policy
    kept = keeps_fp8_weights(guard, strategy, optimizer, roots)
    if policy.fp8_param is True and not kept:  # with `enforce` warn or off
        policy = policy.replace(fp8_param=False)
    policy = policy.decided(fp8_param=kept)
    for root in roots:
        _convert(guard, root, policy, optimizer)


def convert_before_ddp(guard: Guard, model: nn.Module) -> None:
    """Convert a model before DDP wraps it, because DDP keeps references to the parameters that it finds.

    Not for a wish: without an optimizer it is not known whether parameters can be kept in FP8.
    """
    policy = guard.plan.policy
    if policy.fp8_param is True and guard.converts_models and fp8_weights(policy, "ddp"):
        _convert(guard, model, policy)


def _convert(guard: Guard, root: nn.Module, policy: Policy, optimizer: Any = None) -> None:
    from mpguard.nn.fp8 import convert as conversion
    from mpguard.nn.fp8 import experts, first_batch

    modules = [(plain_name(name), module) for name, module in root.named_modules()]
    without_ends = not policy.fp8_required and policy.first_last_layers_bf16 and not filters.stacks(modules)
    if without_ends:
        policy = policy.replace(first_last_layers_bf16=False, name=policy.name)
    if conversion.has_others(modules, policy):
        return
    of_experts = experts.reasons(modules, policy) if policy.fp8_experts else {}
    of_linear = filters.reasons(modules, policy)
    reasons = list(dict.fromkeys([*of_linear.values(), *of_experts.values()]))
    if "" not in reasons:
        if not policy.fp8_required:
            guard.leave_out("fp8", f"no layer can be FP8: {'; '.join(reasons) or 'no Linear layer'}", optimizer)
        return
    layers = [filters.sizes_of(module) for _, module in modules if of_linear.get(id(module)) == ""]
    prediction, against = _predict(layers, policy)
    if against and not policy.fp8_required:
        guard.leave_out("fp8", against, optimizer)
        return
    if without_ends:
        guard.leave_out("first_last_layers_bf16", "the model has no ModuleList or Sequential of blocks", optimizer)
    for field in conversion.not_carried(policy):
        text = f"{field}={policy.format_field(field)}: converted Linear layers do not support it"
        without = f"To go without: mpguard_overrides: {{{field}: {str(not getattr(policy, field)).lower()}}}"
        guard.fail(Refusal.wrong(text, "fp8", without))
    try:
        with guard.recorder.account.interrupted():
            report = conversion.convert_named(root, modules, policy)
    except NotInForce as error:
        if policy.fp8_required:
            guard.fail(Refusal.wrong(str(error), "fp8"))
        else:
            guard.leave_out("fp8", str(error).removeprefix("convert: "), optimizer)
        return
    # Those of a frozen base too, whose matmuls reach the gradients of adapters.
    guard.recorder.record_weights(layer.weight for name, layer in modules if name in report.converted)
    if report.converted and rank() == 0:
        faster = f"; {prediction}" if prediction is not None and not policy.fp8_required else ""
        print_line(f"mpguard: {str(report).splitlines()[0]}{faster}")
    if prediction is not None:
        first_batch.tell(root, contained_hook(_Decision(guard, root, layers, policy, optimizer), "the first batch"))


def _predict(
    layers: Iterable[tuple[int, int]], policy: Policy, tokens: int | None = None
) -> tuple[speed.Prediction | None, str]:
    """Return how fast layers will be in FP8, None if that was not measured; and what speaks against FP8, or "".

    layers: inputs and outputs of each.
    """
    if policy.fp8_emulate or policy.fp8_modules:
        return None, ""  # to try things out; or a choice of the user's for these layers
    here = hardware.detect()
    backend = hardware.backend_of(policy, here)
    if backend is None or not speed.is_measured_on(here.capability):
        return None, speed.NOT_MEASURED
    found = speed.predict(policy, backend, layers, tokens)
    if found is None:
        combination = f"{policy.fp8_recipe} scales of {backend}, compile={policy.compile}"
        return None, f"its speed was not measured with {combination}"
    return found, "" if found.pays else str(found)


@dataclasses.dataclass(eq=False)
class _Decision:
    """Decide by a model's first batch if FP8 is slower than BF16: a preference is dropped, a requirement is reported.

    Ranks have different batches, and one precision: with several, the widths of the layers have decided alone.
    """

    guard: Guard
    model: nn.Module
    layers: list[tuple[int, int]]
    policy: Policy
    optimizer: Any

    def __call__(self, tokens: int | None) -> None:
        from mpguard.nn.fp8 import convert as conversion

        demanded = self.policy.fp8_required
        if tokens is None or (world_size()[0] > 1 and not demanded):
            return
        prediction, against = _predict(self.layers, self.policy, tokens)
        if demanded:
            if prediction is not None and prediction.ratio < 1:
                self.guard.reporter.print_once(
                    f"mpguard: BF16 would be faster here: {prediction}. Recipe `auto` takes the faster one, or "
                    "`bf16_mixed`"
                )
            return
        if not against:
            return
        try:
            with self.guard.recorder.account.interrupted():
                conversion.plain_layers(self.model)
        except PolicyError as error:
            self.guard.reporter.print_once(f"mpguard: fp8 stays on here, though {against}: {error}")
        else:
            self.guard.leave_out("fp8", against, self.optimizer)


def keeps_fp8_weights(
    guard: Guard, strategy: str | None, optimizer: Any = None, models: Iterable[nn.Module] = ()
) -> bool:
    """Return True if the policy has `fp8_param`, and the engine, and the optimizer if given, support it.

    Otherwise False. For a demand that is a failure (`NotInForce`, with `enforce` warn and off False), for a wish it is
    reported, and weights of `models` that are kept in FP8 already become plain ones.
    """
    policy = guard.plan.policy
    if not policy.fp8_param:
        return False
    wish = policy.fp8_param == "auto"
    reason = without_fp8_weights(policy, strategy, processes())
    if reason is not None and not wish:
        reason += f". Supported are: {'; '.join(FP8_WEIGHTS.values())}"
    if reason is None and optimizer is not None:
        reason = _unfit_optimizer(policy, strategy, optimizer)
        if reason is None and wish and any(type(each).__name__ == "DistributedDataParallel" for each in models):
            reason = "DDP was created before the optimizer"
    if reason is None:
        return True
    if not wish:
        without = "To go without: mpguard_overrides: {fp8_param: null}"
        guard.fail(Refusal.wrong(f"fp8_param: {reason}", "fp8 weights", without))
        return False
    guard.leave_out("fp8_param", reason, optimizer)
    from mpguard.nn.fp8.convert import keep_plain_weights

    for model in models:
        keep_plain_weights(model)
    return False


def _unfit_optimizer(policy: Policy, strategy: str | None, optimizer: Any) -> str | None:
    """Return why an optimizer cannot train parameters in FP8; None if it can."""
    if fp8_weights(policy, strategy, processes()) == "torchao":
        return (
            "under FSDP2 only accelerate enables float8 all-gather in a model, and there was no Accelerator before "
            "this optimizer. Create the Accelerator first"
        )
    from mpguard.nn.fp8 import weights

    reason = weights.without_masters(optimizer)
    if reason is None and policy.wishes and not hasattr(optimizer, "master_weights"):
        return f"{type(optimizer).__name__} does not show whether it has FP32 master weights while it is created"
    return reason
