from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    Rule,
    any_of,
    compatible,
    dotted,
    events,
    fp8_facts,
)

_SETTING = "enable_fsdp_float8_all_gather"
_REBINDS = frozenset({"add_param_group", "prepare", "param_groups"})


class OptimizerBeforeConversion(Rule):
    """The optimizer is built from parameters that an FP8 conversion replaces afterwards.

    ## What it does
    Reports an optimizer over `model.parameters()` that is built before the model is converted by accelerate's
    `convert_model` (Transformer Engine), or by torchao with float8 all-gather, and is not rebuilt afterwards.

    ## Why is this bad
    These conversions put new Parameter objects into the model: Transformer Engine's layers are other modules, and
    all-gather wraps each weight. The optimizer keeps the old ones, whose gradients stay None: the weights never train,
    and nothing warns. Observed with torchao 0.18: of two converted layers no weight changed, both biases did. torchao
    without all-gather keeps the Parameter objects, in either order.

    ## Known limits
    Checked within one function. An optimizer that receives the new parameters (`add_param_group`, `param_groups`) or is
    passed to `Accelerator.prepare` is not reported.
    """

    code, name = "MPG417", "optimizer-before-conversion"
    severity = "error"
    message = "`{optimizer}` holds the parameters from before the conversion, which replaces them"
    help = "convert the model first, then build the optimizer"
    triggers = (any_of(b"convert_model", b"enable_fsdp_float8_all_gather"), any_of(b"parameters()"))
    examples = (
        Bad(
            """\
import torch
from accelerate.utils import convert_model

def main():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # !
    convert_model(model)
    train(model, optimizer)
"""
        ),
        Good(
            """\
import torch
from accelerate.utils import convert_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

def plain(model):
    optimizer = torch.optim.AdamW(model.parameters())
    convert_to_float8_training(model, config=Float8LinearConfig())
    return optimizer

def right(model):
    convert_model(model)
    return torch.optim.AdamW(model.parameters())

def again(model):
    optimizer = torch.optim.AdamW(model.parameters())
    convert_model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    return optimizer
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in (*facts.events("convert_accelerate"), *facts.events("convert")):
            if not event.key or not self._replaces(event, facts):
                continue
            built = [call for call in event.scope.calls if self._optimizes(call, event, facts)]
            before = [call for call in built if call.order < event.order]
            if not before or any(call.order > event.order for call in built) or self._rebinds(event):
                continue
            last = before[-1]
            notes = (Note("converted here", event.span),)
            yield self.at(last, optimizer=facts.short(last.func), notes=notes)

    def _replaces(self, event: Event, facts: Facts) -> bool:
        if event.call.name == "convert_model" or facts.called_path(event.call).endswith(".convert_model"):
            return not {"to_transformer_engine", "_convert_linear"} & set(event.call.keywords) and (
                len(event.call.positional) == 1
            )
        config = event.call.argument(None, "config")
        made = fp8_facts.float8_configs(facts, config, event.call) if config is not None else []
        return bool(made) and all(each is not None and each.on(_SETTING) for each in made)

    def _optimizes(self, call: Call, event: Event, facts: Facts) -> bool:
        """True if a call builds an optimizer over the parameters of the converted model."""
        if (
            not call.node.args
            or not events.is_optimizer(facts, call.node, call)
            or not compatible(call.guard, event.call.guard)
        ):
            return False
        given = call.argument(0, "params")
        records = facts.flow.backward(given, call, depth=2) if given is not None else []
        names = ("parameters", "named_parameters")
        return any(isinstance(r, Call) and r.name in names and dotted(r.receiver) == event.key for r in records)

    def _rebinds(self, event: Event) -> bool:
        """True if the optimizer may receive the new parameters later in the function."""
        return any(call.name in _REBINDS and call.order > event.order for call in event.scope.calls) or any(
            "param_groups" in use.path and use.order > event.order for uses in event.scope.uses.values() for use in uses
        )
