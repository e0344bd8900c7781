"""Write a proposal into an mp.yaml as `fp8_modules`, with its figures as a comment; everything else is kept."""

from __future__ import annotations

import datetime
from pathlib import Path

from mpguard.numerics.proposal import Proposal
from mpguard.tune.candidates import TuneCandidate
from mpguard.tune.write import write as write_policy

#: What the comment begins with; a comment of an earlier proposal is replaced.
COMMENT = "# mpguard sensitivity: "


def write(path: Path, candidate: TuneCandidate, proposal: Proposal) -> None:
    """Write a proposal into a config file. Raises `ConfigError`."""
    worst = "" if proposal.worst is None else f", worst layer in FP8 {proposal.worst:.1f} dB"
    figures = f"{datetime.date.today()}, bound {proposal.bound:g} dB: {proposal.share:.1%} of the FP8 matmuls{worst}"
    write_policy(path, candidate, figures, COMMENT)
