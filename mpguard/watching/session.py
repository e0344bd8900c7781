"""`Watch`: the steps of this process, from the hooks to the numbers. One per process; `analysis` makes events of them.

A round is one step of all optimizers, with the backward passes before it. Its numbers are computed on the device and
copied without waiting; they are read when they have arrived, on a GPU a step or two later. What has arrived before the
step is applied can be replayed with the weights that it was computed with.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpguard.core.watch_levels import WatchLevel
from mpguard.nn.fp8.filters import plain_name
from mpguard.runtime import guard as guards
from mpguard.runtime.proof import ranges
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.observe import innermost, updated_by
from mpguard.runtime.ranks import is_forked_after_cuda, world_size
from mpguard.watching import drift, gradients, movement
from mpguard.watching.analysis import Analysis
from mpguard.watching.containment import CONTAINMENT
from mpguard.watching.fp8 import DelayedScales
from mpguard.watching.output import JsonLines
from mpguard.watching.readout import HostOrDevice
from mpguard.watching.replay import Captures
from mpguard.watching.rounds import Fresh, Keys, Part, StepRound, names_in

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpguard.watching.fp8_shares import Fp8Samples

#: Norms may take this share of a step, and are at most so many steps apart. On a GPU their time is estimated from its
#: memory bandwidth, in bytes per second, and 20 us for a few kernels.
NORM_SHARE, NORMS_APART, BANDWIDTH, KERNELS = 0.005, 40, 2e12, 20e-6

#: The first steps, in which faults of a program show: norms are computed at each of them.
FIRST_STEPS = 20

#: Steps between two checks of underflow, and the first of them: before it, a loss scale has not settled.
UNDERFLOW_EVERY, UNDERFLOW_FIRST = {"light": 100, "full": 10}, 10

#: How often the models of optimizers are searched for among all objects.
SEARCHES = 8

#: Rounds whose numbers have not arrived. Of more than these the oldest is waited for, so that memory stays bounded.
OPEN_ROUNDS = 64

#: Steps between two checks of the scales of FP8, which are kept at the step before.
SCALES_EVERY = {"light": 10, "full": 1}


class Watch:
    """Watches the steps of this process. level: `light` or `full`. jsonl: the file to write; None for none.

    hook_calls: calls of `step` of any optimizer. engine_depth: nested calls of an engine, which calls its optimizer
    itself. Raises `ConfigError` if the file cannot be written.
    """

    def __init__(self, level: WatchLevel, jsonl: str | None = None) -> None:
        self.level = level
        self.analysis = Analysis(level, JsonLines(jsonl, level))
        self.captures = Captures()
        ranges.outermost_listeners[:] = [self._first_call]
        self.hook_calls = self.engine_depth = 0
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._fresh, self._round = Fresh(), StepRound(1)
        self._open: deque[StepRound] = deque()
        self._scaler: Any = None  # that scales the next loss
        self._stepping: Any = None  # the GradScaler whose `step` runs
        self._loss_given = self._in_backward = False
        self._names: dict[int, str] = {}
        self._searches = 0
        self._last_end: float | None = None
        self._norm_every, self._norm_last = 1, 0
        self._norm_times: deque[float] = deque(maxlen=20)
        self._times: deque[float] = deque(maxlen=20)
        self._roots: list[weakref.ref[nn.Module]] = []
        self._weights: deque[tuple[int, Part]] = deque()
        self._scales = DelayedScales()
        self._samples: Fp8Samples | None = None  # of what FP8 layers round
        if self.level == "full":
            from mpguard.watching import fp8_shares

            self._samples = fp8_shares.listening()
        self._kept: movement.Kept | None = None  # samples of weights before the step that runs

    @property
    def active(self) -> bool:
        """True in the process that is watched, while the watch works, and no CUDA graph is captured."""
        return os.getpid() == self._process and not CONTAINMENT.has_failed() and not _captures_graph()

    def begin_again(self) -> None:
        """Begin again in a process that was forked: nothing has happened here yet, and the file is the parent's.

        After CUDA was initialized it stays inactive and keeps everything, because CUDA's events cannot be freed.
        """
        if is_forked_after_cuda():
            return
        self.analysis = Analysis(self.level, JsonLines(None, self.level))
        self.captures.clear()
        self._begin()

    def _first_call(self, module: nn.Module) -> None:
        """Keep what the first step computes, until it is known to be finite."""
        if self.active and self._round.step == 1 and not self._round.stepped:
            with CONTAINMENT.contained("the watch of the first step"):
                self.captures.first_call(module)

    # -- models ------------------------------------------------------------------------------

    def follow(self, root: nn.Module) -> None:
        """Keep the batches of a model, and know the names of its parameters."""
        self.captures.watch(root)
        self._names |= names_in(root)
        self.analysis.know_modules(root)
        if self._samples is not None:
            self._samples.follow(root)
        if root not in self._models():
            self._roots.append(weakref.ref(root))

    def _models(self) -> list[nn.Module]:
        return [root for each in self._roots if (root := each()) is not None]

    def _names_of(self, optimizer: Any, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters of an optimizer; a number for one that no model has (flat ones)."""
        if self._searches < SEARCHES and any(id(own) not in self._names for own in parameters):
            self._searches += 1
            guard = guards.current()
            for root in models_of(list(parameters)) if guard is None else guard.models_of(innermost(optimizer)):
                self.follow(root)
        return [self._names.get(id(own), f"parameter {index}") for index, own in enumerate(parameters)]

    # -- backward ----------------------------------------------------------------------------

    def loss_scaled(self, scaler: Any) -> None:
        """A GradScaler has scaled a loss: the next backward pass begins from it."""
        self._scaler = scaler

    def loss_given(self, loss: Any, divisor: int) -> None:
        """An engine begins a backward pass from its own scaled loss. loss: before that. divisor: of accumulation."""
        self._record_loss(loss, divisor)
        self._loss_given = True

    def backward_started(self, roots: Sequence[Any]) -> bool:
        """Record the loss that a backward pass begins from. False for a pass inside another (checkpointing)."""
        if self._in_backward:
            return False
        self._in_backward = True
        self._fresh.backwards += 1
        if not self._loss_given and len(roots) == 1:
            self._record_loss(roots[0], self._scaler._scale if self._scaler is not None else 1)
        self._scaler, self._loss_given = None, False
        return True

    def backward_ended(self) -> None:
        """Note that the outermost backward pass has ended."""
        self._in_backward = False

    def _record_loss(self, loss: Any, divisor: Any) -> None:
        import torch

        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
            own = loss.detach()
            own = getattr(own, "_local_tensor", own)
            if own.is_cpu and not (isinstance(divisor, torch.Tensor) and not divisor.is_cpu):
                self._fresh.losses.append(float(own) / float(divisor))
                return
            own = own.to(torch.float32, copy=True)
            if isinstance(divisor, torch.Tensor):
                own = own / divisor.to(own.device, non_blocking=True)
            elif divisor != 1:
                own = own / divisor
            self._fresh.losses.append(own)

    def clipped(self, norm: Any, norm_type: float) -> None:
        """Record the norm that a call that clips gradients has computed: it costs nothing more."""
        import torch

        partial = any(placement.is_partial() for placement in getattr(norm, "placements", ()))
        if isinstance(norm, torch.Tensor) and norm.numel() == 1 and float(norm_type) == 2 and not partial:
            own = norm.detach()
            self._fresh.clips.append(getattr(own, "_local_tensor", own).to(torch.float32, copy=True))

    # -- steps -------------------------------------------------------------------------------

    def before_step(self, optimizer: Any) -> None:
        """Check the gradients that an optimizer is about to apply."""
        self.hook_calls += 1
        if self.engine_depth or not self._begin_step(optimizer):
            return
        tensors, keys = self._fresh_numbers()
        for name in ("found_inf", "grad_scale"):
            if (value := getattr(optimizer, name, None)) is not None:
                tensors.append(value)
                keys.append((name, []))
        self._add_gradients(optimizer, tensors, keys)
        self._add_part(tensors, keys, intact=True)

    def after_step(self, optimizer: Any) -> None:
        """Conclude what has arrived, after an optimizer has stepped."""
        if not self.engine_depth and id(optimizer) in self._round.stepped:
            if self._kept is not None:
                kept, self._kept = self._kept, None
                self._add_part([kept.counts()], [("movement", kept.names)], intact=False)
            self._finish_step()

    def scaler_steps(self, scaler: Any) -> int:
        """A GradScaler is about to step; returns what `scaler_stepped` takes."""
        self._stepping = scaler if scaler.is_enabled() and scaler._scale is not None else None
        return self.hook_calls

    def scaler_stepped(self, scaler: Any, optimizer: Any, calls: int) -> None:
        """A GradScaler has stepped; if it has not called the optimizer, gradients were infinite."""
        optimizer = innermost(optimizer)
        try:
            if self.hook_calls > calls or not scaler.is_enabled() or not self._begin_step(optimizer):
                return
            self._round.skipped += 1
            self._kept = None
            tensors, keys = self._fresh_numbers()
            self._add_gradients(optimizer, tensors, keys, always=True)
            self._add_part(tensors, keys, intact=True)
            self._finish_step()
        finally:
            self._stepping = None

    def scaler_failed(self) -> None:
        """The `step` of a GradScaler has raised an error."""
        self._stepping = None

    def before_engine_step(self, engine: Any) -> None:
        """Check the losses that an engine is about to step for."""
        if not self._names:
            self.follow(engine)
        if engine.is_gradient_accumulation_boundary() and self._begin_step(engine):
            self._round.scaled = bool(engine.fp16_enabled())
            self._round.engine_scale = _engine_scale(engine.optimizer) if self._round.scaled else None
            tensors, keys = self._fresh_numbers()
            self._add_part(tensors, keys, intact=True)

    def engine_stepped(self, engine: Any, skipped: bool) -> None:
        """An engine has stepped, or has skipped its step."""
        if id(engine) not in self._round.stepped:
            return
        current = self._round
        current.skipped += skipped
        norm = engine.get_global_grad_norm()
        if hasattr(norm, "detach"):
            self._add_part([norm], [("clip", [])], intact=skipped)
        elif norm is not None:
            current.engine_norm = float(norm)
        self.analysis.examine_engine(current, self.captures, intact=skipped)
        self._finish_step()

    def _begin_step(self, optimizer: Any) -> bool:
        """Begin the step of an optimizer, in a new round if it has stepped in this one. False for one that is no step.

        Frameworks step optimizers to allocate their states, without a backward pass before.
        """
        if not self._fresh.backwards and (id(optimizer) in self._round.stepped or not self._round.backwards):
            return False
        if id(optimizer) in self._round.stepped:
            self._close_round()
        self._round.backwards += self._fresh.backwards
        self._fresh.backwards = 0
        self._round.stepped.add(id(optimizer))
        return True

    def _fresh_numbers(self) -> tuple[list[HostOrDevice], Keys]:
        """Return what has been computed since the last step of an optimizer, and what FP8 has scaled, if it is due."""
        tensors, keys = self._fresh.numbers()
        step, every = self._round.step, SCALES_EVERY[self.level]
        if self._samples is not None:
            for names, table in self._samples.take():
                tensors.append(table)
                keys.append(("fp8_shares", names))
            if (noise := self._samples.take_noise()) is not None:
                tensors.append(noise[1])
                keys.append(("fp8_noise", noise[0]))
            if len(self._round.stepped) == 1:  # other optimizers of the step have their backward passes after it
                self._samples.start(step + 1)
        if "transformer_engine" in sys.modules and len(self._round.stepped) == 1:
            if step % every == 0:
                for names, table in self._scales.look(self._round.backwards):
                    tensors.append(table)
                    keys.append(("fp8", names))
            if (step + 1) % every == 0:
                self._scales.keep(
                    (plain_name(name), own) for root in self._models() for name, own in root.named_modules()
                )
        return tensors, keys

    def _finish_step(self) -> None:
        """Note when the step ended, release its batches before the next, and compare ranks when that is due."""
        self._round.ended = time.perf_counter()
        self.captures.stale = True
        if self._round.step % drift.COMPARE_EVERY == 0 and len(self._round.stepped) == 1:
            self._sum_weights()
        self._conclude_arrived()

    def _close_round(self) -> None:
        """Begin the next round."""
        before = self._open[-1].ended if self._open else self._last_end
        if before is not None:
            self._round.ms = 1000 * (self._round.ended - before)
            self._times.append(self._round.ended - before)
        self._last_end = self._round.ended
        self._open.append(self._round)
        self._round = StepRound(self._round.step + 1)
        self._conclude_arrived()

    def _conclude_arrived(self) -> None:
        """Conclude the rounds whose numbers have arrived, in their order."""
        for current in (*self._open, self._round):
            for part in current.parts:
                if not part.examined and part.readout.arrived():
                    self._examine(current, part, intact=False)
        while self._open and (self._open[0].arrived() or len(self._open) > OPEN_ROUNDS):
            first = self._open.popleft()
            first.wait()
            self.analysis.conclude(first)
        while self._weights and self._weights[0][1].readout.arrived():
            step, part = self._weights.popleft()
            self.analysis.compare_ranks(step, part.numbers("weights"))

    # -- numbers -----------------------------------------------------------------------------

    def _add_part(self, tensors: list[HostOrDevice], keys: Keys, *, intact: bool) -> None:
        """Copy numbers, and check them at once if they have arrived. intact: the weights are those of the round."""
        if self._stepping is not None:
            self._round.scaled = True
            tensors, keys = [*tensors, self._stepping._scale], [*keys, ("scale", [])]
        if not tensors:
            return
        part = Part(tensors, keys)
        self._round.parts.append(part)
        if self.level == "full" or self._round.step == 1:  # what is wrong from the start shows before it is applied
            part.readout.wait()
        if part.readout.arrived():
            self._examine(self._round, part, intact=intact)

    def _examine(self, current: StepRound, part: Part, *, intact: bool) -> None:
        part.examined = True
        self.analysis.examine(current, part, self.captures, intact=intact)

    def _add_gradients(self, optimizer: Any, tensors: list[HostOrDevice], keys: Keys, *, always: bool = False) -> None:
        """Add norms of the gradients of an optimizer if they are due, and the shares that underflow."""
        step, every = self._round.step, UNDERFLOW_EVERY[self.level]
        shares_due = step % every == UNDERFLOW_FIRST % every
        norms_due = always or self.level == "full" or step >= self._norm_last + self._norm_every
        if not (norms_due or shares_due):
            return
        began = time.perf_counter()
        pairs = [(own, own.grad) for own in updated_by(optimizer) if own.is_floating_point()]
        parameters = [own for own, gradient in pairs if gradient is not None]
        if not parameters:
            return
        self._round.sharded |= any(hasattr(own, "device_mesh") or hasattr(own, "_is_flat_param") for own in parameters)
        found = [gradients.local(gradient) for _, gradient in pairs if gradient is not None]
        own, names = [], []
        for name, gradient in zip(self._names_of(optimizer, parameters), found, strict=True):
            if gradient.numel():
                own.append(gradient)
                names.append(name)
        alike = gradients.grouped(own)
        groups = [[names[index] for index in indices] for indices in alike]
        if norms_due:
            tensors += gradients.norms(own, alike)
            keys += [("norm", group) for group in groups]
            self._set_norm_interval(own, time.perf_counter() - began)
        if shares_due:
            scaled = self._stepping is not None and getattr(optimizer, "grad_scale", None) is None
            scale = self._stepping._scale if scaled else 1.0
            tensors += gradients.underflow(own, step, scale, whole=self.level == "full")
            keys += [("underflow", group) for group in groups]
            self._kept = movement.keep(self._names_of(optimizer, parameters), parameters, optimizer, step)

    def _set_norm_interval(self, own: Sequence[torch.Tensor], seconds: float) -> None:
        """Set after how many steps norms are due again, so that they take at most `NORM_SHARE` of the time.

        seconds: what they took of the host's time, with the search for gradients. A model of many small parameters
        takes more of it than of the GPU's.
        """
        self._norm_last = self._round.step
        if any(each.device.type != "cpu" for each in own):
            seconds = max(seconds, KERNELS + sum(each.numel() * each.element_size() for each in own) / BANDWIDTH)
        self._norm_times.append(seconds)
        if self._times and self._round.step >= FIRST_STEPS:
            wanted = math.ceil(min(self._norm_times) / (NORM_SHARE * statistics.median(self._times)))
            self._norm_every = min(max(1, wanted), NORMS_APART)

    def _sum_weights(self) -> None:
        """Copy the norms of the weights of replicas, which are the same on all ranks, bit for bit."""
        if world_size()[0] == 1:
            return
        replicas = [own for own in self._models() if type(own).__name__ == "DistributedDataParallel"]
        in_step = [own for own in replicas if getattr(own, "require_backward_grad_sync", True)]
        weights = [own.detach() for model in in_step for own in model.parameters() if own.requires_grad]
        tensors = gradients.norms(weights) if weights else []
        self._weights.append((self._round.step, Part(tensors, [("weights", []) for _ in tensors])))

    # -- the end -----------------------------------------------------------------------------

    def conclude_all(self) -> None:
        """Wait for the numbers of all steps so far, and report them."""
        if self._round.parts or self._round.skipped:
            self._close_round()
        for current in self._open:
            current.wait()
        self._conclude_arrived()

    def finish(self) -> None:
        """Report what is left, at the end of the run."""
        self.conclude_all()
        ranges.outermost_listeners.clear()
        if self._samples is not None:
            self._samples.close()
        self.captures.close()
        self.analysis.finish()


def _captures_graph() -> bool:
    """True while the calls of this thread are captured in a CUDA graph: nothing may be read in it."""
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _engine_scale(optimizer: Any) -> float | None:
    """Return the loss scale of an optimizer of DeepSpeed; it is on the host."""
    for owner in (getattr(optimizer, "loss_scale_config", None), optimizer):
        for name in ("cur_scale", "loss_scale"):
            if (scale := getattr(owner, name, None)) is not None:
                return float(scale)
    return None
