"""The lattice of abstract values: what an expression may be, each alternative under its path condition.

`SyntaxView.evaluate` returns *alternatives*: `torch.float16 if args.fp16 else torch.float32` is float16 under the flag
`fp16` and float32 under its negation. `UNKNOWN` is the top element: it may be any value, and no rule reports it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.dtypes import AnyDtype
from mpguard.lint.facts.syntax.path_condition import ALWAYS, MOST_CONDITIONS, Flag, PathCondition
from mpguard.lint.facts.syntax.records import Call, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.syntax.view import SyntaxView


@dataclasses.dataclass(frozen=True)
class DtypeValue:
    """A torch dtype."""

    dtype: AnyDtype


@dataclasses.dataclass(frozen=True)
class Constant:
    """A literal, or what it is bound to."""

    value: object


@dataclasses.dataclass(frozen=True)
class ConfigValue(Constant):
    """A value in a config file, in the place of which another file or a command line may give another one."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """An object of a library, by its full dotted name."""

    path: str


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function or method of the linted tree."""

    scope: Scope
    facts: SyntaxView


@dataclasses.dataclass(frozen=True, eq=False)
class Class:
    """A class of the linted tree."""

    scope: Scope
    facts: SyntaxView


@dataclasses.dataclass(frozen=True, eq=False)
class Object:
    """An instance of a known kind; `call` creates it, `cls` is its class if that is in the tree."""

    kind: str
    call: Call | None = None
    path: str = ""
    cls: Scope | None = None
    facts: SyntaxView | None = None
    prepared: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A method of an object of a known kind, or an attribute that is set nowhere in the analysed files."""

    owner: Object
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class TupleValue:
    """A tuple or list; each part is evaluated on demand."""

    parts: tuple[Callable[[], Alternatives], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class DictValue:
    """A dict with constant keys; each value is evaluated on demand."""

    parts: tuple[tuple[object, Callable[[], Alternatives]], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A module of the linted tree."""

    facts: SyntaxView


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()
#: The condition that a config gives another value than the one of the project.
ANOTHER_CONFIG = Flag("another config")
Atom = DtypeValue | Constant | Ref | Function | Class | Object | Method | TupleValue | DictValue | Module | _Unknown


@dataclasses.dataclass(frozen=True, eq=False)
class Alternative:
    """One abstract value and the path condition under which an expression has it."""

    guard: PathCondition
    atom: Atom


Alternatives = tuple[Alternative, ...]
NOTHING_KNOWN: Alternatives = (Alternative(ALWAYS, UNKNOWN),)


def tuple_of(*atoms: Atom) -> TupleValue:
    """Return the tuple of these values."""

    def part(atom: Atom) -> Callable[[], Alternatives]:
        return lambda: (Alternative(ALWAYS, atom),)

    return TupleValue(tuple(map(part, atoms)))


def ref(path: str) -> Atom:
    """Return the abstract value of a full dotted library name: a dtype, or a reference by its canonical name."""
    dtype = api_names.DTYPES.get(path)
    return DtypeValue(dtype) if dtype is not None else Ref(api_names.canonical(path))


def constants_of(alternatives: Alternatives) -> list[object]:
    """Return the constants among alternatives; empty if there is anything else among them, or a setting of a file."""
    found = [each.atom.value for each in alternatives if type(each.atom) is Constant]
    return found if len(found) == len(alternatives) else []


def are_text_and_dtype(one: Alternatives, other: Alternatives) -> bool:
    """True for texts on one side, and dtypes of torch on the other: they are never equal."""
    kinds = [{type(getattr(each.atom, "value", each.atom)) for each in side} for side in (one, other)]
    return kinds in ([{str}, {DtypeValue}], [{DtypeValue}, {str}])


def restrict(alternatives: Alternatives, guard: PathCondition) -> Alternatives:
    """Return the alternatives that remain under a further path condition."""
    if not guard:
        return alternatives
    found: list[Alternative] = []
    for each in alternatives:
        both = each.guard.joined(guard)
        if len(both) > MOST_CONDITIONS:
            return NOTHING_KNOWN
        if both.possible:
            found.append(each if both is each.guard else Alternative(both, each.atom))
    return tuple(found)


def element_at(alternatives: Alternatives, index: tuple[int, ...]) -> Alternatives:
    """Return the alternatives of the element at an index of a tuple or list."""
    for place in index:
        found: list[Alternative] = []
        for each in alternatives:
            if isinstance(each.atom, TupleValue) and -len(each.atom.parts) <= place < len(each.atom.parts):
                found += restrict(each.atom.parts[place](), each.guard)
            else:
                found.append(Alternative(each.guard, UNKNOWN))
        alternatives = tuple(found)
    return alternatives
