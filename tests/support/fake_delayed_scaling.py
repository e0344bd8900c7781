"""Delayed scaling in software, in Transformer Engine's place: the history matters to every matmul.

Transformer Engine itself needs a GPU (tests/gpu/test_resume_te.py); how a history comes through the checkpoints of
each framework does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpguard.nn.fp8 import calibration, recompute
from mpguard.nn.fp8 import convert as conversion
from mpguard.nn.fp8.amax_history import AmaxHistoryMixin, watch
from mpguard.nn.fp8.padding import Padded
from mpguard.policy.policy import Policy

LENGTH = 4
POLICY = Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=LENGTH, backend="te")

FORMATS = {"fwd": torch.float8_e4m3fn, "bwd": torch.float8_e5m2}


@functools.cache
def _own_group() -> Any:
    """Apart from the collectives of the engines, whose order is theirs."""
    return dist.new_group()


def rounded(value: torch.Tensor, number: int, state: dict[str, torch.Tensor], way: str) -> torch.Tensor:
    """A tensor in FP8 with the scale of the steps before; its maximum goes into the history."""
    scale, history = state[f"scale_{way}"], state[f"amax_history_{way}"]
    most = torch.finfo(FORMATS[way]).max
    result = (value.float() * scale[number]).clamp(-most, most).to(FORMATS[way]).float() / scale[number]
    if way == "fwd" and Around.entered:
        history[-1, number] = torch.maximum(history[-1, number], value.abs().max())
    else:
        history[:, number] = history[:, number].roll(-1)
        history[-1, number] = value.abs().max()
        rescale(state, number, way)
    return result.to(value.dtype)


def rescale(state: dict[str, torch.Tensor], number: int, way: str) -> None:
    """Compute a scale from its history."""
    history = state[f"amax_history_{way}"]
    if dist.is_initialized():  # reduce_amax: all ranks have one history
        dist.all_reduce(history[-1, number], dist.ReduceOp.MAX, group=_own_group())
    state[f"scale_{way}"][number] = torch.finfo(FORMATS[way]).max / history[:, number].max().clamp(min=1e-6)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        x, weight = rounded(x, 0, state, "fwd"), rounded(weight, 1, state, "fwd")
        ctx.save_for_backward(x, weight)
        ctx.state = state
        return x @ weight.to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = rounded(gradients[0], 0, ctx.state, "bwd")
        of_weight = gradient.flatten(0, -2).T.float() @ x.flatten(0, -2).float()
        return gradient @ weight.to(gradient.dtype), of_weight.to(weight.dtype), None


class Delayed(AmaxHistoryMixin):
    __module__ = "transformer_engine.stand_in"  # so that the proof knows it
    weight: torch.Tensor
    bias: torch.Tensor | None
    memory: dict[str, torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["called"] = True
        if not Around.entered and recompute.is_recomputing():
            with recompute.as_in_forward(self), Around(None):
                return self.calibrated(x, again=True)
        return self.calibrated(x)

    def calibrated(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        if not calibration.is_due(self):
            return self.product(x)
        if not again:
            calibration.scale_forward(self, x)
        output = self.product(x)
        calibration.scale_backward(self, output)
        return output

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        result: torch.Tensor = Product.apply(x, self.weight, self.memory)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias.to(result.dtype)

    def has_history(self) -> bool:
        return "called" in self.__dict__ or self._mpguard_fp8.restored

    def history(self) -> dict[str, torch.Tensor]:
        return self.memory


class Float8Linear(Padded, Delayed, nn.Linear):
    """As `mpguard.nn.fp8.te.TransformerEngineFloat8Linear` is made."""

    __module__ = "mpguard.nn.fp8.te"  # `revert` takes back its own classes only


class Around:
    """FP8 autocast: at its end the scales are computed from the history, as Transformer Engine does.

    model: None inside a recomputation, whose history is taken back.
    """

    entered = 0

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model

    def __enter__(self) -> None:
        Around.entered += 1

    def __exit__(self, *_: object) -> None:
        Around.entered -= 1
        if self.model is None or not torch.is_grad_enabled():
            return
        for layer in self.model.modules():
            if isinstance(layer, Float8Linear) and layer.has_history():
                for number in (0, 1):
                    rescale(layer.memory, number, "fwd")
                history = layer.memory["amax_history_fwd"]
                history.copy_(history.roll(-1, 0))
                history[-1] = 0


class Region(recompute.SurroundingRegion):
    __module__ = "mpguard.nn.fp8.te"

    def autocast(self, model: nn.Module) -> Around:
        return Around(model)


def templates(policy: Policy) -> Callable[[nn.Linear], nn.Module]:
    def template(_layer: nn.Linear) -> nn.Module:
        made = nn.Module()
        made.__dict__["memory"] = {
            "scale_fwd": torch.ones(2), "amax_history_fwd": torch.zeros(policy.fp8_amax_history_len, 2),
            "scale_bwd": torch.ones(1), "amax_history_bwd": torch.zeros(policy.fp8_amax_history_len, 1),
        }  # fmt: skip
        return made

    return template


def around(model: nn.Module, policy: Policy) -> None:
    watch(layer for layer in model.modules() if isinstance(layer, Float8Linear))
    if not any(isinstance(getattr(hook, "__self__", None), Region) for hook in model._forward_pre_hooks.values()):
        Region(calibrates=policy.fp8_calibration).surround(model)


def te_or_torchao(_policy: Policy, _recipe: str) -> tuple[str, Any]:
    """Replaces `mpguard.nn.fp8.convert._library`."""
    return "te", SimpleNamespace(kind_of=lambda _: Float8Linear, templates=templates, around=around)


def install() -> None:
    conversion._library = te_or_torchao
