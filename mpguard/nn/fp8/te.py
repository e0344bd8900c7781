"""Transformer Engine's FP8 layer. Imports Transformer Engine: for `swap` alone. Read against 2.20.

Current and block scaling hold no state: each layer enters FP8 autocast itself, so that it is in force
wherever the layer is called (a part of the model, an activation checkpoint that computes anew). Delayed
scaling updates its history when the outermost autocast ends, once per forward pass of the model: that one is
entered around the model.

Parameters that are kept in FP8 are made by Transformer Engine's `quantized_model_init`: see `weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from mpguard.core.errors import NotInForce
from mpguard.nn.fp8.amax_history import AmaxHistoryMixin, watch
from mpguard.nn.fp8.padding import Padded
from mpguard.nn.fp8.weights import EXACT, Fp8WeightMixin, MasterCopy, requantize
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import get


class TransformerEngineLinear(Padded, Fp8WeightMixin, AmaxHistoryMixin, te.Linear, nn.Linear):  # type: ignore[misc]
    """Transformer Engine's `Linear` in the place of an `nn.Linear`, which it still is.

    Its own "extra state", a pickle under a key of its own in the `state_dict`, is left out: see `history`.
    """

    _mpguard_recipe: Any
    fp8_meta: dict[str, Any]
    init_fp8_meta_tensors: Any
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state
    reset_parameters = nn.Linear.reset_parameters
    extra_repr = nn.Linear.extra_repr

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (input.is_cuda and self.weight.is_cuda):
            name, wrong = ("weight", self.weight) if input.is_cuda else ("input", input)
            raise NotInForce(
                f"{self._mpguard_fp8.name or 'the model'}: its {name} is on {wrong.device}; Transformer Engine "
                'computes on a GPU. Move the model and the batch there (`model.to("cuda")`)'
            )
        self.check_kept()
        if FP8GlobalStateManager.is_fp8_enabled():
            return super().forward(input)
        recipe = self._mpguard_recipe
        if recipe.delayed() and torch.is_grad_enabled():
            raise NotInForce(
                f"{self._mpguard_fp8.name} is called outside the forward pass of the model that was converted (a part "
                "of it, or an activation checkpoint of torch's that computes anew), where delayed scaling has no "
                "history. Call the whole model, use transformer_engine.pytorch.checkpoint, or a recipe with "
                "current scaling"
            )
        with te.autocast(recipe=recipe):
            return super().forward(input)

    def remembers(self) -> bool:
        return bool(self._mpguard_recipe.delayed() and self.fp8_meta_tensors_initialized)

    def history(self) -> dict[str, torch.Tensor]:
        recipe = self._mpguard_recipe
        if not recipe.delayed():
            return {}
        if not self.fp8_meta_tensors_initialized:  # as `set_extra_state` does before the first forward pass
            self.fp8_meta |= {"num_gemms": 1, "recipe": recipe}
            with torch.cuda.device_of(self.weight):  # type: ignore[no-untyped-call]
                self.init_fp8_meta_tensors(recipe)
        return {
            f"{name}_{way}": getattr(self.fp8_meta[f"scaling_{way}"], name)
            for way in ("fwd", "bwd")
            for name in ("scale", "amax_history")
        }

    def recalled(self) -> None:
        requantize(self.weight)


#: The FP8 layer of this library, which `convert` puts in place of `nn.Linear`.
LINEAR = TransformerEngineLinear


class AutocastRegion:
    """Hooks that have a whole model run inside FP8 autocast."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.open: list[Any] = []

    def enter(self, _model: nn.Module, _inputs: Any) -> None:
        self.open.append(te.autocast(recipe=self.recipe))
        self.open[-1].__enter__()

    def leave(self, _model: nn.Module, _inputs: Any, _output: Any) -> None:
        self.open.pop().__exit__(None, None, None)


def templates(policy: Policy) -> Callable[[nn.Linear], nn.Module]:
    """A function from a plain layer to Transformer Engine's, of the same sizes, without data (but `fp8_param`)."""
    recipe = get("te").build(policy)

    def template(layer: nn.Linear) -> nn.Module:
        if policy.fp8_param:
            kept: nn.Module = quantized(layer, recipe)
            return kept
        made: nn.Module = te.Linear(
            layer.in_features, layer.out_features,
            bias=layer.bias is not None, params_dtype=layer.weight.dtype, device="meta",
        )  # fmt: skip
        made.__dict__["_mpguard_recipe"] = recipe
        return made

    return template


class Same:
    """Gives a weight the values of another one."""

    def __init__(self, source: torch.Tensor | None) -> None:
        self.source = source

    def __call__(self, weight: torch.Tensor) -> None:
        if self.source is not None:
            weight.detach().copy_(self.source)


def quantized(layer: nn.Linear, recipe: Any) -> Any:
    """Transformer Engine's layer with the weight of a plain one in FP8, on a GPU; exact values are kept beside it."""
    same = Same(layer.weight.detach())
    device = layer.weight.device if layer.weight.is_cuda else torch.device("cuda", torch.cuda.current_device())
    with torch.enable_grad(), te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        made: Any = te.Linear(
            layer.in_features, layer.out_features,
            bias=layer.bias is not None, params_dtype=layer.weight.dtype, device=device, init_method=same,
        )  # fmt: skip
    same.source = None  # the layer keeps the function
    weight = made.weight
    exact = MasterCopy(weight.get_high_precision_init_val(), stale=recipe.delayed())
    weight.clear_high_precision_init_val()
    del weight.get_high_precision_init_val, weight.clear_high_precision_init_val  # of another object, after the change
    setattr(weight, EXACT, exact)
    made.__dict__["_mpguard_recipe"] = recipe
    return made


def around(model: nn.Module, policy: Policy) -> None:
    """FP8 autocast around the forward pass of the model, where the recipe has a history."""
    recipe = get("te").build(policy)
    if recipe.delayed() and not any(map(is_ours, model._forward_pre_hooks.values())):
        watch(layer for layer in model.modules() if isinstance(layer, TransformerEngineLinear))
        region = AutocastRegion(recipe)
        model.register_forward_pre_hook(region.enter)
        model.register_forward_hook(region.leave, always_call=True)


def is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), AutocastRegion)
