from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Entry, Good, Note, any_of, errors, schemas


class TrainerPrecisionConflict(ConfigRule):
    """Precision keys of a NeMo 1.x or Megatron Bridge config that exclude each other, or have no effect.

    ## Why is this bad
    - NeMo 1.x ignores every FP8 key unless `transformer_engine` is true: the run is BF16, and nothing says so.
    - Megatron Bridge checks neither `bf16` with `fp16`, nor the value of `fp8_recipe`; `fp8` with `fp4` stops the run.
    - Megatron Bridge stops at an unknown name in `mixed_precision`.
    - `model.bf16` (and `fp16`, `fp8`, ...) next to `mixed_precision` are overwritten by it, logged at debug level only.

    ## Known limits
    Values that are filled in by interpolation (`${...}`) are unknown.
    """

    code, name = "MPG849", "trainer-precision-conflict"
    severity = "error"
    message = "{what}"
    help = "`mpguard apply RECIPE FILE` writes one precision into the file"
    kinds = ("nemo", "megatron-bridge")
    triggers = (any_of(b"fp8", b"fp16", b"mixed_precision", b"fp4"),)
    examples = (
        Bad(
            """\
trainer:
  precision: bf16
model:
  transformer_engine: false
  fp8: true  # !
  fp8_hybrid: true
""",
            name="megatron_gpt.yaml",
        ),
        Good(
            """\
mixed_precision: bf16_with_fp8_current_scaling_mixed
model:
  bf16: true
train:
  train_iters: 10
""",
            name="override.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        yield from self._nemo(document) if document.kind == "nemo" else self._bridge(document)

    def _nemo(self, document: Document) -> Iterator[Diagnostic]:
        fp8, engine = document.entry("model.fp8"), document.entry("model.transformer_engine")
        if fp8 is not None and fp8.value is True and (engine is None or engine.value in (None, False)):
            notes = () if engine is None else (Note("it is off here", engine.value_span),)
            yield self.at(
                fp8, notes=notes, what="`fp8: true` without `transformer_engine: true`: NeMo ignores every FP8 key",
                help="set `transformer_engine: true`",
            )  # fmt: skip
        one, other = document.entry("model.fp8_e4m3"), document.entry("model.fp8_hybrid")
        if one is not None and other is not None and one.value is True and other.value is True:
            yield self.at(
                one,
                what="`fp8_e4m3` and `fp8_hybrid` are both true, and name two formats",
                notes=(Note("the other format", other.key_span),),
                help="set one of them to false",
            )

    def _bridge(self, document: Document) -> Iterator[Diagnostic]:
        precision = document.entry("mixed_precision")
        if precision is not None and isinstance(precision.value, str):
            name = precision.value.replace("-", "_")
            if name not in schemas.megatron_bridge.RECIPES and "$" not in name:
                hint = errors.did_you_mean(name, schemas.megatron_bridge.RECIPES)
                yield self.at(precision, what=f"Megatron Bridge has no recipe `{precision.value}`{hint}")
        for section in ("mixed_precision", "model"):
            yield from self._pair(document, f"{section}.bf16", f"{section}.fp16", "a run computes in one of them")
            yield from self._pair(document, f"{section}.fp8", f"{section}.fp4", "a matmul runs in one of them")
            recipe = document.entry(f"{section}.fp8_recipe")
            known = (*schemas.megatron_bridge.FP8_RECIPES, None, "custom")
            if recipe is not None and recipe.value not in known and "$" not in str(recipe.value):
                hint = errors.did_you_mean(str(recipe.value), schemas.megatron_bridge.FP8_RECIPES)
                yield self.at(recipe, what=f"`fp8_recipe` is {recipe.value}, which Megatron does not have{hint}")
        if precision is not None and isinstance(precision.value, str):
            yield from self._overwritten(document, precision)

    def _pair(self, document: Document, one: str, other: str, why: str) -> Iterator[Diagnostic]:
        first, second = document.entry(one), document.entry(other)
        if first is not None and second is not None and first.value and second.value:
            notes = (Note("the other", first.key_span),)
            yield self.at(
                second, notes=notes, what=f"`{one}` and `{other}` are both set; {why}", help="set one of them"
            )

    def _overwritten(self, document: Document, precision: Entry) -> Iterator[Diagnostic]:
        """Yield the switches of `model` that `mixed_precision` overwrites with another value."""
        name = str(precision.value).replace("-", "_")
        if name not in schemas.megatron_bridge.RECIPES:
            return
        low = name.removeprefix("nemotron_h_").removeprefix("nanov2_").removeprefix("nemotron_3_super_")[:4]
        for key in ("bf16", "fp16"):
            entry = document.entry(f"model.{key}")
            if entry is not None and isinstance(entry.value, bool) and entry.value is not (key == low):
                written = str(entry.value).lower()
                yield self.at(
                    entry, notes=(Note("the recipe", precision.value_span),),
                    what=f"`model.{key}: {written}` is overwritten by `mixed_precision: {precision.value}`",
                    help="remove it, or name another recipe",
                )  # fmt: skip
