"""What a run reports: the proof as a table and as a file, overrides, failures that do not end it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mpguard.core.console import columns, print_line
from mpguard.core.errors import ConfigError
from mpguard.runtime.containment import report_own_failure
from mpguard.runtime.last_lines import print_last
from mpguard.runtime.messages import warn_not_proven
from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Progress, summary
from mpguard.runtime.proof.remarks import Remark
from mpguard.runtime.proof.report import IN_RUN_NOT_IN_FORCE, LOSS_NOT_FINITE, Proof
from mpguard.runtime.proof.verdict import NOT_IN_FORCE, NOT_PROVEN, Failure, FailureKind, Refusal, names_of
from mpguard.runtime.ranks import rank
from mpguard.targets.inject import Change

log = logging.getLogger("mpguard")

#: How many optimizers have a table, and how many an entry in the proof file; a script may have one per parameter.
REPORTED_OPTIMIZERS, WRITTEN_OPTIMIZERS = 3, 100


@contextlib.contextmanager
def below_progress_bars() -> Iterator[None]:
    """Begin output on a line of its own: bars of tqdm that are drawn on the terminal are removed, and drawn again."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None or not getattr(bars, "_instances", None):
        yield
        return
    with bars.external_write_mode(file=sys.stderr):
        yield


class Reporter:
    """Prints what happens to a run, and writes its proof. Prints and writes on rank 0 only."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._remarked: set[str] = set()
        #: False after a refusal that is not withdrawn: the proof of a later training does not replace its file.
        self.writes_file = True
        #: The failures that did not end the run, with `enforce` warn or off: the first, or the first that is wrong.
        self.warned: Refusal | None = None
        self._first: Proof | None = None
        self._proofs: list[Proof] = []

    def print_once(self, text: str) -> None:
        """Print a line, once."""
        if text not in self._reported and rank() == 0:
            self._reported.add(text)
            print_line(text)

    def report_remarks(self, remarks: Iterable[Remark]) -> None:
        """Print remarks: of each key the first."""
        for remark in remarks if rank() == 0 else ():
            if remark.key not in self._remarked:
                self._remarked.add(remark.key)
                with below_progress_bars():
                    print_line(str(remark))

    def log_override(self, where: str, change: Change) -> None:
        """Log an override once, with its key, old value and new value: a warning on rank 0, else a debug message."""
        text = f"{where}: {change}"
        if text in self._reported:
            return
        self._reported.add(text)
        log.log(logging.WARNING if rank() == 0 else logging.DEBUG, "%s", text)

    # -- the proof ---------------------------------------------------------------------------

    @property
    def found_wrong(self) -> bool:
        """True if something was found wrong and the run continued: it stays not in force, whatever follows."""
        return self.warned is not None and self.warned.verdict == NOT_IN_FORCE

    def of_run(self, proof: Proof) -> Proof:
        """Return a proof as that of the run: not in force, with the earlier failures, if something was found wrong."""
        if not self.found_wrong or proof.verdict == NOT_IN_FORCE:
            return proof
        assert self.warned is not None
        return dataclasses.replace(proof, verdict=NOT_IN_FORCE, failures=tuple(self.warned.published()))

    def report_proof(
        self, proof: Proof, *, first: bool, repeated: bool, optimizers: int, run: Sequence[Progress] = ()
    ) -> None:
        """Print a proof and write its file, which has an entry for each optimizer.

        first: True if there is no earlier proof of this run, or since a checkpoint was loaded. repeated: True if a
        checkpoint was loaded after an earlier proof. optimizers: how many have been proven, with this one. run: the
        steps of each optimizer.
        """
        if rank() != 0:
            return
        if first and proof.in_force:
            self._proofs.clear()
        self._proofs.append(proof)
        if proof.in_force and proof.observed and not first:
            if optimizers <= REPORTED_OPTIMIZERS:
                with below_progress_bars():
                    print_line(proof.table(first=False, found_wrong=self.found_wrong, width=columns(sys.stderr)))
            if self._first is not None and len(self._proofs) <= WRITTEN_OPTIMIZERS:
                self.write_proof(self._first, run)
            return
        self._first = proof
        if repeated and proof.in_force:
            head = f"precision as asked again, {IN_RUN_NOT_IN_FORCE}" if self.found_wrong else "proven in force again"
            loss = f", {LOSS_NOT_FINITE}" if proof.observed and proof.observed.loss_not_finite else ""
            print_line(f"{head}, after a checkpoint was loaded{loss} · recipe {proof.plan.policy.name}")
        elif proof.observed is not None:
            with below_progress_bars():
                print_line(proof.table(found_wrong=self.found_wrong, width=columns(sys.stderr)))
        self.write_proof(proof, run)

    def write_proof(self, proof: Proof, run: Sequence[Progress] = (), *, replace: bool = True) -> None:
        """Write a proof as JSON if the plan names a file. Raises `ConfigError` if it cannot be written.

        replace: False to keep a file that exists: a process that the script has started wrote it in this run.
        """
        path = proof.plan.proof_json
        if rank() != 0 or not path or not self.writes_file or (Path(path).exists() and not replace):
            return
        try:
            self.of_run(proof).write(path, self._proofs, [progress.facts() for progress in run])
        except OSError as error:
            raise _unwritable(path, error) from None
        except Exception as error:  # a verdict holds without its file
            report_own_failure("the proof's file", error)

    def reset_proof_file(self, plan: Plan) -> None:
        """Remove the proof of an earlier run. Raises `ConfigError` if the proof could not be written later.

        Nothing else is removed or emptied: not a device or a pipe, and no file that is not a proof.
        """
        path = plan.proof_json
        if rank() != 0 or not path:
            return
        file = Path(path)
        try:
            if not file.exists():
                file.touch()
                file.unlink()
            elif file.is_file() and file.stat().st_size:
                _remove_proof(file)
            elif not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise _unwritable(path, error) from None

    # -- the whole run -----------------------------------------------------------------------

    def report_check(self, proof: Proof | None, run: Sequence[Progress], unobserved: Sequence[Failure]) -> None:
        """Update the proof file after a check that found nothing wrong. unobserved: what it could not observe."""
        if unobserved:
            lines = [each.line(NOT_PROVEN) for each in unobserved]  # what to do before a run is not what to do now
            self.print_once(f"mpguard: a check had no result: {'; '.join(lines)}")
        if proof is not None:
            self.update_proof(proof, run)

    def report_run(self, proof: Proof, run: Sequence[Progress]) -> None:
        """Print at which steps of the run the policy was found in force, and write it to the proof file."""
        line = summary(run) if self.of_run(proof).in_force else None
        if line is not None:
            self.print_once(line)
        self.update_proof(proof, run)

    def update_proof(self, proof: Proof, run: Sequence[Progress]) -> None:
        """Write the proof again; that it cannot be written any more does not end a run that was proven."""
        try:
            self.write_proof(proof, run)
        except ConfigError as error:
            self.print_once(f"mpguard: {error}")

    def report_collapse(self, progress: Progress, limit: int) -> None:
        """Print that many steps in a row were skipped."""
        self.print_once(
            f"mpguard: {progress.skipped_in_a_row} steps of {progress.name} in a row were skipped at step "
            f"{progress.applied + progress.skipped}: the loss scale collapses. The run is refused after {limit}. Check "
            "the loss and the gradients for inf and NaN"
        )

    def report_empty(self, progress: Progress) -> None:
        """Print that the last steps of an optimizer had no gradients to apply."""
        self.print_once(
            f"mpguard: none of the parameters of {progress.name} had a gradient at its last {progress.empty} steps, so "
            f"that nothing was checked (step {progress.applied}). If it should train, they are no longer those of "
            "the model: `load_state_dict(assign=True)`, a new layer or a copy has replaced them"
        )

    def report_cast(self, what: str, enforce: str) -> None:
        """Print that weights were cast, when it happens; a step that follows is refused."""
        follows = "refused" if enforce == "error" else f"not in force (continuing: enforce is {enforce})"
        self.print_once(f"mpguard: {what}. A further step of this optimizer is {follows}")

    def report_missing(self, progress: Progress, missing: Sequence[int]) -> None:
        """Print that ranks did not take part in a check."""
        self.print_once(
            f"mpguard: {names_of(missing)} did not reach applied step {progress.applied} of {progress.name}; from here "
            "each rank checks its steps for itself"
        )

    def report_uneven(self, progress: Progress) -> None:
        """Print that steps of this rank are not those of the others."""
        self.print_once(
            f"mpguard: the ranks have uneven data (`Join`): from applied step {progress.applied} of {progress.name} on "
            "each rank checks its steps for itself"
        )

    def report_not_finite(self, progress: Progress, step: int, ranks: Sequence[int]) -> None:
        """Print which other ranks had a loss at an applied step that is NaN or infinite."""
        if ranks:
            self.print_once(
                f"mpguard: the loss of {names_of(ranks)} was NaN or infinite at applied step {step} of {progress.name}"
            )

    def report_error(self, progress: Progress, error: Exception) -> None:
        """Print that mpguard itself failed at a check."""
        log.debug("mpguard: the check failed", exc_info=error)
        self.print_once(
            f"mpguard: applied step {progress.applied} of {progress.name} could not be checked "
            f"({type(error).__name__}: {error}); the run continues. Please report this"
        )

    # -- failures ----------------------------------------------------------------------------

    def warn_failure(self, refusal: Refusal, enforce: str, *, alone: bool = False) -> None:
        """Report a failure that does not end the run: warn `NotProven`, or print that the run is not in force.

        alone: True if the other ranks may not have it; then it is reported here, else on rank 0.
        """
        self.note_warned(refusal)
        if rank() != 0 and not alone:
            return
        message = f"{refusal.verdict} (continuing: enforce is {enforce}): {refusal.reasons}"
        if refusal.verdict == NOT_PROVEN:
            warn_not_proven(message)
        else:
            print_line(f"mpguard: {f'rank {rank()}: ' if rank() else ''}{message}")

    def note_warned(self, refusal: Refusal) -> None:
        """Keep a failure that does not end the run: the first, or the first that is wrong."""
        if self.warned is None or (not self.found_wrong and refusal.verdict == NOT_IN_FORCE):
            self.warned = refusal

    def report_warned(self, refusal: Refusal, *, alone: bool) -> None:
        """Print at the end of a run that it was not in force, or not proven, and continued. alone: as above."""
        if rank() == 0 or alone:
            on_rank = f"rank {rank()}: " if rank() else ""
            print_last(f"mpguard: {on_rank}the run was {refusal.verdict} and continued (--enforce): {refusal.summary}")

    def report_idle_gradients(self) -> None:
        """Print that a rank which is declared idle has computed gradients."""
        print_line(
            f"mpguard: rank {rank()} is one of idle_ranks, and has computed gradients: what it computed in is no part "
            "of the proof"
        )

    def report_no_training(self) -> None:
        """Print that a run ended without training in this process."""
        if rank() == 0:
            print_line(
                "mpguard: no training was seen in this process; nothing was proven here. A process that the script "
                "starts is proven on its own if mpguard is active in it: `import mpguard.auto` at the top of the script"
            )


def _remove_proof(file: Path) -> None:
    """Remove a proof; what a link points to is emptied. Raises `ConfigError` for another file, and `OSError`."""
    try:
        is_proof = "verdict" in json.loads(file.read_bytes())
    except (ValueError, TypeError):
        is_proof = False
    if not is_proof:
        raise ConfigError(
            f"{file}: the proof cannot be written: the file exists, and is not a proof. Name another file"
        )
    if file.is_symlink():
        file.write_bytes(b"")
    else:
        file.unlink()


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: the proof cannot be written: {error.strerror}")


def unproven_at_exit(
    *,
    enforced: bool,
    trained: bool,
    without_gradients: bool,
    without_optimizer: bool,
    skipped: int,
    status: int,
    first_scale: float | None = None,
    hysteresis: int = 1,
    why_none: str = "",
) -> Failure:
    """Return the failure of a run that ends without a proof.

    trained: True if gradients were computed. without_gradients: True if optimizers were stepped and none of their
    parameters had a gradient. without_optimizer: True if there was none. skipped: steps that were skipped. status: the
    script's exit status. first_scale: that of a dynamic loss scale. hysteresis: the overflows before it is halved.
    why_none: why there were no gradients.
    """
    if not enforced:
        reason = "enforce is off"
    elif not trained:
        reason = "no training was seen in this process"
    elif without_gradients:
        reason = (
            f"an optimizer was stepped, but none of its parameters had gradients{f': {why_none}' if why_none else ''}"
        )
    elif without_optimizer:
        reason = (
            "the run computed gradients without an optimizer of torch, and its weights no longer exist, so that it "
            "does not show if they were updated. Step an optimizer that is derived from torch.optim.Optimizer, or keep "
            "the model until the script ends"
        )
    else:
        reason = "the run computed gradients and ended before an optimizer step was applied"
    each = "a skip" if hysteresis == 1 else f"each skip from number {hysteresis} on (hysteresis)"
    scale = f": the loss scale began at {first_scale:g} and is halved by {each}" if first_scale else ""
    skips = f" ({skipped} steps were skipped{scale})" if skipped else ""
    end = f"; the script ended with status {status}" if status else ""
    return Failure(FailureKind.UNPROVEN, f"{reason}{skips}; what was in force could not be observed{end}")
