"""What an accelerate config says, as accelerate 1.15 reads it: what several config rules ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.document.schemas.accelerate import SECTIONS

if TYPE_CHECKING:
    from mpguard.document import Document, Entry


def on_sagemaker(document: Document) -> bool:
    """SageMaker configs have other keys, and other ways of being read."""
    return bool(document.data.get("compute_environment") == "AMAZON_SAGEMAKER")


def names_recipe(document: Document) -> bool:
    """Whether mpguard's plugin is in force in what is started with this config (`mpguard launch`)."""
    from mpguard.document.mp_yaml import RECIPE

    return document.entry(RECIPE) is not None


def said(document: Document, section: str, key: str) -> Entry | None:
    """A key of a section, under whichever spelling stands last: `fsdp_version` and `version` are one."""
    bare = SECTIONS[section].bare
    found = None
    for entry in document.entries():
        if len(entry.path) == 2 and entry.path[0] == section and bare(entry.key) == key:
            found = entry
    return found


def mixed_precision(document: Document) -> Entry | None:
    """The key that decides the mode: `deepspeed_config.mixed_precision` beats the top level (S7)."""
    return document.entry("deepspeed_config.mixed_precision") or document.entry("mixed_precision")


def mode(document: Document) -> str | None:
    """`fp8`, `bf16` ... in lower case; None where the file does not say."""
    entry = mixed_precision(document)
    return entry.value.lower() if entry is not None and isinstance(entry.value, str) else None


def kind(document: Document) -> str | None:
    """`distributed_type`; `NO` for the boolean that an unquoted one is."""
    value = document.data.get("distributed_type")
    return "NO" if value is False else value if isinstance(value, str) else None


def backend(document: Document) -> str | None:
    """The FP8 backend that the file names, in upper case; None where it names none."""
    entry = said(document, "fp8_config", "backend")
    return entry.value.upper() if entry is not None and isinstance(entry.value, str) else None


def is_fp8(document: Document, named: str | None = None) -> bool:
    """Whether the run is FP8 (with a backend of this name): only then `fp8_config` reaches the workers (S24)."""
    return not on_sagemaker(document) and mode(document) == "fp8" and (named is None or backend(document) == named)


def is_fsdp2(document: Document) -> bool:
    version = said(document, "fsdp_config", "version")
    return kind(document) == "FSDP" and version is not None and str(version.value) == "2"


def true(value: object) -> bool:
    """Whether accelerate takes a value of a section for true: it hands it on as text."""
    return str(value).lower() in ("y", "yes", "t", "true", "on", "1")
