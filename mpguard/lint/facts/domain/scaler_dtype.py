"""The dtype of the losses that a GradScaler scales, by their autocast regions."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program.lattice import Object
from mpguard.lint.facts.syntax.path_condition import Flag, PathCondition, compatible
from mpguard.lint.source.strip_comments import stripped
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.events.event import Event
    from mpguard.lint.facts.behaviour.regions import Region
    from mpguard.lint.facts.domain.view import DomainView

_BF16 = lazy_pattern(r"(?i)bf16|bfloat16")
#: Code that may run the methods of a class under autocast, or scale with its scaler.
_SCALES = lazy_pattern(rb"(?i)autocast|\.\w*scaler\b")
#: Words of code that computes in FP16 or FP8, or that runs in a framework which may. What does not count: imports, and
#: autocasts that are off or in BF16.
_LOWERS = lazy_pattern(
    r"(?i)autocast|half\b|HalfTensor|fp8|float8|(?<!b)(?:fp|float)16|MixedPrecision(?:Policy)?\(|custom_fwd|deepspeed"
    r"|\bapex\b|accelerat|lightning|fabric|megatron|colossal|HfArgumentParser"
)
_IMPORTS = lazy_pattern(r"^[ \t]*(?:from[ \t]+(?:torch|contextlib)\S*[ \t]+)?import[ \t][^\n]*", re.M)
_NEEDS_NO_SCALE = lazy_pattern(r"autocast\([^()]*(?:\benabled=False|\btorch\.bfloat16)\b[^()]*\)")
#: The files of a program that are searched; of a larger one it is unknown.
_MAX_FILES = 40


def bfloat16_region(scaler: Event, enabled: PathCondition, facts: DomainView) -> Region | None:
    """Return a BF16 region of a loss that the scaler scales if all regions of all its losses are definitely BF16."""
    return _common_region(scaler, enabled, facts, (Dtype.BF16,))


def scales_without_need(scaler: Event, enabled: PathCondition, facts: DomainView) -> bool:
    """True if all regions of all losses that the scaler scales definitely have a dtype with the exponents of FP32.

    Or if the scaler is enabled for BF16 only.
    """
    if any(isinstance(each, Flag) and _BF16.search(str(each.equals or each.name)) for each in enabled):
        return True
    return _common_region(scaler, enabled, facts, (Dtype.BF16, Dtype.FP32)) is not None


def computes_without_float16(facts: DomainView) -> bool:
    """True if no file of a program computes in FP16 or FP8, so that nothing is lost with the scale.

    Those are the file, its users, and what they import. False if they are not all known: nothing runs the file.
    """
    users = facts.project.users_of("", facts.path)
    if users is None or not (users or "__main__" in facts.file_text):
        return False
    files = dict.fromkeys([facts, *users])
    for each in (pending := list(files)):
        each.need_all()
        further = [other for other in each.imported_modules() if other not in files]
        files.update(dict.fromkeys(further))
        pending += further
        code = _NEEDS_NO_SCALE.sub("", _IMPORTS.sub("", stripped(each.file_text)))
        if len(files) > _MAX_FILES or _LOWERS.search(code):
            return False
    return True


def _common_region(
    scaler: Event, enabled: PathCondition, facts: DomainView, dtypes: Collection[Dtype]
) -> Region | None:
    """Return a region of a loss that the scaler scales if all regions of all its losses definitely have the dtypes."""
    found: Region | None = None
    if _several_files_create(scaler, facts):
        return None
    for scale in facts.events_around("scale", scaler.scope):
        made = [each.atom for each in facts.evaluate(scale.subject, scale.call)]
        if not any(isinstance(atom, Object) and atom.call is scaler.call for atom in made):
            continue
        loss = scale.call.argument(0, "outputs")
        guard = scaler.guard.joined(scale.guard, enabled)
        records = [scale.call, *facts.flow.backward(loss, scale.call)] if loss is not None else []
        program = facts.programs_of(scale.scope)
        for record in records:
            if facts.is_inference(record):
                continue
            if any(region.kind == "accelerator_autocast" for region in facts.regions(record)):
                return None
            for region, inside in facts.autocasts(record):
                if region.call is not None and region.call.scope not in program:
                    continue  # another script runs the same model or criterion
                for dtype_guard, dtype in region.dtypes:
                    if not compatible(guard, inside, dtype_guard):
                        continue
                    if dtype not in dtypes:
                        return None
                    found = region
    return found


def _several_files_create(scaler: Event, facts: DomainView) -> bool:
    """True if a scaler belongs to a class that several files use: one of them may scale FP16 losses with it.

    A file that mentions neither autocast nor a scaler uses it for something else.
    """
    owner = scaler.scope.owner
    if owner is None or owner.parent is None or owner.parent.kind != "module":
        return False
    users = facts.of(owner).users(owner.name)
    return users is None or sum(bool(_SCALES.search(each.source.data)) for each in users) > 1
