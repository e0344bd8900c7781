"""The values of the precision keys of an axolotl YAML, and queries that rules need. From axolotl 0.19.0.

Source: its `utils/schemas/config.py`, `utils/schemas/validation.py` and `utils/config/__init__.py`. axolotl cannot be
installed together with the other libraries of the tests; `bf16` is tested on the type that its schema declares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.document import Document, Entry

VERSION = "0.19.0"
#: The text that `bf16: Literal["auto"] | bool | None` accepts: `auto`, and what pydantic converts to a boolean.
BF16_WORDS = frozenset({"auto", "true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0"})
#: Activation checkpointing in `fsdp_config`, under either name.
CHECKPOINTING = ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")


def is_on(document: Document, key: str) -> Entry | None:
    """Return the entry of a switch that is on; None if it is off or absent."""
    entry = document.entry(key)
    return entry if entry is not None and entry.value is True else None


def fsdp_version(document: Document) -> Entry | None:
    """Return the entry of the FSDP version, at the top level or in `fsdp_config`; None if absent."""
    keys = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    return next((entry for key in keys if (entry := document.entry(key)) is not None), None)


def is_fsdp2(document: Document) -> bool:
    """True if the file selects version 2 of FSDP."""
    entry = fsdp_version(document)
    return entry is not None and str(entry.value) == "2"
