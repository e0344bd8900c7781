"""The types of a verdict: `Row` of one fact, `Failure` of what is wrong or not proven, `Refusal` of a run.

Ranks exchange failures as plain data (`Failure.data`, `read_failure`). What decides reads `kind` and `row`; the texts
are for people.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: The beginning of what is found if something could not be observed.
UNOBSERVED = "not observed"

#: Verdicts on a run: `Proof.verdict`, and `verdict` in the proof file.
IN_FORCE, NOT_IN_FORCE, NOT_PROVEN = "in force", "not in force", "not proven"

#: What separates the lines of a message.
NEXT_LINE = "\n  "

#: Ranks that a message names.
NAMED_RANKS = 8

#: Rows whose failure is explained by that of another one, whose advice is then enough.
EXPLAINED_BY = {
    "engine": ("processes",),
    "reduction": ("processes", "engine"),
    "reduction between ranks": ("processes", "engine"),
    "coverage": ("processes", "engine"),
    "parameters": ("optimizer",),
    "gradients": ("optimizer", "parameters"),
}


class Verdict(enum.Enum):
    """How a fact compares with the plan. The values are in the proof file."""

    #: The plan asks for it, and it is so.
    AS_ASKED = "as_asked"
    #: The plan asks for something else.
    WRONG = "wrong"
    #: The plan asks for it, and it could not be observed.
    UNPROVEN = "unproven"
    #: The plan asks for something else, and the run allows the deviation.
    ALLOWED = "allowed"
    #: The plan does not ask for it: it is shown.
    NOT_ASKED = "not_asked"

    @classmethod
    def of(cls, as_asked: bool) -> Verdict:
        """Return the verdict on a fact that was observed and that the plan asks for."""
        return cls.AS_ASKED if as_asked else cls.WRONG


#: `ok` of a row in the proof file, which has null for all other verdicts.
OK = {Verdict.AS_ASKED: True, Verdict.WRONG: False}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the proof: one fact, and how it compares with the plan."""

    #: Its name, such as `compute`.
    name: str
    #: What was found, as text.
    found: str
    #: What the plan asks for; empty if it does not.
    asked: str
    verdict: Verdict
    #: The allowances because of which the fact may differ, separated by `; `.
    allowed: str = ""
    #: What to do if the row is wrong or unproven.
    advice: str = ""
    #: What accepts the row as it is: entries of `mpguard_allow`, as YAML.
    allow: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return the row as plain data; without `allowed` if nothing was."""
        data = {"name": self.name, "found": self.found, "asked": self.asked, "ok": OK.get(self.verdict)}
        data["verdict"] = self.verdict.value
        return {**data, "allowed": self.allowed} if self.allowed else data

    @property
    def verdict_text(self) -> str:
        """The last column of the table."""
        texts = {
            Verdict.AS_ASKED: "as asked",
            Verdict.WRONG: f"asked: {self.asked}",
            Verdict.UNPROVEN: UNOBSERVED,
            Verdict.ALLOWED: f"allowed: {self.allowed}",
            Verdict.NOT_ASKED: "",
        }
        return texts[self.verdict]

    def failure(self) -> Failure:
        """Return the failure that a wrong or unproven row is."""
        if self.verdict is Verdict.WRONG or not self.found.startswith(UNOBSERVED):
            kind = FailureKind.WRONG if self.verdict is Verdict.WRONG else FailureKind.UNPROVEN
            text = f"{self.name}: {self.found}; asked: {self.asked}"
            return Failure(kind, text, self.name, (), self.advice, self.allow)
        text = f"{self.name} could not be observed{self.found.removeprefix(UNOBSERVED)}; asked: {self.asked}"
        return Failure(FailureKind.UNPROVEN, text, self.name, (), self.advice, self.allow)


def not_observed(name: str, asked: str = "", reason: str = "", advice: str = "") -> Row:
    """Return the row of a fact that could not be observed. reason: why, if it is known."""
    return Row(name, f"{UNOBSERVED}: {reason}" if reason else UNOBSERVED, asked, Verdict.UNPROVEN, "", advice)


class FailureKind(enum.Enum):
    """What a failure is. The values are what ranks exchange."""

    #: Something was observed, and it is not what the plan asks for.
    WRONG = "wrong"
    #: Something that must be observed was not.
    UNPROVEN = "unproven"


@dataclasses.dataclass(frozen=True)
class Failure:
    """One reason why a run is not in force, or not proven."""

    kind: FailureKind
    #: What is, and what is needed.
    text: str
    #: The row of the proof that it is about; empty if it is about none.
    row: str = ""
    #: The ranks that have it; empty if all have it, or if it is that of this rank alone.
    ranks: tuple[int, ...] = ()
    #: What to do.
    advice: str = ""
    #: What accepts it: entries of `mpguard_allow`, as YAML.
    allow: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.describe(NOT_IN_FORCE)

    def describe(self, verdict: str) -> str:
        """Return ranks, text and remedy; an unproven failure is marked unless the verdict on the run says it."""
        remedy = remedy_of([self])
        return f"{self.line(verdict)}{f'. {remedy}' if remedy else ''}"

    def line(self, verdict: str) -> str:
        """Return ranks and text."""
        rank = f"{names_of(self.ranks, plural=False)}: " if self.ranks else ""
        unproven = f"{NOT_PROVEN}: " if self.kind is FailureKind.UNPROVEN and verdict != NOT_PROVEN else ""
        return f"{rank}{unproven}{self.text}"

    def data(self) -> dict[str, Any]:
        """Return the failure as plain data, for `read_failure`."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "ranks": list(self.ranks)}


