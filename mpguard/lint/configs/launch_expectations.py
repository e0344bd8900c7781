"""Compare the precision that a script's launch configs set with the code. Shared by MPG514 and MPG862 to MPG864."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour import options
from mpguard.lint.facts.program.dtypes import PossibleDtypes, only_dtype
from mpguard.lint.facts.program.lattice import Constant
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import PathCondition
from mpguard.lint.model.rule import Note
from mpguard.policy.dtype import HALF_DTYPES, Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.facts.program.lattice import Alternatives
    from mpguard.lint.facts.syntax.records import Call, Record
    from mpguard.lint.project.launch_configs import LaunchConfig

    Configs = tuple[LaunchConfig, ...]

#: Mode of a config -> dtype that autocast computes in. Around its matmuls, an FP8 run computes in BF16.
_COMPUTES = {"fp16": Dtype.FP16, "bf16": Dtype.BF16, "fp8": Dtype.BF16}
#: Names of options that select the precision, or the library that applies it.
_OPTION = lazy_pattern(
    r"(?i:16|half|autocast|prec|scaler|dtype|mixed|quant|cuda|device|gpu|accelerat|deepspeed)"
    r"|(?i:(?:^|_)amp(?:_|$))|amp[A-Z_]|A(?:mp|MP)"
)
#: Names of functions and classes for one precision that other code selects: `AMPOptimizer`, `training_step_amp`.
_ONE_PRECISION = lazy_pattern(r"(?i:16|half|autocast|precision)|(?i:(?:^|_)amp(?:_|$))|amp[A-Z_]|A(?:mp|MP)")
#: The keys that set the precision, in the order of their priority in accelerate.
_KEYS = ("deepspeed_config.mixed_precision", "mixed_precision", "fp16", "bf16.enabled", "fp16.enabled")


def configs(facts: Facts) -> Configs:
    """Return the configs that a script is launched with.

    Empty if one of them sets no precision, or if the script is declared as inference.
    """
    launched = facts.project.configs_for(facts.path)
    if facts.declared == "inference" or any(config.mixed_precision is None for config in launched):
        return ()
    return launched


def deepspeed_config(facts: Facts, name: str) -> LaunchConfig | None:
    """Return the DeepSpeed file that code names (`deepspeed="ds.json"`); None if it is not in the tree."""
    from mpguard.lint.project.launch_configs import of_deepspeed

    document = facts.project.config_named(facts.path, name)
    return of_deepspeed(document) if document is not None and document.kind == "deepspeed" else None


def deepspeed_dict(call: Call, facts: Facts) -> LaunchConfig | None:
    """Return the DeepSpeed config that a call gets as a dict of the code; None if it is not fully visible."""
    from mpguard.lint.facts.domain import config_dicts  # imports PyYAML, which most runs over Python do not need
    from mpguard.lint.project.launch_configs import of_deepspeed

    document = config_dicts.given_to(facts, call)
    return of_deepspeed(document) if document is not None else None


def contradicts(dtype: Dtype, configs: Configs) -> bool:
    """True if every config computes in another dtype. False if one sets `no`: then the code's choice is intended."""
    return all(compute_dtype(config.mixed_precision) not in (None, dtype) for config in configs)


def compute_dtype(mode: str | None) -> Dtype | None:
    """Return the dtype in which a run of a mode (`fp16`, `bf16`, `fp8`) computes; None for any other mode."""
    return _COMPUTES.get(mode or "")


def is_unconditional(guard: PathCondition, at: Record | None) -> bool:
    """True if code runs whatever the options are: no option for the precision guards it or selects its function."""
    if any(_OPTION.search(word) for word in guard.words()):
        return False
    return at is None or not any(_ONE_PRECISION.search(scope.name) for scope in at.scope.within())


def low(dtypes: PossibleDtypes) -> Dtype | None:
    """Return the low dtype if it is the only possible one."""
    dtype = only_dtype(dtypes)
    return dtype if isinstance(dtype, Dtype) and dtype in HALF_DTYPES else None


def literal(values: Alternatives) -> str | None:
    """Return a value's text in lower case if it is the only value possible."""
    known = {each.atom.value if isinstance(each.atom, Constant) else None for each in values}
    value = known.pop() if len(known) == 1 else None
    return value.lower() if isinstance(value, str) else None


def given(node: cst.BaseExpression | None, call: Call, facts: Facts) -> str | None:
    """Return the precision that an argument is: a constant, or the default of an option that nothing passes."""
    found = literal(facts.evaluate(node, call)) if node is not None else None
    default = options.default_of(node, facts) if found is None else None
    passed = default is not None and facts.project.passes_option(facts.path, dotted(node).rpartition(".")[2])
    return default if isinstance(default, str) and not passed else found


def wanted(configs: Configs) -> str:
    """Return the modes of the configs for a message: `` `bf16` or `fp8` ``."""
    return "`" + "` or `".join(dict.fromkeys(str(config.mixed_precision) for config in configs)) + "`"


def places(configs: Configs) -> tuple[Note, ...]:
    """Return a note for each config, at the key or the launch flag that sets the precision."""
    notes = []
    for config in configs:
        if config.place is not None:
            path, word = config.place
            notes.append(Note(f"the launch line sets `{config.mixed_precision}`", word.span, path))
            continue
        entry = next((e for key in _KEYS if (e := config.entry(key)) is not None), None)
        if entry is None:
            notes.append(Note(f"{config.path} sets `{config.mixed_precision}`"))
        else:
            notes.append(Note(f"the config sets `{config.mixed_precision}`", entry.span, config.path))
    return tuple(notes)
