from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    Object,
    Region,
    Rule,
    any_of,
    autocast_cache,
    text_of,
)

#: A function with more callers than these is not checked: the work grows with each caller.
_CALLERS = 8


class StepInAutocast(Rule):
    """An autocast region is entered once around several optimizer steps: the forward passes use outdated weights.

    ## What it does
    Reports a region of `torch.autocast` with a loop inside that runs forward passes, backward passes and the steps of
    an optimizer. The loop may be in a function that is called inside the region.

    ## Why is this bad
    Autocast keeps the low-precision copies of FP32 weights that need gradients until the outermost region is left. An
    optimizer step does not renew them: after the first one all forward passes compute with the copies of the first
    weights, and gradients are those of the first weights (torch 1.10 to 2.13, observed with 2.13: the loss of the same
    batch does not change).

    ## Known limits
    Not reported: `cache_enabled=False`, weights in FP16 or BF16 (they are not copied), sharded models, and programs
    that compile a model, whose graphs cast in each call, or call `torch.clear_autocast_cache()`.
    """

    code, name = "MPG315", "step-in-autocast"
    severity = "error"
    message = (
        "`{expr}` changes weights whose copies this autocast region keeps: the next forward passes use the old ones"
    )
    help = "enter autocast in each step, around the forward pass and the loss"
    triggers = (any_of(b".step("), any_of(b"for ", b"while "))
    triggers_nearby = (any_of(b"autocast"),)
    examples = (
        Bad(
            """\
import torch

def main(model, loader):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16):  # !
        for x in loader:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
        ),
        Good(
            """\
import torch

def main(model, loader):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        for x in loader:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        reported: set[object] = set()
        for step in [*facts.events("step"), *facts.events("scaler_step")]:
            if facts.is_inference(step.call) or "clear_autocast_cache" in facts.calls or facts.compiles():
                continue
            if not _may_train_a_model(step, facts):
                continue
            found = self._region(step.call, _training_loops(step), facts)
            if found is None or found.call is None or found.call in reported:
                continue
            if autocast_cache.keeps_no_casts(found, facts) or autocast_cache.has_low_weights(found, step, facts):
                continue
            if facts.of(found.call).compiles() or facts.events_around("shard", step.scope):
                continue
            reported.add(found.call)
            expr = facts.short(step.call.node)
            if facts.elsewhere(found.call) is None:
                yield self.at(found.call, expr=expr, notes=(Note("the step is here", step.span),))
            else:
                notes = (Note("the region", found.call.span, facts.elsewhere(found.call)),)
                yield self.at(step, expr=expr, notes=notes)

    def _region(self, call: Call, loops: set[cst.CSTNode], facts: Facts, depth: int = 4) -> Region | None:
        """Return the autocast region around a call that is entered outside of a loop.

        loops: the loops of its function that train; with all of its callers, if it has none itself.
        """
        item = next((each for each in call.withs if any(r.kind == "autocast" for r in facts.entered(each))), None)
        if item is not None:
            regions = [region for region in facts.entered(item) if region.kind == "autocast"]
            inside = loops - set(item.loops)
            return regions[0] if inside and _is_on(regions[0]) else None
        if facts.regions(call):
            decorated = [region for region in facts.regions(call) if region.kind == "autocast"]
            return decorated[0] if decorated and loops and _is_on(decorated[0]) else None
        callers = facts.callers(call.scope) if depth else []
        if not callers or len(callers) > _CALLERS or facts.escapes(call.scope):
            return None
        found: Region | None = None
        for each in callers:
            found = self._region(each, loops | set(each.loops), facts.of(each), depth - 1)
            if found is None:
                return None
        return found


def _is_on(region: Region) -> bool:
    """True if a region is entered wherever a call in it runs, with a low precision or an unknown one."""
    low = [guard for guard, dtype in region.dtypes if dtype is None or dtype in HALF_DTYPES]
    return bool(low) and region.guard.possible and region.device in ("cuda", "cpu", None)


def _may_train_a_model(step: Event, facts: Facts) -> bool:
    """False for an optimizer of chosen parameters: layers that compute their weights from them have nothing copied."""
    optimizer = step.subject if step.kind == "step" else step.call.argument(0, "optimizer")
    made = [each.atom.call for each in facts.evaluate(optimizer, step.call) if isinstance(each.atom, Object)]
    return all(call is None or ".parameters(" in text_of(call.node) for call in made)


def _training_loops(step: Event) -> set[cst.CSTNode]:
    """Return the loops around a step that contain a backward pass too: not those over several optimizers."""
    backwards = [call for call in step.scope.calls if "backward" in call.name]
    if not backwards:
        return set()
    return {loop for loop in step.call.loops if any(loop in each.loops for each in backwards)}
