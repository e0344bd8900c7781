"""The policy: the precision of a run as one frozen value, from which everything else is derived.

Field names are those of Megatron Bridge's `MixedPrecisionConfig` (`src/megatron/bridge/training/mixed_precision.py`)
where it has them, with its defaults. `params_dtype` is the dtype of the compute copy of the parameters (FSDP's
`param_dtype`, the engine's dtype); the parameters that the optimizer updates have `master_dtype`.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import typing
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from mpguard.core.errors import NoEffect, NoEffectWarning, PolicyError, did_you_mean
from mpguard.policy.coerce import coerce
from mpguard.policy.dtype import Dtype
from mpguard.policy.fp8_modules import NONE, Fp8Recipe, ModuleRecipe, as_text

Fp8Format = Literal["hybrid", "e4m3"]
Backend = Literal["auto", "te", "torchao"]
Wish = Literal["auto"]

#: The libraries that can run an FP8 or FP4 recipe, the preferred one first.
BACKENDS: Mapping[str, tuple[Backend, ...]] = {
    "delayed": ("te",),
    "tensorwise": ("te", "torchao"),
    "blockwise": ("te", "torchao"),
    "mxfp8": ("te", "torchao"),
    "nvfp4": ("te",),
    "rowwise": ("torchao",),
    "rowwise_with_gw_hp": ("torchao",),
    "tensorwise_with_bwd_hp": ("te",),
    "blockwise_with_bwd_hp": ("te",),
    "mxfp8_with_bwd_hp": ("te",),
}

#: The recipes of torchao's `Float8LinearConfig`, and those that torchao computes in software.
FLOAT8_LINEAR = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
EMULATED = (*FLOAT8_LINEAR, "mxfp8")

_MXFP8 = ("mxfp8", "mxfp8_with_bwd_hp")

#: Recipes that `fp8_modules` gives in E4M3 where `fp8` is "hybrid": the format in which the libraries have them, or in
#: which they are defined.
_IN_E4M3 = ("rowwise", "rowwise_with_gw_hp", *_MXFP8)

#: Modules that stay out of FP8 by default: output heads and MoE routers lose accuracy
#: (accelerate's Transformer Engine path converts `lm_head`; axolotl patches routers out).
DEFAULT_FP8_EXCLUDE = ("*lm_head", "*router*", "*.gate")


#: One setting with two names: each name -> the other.
_TWINS = {
    "fp8_param": "fp8_param_gather",
    "fp8_param_gather": "fp8_param",
    "fp4_param": "fp4_param_gather",
    "fp4_param_gather": "fp4_param",
}

#: Fields of delayed scaling. With another FP8 recipe they change nothing: Megatron Bridge's own examples set them so.
_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "reduce_amax")

#: Fields that may be "auto": a wish, which is granted where that is possible. They save memory and traffic; matrix
#: matmuls are the same without them. Each has a twin.
WISHES = ("fp8_param", "fp4_param")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The precision of a run. Frozen. Raises `PolicyError` for fields that contradict each other.

    Dtypes may be given as `Dtype` or by any spelling (`"bf16"`, `"torch.bfloat16"`).

    Compute:
        bf16, fp16: low-precision compute; neither means FP32.
        params_dtype: dtype of the compute copy of the parameters. Default: the compute dtype.
            FP32 with bf16 or fp16 means that autocast casts the inputs of each matmul.
        pipeline_dtype: dtype between pipeline stages (Megatron). Default: `params_dtype`.
        autocast_enabled, autocast_dtype: Megatron's own switch; other targets use the compute dtype.
        master_dtype: dtype of the parameters that the optimizer updates. Default FP32.
        master_weights: what holds them in a run that is not sharded: "model" (its parameters are FP32, autocast casts
            them), or "optimizer" (parameters and gradients are in `params_dtype`, the optimizer has the FP32 values of
            any parameter, whatever optimizer it is). FSDP and ZeRO hold FP32 shards themselves.
        grad_reduce_in_fp32: gradients are reduced across ranks in FP32, not in `params_dtype`.
        buffer_dtype, output_dtype: dtype of buffers, of the root module's output. Default: not changed.
        tf32: TF32 for FP32 matmuls on CUDA: True, False, or None (not changed).
        fp32_modules: name patterns (`fnmatch`, on the qualified module name) of modules that compute in FP32, with
            everything in them: norms, routers, output heads.

    FP8 and FP4 (all need bf16 or fp16, the dtype of every other matmul):
        fp8: "hybrid" (E4M3 forward, E5M2 backward) or "e4m3"; None is off. "auto": "hybrid" with `fp8_required` False.
        fp8_recipe: how scales are computed: "delayed" (history of maxima), "tensorwise" (current
            maximum), "blockwise", "mxfp8", "rowwise", "rowwise_with_gw_hp" (matmuls of the weight's gradient in the
            compute dtype), "tensorwise_with_bwd_hp", "blockwise_with_bwd_hp", "mxfp8_with_bwd_hp" (the whole backward
            pass in the compute dtype).
        backend: "te", "torchao", or "auto", the faster one that can run the recipe (`BACKENDS`): torchao compiled.
        fp8_margin, fp8_amax_history_len (steps), fp8_amax_compute_algo ("max", "most_recent"),
            reduce_amax: delayed scaling only.
        fp8_wgrad: weight gradients in FP8 too (Megatron only: TE >= 2.0 has no such switch).
        fp8_dot_product_attention, fp8_multi_head_attention: FP8 inside attention (TE).
        fp8_param, fp8_param_gather: parameters stored, all-gathered in FP8; both are one setting.
            True: a run that cannot is refused. "auto" (what a recipe has): where strategy and optimizer
            can keep them, else off, and reported.
        fp8_required: False: FP8 is a wish: a model that is not faster in it, by measurements of the GPU's generation
            (`mpguard.policy.speed`), or that has no layers for it, runs in the compute dtype, which is reported.
        fp8_exclude: name patterns (`fnmatch`, on the qualified module name) kept out of FP8.
        fp8_modules: a recipe per module: a list of `{"pattern": "*.mlp.*", "recipe": "rowwise"}`, where the first
            pattern that matches the qualified name of a layer decides, and `none` keeps it out of FP8. Layers that
            none matches have `fp8_recipe`. All recipes must be of one backend, and delayed scaling stands alone. Where
            `fp8` is "hybrid", rowwise and MXFP8 layers are E4M3 in both directions.
        fp8_head: the output head in FP8 too.
        fp8_experts: the experts of a mixture in FP8 too: E4M3 with a scale per row, whatever `fp8_recipe`.
        fp8_fast_accum: fast accumulation in the gradient matmuls as well.
        fp8_calibration: delayed scaling computes the scales of its first pass from the tensors of that pass, and does
            not begin with scales of 1. (Not Transformer Engine's `calibrating`, which computes without FP8.)
        fp8_weight_cache: weights are rounded to FP8 once per optimizer step, not in each forward pass (TE).
        fp8_emulate: torchao computes FP8 in software, which needs no FP8 GPU.
        first_last_layers_bf16, num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: blocks
            at the ends that stay in the compute dtype.
        fp4, fp4_recipe, fp4_param, fp4_param_gather: the same for NVFP4.
        reuse_grad_buf_for_mxfp8_param_ag: Megatron's memory saving for MXFP8 parameters.

    Loss scaling (fp16 only):
        loss_scale: a fixed scale; None is dynamic.
        initial_loss_scale: first scale of the dynamic one. Default 2**32 (Megatron Bridge).
        min_loss_scale: the lowest dynamic scale. Default 1.
        loss_scale_window: steps without overflow before the scale doubles. Default 1000.
        hysteresis: overflows before the scale is halved. Default 2.

    Running:
        compile: torch.compile: True, False, or "auto" (where it makes training faster).
        compile_mode: the `mode` of torch.compile for models, whoever compiles them: "reduce-overhead" (CUDA graphs, for
            a model whose kernels wait for Python), "max-autotune", "max-autotune-no-cudagraphs". "default" leaves the
            script's.
        fuse: fused Transformer Engine modules where the model allows it.
        attention_fix: causal models of transformers keep SDPA's `is_causal` under torch.compile, as they have it in
            eager code. False: transformers decides alone.

    `name` is where the policy comes from; equality ignores it.
    """

    name: str = dataclasses.field(default="custom", compare=False)

    bf16: bool = False
    fp16: bool = False
    params_dtype: Dtype | None = None
    pipeline_dtype: Dtype | None = None
    autocast_enabled: bool = False
    autocast_dtype: Dtype | None = None
    master_dtype: Dtype = Dtype.FP32
    master_weights: Literal["model", "optimizer"] = "model"
    grad_reduce_in_fp32: bool = True
    buffer_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    tf32: bool | None = None
    fp32_modules: tuple[str, ...] = ()

    fp8: Fp8Format | Wish | None = None
    fp8_recipe: Fp8Recipe = "tensorwise"
    backend: Backend = "auto"
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    reduce_amax: bool = True
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_param: bool | Wish | None = None
    fp8_param_gather: bool | Wish | None = None
    fp8_required: bool = True
    fp8_exclude: tuple[str, ...] = DEFAULT_FP8_EXCLUDE
    fp8_modules: tuple[ModuleRecipe, ...] = ()
    fp8_head: bool = False
    fp8_experts: bool = False
    fp8_fast_accum: bool = False
    fp8_calibration: bool = False
    fp8_weight_cache: bool = False
    fp8_emulate: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    fp4: Literal["e2m1"] | None = None
    fp4_recipe: Literal["nvfp4"] = "nvfp4"
    fp4_param: bool | Wish | None = None
    fp4_param_gather: bool | Wish | None = None
    reuse_grad_buf_for_mxfp8_param_ag: bool = False

    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    hysteresis: int = 2

    compile: bool | Literal["auto"] = "auto"
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fuse: bool = False
    attention_fix: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._fill(field.name, coerce(field.name, getattr(self, field.name), _TYPES[field.name]))
        if self.fp8 == "auto":
            self._fill("fp8", "hybrid")
            self._fill("fp8_required", False)
        if self.bf16 and self.fp16:
            raise PolicyError("bf16 and fp16 are both True; a run computes in one of them. Set one to False")
        self._fill_defaults()
        self._check_compute()
        self._check_low_bits()
        self._check_modules()
        self._check_loss_scale()

    def _fill(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _fill_defaults(self) -> None:
        """Set the fields whose default is another field's value, as Megatron Bridge does in `finalize()`."""
        if self.params_dtype is None:
            self._fill("params_dtype", self.compute_dtype)
        for one, other in _TWINS.items():
            values = {getattr(self, one), getattr(self, other)} - {None}
            if len(values) > 1:
                values.discard("auto")  # `dataclasses.replace(policy, fp8_param=True)` changes one name only
            if len(values) > 1:
                raise PolicyError(f"{one} and {other} are one setting, and differ; set only one of them")
            value = values.pop() if values else False
            self._fill(one, value)
            self._fill(other, value)

    def _check_compute(self) -> None:
        """Raise `PolicyError` for dtypes of parameters that contradict the compute dtype."""
        if self.params_dtype not in (self.compute_dtype, Dtype.FP32):
            hint = "" if self.low_precision else "; FP32 compute has FP32 parameters"
            if self.params_dtype in (Dtype.FP8_E4M3, Dtype.FP8_E5M2):
                hint = "; no arithmetic exists for float8 tensors, FP8 comes from `fp8` and `fp8_recipe`"
            raise PolicyError(
                f"params_dtype is {self.params_dtype}, the compute dtype is {self.compute_dtype}; "
                f"params_dtype must be {self.compute_dtype} or fp32{hint}"
            )
        if self.master_dtype not in (Dtype.FP32, self.params_dtype):
            raise PolicyError(
                f"master_dtype is {self.master_dtype}; the optimizer's parameters are fp32, "
                f"or {self.params_dtype} (params_dtype) for a run without master weights"
            )
        if self.master_weights == "optimizer":
            self._check_master_weights()
        if self.fp32_modules and not self.low_precision:
            raise NoEffect(
                "fp32_modules",
                f"fp32_modules={self.format_field('fp32_modules')} has no effect here; it needs bf16 or fp16, without "
                "which everything is computed in FP32. Remove it, or set that",
            )
        if self.fp16 and self.master_dtype is Dtype.FP16:
            raise PolicyError(
                "master_dtype is fp16 under fp16; GradScaler cannot unscale FP16 gradients "
                '("Attempting to unscale FP16 gradients"). Set master_dtype to fp32'
            )

    def _check_master_weights(self) -> None:
        """Raise `PolicyError` for a policy in which an optimizer has no use for masters."""
        what = "master_weights is optimizer: parameters in BF16, their FP32 values in the optimizer"
        if not self.low_precision:
            raise NoEffect("master_weights", f"{what}; it needs bf16. Remove it, or set bf16=True")
        if self.fp16:
            raise NoEffect(
                "master_weights",
                f"{what}; with fp16 GradScaler cannot unscale the gradients of FP16 parameters. Use bf16, or set "
                "master_weights to model",
            )
        if self.params_dtype is not self.compute_dtype:
            raise NoEffect("master_weights", f"{what}; params_dtype is {self.params_dtype}. Remove one of them")
        if self.master_dtype is not Dtype.FP32:
            raise NoEffect("master_weights", f"{what}; master_dtype is {self.master_dtype}. Remove one of them")
        if self.fp8_param is True or self.fp4_param is True:
            raise PolicyError(
                f"{what}; parameters stored in FP8 or FP4 need an optimizer with masters of its own. Set fp8_param (or "
                "fp4_param) to False, or master_weights to model",
            )

    def _check_low_bits(self) -> None:
        """Raise `PolicyError` for FP8 and FP4 settings that contradict each other, or would have no effect."""
        if self.fp8 and self.fp4:
            raise PolicyError("fp8 and fp4 are both set; a matmul runs in one of them. Set one to None")
        low = "fp8" if self.fp8 else "fp4" if self.fp4 else None
        if low and not self.low_precision:
            raise PolicyError(
                f"{low} without bf16 or fp16: the matmuls that stay out of it run in one of them. Set bf16=True"
            )
        recipe = self.low_bit_recipe
        only: list[tuple[str, bool, str]] = [
            ("fp8_recipe", bool(self.fp8), "fp8"),
            ("fp8_margin", recipe in ("delayed", *_MXFP8), "fp8 with fp8_recipe delayed or mxfp8"),
            ("fp8_amax_history_len", recipe == "delayed", "fp8 with fp8_recipe delayed"),
            ("fp8_amax_compute_algo", recipe == "delayed", "fp8 with fp8_recipe delayed"),
            ("reduce_amax", recipe == "delayed", "fp8 with fp8_recipe delayed"),
            ("fp8_wgrad", bool(self.fp8), "fp8"),
            ("fp8_dot_product_attention", bool(self.fp8), "fp8"),
            ("fp8_multi_head_attention", bool(self.fp8), "fp8"),
            ("fp8_param", bool(self.fp8), "fp8"),
            ("fp8_required", low is not None, "fp8 or fp4"),
            ("fp8_exclude", low is not None, "fp8 or fp4"),
            ("fp8_modules", bool(self.fp8), "fp8"),
            ("fp8_head", low is not None, "fp8 or fp4"),
            (
                "fp8_experts",
                "torchao" in self.backends and recipe in FLOAT8_LINEAR,
                f"fp8 with backend torchao and fp8_recipe {', '.join(FLOAT8_LINEAR)}",
            ),
            ("fp8_fast_accum", bool(self.fp8), "fp8"),
            ("fp8_calibration", recipe == "delayed", "fp8 with fp8_recipe delayed"),
            ("fp8_weight_cache", "te" in self.backends, "fp8 or fp4 with a recipe and a backend of Transformer Engine"),
            ("fp8_emulate", bool(self.fp8), "fp8"),
            ("first_last_layers_bf16", low is not None, "fp8 or fp4"),
            ("num_layers_at_start_in_bf16", self.first_last_layers_bf16, "first_last_layers_bf16=True"),
            ("num_layers_at_end_in_bf16", self.first_last_layers_bf16, "first_last_layers_bf16=True"),
            ("fp4_param", bool(self.fp4), "fp4"),
            ("reuse_grad_buf_for_mxfp8_param_ag", recipe in _MXFP8, "fp8 with fp8_recipe mxfp8"),
            ("backend", low is not None, "fp8 or fp4"),
            ("fuse", low is not None, "fp8 or fp4"),
            ("compile_mode", self.compile is not False, "compile True or auto"),
        ]
        for name, has_effect, needs in only:
            if has_effect or not self.explicit(name):
                continue
            message = f"{name}={self.format_field(name)} has no effect here; it needs {needs}"
            if name not in _DELAYED or not self.fp8:
                raise NoEffect(name, f"{message}. Remove it, or set that")
            warnings.warn(NoEffectWarning(name, message), stacklevel=4)  # of the line that creates the policy
            self._fill(name, _FIELDS[name].default)
        if self.first_last_layers_bf16 and not (self.num_layers_at_start_in_bf16 or self.num_layers_at_end_in_bf16):
            raise PolicyError(
                "first_last_layers_bf16 is True and num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 "
                "are 0; set how many blocks stay out of FP8"
            )
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_margin"):
            if getattr(self, name) < 0:
                raise PolicyError(f"{name} is {getattr(self, name)}; it counts from 0")
        if self.fp8_amax_history_len < 1:
            raise PolicyError(f"fp8_amax_history_len is {self.fp8_amax_history_len}; it counts steps, from 1")
        if recipe and self.backend not in ("auto", *BACKENDS[recipe]):
            raise PolicyError(
                f"backend is {self.backend}, which has no {recipe} recipe; {' or '.join(BACKENDS[recipe])} has"
            )
        if self.fp8_emulate and "torchao" not in self.backends:
            lacking = next((each for each in self.recipes if each not in EMULATED), recipe)
            raise PolicyError(
                f"fp8_emulate is True with the recipe {lacking} on backend {self.backend}; "
                f"only torchao emulates FP8: {', '.join(EMULATED)}"
            )
        if self.fp8_weight_cache and (self.fp8_param is True or self.fp4_param is True):
            raise PolicyError(
                "fp8_weight_cache keeps FP8 copies of the weights from pass to pass; with fp8_param (or fp4_param) the "
                "weights themselves are FP8. Remove one of them"
            )
        if (self.fp8_dot_product_attention or self.fp8_multi_head_attention) and (recipe or "").startswith("blockwise"):
            raise PolicyError("FP8 attention with block scaling: Transformer Engine's Float8BlockScaling has none")

    def _check_modules(self) -> None:
        """Raise `PolicyError` for a recipe of `fp8_modules` that the other fields, or the other recipes, exclude."""
        for each in self.fp8_modules:
            if each.recipe == NONE:
                continue
            try:
                self.with_recipe(each.recipe)
            except PolicyError as error:
                raise PolicyError(f"fp8_modules: `{each.pattern}` has the recipe {each.recipe}: {error}") from None
        if len(self.recipes) > 1 and "delayed" in self.recipes:
            raise PolicyError(
                f"fp8_modules: the recipes are {', '.join(self.recipes)}; delayed scaling computes its scales once per "
                "pass of the whole model, and is supported next to `none` only. Use one without history"
            )
        if self.fp8_modules and not self.backends:
            libraries = "; ".join(f"{name} is of {' and '.join(BACKENDS[name])}" for name in self.recipes)
            raise PolicyError(
                f"fp8_modules: one library converts all layers, and none has all of these recipes: {libraries}. "
                "Choose recipes of one, or another fp8_recipe for the layers that no pattern matches"
            )

    def _check_loss_scale(self) -> None:
        """Raise `PolicyError` for loss scale settings that are out of range, or would have no effect."""
        names = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        if not self.fp16:
            for name in names:
                if self.explicit(name):
                    raise NoEffect(
                        name,
                        f"{name}={self.format_field(name)} without fp16; only FP16's range needs loss scaling. "
                        "Remove it, or set fp16=True",
                    )
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise PolicyError(f"{name} is {value}; it is a finite number above 0")
        if self.min_loss_scale > self.initial_loss_scale and self.explicit("min_loss_scale"):
            raise PolicyError(
                f"min_loss_scale is {self.min_loss_scale:g}, above initial_loss_scale={self.initial_loss_scale:g}, "
                "where the scale starts. Lower it, or raise initial_loss_scale"
            )
        if self.loss_scale is not None:
            for name in names[1:]:
                if self.explicit(name):
                    raise PolicyError(
                        f"{name}={self.format_field(name)} has no effect with a fixed loss_scale={self.loss_scale:g}. "
                        "Remove one of them"
                    )

    @property
    def compute_dtype(self) -> Dtype:
        """The dtype of every matmul that is not in FP8 or FP4: BF16, FP16 or FP32."""
        return Dtype.BF16 if self.bf16 else Dtype.FP16 if self.fp16 else Dtype.FP32

    @property
    def low_precision(self) -> bool:
        """True if the compute dtype is BF16 or FP16."""
        return self.bf16 or self.fp16

    @property
    def reduce_dtype(self) -> Dtype:
        """The dtype in which gradients are reduced across ranks."""
        return Dtype.FP32 if self.grad_reduce_in_fp32 else typing.cast(Dtype, self.params_dtype)

    @property
    def low_bit_recipe(self) -> str | None:
        """The scaling recipe of FP8 or FP4; None when neither is on."""
        return self.fp8_recipe if self.fp8 else self.fp4_recipe if self.fp4 else None

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The libraries that may run the FP8 or FP4 recipe, the preferred one first; empty without one."""
        if not self.recipes:
            return ()
        able = [each for each in BACKENDS[self.recipes[0]] if all(each in BACKENDS[other] for other in self.recipes)]
        if "blockwise" in self.recipes and self.backend == "auto" and (self.fp16 or self.fp8 != "e4m3"):
            able = [each for each in able if each == "te"] or able  # torchao has it in E4M3, and with BF16, only
        if self.fp8_emulate:
            emulated = self.backend != "te" and all(each in EMULATED for each in self.recipes)
            return ("torchao",) if "torchao" in able and emulated else ()
        return tuple(each for each in able if self.backend in ("auto", each))

    @property
    def recipes(self) -> tuple[str, ...]:
        """The scaling recipes of FP8 or FP4: that of the policy, and those that `fp8_modules` gives to layers."""
        own = [each.recipe for each in self.fp8_modules if each.recipe != NONE]
        return tuple(dict.fromkeys([self.low_bit_recipe, *own])) if self.low_bit_recipe else ()

    def with_recipe(self, recipe: str) -> Policy:
        """Return the policy that the layers of one of `recipes` have: as if all layers had it."""
        if recipe == self.low_bit_recipe:
            return self if not self.fp8_modules else self.replace(fp8_modules=(), name=self.name)
        of_torchao = recipe == "blockwise" and self.backend == "torchao"
        form = "e4m3" if recipe in _IN_E4M3 or of_torchao else self.fp8
        return self.replace(fp8_modules=(), fp8_recipe=recipe, fp8=form, name=self.name)

    @property
    def kept_out_of_fp8(self) -> tuple[str, ...]:
        """The name patterns of modules that stay out of FP8; with `fp8_head`, without that of the output head."""
        return tuple(each for each in self.fp8_exclude if not (self.fp8_head and each.endswith("lm_head")))

    @property
    def wishes(self) -> tuple[str, ...]:
        """The fields that are "auto": granted where that is possible, and otherwise off and reported."""
        return tuple(name for name in WISHES if getattr(self, name) == "auto")

    def as_wishes(self) -> Policy:
        """Return the policy with "auto" for each field that may be a wish and is True: as a recipe means it."""
        return self._changed({name: "auto" for name in WISHES if getattr(self, name) is True})

    def decided(self, **granted: bool) -> Policy:
        """Return the policy with each wish on or off: off, unless `granted` has it."""
        return self._changed({name: granted.get(name, False) for name in self.wishes})

    def _changed(self, changes: Mapping[str, Any]) -> Policy:
        return self.replace(**changes, name=self.name) if changes else self

    @property
    def script_requirements(self) -> str | None:
        """What the script must do for a run without FP32 master weights, which no config can do; None if nothing."""
        if self.master_dtype is Dtype.FP32:
            return None
        dtype = self.master_dtype.torch_name
        return (
            f"without FP32 master weights the script itself must have the model in {self.master_dtype}: load it with "
            f"`dtype=torch.{dtype}`, or call `model.to(torch.{dtype})` before the optimizer is created"
        )

    def explicit(self, name: str) -> bool:
        """True if a field differs from its default, which for some fields is the value of another one."""
        value = getattr(self, name)
        if name == "params_dtype":
            return value is not self.compute_dtype
        if name in _TWINS:
            return bool(value)
        return bool(value != _FIELDS[name].default)

    def settings(self) -> dict[str, Any]:
        """Return the fields that are not at their default, as plain JSON values. `Policy.of` reads them back."""
        return {name: _plain(getattr(self, name)) for name in _FIELDS if name != "name" and self.explicit(name)}

    def format_field(self, name: str) -> str:
        """Return the value of a field as text for messages, such as `bf16`."""
        return _text(name, getattr(self, name))

    def emulated(self) -> Policy:
        """Return the policy with its FP8 in software, by torchao: the same numbers on any device, and not the speed.

        Raises `PolicyError` for one without FP8, and for a recipe that torchao does not have.
        """
        if self.fp4 is not None:
            raise PolicyError(
                f"`{self.name}` trains in FP4, for which torchao has no layer that could be emulated; `mpguard "
                "sensitivity` measures what it would cost each layer. Name a recipe with FP8, or leave out --emulate"
            )
        if self.fp8 is None:
            raise PolicyError(f"`{self.name}` has no FP8 to emulate; name a recipe with FP8, or leave out --emulate")
        return self if self.fp8_emulate else self.replace(fp8_emulate=True, backend="torchao")

    def replace(self, **changes: Any) -> Policy:
        """Return a policy with some fields changed; its name lists the changes. Raises `PolicyError`.

        Fields that had the default of another field (`params_dtype` that of bf16, ...) get that field's new value.
        Fields of this policy that have no effect any more (`num_layers_at_end_in_bf16` after
        `first_last_layers_bf16=False`) return to their defaults.
        """
        merged = {**self.settings(), **changes}
        _check_names(merged)
        if "name" not in changes:
            listed = ", ".join(f"{key}={_text(key, value, 4)}" for key, value in changes.items())
            merged["name"] = f"{self.name} with {listed}" if listed else self.name
        for name, twin in _TWINS.items():
            if name in changes and twin not in changes:
                merged[twin] = changes[name]
        if merged.get("fp8") and merged.get("fp8_recipe", "tensorwise") != "delayed":
            for field in (
                set(_DELAYED) - changes.keys() - ({"fp8_margin"} if merged.get("fp8_recipe") in _MXFP8 else set())
            ):
                merged.pop(field, None)
        while True:
            try:
                return Policy(**merged)
            except NoEffect as error:
                if error.field in changes:
                    raise
                for field in {error.field, _TWINS.get(error.field, error.field)}:
                    merged.pop(field, None)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Policy:
        """Return a policy from plain values. Raises `PolicyError` for an unknown field, with the similar names."""
        _check_names(settings)
        return cls(**settings)

    def __str__(self) -> str:
        """Return the text form: JSON of the name and of every field that is not at its default."""
        return json.dumps({"name": self.name, **self.settings()})

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy of a text form, as `str(policy)` returns it. Raises `PolicyError`."""
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise PolicyError(f"not a policy in text form: {error}: {text[:80]!r}") from None
        if not isinstance(settings, dict):
            raise PolicyError(f"not a policy in text form: a JSON object is needed, not {text[:80]!r}")
        return cls.of(settings)

    def to(self, target: str, strategy: str | None = None) -> Any:
        """Return the real object of a target; a dict of keyword arguments for a target that takes keywords.

        target: `torch`, `accelerate`, `deepspeed`, `fsdp1`, `fsdp2`, `te`, `torchao`, `transformers`, ...
            (`mpguard recipes NAME --for TARGET` prints them).
        strategy: `single`, `ddp`, `fsdp1`, `fsdp2`, `deepspeed-zero1` to `-zero3`; settings that depend on it (float8
            all-gather only under fsdp2) are left out without one.

        Warns `NotCarried` for required fields that the target does not carry. Raises `PolicyError` if the policy
        cannot be expressed for the target, `MissingExtra` if its library is not installed.
        """
        from mpguard.targets.inject import build

        return build(self, target, strategy)


_FIELDS = {field.name: field for field in dataclasses.fields(Policy)}
_TYPES = typing.get_type_hints(Policy)

FIELD_NAMES = tuple(name for name in _FIELDS if name != "name")


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise `PolicyError` for a key that is not a field, with the similar names."""
    for key in settings:
        if key not in _FIELDS:
            raise PolicyError(f"a policy has no field `{key}`{did_you_mean(str(key), FIELD_NAMES)}")


def _plain(value: Any) -> Any:
    """Return a field's value as a JSON value."""
    if isinstance(value, Dtype):
        return value.short
    if isinstance(value, ModuleRecipe):
        return value.plain()
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _text(name: str, value: Any, most: int | None = None) -> str:
    """Return the value of a field as text; more than `most` patterns of `fp8_modules` as their number."""
    if name == "fp8_modules" and isinstance(value, (list, tuple)):
        return f"[{as_text(value, most)}]"
    return str(_plain(value))
