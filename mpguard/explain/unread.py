"""The keys of a run's configs, flags and variables that nothing reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mpguard.core.errors import near
from mpguard.document import Document, Entry, mp_yaml, validation
from mpguard.document.ignored_keys import of_deepspeed
from mpguard.document.newer import may_be_new
from mpguard.document.schemas import accelerate as accelerate_keys
from mpguard.document.schemas import deepspeed as deepspeed_keys
from mpguard.explain import launch
from mpguard.explain.accelerate import FP8_KEYS
from mpguard.explain.inputs import RunInputs, origin_of
from mpguard.explain.model import UnreadKey

#: The prefix of the variables of FP8 settings.
_VARIABLE = "ACCELERATE_FP8_"


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What decides which keys are read.

    engine: accelerate's `distributed_type`. launched: the mode that the launcher sets. mode: the one in force.
    backend: of FP8; None without. enforced: keys that a policy replaces. guarded: mpguard enforces a policy.
    """

    engine: str
    launched: str
    mode: str
    backend: str | None
    enforced: frozenset[str]
    guarded: bool


def _offloaded(document: Document) -> Iterator[UnreadKey]:
    for each in validation.without_effect(document):
        if (entry := document.entry(each.key)) is not None:
            yield _key(document, entry, each.reason)


def unread(run: RunInputs, facts: RunFacts, deepspeed: Document | None, direct: bool) -> Iterator[UnreadKey]:
    """Yield the keys that nothing reads. direct: the script passes the DeepSpeed config to the engine itself."""
    if run.config is not None:
        yield from _config(run, run.config, facts)
        if facts.engine == "DEEPSPEED" and run.launches:
            yield from _offloaded(run.config)
    if deepspeed is not None:
        if facts.engine == "DEEPSPEED" or direct:
            yield from _deepspeed(deepspeed, direct)
            yield from _offloaded(deepspeed)
        else:
            for entry in deepspeed.entries():
                if len(entry.path) == 1:
                    yield _key(deepspeed, entry, f"the engine of this run is {facts.engine}, and not DEEPSPEED")
    yield from _flags(run, facts)
    yield from _variables(run, facts)


def _key(document: Document, entry: Entry, why: str) -> UnreadKey:
    layer = "DeepSpeed JSON" if document.kind == "deepspeed" else "YAML"
    key = ".".join(entry.path)
    return UnreadKey(key, origin_of(document, key, layer), why)  # type: ignore[arg-type]


# -- accelerate's config ----------------------------------------------------------------------------


def _config(run: RunInputs, config: Document, facts: RunFacts) -> Iterator[UnreadKey]:
    for entry in config.entries():
        name = entry.path[0]
        if not run.launches and name != "fp8_config":
            if len(entry.path) == 1:
                yield _key(config, entry, f"{run.launcher} reads no config of accelerate")
            continue
        if len(entry.path) == 1 and entry.key == "downcast_bf16" and launch.is_on(entry.value):
            yield _key(config, entry, "it is read on a TPU only")
        if len(entry.path) != 2 or name not in accelerate_keys.SECTIONS or ".".join(entry.path) in facts.enforced:
            continue
        why = _why_unread(run, name, entry, facts)
        if why:
            yield _key(config, entry, why)


def _why_unread(run: RunInputs, name: str, entry: Entry, facts: RunFacts) -> str | None:
    section = accelerate_keys.SECTIONS[name]
    bare = section.bare(entry.key)
    if name == mp_yaml.SECTION and entry.key in mp_yaml.KEYS:
        return (
            None if facts.guarded else "mpguard's key: accelerate alone does not know it. Launch with `mpguard launch`"
        )
    if not run.launches:
        return f"{run.launcher} reads no config of accelerate"
    if name == "deepspeed_config" and entry.key in accelerate_keys.ARGUMENTS:
        return None  # S7
    if bare not in section.keys:
        meant = section.renamed.get(bare) or next(iter(near(bare, section.keys, 1)), None)
        prefix = entry.key.removesuffix(bare)  # as the file writes it: `fsdp_version`
        why = may_be_new("key", "accelerate") or "accelerate knows no such key"
        return f"{why}{f'; it is called `{prefix}{meant}`' if meant else ''}"
    if name == "fp8_config":
        return _fp8(bare, facts)
    wanted = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}.get(name)
    if wanted is not None and facts.engine != wanted:
        return f"the engine of this run is {facts.engine}, and not {wanted}"
    if name == "dynamo_config" and launch.launcher_engine(run) == "DEEPSPEED" and str(entry.value).lower() != "no":
        return "under DEEPSPEED the launcher passes no `dynamo_config` to the workers (S27)"
    return None


def _fp8(bare: str, facts: RunFacts) -> str | None:
    """Return why nothing reads a known key of `fp8_config`; None if it is read."""
    if facts.guarded and facts.backend is None:
        return "the policy has no setting for it: mpguard itself converts the layers, if the policy has FP8"
    if facts.launched != "fp8":
        return "accelerate passes FP8 settings to the workers only under `mixed_precision: fp8` (S24)"
    if facts.backend is None:
        return f"mixed_precision is {facts.mode}, and not fp8"
    if bare == "backend":
        return None
    if bare == "interval" or bare.startswith("override_"):
        return (
            "Transformer Engine 2 has no such setting, and ignores it (S4)" if facts.backend == "TE" else _other(facts)
        )
    return None if bare in FP8_KEYS.get(facts.backend, ()) else _other(facts)


def _other(facts: RunFacts) -> str:
    return f"the FP8 backend {facts.backend} has no such setting"


# -- DeepSpeed's config -----------------------------------------------------------------------------


def _deepspeed(document: Document, direct: bool) -> Iterator[UnreadKey]:
    data = document.data
    told = {each.key: f"{each.reason} (S18)" for each in of_deepspeed(document)}
    for entry in document.entries():
        name = entry.path[0]
        if len(entry.path) == 1:
            if name == "bfloat16" and ("bf16" in data or not direct):
                yield _key(document, entry, "the old name of bf16, which is read only where there is no `bf16`")
            elif name not in deepspeed_keys.KEYS:
                yield _key(document, entry, told.get(name, "DeepSpeed ignores unknown sections (S18)"))
        elif len(entry.path) == 2 and _is_ignored(name, entry.key):
            key = ".".join(entry.path)
            yield _key(document, entry, told.get(key, "DeepSpeed ignores unknown keys in this section (S18)"))


def _is_ignored(section: str, key: str) -> bool:
    """True for an unknown key of a section in which DeepSpeed does not refuse it."""
    known = deepspeed_keys.SECTIONS.get(section)
    return known is not None and section not in deepspeed_keys.STRICT and key not in known


# -- flags and variables ----------------------------------------------------------------------------


def _flags(run: RunInputs, facts: RunFacts) -> Iterator[UnreadKey]:
    for name, given in run.flags.items():
        if run.launches and name.startswith("fp8_") and (why := _fp8(name.removeprefix("fp8_"), facts)):
            yield UnreadKey(given.name, given.origin, why)


def _variables(run: RunInputs, facts: RunFacts) -> Iterator[UnreadKey]:
    known = {f"{_VARIABLE}{key.upper()}" for key in accelerate_keys.FP8.keys}
    for name, given in run.environment.items():
        if not name.startswith(_VARIABLE):
            continue
        if name not in known:
            yield UnreadKey(name, given.origin, "accelerate reads no such variable")
        elif facts.backend is None and name != f"{_VARIABLE}BACKEND":
            yield UnreadKey(name, given.origin, f"mixed_precision is {facts.mode}, and not fp8")
