from __future__ import annotations

from collections.abc import Iterator

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
    may_be_new,
    misspelling_of,
    schemas,
)


class UnknownKey(ConfigRule):
    """A top-level key of an accelerate config that accelerate does not have.

    ## Why is this bad
    accelerate 1.15.0 refuses the whole file: `ValueError: The config file ... had unknown keys`. Nothing is launched,
    and the error does not suggest the intended key.

    ## Fix safety
    Safe: the key is renamed to the known key, if a typo of only one key is possible and that key is not already
    present.

    ## Known limits
    The keys are those of accelerate 1.15.0; a key that a newer version reads is reported until mpguard supports it.
    If the project requires an accelerate older than 1.0, only typos of known keys are reported.
    Only files with a `distributed_type`, which accelerate requires, count as its configs; without a
    `compute_environment`, half of their other keys must be accelerate's: training scripts have that key too. A section
    `..._config` whose name is not similar to a known one is not reported: forks of accelerate have such sections
    (KTransformers' `kt_config`).
    """

    code, name = "MPG813", "unknown-key"
    severity = "error"
    message = "`{key}`: accelerate has no such key and refuses the file{hint}"
    help = f"the keys are those of accelerate {schemas.accelerate.VERSION}; other settings belong in another file"
    kinds = ("accelerate",)
    versions = {"accelerate": ">=1.0"}
    triggers = (any_of(b"distributed_type"),)
    examples = (
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precission: bf16  # !
num_processes: 8
""",
            name="mp.yaml",
            fixed="""\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_processes: 8
""",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if "distributed_type" not in document.data:
            return
        sagemaker = accelerate_config.is_sagemaker(document)
        for entry in document.entries():
            hint = schemas.accelerate.unknown_key(entry.key, sagemaker) if len(entry.path) == 1 else None
            if hint is None:
                continue
            meant = misspelling_of(
                entry.key.lower().replace("-", "_"),
                schemas.accelerate.SAGEMAKER if sagemaker else schemas.accelerate.TOP,
                cutoff=0.85,
            )
            if meant is None and entry.key.endswith("_config") and isinstance(entry.value, dict):
                continue
            fix = _rename(document, entry, meant)
            # no version has had a misspelt key
            versions: dict[str, str] | None = {} if fix and _is_typo(entry.key, str(meant)) else None
            if (why := may_be_new("key", "accelerate")) is not None:
                yield self.at(entry, fix=fix, message=f"`{entry.key}`: {why}", severity="warning")
                continue
            yield self.at(entry, fix=fix, versions=versions, key=entry.key, hint=hint)


def _is_typo(key: str, meant: str) -> bool:
    """True if the words of a key are those of another one, apart from their spelling."""
    return (
        len(key.split("_")) == len(meant.split("_"))
        and sum(one != other for one, other in zip(key.split("_"), meant.split("_"), strict=True)) == 1
    )


def _rename(document: Document, entry: Entry, meant: str | None) -> Fix | None:
    if meant is None or meant in document.data:
        return None
    return config_edits.rename_key(f"Rename it to `{meant}`", document, entry, meant)
