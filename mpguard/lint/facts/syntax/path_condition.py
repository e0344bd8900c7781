"""Path conditions: the conditions over flags under which a record is executed.

A condition is a small formula over *flags*. A flag is the last name of a dotted path (`args.amp`, `self.args.amp` and
`amp` are one flag), or the text of what is compared or called. A path condition is the conjunction of the conditions on
the way to a record. A flag has one value in the whole run, so two events belong to the same run only if one assignment
of the flags satisfies both path conditions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

#: What is known of a flag, by its name: None -> its truth value; a constant -> whether the flag equals it; `_IS` -> the
#: constant that it equals.
FlagValues = Mapping[str, Mapping[object, object]]
_IS = object()
#: A path condition of more conditions than this is not followed further; its value is unknown.
MOST_CONDITIONS = 40
#: A formula of more flags than this becomes one opaque flag: named conditions over named conditions double in size each
#: time.
MOST_FLAGS = 64


@dataclasses.dataclass(frozen=True)
class Flag:
    """The condition that a flag is truthy; with `equals`, that it equals this constant."""

    name: str
    equals: object = None
    leaves = 1

    def value(self, known: FlagValues) -> bool | None:
        """Return the truth value under an assignment of flags; None if it is undecided."""
        values = known.get(self.name)
        if values is None:
            return None
        if self.equals in values:
            return bool(values[self.equals])
        if _IS in values:  # equal to a constant: it is as truthy as that constant, and equals no other
            return bool(values[_IS]) if self.equals is None else False
        return False if values.get(None) is False and bool(self.equals) else None


@dataclasses.dataclass(frozen=True)
class Not:
    """Negation."""

    inner: Condition

    @functools.cached_property
    def leaves(self) -> int:
        """The number of occurrences of flags in the formula."""
        return self.inner.leaves

    def value(self, known: FlagValues) -> bool | None:
        """Return the truth value under an assignment of flags; None if it is undecided."""
        found = self.inner.value(known)
        return None if found is None else not found


@dataclasses.dataclass(frozen=True)
class _Parts:
    parts: tuple[Condition, ...]

    @functools.cached_property
    def leaves(self) -> int:
        """The number of occurrences of flags in the formula."""
        return sum(part.leaves for part in self.parts)


class All(_Parts):
    """Conjunction."""

    def value(self, known: FlagValues) -> bool | None:
        """Return the truth value under an assignment of flags; None if it is undecided."""
        values = [part.value(known) for part in self.parts]
        return False if False in values else None if None in values else True


class Any(_Parts):
    """Disjunction."""

    def value(self, known: FlagValues) -> bool | None:
        """Return the truth value under an assignment of flags; None if it is undecided."""
        values = [part.value(known) for part in self.parts]
        return True if True in values else None if None in values else False


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A condition with a known truth value."""

    truth: bool
    leaves = 1

    def value(self, known: FlagValues) -> bool | None:  # noqa: ARG002
        """Return the known truth value."""
        return self.truth


Condition = Flag | Not | All | Any | Fixed


def negated(condition: Condition) -> Condition:
    """Return the negation of a condition, in negation normal form."""
    if isinstance(condition, Not):
        return condition.inner
    if isinstance(condition, Fixed):
        return Fixed(not condition.truth)
    if isinstance(condition, All):
        return Any(tuple(negated(part) for part in condition.parts))
    if isinstance(condition, Any):
        return All(tuple(negated(part) for part in condition.parts))
    return Not(condition)


def equality(flag: str, value: object) -> Condition:
    """Return the condition that a flag has a value."""
    if value is None or isinstance(value, bool):
        return Flag(flag) if value else negated(Flag(flag))
    return Flag(flag, value)


def membership(flag: str, values: Sequence[object]) -> Condition:
    """Return the condition that a flag has one of several values."""
    parts = tuple(equality(flag, value) for value in values)
    return parts[0] if len(parts) == 1 else Any(parts)


