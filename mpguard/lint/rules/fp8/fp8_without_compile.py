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
    Rule,
    Scope,
    any_of,
    compiled_functions,
    dotted,
    fp8_facts,
    python_edits,
)


class Fp8WithoutCompile(Rule):
    """torchao's float8 training without `torch.compile` is slower than plain BF16.

    ## What it does
    Reports `torchao.float8.convert_to_float8_training` and accelerate's `AORecipeKwargs` if nothing in the file, in
    what it imports from its own tree, or in its launch config compiles the model.

    ## Why is this bad
    torchao casts and scales in PyTorch operations that only the compiler fuses into the matrix multiplications.
    Measured on an H200: FP8 without compile runs at 0.55 times the speed of plain BF16; with compile it is faster than
    BF16. The loss is the same, so only the speed shows it.

    ## Fix safety
    The fix compiles the model after the conversion (`dynamo_backend="inductor"` for Accelerate). It is unsafe:
    compilation takes minutes at the start, recompiles for new shapes, and a few models do not compile.

    ## Known limits
    A compile that an option enables counts. A helper that converts a model of its caller is not checked if no caller is
    in the linted files, unless it trains the model and nothing in the project compiles. Transformer Engine needs no
    compile and is never reported. FP8 that is only emulated (`emulate=True`) is not checked. A launch flag
    (`accelerate launch --dynamo_backend inductor`) is not seen. An `Accelerator(**arguments)` is not reported, since
    the arguments may contain a dynamo backend.
    """

    code, name = "MPG401", "fp8-without-compile"
    severity = "error"
    message = "torchao float8 without `torch.compile`: about half the speed of plain BF16"
    help = "compile the model, in the code or by a launch flag such as --dynamo_backend"
    triggers = (any_of(b"convert_to_float8_training", b"AORecipeKwargs"),)
    examples = (
        Bad(
            """\
import os

import torch
from torchao.float8 import convert_to_float8_training

torch_compile = 0
torch_compile = int(os.environ.get("TORCH_COMPILE", torch_compile))
model = torch.nn.Linear(1024, 1024)
if torch_compile:
    print("compiled")
convert_to_float8_training(model)  # !
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
            fixed="""\
import os

import torch
from torchao.float8 import convert_to_float8_training

torch_compile = 0
torch_compile = int(os.environ.get("TORCH_COMPILE", torch_compile))
model = torch.nn.Linear(1024, 1024)
if torch_compile:
    print("compiled")
convert_to_float8_training(model)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        found = [
            event
            for event in facts.events("convert")
            if not self._is_outside(event, facts) and not fp8_facts.emulated(facts, event.call)
        ]
        accelerators = facts.events("accelerator")
        # Handlers of a helper may go to an Accelerator that compiles; `**arguments` may contain a dynamo backend.
        if accelerators and not any(event.call.starred for event in accelerators):
            found += [each for each in facts.events("fp8_handler") if _is_torchao_handler(each)]
        if not found or compiled_functions.launched_compiled(facts):
            return
        for event in found:
            call = event.call
            if facts.is_inference(call) or self._base_may_compile(call, facts) or self._is_compiled(event, facts):
                continue
            note = Note(
                "with Accelerate, a launch flag (`--dynamo_backend inductor`) that is not visible here may set it"
            )
            yield self.at(call, notes=(note,) if _is_torchao_handler(event) else (), fix=self._fix(event, facts))

    def _is_outside(self, event: Event, facts: Facts) -> bool:
        """True if the model may be compiled elsewhere, or is not trained.

        It belongs to a caller that is not in the linted files, or is local to a function that only converts it. A model
        that a function trains is compiled by none of its callers if nothing in the project compiles.
        """
        if event.subject is None:
            return True
        if facts.from_outside(event.subject, event.call):
            trained = self._is_trained_here(event, facts) or _is_callback(event.call, facts)
            return not trained or facts.project.compiled_elsewhere(facts.path)
        local = event.scope.kind == "function" and event.call.is_statement and "." not in event.key
        if not local or not event.key:
            return False
        if self._is_looped(event, facts) or self._is_trained_here(event, facts):
            return False  # the function trains, so it is no helper that only converts
        if any(facts.kinds(each.node, each) & {"optimizer", "own_optimizer"} for each in event.scope.calls):
            return False  # nor does a helper make an optimizer
        if self._is_given(event, facts) and facts.optimizers.trainer_of(event.call) is not None:
            return False  # a program that calls it trains: all callers are known
        reach = facts.flow.forward_key(event.key, event.call)
        return not reach.sinks and not reach.outside

    def _is_trained_here(self, event: Event, facts: Facts) -> bool:
        """True if the function trains, or another method of a class that converts itself or what an attribute holds."""
        of_object = event.key.partition(".")[0] == "self" or self._is_stored(event)
        owner = event.scope.owner if of_object else None
        return any(
            each.scope is event.scope or (owner is not None and each.scope.owner is owner)
            for each in facts.events("backward")
        )

    def _is_stored(self, event: Event) -> bool:
        """True if an attribute of the object holds the converted module."""
        return any(
            key.startswith("self.") and dotted(each.value) == event.key
            for key, bound in event.scope.bindings.items()
            for each in bound
        )

    def _is_given(self, event: Event, facts: Facts) -> bool:
        """True if the converted module is a parameter of the function."""
        return any(binding.kind == "param" for binding in facts.bindings(event.key, event.call))

    def _is_looped(self, event: Event, facts: Facts) -> bool:
        """True if the converted module is the variable of a loop."""
        return any(binding.kind == "for" for binding in facts.bindings(event.key, event.call))

    def _base_may_compile(self, call: Call, facts: Facts) -> bool:
        """True if a base class that is not in the tree may compile.

        Lightning does not, around `configure_model`, nor does the base of a class with a training loop of its own.
        """
        owner = call.scope.owner
        if owner is None or not facts.base_unknown(owner):
            return False
        if _is_callback(call, facts):
            return False
        lightning = any(base.endswith(".LightningModule") for base in facts.ancestry(owner))
        steps = [*facts.events("step"), *facts.events("scaler_step")]
        own_loop = all(any(each.scope.owner is owner for each in found) for found in (facts.events("backward"), steps))
        return not own_loop and not (lightning and call.scope.name == "configure_model")

    def _is_compiled(self, event: Event, facts: Facts) -> bool:
        call = event.call
        return (
            facts.compiles(facts.guard_of(call), event)
            or facts.compiled_by(self._same_run(call.scope, facts), event)
            or (self._is_given_away(call, facts) and facts.project.compiled_elsewhere(facts.path))
        )

    def _is_given_away(self, call: Call, facts: Facts) -> bool:
        """True if nothing known trains what a function makes, which other code gets from a registry or by a name."""
        scope = next((each for each in call.scope.within() if each.kind == "function"), None)
        return (
            scope is not None
            and any(
                each.decorators or (each.owner is None and (facts.escapes(each) or facts.of(each).exported(each.name)))
                for each in facts.programs_of(scope)
                if each.kind == "function" and not facts.callers(each)
            )
            and facts.optimizers.trainer_of(call) is None
        )

    def _same_run(self, scope: Scope, facts: Facts) -> set[Scope]:
        """Return the functions around a scope: those that lead to it by calls, and all that these call.

        Other scripts that share a helper with it are not among them.
        """
        above, pending = {scope}, [scope]
        while pending:
            current = pending.pop()
            outer = [each.scope for each in facts.callers(current)] if current.kind == "function" else []
            outer += [current.parent] if current.parent is not None else []
            outer += list(current.descendants()) if current.kind == "class" else []
            pending += [each for each in dict.fromkeys(outer) if each not in above]
            above.update(outer)
        found, pending = set(above), list(above)
        while pending:
            inner = [function.scope for each in pending.pop().calls for function in facts.functions(each)]
            pending += [each for each in dict.fromkeys(inner) if each not in found]
            found.update(inner)
        return found

    def _fix(self, event: Event, facts: Facts) -> Fix | None:
        call = event.call
        if _is_torchao_handler(event):
            return self._fix_accelerator(call, facts)
        if self._is_looped(event, facts):
            return None  # another value of the loop's variable changes no block
        if self._is_given(event, facts) and (self._is_stored(event) or not self._is_trained_here(event, facts)):
            return None  # the caller, or the object, keeps the module that it has
        torch = python_edits.name_of_torch(facts)
        statement = call.statement
        if isinstance(statement, cst.Assign) and statement.value is call.node and len(statement.targets) == 1:
            model = dotted(statement.targets[0].target)
        else:
            model = dotted(call.argument(0, "module")) if call.is_statement else ""
        if torch is None or not model or not isinstance(call.line, cst.SimpleStatementLine):
            return None
        edit = python_edits.line_after(facts, call.line, call, f"{model} = {torch}.compile({model})")
        return Fix("Compile the model after the conversion", "unsafe", (edit,))

    def _fix_accelerator(self, call: Call, facts: Facts) -> Fix | None:
        made = [event.call for event in facts.events("accelerator") if event.scope is call.scope]
        if len(made) != 1 or made[0].starred or not made[0].node.args:
            return None
        edit = python_edits.with_argument(facts, made[0], 'dynamo_backend="inductor"')
        return Fix("Let Accelerate compile the model", "unsafe", (edit,))


def _is_torchao_handler(event: Event) -> bool:
    """True if an event is accelerate's handler for torchao."""
    return event.kind == "fp8_handler" and event.facts.called_path(event.call).endswith(".AORecipeKwargs")


def _is_callback(call: Call, facts: Facts) -> bool:
    """True in a callback of Lightning, which gets the module that its Trainer trains; Lightning does not compile it."""
    owner = call.scope.owner
    bases = facts.ancestry(owner) if owner is not None else ()
    return any(base.endswith(".Callback") and "lightning" in base for base in bases)
