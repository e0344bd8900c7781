"""The keys of its config that DeepSpeed reads: a committed table, from DeepSpeed 0.19.8.

An unknown key at the top level, in `torch_autocast` and in `data_types` is silently ignored (S18); in `bf16`, `fp16`
and `zero_optimization` it is an error. tests/document/schemas/test_deepspeed_schema.py compares the tables with the
keys that the installed DeepSpeed looks up, and with the values that it refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpguard.document.values import (
    SCALE,
    SECTION,
    SWITCH,
    TRUTHY,
    WHOLE,
    WHOLE_FROM_0,
    ValueKind,
    misspelling_of,
    one_of,
)
from mpguard.policy.dtype import Dtype
from mpguard.targets.settings import ABSENT, lookup, show

if TYPE_CHECKING:
    from mpguard.document import Document, Entry

VERSION = "0.19.8"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: The top-level keys that `DeepSpeedConfig` looks up.
CONFIG = _words(
    "activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type"
    " compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last"
    " datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel"
    " flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping"
    " gradient_predivide_factor graph_harvesting hybrid_engine log_level managed_gradient_accumulation"
    " memory_breakdown nebula optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler"
    " seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensor_parallel"
    " tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu"
    " use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization"
    " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"
)
#: Top-level keys that are read elsewhere: `deepspeed.initialize`, the old form of ZeRO, transformers' ZeRO inference.
ELSEWHERE = _words("data_parallel_size sequence_parallel_size allgather_size inference")
KEYS = CONFIG | ELSEWHERE

#: Sections that concern precision, and their keys. `bfloat16` is read only where there is no `bf16`.
BF16 = _words("enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states")
FP16 = _words(
    "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis"
    " min_loss_scale fp16_master_weights_and_grads"
)
ZERO = _words(
    "allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients cpu_offload"
    " cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks"
    " gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights"
    " log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear"
    " model_persistence_threshold module_granularity_threshold offload_optimizer offload_param overlap_comm"
    " override_module_apply param_persistence_threshold parameter_alignment pipeline_loading_checkpoint"
    " prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory"
    " stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save"
    " stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance"
    " stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold"
    " stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size"
    " use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size"
    " zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights"
)
SECTIONS: Mapping[str, frozenset[str]] = {
    "bf16": BF16,
    "bfloat16": BF16,
    "fp16": FP16,
    "torch_autocast": _words("enabled dtype lower_precision_safe_modules"),
    "data_types": _words("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    "zero_optimization": ZERO,
}
#: Sections in which an unknown key is an error; in the others it is ignored.
STRICT = frozenset({"bf16", "bfloat16", "fp16", "zero_optimization"})
#: Wrong name of a section that users write -> its name.
RENAMED: Mapping[str, str] = {
    "bfloat_16": "bf16", "bf_16": "bf16", "bfp16": "bf16", "float16": "fp16", "float_16": "fp16", "fp_16": "fp16",
    "half": "fp16", "autocast": "torch_autocast", "torch_amp": "torch_autocast",
}  # fmt: skip

#: The names of dtypes in `torch_autocast` and `data_types` (`DtypeEnum`). For the reduction there are three names only.
_DTYPES = one_of(
    "fp32", "bf16", "fp16", "float32", "bfloat16", "float16", "float", "half", "torch.float32", "torch.bfloat16",
    "torch.float16", "int8", "torch.int8",
)  # fmt: skip
_COMMUNICATION = one_of("fp32", "bf16", "fp16", fold=True)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


#: DeepSpeed compares these with 0, which text cannot be.
_COUNT = ValueKind("a number above 0 is needed", lambda value: _number(value) and value > 0)
_NUMBER = ValueKind("a number is needed", _number)
_ZERO_OR_SWITCH = ValueKind("a section is needed", lambda value: isinstance(value, (Mapping, bool)))  # its old form
_OFFLOAD = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_ZERO_SECTIONS = frozenset({"stage", "offload_optimizer", "offload_param", "zenflow", "leaf_module"})
#: The fields of ZeRO that are whole numbers; the other ones without a section are switches.
ZERO_NUMBERS = frozenset(
    key for key in ZERO - _ZERO_SECTIONS if key.endswith(("_size", "_threshold", "_live_parameters", "_distance"))
)
ZERO_SWITCHES = ZERO - _ZERO_SECTIONS - ZERO_NUMBERS
#: Keys with whose "auto" DeepSpeed stops if neither the Trainer nor accelerate has filled it in: it compares them, and
#: divides by them. It drops "auto" in the strict sections.
FILLED_IN = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "communication_data_type", "seq_parallel_communication_data_type", "steps_per_print",
)  # fmt: skip
#: Section whose `params` are the arguments of a class -> name and position of the argument of `deepspeed.initialize`
#: for an object that the script creates itself.
OBJECTS: Mapping[str, tuple[str, int]] = {"optimizer": ("optimizer", 2), "scheduler": ("lr_scheduler", 5)}
#: Dotted key -> the values that DeepSpeed can parse there.
VALUES: Mapping[str, ValueKind] = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "torch_autocast", "data_types"), SECTION),
    **{f"{section}.{key}": SWITCH for section in ("bf16", "bfloat16") for key in sorted(BF16)},
    **dict.fromkeys(
        ("fp16.enabled", "fp16.auto_cast", "fp16.consecutive_hysteresis", "fp16.fp16_master_weights_and_grads"), SWITCH
    ),
    **dict.fromkeys(
        ("fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale"), WHOLE
    ),
    "fp16.loss_scale": SCALE,
    "communication_data_type": _COMMUNICATION,
    "seq_parallel_communication_data_type": _COMMUNICATION,
    "torch_autocast.enabled": TRUTHY,  # which DeepSpeed does not parse
    "torch_autocast.dtype": _DTYPES,
    "data_types.grad_accum_dtype": _DTYPES,
    "data_types.param_dtype": _DTYPES,
    "data_types.buffer_dtype": _DTYPES,
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), _COUNT),
    "gradient_clipping": _NUMBER,
    "zero_optimization": _ZERO_OR_SWITCH,
    **{f"zero_optimization.{key}": WHOLE_FROM_0 for key in sorted(ZERO_NUMBERS)},
    **{f"zero_optimization.{key}": SWITCH for key in sorted(ZERO_SWITCHES)},
    **dict.fromkeys(_OFFLOAD, SECTION),
    **dict.fromkeys((f"{section}.device" for section in _OFFLOAD), one_of("none", "cpu", "nvme")),
    "zero_optimization.stage": ValueKind("it is one of 0, 1, 2, 3", lambda value: str(value) in ("0", "1", "2", "3")),
}

#: Section with a class -> the names that are read in upper or lower case, and those that are read as written:
#: DeepSpeed's own, and those of `torch.optim` and `torch.optim.lr_scheduler` (torch 2.14). torch may get further ones.
CLASSES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "optimizer": (
        _words("Adagrad Adam AdamW Lamb Lion MuAdam MuAdamW MuSGD Muon"),
        _words("ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam"),
    ),
    "scheduler": (
        frozenset(),
        _words(
            "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR"
            " LRRangeTest LRScheduler LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycle OneCycleLR PolynomialLR"
            " ReduceLROnPlateau SequentialLR StepLR WarmupCosineLR WarmupDecayLR WarmupLR"
        ),
    ),
}


def misnamed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys with a class that DeepSpeed does not know, each with the reason. Only what is a misspelling.

    From deepspeed 0.19.8, `DeepSpeedEngine._do_sanity_check` and `_scheduler_from_config`. The name is not read where
    the script passes an object of its own.
    """
    for section, (folded, exact) in CLASSES.items():
        name = lookup(config, f"{section}.type")
        if not isinstance(name, str) or name in exact or name.lower() in {each.lower() for each in folded}:
            continue
        known = {each.lower(): each for each in (*folded, *exact)}
        meant = known.get(name.lower()) or known.get(misspelling_of(name.lower(), known, 0.85) or "")
        if meant is not None:
            yield f"{section}.type", f"DeepSpeed has no {section} `{name}`, and stops; did you mean `{meant}`?"


