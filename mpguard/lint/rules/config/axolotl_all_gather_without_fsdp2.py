from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import Bad, ConfigRule, Diagnostic, Good, Note, any_of, axolotl_keys

if TYPE_CHECKING:
    from mpguard.lint import Document


class AxolotlAllGatherWithoutFsdp2(ConfigRule):
    """`fp8_enable_fsdp_float8_all_gather` in an axolotl config without `fsdp_version: 2`.

    ## Why is this bad
    axolotl 0.19.0 raises: `fp8_enable_fsdp_float8_all_gather requires FSDP2 (fsdp_version: 2) to be used`. Versions
    without that check train on, and the converted weights never change.

    ## Known limits
    A version in `fsdp_config` counts, although axolotl's own check reads the top level only.
    """

    code, name = "MPG843", "axolotl-all-gather-without-fsdp2"
    severity = "error"
    message = "float8 all-gather needs FSDP2, and the file {state}: axolotl stops"
    help = "set `fsdp_version: 2`, or remove the key"
    kinds = ("axolotl",)
    triggers = (any_of(b"fp8_enable_fsdp_float8_all_gather"),)
    examples = (
        Bad(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
fp8: true
fp8_enable_fsdp_float8_all_gather: true  # !
torch_compile: true
fsdp_config:
  reshard_after_forward: true
""",
            name="axolotl.yaml",
        ),
        Bad(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
fp8: true
fp8_enable_fsdp_float8_all_gather: true  # !
fsdp_version: 1
""",
            name="axolotl.yaml",
        ),
        Good(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
fp8: true
fp8_enable_fsdp_float8_all_gather: true
torch_compile: true
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
""",
            name="axolotl.yaml",
        ),
        Good(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 1
fp8: true
fp8_enable_fsdp_float8_all_gather: false
torch_compile: true
""",
            name="axolotl.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        gather = axolotl_keys.is_on(document, "fp8_enable_fsdp_float8_all_gather")
        version = axolotl_keys.fsdp_version(document)
        if gather is None or axolotl_keys.is_fsdp2(document):
            return
        if version is None:
            yield self.at(gather, state="sets no version of FSDP")
        elif isinstance(version.value, int):
            yield self.at(gather, notes=(Note("FSDP1", version.key_span),), state=f"sets version {version.value}")
