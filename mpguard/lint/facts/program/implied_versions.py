"""The versions of a library that code can run with, by what it uses: removed functions, arguments and attributes.

An example is `TransformerLayer(..., attention_softmax_in_fp32=True)` of Transformer Engine, which 1.0 refuses: code
with this call and without a pinned version was written for an older one, and is no less bound to it than by a pin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.syntax import imports
from mpguard.lint.facts.syntax.view import called
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView
    from mpguard.lint.facts.syntax.records import Call

_Version = tuple[int, ...]

#: Arguments of Transformer Engine's layers (compared in the sources of all versions from 0.1 to 2.18).
_SPLIT_OVERLAP: dict[str, _Version] = dict.fromkeys(
    ("ub_split_ag", "ub_split_rs", "ub_atomic_gemm_ag", "ub_atomic_gemm_rs"), (1, 6)
)
_SKIP_WEIGHT: dict[str, _Version] = {"skip_weight_param_allocation": (1, 0)}
_SOFTMAX = ("apply_query_key_layer_scaling", "attention_softmax_in_fp32")
#: Library -> the end of the name of a function or class -> argument -> the version that removed it.
_ARGUMENTS: dict[str, dict[str, dict[str, _Version]]] = {
    "transformer_engine": {
        "TransformerLayer": {**dict.fromkeys(_SOFTMAX, (1, 0)), **_SPLIT_OVERLAP},
        "DotProductAttention": dict.fromkeys(_SOFTMAX, (0, 7)),
        "MultiheadAttention": _SPLIT_OVERLAP,
        "LayerNormMLP": _SPLIT_OVERLAP,
        "LayerNormLinear": {**_SKIP_WEIGHT, **_SPLIT_OVERLAP},
        "Linear": {**_SKIP_WEIGHT, **_SPLIT_OVERLAP},
    },
}
#: Library -> the end of the name of a function -> the version that removed it.
_NAMES: dict[str, dict[str, _Version]] = {
    "transformer_engine": {
        **dict.fromkeys(
            ("fp8.is_fp8_enabled", "fp8.is_fp8_calibration", "fp8.is_first_fp8_module", "fp8.get_fp8_recipe",
             "fp8.get_fp8_group"), (0, 12)),
        "fp8.amax_and_scale_update": (1, 6),
        **dict.fromkeys(
            ("cpp_extensions.cast_to_fp8", "cpp_extensions.cast_from_fp8", "cpp_extensions.fp8_gemm",
             "cpp_extensions.gemm", "cpp_extensions.fp8_cast_transpose_fused"), (2, 0)),
    },
}  # fmt: skip
#: Library -> a word, and what reads an attribute with it (of a tensor or module) -> the version that removed it.
_ATTRIBUTES: dict[str, dict[tuple[str, str], _Version]] = {
    "transformer_engine": {
        ("_fp8_meta", r"(?<!\bself)\._fp8_meta\b"): (2, 0),
        ("scale_inv", r"\.fp8_meta\[[\"']scaling_(?:fwd|bwd)[\"']\]\.scale_inv\b"): (2, 0),
    }
}

#: Modules that put a port to other hardware in the place of a library, and a version that those ports do not follow.
_PORT = lazy_pattern(r"^[ \t]*(?:import|from)[ \t]+(?:musa_patch|torch_musa|torch_npu|mindspeed)\b", re.M)
_NOT_PORTED: _Version = (2, 0)


def lowest_too_high(facts: ProgramView, library: str) -> _Version | None:
    """Return the lowest version of a library with which a program cannot run; None if nothing bounds it.

    The program: the file, the modules of the tree that it imports, and those that use it and may train.
    """
    if library not in _ARGUMENTS and library not in _NAMES:
        return None
    program = dict.fromkeys((facts, *facts.imported_modules(), *(facts.users("") or ())))
    return min((each for module in program if not module.is_test for each in _removals(module, library)), default=None)


def _removals(facts: ProgramView, library: str) -> Iterator[_Version]:
    """Yield the versions that removed what a file calls or reads. A call for old versions only bounds nothing."""
    if _PORT.search(facts.file_text):
        yield _NOT_PORTED
    for (word, reads), version in _ATTRIBUTES.get(library, {}).items():
        if word in facts.file_text and re.search(reads, stripped(facts.file_text)):
            yield version
    if library not in facts.file_text:
        return
    facts.need_all()
    for name, version in _NAMES.get(library, {}).items():
        if any(_calls(facts, library, name)):
            yield version
    for name, removed in _ARGUMENTS.get(library, {}).items():
        if any(argument in facts.file_text for argument in removed):
            for call in _calls(facts, library, name):
                yield from (version for argument, version in removed.items() if argument in call.keywords)


def _calls(facts: ProgramView, library: str, name: str) -> Iterator[Call]:
    last = name.rpartition(".")[2]
    for call in called(facts, last, *facts.aliases(last)):
        if not imports.stands_in(call) and any(
            path.startswith(f"{library}.") and path.endswith(f".{name}") for _, path in facts.paths(call)
        ):
            yield call
