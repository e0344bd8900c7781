from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, Note, any_of, schemas


class AxolotlAllGatherWithoutFsdp2(ConfigRule, form_of="MPG413"):
    """`fp8_enable_fsdp_float8_all_gather` in an axolotl config without `fsdp_version: 2`.

    axolotl 0.19.0 raises: `fp8_enable_fsdp_float8_all_gather requires FSDP2 (fsdp_version: 2) to be used`. Versions
    without that check train on, and the converted weights never change.

    A version in `fsdp_config` counts, although axolotl's own check reads the top level only.
    """

    message = "float8 all-gather needs FSDP2, and the file {state}: axolotl stops"
    help = "set `fsdp_version: 2`, or remove the key"
    kinds = ("axolotl",)
    triggers = (any_of(b"fp8_enable_fsdp_float8_all_gather"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        gather = schemas.axolotl.is_on(document, "fp8_enable_fsdp_float8_all_gather")
        version = schemas.axolotl.fsdp_version(document)
        if gather is None or schemas.axolotl.is_fsdp2(document):
            return
        if version is None:
            yield self.at(gather, state="sets no version of FSDP")
        elif isinstance(version.value, int):
            yield self.at(gather, notes=(Note("FSDP1", version.key_span),), state=f"sets version {version.value}")
