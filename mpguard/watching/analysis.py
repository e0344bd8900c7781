"""`Analysis`: makes lines and events of the numbers of each round."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

from mpguard.core.watch_levels import WatchLevel
from mpguard.nn.fp8.filters import plain_name
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.runtime import guard as guards
from mpguard.runtime.ranks import rank, world_size
from mpguard.watching import detect, drift, gradients, suggest
from mpguard.watching.fp8_report import Fp8Report
from mpguard.watching.output import JsonLines, Terminal, Trackers, WatchEvent, plain
from mpguard.watching.replay import EXPLODED, FINITE, CapturedCall, Captures, name_in_owner, replay
from mpguard.watching.rounds import Part, StepRound
from mpguard.watching.trace import LOSS, Located

if TYPE_CHECKING:
    from torch import nn

#: The share of gradients below the smallest normal number of the format in force from which it is an event.
UNDERFLOW_SHARE = 0.3

#: Checks in a row at which all gradients are zero, and the share of weights that a step leaves as they are, from which
#: it is an event; the fewest sampled weights with gradients.
ZERO_CHECKS, STUCK_SHARE, FEWEST_MOVED = 5, 0.9, 64

#: Checks in a row at which all gradients of a module are zero, and those of others are not, from which it is an event.
DEAD_CHECKS = 20

#: Modules whose shares are written, those that underflow most first.
WRITTEN_MODULES = 16

#: Values above this are no result of an operation that an epsilon would bound: they were large before.
HUGE = 1e15

#: Replays in a run.
REPLAYS = 5

#: Why there is no replay on a GPU, except with `full`.
SEEN_LATE = "it was seen after the step was applied, which has overwritten the weights; `--watch full` checks before"


class Analysis:
    """Makes lines and events of the numbers of each round, and reports them. steps, skipped: of the whole run."""

    def __init__(self, level: WatchLevel, file: JsonLines) -> None:
        self.level = level
        self.file, self.terminal, self.trackers = file, Terminal(), Trackers()
        self.steps = self.skipped = self.bad_steps = 0
        self._modules: list[str] = []
        self._replays = 0
        self._was_bad = False
        self._autocast = ""  # the dtype of autocast around the model
        self._zeros = 0  # checks in a row at which all gradients were zero
        self._dead: dict[str, int] = {}  # the same, for each module
        self._stuck_reported = False
        self._jumps, self._divergence, self._collapse = detect.NormJumps(), detect.Divergence(), detect.ScaleCollapse()
        self._losses: deque[float] = deque(maxlen=drift.COMPARE_EVERY)
        self._ranks = drift.RankReports()
        self._underflows: set[str] = set()
        self._fp8, self._shares = detect.Fp8Ranges(), Fp8Report(self._emit)
        self._apart: set[tuple[str, int]] = set()

    @property
    def policy(self) -> Policy | None:
        """The policy in force; None in a script that activated none."""
        guard = guards.current()
        return guard.plan.policy if guard is not None else None

    def know_modules(self, root: nn.Module) -> None:
        """Learn the names of the modules of a model."""
        self._modules += [plain_name(name) for name, _ in root.named_modules() if name]

    def _emit(self, event: WatchEvent) -> None:
        self.file.write_event(event.line())
        self.terminal.report(event)
        self.trackers.log_event(event, self.terminal.counts[event.event])

    # -- NaN and Inf -------------------------------------------------------------------------

    def examine(self, current: StepRound, part: Part, captures: Captures, *, intact: bool) -> None:
        """Look for NaN and Inf in numbers that have just arrived, and find where they come from.

        intact: True if the weights are those that the numbers were computed with.
        """
        self._autocast = captures.dtype or self._autocast
        losses = part.numbers("loss")
        norms = {name: values[0] for name, values in part.rows("norm").items()}
        bad_loss = any(not math.isfinite(loss) for loss in losses)
        bad_norms = {name: norm for name, norm in norms.items() if not math.isfinite(norm)}
        clips = part.numbers("clip")
        bad_clip = any(not math.isfinite(clip) for clip in clips)
        if not (bad_loss or bad_norms or bad_clip):
            return
        overflow = any(part.numbers("found_inf")) or (current.skipped and current.scaled)
        if overflow and not bad_loss and self._collapse.in_a_row < 2:
            return  # the loss scale finds the largest scale by such overflows
        self._found_bad(current, captures, losses if bad_loss else [], norms, intact=intact)

    def examine_engine(self, current: StepRound, captures: Captures, *, intact: bool) -> None:
        """Look for NaN and Inf in what an engine has on the host."""
        bad = current.engine_norm is not None and not math.isfinite(current.engine_norm)
        if bad and not (current.scaled and current.skipped and self._collapse.in_a_row < 2):
            self._found_bad(current, captures, [], {}, intact=intact)

    def _found_bad(
        self, current: StepRound, captures: Captures, losses: list[float], norms: dict[str, float], *, intact: bool
    ) -> None:
        """Report NaN or Inf once per round, with the module that made it; not again while it lasts."""
        if current.handled:
            return
        current.handled = True
        self.bad_steps += 1
        if self._was_bad:
            return
        self._was_bad = True
        found = self._locate(captures, losses, norms, intact=intact)
        self._emit(self._event_of(found, current, losses, norms))

    def _locate(self, captures: Captures, losses: list[float], norms: dict[str, float], *, intact: bool) -> Located:
        """Return the first bad module: by a replay, else from the order of the parameters."""
        if not intact:
            return _by_order(losses, norms, SEEN_LATE)
        if self._replays >= REPLAYS:
            return _by_order(losses, norms, f"there were {REPLAYS} replays in this run already")
        batches = captures.batches
        if not batches and captures.reason:
            return _by_order(losses, norms, f"the batch cannot be replayed: {captures.reason}")
        if not batches:
            return _by_order(losses, norms, "the batch of the first step is not kept; `mpguard.watch(model)` keeps it")
        self._replays += 1
        found = Located(None)
        for batch in _suspects(batches, losses, captures.dropped):
            with _unrecorded():
                found = replay(batch, bad_loss=bool(losses))
            if found.module is not None and batch.first:
                found = dataclasses.replace(found, module=name_in_owner(batch.module(), found.module))
            if found.module is not None or not found.replayed:
                break
        if not found.replayed:
            return _by_order(losses, norms, found.reason)
        if found.module in (None, LOSS) and losses:
            return Located(LOSS, "forward", _kind_of(losses), found.inputs)
        if found.reason.startswith(EXPLODED):
            return found
        if found.reason == FINITE and world_size()[0] > 1:
            return Located(None, "backward", reason="the batch of this rank is finite: another rank made it")
        return found if found.module is not None else _by_order(losses, norms, found.reason)

    def _event_of(self, found: Located, current: StepRound, losses: list[float], norms: dict[str, float]) -> WatchEvent:
        bad = sorted(name for name, norm in norms.items() if not math.isfinite(norm))
        loss = {"loss": losses[0] if losses else None}
        value = {**found.value(), **loss, "parameters": bad[:8], "parameters_total": len(bad)}
        what = "the loss is not finite" if losses else "gradients are not finite"
        if found.reason.startswith(EXPLODED):
            text = f"the gradient norm is not finite: {found.reason}"
            return WatchEvent("nonfinite", current.step, None, value, suggest.for_divergence(self.policy), text)
        text = (
            f"{what}; the module is not known: {found.reason}" if found.module is None else f"{what}: {_text_of(found)}"
        )
        return WatchEvent("nonfinite", current.step, found.module, value, self._hint_for(found, losses), text)

    def _hint_for(self, found: Located, losses: list[float]) -> str:
        if found.module is None:
            if self.level != "full" and found.reason == SEEN_LATE:
                return suggest.FOR_LATE
            return suggest.for_unknown() if losses else suggest.for_jump()
        dtype = found.inputs[0]["dtype"] if found.inputs else self._autocast
        if found.phase == "input":
            return suggest.for_batch(dtype)
        if found.phase == "weights":
            return suggest.for_weights(found.module, trained=self.steps > 0)
        if (huge := _huge(found)) and dtype != "float16":
            return suggest.for_huge(*huge)
        if found.module == LOSS:
            return suggest.for_loss(dtype, backward=found.phase == "backward")
        if found.buffers:
            return suggest.for_buffers(found.module, found.buffers)
        computed = found.computed
        if computed is not None and computed.tried and computed.largest is not None:
            return suggest.for_overflow(found.module, self.policy, self._modules, computed.dtype, computed.weights)
        # What is not finite in FP32 either, or was computed in it, has another cause than the precision.
        in_fp32 = computed is not None and (computed.tried or computed.dtype == "float32")
        overflowed = found.kind == "inf"
        if found.phase == "backward" and dtype in ("float32", "bfloat16"):
            in_fp32 = in_fp32 or overflowed or dtype == "float32"  # BF16 has the range of FP32
        return suggest.for_module(
            found.module, self.policy, self._modules, overflowed=overflowed, in_fp32=in_fp32, phase=found.phase,
            between=bool(found.before),
        )  # fmt: skip

    # -- rounds ------------------------------------------------------------------------------

    def conclude(self, current: StepRound) -> None:
        """Write the line of a round, and look for events in its numbers."""
        loss, norm, scale = current.loss, current.norm, current.scale
        skipped = bool(current.skipped or any(current.numbers("found_inf")))
        self.steps += 1
        self.skipped += skipped
        line = {
            "event": "step", "step": current.step, "loss": loss, "grad_norm": norm, "loss_scale": scale,
            "ms": round(current.ms, 3) if current.ms is not None else None,
        }  # fmt: skip
        if current.sharded and norm is None:
            line["grad_norm_of_rank"] = current.own_norm
        if skipped:
            line["skipped"] = True
        self.file.write_step(line)
        self.trackers.log_step(line)
        if not current.handled:
            self._was_bad = False
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
        self._check_skips(current, skipped, scale)
        self._check_curves(current, loss, norm if norm is not None else current.own_norm, skipped)
        self._check_zeros(current, scale)
        self._check_movement(current, skipped)
        self._check_underflow(current, scale)
        self._check_fp8(current)
        self._shares.add(current.step, {**current.rows("fp8_shares"), **current.rows("fp8_noise")}, self.policy)

    def _check_skips(self, current: StepRound, skipped: bool, scale: float | None) -> None:
        collapsed = self._collapse.add(skipped, scale)
        if skipped:
            at = f" at loss scale {scale:g}" if scale is not None else ""
            reason = "overflow of scaled gradients" if current.scaled else "NaN or Inf in the gradients"
            hint = None if current.scaled else suggest.for_skips(self.policy, scaled=False)
            text = f"the step was skipped: {reason}{at}"
            value = {"loss_scale": scale, "in_a_row": self._collapse.in_a_row}
            self._emit(WatchEvent("skipped_step", current.step, None, value, hint, text))
        if collapsed and current.scaled:
            text = f"the loss scale collapses: {self._collapse.in_a_row} steps in a row were skipped"
            text += f", it is {scale:g}" if scale is not None else ""
            hint = suggest.for_skips(self.policy, scaled=True, scale=scale)
            self._emit(WatchEvent("loss_scale_collapse", current.step, None, {"loss_scale": scale}, hint, text))

    def _check_curves(self, current: StepRound, loss: float | None, norm: float | None, skipped: bool) -> None:
        if norm is not None and not skipped and (times := self._jumps.add(norm)) is not None:
            text = f"the gradient norm jumps to {norm:.4g}, {times:.3g} times the median of the last steps"
            value = {"grad_norm": norm, "times": times}
            self._emit(WatchEvent("grad_norm_jump", current.step, None, value, suggest.for_jump(), text))
        if loss is not None and (found := self._divergence.add(loss)) is not None:
            now, best = found
            text = f"the loss diverges: its median is {now:.4g}, the best was {best:.4g}"
            hint = suggest.for_divergence(self.policy)
            self._emit(WatchEvent("loss_divergence", current.step, None, {"now": now, "best": best}, hint, text))

    def _check_zeros(self, current: StepRound, scale: float | None) -> None:
        """Report gradients that are all zero at several checks in a row: nothing trains."""
        norms = [values[0] for values in current.rows("norm").values()]
        if not norms:
            return
        self._zeros = self._zeros + 1 if not any(norms) else 0
        if self._zeros == ZERO_CHECKS:
            kind = self._format(scale)
            text = f"all gradients are exactly zero, at {ZERO_CHECKS} steps in a row: nothing trains"
            value = {"parameters": len(norms), "loss_scale": scale, "format": kind}
            hint = suggest.for_zeros(kind, scale)
            self._emit(WatchEvent("zero_gradients", current.step, None, value, hint, text))
        elif not self._zeros and not current.sharded:  # a shard may be of rows that no batch has
            self._look_at_dead(current, scale)

    def _look_at_dead(self, current: StepRound, scale: float | None) -> None:
        """Report modules whose gradients are all zero at many checks in a row, while others train."""
        alive: dict[str, bool] = {}
        for name, values in current.rows("norm").items():
            module = name.rpartition(".")[0] or name
            alive[module] = alive.get(module, False) or bool(values[0])
        self._dead = {module: self._dead.get(module, 0) + 1 for module, lives in alive.items() if not lives}
        dead = [module for module, count in self._dead.items() if count == DEAD_CHECKS]
        if dead:
            kind = self._format(scale)
            more = f" and {len(dead) - 1} other modules" if len(dead) > 1 else ""
            text = f"all gradients of `{dead[0]}`{more} are exactly zero, at {DEAD_CHECKS} checks in a row"
            value = {"modules": dead[:WRITTEN_MODULES], "total": len(dead), "loss_scale": scale, "format": kind}
            hint = suggest.for_dead(kind, scale)
            self._emit(WatchEvent("zero_gradients", current.step, dead[0], value, hint, text))

    def _check_movement(self, current: StepRound, skipped: bool) -> None:
        """Report once that a step leaves nearly all weights as they are, though they have gradients."""
        rows = current.rows("movement")
        wanted = sum(row[0] for row in rows.values())
        if skipped or self._stuck_reported or wanted < FEWEST_MOVED:
            return
        share = sum(row[1] for row in rows.values()) / wanted
        if share >= STUCK_SHARE:
            self._stuck_reported = True
            text = f"the step leaves {share:.0%} of the weights as they are, though their gradients are not zero"
            text += ": the updates are below the last bit of the weights"
            hint = suggest.for_stuck()
            self._emit(WatchEvent("stuck_weights", current.step, None, {"share": round(share, 4)}, hint, text))

    def _check_underflow(self, current: StepRound, scale: float | None) -> None:
        rows = current.rows("underflow")
        if not rows:
            return
        by_module: dict[str, list[float]] = {}
        for name, row in rows.items():
            module = name.rpartition(".")[0] or name
            by_module[module] = [
                one + other for one, other in zip(by_module.get(module, [0.0] * len(row)), row, strict=True)
            ]
        shares = gradients.shares(by_module)
        kind = self._format(scale)
        worst = sorted(shares, key=lambda module: -shares[module][kind])
        written = {module: shares[module] for module in worst[:WRITTEN_MODULES]}
        self._emit(WatchEvent("underflow_shares", current.step, None, plain(_rounded(written))))
        bad = [module for module in worst if shares[module][kind] > UNDERFLOW_SHARE]
        fresh = [module for module in bad if module not in self._underflows]
        if fresh and kind != "bf16":
            self._underflows.update(fresh)
            module = fresh[0]
            more = f", and in {len(fresh) - 1} other modules" if len(fresh) > 1 else ""
            text = (
                f"{shares[module][kind]:.0%} of the gradients of `{module}` are below the smallest normal number of "
                f"{kind.upper()}{more}"
            )
            hint = suggest.for_underflow(kind, module, self.policy, self._modules, scaled=scale is not None)
            self._emit(WatchEvent("underflow", current.step, module, {"format": kind, **shares[module]}, hint, text))

    def _check_fp8(self, current: StepRound) -> None:
        found: dict[str, dict[str, float]] = {}
        for name, (times, largest) in current.rows("fp8").items():
            for kind, too_large in self._fp8.add(name, times, largest):
                found.setdefault(kind, {})[name] = too_large
        for kind, tensors in found.items():
            name = max(tensors, key=lambda each: tensors[each])
            module, _, tensor = name.partition(": ")
            more = f", and {len(tensors) - 1} other tensors" if len(tensors) > 1 else ""
            if kind == "fp8_saturation":
                text = f"the {tensor} of `{module}` is up to {tensors[name]:.3g} times what its FP8 scale allows{more}"
                hint = suggest.for_saturation(module, self._modules)
            else:
                text = f"the largest value of the {tensor} of `{module}` has grown {tensors[name]:.3g} times{more}"
                hint = suggest.for_scale_drift(module, self._modules)
            value = {"times": dict(list(tensors.items())[:WRITTEN_MODULES]), "tensors": len(tensors)}
            self._emit(WatchEvent(kind, current.step, module, value, hint, text))

    def _format(self, scale: float | None) -> str:
        """Return the format that gradients are computed in."""
        policy = self.policy
        if policy is not None and policy.low_bit_recipe is not None:
            return "e5m2" if policy.fp8 == "hybrid" else "e4m3"
        in_fp16 = self._autocast == "float16" or (policy is not None and policy.fp16)
        return "fp16" if scale is not None or in_fp16 else "bf16"

    # -- ranks -------------------------------------------------------------------------------

    def compare_ranks(self, step: int, weights: list[float]) -> None:
        """Publish what this rank has; on rank 0, compare what all have."""
        facts: dict[str, Any] = {"weights": ",".join(map(float.hex, weights)) if weights else None}
        if self._losses:
            facts |= {"loss": statistics.median(self._losses), "spread": detect.deviation(self._losses)}
        self._ranks.publish(step, plain(facts))
        self._read_ranks()

    def _read_ranks(self) -> None:
        for step, reports in self._ranks.complete():
            for other in drift.different_weights(reports):
                self._report_apart(
                    "weights", other, step, f"the weights of rank {other} differ from those of the others"
                )
            medians = drift.median_losses(reports)
            if medians is None or len(reports) < 3:
                continue
            losses = medians[0]
            for other in detect.apart(*medians):
                middle = statistics.median(losses)
                text = f"the loss of rank {other} is {losses[other]:.4g}, the median of all is {middle:.4g}"
                self._report_apart("loss", other, step, text)

    def _report_apart(self, what: str, other: int, step: int, text: str) -> None:
        if (what, other) not in self._apart:
            self._apart.add((what, other))
            value = {"what": what, "rank": other}
            self._emit(WatchEvent("ranks_apart", step, None, value, suggest.for_ranks_apart(what != "weights"), text))

    def finish(self) -> None:
        """Report what is left, and close the file."""
        if rank() == 0:
            self._read_ranks()
        self.terminal.note(self._shares.finish(self.policy))
        self.terminal.summarize(self.steps, self.skipped, self.bad_steps)
        self.file.close()


def _suspects(batches: list[CapturedCall], losses: list[float], dropped: int) -> list[CapturedCall]:
    """Return the batches to replay: that of the first loss that is not finite, if losses and batches correspond."""
    if losses and not dropped and len(losses) == len(batches):
        return [batch for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
    return list(batches)


def _huge(found: Located) -> tuple[str, float] | None:
    """Return what went into a module, or its weights, with the magnitude, if that is near the end of FP32's range."""
    if found.phase != "forward" or found.module is None:
        return None
    weights = found.computed.largest_weight if found.computed is not None else None
    if weights is not None and weights > HUGE:
        return f"the weights of `{found.module}`", weights
    ends = [abs(float(each[end])) for each in found.inputs for end in ("min", "max") if each.get(end) is not None]
    largest = max((end for end in ends if math.isfinite(end)), default=0.0)
    what = "the model's outputs" if found.module == LOSS else f"the inputs of `{found.module}`"
    return (what, largest) if largest > HUGE else None


