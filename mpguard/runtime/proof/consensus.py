"""Agreement of all ranks: each publishes its failures, rank 0 combines them, all get the result.

It uses the process group's store instead of a collective: the store needs no device, and a rank that has
ended, or waits in another collective, does not block the others: they go on after a few seconds and ask again later.
The number of requests of a rank does not depend on the number of ranks: rank 0 waits for a counter, and reads all
reports at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpguard.core.console import print_line
from mpguard.runtime.proof.reductions import BETWEEN_RANKS, Fingerprint, are_the_same, compare_ranks
from mpguard.runtime.proof.verdict import Failure, FailureKind, names_of, read_failure
from mpguard.runtime.ranks import numbers_of, rank, world_size

#: Seconds that a rank waits at the first proof for the reports of the others. Gradients were reduced just before, so
#: all ranks are at the same step; a rank that is not (it skips this step, or trains for itself) is not waited for:
#: training continues, and the agreement follows at a later step.
AGREEMENT_WAIT = 10.0

#: The same where nothing is proven yet, and nothing reduces the gradients of this optimizer: a rank may train it alone.
#: Where others are proven it does not wait.
ALONE_WAIT = 0.5

#: The same for a proof that is repeated, which one rank may do alone, and for the end of a run.
REPEATED_WAIT, FINAL_WAIT = 3.0, 10.0

#: Seconds that `prove`, which all ranks must call, waits for the others.
PROVE_WAIT = 60.0

#: Seconds after which a waiting rank prints which ranks it waits for.
NOTICE_AFTER = 5.0

#: Seconds that rank 0, whose process may host the store, waits for the others to read the result: if the run fails, and
#: if it continues.
READ_TIMEOUT, READ_TIMEOUT_IN_FORCE = 10.0, 1.0

#: Seconds that a rank which fails alone leaves to rank 0, to report the failure for all.
LAST_WORD_WAIT = 2.0

#: Seconds that a rank waits at a check for the others, which have just reduced the same gradients.
CHECK_TIMEOUT = 10.0

#: Polls of a waiting rank are so far apart that all ranks together send at most this many per second to the store.
POLLS_PER_SECOND = 10_000

#: What is known of a reduction that was not seen.
THE_SAME = "The gradients are the same on all ranks after the step: they were exchanged in a way that was not seen"

#: The counter of the ranks that have ended.
ENDED = "mpguard/number of ended ranks"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a rank tells the others at a common point.

    failures: its own. fingerprint: what must be the same on all ranks at one moment. next_check: the step of the next
    check, which rank 0 decides. moment: counts backward passes, or collectives; a rank that has skipped steps, or has
    other data left, reports about another moment than the others. again: True if this rank needs that check: it could
    not tell what ran.
    not_finite: True if its loss was NaN or infinite.
    """

    failures: list[Failure]
    fingerprint: Fingerprint | None = None
    next_check: int | None = None
    moment: int | None = None
    again: bool = False
    not_finite: bool = False

    def data(self) -> dict[str, Any]:
        """Return the report as plain data, for `_read_report`."""
        return {**dataclasses.asdict(self), "failures": [failure.data() for failure in self.failures]}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The same on every rank. failures: of all ranks, see `combine`. missing: ranks without a report.

    not_finite: the other ranks whose loss was not finite; on rank 0 only, which prints them.
    """

    failures: list[Failure]
    missing: list[int] = dataclasses.field(default_factory=list)
    next_check: int | None = None
    not_finite: list[int] = dataclasses.field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return the agreement as plain data, for `_read_agreement`."""
        return {**dataclasses.asdict(self), "failures": [failure.data() for failure in self.failures]}


