"""`Weight`: a parameter of a model, as a shape."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Kind = Literal["linear", "embedding", "expert", "vector"]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter. block: the index of the repeated block that it belongs to; None outside of blocks."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    block: int | None = None

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)
