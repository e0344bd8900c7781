"""What the precision keys of an axolotl YAML may hold, and what rules ask of one. From axolotl 0.19.0.

Its `utils/schemas/config.py`, `utils/schemas/validation.py` and `utils/config/__init__.py`. axolotl cannot be
installed beside the other libraries of the tests; `bf16` is tried on the type that its schema has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.document import Document, Entry

VERSION = "0.19.0"
#: The text that `bf16: Literal["auto"] | bool | None` takes beside what pydantic reads as a boolean.
BF16_WORDS = frozenset({"auto", "true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0"})
#: Activation checkpointing in `fsdp_config`, under either name.
CHECKPOINTING = ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")


def is_on(document: Document, key: str) -> Entry | None:
    """A switch that is on; None where it is off or not there."""
    entry = document.entry(key)
    return entry if entry is not None and entry.value is True else None


def fsdp_version(document: Document) -> Entry | None:
    """Where the file says which FSDP: at the top level, or in `fsdp_config`."""
    keys = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    return next((entry for key in keys if (entry := document.entry(key)) is not None), None)


def is_fsdp2(document: Document) -> bool:
    entry = fsdp_version(document)
    return entry is not None and str(entry.value) == "2"
