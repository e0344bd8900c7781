"""Options and fields by their names: the values that they can have, and their defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.records import Call

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: Functions that define an option of argparse or click.
ADD_OPTION = ("add_argument", "option", "add_option")


def option_names(call: Call) -> list[str]:
    """Return the names of an option of argparse or click, as attributes: `--amp-dtype` is `amp_dtype`."""
    flags = [flag[0] for each in call.positional if (flag := constant(each)) is not None]
    return [flag.lstrip("-").replace("-", "_") for flag in flags if isinstance(flag, str)]


def destination(call: Call) -> str:
    """Return the name of an option in the namespace, of `dest` or its longest name; "" if it is unknown."""
    named = constant(call.keywords.get("dest"))
    return str(named[0]) if named is not None else max(option_names(call), key=len, default="")


def option_defaults(name: str, facts: ProgramView) -> set[tuple[object, ...] | None]:
    """Return the defaults of an option, a field or a parameter of this name, in a file and in what it imports.

    Each is a tuple of one constant, or None if it is none.
    """
    found: set[tuple[object, ...] | None] = set()
    for each in (facts, *facts.imported_modules()):
        for call in each.calls.get("add_argument", ()):
            if name in option_names(call):
                found.add(constant(call.keywords.get("default")))
        for scope in each.scopes:
            fields = scope.bindings.get(name, ()) if scope.kind == "class" else ()
            found |= {_default(binding.value) for binding in fields}
            found |= {constant(param.default) for param in scope.params if param.name == name}
    return found


def option_values(name: str, facts: ProgramView) -> list[str]:
    """Return the strings that an option or field of this name can be: its `choices`, and its default.

    The option is one of argparse or click, in the file or in what it imports.
    """
    found: list[object] = []
    for each in (facts, *facts.imported_modules()) if name else ():
        each.need_uses(name)
        for call in (call for way in ADD_OPTION for call in each.calls.get(way, ())):
            if name in option_names(call):
                choices = literal_choices(call)
                found += choices[1] if choices is not None else []
                found += constant(call.keywords.get("default")) or ()
        for scope in each.scopes:
            for binding in scope.bindings.get(name, ()) if scope.kind == "class" else ():
                found += _default(binding.value) or ()
    return [value for value in dict.fromkeys(found) if isinstance(value, str)]


def _default(field: cst.CSTNode | None) -> tuple[object, ...] | None:
    """Return the default of a field of a class: `name: str = "bf16"`, `name: str = field(default="bf16")`."""
    if isinstance(field, cst.Call) and dotted(field.func).rsplit(".", 1)[-1] in ("field", "Field", "HfArg"):
        given = (each.value for each in field.args if each.keyword is not None and each.keyword.value == "default")
        return constant(next(given, None))
    return constant(field)


def literal_choices(call: Call) -> tuple[str, list[str]] | None:
    """Return the name in the namespace and the literal choices of an option; None if it has none."""
    given = call.keywords.get("choices")
    kind = call.keywords.get("type")
    if isinstance(kind, cst.Call) and dotted(kind.func).rsplit(".", 1)[-1] == "Choice" and kind.args:
        given = kind.args[0].value  # of click
    if not isinstance(given, (cst.List, cst.Tuple)) or not option_names(call):
        return None
    values = [constant(element.value) for element in given.elements]
    texts = [value[0] for value in values if value is not None and isinstance(value[0], str)]
    return (destination(call), texts) if texts and len(texts) == len(values) else None
