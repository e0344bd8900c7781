"""What delayed scaling remembers (maxima of past steps, and the scales made from them): saved, and put back.

A run that is resumed without it scales its first steps otherwise than the uninterrupted run. The keys of a
`state_dict` stay the user's own: the history travels in its metadata, beside the version that torch keeps there for
each module. `torch.save` keeps that, DeepSpeed's checkpoints too, and a plain model passes over it. Formats that
hold nothing but tensors (safetensors, torch.distributed.checkpoint) lose it: for accelerate and the Trainer it is
then a file beside the weights (`mpguard.runtime.checkpoints`), loops of one's own save `fp8_state_dict(model)`.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpguard.core.errors import MpguardWarning, PolicyError
from mpguard.nn.fp8.filters import plain_name
from mpguard.nn.fp8.padding import PaddingState

#: In the metadata of a `state_dict`, and of what came in a checkpoint before the layer was converted.
KEY, KEPT = "mpguard_fp8", "_mpguard_kept"

History = Mapping[str, torch.Tensor]


class AmaxHistoryMixin(nn.Module):
    """Goes before the FP8 layer of a library whose scales may depend on what was before."""

    _mpguard_fp8: PaddingState

    def remembers(self) -> bool:
        """Whether there is something to save by now."""
        raise NotImplementedError

    def history(self) -> dict[str, torch.Tensor]:
        """The live tensors, allocated where they were not; empty where scales depend on no history."""
        raise NotImplementedError

    def recall(self, saved: History) -> None:
        """Puts a history back, in place. A longer or shorter one is cut or filled up, as the library does it."""
        with torch.no_grad():
            for name, tensor in self.history().items():
                if name not in saved:
                    raise PolicyError(f"{self._mpguard_fp8.name}: its FP8 history has no {name}; it is of another kind")
                rows = min(len(tensor), len(saved[name]))
                tensor[:rows].copy_(saved[name][:rows])
                tensor[rows:] = 0
        self._mpguard_fp8.restored = True
        self.recalled()

    def recalled(self) -> None:
        """Called when there are other scales."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.remembers() and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][KEY] = _copied(self.history())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)
        if KEY in local_metadata:
            self.recall(local_metadata[KEY])


def _copied(history: History) -> dict[str, torch.Tensor]:
    """On the CPU, whence every machine can load them."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in history.items()}


def layers_of(model: nn.Module) -> dict[str, AmaxHistoryMixin]:
    """The layers with a history, by name."""
    found = (module for module in model.modules() if isinstance(module, AmaxHistoryMixin))
    return {plain_name(layer._mpguard_fp8.name): layer for layer in found if layer.history()}


def fp8_state_dict(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """What delayed scaling remembers: layer -> name -> tensor on the CPU; empty for other recipes.

    For checkpoints that hold tensors alone, such as those of `torch.distributed.checkpoint` and safetensors, in a
    loop of one's own. `torch.save(model.state_dict())`, accelerate's `save_state`, DeepSpeed's `save_checkpoint`
    and the Trainer keep it without being asked.
    """
    return {name: _copied(layer.history()) for name, layer in layers_of(model).items()}


def load_fp8_state_dict(model: nn.Module, state: Mapping[str, History], *, strict: bool = True) -> None:
    """Puts back what `fp8_state_dict` gave, into a converted model.

    strict: raises `PolicyError` where the layers are others, and changes nothing then; otherwise those that both have
    get theirs, and the first step says that others have none.
    """
    layers = layers_of(model)
    if strict and layers.keys() != state.keys():
        missing, unknown = sorted(layers.keys() - state.keys()), sorted(state.keys() - layers.keys())
        what = [f"{kind} {', '.join(names[:3])}" for kind, names in (("no", missing), ("also", unknown)) if names]
        raise PolicyError(
            f"load_fp8_state_dict: the FP8 history is of {len(state)} layers, the model has {len(layers)} with "
            f"delayed scaling; it has {' and '.join(what)}. Convert the model as in the run that saved it"
        )
    for name in layers.keys() & state.keys():
        layers[name].recall(state[name])


def keep(model: nn.Module, state_dict: Any) -> None:
    """What came in a checkpoint for layers that are still plain: they get it when they are converted."""
    for path, metadata in getattr(state_dict, "_metadata", {}).items():
        if KEY not in metadata:
            continue
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        if not isinstance(module, AmaxHistoryMixin):
            module.__dict__[KEPT] = metadata[KEY]


def recall_kept(layer: nn.Module) -> None:
    """Gives a layer that has just been converted what was kept for it."""
    kept = layer.__dict__.pop(KEPT, None)
    if kept is not None and isinstance(layer, AmaxHistoryMixin) and layer.history():
        layer.recall(kept)


#: Of models that have been converted and not trained since: their layers.
_watched: list[weakref.WeakSet[AmaxHistoryMixin]] = []


def watch(layers: Iterable[AmaxHistoryMixin]) -> None:
    """Has it said, at the first step, where a run is resumed (its optimizer is not new) and its history is new."""
    listen()
    _watched.append(weakref.WeakSet(layers))


@functools.cache
def listen() -> None:
    """One hook for good: torch cannot take one out while it is being called."""
    register_optimizer_step_pre_hook(_stepping)


def _stepping(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    _watched[:] = [layers for layers in _watched if layers and not _judged(layers, optimizer)]


def _judged(every: Iterable[AmaxHistoryMixin], optimizer: Any) -> bool:
    """Whether this is the first step of these layers; if so, what there is to say of it is said."""
    layers = [layer for layer in every if isinstance(layer, AmaxHistoryMixin)]  # not reverted since
    if not layers or not layers[0]._mpguard_fp8.padding.trained:
        return False  # FSDP2 takes a step when it loads a checkpoint
    weights = {id(each) for group in optimizer.param_groups for each in group["params"]}
    mine = [layer for layer in layers if id(layer._parameters.get("weight")) in weights]
    fresh = sorted(
        layer._mpguard_fp8.name
        for layer in mine
        if optimizer.state.get(layer._parameters["weight"]) and not layer._mpguard_fp8.restored
    )
    if fresh:
        more = f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
        text = (
            f"{fresh[0] or 'the model'}{more}: the optimizer comes from a checkpoint, the FP8 history of delayed "
            "scaling does not: the first steps are scaled otherwise than without the interruption. Convert the model "
            "before its `state_dict` is loaded; or save mpguard.fp8_state_dict(model) too, and give it to "
            "mpguard.load_fp8_state_dict"
        )
        warnings.warn(MpguardWarning(text), stacklevel=4)
    return bool(mine)
