"""The messages that a run prints."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from mpguard.core.console import columns
from mpguard.core.documentation import page_url
from mpguard.core.errors import NotInForce, NotProven
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import AUTO
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.verdict import NOT_PROVEN, Refusal

#: How to continue in spite of a failure.
OVERRIDE = "  (use --enforce warn to continue)"

#: How a notebook or a test session goes on after a refusal.
BEGIN_AGAIN = "To begin again in this process, call mpguard.activate(), then build a new model and a new optimizer"


def header(plan: Plan) -> str:
    """Return the header line, such as `mpguard 0.1.0 · recipe bf16_mixed · ddp · 2 processes · no GPU`."""
    from mpguard.core.version import __version__

    parts = [f"mpguard {__version__}", f"recipe {plan.policy.name}{_reason(plan.policy)}"]
    if plan.strategy:
        parts.append(plan.strategy)
    if plan.processes:
        parts.append(f"{plan.processes} process{'es' if plan.processes > 1 else ''}")
    if plan.policy.fp8_emulate and plan.policy.low_bit_recipe:
        what = dict.fromkeys(hardware.NEEDS[recipe].what for recipe in plan.policy.recipes)
        parts.append(f"{' and '.join(what)} emulated: its numbers, not its speed")
    here = hardware.detect()
    parts.append(str(here) if here.gpu is not None else hardware.other_accelerator() or str(here))
    return _in_lines(parts, columns(sys.stderr))


def _in_lines(parts: Sequence[str], width: int | None) -> str:
    """Return the parts of the header in lines of at most `width` characters; all but the first are indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} · {part}"
        if width is None or len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def _reason(policy: Policy) -> str:
    """Return in parentheses why `auto` has selected its recipe; empty for other policies."""
    if not policy.name.startswith(AUTO):
        return ""
    here = hardware.detect()
    found, reason = hardware.best(here)
    return f" ({reason})" if policy.name == f"{AUTO}{found}" else f" ({hardware.best(here.cpu)[1]})"


def with_page(text: str, page: str) -> str:
    """Return a line that refers to a page. page: the code of a rule that reports the same in source code, or its name.

    The name is that of a page of the documentation, without `.md`.
    """
    rule = page.startswith("MPG")
    url = page_url(f"rules/{page}" if rule else page)
    see = f"`mpguard rule {page}`" + (f", {url}" if url else "") if rule else url or f"docs/{page}.md"
    return f"mpguard: {text}. See {see}"


def not_in_force(refusal: Refusal, *, overridden: bool = True, again: bool = False) -> NotInForce:
    """Return the exception of a refusal. overridden: True if `--enforce warn` continues in spite of it.

    again: True if the script, a notebook or a test goes on after it was raised.
    """
    if again:
        first = f"this optimizer was refused before, and is not stepped again: {refusal.summary}"
        return NotInForce(f"{first}. {BEGIN_AGAIN}", verdict=refusal.verdict)
    failures = [failure.data() for failure in refusal.published()]
    override = OVERRIDE if overridden else ""
    return NotInForce(str(refusal), verdict=refusal.verdict, override=override, failures=failures)


def failure_message(error: NotInForce) -> str:
    """Return what an exception prints: `not in force: ...`, or `not proven: ...`."""
    return str(error) if error.verdict == NOT_PROVEN else f"{error.verdict}: {error}"


def warn_not_proven(message: str) -> None:
    """Warn `NotProven`, never as an exception: a script's `warnings.simplefilter("error")` does not apply to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", NotProven)
        warnings.warn(NotProven(message), stacklevel=4)  # where `Guard.fail` was called
