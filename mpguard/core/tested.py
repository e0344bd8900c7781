"""The versions of each library that mpguard was tested with. They stand here and nowhere else.

`make test-newest` moves the newest, `make test-oldest` runs the oldest.
"""

from __future__ import annotations

import dataclasses

from packaging.version import InvalidVersion, Version


@dataclasses.dataclass(frozen=True)
class Window:
    """oldest, newest: versions, such as `2.11`; a later patch release of the newest is inside."""

    oldest: str
    newest: str

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return self.oldest
        if self.oldest.startswith(f"{self.newest}."):
            return f"{self.newest}, from {self.oldest} on"
        return f"{self.oldest} to {self.newest}"

    def place(self, version: str) -> str:
        """Return `older`, `inside` or `newer`; `inside` for a version that cannot be compared, such as `unknown`."""
        try:
            release = Version(version).release
        except InvalidVersion:
            return "inside"
        if release < Version(self.oldest).release:
            return "older"
        newest = Version(self.newest).release
        return "newer" if release[: len(newest)] > newest else "inside"


#: By the name of the module. oldest: what the extras of pyproject.toml promise.
TESTED = {
    "torch": Window("2.11", "2.14"),
    "accelerate": Window("1.15", "1.15"),
    "deepspeed": Window("0.19.8", "0.19"),  # 0.19.0 rounds gradients to BF16 after a reduction in FP32
    "transformers": Window("5.0", "5.24"),
    "torchao": Window("0.18", "0.18"),
    "transformer_engine": Window("2.20", "2.20"),
}

#: The name of a library in messages, where it is not that of its module; and that of its distribution.
SHOWN = {"transformer_engine": "Transformer Engine"}
DISTRIBUTIONS = {"transformer_engine": "transformer-engine"}
