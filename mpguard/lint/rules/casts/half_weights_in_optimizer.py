from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Constant,
    Diagnostic,
    Dtype,
    Facts,
    Fix,
    Note,
    Rule,
    Weights,
    any_of,
    dtype_triggers,
    lattice,
    lazy_pattern,
    python_edits,
)


class HalfWeightsInOptimizer(Rule):
    """A model is loaded in FP16 and its weights are passed to an optimizer.

    ## What it does
    Follows `from_pretrained`, `from_config` and the like with an FP16 dtype (`torch_dtype=torch.float16`,
    `dtype="float16"`, under any name) to an optimizer that is built from the model's parameters, or to a Trainer that
    trains all of them.

    ## Why is this bad
    FP16 weights have no FP32 master copy. An update below 2^-12 of a weight is lost. In FP16, Adam's `eps` of 1e-8 is
    0, and so is the second moment of a gradient of 1e-3: the first step produces infinities (torch 2.13). `GradScaler`
    raises "Attempting to unscale FP16 gradients". Mixed precision keeps the weights in FP32 and computes in FP16.

    ## Fix safety
    The fix loads the weights in FP32. It is unsafe: they take twice the memory, and without autocast the whole model
    computes in FP32.

    ## Known limits
    Silent for adapters (LoRA, a `peft_config`), quantized loads, frozen models, and for arguments that are passed as
    `**kwargs` whose items are not known. Silent in a file that mentions DeepSpeed, FSDP, Megatron or an FP16 optimizer
    of its own, which may keep masters. The optimizers of torch, bitsandbytes, torchao and transformers are recognized;
    a Trainer is checked if its `TrainingArguments` are in the file. A cast by hand is reported by MPG101.
    """

    code, name = "MPG103", "half-weights-in-optimizer"
    severity = "error"
    message = "`{expr}` loads weights in FP16 that an optimizer trains"
    help = "load them in FP32 and let autocast, or the Trainer's `fp16=True`, compute in FP16"
    triggers = (
        any_of(*dtype_triggers.NAMES_HALF, b'"half', b"'half", b"float16", b"fp16"),
        any_of(b"from_pretrained(", b"from_config(", b"from_single_file("),
        any_of(b"dtype"),
    )
    pattern = lazy_pattern(rb"float16|half(?<!\whalf)|fp16")  # not `rotate_half`
    triggers_nearby = (any_of(b"optim", b"Trainer("), any_of(b".step(", b".train("))
    yields_to = ("MPG103", "MPG862", "MPG863", "MPG864")
    examples = (
        Bad(
            """\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float16).cuda()  # !
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
""",
            fixed="""\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float32).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not facts.events("load"):
            return
        for weights in facts.training_use.weights(Dtype.FP16):
            optimizers = facts.optimizers.plain(weights.training) or facts.optimizers.trainers(weights.training)
            if weights.event.kind == "load" and optimizers and not facts.master_weights.kept_for(weights):
                notes = (Note("trained with here", optimizers[0].span, facts.elsewhere(optimizers[0])),)
                yield self.at(
                    weights.event,
                    expr=facts.short(weights.event.call.func),
                    notes=notes,
                    fix=self._fix(weights, facts),
                )

    def _fix(self, weights: Weights, facts: Facts) -> Fix | None:
        call = weights.event.call
        given = call.argument(None, "dtype", "torch_dtype")
        assert given is not None
        atoms = [each.atom for each in facts.evaluate(given, call)]
        torch = python_edits.name_of_torch(facts)
        if all(isinstance(atom, Constant) for atom in atoms):
            text = '"float32"'
        elif torch is not None and all(isinstance(atom, lattice.DtypeValue) for atom in atoms):
            text = f"{torch}.float32"
        else:
            return None
        return Fix("Load the weights in FP32", "unsafe", (python_edits.replaced(given, call, text),))
