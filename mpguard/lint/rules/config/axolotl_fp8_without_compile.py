from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import Bad, ConfigRule, Diagnostic, Good, any_of, axolotl_keys, config_edits

if TYPE_CHECKING:
    from mpguard.lint import Document


class AxolotlFp8WithoutCompile(ConfigRule):
    """`fp8: true` in an axolotl config without `torch_compile: true`.

    ## Why is this bad
    axolotl's FP8 is torchao's, whose casts and scales are many small kernels that only a compiler fuses. Without it FP8
    is slower than BF16: 0.55 times the speed on an H200. axolotl's documentation calls compilation critical, but a run
    without it prints only one warning at the start.

    ## Fix safety
    Safe: `torch_compile: true`, as axolotl's documentation requires.
    """

    code, name = "MPG842", "axolotl-fp8-without-compile"
    severity = "error"
    message = "`fp8: true` without `torch_compile: true`: slower than BF16"
    help = "set `torch_compile: true`"
    kinds = ("axolotl",)
    triggers = (any_of(b"fp8"),)
    examples = (
        Bad(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
bf16: true
fp8: true  # !
""",
            name="axolotl.yaml",
            fixed="""\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
bf16: true
fp8: true
torch_compile: true
""",
        ),
        Bad(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
torch_compile: false
fp8: true  # !
""",
            name="axolotl.yaml",
            fixed="""\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
torch_compile: true
fp8: true
""",
        ),
        Good(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
fp8: true
torch_compile: auto
""",
            name="axolotl.yaml",
        ),
        Good(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
fp8: false
""",
            name="axolotl.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        fp8, compiles = axolotl_keys.is_on(document, "fp8"), document.entry("torch_compile")
        if fp8 is not None and (compiles is None or compiles.value in (None, False)):
            yield self.at(fp8, fix=config_edits.set_values("Compile", document, {"torch_compile": True}))
