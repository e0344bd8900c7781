"""The keys that accelerate reads, at the top level and in its sections: a committed table, from accelerate 1.15.0.

`accelerate launch` refuses an unknown top-level key, and checks no other key. It copies each key of a section to a
launch argument, with the section's prefix added where it is missing, and passes some arguments to the workers; a key
that it never reads again is silently lost (S5, S6).
tests/document/schemas/test_accelerate_schema.py compares the table with the source of the installed accelerate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpguard.core.errors import did_you_mean, near

VERSION = "1.15.0"


@dataclasses.dataclass(frozen=True)
class Section:
    """The keys of one section.

    prefix: the prefix that accelerate adds to a key without it. keys: the keys that are read, without the prefix.
    renamed: keys that the wizard or an older accelerate wrote -> the keys that are read in their place.
    """

    prefix: str
    keys: frozenset[str]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def bare(self, key: str) -> str:
        """Return a key without the section's prefix: `fsdp_version` and `version` are the same key."""
        return key.removeprefix(self.prefix) if self.prefix else key


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FP8 = Section(
    "fp8_",
    _words(
        "backend use_autocast_during_eval margin interval format amax_history_len amax_compute_algo"
        " override_linear_precision override_fprop override_dgrad override_wgrad use_mxfp8_block_scaling"
        " opt_level pad_inner_dim enable_fsdp_float8_all_gather"
    ),
    # `accelerate config` itself writes these keys (commands/config/cluster.py).
    {
        "amax_history_length": "amax_history_len",
        "amax_compute_algorithm": "amax_compute_algo",
        "optimization_level": "opt_level",
    },
)

FSDP = Section(
    "fsdp_",
    _words(
        "version sharding_strategy reshard_after_forward offload_params min_num_params auto_wrap_policy"
        " transformer_layer_cls_to_wrap backward_prefetch state_dict_type forward_prefetch use_orig_params"
        " cpu_ram_efficient_loading sync_module_states activation_checkpointing"
        " activation_checkpointing_offload ignored_modules"
    ),
    {"backward_prefetch_policy": "backward_prefetch"},  # written by older versions of accelerate
)

DYNAMO = Section("dynamo_", _words("backend mode use_fullgraph use_dynamic use_regional_compilation"))

#: `offload_*_nvme_path` is parsed, and written by the wizard, but never passed to the workers.
DEEPSPEED = Section(
    "",
    _words(
        "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device gradient_accumulation_steps"
        " gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter"
        " deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names"
    ),
)

#: Without the prefix a key is lost: accelerate adds none in this section.
_PARALLELISM = _words(
    "dp_replicate_size dp_shard_size tp_size cp_size cp_backend cp_comm_strategy sp_size sp_backend sp_seq_length"
    " sp_seq_length_is_variable sp_attn_implementation"
)
PARALLELISM_PREFIX = "parallelism_config_"
PARALLELISM = Section(
    "",
    frozenset(PARALLELISM_PREFIX + key for key in _PARALLELISM),
    {key: PARALLELISM_PREFIX + key for key in sorted(_PARALLELISM)},
)

SECTIONS: Mapping[str, Section] = {
    "fp8_config": FP8,
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED,
    "dynamo_config": DYNAMO,
    "parallelism_config": PARALLELISM,
}

#: Launch arguments that a key of `deepspeed_config`, which gets no prefix, sets instead of the top level or a flag.
#: They are not DeepSpeed's keys, but they are read (S7).
ARGUMENTS = _words(
    "mixed_precision num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend"
    " same_network main_training_function gpu_ids debug cpu use_cpu multi_gpu tpu use_deepspeed use_fsdp"
    " use_megatron_lm use_parallelism_config downcast_bf16 enable_cpu_affinity num_cpu_threads_per_process"
    " module no_python quiet env mpirun_hostfile dynamo_backend dynamo_mode dynamo_use_fullgraph"
    " dynamo_use_dynamic dynamo_use_regional_compilation max_restarts monitor_interval rdzv_conf role"
    " log_dir tee"
)

#: Top-level keys of a config, and those of the compute environment AMAZON_SAGEMAKER.
_ALL = _words(
    "compute_environment distributed_type mixed_precision use_cpu debug num_machines gpu_ids enable_cpu_affinity"
    " dynamo_config"
)
TOP = _ALL | _words(
    "num_processes machine_rank main_process_ip main_process_port rdzv_backend same_network main_training_function"
    " fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16"
    " tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env"
)
SAGEMAKER = _ALL | _words(
    "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version"
    " py_version sagemaker_inputs_file sagemaker_metrics_file additional_args"
)
#: Old top-level keys, which accelerate converts to others when it reads the file.
OLD = _words("fp16 dynamo_backend")

#: Spelling in lower case that users write -> the value that `ACCELERATE_FP8_BACKEND` must have, in this case.
FP8_BACKENDS: Mapping[str, str] = {
    "te": "TE", "ao": "AO", "msamp": "MSAMP", "ms-amp": "MSAMP", "ms_amp": "MSAMP", "torchao": "AO",
    "transformer_engine": "TE", "transformer-engine": "TE", "transformerengine": "TE",
}  # fmt: skip


def unknown_key(key: str, sagemaker: bool = False) -> str | None:
    """Return a clause with the remedy for a top-level key that accelerate refuses; None for a key that it reads."""
    known = SAGEMAKER if sagemaker else TOP
    if key in known | OLD:
        return None
    if key.startswith("mpguard_"):
        return "; mpguard's keys belong in `fp8_config`"
    for name, section in SECTIONS.items():
        if not sagemaker and len(key) > 6 and section.bare(key) in section.keys:
            return f"; it belongs under `{name}`"
    return did_you_mean(key, known) if near(key, known) else ". Remove it"
