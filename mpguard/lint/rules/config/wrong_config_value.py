from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import Bad, ConfigRule, Diagnostic, Good, any_of, validation

if TYPE_CHECKING:
    from mpguard.lint import Document


class WrongConfigValue(ConfigRule):
    """A value of an accelerate config with which nothing can be launched.

    ## What it does
    Reports a `distributed_type` that accelerate does not have, and `num_processes` and `num_machines` that are not
    numbers from 1. `mpguard launch` and `mpguard explain` refuse the same values.

    ## Why is this bad
    accelerate fails after it has imported torch, with an error that names a temporary copy of the file or none.

    ## Known limits
    Values that a template fills in (`${GPUS}`) are unknown, and not reported.
    """

    code, name = "MPG874", "wrong-config-value"
    severity = "error"
    message = "`{key}`: {reason}"
    help = "write a value that accelerate can launch with; `accelerate config` lists them"
    kinds = ("accelerate",)
    triggers = (any_of(b"distributed_type"),)
    examples = (
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_processes: two  # !
""",
            name="mp.yaml",
        ),
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI-GPU  # !
mixed_precision: bf16
num_processes: 8
""",
            name="mp.yaml",
        ),
        Good(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_processes: ${GPUS}
""",
            name="mp.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if document.data.get("compute_environment") == "AMAZON_SAGEMAKER" or "distributed_type" not in document.data:
            return
        for problem in validation.wrong_values(document.data):
            entry = document.entry(problem.key)
            if entry is not None:
                yield self.at(entry, key=problem.key, reason=problem.reason)
