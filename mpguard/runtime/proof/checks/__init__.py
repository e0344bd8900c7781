"""The checks of the proof: each compares one fact with the plan. `compare` runs all of them.

    processes  the engine and the number of processes
    compute    what was computed: matmuls, attention, frozen parts, FP32 modules, TF32
    fp8        FP8 layers
    gradients  gradients, accumulation, reduction, loss scale
    optimizer  the weights that the optimizer updates, and its states
    model      parameters, buffers, output, compilation
    common     shares, and numbers and names as text

A check returns its row, or rows, with the verdict, the allowance that it needs and the advice. To add one: a function
in the module of its subject, and its line in `CHECKS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from mpguard.policy.allow import LOCAL_SGD, RANKS_DIFFER
from mpguard.runtime.containment import has_failed
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks import compute, fp8, gradients, model, optimizer, processes
from mpguard.runtime.proof.checks.common import format_allowance
from mpguard.runtime.proof.checks.processes import BY_SCRIPT
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.reductions import BETWEEN_RANKS
from mpguard.runtime.proof.verdict import IN_FORCE, NOT_PROVEN, Failure, Row, Verdict, not_observed, verdict_of

#: Rows without which a low-precision run is not proven.
REQUIRED_ROWS = ("compute", "engine", "reduction")

#: The checks in the order of their rows, by the name of the (first) row. The name is that of an error in `Observed`.
CHECKS: dict[str, Callable[[Observed, Plan], Row | list[Row]]] = {
    "engine": processes.engine,
    "processes": processes.processes,
    "parameters": model.parameters,
    "compute": compute.compute,
    "fp32 by the script": compute.scripted,
    "wide operators": compute.wide_operators,
    "attention": compute.attention,
    "frozen parts": compute.frozen,
    "evaluation": compute.evaluation,
    "saved activations": compute.saved_activations,
    "casts": compute.foreign_casts,
    "fp8": fp8.fp8,
    "fp32 modules": compute.fp32_modules,
    "gradients": gradients.gradients,
    "accumulation": gradients.accumulation,
    "reduction": gradients.reduction,
    "reduced in fewer bits": gradients.reduced_narrower,
    "coverage": gradients.coverage,
    "optimizer": optimizer.optimizer,
    "updates by the script": optimizer.updated_by_script,
    "scaler": gradients.scaler,
    "buffers": model.buffers,
    "output": model.output,
    "tf32": compute.tf32,
    "compile": model.compiled,
    "attention mask": model.attention_mask,
    "patches": model.not_applied,
    "kept in bf16": model.kept,
}


def compare(seen: Observed, plan: Plan) -> tuple[Row, ...]:
    """Return one row per fact. Does not need torch."""
    rows: list[Row] = []
    for name, check in CHECKS.items():
        found: Row | list[Row] = []
        if name not in seen.errors:
            with seen.observing(name):
                found = check(seen, plan)
        if name in seen.errors:
            found = not_observed(name)
        rows += found if isinstance(found, list) else [found]
    rows += [Row(field, f"off: {reason}", "", Verdict.NOT_ASKED) for field, reason in seen.left_out.items()]
    return (*rows, *_not_needed(rows, plan))


def _not_needed(rows: Iterable[Row], plan: Plan) -> list[Row]:
    """Return a row for the allowances that no row needs. `unsynchronized` decides about local SGD."""
    needed = {name for row in rows for name in row.allowed.split("; ")}
    names = [str(each) for each in plan.allow if each.kind not in (LOCAL_SGD, RANKS_DIFFER) and str(each) not in needed]
    return [Row("allow", f"not needed: {', '.join(names)}", "", Verdict.NOT_ASKED)] if names else []


def trained_alone(rows: Iterable[Row], missing: str) -> tuple[Row, ...]:
    """Return the rows of an optimizer that other ranks have never stepped: its gradients need no reduction.

    missing: the names of these ranks.
    """
    found = {
        "engine": f"none: {missing} never stepped it",
        "reduction": "none: it is trained on this rank alone",
    }
    return tuple(
        dataclasses.replace(row, found=found[row.name], verdict=Verdict.NOT_ASKED) if row.name in found else row
        for row in rows
    )


def between_ranks(rows: Iterable[Row], everywhere: Sequence[Failure]) -> tuple[Row, ...]:
    """Return rows with what only showed between ranks: without a wrapper, if the script reduces or nothing does."""
    names = {each.row for each in everywhere}
    if BETWEEN_RANKS not in names and ("engine" in names or has_failed()):
        return tuple(rows)
    rows = list(rows)
    for number, row in enumerate(rows):
        if (row.name, row.verdict) == ("engine", Verdict.UNPROVEN):
            differ = BETWEEN_RANKS in names
            verdict, found = (Verdict.WRONG, row.found) if differ else (Verdict.AS_ASKED, BY_SCRIPT)
            rows[number] = dataclasses.replace(row, verdict=verdict, found=found)
    return tuple(rows)


def unsynchronized(
    rows: Iterable[Row], failures: Sequence[Failure], plan: Plan
) -> tuple[tuple[Row, ...], list[Failure]]:
    """Return rows and failures of all ranks where ranks may step without reducing each time: `allow: local_sgd`."""
    rows = between_ranks(rows, failures)
    if not plan.allowed(LOCAL_SGD):
        return rows, list(failures)
    others = [failure for failure in failures if failure.row != BETWEEN_RANKS]
    if len(others) < len(failures):
        found = "the gradients differ between ranks"
        row = Row("local sgd", found, "reduced over all", Verdict.ALLOWED, LOCAL_SGD)
    elif any(row.allowed == LOCAL_SGD for row in rows):
        return rows, others
    else:
        row = Row("allow", f"not needed: {LOCAL_SGD}", "", Verdict.NOT_ASKED)
    return (*rows, row), others


def failures(rows: Iterable[Row], plan: Plan, seen: Observed) -> list[Failure]:
    """Return the failures of wrong rows; if there are none, those of the rows that must be observed and were not."""
    rows = list(rows)
    allowed = tuple(format_allowance(each.kind, each.value) for each in plan.allow)
    where = f" (in the step of {seen.optimizer}, which updates {seen.updates})" if seen.updates else ""
    wrong = [row.failure() for row in rows if row.verdict is Verdict.WRONG]
    wrong = [dataclasses.replace(each, text=each.text + where) for each in wrong]
    wrong = [dataclasses.replace(each, allow=(*allowed, *each.allow)) if each.allow else each for each in wrong]
    if wrong or has_failed():
        return wrong
    excused = ("compute",) if seen.inferred else ()  # that operators cannot be recorded must not end a training
    required = REQUIRED_ROWS if plan.policy.low_precision else ("compute",) if compute.is_mostly_unknown(seen) else ()
    return [row.failure() for row in _missing(rows, required) if row.name not in excused]


def _missing(rows: Iterable[Row], required: Collection[str]) -> list[Row]:
    """Return the rows that must be observed, and were not."""
    return [row for row in rows if row.name in required and row.verdict is Verdict.UNPROVEN]


def verdict_on(rows: Iterable[Row], plan: Plan, failures: Iterable[Failure]) -> str:
    """Return `verdict_of` the failures; `not proven` if a required row is missing because mpguard's own code failed."""
    verdict = verdict_of(failures)
    required = REQUIRED_ROWS if plan.policy.low_precision else ()
    return NOT_PROVEN if verdict == IN_FORCE and _missing(rows, required) else verdict
