from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Note, any_of, config_edits


class LowPrecisionAccumulation(ConfigRule):
    """DeepSpeed adds the gradients of several micro-batches in BF16.

    ## What it does
    Reports a DeepSpeed config with `bf16`, ZeRO, `gradient_accumulation_steps` above 1 and no
    `data_types.grad_accum_dtype`.

    ## Why is this bad
    Without the key DeepSpeed 0.19.8 accumulates in the dtype of the weights (`engine.get_data_types`). BF16 has 8 bits
    of mantissa: a gradient that is 256 times smaller than the sum so far is lost. Of 512 equal gradients, the sum is
    half of what it should be (observed under ZeRO 1). Users saw runs diverge (DeepSpeed#2768, DeepSpeed#1800).

    ## Fix safety
    Unsafe: the sums need 4 bytes per parameter instead of 2, and ZeRO 1 uses another optimizer class.

    ## Known limits
    Not reported: `"auto"` values, which the HF Trainer fills in, and ZeRO 0, for which DeepSpeed has no such setting.
    """

    code, name = "MPG829", "low-precision-accumulation"
    severity = "warning"
    message = "the gradients of {steps} micro-batches are added in BF16"
    help = 'add `"data_types": {"grad_accum_dtype": "fp32"}`'
    kinds = ("deepspeed",)
    triggers = (any_of(b"gradient_accumulation_steps"), any_of(b"bf16", b"bfloat16"))
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 16,  # !
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2}
}
""",
            name="ds_config.json",
            fixed="""\
{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 16,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2},
  "data_types": {
    "grad_accum_dtype": "fp32"
  }
}
""",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        steps, bf16, stage = (
            document.entry(key) for key in ("gradient_accumulation_steps", "bf16.enabled", "zero_optimization.stage")
        )
        if steps is None or bf16 is None or stage is None:
            return
        # Also in a section that a launcher merges into the config, as GPT-NeoX does with `deepspeed_extra_args`.
        if any(entry.path[-1] == "data_types" for entry in document.entries()):
            return
        several = isinstance(steps.value, int) and steps.value > 1
        if several and bf16.value is True and stage.value in (1, 2, 3):
            key = "data_types.grad_accum_dtype"
            fix = config_edits.set_values("Accumulate in FP32", document, {key: "fp32"}, "unsafe")
            yield self.at(steps, steps=steps.value, notes=(Note("the run is BF16", bf16.key_span),), fix=fix)
