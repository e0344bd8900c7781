"""The precision keys of a LLaMA-Factory YAML. From LLaMA-Factory 0.9.5.

Source: its `hparams/parser.py`, `hparams/training_args.py`, `model/patcher.py`, `model/adapter.py` and
`train/fp8_utils.py`. A run without `bf16`, `fp16` and `pure_bf16` enters no autocast, and its parser logs "We recommend
enable mixed precision training".
"""

from __future__ import annotations

VERSION = "0.9.5"
#: The keys that switch a precision on.
SWITCHES = ("bf16", "fp16", "pure_bf16", "fp8")
#: Keys of which an unusual optimizer or a second backend has its own dtypes, or with which nothing is trained.
OTHER = ("use_badam", "use_galore", "use_apollo", "use_unsloth", "use_kt", "tokenized_path", "infer_dtype")
#: The values of `fp8_backend`; `auto` is torchao.
FP8_BACKENDS = ("auto", "torchao", "te", "msamp")
#: The keys whose names speak of precision, also those of transformers' TrainingArguments.
KEYS = frozenset({
    *SWITCHES, "fp8_backend", "fp8_enable_fsdp_float8_all_gather", "upcast_layernorm", "upcast_lmhead_output",
    "infer_dtype", "quantization_method", "quantization_bit", "quantization_type", "double_quantization", "tf32",
    "bf16_full_eval", "fp16_full_eval", "torch_compile", "fp16_opt_level", "half_precision_backend", "compute_dtype",
})  # fmt: skip
