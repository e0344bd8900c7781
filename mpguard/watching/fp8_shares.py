"""Shares of values that underflow and saturate in FP8 layers while they train: the numbers of `mpguard sensitivity`.

At a step that is due, the first call of each FP8 layer shows its input, its weight and the gradient of its output
(`mpguard.nn.fp8.observation`). Kept of each tensor are its largest value, and at most `VALUES` values: whole groups of
128 along the dimension that a matmul sums over, spread evenly, with the largest value of what shares a scale with them.
At the end of the step they are rounded as the layer rounds them, those of all layers at once
(`mpguard.nn.number_formats`). The noise of the layer's output is that of `ROWS` rows of the input and of the weight.
torchao and Transformer Engine keep no scales of current, block-wise and MX scaling: these are computed again, from the
same values. Those of delayed scaling are Transformer Engine's own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from typing import Any

import torch
from torch import nn

from mpguard.nn import number_formats
from mpguard.nn.format_names import FORMAT_OF, default_bound
from mpguard.nn.fp8 import observation
from mpguard.nn.fp8.filters import is_conv1d, is_torchao, plain_name
from mpguard.nn.number_formats import OperandRole, largest
from mpguard.policy.policy import FLOAT8_LINEAR
from mpguard.runtime.proof.fp8 import is_te, torchao_recipe
from mpguard.watching.containment import CONTAINMENT

#: Rows of the input, and of the weight, whose matmuls show the noise of the output.
ROWS = 16

#: Values that are rounded of a tensor at most, and the values of a group: formats have a scale for up to so many.
VALUES, GROUP = 4096, 128

#: The steps that are due: these, then each `EVERY`th.
FIRST_STEPS, EVERY = (1, *range(10, 100, 10)), 100

#: Names of the tensors of a layer, as Transformer Engine's delayed scaling is reported too.
INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient of the output"


def is_due(step: int) -> bool:
    """True for a step whose FP8 tensors are sampled."""
    return step in FIRST_STEPS or step % EVERY == 0


def listening() -> Fp8Samples:
    """Return samples that FP8 layers are added to from here on."""
    found = Fp8Samples()
    found.start(1)
    observation.listen(found)
    return found


@dataclasses.dataclass(frozen=True)
class Casts:
    """How a layer rounds. output, weight_gradient: formats of these matmuls. e5m2: gradients are E5M2, else E4M3.

    delayed: scales are those of Transformer Engine's history. cast_weight: the weight is cast to the input's dtype
    before it is rounded.
    """

    output: str
    weight_gradient: str
    e5m2: bool
    delayed: bool = False
    cast_weight: bool = False

    def of_gradient(self, trained: bool) -> tuple[str, bool]:
        """Return the format of the gradient, and if the matmul that needs it sums over rows: that of the weight."""
        over_rows = trained and self.weight_gradient != "bf16"
        return (self.weight_gradient if over_rows else self.output), over_rows


def casts_of(layer: Any) -> Casts | None:
    """Return how a layer rounds; None if it does not compute in FP8."""
    if is_torchao(layer):
        name = torchao_recipe(layer.config)
        gradients = getattr(getattr(layer.config, "cast_config_grad_output", None), "target_dtype", None)
        return Casts(*FORMAT_OF[name], gradients == torch.float8_e5m2, cast_weight=name not in FLOAT8_LINEAR)
    recipe = getattr(layer, "fp8_meta", {}).get("recipe")
    if not is_te(layer) or recipe is None or not getattr(layer, "fp8", False):
        return None
    kinds = {"delayed": "delayed", "float8_current_scaling": "tensorwise", "float8_block_scaling": "blockwise",
             "mxfp8": "mxfp8", "nvfp4": "nvfp4"}  # fmt: skip
    for method, name in kinds.items():
        if getattr(recipe, method, bool)():
            hybrid = getattr(getattr(recipe, "fp8_format", None), "name", "") == "HYBRID"
            return Casts(*FORMAT_OF[name], hybrid, delayed=name == "delayed")
    return None


@dataclasses.dataclass(frozen=True)
class Sample:
    """A part of a tensor. form: its format. values: groups (number, size). largest: of the tensor.

    of_groups: the largest value of what shares a scale with each group. scale: that of a history; None without one.
    """

    form: str
    role: OperandRole
    values: torch.Tensor
    largest: torch.Tensor
    of_groups: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What samples have in common that are rounded together."""
        return self.form, self.role, self.values.shape, self.values.device, self.scale is None