def _kind_of(values: list[float]) -> str:
    return "nan" if any(map(math.isnan, values)) else "inf"


def _text_of(found: Located) -> str:
    """Return what was found, for the terminal."""
    kind = {"nan": "NaN", "inf": "Inf"}[found.kind]
    ranges = "; ".join(
        f"{each['dtype']} {list(each['shape'])} in [{each['min']:.4g}, {each['max']:.4g}]" for each in found.inputs
    )
    if found.phase == "input":
        return f"the batch itself has {kind} ({ranges})"
    named = found.module if found.module == LOSS else f"`{found.module}`"
    if found.phase == "weights":
        return f"the weights of {named} have {kind} ({found.reason})"
    got = f", from {'gradients' if found.phase == 'backward' else 'inputs'}: {ranges}" if ranges else ""
    named += f", before it calls `{found.before}`," if found.before else ""
    buffers = f"; its buffer {', '.join(found.buffers)} is not finite" if found.buffers else ""
    by_order = "" if found.replayed else f" (from the order of the parameters, not replayed: {found.reason})"
    return (
        f"the first {kind} is made by {named} in the {found.phase} pass{got}{_computed_text(found)}{by_order}{buffers}"
    )


#: The largest number of the 16-bit formats.
_LARGEST = {"float16": (Dtype.FP16.short.upper(), Dtype.FP16.largest), "bfloat16": ("BF16", Dtype.BF16.largest)}


