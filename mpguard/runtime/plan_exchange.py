"""Exchange the plans of all ranks, and refuse ranks that do not want the same.

Each rank compares what ran with its own plan, so two nodes with different configs would both be in force. Each rank
therefore publishes its plan and its versions in the process group's store: when the group is created, and again before
its first step if the plan has changed. A store needs no device and no collective: a rank without mpguard publishes
nothing, and the others go on without its answer. Then their run cannot be proven, because the proof needs all ranks.

If all plans are the same, a rank learns it from one counter, and reads no plan of another rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mpguard.core.console import print_line
from mpguard.core.version import __version__
from mpguard.policy.allow import RANKS_DIFFER
from mpguard.policy.hardware import installed_version
from mpguard.policy.policy import FIELD_NAMES
from mpguard.runtime.containment import contained
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.consensus import POLLS_PER_SECOND, default_store
from mpguard.runtime.proof.verdict import Failure, FailureKind, Row, Verdict, names_of
from mpguard.runtime.ranks import idle_ranks, is_idle, numbers_of, rank, world_size

#: Seconds that a rank waits for the plans of the others. They have just created the same group, so that their plans
#: follow at once if mpguard is active there.
ANSWER_WAIT = 10.0

#: Seconds that rank 0, whose process may host the store, waits before it ends until the others have read all plans.
READ_WAIT = 5.0

#: Libraries whose versions are compared. Different ones are reported: they may compute in another way.
LIBRARIES = ("torch", "accelerate", "deepspeed", "transformer_engine", "torchao")

#: Values, places and groups of ranks that a message names.
LISTED = 4

_KEY = "mpguard/plans"


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What the ranks must have in common.

    policy: all its fields but the name. recipe: the name. strategy: None if the rank's plan states none.
    libraries: installed versions.
    """

    recipe: str
    policy: Mapping[str, Any]
    allow: Sequence[str]
    strategy: str | None
    mpguard: str
    libraries: Mapping[str, str | None]

    @classmethod
    def of(cls, plan: Plan) -> RankPlan:
        """Return what a plan and this process have."""
        return cls(
            plan.policy.name,
            {name: plan.policy.format_field(name) for name in FIELD_NAMES},
            sorted(map(str, plan.allow)),
            plan.strategy,
            __version__,
            {name: installed_version(name) for name in LIBRARIES},
        )

    @classmethod
    def read(cls, text: bytes | str) -> RankPlan:
        """Return the plan that a rank has published, maybe with another version of mpguard."""
        found = json.loads(text)
        return cls(
            str(found.get("recipe")),
            found.get("policy") or {},
            found.get("allow") or (),
            found.get("strategy"),
            str(found.get("mpguard")),
            found.get("libraries") or {},
        )

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def digest(self) -> str:
        """Return a digest of everything but the recipe's name: two recipes may be the same policy."""
        return hashlib.sha256(dataclasses.replace(self, recipe="").text().encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class PublishedPlan:
    """The plan of a rank, and where it runs. changes: how often that rank has published another plan."""

    plan: RankPlan
    place: str
    changes: int


class Exchange:
    """The exchange of plans in one process group: what this rank has published, and what it has found.

    ranks: those that train, as this rank's plan has it. refused: True if the plans were found to differ. complete: True
    if all had answered by then, so that rank 0 has found the same.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.ranks, self.rank = numbers_of(world_size()[0]), rank()
        self.refused = self.complete = False
        #: Which ranks have which plans, where the run allows it; empty if they have the same.
        self.allowed = ""
        self._waited = False
        self._digest: str | None = None
        self._changes = -1
        self._reported = False
        self._readers = 0

    def publish(self, own: RankPlan) -> None:
        """Write the plan of this rank, unless it was written."""
        digest = own.digest()
        if digest == self._digest:
            return
        self._changes += 1
        name = f"{_KEY}/plan/{digest}/{own.recipe}"
        self.store.set(name, own.text())
        self.store.set(f"{_KEY}/rank/{self.rank}", json.dumps([name, place(), self._changes]))
        if self._digest is not None:
            self.store.add(f"{_KEY}/same/{self._digest}", -1)
        self._digest = digest
        if not is_idle():
            self.store.add(f"{_KEY}/same/{digest}", 1)
            self.store.add(f"{_KEY}/answers", int(not self._changes))

    def is_same_everywhere(self) -> bool:
        """True if all ranks that train have published the plan that this rank has."""
        return bool(self.store.add(f"{_KEY}/same/{self._digest}", 0) >= len(self.ranks))

    def wait(self) -> None:
        """Wait until all ranks that train have published a plan, once, and for a limited time."""
        if self._waited:
            return
        self._waited = True
        deadline = time.monotonic() + ANSWER_WAIT
        while self.store.add(f"{_KEY}/answers", 0) < len(self.ranks) and time.monotonic() < deadline:
            time.sleep(max(0.01, len(self.ranks) / POLLS_PER_SECOND))

    def found(self, allowed: Sequence[str], *, settled: bool = False) -> Failure | None:
        """Return how the plans of the ranks differ in a way that is not allowed; None if they do not, as far as known.

        settled: False while a rank may still change its plan: then plans are compared that are changed equally often,
        because a script that changes its plan does so on each rank, sooner or later.
        """
        if self.is_same_everywhere():
            return None
        answers = self.answers()
        self.allowed = variants(answers, {name: get for name, get in ASPECTS.items() if _is_allowed(name, allowed)})
        self.report(answers, allowed)
        own = answers[self.rank]
        comparable = {each: answer for each, answer in answers.items() if settled or answer.changes == own.changes}
        found = difference(comparable, allowed)
        if found is not None:
            self.refused, self.complete, self._readers = True, len(answers) == len(self.ranks), len(answers)
        return found

    def answers(self) -> dict[int, PublishedPlan]:
        """Return the plans of the ranks that have published one."""
        keys = {each: f"{_KEY}/rank/{each}" for each in self.ranks}
        if not self.store.check(list(keys.values())):
            if self.rank != 0:  # only rank 0 asks for each of the others
                keys = {each: keys[each] for each in (0, self.rank)}
            keys = {each: key for each, key in keys.items() if self.store.check([key])}
        read = {each: json.loads(text) for each, text in zip(keys, self._get_all(list(keys.values())), strict=True)}
        names = list(dict.fromkeys(name for name, *_ in read.values()))
        plans = {name: RankPlan.read(text) for name, text in zip(names, self._get_all(names), strict=True)}
        return {each: PublishedPlan(plans[name], where, changes) for each, (name, where, changes) in read.items()}

    def _get_all(self, keys: list[str]) -> list[bytes]:
        if keys and self.store.has_extended_api():
            return list(self.store.multi_get(keys))
        return [self.store.get(key) for key in keys]

    def let_others_read(self) -> None:
        """Wait on rank 0, before it ends, until the other ranks need the store no more."""
        with contextlib.suppress(Exception):
            self.store.add(f"{_KEY}/read", 1)
            deadline = time.monotonic() + READ_WAIT
            while self.rank == 0 and self.store.add(f"{_KEY}/read", 0) < self._readers and time.monotonic() < deadline:
                time.sleep(0.01)

    def report(self, answers: Mapping[int, PublishedPlan], allowed: Sequence[str]) -> None:
        """Print once, for all ranks, what differs without being refused, and which ranks have not answered."""
        first = self.ranks[0] if self.ranks[0] in answers else self.ranks[1]
        if self._reported or self.rank != first:
            return
        self._reported = True
        libraries = variants(answers, {name: functools.partial(_library, name) for name in LIBRARIES})
        if libraries:
            print_line(f"mpguard: the ranks have different versions of libraries: {libraries}. Install the same ones")
        if allowed:
            found = self.allowed or "there is no difference"
            print_line(f"mpguard: the ranks have different plans, as allowed: {found}")
        asked = self.ranks if self.rank == 0 else self.ranks[:1]  # see `answers`
        silent = [each for each in asked if each not in answers]
        if silent:
            print_line(
                f"mpguard: {names_of(silent)} did not publish a plan within {ANSWER_WAIT:g} s: mpguard is not active "
                "there, or not yet. Without it the run cannot be proven: start all ranks in the same way"
            )


def _field(name: str, plan: RankPlan) -> Any:
    return plan.policy.get(name)


def _library(name: str, plan: RankPlan) -> Any:
    return plan.libraries.get(name)


#: What is the same on all ranks, by the names of the allowance `ranks_differ`. One of a policy's fields is named alone.
ASPECTS: dict[str, Callable[[RankPlan], Any]] = {
    "mpguard": lambda plan: plan.mpguard,
    **{name: functools.partial(_field, name) for name in FIELD_NAMES},
    "strategy": lambda plan: plan.strategy,
    "allow": lambda plan: plan.allow,
}


def _is_allowed(aspect: str, allowed: Sequence[str]) -> bool:
    return aspect in allowed or (aspect in FIELD_NAMES and "policy" in allowed)


def difference(answers: Mapping[int, PublishedPlan], allowed: Sequence[str] = ()) -> Failure | None:
    """Return how the plans of ranks differ; None if they are the same.

    allowed: what may differ; `policy` stands for all of its fields, and nothing for the version of mpguard.
    """
    found = variants(answers, {"mpguard": ASPECTS["mpguard"]})
    if found:
        text = f"the ranks have different versions of mpguard: {found}"
        return Failure(FailureKind.WRONG, text, "plan", advice="Install the same one on all nodes")
    stated = {answer.plan.strategy for answer in answers.values()} - {None}
    compared = {
        name: get
        for name, get in ASPECTS.items()
        if not _is_allowed(name, allowed) and (name != "strategy" or len(stated) > 1)
    }
    found = variants(answers, compared)
    if not found:
        return None
    advice = (
        f"Give all nodes the same config, or allow it: mpguard_allow: [{{{RANKS_DIFFER}: policy}}] (or strategy, "
        "allow, a field of the policy)"
    )
    return Failure(FailureKind.WRONG, f"the ranks have different plans: {found}", "plan", advice=advice)


def variants(answers: Mapping[int, PublishedPlan], aspects: Mapping[str, Callable[[RankPlan], Any]]) -> str:
    """Return which ranks have which values of the aspects that differ; empty if none differs."""
    values = {
        name: {each: _shown(get(answer.plan)) for each, answer in answers.items()} for name, get in aspects.items()
    }
    differing = [name for name, by_rank in values.items() if len(set(by_rank.values())) > 1]
    if not differing:
        return ""
    groups: dict[tuple[str, ...], list[int]] = {}
    for each in answers:
        groups.setdefault(tuple(values[name][each] for name in differing), []).append(each)
    parts = []
    for group, ranks in list(groups.items())[:LISTED]:
        facts = [f"{name} {value}" for name, value in zip(differing, group, strict=True)]
        if any(name in FIELD_NAMES for name in differing):
            facts.insert(0, f"recipe {answers[ranks[0]].plan.recipe}")
        parts.append(f"{names_of(ranks)} ({_places(ranks, answers)}): {_first(facts, ', ')}")
    parts += [f"{len(groups) - LISTED} more"] * (len(groups) > LISTED)
    return "; ".join(parts)


def _shown(value: Any) -> str:
    return (", ".join(map(str, value)) or "nothing") if isinstance(value, (list, tuple)) else str(value)


def _places(ranks: Sequence[int], answers: Mapping[int, PublishedPlan]) -> str:
    return _first(list(dict.fromkeys(answers[each].place for each in ranks)), "; ")


def _first(texts: Sequence[str], separator: str) -> str:
    """Join the first few texts, with the number of the others."""
    more = [f"{len(texts) - LISTED} more"] * (len(texts) > LISTED)
    return separator.join([*texts[:LISTED], *more])


def place() -> str:
    """Return where this process runs: the number of its node, if a launcher has set it, and the name of its host."""
    names = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")  # torchrun, Lightning, srun
    node = next((os.environ[name] for name in names if os.environ.get(name)), None)
    host = socket.gethostname()
    return host if node is None else f"node {node}, {host}"


def place_of(store: Any, number: int) -> str:
    """Return where a rank runs, as it has published it. Raises torch's error if the store no longer exists."""
    key = f"{_KEY}/rank/{number}"
    return str(json.loads(store.get(key))[1]) if store.check([key]) else "its place is not known"


class EndRun(Protocol):
    """What ends the run, `Guard.refuse`. alone: True if rank 0 may not know the failure."""

    def __call__(self, failure: Failure, *, alone: bool) -> None: ...


_exchange: Exchange | None = None


def check(plan: Plan, refuse: EndRun) -> None:
    """Publish the plan of this rank, and compare those of all ranks, as far as they are known; refuse different ones.

    To be called where the group exists, before the first step.
    """
    with contained("the exchange of the ranks' plans"):
        global _exchange  # noqa: PLW0603  there is one process group by default
        store = default_store() if world_size()[0] + idle_ranks() > 1 else None
        if store is None:
            return
        if _exchange is None or _exchange.store is not store:
            _exchange = Exchange(store)
        _exchange.publish(RankPlan.of(plan))
        if _exchange.refused or is_idle() or len(_exchange.ranks) == 1 or plan.enforce == "off":
            return
        _exchange.wait()
        _end(refuse, _exchange, _exchange.found(plan.allowed(RANKS_DIFFER)))


def rows(plan: Plan) -> tuple[Row, ...]:
    """Return the row about plans that differ between ranks as allowed, or about an allowance that nothing needs."""
    names = "; ".join(str(each) for each in plan.allow if each.kind == RANKS_DIFFER)
    if not names or _exchange is None:
        return ()
    if not _exchange.allowed:
        return (Row("allow", f"not needed: {names}", "", Verdict.NOT_ASKED),)
    return (Row("plans", _exchange.allowed, "the same on all ranks", Verdict.ALLOWED, names),)


def check_settled(plan: Plan, refuse: EndRun) -> None:
    """Compare the plans again when all ranks have applied a step: none is changed after that."""
    if _exchange is not None and not _exchange.refused and not is_idle():
        with contained("the exchange of the ranks' plans"):
            _end(refuse, _exchange, _exchange.found(plan.allowed(RANKS_DIFFER), settled=True))


def _end(refuse: EndRun, exchange: Exchange, found: Failure | None) -> None:
    """Refuse the run if the plans differ. Rank 0 reports it for all, if all have answered."""
    if found is None:
        return
    try:
        refuse(found, alone=not exchange.complete)
    finally:
        exchange.let_others_read()
