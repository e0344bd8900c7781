"""Explain the config of a training program that starts itself: axolotl, LLaMA-Factory, Megatron Bridge, NeMo 1.x.

Such a file decides the run alone: its keys of precision, with their places, and the policy that they mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpguard.core.errors import PolicyError
from mpguard.document import Document, deepspeed_file, validation
from mpguard.document.dialects import DIALECTS
from mpguard.document.ignored_keys import ignored, of_deepspeed
from mpguard.explain.inputs import origin_of
from mpguard.explain.model import Explanation, Origin, Resolved, SettingLayer, ShadowedValue, UnreadKey
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import get
from mpguard.targets.settings import lookup


def explain_config(document: Document) -> Explanation:
    """Return the explanation of one config. Its kind must be one of `DIALECTS`."""
    kind = str(document.kind)
    dialect = DIALECTS[kind]
    stops = [problem.message(document) for problem in validation.problems(document)]
    undecided = [problem.message(document) for problem in validation.undecided(document)]
    policy: list[Resolved] = []
    try:
        policy = list(_policy(document, kind))
    except PolicyError as error:
        if not undecided:
            stops = stops or [f"{document.path}: {error}"]
    unknown = {entry.path for entry in dialect.unknown(document)}
    written = [
        Resolved(".".join(entry.path), entry.value, origin_of(document, ".".join(entry.path)))
        for entry in dialect.entries(document)
        if entry.path not in unknown and not isinstance(entry.value, dict)
    ]
    other, named = deepspeed_file.read_named(document), [document]
    if other is not None:
        stops += deepspeed_file.refusals(document, other)
        named = [document] if deepspeed_file.is_inline(document, other) else [document, other]
        written += _deepspeed(document, other)
    notes = [f"The keys are those of {dialect.title} {dialect.version}. `mpguard apply` writes a recipe into them."]
    if document.format == "python":
        notes = [f"The fields are those of {dialect.title} {dialect.version}; those that are no literals are left out."]
    notes += undecided
    if dialect.overrides and not policy and not stops:
        notes.append("The file sets no precision: the config in Python that it overrides decides.")
    if other is None and (name := deepspeed_file.named_file(document)) is not None:
        notes.append(f"`{name}`, DeepSpeed's config, is not here: its precision must be that of this file.")
    return Explanation(
        title=f"{_names(*named)} · {dialect.title} · without mpguard",
        settings=(*written, *policy),
        unread=(*_unread(document, kind), *(_ignored(other) if other is not None else ())),
        stops=tuple(stops),
        notes=tuple(notes),
    )


def _names(*documents: Document) -> str:
    return ", ".join(Path(each.path).as_posix() for each in documents)


def _deepspeed(document: Document, other: Document) -> Iterator[Resolved]:
    """Yield the precision of the DeepSpeed file that a config names, with what the Trainer fills in."""
    layer: SettingLayer = "YAML" if deepspeed_file.is_inline(document, other) else "DeepSpeed JSON"
    for key, value, filled in deepspeed_file.in_force(document, other):
        origin = origin_of(other, key, layer)
        if not filled:
            yield Resolved(key, value, origin)
            continue
        shadowed = ShadowedValue("auto", origin, "the Trainer fills in its own value")
        yield Resolved(key, value, origin_of(document, key.partition(".")[0]), (shadowed,))
    reduce = lookup(other.data, "communication_data_type")
    if isinstance(reduce, str):
        yield Resolved("communication_data_type", reduce, origin_of(other, "communication_data_type", layer))


def _policy(document: Document, kind: str) -> Iterator[Resolved]:
    """Yield the fields of the policy that the keys mean together. Raises `PolicyError` if they mean none."""
    origin = Origin("code" if document.format == "python" else "YAML", document.path)
    read = get(kind).read(document.data)
    if DIALECTS[kind].overrides and not {"bf16", "fp16"} & read.keys():
        return
    found = Policy.of({**read, "name": kind})
    yield Resolved("compute_dtype", found.compute_dtype.short, origin)
    for name, value in found.settings().items():
        yield Resolved(f"policy.{name}", value, origin)


def _unread(document: Document, kind: str) -> Iterator[UnreadKey]:
    dialect = DIALECTS[kind]
    for entry in dialect.unknown(document):
        key = ".".join(entry.path)
        why = f"keys that mpguard does not know: {dialect.title} {dialect.version} has no such key"
        yield UnreadKey(key, origin_of(document, key), why)
    yield from _ignored(document)


def _ignored(document: Document) -> Iterator[UnreadKey]:
    keys = of_deepspeed(document) if document.kind not in DIALECTS else ignored(document)
    for each in (*keys, *validation.without_effect(document)):
        yield UnreadKey(each.key, origin_of(document, each.key), each.reason)
