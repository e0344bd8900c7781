"""The keys of its config that DeepSpeed reads: a committed table, from DeepSpeed 0.19.8.

An unknown key at the top level, in `torch_autocast` and in `data_types` is silently ignored (S18); in `bf16` and
`fp16` it is an error. tests/document/schemas/test_deepspeed_schema.py compares the table with the keys that the
installed DeepSpeed looks up.
"""

from __future__ import annotations

from collections.abc import Mapping

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
SECTIONS: Mapping[str, frozenset[str]] = {
    "bf16": BF16,
    "bfloat16": BF16,
    "fp16": FP16,
    "torch_autocast": _words("enabled dtype lower_precision_safe_modules"),
    "data_types": _words("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
}
#: Sections in which an unknown key is an error; in the others it is ignored.
STRICT = frozenset({"bf16", "bfloat16", "fp16"})
#: Wrong name of a section that users write -> its name.
RENAMED: Mapping[str, str] = {
    "bfloat_16": "bf16", "bf_16": "bf16", "bfp16": "bf16", "float16": "fp16", "float_16": "fp16", "fp_16": "fp16",
    "half": "fp16", "autocast": "torch_autocast", "torch_amp": "torch_autocast",
}  # fmt: skip
