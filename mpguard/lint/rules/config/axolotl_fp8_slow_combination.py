from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import Bad, ConfigRule, Diagnostic, Good, Note, any_of, axolotl_keys

if TYPE_CHECKING:
    from mpguard.lint import Document


class AxolotlFp8SlowCombination(ConfigRule):
    """FP8 with FSDP2, activation checkpointing and compile in an axolotl config.

    ## Why is this bad
    The forward pass, with its casts to FP8, is computed twice, and torch.compile breaks its graphs at the checkpoints.
    axolotl's documentation and its check of the config warn that this may be slower than BF16.

    ## Known limits
    The warning is axolotl 0.19.0's and was not measured here.
    """

    code, name = "MPG844", "axolotl-fp8-slow-combination"
    severity = "warning"
    message = "activation checkpointing with FP8, FSDP2 and compile may be slower than BF16"
    help = "turn the checkpointing off if memory allows, or train in BF16"
    kinds = ("axolotl",)
    triggers = (any_of(b"fp8"), any_of(b"activation_checkpointing"))
    examples = (
        Bad(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
fp8: true
torch_compile: true
fsdp_version: 2
fsdp_config:
  activation_checkpointing: true  # !
""",
            name="axolotl.yaml",
        ),
        Good(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
fp8: true
torch_compile: true
fsdp_version: 2
fsdp_config:
  activation_checkpointing: false
""",
            name="axolotl.yaml",
        ),
        Good(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
bf16: true
torch_compile: true
fsdp_version: 2
fsdp_config:
  activation_checkpointing: true
""",
            name="axolotl.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        fp8, compiles = axolotl_keys.is_on(document, "fp8"), document.entry("torch_compile")
        checkpoints = next(
            (entry for key in axolotl_keys.CHECKPOINTING if (entry := axolotl_keys.is_on(document, key)) is not None),
            None,
        )
        if fp8 is None or checkpoints is None or compiles is None or compiles.value not in (True, "auto"):
            return
        if axolotl_keys.is_fsdp2(document):
            yield self.at(checkpoints, notes=(Note("FP8 is enabled here", fp8.key_span),))
