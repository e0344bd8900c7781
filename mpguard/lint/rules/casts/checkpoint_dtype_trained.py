from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Dtype, Facts, Fix, Note, Rule, any_of, python_edits

_SINCE = (5,)


class CheckpointDtypeTrained(Rule):
    """A model is loaded in the dtype of its checkpoint, and a plain optimizer trains all of it.

    ## What it does
    Reports `from_pretrained` of transformers without `dtype`, if the project requires transformers 5 or newer and a
    plain optimizer, or a Trainer, updates the model's parameters.

    ## Why is this bad
    Up to transformers 4 such a model was loaded in FP32. Since transformers 5 it has the dtype in which the checkpoint
    was saved, for most models BF16: the same script trains without FP32 master weights. BF16 has 8 bits: with Adam and
    a learning rate of 1e-5 no weight above 0.005 changes.

    ## Fix safety
    Unsafe: FP32 weights take twice the memory of BF16 ones.

    ## Known limits
    Reported only where the requirements exclude transformers 4. A checkpoint that was saved in FP32 is not known as
    such. Silent for adapters, quantized loads and frozen models, as MPG107 is.
    """

    code, name = "MPG120", "checkpoint-dtype-trained"
    severity = "warning"
    message = (
        "`{expr}` loads the weights in the checkpoint's dtype, mostly of 16 bits, and a plain optimizer updates them"
    )
    help = "pass `dtype=torch.float32` and compute in BF16 by autocast"
    triggers = (any_of(b"from_pretrained("),)
    triggers_nearby = (
        any_of(b"from_pretrained("),
        any_of(b"optim", b"Trainer("),
        any_of(b".step(", b".train("),
    )
    examples = (
        Bad(
            """\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B").cuda()  # !
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x, labels=x).loss
    loss.backward()
    optimizer.step()
""",
            files={"requirements.txt": "transformers>=5\n"},
            fixed="""\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype=torch.float32).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x, labels=x).loss
    loss.backward()
    optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not facts.required("transformers").since(_SINCE):
            return
        if any(policy.master_dtype is not Dtype.FP32 for policy in facts.project.policies(facts.path)):
            return
        for weights in facts.training_use.in_dtype_of_checkpoint():
            optimizers = facts.optimizers.plain(weights.training) or facts.optimizers.trainers(weights.training)
            if optimizers and not facts.master_weights.kept_for(weights):
                call, torch = weights.event.call, python_edits.name_of_torch(facts)
                dtype = '"float32"' if torch is None else f"{torch}.float32"
                edit = python_edits.with_argument(facts, call, f"dtype={dtype}")
                yield self.at(
                    weights.event,
                    expr=facts.short(call.func),
                    notes=(Note("trained with here", optimizers[0].span, facts.elsewhere(optimizers[0])),),
                    fix=Fix("Load the weights in FP32", "unsafe", (edit,)),
                )