def read_failure(data: object) -> Failure:
    """Return a failure that another rank has published. A form that is not known is an unproven failure, as text."""
    if not isinstance(data, Mapping) or not isinstance(data.get("text"), str):
        return Failure(FailureKind.UNPROVEN, str(data))
    kind = FailureKind.WRONG if data.get("kind") == FailureKind.WRONG.value else FailureKind.UNPROVEN
    ranks = tuple(each for each in data.get("ranks") or () if isinstance(each, int))
    allow = tuple(map(str, data.get("allow") or ()))
    return Failure(kind, data["text"], str(data.get("row", "")), ranks, str(data.get("advice", "")), allow)


def remedy_of(failures: Sequence[Failure]) -> str:
    """Return what to do about failures, as one text: about their causes, with all entries of `mpguard_allow`."""
    rows = {failure.row for failure in failures}
    causes = [each for each in failures if rows.isdisjoint(EXPLAINED_BY.get(each.row, ()))]
    advice = ". ".join(dict.fromkeys(each.advice for each in causes if each.advice))
    entries = ", ".join(dict.fromkeys(entry for each in failures for entry in each.allow))
    if not entries:
        return advice
    rest = {each.row for each in causes if not each.allow}
    accepted = ", ".join(dict.fromkeys(each.row for each in failures if each.allow)) if rest else "it"
    accept = f"accept {accepted}: mpguard_allow: [{entries}]"
    return f"{advice}; or {accept}" if advice else f"To {accept}"


def verdict_of(failures: Iterable[Failure]) -> str:
    """Return `in force` without failures, `not in force` if one of them is wrong, else `not proven`."""
    kinds = {failure.kind for failure in failures}
    return NOT_IN_FORCE if FailureKind.WRONG in kinds else NOT_PROVEN if kinds else IN_FORCE


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a run is not in force, or not proven: what `NotInForce` and the last line of a process print."""

    failures: tuple[Failure, ...]
    #: Text before and after the failures: the step at which they were found, and the last one that was in force.
    before: str = ""
    after: str = ""

    @classmethod
    def wrong(cls, text: str, row: str = "", advice: str = "") -> Refusal:
        """Return the refusal of one failure that is wrong."""
        return cls((Failure(FailureKind.WRONG, text, row, (), advice),))

    @property
    def verdict(self) -> str:
        """`not in force`, or `not proven` if nothing is wrong."""
        return verdict_of(self.failures)

    @property
    def summary(self) -> str:
        """What is wrong, or not proven, on one line, without the verdict and the remedy."""
        return f"{self.before}{'; '.join(each.line(self.verdict) for each in self.failures)}{self.after}"

    @property
    def reasons(self) -> str:
        """What is wrong, or not proven, without the verdict: a line per failure, what is wrong first, and a remedy."""
        if len(self.failures) == 1:
            return f"{self.before}{self.failures[0].describe(self.verdict)}{self.after}"
        ordered = sorted(self.failures, key=lambda each: each.kind is FailureKind.UNPROVEN)
        text = f"{self.before}{NEXT_LINE.join(each.line(self.verdict) for each in ordered)}{self.after}"
        remedy = remedy_of(ordered)
        return f"{text}{NEXT_LINE}remedy: {remedy}" if remedy else text

    def __str__(self) -> str:
        return f"{NOT_PROVEN}: {self.reasons}" if self.verdict == NOT_PROVEN else self.reasons

    def published(self) -> list[Failure]:
        """Return the failures as other ranks get them."""
        return [dataclasses.replace(failure, text=f"{self.before}{failure.text}") for failure in self.failures]


def names_of(ranks: Sequence[int], *, plural: bool = True) -> str:
    """Return `rank 1`, or `ranks 1, 2, 3 and 5 more`. plural: False to write `rank` for several too."""
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"rank{'s' * (plural and len(ranks) > 1)} {', '.join(map(str, ranks[:NAMED_RANKS]))}{more}"