class Fp8Samples:
    """What FP8 layers have multiplied in one step. It is a `Listener`."""

    def __init__(self) -> None:
        self.due = False
        self._names: dict[int, str] = {}
        self._casts: weakref.WeakKeyDictionary[nn.Module, Casts | None] = weakref.WeakKeyDictionary()
        self._labels: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._found: dict[str, Sample] = {}
        self._noise: dict[str, torch.Tensor] = {}  # of outputs, with the bound of their format
        self._seen: set[str] = set()

    def start(self, step: int) -> None:
        """Begin to sample, if a step is due; else end it."""
        self.due = is_due(step)
        self._seen.clear()

    def close(self) -> None:
        """End it: compiled code has no operators of it from the next compilation on."""
        self.due = False
        observation.listen(None)

    def follow(self, root: nn.Module) -> None:
        """Sample FP8 layers that mpguard has not converted: by hooks, outside of compiled code."""
        for name, module in root.named_modules():
            if hasattr(module, "_mpguard_fp8") or not (is_torchao(module) or is_te(module)):
                continue
            if observation.hook not in module._forward_hooks.values():
                module.register_forward_hook(observation.hook)
            self._names[id(module)] = plain_name(name)

    def forward(self, layer: Any, input: torch.Tensor, weight: torch.Tensor) -> None:
        """Sample what a layer has multiplied, at its first call of a step."""
        with CONTAINMENT.contained("the statistics of FP8"):
            name = self._name_of(layer)
            if f"{name}: {INPUT}" in self._seen or (casts := self._casts_of(layer)) is None:
                return
            of_input, of_weight = layer.fp8_meta["scaling_fwd"].scale[:2] if casts.delayed else (None, None)
            weight = weight.t() if is_conv1d(layer) else weight
            input = _as_autocast_casts(input)
            weight = weight.to(input.dtype) if casts.cast_weight else weight
            left = self._add(f"{name}: {INPUT}", input, casts.output, "input", of_input)
            right = self._add(f"{name}: {WEIGHT}", weight, casts.output, "weight", of_weight)
            if left is not None and right is not None and left[0].shape[1] == right[0].shape[1]:
                self._noise[name] = output_noise(*left, *right)

    def gradient(self, layer: Any, gradient: torch.Tensor) -> None:
        """Sample the gradient of a layer's output, at its first pass of a step."""
        with CONTAINMENT.contained("the statistics of FP8"):
            name = self._name_of(layer)
            if f"{name}: {GRADIENT}" in self._seen or (casts := self._casts_of(layer)) is None:
                return
            form, over_rows = casts.of_gradient(layer.weight.requires_grad)
            scale = layer.fp8_meta["scaling_bwd"].scale[0] if casts.delayed else None
            role: OperandRole = "gradient" if casts.e5m2 else "input"
            self._add(f"{name}: {GRADIENT}", gradient, form, role, scale, transposed=over_rows)

    def _name_of(self, layer: Any) -> str:
        """Return the name of a layer, with a number if a layer of another model has it."""
        if layer not in self._labels:
            state = getattr(layer, "_mpguard_fp8", None)
            name = plain_name(state.name) if state is not None else self._names.get(id(layer), type(layer).__name__)
            taken = set(self._labels.values())
            others = (f"{name} ({number})" for number in itertools.count(2))
            self._labels[layer] = name if name not in taken else next(each for each in others if each not in taken)
        return self._labels[layer]

    def _casts_of(self, layer: Any) -> Casts | None:
        if layer not in self._casts:
            self._casts[layer] = casts_of(layer)
        return self._casts[layer]

    def _add(
        self, name: str, tensor: torch.Tensor, form: str, role: OperandRole, scale: Any, *, transposed: bool = False
    ) -> tuple[torch.Tensor, Sample] | None:
        """Keep a sample of a tensor (..., values). Returns it with the tensor as a matrix; None if it has none."""
        self._seen.add(name)
        tensor = getattr(tensor, "_local_tensor", tensor).detach()
        if not tensor.numel() or tensor.ndim < 2 or type(tensor) not in (torch.Tensor, nn.Parameter):
            return None  # no tokens, or values that a library keeps in FP8
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            matrix = tensor.reshape(-1, tensor.shape[-1])
            matrix = matrix.t() if transposed else matrix
            self._found[name] = sample(matrix, form, role, scale)
            return matrix, self._found[name]

    def take(self) -> list[tuple[list[str], torch.Tensor]]:
        """Return names, and a row for each: its largest value, and the shares that underflow and saturate. Once."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, own in self._found.items():
            groups.setdefault(own.kind, []).append(name)
        found = [(names, rounded_together([self._found[name] for name in names])) for names in groups.values()]
        self._found = {}
        return found

    def take_noise(self) -> tuple[list[str], torch.Tensor] | None:
        """Return the names of layers, and the energy of the noise of each one's output over its own. Once."""
        found, self._noise = self._noise, {}
        return (list(found), torch.stack(list(found.values()))) if found else None


