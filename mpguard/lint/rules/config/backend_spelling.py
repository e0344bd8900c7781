from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, accelerate_config, any_of, config_edits, schemas


class BackendSpelling(ConfigRule, form_of="MPG813"):
    """The FP8 backend of an accelerate config is not one of `TE`, `AO` and `MSAMP` in capitals.

    The launcher accepts any text and passes it on; each worker then raises `ValueError: 'te' is not a valid
    FP8BackendType` (accelerate 1.15.0). Capitals are needed although `--fp8_backend` on the command line accepts only
    the lower-case words, and although accelerate's own template writes `MS-AMP`.
    """

    message = (
        "`{written}` is not an FP8 backend, and the workers stop; accelerate accepts `TE`, `AO` and `MSAMP` in capitals"
    )
    help = "write one of the three, in capitals"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8_config"), any_of(b"backend"))
    fixes = True

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if accelerate_config.mixed_precision_mode(document) in ("no", "fp16", "bf16"):
            return  # the launcher passes the section on under `fp8` only (S24)
        entry = accelerate_config.setting(document, "fp8_config", "backend")
        if entry is None or accelerate_config.is_sagemaker(document) or not isinstance(entry.value, str):
            return
        if entry.value in schemas.accelerate.FP8_BACKENDS.values():
            return
        meant = schemas.accelerate.FP8_BACKENDS.get(entry.value.lower())
        fix = config_edits.set_values(f"Write `{meant}`", document, {".".join(entry.path): meant}) if meant else None
        yield self.at(entry.value_span, fix=fix, written=entry.value)
