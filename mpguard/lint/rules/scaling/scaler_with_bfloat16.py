from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Note,
    Region,
    Rule,
    any_of,
    constant,
    dotted,
    lazy_pattern,
    path_condition,
    python_edits,
    scaler_dtype,
)

_BF16 = lazy_pattern(r"(?i)(?:use_|is_|with_|torch\.)?(?:bf16|bfloat16)(?:[-_]mixed|_enabled)?")
_IS_FP16 = lazy_pattern(r"(?i)(?:use_|is_|with_|torch\.)?(?:fp16|float16|half)(?:[-_]mixed|_enabled)?")
#: Conditions on FP16: the scaler is meant for that branch.
_FP16 = lazy_pattern(r"(?i)fp16|float16|half|dtype|precision|\b16")


class ScalerWithBfloat16(Rule):
    """A GradScaler scales the losses of a BF16 run.

    ## What it does
    Reports a GradScaler whose `enabled` argument is true for BF16 (`enabled=dtype in ("float16", "bfloat16")`), and one
    that is active while the loss that it scales is computed under a BF16 autocast, and never under an FP16 one.

    ## Why is this bad
    BF16 has the exponent range of FP32: its gradients don't underflow, and nothing needs scaling. The scaler still
    costs a pass over all gradients and a synchronization with the GPU at each step, takes fewer steps (it skips those
    whose scaled gradients overflow, while it searches for a scale), and doubles the scale every 2000 steps until it
    overflows again. Code that reads or clips gradients has to unscale them unnecessarily.

    ## Fix safety
    Unsafe: the fix disables the scaler (`enabled=False`), or restricts its condition to FP16. The run then takes the
    steps that were skipped.

    ## Known limits
    Silent if the dtype of a region is unknown, if the scaler's `enabled` depends on FP16, and for a loss that comes
    from outside the file.
    """

    code, name = "MPG207", "scaler-with-bfloat16"
    severity = "warning"
    message = "this GradScaler is active under BF16, which needs no loss scaling"
    help = "enable the scaler for FP16 only, or remove it"
    triggers = (any_of(b"GradScaler"),)
    triggers_nearby = (any_of(b"bfloat16", b"bf16", b"BF16"),)
    examples = (
        Bad(
            """\
import torch
from torch.cuda.amp import GradScaler, autocast

USE_BF16 = True
USE_AMP = True
AMP_DTYPE = torch.bfloat16 if USE_BF16 else torch.float16


def train(model, optimizer, loader):
    scaler = GradScaler(enabled=USE_AMP and USE_BF16)  # !
    for batch in loader:
        with autocast(dtype=AMP_DTYPE):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            fixed="""\
import torch
from torch.cuda.amp import GradScaler, autocast

USE_BF16 = True
USE_AMP = True
AMP_DTYPE = torch.bfloat16 if USE_BF16 else torch.float16


def train(model, optimizer, loader):
    scaler = GradScaler(enabled=False)
    for batch in loader:
        with autocast(dtype=AMP_DTYPE):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        steps = facts.events("scaler_step")
        if steps and not any(each.guard.possible for each in steps):
            return  # a constant keeps all steps off
        for scaler in facts.events("scaler"):
            path = facts.called_path(scaler.call)
            if path.rsplit(".", 1)[-1] not in ("GradScaler", "ShardedGradScaler") or not path.startswith("torch."):
                continue
            given, enabled = facts.enabled_argument(scaler.call, path), facts.enabled(scaler.call, path)
            bf16_flags = [
                flag for condition in enabled for flag in _bf16_flags(condition) if enabled.given(flag).possible
            ]
            if bf16_flags and _scales_float16_only(scaler, facts):
                continue
            if bf16_flags:
                alone = any(flag in enabled for flag in bf16_flags)
                fix = self._off(given, scaler, facts) if alone else self._condition(given, scaler, facts)
                yield self.at(scaler, fix=fix)
            elif enabled.possible and not any(_FP16.search(flag) for flag in enabled.flags()):
                region = scaler_dtype.bfloat16_region(scaler, enabled, facts)
                if region is not None and region.call is not None and not _inactive(scaler, region):
                    notes = (Note("the BF16 region", region.call.span, facts.elsewhere(region.call)),)
                    yield self.at(scaler, notes=notes, fix=self._off(given, scaler, facts))

    def _off(self, given: cst.BaseExpression | None, scaler: Event, facts: Facts) -> Fix:
        if given is None:
            edit = python_edits.with_argument(facts, scaler.call, "enabled=False")
        else:
            edit = python_edits.replaced(given, scaler.call, "False")
        return Fix("Switch the scaler off", "unsafe", (edit,))

    def _condition(self, given: cst.BaseExpression | None, scaler: Event, facts: Facts) -> Fix | None:
        """Return the fix of a condition: `dtype in ("float16", "bfloat16")` becomes `dtype == "float16"`."""
        if isinstance(given, cst.BooleanOperation):
            sides = (given.left, given.right)
            kept = [each for each in sides if not _BF16.fullmatch(dotted(each).rpartition(".")[2])]
            text = facts.text(kept[0], scaler.call) if len(kept) == 1 else None
        elif isinstance(given, cst.Comparison) and isinstance(given.comparisons[0].comparator, (cst.Tuple, cst.List)):
            elements = [element.value for element in given.comparisons[0].comparator.elements]
            kept = [each for each in elements if not _BF16.fullmatch(str((constant(each) or (dotted(each),))[0]))]
            left = facts.text(given.left, scaler.call)
            text = f"{left} == {facts.text(kept[0], scaler.call)}" if len(kept) == 1 else None
        else:
            text = None
        if text is None or given is None:
            return None
        return Fix("Enable it for FP16 only", "unsafe", (python_edits.replaced(given, scaler.call, text),))


def _scales_float16_only(scaler: Event, facts: Facts) -> bool:
    """True if each use of a scaler is in a branch for FP16: that it is enabled for BF16 changes nothing."""
    scales = facts.events_around("scale", scaler.scope)
    return bool(scales) and all(
        any(
            isinstance(each, path_condition.Flag) and _IS_FP16.fullmatch(str(each.equals or each.name))
            for each in scale.guard
        )
        for scale in scales
    )


def _inactive(scaler: Event, region: Region) -> bool:
    """True if the region is for the CPU and the scaler for a GPU: torch disables the scaler then."""
    return region.device == "cpu" and constant(scaler.call.argument(0, "device")) != ("cpu",)


def _bf16_flags(condition: path_condition.Condition) -> Iterator[path_condition.Flag]:
    """Yield the BF16 flags of a condition."""
    if isinstance(condition, path_condition.Flag):
        if _BF16.fullmatch(condition.name if condition.equals is None else str(condition.equals)):
            yield condition
    elif isinstance(condition, (path_condition.All, path_condition.Any)):
        for part in condition.parts:
            yield from _bf16_flags(part)
