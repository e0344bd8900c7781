from __future__ import annotations

import itertools
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Edit,
    Facts,
    Fix,
    Note,
    Object,
    Record,
    Rule,
    any_of,
    dotted,
    lightning,
)

_FABRIC = frozenset({"setup", "setup_module", "setup_optimizers"})
#: Classes of Lightning whose methods set up models for a subclass.
_RUNNERS = ("LightningLite", "Fabric")


class SetupResultDropped(Rule):
    """The model that `fabric.setup` or `accelerator.prepare` returns is dropped, and the loop uses the other one.

    ## What it does
    Reports `fabric.setup(model, optimizer)`, `self.setup(model, optimizer)` in a `Fabric` or `LightningLite`, and
    `accelerator.prepare(model, optimizer)` as statements, if the same function then calls that model, or steps that
    optimizer.

    ## Why is this bad
    They return wrappers. Those of Fabric enter the autocast of `precision=`: the model itself runs in FP32 (lightning
    2.6, pytorch-lightning 1.6 to 1.9). Accelerate changes the `forward` of the model in place, but only its wrappers
    synchronize gradients, and only its optimizer uses the GradScaler: under FP16 the optimizer itself applies the
    scaled gradients (accelerate 1.15).

    ## Fix safety
    Unsafe: the run then has the precision, and the devices, that are configured.

    ## Known limits
    Not reported: names that are bound again later, and models that are used in other functions only.
    """

    code, name = "MPG871", "setup-result-dropped"
    severity = "error"
    message = "the result of `{call}` is dropped, and the loop uses `{used}`, {effect}"
    help = "assign it: `{names} = {call}`"
    triggers = (any_of(b".setup", b".prepare("), any_of(b"backward("))
    triggers_nearby = (any_of(b"abric", b"LightningLite", b"Accelerator"),)
    examples = (
        Bad(
            """\
import torch
from lightning.fabric import Fabric

def main(model, loader):
    fabric = Fabric(devices=2, precision="bf16-mixed")
    optimizer = torch.optim.AdamW(model.parameters())
    fabric.setup(model, optimizer)  # !
    for x in loader:
        loss = model(x).sum()
        fabric.backward(loss)
        optimizer.step()
""",
            fixed="""\
import torch
from lightning.fabric import Fabric

def main(model, loader):
    fabric = Fabric(devices=2, precision="bf16-mixed")
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    for x in loader:
        loss = model(x).sum()
        fabric.backward(loss)
        optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        prepared = (event.call for event in facts.events("prepare"))
        setups = (call for name in _FABRIC for call in facts.calls.get(name, ()) if self._is_fabric(call, facts))
        for call in itertools.chain(setups, prepared):
            names = [dotted(each) for each in call.positional]
            if not call.is_statement or not names or not all(names) or facts.is_inference(call):
                continue
            if any(binding.order > call.order for name in names for binding in call.scope.bindings.get(name, ())):
                continue
            used = self._used(call, names)
            if used is not None:
                fabric = call.name in _FABRIC
                text = facts.short(call.node)
                edit = Edit(call.span[0], call.span[0], f"{', '.join(names)} = ")
                yield self.at(
                    call,
                    call=text,
                    used=used[0],
                    effect="which has no precision" if fabric else "without the GradScaler and without DDP",
                    notes=(Note("used here", used[1].span),),
                    help=self.help.format(names=", ".join(names), call=text),
                    fix=Fix("Assign the result", "unsafe", (edit,)),
                )

    def _is_fabric(self, call: Call, facts: Facts) -> bool:
        if call.receiver is None:
            return False
        owner, created = call.scope.owner, list(lightning.created(facts, "Fabric"))
        if dotted(call.receiver) == "self" and owner is not None:
            return any(base.rpartition(".")[2] in _RUNNERS for base in (*owner.base_names, *facts.ancestry(owner)))
        return dotted(call.receiver).rpartition(".")[2] == "fabric" or any(
            isinstance(each.atom, Object) and each.atom.call in created for each in facts.evaluate(call.receiver, call)
        )

    def _used(self, call: Call, names: list[str]) -> tuple[str, Record] | None:
        """Return what a training loop of the function uses afterwards: a model that it calls, or an optimizer."""
        later = [each for each in call.scope.calls if each.order > call.order]
        if not any(each.name in ("backward", "manual_backward") for each in later):
            return None
        stepped = {dotted(each.receiver): each for each in reversed(later) if each.name == "step"}
        called = {dotted(each.func): each for each in reversed(later)}
        for name in names:
            model = called.get(name) if call.name in _FABRIC else None
            record = model if model is not None and isinstance(model.func, (cst.Name, cst.Attribute)) else None
            if (found := record or stepped.get(name)) is not None:
                return name, found
        return None