def _as_autocast_casts(input: torch.Tensor) -> torch.Tensor:
    """Return an input in the dtype in which a layer gets it to round: that of autocast, if one is entered."""
    kind = input.device.type
    return input.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else input


def output_noise(inputs: torch.Tensor, left: Sample, weight: torch.Tensor, right: Sample) -> torch.Tensor:
    """Return the noise of some outputs of a layer, and its bound: as parts of the energy. Zero for outputs of zero."""
    operands = []
    for matrix, own in ((inputs, left), (weight, right)):
        rows = matrix[:: -(-matrix.shape[0] // ROWS)].float()
        if own.scale is not None:
            held = number_formats.cast(rows, own.scale, torch.float8_e4m3fn)
        else:
            held = number_formats.rounded(rows, own.form, own.role, own.largest)
        operands.append((rows, held.values))
    (exact_input, held_input), (exact_weight, held_weight) = operands
    exact = (exact_input[:, None] * exact_weight).sum(2)  # 16 x 16: no matmul, which a proof would count
    error = (held_input[:, None] * held_weight).sum(2) - exact
    energy = torch.linalg.vector_norm(exact.double()).square()
    noise = torch.linalg.vector_norm(error.double()).square() / energy.clamp(min=1e-300)
    return torch.stack([noise, torch.full_like(noise, 10 ** (-default_bound(left.form) / 10))]).float()


def sample(matrix: torch.Tensor, form: str, role: OperandRole, scale: torch.Tensor | None = None) -> Sample:
    """Return a sample of a matrix (rows, values)."""
    size = min(GROUP, matrix.shape[1])
    rows, columns = _places(matrix.shape[0], matrix.shape[1] // size, VALUES // size, matrix.device)
    inside = columns[:, None] * size + torch.arange(size, device=matrix.device)
    values = matrix[rows[:, None], inside]
    of_tensor = largest(matrix)
    of_groups = of_tensor.expand(len(rows), 1)
    if form == "rowwise":
        of_groups = largest(matrix[rows], 1)
    elif form == "blockwise" and role == "weight":  # a scale for 128 x 128 values
        high = min(GROUP, matrix.shape[0])
        block = (rows // high * high)[:, None] + torch.arange(high, device=matrix.device)
        own = matrix[block.clamp(max=matrix.shape[0] - 1)[:, :, None], inside[:, None, :]]
        of_groups = largest(own.flatten(1), 1)
    return Sample(form, role, values, of_tensor, of_groups, None if scale is None else scale.detach().clone())


@functools.lru_cache(maxsize=64)
def _places(rows: int, groups: int, most: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and groups of a row that are sampled, spread evenly: the same for the same size."""
    number = torch.arange(min(most, rows * groups), device=device)
    return number * rows // len(number), number * 7919 % groups  # a prime, so that all groups of a row have their turn


def rounded_together(samples: list[Sample]) -> torch.Tensor:
    """Return the row of `take` for each of some samples of one kind."""
    first = samples[0]
    values = torch.stack([each.values for each in samples]).float()
    of_tensor = torch.stack([each.largest for each in samples])
    of_groups = torch.stack([each.of_groups for each in samples])
    if first.scale is not None:
        dtype = torch.float8_e5m2 if first.role == "gradient" else torch.float8_e4m3fn
        scales = torch.stack([each.scale for each in samples if each.scale is not None])
        counts = torch.vmap(lambda matrix, scale: _counts(number_formats.cast(matrix, scale, dtype)))(values, scales)
    elif first.form == "blockwise" and first.role == "weight":  # the block is the whole tensor of each group
        counts = _counted_alike(values, "tensorwise", first.role, of_groups, of_groups)
    else:
        counts = _counted_alike(values, first.form, first.role, of_tensor, of_groups)
    return torch.cat([of_tensor[:, None], counts / first.values.numel()], 1)


def _counted_alike(
    values: torch.Tensor, form: str, role: OperandRole, of_tensor: torch.Tensor, of_groups: torch.Tensor
) -> torch.Tensor:
    def counts(matrix: torch.Tensor, of_tensor: torch.Tensor, of_groups: torch.Tensor) -> torch.Tensor:
        return _counts(number_formats.FORMATS[form](matrix, role, of_tensor, of_groups))

    found: torch.Tensor = torch.vmap(counts)(values, of_tensor, of_groups)
    return found


def _counts(held: number_formats.Rounded) -> torch.Tensor:
    return torch.stack([held.underflow.float(), held.saturated.float()])
