"""The end of a run: what is still open is concluded, and the whole run is reported."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from mpguard.runtime import lost_ranks
from mpguard.runtime.containment import has_failed
from mpguard.runtime.guard import Guard
from mpguard.runtime.inspection import Inspection
from mpguard.runtime.proof import checks, consensus
from mpguard.runtime.proof.report import Proof
from mpguard.runtime.proof.verdict import (
    NOT_PROVEN,
    Failure,
    FailureKind,
    Refusal,
    verdict_of,
)
from mpguard.runtime.ranks import is_idle
from mpguard.runtime.reporter import unproven_at_exit

if TYPE_CHECKING:
    pass


def finalize(guard: Guard, status: int) -> None:
    """Conclude the run: report all of it, or that it ends without a proof. status: the script's.

    Raises `NotInForce`.
    """
    for progress in guard.run:
        with contextlib.suppress(Exception):
            if progress.unread:
                guard.count_unread(progress, but_last=False)
    if not status:
        guard.script.prove_at_the_end()
    if is_idle() and guard.recorder.backwards:
        guard.reporter.report_idle_gradients()
    if guard.plan.enforce == "warn":
        _add_warnings_of_others(guard)
    if guard.proof is not None and (failures := lost_ranks.refusal()):
        guard.proof = dataclasses.replace(guard.proof, verdict=verdict_of(failures), failures=failures)
        guard.reporter.update_proof(guard.proof, guard.run)
        return
    if guard.proof is not None:
        _finalize_unrecorded(guard, status)
        _finalize_alone(guard, status)
        guard.reporter.report_run(guard.proof, guard.run)
        return
    if guard.previous_proof is not None and not guard.trained and not guard.open_inspections:
        guard.proof = guard.previous_proof  # the checkpoint was loaded, but no training followed
        guard.reporter.report_run(guard.proof, guard.run)
        return
    if guard.open_inspections and not status:
        _finalize_open(guard, guard.open_inspections[0])
        return
    trained, enforced = guard.trained, guard.plan.enforce != "off"
    failure = unproven_at_exit(
        enforced=enforced,
        trained=trained,
        # A scaler calls a fused optimizer at the steps that it skips, too.
        without_gradients=bool(guard.step_calls) and not guard.skipped and not guard.recorder.updated,
        without_optimizer=bool(guard.script.passes) and guard.without_optimizer,
        skipped=guard.skipped,
        status=status,
        first_scale=guard.first_scale,
        hysteresis=guard.plan.policy.hysteresis or 1,
        why_none=guard.without_gradients,
    )
    guard.proof = guard.reporter.of_run(Proof(NOT_PROVEN, guard.plan, failures=(failure,)))
    if trained or not guard.spawned:
        guard.reporter.write_proof(guard.proof, guard.run, replace=trained)
    consensus.publish_end([failure])
    if trained and not status and not has_failed():
        guard.alone = True
        guard.fail(Refusal((failure,)))
    elif enforced and not status and not guard.spawned:
        guard.reporter.report_no_training()


def _add_warnings_of_others(guard: Guard) -> None:
    """Add to the proof of rank 0 the failures that only other ranks have, and with which these have gone on."""
    failures = consensus.warnings_of_others()
    if not failures:
        return
    refusal, first = Refusal(tuple(failures)), guard.reporter.warned is None
    guard.reporter.note_warned(refusal)
    if guard.proof is not None and guard.proof.in_force:
        guard.proof = dataclasses.replace(guard.proof, verdict=refusal.verdict, failures=tuple(failures))
    if first:
        guard.reporter.report_warned(refusal, alone=False)


def _finalize_open(guard: Guard, pending: Inspection) -> None:
    """Conclude a proof for which other ranks were waited for until the end."""
    repeated = guard.previous_proof is not None
    everywhere = pending.agree(consensus.REPEATED_WAIT if repeated else consensus.FINAL_WAIT)
    if everywhere is None and repeated and not pending.failures:
        guard.proof = guard.previous_proof  # the checkpoint was loaded on this rank only
    elif pending.progress is not None:
        guard.conclude(pending, everywhere, pending.progress)
    if guard.proof is not None:
        guard.reporter.report_run(guard.proof, guard.run)


def _finalize_alone(guard: Guard, status: int) -> None:
    """Conclude the proofs of optimizers that other ranks have never stepped, next to what all train together."""
    if status or guard.refusal is not None or not (guard.proof and guard.proof.in_force):
        return
    deadline = time.monotonic() + consensus.REPEATED_WAIT  # for all of them: other ranks end at the same time
    for pending in list(guard.open_inspections):
        everywhere = pending.agree(max(0.0, deadline - time.monotonic()))
        if everywhere is None:
            assert pending.seen is not None
            pending.seen.world_size = 1  # it is proven for this rank only
            pending.rows = checks.trained_alone(pending.rows, pending.missing())
            everywhere = checks.failures(pending.rows, guard.plan, pending.seen)
        assert pending.progress is not None
        pending.progress.prove(agrees=False)
        guard.conclude(pending, everywhere, pending.progress)


def _finalize_unrecorded(guard: Guard, status: int) -> None:
    """Fail if an optimizer has stepped, but never while its step was recorded."""
    if status or guard.refusal is not None or not (guard.proof and guard.proof.in_force):
        return
    for progress, pending in guard.unrecorded.items():
        if progress.unrecorded:
            progress.prove(agrees=False)
            guard.conclude(pending, pending.agree(consensus.FINAL_WAIT), progress)
    unseen = [progress for progress in guard.run if progress.unrecorded]
    if not unseen:
        return
    text = (
        f"{', '.join(sorted({each.name for each in unseen}))} stepped only once, or rarely, after the others were "
        "proven, so nothing of its step was recorded"
    )
    failure = Failure(FailureKind.UNPROVEN, text, advice="Create it right before it is used")
    guard.proof = dataclasses.replace(guard.proof, verdict=NOT_PROVEN, failures=(failure,))
    guard.reporter.update_proof(guard.proof, guard.run)
    guard.fail(Refusal((failure,)))