def without_path(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the sections that offload to NVMe without a folder, each with the reason. DeepSpeed joins it to a path.

    Below ZeRO stage 3 nothing is offloaded to NVMe, and the folder is not read (`without_effect`).
    """
    for key in _OFFLOAD if lookup(config, "zero_optimization.stage") == 3 else ():
        if lookup(config, f"{key}.device") == "nvme" and lookup(config, f"{key}.nvme_path") in (ABSENT, None):
            yield f"{key}.device", f"is nvme without `{key}.nvme_path`; DeepSpeed stops. Add a folder of the device"


def without_effect(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is offloaded at a ZeRO stage that does not read it, each with the reason. The run goes on.

    From deepspeed 0.19.8, `DeepSpeedEngine._configure_zero_optimizer` and `DeepSpeedZeroOptimizer.__init__`.
    """
    stage = lookup(config, "zero_optimization.stage")
    stage = 0 if stage is ABSENT else stage
    if type(stage) is not int or stage > 2:
        return
    optimizer, params = (lookup(config, f"{key}.device") for key in _OFFLOAD)
    if params in ("cpu", "nvme"):
        yield f"{_OFFLOAD[1]}.device", f"ZeRO stage {stage} ignores it: parameters are offloaded at stage 3 alone"
    if optimizer in ("cpu", "nvme") and stage == 0:
        reason = "ZeRO stage 0 offloads nothing. Set stage 1, 2 or 3, or remove the section: DeepSpeed's optimizers for"
        yield f"{_OFFLOAD[0]}.device", f"{reason} the CPU, which it selects, stop at parameters on a GPU"
    elif optimizer == "nvme":
        reason = "states are offloaded to NVMe at stage 3 alone, and to the CPU's memory here"
        yield f"{_OFFLOAD[0]}.device", f"ZeRO stage {stage} reads it as cpu: {reason}"


def contradictions(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys with which DeepSpeed stops because of another one, each with the reason. A policy replaces them.

    From deepspeed 0.19.8, `DeepSpeedConfig._do_error_check`.
    """
    stage = lookup(config, "zero_optimization.stage")
    without = not isinstance(stage, int) or stage == 0
    low = [f"{name}.{name}_master_weights_and_grads" for name in ("bf16", "fp16")]
    for key in (*low, "bf16.bf16_optimizer_states"):
        if lookup(config, key) is True and without and stage != "auto":
            yield key, "is true without ZeRO stage 1, 2 or 3; DeepSpeed stops"
    if lookup(config, "bf16.bf16_optimizer_states") is True and lookup(config, low[0]) is not True:
        yield "bf16.bf16_optimizer_states", "is true without `bf16_master_weights_and_grads`; DeepSpeed stops"


def unresolved(document: Document) -> Entry | None:
    """Return the first switch of the precision that is "auto", where no other one is on; None without one."""
    switches = [entry for name in ("bf16", "bfloat16", "fp16") if (entry := document.entry(f"{name}.enabled"))]
    autocast = document.entry("torch_autocast.enabled")
    if any(each.value not in ("auto", False) for each in switches) or (autocast and autocast.value is not False):
        return None
    found = [each for each in switches if each.value == "auto"]
    return min(found, key=lambda entry: entry.key_span) if found else None


def unfilled(config: Mapping[str, Any], sections: Iterable[str] = ()) -> Iterator[str]:
    """Yield the keys with an "auto" at which DeepSpeed stops if nobody fills it in.

    sections: those of `OBJECTS` from which DeepSpeed creates the object.
    """
    yield from (key for key in FILLED_IN if config.get(key) == "auto")
    for name in sections:
        params = lookup(config, f"{name}.params")
        if isinstance(params, Mapping):
            yield from (f"{name}.params.{key}" for key, value in params.items() if value == "auto")


def optimizer_class(config: Mapping[str, Any]) -> str | None:
    """Return the class of the optimizer that DeepSpeed builds for a config; None if it is the script's own.

    From deepspeed 0.19.8, `DeepSpeedEngine._do_optimizer_sanity_check`.
    """
    accumulated = lookup(config, "data_types.grad_accum_dtype")
    stage = lookup(config, "zero_optimization.stage")
    if stage == 3:
        return "DeepSpeedZeroOptimizer_Stage3"
    if stage in (1, 2):
        offload = lookup(config, "zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
        separate = lookup(config, "bf16.enabled") is True and Dtype.spelled(str(accumulated)) is Dtype.FP32
        return "BF16_Optimizer" if separate and stage == 1 and not offload else "DeepSpeedZeroOptimizer"
    low = any(lookup(config, f"{name}.enabled") is True for name in ("bf16", "fp16"))
    return "FP16_Optimizer (FP16_UnfusedOptimizer, if it is not FusedAdam)" if low else None


def other_optimizer(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return a line that names the other optimizer class that a changed config selects; None if it is the same."""
    one, other = optimizer_class(before), optimizer_class(after)
    if one == other:
        return None
    switches = [f"{name}.enabled" for name in ("bf16", "fp16")]
    changed = [key for key in switches if (lookup(before, key) is True) != (lookup(after, key) is True)]
    if lookup(before, "data_types.grad_accum_dtype") != lookup(after, "data_types.grad_accum_dtype"):
        changed.append("data_types.grad_accum_dtype")
    why = " and ".join(f"{key}: {show(lookup(after, key))}" for key in changed)
    return f"DeepSpeed builds {other or 'no wrapper'} in place of {one or 'no wrapper'}, because of {why}"
