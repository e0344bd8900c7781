"""Tell the tokens of a model's first training batch, before code of the model runs or is compiled for it.

Eager models tell by a hook. Compiled ones are called through wrappers of `Module.compile` and `OptimizedModule`, which
call `seen` before the compiled code. Where dynamo traces what calls the model, nothing is told.

Importing this module does not import torch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Takes the tokens; None if they cannot be told from the arguments.
Told = Callable[["int | None"], None]

_waiting: weakref.WeakKeyDictionary[nn.Module, tuple[Told, Any]] = weakref.WeakKeyDictionary()


def tell(model: nn.Module, told: Told) -> None:
    """Call a function once, with the tokens of the model's first training batch."""
    before = _waiting.pop(model, None)
    if before is not None:
        before[1].remove()
    _waiting[model] = told, model.register_forward_pre_hook(_hook, with_kwargs=True, prepend=True)


def seen(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tell what a model, or a model in it, is called with, if that is awaited and the call is one of training."""
    if not _waiting or not model.training:
        return
    import torch

    if not torch.is_grad_enabled():
        return
    for module in list(model.modules()):
        if module in _waiting:
            told, hook = _waiting.pop(module)
            hook.remove()
            told(tokens_of(args, kwargs))


def telling(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that tells what a compiled model is called with before it calls its compiled code."""

    import torch

    @functools.wraps(call)
    def tell_and_call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            seen(model, args, kwargs)
        return call(*args, **kwargs)

    return tell_and_call


def _hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    import torch

    if not torch.compiler.is_compiling():
        seen(module, args, kwargs)


def tokens_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the tokens, or rows, of a model's arguments: numbers of tokens and vectors; None if there are images."""
    tensors = list(_tensors([*args, *kwargs.values()]))
    if any(each.is_floating_point() and each.ndim > 3 for each in tensors):
        return None
    rows = [each.numel() // (each.shape[-1] if each.is_floating_point() else 1) for each in tensors if each.numel()]
    return max(rows, default=None)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors with a dimension in nested arguments."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim:
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
