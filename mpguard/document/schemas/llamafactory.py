"""The precision keys of a LLaMA-Factory YAML. From LLaMA-Factory 0.9.5.

Source: its `hparams/parser.py`, `hparams/training_args.py`, `model/patcher.py`, `model/adapter.py` and
`train/fp8_utils.py`. A run without `bf16`, `fp16` and `pure_bf16` enters no autocast, and its parser logs "We recommend
enable mixed precision training".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mpguard.document.values import BOOLEAN, WHOLE, ConfigProblem, ValueKind, misspelling_of, one_of, wrong_values

if TYPE_CHECKING:
    from mpguard.document import Document

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
#: Key -> the values that have the meaning that they are written with: its parser converts none of them.
VALUES: Mapping[str, ValueKind] = {
    **dict.fromkeys(
        (*SWITCHES, "fp8_enable_fsdp_float8_all_gather", "upcast_layernorm", "upcast_lmhead_output", "tf32",
         "bf16_full_eval", "fp16_full_eval", "torch_compile", "double_quantization"),
        BOOLEAN,
    ),
    "fp8_backend": one_of(*FP8_BACKENDS),
    "quantization_bit": WHOLE,
}  # fmt: skip


def refusals(document: Document) -> Iterator[ConfigProblem]:
    """Yield the precision keys and values at which LLaMA-Factory stops, or that it takes for something else."""
    for entry in document.entries():
        if len(entry.path) == 1 and (meant := misspelling_of(entry.key, KEYS)) is not None:
            reason = f"LLaMA-Factory {VERSION} has no such key, and stops; did you mean `{meant}`?"
            yield ConfigProblem(entry.key, reason, unknown=True)
    yield from value_refusals(document)


def value_refusals(document: Document) -> Iterator[ConfigProblem]:
    """Yield the values at which it stops, or that it takes for something else."""
    yield from wrong_values(document, VALUES)
    bf16, fp16 = document.entry("bf16"), document.entry("fp16")
    if bf16 is not None and fp16 is not None and bf16.value is True and fp16.value is True:
        yield ConfigProblem("fp16", "`bf16` is true as well: the Trainer stops. Keep one of them")