class Round:
    """One agreement of all ranks on the failures of a proof. Its name is the same on every rank.

    It keeps the store, so that the agreement can follow after the script has destroyed the process group.
    """

    def __init__(self, name: str, own: Report) -> None:
        """Publish the report of this rank."""
        self.own = own
        self.failures = own.failures
        #: The other ranks whose loss was not finite; on rank 0 only.
        self.not_finite: list[int] = []
        self.ranks, self.rank = numbers_of(world_size()[0]), rank()
        self.size = len(self.ranks)
        self.store: Any = default_store() if self.size > 1 else None
        self._point = name
        self._noticed = False
        if self.store is not None:
            _write(self.store, name, self.own)

    def result(self, wait: float) -> list[Failure] | None:
        """Return the failures of all ranks, with those that show between ranks only; the same list on every rank.

        None if a rank has not reported within `wait` seconds: ask again at a later step.
        """
        if self.size == 1:
            return self.failures
        if self.store is None:
            return _gather(self.own, self.size).failures
        try:
            return self._result(wait)
        except Exception as error:  # the process that hosts the store has ended
            ended = f"no result from rank 0: its process has ended ({type(error).__name__})"
            return [*self.failures, Failure(FailureKind.UNPROVEN, ended)]

    def _result(self, wait: float) -> list[Failure] | None:
        if self.rank == 0:
            return self._combine_all() if self._wait_for(self._reported, wait) else None
        if not self._wait_for(self._decided, wait):
            return None
        everywhere = _read_failures(json.loads(self.store.get(self._decided())))
        self.store.add(f"mpguard/{self._point}/read", 1)
        return everywhere

    def missing(self) -> list[int]:
        """Return the ranks that have not reported, and have not ended."""
        if self.store is None:
            return []
        absent = _missing(self.store, self._point, self.ranks)
        return [other for other in absent if not self.store.check([f"mpguard/ended/{other}"])]

    def _reported(self) -> bool:
        """True if all ranks have reported, or ended."""
        if self.store.add(f"mpguard/{self._point}/reports", 0) >= self.size:
            return True
        return bool(self.store.add(ENDED, 0)) and not self.missing()

    def _decided(self) -> str | None:
        """Return the key of the result; None if rank 0 has neither published it nor ended."""
        keys = (f"mpguard/{self._point}/verdict", "mpguard/ended/0")
        return next((key for key in keys if self.store.check([key])), None)

    def _wait_for(self, condition: Callable[[], Any], wait: float) -> bool:
        """Wait until a condition on the store holds; print once which ranks are waited for."""

        def notice(waited: float) -> None:
            if waited > NOTICE_AFTER and not self._noticed and (missing := self.missing()):
                self._noticed = True
                print_line(
                    f"mpguard: rank {self.rank} waits for {names_of(missing)}: no step of this optimizer there yet"
                )

        return _poll(condition, wait, self.size, notice)

    def _combine_all(self) -> list[Failure]:
        """Collect the reports on rank 0, publish the combined list, and return it."""
        absent = set(_missing(self.store, self._point, self.ranks))
        present = [other for other in self.ranks if other not in absent]
        ended = [other for other in absent if self.store.check([f"mpguard/ended/{other}"])]
        keys = [*(f"mpguard/{self._point}/{other}" for other in present), *(f"mpguard/ended/{each}" for each in ended)]
        read = zip([*present, *ended], map(_read_report, _get_all(self.store, keys)), strict=True)
        reports = dict(read)
        self.not_finite = [other for other, report in reports.items() if other and report.not_finite]
        everywhere = combine([reports.get(each) for each in range(self.ranks[-1] + 1)])
        wait = READ_TIMEOUT if everywhere else READ_TIMEOUT_IN_FORCE
        _publish(self.store, self._point, [each.data() for each in everywhere], len(present) - 1, wait)
        return everywhere


def agree(point: str, report: Report, wait: float) -> Agreement:
    """Exchange the reports of all ranks at a check, whose name is the same on every rank.

    wait: seconds after which a rank without a report is `missing`.
    """
    size = world_size()[0]
    if size == 1:
        return Agreement(report.failures, [], report.next_check)
    store = default_store()
    if store is None:
        return _gather(report, size)
    if rank() == 0:
        return _collect(store, point, report, wait)
    with contextlib.suppress(Exception):
        _write(store, point, report)
        # Rank 0 publishes the agreement after its own wait for the slowest rank.
        agreement = _read_agreement(_read(store, f"mpguard/{point}/verdict", 2 * wait))
        if agreement.failures:
            store.add(f"mpguard/{point}/read", 1)
        return agreement
    return Agreement(report.failures, [0], report.next_check)


def _write(store: Any, point: str, report: Report) -> None:
    """Write the report of this rank, and count it."""
    store.set(f"mpguard/{point}/{rank()}", json.dumps(report.data()))
    store.add(f"mpguard/{point}/reports", 1)


