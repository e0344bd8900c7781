"""What the launch configs of a script ask for, against what its code says: what the rules 514 and 862 to 864 share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpguard.lint.facts.syntax.path_condition import PathCondition
from mpguard.lint.facts.values.lattice import Constant
from mpguard.lint.model.rule import Note
from mpguard.policy.dtype import HALF_DTYPES

if TYPE_CHECKING:
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.facts.syntax.records import Record
    from mpguard.lint.facts.values.lattice import Alternatives
    from mpguard.lint.project.launch_configs import LaunchConfig

    Configs = tuple[LaunchConfig, ...]

#: What a config asks for -> the dtype that autocast computes in; FP8 keeps BF16 around its matrices.
_COMPUTES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}
#: What an option of precision, or of who takes care of it, is called.
_OPTION = re.compile(
    r"(?i:16|half|autocast|prec|scaler|dtype|mixed|quant|cuda|device|gpu|accelerat|deepspeed)"
    r"|(?i:(?:^|_)amp(?:_|$))|amp[A-Z_]|A(?:mp|MP)"
)
#: A function or class for one precision, that something else chooses: `AMPOptimizer`, `training_step_amp`.
_CHOSEN = re.compile(r"(?i:16|half|autocast|precision)|(?i:(?:^|_)amp(?:_|$))|amp[A-Z_]|A(?:mp|MP)")
#: Where a config says it, in the order in which accelerate heeds them.
_KEYS = ("deepspeed_config.mixed_precision", "mixed_precision", "fp16", "bf16.enabled", "fp16.enabled")


def configs(facts: Facts) -> Configs:
    """The configs that a script is launched with; none where one of them says no precision, or the script infers."""
    found = facts.project.configs_for(facts.path)
    if facts.declared == "inference" or any(config.mixed_precision is None for config in found):
        return ()
    return found


def contradicts(dtype: str, configs: Configs) -> bool:
    """Whether every config computes in another dtype. Under one that says `no`, the code is taken as meant."""
    return all(config.mixed_precision in _COMPUTES and _COMPUTES[config.mixed_precision] != dtype for config in configs)


def decided(guard: PathCondition, at: Record | None) -> bool:
    """Whether something is in force for certain: under no option for precision, and not in what one chooses."""
    if any(_OPTION.search(word) for word in guard.words()):
        return False
    return at is None or not any(_CHOSEN.search(scope.name) for scope in at.scope.within())


def low(dtypes: list[str | None]) -> str | None:
    """The one low dtype that something has for certain."""
    return dtypes[0] if dtypes and len(set(dtypes)) == 1 and dtypes[0] in HALF_DTYPES else None


def literal(values: Alternatives) -> str | None:
    """The one text that a value is for certain, in lower case."""
    known = {each.atom.value if isinstance(each.atom, Constant) else None for each in values}
    value = known.pop() if len(known) == 1 else None
    return value.lower() if isinstance(value, str) else None


def wanted(configs: Configs) -> str:
    """What the configs say, for a message: `` `bf16` or `fp8` ``."""
    return "`" + "` or `".join(dict.fromkeys(str(config.mixed_precision) for config in configs)) + "`"


def places(configs: Configs) -> tuple[Note, ...]:
    """Where each config says it."""
    notes = []
    for config in configs:
        if config.said_at is not None:
            path, word = config.said_at
            notes.append(Note(f"the launch line says `{config.mixed_precision}`", word.span, path))
            continue
        entry = next((e for key in _KEYS if (e := config.entry(key)) is not None), None)
        if entry is None:
            notes.append(Note(f"{config.path} says `{config.mixed_precision}`"))
        else:
            notes.append(Note(f"the config says `{config.mixed_precision}`", entry.span, config.path))
    return tuple(notes)