class PathCondition(frozenset[Condition]):
    """A conjunction of conditions; the empty set is always true."""

    def given(self, *conditions: Condition) -> PathCondition:
        """Return the conjunction with more conditions."""
        added: list[Condition] = []
        for condition in conditions:
            added += condition.parts if isinstance(condition, All) else (condition,)
        return PathCondition(self | {c for c in added if c != Fixed(True)})

    def joined(self, *others: PathCondition) -> PathCondition:
        """Return the conjunction with other path conditions."""
        return _joined(self, others[0]) if len(others) == 1 else PathCondition(self.union(*others))

    @functools.cached_property
    def possible(self) -> bool:
        """True if some assignment of the flags satisfies all conditions, as far as unit propagation can decide."""
        return _consistent(self)

    def flags(self) -> set[str]:
        """Return the names of all flags in it."""
        return {flag.name for condition in self for flag in _flags(condition)}

    def words(self) -> set[str]:
        """Return the names of all flags in it, and the strings that they are compared with."""
        found = [flag for condition in self for flag in _flags(condition)]
        return {flag.name for flag in found} | {flag.equals for flag in found if isinstance(flag.equals, str)}


ALWAYS = PathCondition()


def compatible(*guards: PathCondition) -> bool:
    """True if the path conditions can hold in the same run."""
    joined = guards[0].joined(*guards[1:])
    return not joined or joined.possible


def implies(guard: PathCondition, other: PathCondition) -> bool:
    """True if `other` holds whenever `guard` does."""
    return all(condition in guard or not guard.given(negated(condition)).possible for condition in other)


def holds(guard: PathCondition, values: Mapping[str, object]) -> bool:
    """True if a path condition holds for values of flags."""
    known = {name: {value: True, None: bool(value), _IS: value} for name, value in values.items()}
    return all(condition.value(known) for condition in guard)


def _flags(condition: Condition) -> Iterable[Flag]:
    """Yield the flags of a condition."""
    if isinstance(condition, Flag):
        yield condition
    elif isinstance(condition, Not):
        yield from _flags(condition.inner)
    elif isinstance(condition, (All, Any)):
        for part in condition.parts:
            yield from _flags(part)


@functools.lru_cache(1 << 14)
def _joined(one: PathCondition, other: PathCondition) -> PathCondition:
    """Return the conjunction of two path conditions."""
    if other <= one:
        return one
    return other if one <= other else PathCondition(one.union(other))


@functools.lru_cache(1 << 14)
def _consistent(conditions: PathCondition) -> bool:
    """True unless unit propagation finds a contradiction.

    Literals that the conditions force are assigned until none is new or a condition is false.
    """
    known: dict[str, dict[object, object]] = {}
    pending = list(conditions)
    while True:
        forced = False
        left: list[Condition] = []
        for condition in pending:
            value = condition.value(known)
            if value is False:
                return False
            if value is True:
                continue
            literal = _literal(condition, known)
            if literal is None:
                left.append(condition)
            elif isinstance(literal, All):
                left += literal.parts
                forced = True
            else:
                flag, holds = literal
                known.setdefault(flag.name, {})[flag.equals] = holds
                if holds and flag.equals is not None:
                    known[flag.name][_IS] = flag.equals
                forced = True
        pending = left
        if not forced:
            return True


def _literal(condition: Condition, known: FlagValues) -> tuple[Flag, bool] | All | None:
    """Return what an undecided condition forces: a flag with its truth value, a conjunction, or None."""
    if isinstance(condition, Flag):
        return condition, True
    if isinstance(condition, Not) and isinstance(condition.inner, Flag):
        return condition.inner, False
    if isinstance(condition, All):
        return condition
    if isinstance(condition, Any):
        undecided = [part for part in condition.parts if part.value(known) is None]
        if len(undecided) == 1:
            return _literal(undecided[0], known)
    return None
