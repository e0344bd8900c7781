"""Which training framework a script uses, and how it is given a precision: for the advice of a refusal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from mpguard.core.objects import objects_of
from mpguard.policy.policy import Policy


class Framework(NamedTuple):
    """How a framework is given a precision. given: returns what an object of its class was given, `bf16` or `fp16`."""

    name: str
    bf16: str
    fp16: str
    given: Callable[[Any], str]
    #: What the user calls outside of autocast if the precision was given; empty if that is not known.
    outside: str = ""


def _of_lightning(trainer: Any) -> str:
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(trainer.precision), "")


def _of_fabric(fabric: Any) -> str:
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(fabric._precision.precision), "")


def _of_transformers(trainer: Any) -> str:
    return "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else ""


def _of_accelerate(accelerator: Any) -> str:
    return {"fp8": "bf16"}.get(accelerator.mixed_precision, str(accelerator.mixed_precision))


_FABRIC = Framework(
    "Fabric", 'Fabric(precision="bf16-mixed")', 'Fabric(precision="16-mixed")', _of_fabric,
    "call the model that `setup` returns, not its parts",
)  # fmt: skip
_LIGHTNING = Framework("Trainer", 'Trainer(precision="bf16-mixed")', 'Trainer(precision="16-mixed")', _of_lightning)

#: The classes of frameworks, by the module that defines them.
FRAMEWORKS = {
    "lightning.fabric.fabric": _FABRIC,
    "lightning_fabric.fabric": _FABRIC,
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
    "transformers.trainer": Framework(
        "Trainer", "TrainingArguments(bf16=True)", "TrainingArguments(fp16=True)", _of_transformers,
        "call `model(...)` in `compute_loss`, not its parts",
    ),
    "accelerate.accelerator": Framework(
        "Accelerator", 'Accelerator(mixed_precision="bf16")', 'Accelerator(mixed_precision="fp16")', _of_accelerate,
        "call the model that `prepare` returns, not its parts",
    ),
}  # fmt: skip


def precision_advice(policy: Policy) -> str:
    """Return how the framework that is in use is given the policy's precision; empty without a known framework.

    If it was given it, what to call is returned, or nothing if that is not known. A framework that is only imported
    does not count: `import lightning` imports two. All objects of the process are searched, but only for a run that is
    refused.
    """
    for module, framework in FRAMEWORKS.items():
        kind = getattr(sys.modules.get(module), framework.name, None)
        if not isinstance(kind, type):
            continue
        found = next(iter(objects_of(kind)), None)
        if found is None:
            continue
        write = framework.bf16 if policy.bf16 else framework.fp16
        if _given(framework, found) != policy.compute_dtype.short:
            return f"{framework.name} was not given {policy.compute_dtype.short}: write {write}"
        if framework.outside:
            return f"{write} holds in `forward` of the model: {framework.outside}"
    return ""


def _given(framework: Framework, found: Any) -> str:
    """Return the precision that an object of a framework was given; empty if it does not show it."""
    try:
        return framework.given(found)
    except AttributeError:
        return ""
