from __future__ import annotations

from collections.abc import Container, Iterator

from mpguard.lint import (
    Bad,
    ConfigRule,
    Diagnostic,
    Document,
    Entry,
    Fix,
    accelerate_config,
    any_of,
    config_edits,
    errors,
    lazy_pattern,
    may_be_new,
    misspelling_of,
    schemas,
)

#: Values that are in force without the key.
_DEFAULTS = {
    "backward_prefetch": ("NO_PREFETCH", None),
    "amax_history_len": (1024,),
    "amax_compute_algo": ("most_recent",),
}
#: Names of keys about precision or offloading.
_PRECISION = lazy_pattern(r"precision|dtype|float|amp(?:_|$)|(?:fp|bf|int)\d|half|offload")


class UnknownFp8Key(ConfigRule):
    """A key of `fp8_config`, `fsdp_config`, `deepspeed_config` or `dynamo_config` that nothing reads.

    ## Why is this bad
    accelerate checks only top-level keys. An unknown key of a section is copied to an argument that nothing reads: the
    launch succeeds and the setting has no effect. accelerate's own wizard writes three such keys: with
    `amax_history_length: 16` Transformer Engine gets a history of 1024 (accelerate 1.15.0, commands/config/cluster.py
    against utils/dataclasses.py; transformers#34027, accelerate#3710).

    Under `DEEPSPEED` nothing reads `dynamo_config`: the launcher sets no variable for it, and nothing is compiled.

    `mpguard_recipe`, `mpguard_overrides`, `mpguard_fp8_modules`, `mpguard_allow` and `mpguard_watch` in `fp8_config`
    are read by mpguard. Other names with that prefix, and overrides that are not fields of a policy, are not read
    either. An unknown name in `mpguard_allow`, an unknown recipe in `mpguard_fp8_modules`, or an unknown level in
    `mpguard_watch`, ends the launch.

    ## Fix safety
    Safe: the key is renamed to the one that is read, if it is clear which one is intended and it is not already
    present. The value is kept, and takes effect from then on.

    ## Known limits
    In `fsdp_config` and `deepspeed_config` a key is reported if its name is about precision or offloading, or if it is
    clear which one is meant. A value that is in force without the key is not reported (`NO_PREFETCH` for
    `fsdp_backward_prefetch_policy`, 1024 for `amax_history_length`), and neither is one that the key which is read sets
    too.
    The keys are those of accelerate 1.15.0. A key that a newer accelerate reads is reported until mpguard supports it.
    Not reported, except mpguard's own keys, if the project requires an accelerate older than 1.0: it reads other names.
    SageMaker configs, which accelerate reads in another way, are not checked.
    """

    code, name = "MPG801", "unknown-fp8-key"
    severity = "error"
    message = "`{section}.{key}`: nothing reads this key{hint}"
    help = f"accelerate ({schemas.accelerate.VERSION}) accepts any key in this section and ignores unknown ones"
    kinds = ("accelerate",)
    versions = {"accelerate": ">=1.0"}
    triggers = (any_of(*(section.encode() for section in schemas.accelerate.SECTIONS)),)
    yields_to = ("MPG815",)
    examples = (
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp8
num_processes: 8
fp8_config:
  backend: TE
  amax_history_length: 16  # !
  amax_compute_algorithm: max  # !
""",
            name="mp.yaml",
            fixed="""\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp8
num_processes: 8
fp8_config:
  backend: TE
  amax_history_len: 16
  amax_compute_algo: max
""",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if accelerate_config.is_sagemaker(document):
            return
        from mpguard.lint import FIELD_NAMES, mp_yaml

        unread = _unread_dynamo(document)
        launches = self.project.launched_with(document.path) if unread is not None else ()
        if unread is not None and not any(_CHOOSES & set(launch.options) for _, launch in launches):
            yield self.at(
                unread,
                message="`dynamo_config`: nothing reads it under `DEEPSPEED`, and nothing is compiled",
                help="compile the model in the code, and remove the section",
            )
        entries = list(document.entries())
        yield from self._own(document)
        present: dict[str, dict[str, object]] = {}
        for entry in entries:
            if len(entry.path) == 2 and entry.path[0] in schemas.accelerate.SECTIONS:
                bare = schemas.accelerate.SECTIONS[entry.path[0]].bare(entry.key)
                present.setdefault(entry.path[0], {})[bare] = entry.value
        for entry in entries:
            if len(entry.path) == 2 and entry.path[0] in schemas.accelerate.SECTIONS:
                yield from self._key(
                    document, entry, schemas.accelerate.SECTIONS[entry.path[0]], present[entry.path[0]]
                )
            elif (
                len(entry.path) == 3 and ".".join(entry.path[:2]) == mp_yaml.OVERRIDES and entry.key not in FIELD_NAMES
            ):
                hint = errors.did_you_mean(entry.key, FIELD_NAMES)
                hint = f", a policy has no such field{hint}"
                help = "name a field of the policy; docs/recipes.md lists them"
                yield self.at(entry, section=mp_yaml.OVERRIDES, key=entry.key, hint=hint, help=help, versions={})

    def _own(self, document: Document) -> Iterator[Diagnostic]:
        """Report wrong values of mpguard's own keys. MPG865 reports the name of a recipe, `check` unknown names."""
        from mpguard.lint import FIELD_NAMES, mp_yaml, validation

        for problem in validation.own_problems(document):
            entry = document.entry(problem.key)
            if entry is None or (problem.key == mp_yaml.RECIPE and isinstance(entry.value, str) and entry.value):
                continue
            unknown = len(entry.path) == 2 and entry.key not in mp_yaml.KEYS
            if not unknown and (len(entry.path) != 3 or entry.key in FIELD_NAMES):
                yield self.at(entry, message=f"`{problem.key}`: {problem.reason}", help="", versions={})

    def _key(
        self, document: Document, entry: Entry, section: schemas.accelerate.Section, present: dict[str, object]
    ) -> Iterator[Diagnostic]:
        """Report a key that is not read. `present` has the keys of its section, without prefix, and their values."""
        name, bare = entry.path[0], section.bare(entry.key)
        if bare in section.keys or (not section.prefix and entry.key in schemas.accelerate.ARGUMENTS):
            return
        if name == "fp8_config" and entry.key.startswith("mpguard_"):
            own = _own_keys()
            if entry.key not in own:
                help = f"mpguard reads {' and '.join(f'`{each}`' for each in sorted(own))} here"
                hint = errors.did_you_mean(entry.key, own)
                yield self.at(entry, section=name, key=entry.key, hint=hint, help=help, versions={})
            return
        meant = section.renamed.get(bare) or misspelling_of(bare, section.keys)
        if meant is not None and meant in present and present[meant] == entry.value:  # what it asks for is in force
            return
        if entry.value in _DEFAULTS.get(meant or "", ()) or (meant is None and not _is_about_precision(entry)):
            return
        prefix = entry.key.removesuffix(bare)  # as the file writes it: `fsdp_backward_prefetch`
        if meant is None:
            hint = ""  # any name would be a guess
        elif meant in present:
            hint = f"; `{prefix}{meant}`, which is read, is present too. Remove one"
        else:
            hint = f"; the key that is read is `{prefix}{meant}`"
        fix, why = _rename(document, entry, meant, present), may_be_new("key", "accelerate")
        if why is not None:
            yield self.at(entry, message=f"`{name}.{entry.key}`: {why}", fix=fix, severity="warning")
        else:
            yield self.at(entry, section=name, key=entry.key, hint=hint, fix=fix)


#: Options of `accelerate launch` that choose another kind of launch than the config.
_CHOOSES = {"multi_gpu", "use_fsdp", "cpu", "use_megatron_lm"}


def _is_about_precision(entry: Entry) -> bool:
    """True in a section about precision or compilation, and for a key whose name is about precision or offloading."""
    return entry.path[0] in ("fp8_config", "dynamo_config") or _PRECISION.search(entry.key.lower()) is not None


def _unread_dynamo(document: Document) -> Entry | None:
    """Return `dynamo_config` if it has a backend and accelerate passes it to no worker."""
    if accelerate_config.distributed_type(document) != "DEEPSPEED" or accelerate_config.names_recipe(document):
        return None
    backend = accelerate_config.setting(document, "dynamo_config", "backend")
    compiles = backend is not None and isinstance(backend.value, str) and backend.value.lower() != "no"
    return document.entry("dynamo_config") if compiles else None


def _own_keys() -> set[str]:
    """Return the keys of `fp8_config` that mpguard itself reads."""
    from mpguard.lint import mp_yaml

    return set(mp_yaml.KEYS)


def _rename(document: Document, entry: Entry, meant: str | None, present: Container[str]) -> Fix | None:
    if meant is None or meant in present:
        return None
    prefix = entry.key.removesuffix(schemas.accelerate.SECTIONS[entry.path[0]].bare(entry.key))
    return config_edits.rename_key(f"Rename it to `{prefix}{meant}`", document, entry, f"{prefix}{meant}")