def _computed_text(found: Located) -> str:
    """Return how the module computed: the dtype of autocast may be another than those of its inputs and weights."""
    computed = found.computed
    if computed is None or computed.dtype not in _LARGEST:
        return ""
    name, top = _LARGEST[computed.dtype]
    text = f"; computed in {name}"
    if computed.weights == "float32":
        text += " by autocast, though its weights are FP32"
    if computed.largest is not None:
        above = f" up to {computed.largest:.4g}, over the {top:g} of {name}" if computed.largest > top else " finite"
        text += f"; in FP32 its results are{above}"
    elif computed.tried:
        text += "; in FP32 its results are not finite either"
    return text


def _unrecorded() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the proof records nothing: a replay is no part of the training."""
    guard = guards.current()
    return contextlib.nullcontext() if guard is None else guard.recorder.suspended()


def _by_order(losses: list[float], norms: dict[str, float], reason: str) -> Located:
    """Return the module at which gradients become bad, by the order of the parameters; unknown if the loss is bad."""
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if losses or not bad or len(bad) == len(norms):
        return Located(None, "forward" if losses else "backward", reason=reason, replayed=False)
    module, kind = bad[-1].rpartition(".")[0] or bad[-1], _kind_of([norms[bad[-1]]])
    return Located(module, "backward", kind, reason=reason, replayed=False)


def _rounded(shares: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {module: {kind: round(share, 4) for kind, share in own.items()} for module, own in shares.items()}
