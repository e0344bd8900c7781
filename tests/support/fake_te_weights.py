"""FP8 weights in software, in place of Transformer Engine's: a tensor that rounds, and an Adam with master weights.

They behave as Transformer Engine's, which need a GPU (tests/gpu/test_fp8_params_te.py): the FP8 weight is a wrapper
that reports the dtype that it represents, operations read its rounded values, and an in-place copy rounds again. By
default the optimizer creates its masters from the rounded values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mpguard.nn.fp8 import convert as conversion
from mpguard.nn.fp8.amax_history import AmaxHistoryMixin
from mpguard.nn.fp8.padding import Padded
from mpguard.nn.fp8.weights import EXACT, Fp8WeightMixin, MasterCopy, requantize
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import get

CURRENT = Policy(bf16=True, fp8="hybrid", backend="te", fp8_param=True)


class Float8CurrentScalingQuantizer:
    """What the proof asks the name of."""


class Rounded(torch.Tensor):
    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _quantizer: Float8CurrentScalingQuantizer

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> Rounded:
        made: Rounded = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)
        made._quantizer = Float8CurrentScalingQuantizer()
        made._data, made._scale_inv = cls._rounded(value)
        return made

    @staticmethod
    def _rounded(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = value.detach().abs().max().float().clamp(min=1e-12) / 448
        return (value.detach().float() / scale).to(torch.float8_e4m3fn), scale

    def quantize_(self, value: torch.Tensor) -> Rounded:
        self._data, self._scale_inv = self._rounded(value)
        return self

    def dequantize(self) -> torch.Tensor:
        return (self._data.float() * self._scale_inv).to(self.dtype)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """DDP asks it of a parameter, for the node of its gradient."""
        return Identity.apply(self) if other is self else super().expand_as(other)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            made = cls(args[0].dequantize())
            made._data, made._scale_inv = args[0]._data, args[0]._scale_inv
            return made
        if func is torch.ops.aten.clone.default:
            return cls(args[0].dequantize())
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Rounded):
            value = args[1].dequantize() if isinstance(args[1], Rounded) else args[1]
            return args[0].quantize_(value)
        plain: Callable[[Any], Any] = lambda each: each.dequantize() if isinstance(each, Rounded) else each  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


class Adam(torch.optim.Optimizer):
    """The interface of Transformer Engine's FusedAdam, and enough of what it does."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.master_weights, self.master_weight_dtype = master_weights, master_weight_dtype
        self.store_param_remainders = store_param_remainders

    def initialize_state(self, param: torch.Tensor, _remainders: bool) -> None:
        whole = param.detach().clone().dequantize() if isinstance(param, Rounded) else param.detach()
        self.state[param]["exp_avg_sq"] = torch.zeros_like(whole)
        if self.master_weights:
            self.state[param]["master_param"] = whole.float().clone()

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self.state[param].setdefault(name, torch.empty_like(value)).copy_(value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param, False)
                state = self.state[param]
                state["exp_avg_sq"].mul_(0.9).add_(param.grad.square(), alpha=0.1)
                kept = isinstance(param, Rounded)
                held = state["master_param"] if kept else param
                held.sub_(group["lr"] * param.grad / (state["exp_avg_sq"].sqrt() + 1e-8))
                if isinstance(param, Rounded):
                    param.quantize_(held)


@functools.cache
def recipe_of(policy: Policy) -> Any:
    """An object with the class and the fields of Transformer Engine's recipe, which the proof reads."""
    if "te" not in policy.backends:
        return None
    fields = dict(get("te").build_arguments(policy))
    return dataclasses.make_dataclass(fields.pop("recipe"), list(fields))(**fields)


class Layer(AmaxHistoryMixin):
    weight: torch.Tensor
    bias: torch.Tensor | None
    fp8, fp8_meta = True, {"recipe": None}
    __module__ = "transformer_engine.stand_in"  # so that the proof knows it

    def has_history(self) -> bool:
        return False

    def history(self) -> dict[str, torch.Tensor]:
        return {}

    def on_restored(self) -> None:
        requantize(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        result: torch.Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias.to(result.dtype)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        value = (weight if isinstance(weight, Rounded) else Rounded(weight)).dequantize().to(x.dtype)
        ctx.save_for_backward(x, value)
        return x @ value.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, value = ctx.saved_tensors
        flat = gradients[0].flatten(0, -2)
        return gradients[0] @ value, (flat.T @ x.flatten(0, -2)).float()


class Float8Linear(Padded, Fp8WeightMixin, Layer, nn.Linear):
    """As `mpguard.nn.fp8.te.TransformerEngineFloat8Linear` is made."""

    __module__ = "mpguard.nn.fp8.te"  # `revert` takes back its own classes only

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.check_kept()
        return super().forward(input)


def templates(policy: Policy) -> Callable[[nn.Linear], nn.Module]:
    def template(layer: nn.Linear) -> nn.Module:
        made = nn.Module()
        made.__dict__["fp8_meta"] = {"recipe": recipe_of(policy)}
        if policy.fp8_param:
            made.weight = nn.Parameter(Rounded(layer.weight.detach()))
            setattr(made.weight, EXACT, MasterCopy(layer.weight.detach().cpu().clone()))
        return made

    return template


def te(_policy: Policy, _recipe: str) -> tuple[str, Any]:
    """Replaces `mpguard.nn.fp8.convert._library`."""
    return "te", SimpleNamespace(kind_of=lambda _: Float8Linear, templates=templates, around=lambda *_: None)


def install() -> None:
    conversion._library = te
