"""`Inspection`: one step of one optimizer is observed, compared with the plan, and agreed on by all ranks."""

from __future__ import annotations

from mpguard.runtime import plan_exchange
from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Progress
from mpguard.runtime.proof import checks, consensus
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.reductions import Fingerprint
from mpguard.runtime.proof.report import Proof
from mpguard.runtime.proof.verdict import Failure, FailureKind, Row, names_of


class Inspection:
    """What was observed at one step of one optimizer, as rows and failures, and what all ranks agree on about it.

    observe -> `Inspection` compares -> `publish` -> `agree` -> `conclude`. The ranks may agree at a later step.
    """

    def __init__(self, plan: Plan, seen: Observed | None, progress: Progress | None = None) -> None:
        """Compare what was observed with the plan. seen: None if mpguard's own code failed: then nothing is wrong."""
        self.plan = plan
        #: What was observed; None if mpguard's own code failed.
        self.seen = seen
        #: The steps of the optimizer; None where it is not followed (`prove`).
        self.progress = progress
        #: The number of the inspected step among those that were applied.
        self.applied = progress.applied if progress is not None else 0
        #: One row per fact.
        self.rows: tuple[Row, ...] = checks.compare(seen, plan) if seen is not None else ()
        #: The failures of this rank.
        self.failures: list[Failure] = checks.failures(self.rows, plan, seen) if seen is not None else []
        self._round: consensus.Round | None = None

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What ranks compare; None if weights are averaged in place of gradients, or nothing was observed."""
        return self.seen.fingerprint if self.seen is not None and not self.seen.averaging else None

    @property
    def loss_not_finite(self) -> bool:
        """True if a loss of the step was NaN or infinite."""
        return self.seen is not None and self.seen.loss_not_finite

    def publish(self, name: str, moment: int = 0) -> None:
        """Publish the failures of this rank. name, moment: see `consensus.Round`."""
        report = consensus.Report(self.failures, self.fingerprint, moment=moment, not_finite=self.loss_not_finite)
        self._round = consensus.Round(name, report)

    @property
    def ranks_not_finite(self) -> list[int]:
        """The other ranks whose loss was NaN or infinite, as far as rank 0 knows."""
        return self._round.not_finite if self._round is not None else []

    def agree(self, wait: float) -> list[Failure] | None:
        """Return the failures of all ranks; None if one has not published its own within `wait` seconds."""
        assert self._round is not None
        return self._round.result(wait)

    def missing(self) -> str:
        """Return the names of the ranks that have published nothing, or of which no result came."""
        assert self._round is not None
        found = self._round.missing()
        return names_of(found) if found else "the other ranks"

    @property
    def has_store(self) -> bool:
        """True if the ranks agree over the process group's store, where waiting has a time limit."""
        return self._round is not None and self._round.store is not None

    @property
    def late(self) -> bool:
        """True if the ranks agree at a later step, which may be another one on each."""
        return self.progress is not None and self.progress.applied > self.applied

    def without(self, why: str, advice: str = "") -> list[Failure]:
        """Return the failures of this rank where others are missing. why: what these did not do."""
        return [*self.failures, Failure(FailureKind.UNPROVEN, why, advice=advice)]

    def conclude(self, everywhere: list[Failure]) -> Proof:
        """Return the proof. everywhere: the failures of all ranks."""
        rows, failures = checks.unsynchronized(self.rows, everywhere, self.plan)
        rows = (*rows, *plan_exchange.rows(self.plan))
        return Proof(checks.verdict_on(rows, self.plan, failures), self.plan, rows, tuple(failures), self.seen)
