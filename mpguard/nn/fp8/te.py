"""Transformer Engine's FP8 layer. Imports Transformer Engine, so only `convert` imports this module. For 2.20.

Current and block scaling have no state: each layer enters FP8 autocast itself, so that FP8 is active wherever the
layer is called (in a part of the model, or in an activation checkpoint that recomputes it). Delayed scaling updates its
history when the outermost autocast ends, once per forward pass of the model, so for it autocast is entered around the
whole model.

Parameters that are stored in FP8 are created by Transformer Engine's `quantized_model_init`: see `weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from mpguard.core.errors import NotInForce
from mpguard.nn.compile import untraced
from mpguard.nn.fp8 import calibration, recompute, weight_cache
from mpguard.nn.fp8.amax_history import AmaxHistoryMixin, watch
from mpguard.nn.fp8.padding import Padded, PaddingState
from mpguard.nn.fp8.weights import EXACT, Fp8WeightMixin, MasterCopy, requantize
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import get


class CachedWeightMixin(nn.Module):
    """Base class, placed between `Padded` and `te.Linear`: rounds the weight once per optimizer step, if it should."""

    _mpguard_fp8: PaddingState
    _fp8_workspaces: dict[str, Any]
    fp8_meta: dict[str, Any]
    quantizers: dict[str, Any]
    weight: torch.Tensor
    _get_weight_and_bias_tensors: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._mpguard_fp8.policy.fp8_weight_cache:
            return super().forward(input)  # type: ignore[no-any-return]
        output: torch.Tensor = self._forward_with_copy(input)
        return output

    @untraced  # dynamo breaks the graph in `te.Linear`, and fails on the FP8 tensor that it creates after that
    def _forward_with_copy(self, input: torch.Tensor) -> torch.Tensor:
        state, before = self._mpguard_fp8, self._fp8_workspaces.get("weight")
        first = weight_cache.is_first_pass(self)
        output: torch.Tensor = super().forward(input, is_first_microbatch=first)
        if first is False and self._fp8_workspaces.get("weight") is not before:
            state.roundings, state.reuses = state.roundings + 1, False  # the copy lacked a transpose that is needed now
        if weight_cache.is_observed():
            self.compare_copy()
        return output

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._fp8_workspaces.clear()  # a copy stays on its device when the model moves
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def keeps_copy(self) -> bool:
        """True if there is an FP8 copy of the weight."""
        return "weight" in self._fp8_workspaces

    @torch.no_grad()
    def compare_copy(self) -> None:
        """Compare the copy that the last pass has used with the weight, rounded again with the copy's scale."""
        state, recipe = self._mpguard_fp8, self.fp8_meta["recipe"]
        copy = self._fp8_workspaces.get("weight")
        if copy is None or not state.reuses or recipe.mxfp8() or recipe.nvfp4():
            return  # copies of the last two have scales in the order of the matmul, and cannot be converted back
        quantizer = self.quantizers["scaling_fwd"][1].copy()
        quantizer.internal = False
        quantizer.set_usage(rowwise=True, columnwise=False)
        if isinstance(quantizer, Float8Quantizer):
            quantizer.scale, quantizer.amax = copy._scale_inv.reciprocal(), torch.zeros_like(quantizer.amax)
        rounded = quantizer(self._get_weight_and_bias_tensors()[0].detach())
        different = (rounded.dequantize() != copy.dequantize()).float().mean()
        state.stale = different if state.stale is None else torch.maximum(state.stale, different)


