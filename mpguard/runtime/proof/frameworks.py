"""Which training framework a script uses, and how it is given a precision: for the advice of a refusal."""

from __future__ import annotations

import gc
import sys

from mpguard.policy.policy import Policy

#: Classes of frameworks, by the module that defines them: class, and what gives it BF16 and FP16.
FRAMEWORKS = {
    "lightning.fabric.fabric": ("Fabric", 'Fabric(precision="bf16-mixed")', 'Fabric(precision="16-mixed")'),
    "lightning_fabric.fabric": ("Fabric", 'Fabric(precision="bf16-mixed")', 'Fabric(precision="16-mixed")'),
    "lightning.pytorch.trainer.trainer": (
        "Trainer",
        'Trainer(precision="bf16-mixed")',
        'Trainer(precision="16-mixed")',
    ),
    "pytorch_lightning.trainer.trainer": (
        "Trainer",
        'Trainer(precision="bf16-mixed")',
        'Trainer(precision="16-mixed")',
    ),
    "transformers.trainer": ("Trainer", "TrainingArguments(bf16=True)", "TrainingArguments(fp16=True)"),
}


def precision_advice(policy: Policy) -> str:
    """Return how the framework that is in use is given the policy's precision; empty without a known framework.

    A framework that is only imported does not count: `import lightning` imports two. All objects of the process are
    searched, but only for a run that is refused.
    """
    for module, (name, bf16, fp16) in FRAMEWORKS.items():
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and any(issubclass(type(each), kind) for each in gc.get_objects()):
            return f"{name} was given no precision: write {bf16 if policy.bf16 else fp16}"
    return ""
