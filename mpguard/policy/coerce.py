"""What people write, as what a field of a policy holds; or an error that says what it may be."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from mpguard.core.errors import PolicyError, near
from mpguard.policy.dtype import Dtype


def coerce(name: str, value: Any, declared: Any) -> Any:
    """The value in the type that its field declares; raises `PolicyError` where it is none of it."""
    allowed = _alternatives(declared)
    for kind in allowed:
        converted = _convert(value, kind)
        if converted is not _NO:
            return converted
    shown = ", ".join(sorted({_kind_name(kind) for kind in allowed}))
    hint = ""
    if name == "fp8" and value in ("e5m2", True):
        hint = (
            "; pure E5M2 training is refused by Transformer Engine"
            if value == "e5m2"
            else '; say which format, such as "hybrid"'
        )
    elif isinstance(value, str):
        words = [kind for kind in allowed if isinstance(kind, str)]
        nearest = near(value, words)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise PolicyError(f"{name} is {value!r}; it must be {shown}{hint}")


_NO = object()


def _alternatives(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [alternative for part in typing.get_args(kind) for alternative in _alternatives(part)]
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    return [kind]


def _kind_name(kind: Any) -> str:
    if isinstance(kind, str):
        return f'"{kind}"'
    return {type(None): "None", bool: "True or False", Dtype: "a dtype"}.get(kind, getattr(kind, "__name__", str(kind)))


def _convert(value: Any, kind: Any) -> Any:
    """The value as one alternative of a field's type, or `_NO`."""
    if isinstance(kind, str):
        return kind if isinstance(value, str) and value.lower() == kind else _NO
    if kind is type(None):
        return None if value is None else _NO
    if kind is Dtype:
        if isinstance(value, Dtype):
            return value
        if isinstance(value, str) or type(value).__module__ == "torch":
            return Dtype.parse(str(value))
        return _NO
    if kind is bool:
        return value if isinstance(value, bool) else _NO
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    if kind is float:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _NO
    if kind is str:
        return value if isinstance(value, str) else _NO
    if typing.get_origin(kind) is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        return _NO
    raise AssertionError(f"no conversion for {kind}")
