from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Good, Note, accelerate_config, any_of


class Fsdp2WithTe(ConfigRule):
    """FSDP2 with Transformer Engine in an accelerate config: FP8 is never entered, the run is BF16.

    ## Why is this bad
    accelerate 1.15.0 replaces the layers by Transformer Engine's, but its path for FSDP2 (`_prepare_fsdp2`) never wraps
    the forward pass in FP8 autocast, as the other paths do. The layers compute in BF16 without a warning (observed: FP8
    autocast entered 0 times; accelerate#3710).

    ## What to do
    Use `backend: AO`, or FSDP1, or `mpguard launch` with a recipe in the file, which enters the autocast.

    ## Known limits
    Not reported if the file names an mpguard recipe. Code that enters `te.autocast` itself is not searched for.
    """

    code, name = "MPG806", "fsdp2-with-te"
    severity = "error"
    message = "FSDP2 with Transformer Engine: accelerate never enters FP8 autocast, the run is BF16"
    help = "use `backend: AO`, or `fsdp_version: 1`, or name an mpguard recipe and start it with `mpguard launch`"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8_config"), any_of(b"FSDP"), any_of(b"TE", b"te"))
    examples = (
        Bad(
            """\
distributed_type: FSDP
mixed_precision: fp8
fp8_config:
  backend: TE  # !
fsdp_config:
  fsdp_version: 2
""",
            name="mp.yaml",
        ),
        Good(
            """\
distributed_type: FSDP
mixed_precision: fp8
fp8_config:
  backend: TE
  mpguard_recipe: bf16_with_fp8_delayed_scaling_mixed
fsdp_config:
  fsdp_version: 2
""",
            name="mp.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        backend, version = (
            accelerate_config.setting(document, "fp8_config", "backend"),
            accelerate_config.setting(document, "fsdp_config", "version"),
        )
        if (
            backend is None
            or version is None
            or not accelerate_config.is_fp8(document, "TE")
            or not accelerate_config.is_fsdp2(document)
        ):
            return
        if not accelerate_config.names_recipe(document):
            yield self.at(backend, notes=(Note("FSDP2 is selected here", version.key_span),))
