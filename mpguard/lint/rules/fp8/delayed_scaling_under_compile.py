from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, Note, Rule, any_of, compiled_functions, fp8_facts


class DelayedScalingUnderCompile(Rule):
    """A compiled function enters Transformer Engine's FP8 region with `DelayedScaling`.

    ## What it does
    Reports a region of `te.autocast` or `te.fp8_autocast` whose recipe is a `DelayedScaling`, inside a function or a
    module's `forward` that the file compiles with `torch.compile`, or in a function that it calls.

    ## Why is this bad
    Transformer Engine raises "DelayedScaling is not supported under torch.compile" while the function is traced: its
    history of maxima is state that a graph cannot hold. With `fullgraph=True` the run stops. Without it dynamo falls
    back to running the function uncompiled. On an H200 (Transformer Engine 2.20, torch 2.11;
    benchmarks/results/fp8_limits.json) it stopped with an `InternalTorchDynamoError` if no FP8 layer had run before,
    and ran uncompiled, without a warning, if one had. With `Float8CurrentScaling` the same function ran at once.

    ## Known limits
    A region around the call of a compiled model is a different case and is not checked; nor is a region without a
    recipe, whose default depends on the GPU. Modules inside containers are not followed.
    """

    code, name = "MPG402", "delayed-scaling-under-compile"
    severity = "error"
    in_tests = True
    message = "`DelayedScaling` in a compiled function: Transformer Engine raises while the function is traced"
    help = "use Float8CurrentScaling, or enter the region around the call of the compiled model"
    triggers = (any_of(b"DelayedScaling"), any_of(b"compile"), any_of(b"autocast"), any_of(b"transformer_engine"))
    examples = (
        Bad(
            """\
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

recipe = DelayedScaling()

@torch.compile
def step(x):
    with te.autocast(recipe=recipe):  # !
        return layer(x)
"""
        ),
        Good(
            """\
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

model = torch.compile(torch.nn.Linear(8, 8))
with te.autocast(recipe=DelayedScaling()):
    model(x)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        inside = [
            (item, region)
            for item, region in fp8_facts.entered(facts)
            if fp8_facts.recipe_of(region) == {"DelayedScaling"}
        ]
        compiled = compiled_functions.compiled_scopes(facts) if inside else {}
        for item, region in inside:
            place = compiled.get(item.scope)
            if place is not None:
                span = region.call.span if region.call is not None and region.facts is facts else item.span
                yield self.at(span, notes=(Note("compiled here", place),))
