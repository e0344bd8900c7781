"""What happens when the watch's own code fails."""

from __future__ import annotations

from mpguard.runtime.containment import Containment

#: A failure ends the watch. It does not concern the proof.
CONTAINMENT = Containment(
    "mpguard watch", "the run continues and is no longer watched", mark="__mpguard_watch__", every_rank=True
)
