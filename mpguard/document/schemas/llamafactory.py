"""The precision keys of a LLaMA-Factory YAML. From LLaMA-Factory 0.9.5.

Source: its `hparams/parser.py`, `model/patcher.py` and `model/adapter.py`. A run without `bf16`, `fp16` and `pure_bf16`
enters no autocast, and its parser logs "We recommend enable mixed precision training".
"""

from __future__ import annotations

#: The keys that switch a precision on.
SWITCHES = ("bf16", "fp16", "pure_bf16", "fp8")
#: Keys of which an unusual optimizer or a second backend has its own dtypes, or with which nothing is trained.
OTHER = ("use_badam", "use_galore", "use_apollo", "use_unsloth", "use_kt", "tokenized_path", "infer_dtype")


def is_config(data: object) -> bool:
    """True if the content of a file is a config of LLaMA-Factory."""
    return isinstance(data, dict) and {"finetuning_type", "stage"} <= set(data)