def _read_report(text: bytes) -> Report:
    """Return the report of another rank. What another version has added is ignored."""
    fields = json.loads(text)
    known = {field.name for field in dataclasses.fields(Fingerprint)}
    plain = fields.get("fingerprint")
    fingerprint = Fingerprint(**{name: plain[name] for name in known & plain.keys()}) if plain is not None else None
    failures, again = _read_failures(fields["failures"]), bool(fields.get("again"))
    not_finite = bool(fields.get("not_finite"))
    return Report(failures, fingerprint, fields.get("next_check"), fields.get("moment"), again, not_finite)


def _read_agreement(fields: dict[str, Any]) -> Agreement:
    return Agreement(_read_failures(fields["failures"]), fields.get("missing", []), fields.get("next_check"))


def _read_failures(published: Sequence[object]) -> list[Failure]:
    return [read_failure(each) for each in published]


def _read(store: Any, key: str, timeout: float) -> Any:
    """Return what a rank has written. Raises `TimeoutError`, and torch's error if the store no longer exists."""
    if not _poll(lambda: store.check([key]), timeout, world_size()[0]):
        raise TimeoutError
    return json.loads(store.get(key))


def _poll(
    condition: Callable[[], Any], wait: float, pollers: int = 1, on_wait: Callable[[float], None] | None = None
) -> bool:
    """Wait until a condition on the store holds; False if it does not within `wait` seconds.

    It polls, because torch prints warnings if `store.wait` ends. pollers: ranks that poll at the same time. on_wait: is
    called before each pause with the seconds that have passed.
    """
    began = time.monotonic()
    shortest = max(0.001, pollers / POLLS_PER_SECOND)
    longest = max(0.1, shortest)
    while not condition():
        waited = time.monotonic() - began
        if waited >= wait:
            return False
        if on_wait is not None:
            on_wait(waited)
        pause = min(max(shortest, waited / 8), longest)  # at most an eighth of what it waits for is lost
        time.sleep(min(pause, max(0.0, wait - waited)))
    return True


def _publish(store: Any, point: str, result: Any, readers: int, wait: float) -> None:
    """Publish a result of rank 0, whose process may host the store, and wait until the others have read it."""
    store.set(f"mpguard/{point}/verdict", json.dumps(result))
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline and store.add(f"mpguard/{point}/read", 0) < readers:
        time.sleep(0.01)


def _collect(store: Any, point: str, own: Report, wait: float) -> Agreement:
    """Collect the reports of all ranks on rank 0, publish the agreement, and return it."""
    others = numbers_of(world_size()[0])[1:]
    reports: list[Report | None] = [own, *[None] * others[-1]]
    with contextlib.suppress(Exception):
        complete = _poll(lambda: store.add(f"mpguard/{point}/reports", 0) >= len(others), wait)
        missing = set() if complete else set(_missing(store, point, others))
        present = [other for other in others if other not in missing]
        for other, text in zip(present, _get_all(store, [f"mpguard/{point}/{each}" for each in present]), strict=True):
            reports[other] = _read_report(text)
    absent = [other for other in others if reports[other] is None]
    needed = [each.next_check for each in reports if each is not None and each.again and each.next_check is not None]
    not_finite = [other for other in others if (found := reports[other]) is not None and found.not_finite]
    agreement = Agreement(combine(reports), absent, min(needed, default=own.next_check), not_finite)
    with contextlib.suppress(Exception):
        wait = READ_TIMEOUT if agreement.failures else 0
        _publish(store, point, agreement.data(), len(others) - len(absent), wait)
    return agreement


