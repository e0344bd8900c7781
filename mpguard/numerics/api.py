"""`mpguard.sensitivity`: measure the layers of a model in a loop over batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpguard.core.errors import ConfigError, did_you_mean
from mpguard.nn.format_names import FORMAT_OF, LABELS
from mpguard.numerics.report import Sensitivity, gathered
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import given

if TYPE_CHECKING:
    import torch
    from torch import nn


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    policy: Policy | str = "bf16_with_fp8_current_scaling_mixed",
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 20,
    every: int = 4,
    formats: Sequence[str] | None = None,
) -> Sensitivity:
    """Train a model on some batches, and return how much each of its Linear layers loses in each format.

    policy: a `Policy` or the name of a recipe: its FP8 recipe is what layers are sorted by, its compute dtype that of
    autocast. loss: returns the loss of a batch; by default the model is called with the batch (a mapping as keyword
    arguments, a tuple or list as arguments) and returns the loss, or an output with a `loss`. optimizer: steps after
    each batch; without one the weights stay as they are. steps: batches that are measured, after a first one that
    is not; fewer if there are fewer. every: one in so many layers is measured at a batch. formats: of
    `Sensitivity.formats`; all by default.

    The model must not be in FP8 yet. It runs uncompiled; its gradients are None afterwards. Raises `ConfigError`.
    """
    import torch

    from mpguard.numerics.probe import Probe, ProbeSettings

    policy = given(policy, "sensitivity")
    for name in formats or ():
        if name not in LABELS:
            raise ConfigError(f"formats: there is no format {name}{did_you_mean(name, LABELS)}")
    recipe = policy.low_bit_recipe or "tensorwise"
    wanted = [name for name in LABELS if formats is None or name in formats or name in FORMAT_OF[recipe]]
    lines: list[Mapping[str, Any]] = []
    probe = Probe(ProbeSettings(wanted, policy, steps=steps, every=every), lines.append)
    probe.find_layers()
    began = time.perf_counter()
    try:
        with torch.compiler.set_stance("force_eager"):
            for batch in batches:
                with _autocast(model, policy):
                    value = (loss or _loss)(model, batch)
                value.backward()  # type: ignore[no-untyped-call]
                if optimizer is not None:
                    optimizer.step()
                model.zero_grad(set_to_none=True)
                probe.step_ended(lambda: [model])
                if probe.finished:
                    break
    finally:
        probe.close()
    lines.append({"event": "end", "seconds": probe.seconds, "total": time.perf_counter() - began})
    report = gathered(lines, recipe, wanted)
    if not report.measured:
        raise ConfigError(
            f"sensitivity: nothing was measured in {probe.steps} batches: two or more are needed, in which a Linear "
            "layer that is not quantized gets a gradient"
        )
    return report


def _autocast(model: nn.Module, policy: Policy) -> contextlib.AbstractContextManager[Any]:
    """Return autocast in the compute dtype of a policy; none for FP32."""
    import torch

    if not policy.low_precision:
        return contextlib.nullcontext()
    device = next((own.device.type for own in model.parameters()), "cpu")
    return torch.autocast(device, dtype=getattr(torch, policy.compute_dtype.torch_name))


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that a model computes of a batch itself. Raises `ConfigError` if it does not."""
    import torch

    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(found, (tuple, list)):
        found = found[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ConfigError(
            f"sensitivity: {type(model).__name__} returns no loss for a batch. Give a function that does: "
            "loss=lambda model, batch: ..."
        )
    return found
