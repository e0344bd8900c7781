"""The regions of `torch.autocast` that were entered in a step: for the advice of a refusal."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, order=True)
class EnteredRegion:
    """A kind of region. Plain data; the names of the fields are keys of the proof file."""

    #: The type of device on which it casts.
    device: str
    #: The dtype to which it casts.
    dtype: str
    #: False if it casts nothing: `enabled=False`, or a device type that this machine does not have.
    enabled: bool
    #: True if it was entered while a module was called: a part of a model.
    in_module: bool = False


@dataclasses.dataclass
class Autocast:
    """The autocast regions of a step."""

    #: Each kind of region that was entered.
    regions: list[EnteredRegion] = dataclasses.field(default_factory=list)
    #: True if modules were called in a thread that has entered no region, while another one had.
    in_other_threads: bool = False
