"""The modules and parameters of models, walked once per check: each walk of a large model takes a millisecond."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    _Modules = Sequence[tuple[str, nn.Module]]
    _Parameters = Sequence[tuple[str, nn.Parameter]]


class _Walked(threading.local):
    """The modules and parameters by the id of a model; None outside of `walking_once`."""

    modules: dict[int, _Modules] | None = None
    parameters: dict[int, _Parameters] | None = None


_walked = _Walked()


@contextlib.contextmanager
def walking_once() -> Iterator[None]:
    """Walk each model once in the block, which must keep the models and not change them."""
    _walked.modules, _walked.parameters = {}, {}
    try:
        yield
    finally:
        _walked.modules = _walked.parameters = None


def named_modules(model: nn.Module) -> _Modules:
    """Return the modules of a model with their names, each once."""
    if _walked.modules is None:
        return list(model.named_modules())
    if id(model) not in _walked.modules:
        _walked.modules[id(model)] = list(model.named_modules())
    return _walked.modules[id(model)]


def named_parameters(model: nn.Module) -> _Parameters:
    """Return the parameters of a model with their names, each once."""
    if _walked.parameters is None:
        return list(model.named_parameters())
    if id(model) not in _walked.parameters:
        _walked.parameters[id(model)] = list(model.named_parameters())
    return _walked.parameters[id(model)]


def modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model, each once."""
    return [module for _, module in named_modules(model)]


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model, each once."""
    return [parameter for _, parameter in named_parameters(model)]
