"""Convert what a user writes to the type of a policy field, or raise an error that lists the allowed values."""

from __future__ import annotations

import functools
import types
import typing
from typing import Any, Literal

from mpguard.core.errors import PolicyError, near
from mpguard.policy.dtype import Dtype
from mpguard.policy.fp8_modules import ModuleRecipe, module_recipes


def coerce(name: str, value: Any, declared: Any) -> Any:
    """Return a value in the declared type of its field. Raises `PolicyError` if it cannot be converted.

    name: the field, for the message. declared: its type annotation.
    """
    if declared == tuple[ModuleRecipe, ...]:
        return module_recipes(value)
    allowed = _alternatives(declared)
    for kind in allowed:
        converted = _convert(value, kind)
        if converted is not _NOT_CONVERTIBLE:
            return converted
    shown = ", ".join(sorted({_kind_name(kind) for kind in allowed}))
    hint = ""
    if name == "fp8" and value in ("e5m2", True):
        hint = (
            "; pure E5M2 training is refused by Transformer Engine"
            if value == "e5m2"
            else '; name a format, such as "hybrid"'
        )
    elif isinstance(value, str):
        words = [kind for kind in allowed if isinstance(kind, str)]
        nearest = near(value, words)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise PolicyError(f"{name} is {value!r}; it must be {shown}{hint}")


#: The result of `_convert` for a value of another type; None is a value.
_NOT_CONVERTIBLE = object()


@functools.cache
def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types and the literal values that a type annotation allows."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(alternative for part in typing.get_args(kind) for alternative in _alternatives(part))
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return (kind,)


def _kind_name(kind: Any) -> str:
    if isinstance(kind, str):
        return f'"{kind}"'
    if typing.get_origin(kind) is tuple:
        return "a list of texts"
    return {type(None): "None", bool: "True or False", Dtype: "a dtype"}.get(kind, getattr(kind, "__name__", str(kind)))


def _convert(value: Any, kind: Any) -> Any:
    """Return the value as one alternative of a field's type, or `_NOT_CONVERTIBLE`."""
    if isinstance(kind, str):
        return kind if isinstance(value, str) and value.lower() == kind else _NOT_CONVERTIBLE
    if kind is type(None):
        return None if value is None else _NOT_CONVERTIBLE
    if kind is Dtype:
        if isinstance(value, Dtype):
            return value
        if isinstance(value, str) or type(value).__module__ == "torch":
            return Dtype.parse(str(value))
        return _NOT_CONVERTIBLE
    if kind is bool:
        return value if isinstance(value, bool) else _NOT_CONVERTIBLE
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else _NOT_CONVERTIBLE
    if kind is float:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _NOT_CONVERTIBLE
    if kind is str:
        return value if isinstance(value, str) else _NOT_CONVERTIBLE
    if typing.get_origin(kind) is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        return _NOT_CONVERTIBLE
    raise AssertionError(f"no conversion for {kind}")
