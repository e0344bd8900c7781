from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpguard.lint import (
    Bad,
    ConfigRule,
    Diagnostic,
    Document,
    Dtype,
    Entry,
    Note,
    any_of,
    config_edits,
    errors,
    settings,
    siblings,
)


class LowPrecisionAllreduce(ConfigRule):
    """DeepSpeed reduces gradients in a lower precision than its mode or the recipe.

    ## Why is this bad
    BF16 has FP32's range, FP16 ends at 65504 and loses values under 6e-8: gradients of a BF16 run that are reduced in
    FP16 overflow and underflow, without a loss scale to protect them. A sum over many ranks loses more the lower its
    precision; Megatron Bridge's `bf16_mixed` reduces in FP32 for that reason.

    ## Fix safety
    Safe: FP32, in which gradients do not overflow. It transfers more bytes.

    ## Known limits
    The recipe is that of an accelerate config in the same folder that names the file, otherwise that of the nearest
    `[tool.mpguard] recipe`; its overrides are not read. Without a recipe only `fp16` under `bf16` is reported.
    """

    code, name = "MPG827", "low-precision-allreduce"
    severity = "warning"
    message = "`{key}: {value}` {against}"
    help = "use `fp32`, or remove the key where it is the default"
    kinds = ("deepspeed",)
    triggers = (any_of(b"communication_data_type", b"grad_accum_dtype"),)
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "communication_data_type": "fp16"  # !
}
""",
            name="ds_config.json",
            fixed="""\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "communication_data_type": "fp32"
}
""",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        bf16, communication = document.entry("bf16.enabled"), document.entry("communication_data_type")
        if (
            communication is not None
            and _dtype(communication) is Dtype.FP16
            and bf16 is not None
            and bf16.value is True
        ):
            notes = (Note("the run is BF16", bf16.key_span),)
            yield self._at(document, communication, "under `bf16`: gradients overflow above 65504", notes)
            communication = None
        name = _recipe(document)
        if name is None or not _reduces_in_fp32(name):
            return
        for entry in (communication, document.entry("data_types.grad_accum_dtype")):
            if entry is not None and _dtype(entry) in (Dtype.BF16, Dtype.FP16):
                yield self._at(
                    document, entry, f"has a lower precision than the recipe `{name}`, which reduces in FP32", ()
                )

    def _at(self, document: Document, entry: Entry, against: str, notes: tuple[Note, ...]) -> Diagnostic:
        fix = config_edits.set_values("Reduce in FP32", document, {".".join(entry.path): "fp32"})
        return self.at(entry, notes=notes, fix=fix, key=".".join(entry.path), value=entry.value, against=against)


def _recipe(document: Document) -> str | None:
    """Return the recipe of an accelerate config that names this file, otherwise that of the settings."""
    from mpguard.lint import mp_yaml

    for config in siblings.naming(document.path) if document.format == "json" else ():
        named = config.entry(mp_yaml.RECIPE)
        if named is not None and isinstance(named.value, str):
            return named.value
    return settings.nearest(Path(document.path)).recipe


def _dtype(entry: Entry) -> Dtype | None:
    return Dtype.spelled(entry.value) if isinstance(entry.value, str) else None


def _reduces_in_fp32(name: str) -> bool:
    from mpguard.lint import recipes

    try:
        return recipes.recipe(name).reduce_dtype is Dtype.FP32
    except errors.MpguardError:
        return False