class TransformerEngineFloat8Linear(
    Padded,
    CachedWeightMixin,
    Fp8WeightMixin,
    AmaxHistoryMixin,
    te.Linear,  # type: ignore[misc]
    nn.Linear,
):
    """Transformer Engine's `Linear`, which is also an instance of `nn.Linear`, the class that it replaces.

    Its "extra state", a pickle with its own key in the `state_dict`, is omitted: see `amax_history`.
    """

    _mpguard_recipe: Any
    fp8: bool
    fp8_meta: dict[str, Any]
    activation_dtype: torch.dtype
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
        if FP8GlobalStateManager.is_fp8_enabled() and not self._has_own_recipe:
            self._enter_first()
            return self._calibrated(input)
        recipe = self._mpguard_recipe
        if recipe.delayed() and recompute.is_recomputing():
            return self._recomputed(input)
        if recipe.delayed() and torch.is_grad_enabled():
            raise NotInForce(
                f"{self._mpguard_fp8.name} is called outside the forward pass of the model that was converted, where "
                "delayed scaling has no history. Call the whole model, or use a recipe with current scaling"
            )
        with te.autocast(recipe=recipe):
            return self._calibrated(input)

    def _get_weight_and_bias_tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tensors of the matmul: with a backward pass in high precision, the weight in the compute dtype.

        Transformer Engine 2.20 multiplies the gradient, in the compute dtype, by the weight as it is. For an FP32
        weight under autocast cuBLAS has no such matmul: "Unable to find suitable cuBLAS GEMM algorithm".
        """
        weight, bias = super()._get_weight_and_bias_tensors()
        return (weight.to(self.activation_dtype) if self._has_high_precision_backward else weight), bias

    @property
    def _has_high_precision_backward(self) -> bool:
        """True if the pass that is prepared, or was the last one, has a recipe with `backward_override`."""
        return self.fp8 and getattr(self.fp8_meta["recipe"], "backward_override", None) is not None

    @property
    def _has_own_recipe(self) -> bool:
        """True if the layer enters autocast with its recipe inside of another one too: `fp8_modules` has chosen it."""
        return bool(self._mpguard_fp8.policy.fp8_modules) and not self._mpguard_recipe.delayed()

    def _calibrated(self, input: torch.Tensor) -> torch.Tensor:
        """Run in FP8; the first pass with scales of its own tensors, if the policy requires it."""
        if not calibration.is_due(self):
            return super().forward(input)
        calibration.scale_forward(self, input)
        output: torch.Tensor = super().forward(input)
        calibration.scale_backward(self, output)
        return output

    def _enter_first(self) -> None:
        """Take the mark of the first layer, as a forward pass with gradients does, inside a reentrant checkpoint.

        The backward pass of the layer with the mark updates the history of gradients. A checkpoint of this kind runs
        without gradients, so Transformer Engine would give the mark to the first layer after it.
        """
        state = FP8GlobalStateManager.quantization_state
        if not torch.is_grad_enabled() and state.is_first_fp8_module:
            state.is_first_fp8_module = False
            self._mpguard_fp8.first = True

    def _recomputed(self, input: torch.Tensor) -> torch.Tensor:
        """Run again in a backward pass, with the scales of the forward pass."""
        state = FP8GlobalStateManager.quantization_state
        state.autocast_depth += 1  # leaving an inner autocast does not update the history
        try:
            with recompute.as_in_forward(self), te.autocast(recipe=self._mpguard_recipe):
                state.is_first_fp8_module, self._mpguard_fp8.first = self._mpguard_fp8.first, False
                output: torch.Tensor = super().forward(input)
                if calibration.is_due(self):
                    calibration.scale_backward(self, output)
                return output
        finally:
            state.autocast_depth -= 1

    def has_history(self) -> bool:
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

    def on_restored(self) -> None:
        requantize(self.weight)


def kind_of(_layer: nn.Module) -> type[Padded]:
    """Return the FP8 layer of this library, which `convert` puts in place of `nn.Linear`."""
    return TransformerEngineFloat8Linear


class AutocastRegion(recompute.SurroundingRegion):
    """Hooks that run the whole model inside FP8 autocast."""

    def __init__(self, recipe: Any, *, calibrates: bool) -> None:
        super().__init__(calibrates=calibrates)
        self.recipe = recipe

    def autocast(self, _model: nn.Module) -> Any:
        return te.autocast(recipe=self.recipe)


def templates(policy: Policy) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that creates Transformer Engine's layer for a plain layer, of the same sizes.

    The layer has no data, except with `fp8_param`.
    """
    recipe = get("te").build(policy)
    if policy.fp8_weight_cache:
        weight_cache.count_steps()

    def template(layer: nn.Linear) -> nn.Module:
        if policy.fp8_param:
            with_fp8_weight: nn.Module = quantized(layer, recipe)
            return with_fp8_weight
        empty: nn.Module = te.Linear(
            layer.in_features, layer.out_features,
            bias=layer.bias is not None, params_dtype=layer.weight.dtype, device="meta",
        )  # fmt: skip
        empty.__dict__["_mpguard_recipe"] = recipe
        return empty

    return template


class CopyFrom:
    """An `init_method` that copies the values of another weight."""

    def __init__(self, source: torch.Tensor | None) -> None:
        self.source = source

    def __call__(self, weight: torch.Tensor) -> None:
        if self.source is not None:
            weight.detach().copy_(self.source)


def quantized(layer: nn.Linear, recipe: Any) -> Any:
    """Return Transformer Engine's layer with the weight of a plain layer in FP8, on a GPU, and its exact values."""
    init = CopyFrom(layer.weight.detach())
    device = layer.weight.device if layer.weight.is_cuda else torch.device("cuda", torch.cuda.current_device())
    with torch.enable_grad(), te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        converted: Any = te.Linear(
            layer.in_features, layer.out_features,
            bias=layer.bias is not None, params_dtype=layer.weight.dtype, device=device, init_method=init,
        )  # fmt: skip
    init.source = None  # the layer keeps a reference to the function, which must not keep the weight alive
    weight = converted.weight
    exact = MasterCopy(weight.get_high_precision_init_val(), stale=recipe.delayed())
    weight.clear_high_precision_init_val()
    del (
        weight.get_high_precision_init_val,
        weight.clear_high_precision_init_val,
    )  # bound to this tensor, which is exchanged with another one
    setattr(weight, EXACT, exact)
    converted.__dict__["_mpguard_recipe"] = recipe
    return converted


def around(model: nn.Module, policy: Policy) -> None:
    """Enter FP8 autocast around the forward pass of the model, if the recipe has a history."""
    recipe = get("te").build(policy)
    if recipe.delayed() and not any(map(is_autocast_hook, model._forward_pre_hooks.values())):
        watch(layer for layer in model.modules() if isinstance(layer, TransformerEngineFloat8Linear))
        AutocastRegion(recipe, calibrates=policy.fp8_calibration).surround(model)


def is_autocast_hook(hook: Any) -> bool:
    """True if a hook is one of an `AutocastRegion`."""
    return isinstance(getattr(hook, "__self__", None), AutocastRegion)
