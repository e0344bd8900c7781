"""Save and restore the amax history of delayed scaling: the maxima of past steps, and the scales computed from them.

A run that is resumed without it scales its first steps differently from the uninterrupted run. The keys of a
`state_dict` do not change: the history is in its metadata, next to the version that torch keeps there for each module.
`torch.save` and DeepSpeed's checkpoints preserve the metadata, and a plain model ignores it. Formats that contain only
tensors (safetensors, torch.distributed.checkpoint) lose it: for accelerate and the Trainer it is then saved in a file
next to the weights (`mpguard.runtime.checkpoints`), and a custom training loop saves `fp8_state_dict(model)`.
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
from mpguard.nn.compile import untraced
from mpguard.nn.fp8.filters import plain_name
from mpguard.nn.fp8.padding import PaddingState

#: The key in the metadata of a `state_dict`, and the attribute of a layer whose history was loaded before it was
#: converted.
KEY, PENDING = "mpguard_fp8", "_mpguard_kept"

History = Mapping[str, torch.Tensor]


class AmaxHistoryMixin(nn.Module):
    """Base class, placed before a library's FP8 layer whose scales may depend on earlier steps."""

    _mpguard_fp8: PaddingState

    def has_history(self) -> bool:
        """True if there is a history to save."""
        raise NotImplementedError

    def history(self) -> dict[str, torch.Tensor]:
        """Return the tensors in use, allocated if necessary; empty if the scales do not depend on a history."""
        raise NotImplementedError

    def restore(self, saved: History) -> None:
        """Restore a history in place. A longer one is cut and a shorter one padded with zeros, as in the library."""
        with torch.no_grad():
            for name, tensor in self.history().items():
                if name not in saved:
                    raise PolicyError(f"{self._mpguard_fp8.name}: its FP8 history has no {name}; it is of another kind")
                rows = min(len(tensor), len(saved[name]))
                tensor[:rows].copy_(saved[name][:rows])
                tensor[rows:] = 0
        self._mpguard_fp8.restored = True
        if self._mpguard_fp8.policy.fp8_calibration:  # what has a history is not calibrated
            self._mpguard_fp8.calibrated_forward |= bool((saved["amax_history_fwd"] > 0).any())
            self._mpguard_fp8.calibrated_backward |= bool((saved["amax_history_bwd"] > 0).any())
        self.on_restored()

    def on_restored(self) -> None:
        """Update what depends on the scales, after they were replaced; nothing here, for a subclass to override."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.has_history() and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][KEY] = _copied(self.history())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)
        if KEY in local_metadata:
            self.restore(local_metadata[KEY])


def _copied(history: History) -> dict[str, torch.Tensor]:
    """Return copies on the CPU, from which every machine can load them."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in history.items()}


def layers_of(model: nn.Module) -> dict[str, AmaxHistoryMixin]:
    """Return the layers with a history, by name."""
    found = (module for module in model.modules() if isinstance(module, AmaxHistoryMixin))
    return {plain_name(layer._mpguard_fp8.name): layer for layer in found if layer.history()}


def fp8_state_dict(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return the amax history of delayed scaling: layer -> name -> tensor on the CPU; empty for other recipes.

    For checkpoints of a custom training loop that contain only tensors, such as those of
    `torch.distributed.checkpoint` and safetensors. `torch.save(model.state_dict())`, accelerate's `save_state`,
    DeepSpeed's `save_checkpoint` and the Trainer save it without this function.
    """
    return {name: _copied(layer.history()) for name, layer in layers_of(model).items()}


def load_fp8_state_dict(model: nn.Module, state: Mapping[str, History], *, strict: bool = True) -> None:
    """Restore the result of `fp8_state_dict` in a converted model.

    strict: raise `PolicyError`, and change nothing, if the layers differ. Otherwise the layers that both have are
    restored, and the first step warns about layers without a history.
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
        layers[name].restore(state[name])


def store_pending(model: nn.Module, state_dict: Any) -> None:
    """Store the histories in a checkpoint on layers that are still plain: they are restored after the conversion."""
    for path, metadata in getattr(state_dict, "_metadata", {}).items():
        if KEY not in metadata:
            continue
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        if not isinstance(module, AmaxHistoryMixin):
            module.__dict__[PENDING] = metadata[KEY]


def restore_pending(layer: nn.Module) -> None:
    """Restore the history that was stored on a layer before its conversion."""
    pending = layer.__dict__.pop(PENDING, None)
    if pending is not None and isinstance(layer, AmaxHistoryMixin) and layer.history():
        layer.restore(pending)


#: The layers of each model that has been converted and not been trained since.
_watched: list[weakref.WeakSet[AmaxHistoryMixin]] = []


def watch(layers: Iterable[AmaxHistoryMixin]) -> None:
    """Warn at the first step if optimizer state was restored but the amax history of these layers was not."""
    register_step_hook()
    _watched.append(weakref.WeakSet(layers))


@functools.cache
def register_step_hook() -> None:
    """Register one hook permanently, because torch cannot remove a hook while it is being called."""
    register_optimizer_step_pre_hook(untraced(_stepping))


def _stepping(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    _watched[:] = [layers for layers in _watched if layers and not _check_first_step(layers, optimizer)]


def _check_first_step(watched: Iterable[AmaxHistoryMixin], optimizer: Any) -> bool:
    """Return True if this is the first step of these layers; warn about those without a restored history."""
    layers = [layer for layer in watched if isinstance(layer, AmaxHistoryMixin)]  # others have been reverted
    if not layers or not layers[0]._mpguard_fp8.padding.trained:
        return False  # FSDP2 calls `step` when it loads a checkpoint
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
            "scaling does not: the first steps are scaled differently from those of an uninterrupted run. Convert the "
            "model before its `state_dict` is loaded; or save mpguard.fp8_state_dict(model) too, and pass it to "
            "mpguard.load_fp8_state_dict"
        )
        warnings.warn(MpguardWarning(text), stacklevel=4)
    return bool(mine)
