from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, any_of, config_edits, schemas


class AxolotlFp8WithoutCompile(ConfigRule, form_of="MPG401"):
    """`fp8: true` in an axolotl config without `torch_compile: true`.

    axolotl's FP8 is torchao's, whose casts and scales are many small kernels that only a compiler fuses. Without it FP8
    is slower than BF16: 0.55 times the speed on an H200. axolotl's documentation calls compilation critical, but a run
    without it prints only one warning at the start.
    """

    message = "`fp8: true` without `torch_compile: true`: slower than BF16"
    help = "set `torch_compile: true`"
    kinds = ("axolotl",)
    triggers = (any_of(b"fp8"),)
    fixes = True

    def check(self, document: Document) -> Iterator[Diagnostic]:
        fp8, compiles = schemas.axolotl.is_on(document, "fp8"), document.entry("torch_compile")
        if fp8 is not None and (compiles is None or compiles.value in (None, False)):
            yield self.at(fp8, fix=config_edits.set_values("Compile", document, {"torch_compile": True}))
