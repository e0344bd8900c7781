"""`Proof`: the result for a run, as a table and as a file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks.compute import frozen_share
from mpguard.runtime.proof.checks.optimizer import quantized_states
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import IN_FORCE, Failure, Row, Verdict

#: Characters of the column of what was found: longer texts have no verdict below each other.
FOUND_WIDTH = 60

#: Follows what is as asked after something else was found wrong, and the run continued.
IN_RUN_NOT_IN_FORCE = "in a run that is not in force"

#: Follows a verdict on the precision of a step that trained nothing.
LOSS_NOT_FINITE = "but the loss is not finite"

#: A narrower terminal breaks the lines itself.
NARROWEST = 50


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result for a run. The facts about the whole run are in the file only: see `write`."""

    #: `in force`, `not in force` or `not proven`: see `verdict_of`.
    verdict: str
    plan: Plan
    rows: tuple[Row, ...] = ()
    #: What is wrong, or not proven, with the ranks if not all have it.
    failures: tuple[Failure, ...] = ()
    observed: Observed | None = None

    @property
    def in_force(self) -> bool:
        return self.verdict == IN_FORCE

    @property
    def unobserved(self) -> list[str]:
        """The rows that the plan asks for and that could not be observed."""
        return [row.name for row in self.rows if row.verdict is Verdict.UNPROVEN]

    def table(self, *, first: bool = True, found_wrong: bool = False, width: int | None = None) -> str:
        """Return the table that is printed.

        first: False for a further optimizer, whose name is in the first line. found_wrong: True if something else was
        found wrong, and the run continued. width: columns that a line may have; None: any number.
        """
        seen = self.observed
        if seen is None:
            return "\n".join(map(str, self.failures))
        ranks = f"all {seen.world_size} ranks" if seen.world_size > 1 else "1 process"
        step = f"step {seen.step}" if first else f"step {seen.step} of {seen.optimizer}"
        loss = f", {LOSS_NOT_FINITE}" if seen.loss_not_finite else ""
        if not self.in_force:
            head = f"{step}: {self.verdict}{loss}"
        elif found_wrong or seen.loss_not_finite:
            where = f", {IN_RUN_NOT_IN_FORCE}" if found_wrong else ""
            head = f"{step}: precision as asked{'' if first else ' too'} on {ranks}{where}{loss}"
        else:
            head = f"{step} proven in force{'' if first else ' too'} on {ranks}"
        notes = f", after {seen.skipped} skipped" if seen.skipped else ""
        named = {"frozen parts": frozen_share(seen), "optimizer states": ", ".join(quantized_states(seen))}
        if self.in_force and any(named.values()):
            notes += f" ({'; '.join(f'{name}: {found}' for name, found in named.items() if found)})"
        if self.unobserved and self.in_force:
            notes += f", except for what could not be observed: {', '.join(self.unobserved)}"
        title = f"{head}{notes} · recipe {self.plan.policy.name}"
        lines = [title] if width is None else _broken(title, max(width, NARROWEST), indent="  ")
        return "\n".join([*lines, *_lines(self.rows, width)])

    def entry(self) -> dict[str, Any]:
        """Return what the proof file has about one of several optimizers."""
        seen = self.observed
        return {
            "optimizer": seen.optimizer if seen else "",
            "step": seen.step if seen else None,
            "verdict": self.verdict,
            "failures": list(map(str, self.failures)),
            "rows": [row.data() for row in self.rows],
            "observed": seen.plain() if seen else None,
        }

    def write(self, path: str | Path, optimizers: Sequence[Proof] = (), run: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write the proof as JSON. Raises `OSError`.

        optimizers: the proofs of all optimizers. run: facts about the steps of each optimizer up to now.
        """
        data = {
            "version": 1,
            "verdict": self.verdict,
            "recipe": self.plan.policy.name,
            "policy": self.plan.policy.settings(),
            "config": self.plan.config,
            "strategy": self.plan.strategy,
            "processes": self.plan.processes,
            "enforce": self.plan.enforce,
            "failures": list(map(str, self.failures)),
            "rows": [row.data() for row in self.rows],
            "observed": self.observed.plain() if self.observed else None,
            "optimizers": [each.entry() for each in optimizers],
            "run": list(run),
        }
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _lines(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Yield rows as lines: name, what was found, verdict. What a terminal is too narrow for goes on below itself."""
    label = max([14, *(len(row.name) for row in rows)]) if width is not None else 14
    found = max((len(row.found) for row in rows if len(row.found) <= FOUND_WIDTH), default=0)
    if width is None:
        yield from (f"  {row.name:14} {row.found:{found}}  {row.verdict_text}".rstrip() for row in rows)
        return
    rest = max(width, NARROWEST) - label - 5
    verdicts = max((len(row.verdict_text) for row in rows), default=0)
    found = min(max(map(len, (row.found for row in rows)), default=0), max(rest - verdicts, rest * 3 // 5))
    for row in rows:
        columns = (_broken(row.found, found), _broken(row.verdict_text, rest - found))
        for number, (left, right) in enumerate(itertools.zip_longest(*columns, fillvalue="")):
            name = "" if number else row.name
            yield f"  {name:{label}} {left:{found}}  {right}".rstrip()


def _broken(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
