from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Note,
    Region,
    Rule,
    accelerate_precision,
    any_of,
    autocast_cache,
    constant,
    lazy_pattern,
    library_names,
    python_edits,
    text_of,
)

#: Calls that may follow a backward pass and need no autocast. The fix moves them out of the region too.
_AFTER = frozenset({
    "backward", "step", "update", "scale", "unscale_", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "parameters",
    "item", "detach", "cpu", "mean", "append", "add_scalar", "log", "info", "debug", "print", "write", "format", "len",
    "int", "float", "str", "range", "set_postfix", "set_description", "get_last_lr", "get_scale", "synchronize", "time",
})  # fmt: skip
#: Calls that compute nothing in another dtype.
_SUMS = frozenset({"sum", "mean", "keys", "values", "items", "get", "item", "len", "zip", "range"})
#: Names of helpers in other modules that are searched for a backward pass. Limited by name: each costs a file to read.
_HELPER = lazy_pattern(r"(?i)backward|scaler$")
#: A function with more callers than these is not checked: the work grows with each caller.
_CALLERS = 8


class BackwardInAutocast(Rule):
    """A backward pass runs inside the autocast region of its forward pass.

    ## What it does
    Reports `loss.backward()`, `scaler.scale(loss).backward()` and `accelerator.backward(loss)` inside an enabled region
    of `torch.autocast`, or inside `accelerator.autocast()`. This includes calls in a function that is only called
    inside such a region, and calls of a helper in another module of the tree that runs the backward pass
    (`scaler(loss, optimizer)`).

    ## Why is this bad
    torch's documentation of autocast advises against it. Backward operations run in the dtype of their forward
    operations anyway, so nothing is gained. Python code that runs in the backward pass (an `autograd.Function`, a hook,
    an optimizer that steps inside it, the forward that activation checkpointing repeats) is cast a second time. The
    weights' casts stay in autocast's cache until the region is left: memory of the size of the model in 16 bits, held
    through the backward pass.

    ## Why it is a preview rule
    Much of what it finds loses little: the casts of the weights are kept in memory through the backward pass, and
    Python code in it is cast again. Of the 60 repositories with findings that were not looked at before, those of 40
    were right.

    ## Fix safety
    Unsafe: `backward` and what follows it in the block are moved out of the region. There is a fix only if autocast is
    the only context of the `with`, and only steps, updates and logging follow.

    ## Known limits
    A region that is entered in another file is seen only around a call of the function, and only if one of the two
    files takes a `step`: others measure memory or speed, and so does a function whose gradients no optimizer applies,
    or that clears them in a `finally`. Callers under `no_grad` do not count, nor a region around weights
    in FP16 or BF16: of a DeepSpeed engine, by `param_dtype` in FSDP's policy, or of a model that is cast to it or whose
    class creates its layers in it; nor a region with `cache_enabled=False`.
    Tests (`test_...`) are not reported, since they may do this on purpose, nor is the context of the forward pass if it
    is entered again for the backward pass alone: a `torch.autograd.Function` without `custom_bwd` needs it.
    Accelerate's autocast around nothing but a sum of losses is not reported: the prepared model enters its own. Nor is
    that of an Accelerator for which no argument, launch config or launch line sets a precision: it enters no autocast.
    """

    code, name = "MPG301", "backward-in-autocast"
    severity = "warning"
    preview = True
    message = "`{call}` runs inside the autocast region"
    help = "leave the region before the backward pass"
    triggers = (any_of(b"autocast"), any_of(b"backward("))
    examples = (
        Bad(
            """\
import torch

for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(x) - y).pow(2).mean()
        # backward pass
        loss.backward()  # !
    optimizer.step()
""",
            fixed="""\
import torch

for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(x) - y).pow(2).mean()
    # backward pass
    loss.backward()
    optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        events = [*facts.events("backward"), *(e for e in facts.events("framework") if self._runs_backward(e, facts))]
        for event in events:
            if any(scope.name.startswith("test_") for scope in event.scope.within()):
                continue
            region = self._region(event.call, facts)
            if region is None or self._is_on_purpose(event.call) or self._computes_nothing(event, region, facts):
                continue
            if self._is_thrown_away(event.call) or _is_zero(event.subject):
                continue
            if autocast_cache.keeps_no_casts(region, facts) or autocast_cache.has_low_weights(region, event, facts):
                continue
            if region.kind == "accelerator_autocast" and not accelerate_precision.may_be_mixed(
                facts.of(region.call or event.call)
            ):
                continue
            if event.kind == "framework" or facts.has_step(event.scope):
                made = region.call
                notes = (Note("the region", made.span, facts.elsewhere(made)),) if made is not None else ()
                fix = self._fix(event.call, facts)
                yield self.at(event, call=facts.short(event.call.node), notes=notes, fix=fix)

        for call in [call for name, calls in facts.calls.items() if _HELPER.search(name) for call in calls]:
            inner = self._backward_in_helper(call, facts) if self._region(call, facts) is not None else None
            if inner is not None and not self._is_thrown_away(call, inner):
                notes = (Note("its backward pass", inner.span, facts.elsewhere(inner)),)
                yield self.at(call, call=facts.short(call.node), notes=notes)

    def _backward_in_helper(self, call: Call, facts: Facts) -> Call | None:
        """Return the `backward()` call in the helper that a call runs, if it is not reported itself."""
        for function in facts.functions(call):
            for inner in function.scope.calls:
                plain = inner.name == "backward" and inner.receiver is not None and not inner.positional
                if plain and not any(region.kind != "no_grad" for region in facts.regions(inner)):
                    return inner if function.facts is not facts or self._region(inner, facts) is None else None
        return None

    def _is_thrown_away(self, call: Call, inner: Call | None = None) -> bool:
        """True if no step follows, and a `finally` clears the gradients: `optimizer.zero_grad()`, as in a warm-up."""
        scopes = (call.scope, inner.scope) if inner is not None else (call.scope,)
        calls = [each for scope in scopes for each in scope.calls]
        clears = [each.line for each in calls if each.name == "zero_grad"]
        if not clears or any(each.name == "step" for each in calls):
            return False
        return any(
            isinstance(node, cst.Try)
            and node.finalbody is not None
            and any(each is call.line for each in self._inside(node.body))
            and any(each is line for line in clears for each in self._inside(node.finalbody))
            for node in self._inside(call.scope.node)
        )

    def _inside(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the statements in a statement."""
        for child in node.children:
            if isinstance(child, (cst.BaseStatement, cst.BaseSuite)):
                yield child
                yield from self._inside(child)

    def _is_on_purpose(self, call: Call) -> bool:
        """True if the context of the forward pass is entered again for the backward pass alone.

        A `torch.autograd.Function` without `custom_bwd` runs its backward in the autocast that is active then; it may
        be in any module that builds the model.
        """
        item = call.withs[-1] if call.withs else None
        if item is None or any(
            item in each.withs and each.statement is not call.statement for each in call.scope.calls
        ):
            return False
        return any(each.order < item.order and text_of(each.expr) == text_of(item.expr) for each in call.scope.withs)

    def _computes_nothing(self, event: Event, region: Region, facts: Facts) -> bool:
        """True if Accelerate's autocast is around the sum of losses only: the prepared model enters it by itself."""
        item = event.call.withs[-1] if event.call.withs else None
        if region.kind != "accelerator_autocast" or event.kind != "framework" or item is None:
            return False
        loss = event.call.argument(0, "loss")
        records = facts.flow.backward(loss, event.call) if loss is not None else []
        inside = [each for each in records if isinstance(each, Call) and item in each.withs]
        return bool(records) and all(each.name in _SUMS for each in inside)

    def _runs_backward(self, event: Event, facts: Facts) -> bool:
        return bool(facts.kinds(event.subject, event.call) & library_names.RUNS_BACKWARD)

    def _region(self, call: Call, facts: Facts, depth: int = 3) -> Region | None:
        """Return the region around a call, or else one that surrounds all calls of its function."""
        unsure = {
            region
            for item in call.withs
            if any(
                not each.kind for each in facts.entered(item)
            )  # `with (pipeline.autocast or accelerator.autocast)():`
            for region in facts.entered(item)
        }
        for region in reversed(facts.regions(call)):
            if region.kind == "accelerator_autocast" and region.guard.joined(call.guard).possible:
                return region if region not in unsure else None
        found = facts.autocasts(call, depth=0)
        if found:
            return found[-1][0]
        callers = facts.callers(call.scope) if depth else []
        if facts.regions(call) or facts.escapes(call.scope) or not callers:
            return None
        outer: Region | None = None
        for each in callers if len(callers) <= _CALLERS else ():
            its = facts.of(each)
            if its.is_inference(each):
                continue
            trains = its is facts or facts.calls.get("step") or its.calls.get("step")
            outer = self._region(each, its, depth - 1) if trains else None
            if outer is None:
                return None
        return outer

    def _fix(self, call: Call, facts: Facts) -> Fix | None:
        item = call.withs[-1] if call.withs else None
        regions = [region for region in facts.regions(call) if region.kind == "autocast"]
        if item is None or len(facts.autocasts(call, depth=0)) != 1 or len(regions) != 1:
            return None
        if not any(region.kind == "autocast" for region in facts.entered(item)):
            return None
        edits = python_edits.moved_out(facts, call, item)
        if not edits:
            return None
        rest = (each for each in call.scope.calls if item in each.withs and each.span[0] >= edits[0].start)
        if any(each.name not in _AFTER for each in rest):
            return None
        return Fix("Leave the region before the backward pass", "unsafe", tuple(edits))


def _is_zero(node: cst.CSTNode | None) -> bool:
    """True for a loss that is multiplied by zero, whose backward pass only initializes: `(out * 0).sum()`."""
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        node = node.func.value
    if not isinstance(node, cst.BinaryOperation):
        return False
    is_product = isinstance(node.operator, cst.Multiply)
    return is_product and any(constant(each) == (0,) for each in (node.left, node.right))
