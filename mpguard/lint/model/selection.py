"""Which rules run: `select`, `extend-select`, `ignore`, from the settings or the command line.

A selector is a code (`MPG201`), a prefix of codes (`MPG2`) or `ALL`. Where two cover a code, the
longer one decides, and `ignore` where they are equal. `--select` replaces the settings' select,
extend-select and ignore. A retired code stands for its successor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from mpguard.core.errors import SettingsError, near
from mpguard.core.settings import ToolSettings
from mpguard.lint.model.retired import RETIRED, successors
from mpguard.lint.model.rule import BaseRule
from mpguard.lint.source.files import matches

Rules = Mapping[str, type[BaseRule]]
#: The number of characters of a code that name its group.
_GROUP = len("MPG1")


@dataclasses.dataclass(frozen=True)
class Selectors:
    """The selectors of the command line. select None: it has none, and those of the settings apply."""

    select: tuple[str, ...] | None = None
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    preview: bool = False


@dataclasses.dataclass(frozen=True)
class Selection:
    """The codes that are on. requested: those of them that a selector names, and that are not on by default alone."""

    codes: frozenset[str]
    requested: frozenset[str]

    def without(self, codes: Iterable[str]) -> Selection:
        """Return the selection without some codes."""
        left = self.codes - set(codes)
        return Selection(left, self.requested & left)


def selection(rules: Rules, settings: ToolSettings, given: Selectors) -> Selection:
    """Return the rules for the files of some settings. Raises `SettingsError` for a selector that covers no rule."""
    if given.select is None:
        select, extend, ignore = settings.select, settings.extend_select, settings.ignore
    else:
        select, extend, ignore = given.select, (), ()
    per_file = tuple(selector for selectors in settings.per_file_ignores.values() for selector in selectors)
    for origin, selectors in (
        (str(settings.source), (*(settings.select or ()), *settings.extend_select, *settings.ignore, *per_file)),
        ("--select", given.select or ()),
        ("--extend-select", given.extend_select),
        ("--ignore", given.ignore),
    ):
        for selector in selectors:
            check(selector, rules, origin)
    selected = resolved((*(select or ()), *extend, *given.extend_select), rules)
    ignored = resolved((*ignore, *given.ignore), rules)
    codes: set[str] = set()
    requested: set[str] = set()
    for code, rule in rules.items():
        by = max((_length(s) for s in selected if covers(s, code)), default=-1)
        if by < 0 and (select is not None or rule.preview):
            continue
        if rule.preview and not (given.preview or settings.preview) and by < len(code):
            continue
        if max((_length(s) for s in ignored if covers(s, code)), default=-1) >= max(by, 0):
            continue
        codes.add(code)
        if by >= 0:
            requested.add(code)
    return Selection(frozenset(codes), frozenset(requested))


def ignored_in(path: str, rules: Rules, settings: ToolSettings) -> frozenset[str]:
    """Return the codes that `per-file-ignores` ignores in one file. `!pattern` applies to all other files."""
    codes: set[str] = set()
    for pattern, selectors in settings.per_file_ignores.items():
        if matches((pattern.removeprefix("!"),), settings.root, path) != pattern.startswith("!"):
            ignored = resolved(selectors, rules)
            codes.update(code for code in rules if any(covers(selector, code) for selector in ignored))
    return frozenset(codes)


def resolved(selectors: Iterable[str], rules: Iterable[str]) -> tuple[str, ...]:
    """Return selectors in which successors stand for retired codes, and for prefixes of retired codes alone."""
    found: list[str] = []
    for selector in selectors:
        retired = retired_by(selector, rules)
        found += sorted(successors(retired)) if retired else (selector,)
    return tuple(found)


def retired_by(selector: str, rules: Iterable[str]) -> list[str]:
    """Return the retired codes that a selector names; none if it covers a rule."""
    if selector in RETIRED:
        return [selector]
    retired = [code for code in RETIRED if covers(selector, code)]
    return [] if not retired or any(covers(selector, code) for code in rules) else retired


def check(selector: str, rules: Rules, origin: str) -> None:
    """Raise `SettingsError` for a selector that covers no rule; the message lists similar ones."""
    if any(covers(selector, code) for code in (*rules, *RETIRED)):
        return
    raise SettingsError(f"{origin}: there is no rule `{selector}`{suggestion(selector, rules)}")


def suggestion(given: str, rules: Rules) -> str:
    """Return a clause that lists similar rules: by code, or by a name that was given instead of a code."""
    by_name = {rule.name: code for code, rule in rules.items()}
    codes = [by_name[name] for name in near(given.lower(), by_name)]
    if given.upper().startswith("MPG") or not codes:
        group = given.upper()[:_GROUP]  # digits are similar in all groups: suggest only codes of the same one
        codes = near(given.upper(), [code for code in rules if len(group) == _GROUP and code.startswith(group)])
    if not codes:
        return "; `mpguard rule --all` lists them"
    return f"; did you mean {' or '.join(f'`{code}` ({rules[code].name})' for code in codes)}?"


def covers(selector: str, code: str) -> bool:
    """True if a selector (a code, a prefix or ALL) covers a code."""
    return selector == "ALL" or (code.startswith(selector) and not code[len(selector) : len(selector) + 1].isalpha())


def _length(selector: str) -> int:
    return 0 if selector == "ALL" else len(selector)
