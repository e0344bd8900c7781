"""What an optimizer of torch would have made of some weights and states: its step is computed again on samples.

A class of the script that rounds them inside of its own `step` leaves no other trace of what they were.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof.samples import local, sample

if TYPE_CHECKING:
    import torch

#: The optimizers of torch that compute each element by itself.
ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")
)  # fmt: skip


#: The name of a weight among the states of its parameter.
WEIGHT = ""


@dataclasses.dataclass
class Before:
    """Samples of a weight, its gradient and its states before a step, and the options of its group."""

    weight: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, Any]
    group: dict[str, Any]


def base_of(optimizer: Any) -> Any:
    """Return the optimizer of torch whose step a class of the script has replaced by its own; None if there is none."""
    kinds = type(optimizer).__mro__
    if kinds[0].__module__.startswith("torch.optim"):
        return None
    base: Any = next((kind for kind in kinds if kind.__module__.startswith("torch.optim.")), None)
    if base is None or base.__name__ not in ELEMENTWISE:
        return None
    return base if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(base.step) else None


def before(optimizer: Any, own: Any) -> Before | None:
    """Return what a step of an optimizer will find; None without a gradient in FP32."""
    import torch

    group = next(group for group in optimizer.param_groups if any(each is own for each in group["params"]))
    if own.grad is None or own.grad.dtype is not torch.float32 or own.grad.is_sparse:
        return None
    states = optimizer.state.get(own) or {}
    kept = {name: _copied(value, own) for name, value in states.items()}
    return Before(sample(own), sample(own.grad), kept, {key: value for key, value in group.items() if key != "params"})


def after(optimizer: Any, base: Any, known: Before) -> dict[str, torch.Tensor]:
    """Return samples of a weight, as `WEIGHT`, and its states, by name, after a step of the optimizer of torch."""
    import torch

    weight = torch.nn.Parameter(known.weight.clone())
    weight.grad = known.gradient.clone()
    again: Any = object.__new__(base)
    again.__dict__.update(vars(optimizer))
    again.param_groups = [{**known.group, "params": [weight], "foreach": False, "fused": False}]
    states = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in known.states.items()}
    again.state = defaultdict(dict, {weight: states} if states else {})
    with torch.no_grad():
        inspect.unwrap(base.step)(again)
    made = {name: value for name, value in again.state[weight].items() if isinstance(value, torch.Tensor)}
    return {WEIGHT: weight.detach()} | {name: value for name, value in made.items() if value.shape == weight.shape}


def _copied(value: Any, own: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return sample(value) if local(value).shape == local(own).shape else local(value).detach().clone()