def _missing(store: Any, point: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have written no report. By bisection, so it costs a few requests per missing rank."""
    if not ranks or store.check([f"mpguard/{point}/{each}" for each in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _missing(store, point, ranks[:half]) + _missing(store, point, ranks[half:])


def _get_all(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of keys that exist: with one request, if the store can."""
    if keys and store.has_extended_api():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


def combine(reports: Sequence[Report | None]) -> list[Failure]:
    """Return the failures of all ranks as one list, each with its ranks.

    reports: one per rank, in order; None for a rank that has sent none.
    """
    present = [(rank_, report) for rank_, report in enumerate(reports) if report is not None]
    collected: dict[Failure, list[int]] = {}
    for rank_, report in present:
        for failure in report.failures:
            collected.setdefault(failure, []).append(rank_)
    everywhere = [
        failure if failure.ranks or len(ranks) == len(present) else dataclasses.replace(failure, ranks=tuple(ranks))
        for failure, ranks in collected.items()
    ]
    fingerprints = [report.fingerprint for _, report in present if report.fingerprint is not None]
    if len({report.moment for _, report in present}) > 1:
        fingerprints = []  # their gradients are those of other steps
    complete = bool(present) and len(fingerprints) == len(present)
    return compared(everywhere, fingerprints) if complete else everywhere


def compared(failures: list[Failure], fingerprints: Sequence[Fingerprint]) -> list[Failure]:
    """Return failures with what shows between ranks, which decides what a rank could not know about a reduction.

    Where no reduction was seen, ranks may train models of their own: only gradients that differ are a witness of it.
    """
    found = compare_ranks(fingerprints)
    unproven = FailureKind.UNPROVEN
    if any(each.row == BETWEEN_RANKS for each in found):
        failures = [
            dataclasses.replace(each, kind=FailureKind.WRONG) if each.row == "engine" else each
            for each in failures
            if (each.kind, each.row) != (unproven, "reduction")
        ]
    elif not found and are_the_same(fingerprints):
        failures = [
            dataclasses.replace(each, text=f"{each.text}. {THE_SAME}") if each.row == "reduction" else each
            for each in failures
            if (each.kind, each.row) != (unproven, "engine")
        ]
    return [*failures, *found]


def publish_end(failures: Sequence[Failure]) -> None:
    """Publish why this rank ends, as its report in every round, so that no other rank waits for it."""
    with contextlib.suppress(Exception):
        if rank() == 0:
            report: object = [dataclasses.replace(each, ranks=each.ranks or (0,)).data() for each in failures]
        else:
            report = Report(list(failures)).data()
        key, store = f"mpguard/ended/{rank()}", default_store()
        if not store.check([key]):  # the first report is the cause
            store.set(key, json.dumps(report))
            store.add(ENDED, 1)


def publish_warning(failures: Sequence[Failure]) -> None:
    """Publish failures of this rank with which the run goes on, for the proof of rank 0."""
    with contextlib.suppress(Exception):
        known = [dataclasses.replace(each, ranks=each.ranks or (rank(),)).data() for each in failures]
        default_store().set(f"mpguard/warned/{rank()}", json.dumps(known))


def warnings_of_others() -> list[Failure]:
    """Return on rank 0, at the end of the run, the failures with which other ranks have gone on; wait for these.

    On another rank this tells rank 0 that nothing follows.
    """
    found: list[Failure] = []
    with contextlib.suppress(Exception):
        store, total = default_store(), max(world_size())  # the script may have destroyed its process group
        if rank():
            store.add("mpguard/finished", 1)
            return []
        others = [each for each in numbers_of(total) if 0 < each < total]
        _poll(lambda: store.add("mpguard/finished", 0) + store.add(ENDED, 0) >= len(others), LAST_WORD_WAIT)
        keys = [key for other in others if store.check([key := f"mpguard/warned/{other}"])]
        for text in _get_all(store, keys):
            found += _read_failures(json.loads(text))
    return found


def is_left_to_rank_0() -> bool:
    """Return True if rank 0 has ended too, or does within a moment: it prints why."""
    store = default_store()
    with contextlib.suppress(Exception):
        deadline = time.monotonic() + LAST_WORD_WAIT
        while store is not None and time.monotonic() < deadline:
            if store.check(["mpguard/ended/0"]):
                return True
            time.sleep(0.05)
    return False


_store: Any = None


def default_store() -> Any:
    """Return the store of the default process group, also of one that was destroyed; None if it has none (MPI)."""
    global _store  # noqa: PLW0603  there is one process group by default
    distributed_c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):
        _store = distributed_c10d._get_default_store()
    return _store


def remember_group() -> None:
    """Remember the process group: the script may destroy it before this process ends, with or without a proof."""
    rank()
    default_store()


def forget_store() -> None:
    """Release the store, at the end of the process."""
    global _store  # noqa: PLW0603  as above
    _store = None


def _gather(report: Report, size: int) -> Agreement:
    """Combine the reports of all ranks with a collective, for process groups without a store."""
    import torch.distributed as dist

    if size < dist.get_world_size():  # idle ranks would be waited for
        return Agreement(report.failures, [], report.next_check)
    reports: list[Any] = [None] * size
    dist.all_gather_object(reports, report)
    needed = [each.next_check for each in reports if each.again]
    return Agreement(combine(reports), [], min(needed, default=reports[0].next_check))
