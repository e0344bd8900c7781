"""`Probe`: hooks on the Linear layers of a run, which measure what formats would cost them; a share of them at a step.

The first step finds the layers: those whose output had a gradient. From the second on, the hooks of a share of them
measure the first call of a step: the output in the forward pass, where FSDP and ZeRO-3 have gathered the weight, and
the weight gradient when the gradient of the output arrives. Until then rows of the input are kept (`keep`). Ranks
measure different layers. Nothing that the script computes is changed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpguard.nn import layer_error
from mpguard.nn.fp8 import filters
from mpguard.policy.policy import Policy
from mpguard.runtime.containment import Containment

if TYPE_CHECKING:
    from torch import nn

#: A failure ends the measurement of what it concerns, never the run.
CONTAINMENT = Containment(
    "mpguard sensitivity", "what it concerns is not measured", mark="__mpguard_sensitivity__", every_rank=True
)

#: The share of the layers that is measured at a step, by all ranks together, is one in so many.
EVERY = 4


@dataclasses.dataclass(frozen=True)
class ProbeSettings:
    """What a probe measures.

    formats: names of `number_formats.FORMATS`. steps: how many steps are measured. skip: steps before them, the one
    that finds the layers included. every: one in so many layers is measured at a step. policy: decides which layers can
    be FP8.
    """

    formats: Sequence[str]
    policy: Policy
    steps: int = 20
    skip: int = 1
    every: int = EVERY


class Probe:
    """Measures the layers of the models that are trained.

    record: gets each line of numbers. rank, ranks: of this process, and how many measure.
    """

    def __init__(
        self, settings: ProbeSettings, record: Callable[[dict[str, Any]], None], *, rank: int = 0, ranks: int = 1
    ) -> None:
        self.settings = settings
        self.seconds = 0.0  # that measuring has taken
        self.steps = 0  # that have ended
        self._record, self._rank, self._ranks = record, rank, ranks
        self._handles: list[Any] = []
        self._layers: list[tuple[str, nn.Module]] = []
        self._called: dict[int, tuple[nn.Module, int]] = {}  # with a gradient, in this step; and the rows
        self._outermost: dict[int, nn.Module] = {}
        self._depth = 0
        self._open: dict[int, dict[str, Any]] = {}  # lines of this step, by layer
        self._passes = 0  # gradients that have arrived since the last step

    @property
    def finished(self) -> bool:
        """True if all steps were measured."""
        return self.steps >= self.settings.skip + self.settings.steps

    # -- the first step: find the layers -------------------------------------------------------

    def find_layers(self) -> None:
        """Register hooks on all modules, until the first step has ended."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        found = CONTAINMENT.contained_hook(self._called_in_first_step, "the search for layers")
        self._handles = [
            register_module_forward_pre_hook(CONTAINMENT.contained_hook(self._enter, "the search for layers")),
            register_module_forward_hook(found, always_call=True),
        ]

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if self._depth == 0 and torch.is_grad_enabled():
            self._outermost[id(module)] = module
        self._depth += 1

    def _called_in_first_step(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        self._depth -= 1
        if filters.is_linear(module) and isinstance(output, torch.Tensor) and output.requires_grad:
            rows = output.numel() // max(1, output.shape[-1])
            self._called[id(module)] = module, self._called.get(id(module), (module, 0))[1] + rows
            _on_gradient(output, self._gradient_arrived)

    def _gradient_arrived(self, _gradient: torch.Tensor) -> None:
        self._passes += 1

    def step_ended(self, find_models: Callable[[], Sequence[nn.Module]]) -> bool:
        """Note that a step has ended; False for one before which no layer had a gradient.

        find_models: returns the models that are trained; none if they cannot be found by their parameters. Frameworks
        call an optimizer several times for a step (ZeRO: for each of its groups), or to allocate its states.
        """
        if not self._passes:
            return False
        self._passes = 0
        self.steps += 1
        for line in self._open.values():
            self._record(line)
        self._open.clear()
        self._remove_hooks()
        if self.steps == 1:
            self.know(find_models() or list(self._outermost.values()))
            self._outermost.clear()
        if self.steps >= self.settings.skip and not self.finished:
            self._measure_share()
        else:
            self._count_passes()
        return True

    def know(self, roots: Sequence[nn.Module]) -> None:
        """Take the layers to measure: those of some models that were called in the first step."""
        named = _named(roots)
        if any(key not in named for key in self._called):
            named = _named([*roots, *self._outermost.values()])  # the names of these models first
        reasons = filters.reasons([(name, module) for name, module in _modules(roots)], self.settings.policy)
        self._layers = []
        layers: list[dict[str, Any]] = []
        for key, (module, rows) in self._called.items():
            name = named.get(key, f"unnamed {len(layers)}")
            size, outputs = filters.sizes_of(module)
            unfit = _unmeasurable(module)
            layers.append(
                {"layer": name, "in": size, "out": outputs, "rows": rows,
                 "left_out": reasons.get(key, "of another model"), "unmeasured": unfit}
            )  # fmt: skip
            if not unfit:
                self._layers.append((name, module))
        self._called.clear()
        self._record({"event": "layers", "layers": layers, "rank": self._rank, "ranks": self._ranks})

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Remove the hooks, and record what was measured of the last step."""
        self._remove_hooks()
        for line in self._open.values():
            self._record(line)
        self._open.clear()

    # -- the other steps: measure --------------------------------------------------------------

    def share(self, step: int) -> list[tuple[str, nn.Module]]:
        """Return the layers that this rank measures in a step: all layers take turns, on all ranks."""
        every = min(self.settings.every * self._ranks, max(1, len(self._layers)))
        turn = (step * self._ranks + self._rank) % every
        return self._layers[turn::every]

    def _measure_share(self) -> None:
        """Register hooks on the layers whose turn it is. First, because FSDP reshards a weight in a hook of its own."""
        for name, module in self.share(self.steps + 1):
            forward = functools.partial(self._forward, name)
            hook = CONTAINMENT.contained_hook(forward, f"the measurement of {name}")
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        self._count_passes()

    def _count_passes(self) -> None:
        """Note gradients of layers: a step that has none is no step."""

        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                _on_gradient(output, self._gradient_arrived)

        self._handles += [module.register_forward_hook(hook) for _, module in self._layers]

    def _forward(self, name: str, module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if id(module) in self._open or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return
        began = time.perf_counter()
        inputs = args[0] if args else kwargs["input"]
        weight = module.weight.detach()
        if filters.is_conv1d(module):
            weight = weight.t()
        matrix = layer_error.as_rows(inputs)
        if not matrix.numel() or weight.shape[-1] != matrix.shape[-1]:  # an expert without tokens; a sharded weight
            return
        line: dict[str, Any] = {"event": "layer", "step": self.steps + 1, "rank": self._rank, "layer": name}
        self._open[id(module)] = line
        with torch.no_grad(), _without_autocast(inputs):
            kept = layer_error.keep(matrix)
            errors = layer_error.output_errors(kept, weight, self.settings.formats)
        line["rows"] = kept.count
        line["output"] = layer_error.summary(errors)
        backward = functools.partial(self._backward, id(module), line, kept, module.weight.requires_grad)
        _on_gradient(output, CONTAINMENT.contained_hook(backward, f"the measurement of {name}"))
        self.seconds += time.perf_counter() - began

    def _backward(
        self, key: int, line: dict[str, Any], kept: layer_error.KeptInput, trained: bool, gradient: torch.Tensor
    ) -> None:
        if "weight_gradient" in line:
            return  # a second pass through the same graph
        began = time.perf_counter()
        if not gradient.isfinite().all():  # a loss scale that is too large: the step is skipped, measure the next pass
            self._open.pop(key, None)
            return
        with torch.no_grad(), _without_autocast(gradient):
            errors = layer_error.weight_gradient_errors(
                kept, layer_error.as_rows(gradient), self.settings.formats, trained=trained
            )
        line["weight_gradient"] = layer_error.summary(errors)
        self.seconds += time.perf_counter() - began


def _on_gradient(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Call a hook with the gradient of an output when it has been computed."""
    output.register_hook(hook)


def _without_autocast(tensor: torch.Tensor) -> Any:
    return torch.autocast(tensor.device.type, enabled=False)


def _modules(roots: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return all modules with their names, without the parts that wrappers add."""
    return [
        (filters.plain_name(name), module)
        for root in roots
        for name, module in root.named_modules(remove_duplicate=False)
    ]


def _named(roots: Sequence[nn.Module]) -> dict[int, str]:
    """Return the name of each Linear layer by its id; with the class of its model where two models have the name."""
    names: dict[int, str] = {}
    owners: dict[str, int] = {}
    for root in roots:
        for name, module in _modules([root]):
            if not filters.is_linear(module) or id(module) in names:
                continue
            taken = owners.setdefault(name, id(module)) != id(module)
            names[id(module)] = f"{type(root).__name__}: {name}" if taken else name
    return names


def _unmeasurable(module: Any) -> str:
    """Return why the weight of a layer cannot be rounded to a format; empty if it can."""
    weight = module._parameters.get("weight")
    if weight is not None and (not weight.is_floating_point() or weight.dtype.itemsize < 2):
        return f"is quantized, its weight is {str(weight.dtype).removeprefix('torch.')}"
    return ""


class ProbeFile:
    """Writes lines of JSON to a file, each at once: an interrupted run keeps what was measured."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
