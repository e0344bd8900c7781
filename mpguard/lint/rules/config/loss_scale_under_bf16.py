from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, any_of, config_edits, schemas, targets


class LossScaleUnderBf16(ConfigRule):
    """Loss-scale keys, or other keys of `fp16`, in the `bf16` section of a DeepSpeed config.

    ## Why is this bad
    BF16 has FP32's range and needs no loss scaling. DeepSpeed 0.19.8 stops, even if the section is not enabled:
    `ValidationError: loss_scale: Extra inputs are not permitted` (ielab/llm-rankers#2).

    ## Fix safety
    Safe: the key is removed; nothing reads it.

    ## Known limits
    A value of `"auto"` is not reported: DeepSpeed drops such keys before it checks them. Nor is anything reported if
    the project requires a DeepSpeed older than 0.17.1, which ignores the keys.
    """

    code, name = "MPG822", "loss-scale-under-bf16"
    severity = "error"
    message = "`{section}.{key}`: the section has no such key, and DeepSpeed stops"
    help = "BF16 needs no loss scaling; these keys are those of `fp16`"
    versions = {"deepspeed": ">=0.17.1"}
    kinds = ("deepspeed",)
    triggers = (
        any_of(b"bf16", b"bfloat16"),
        any_of(*(key.encode() for key in sorted(schemas.deepspeed.FP16 - schemas.deepspeed.BF16))),
    )
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {
    "enabled": true,
    "loss_scale": 0,  # !
    "initial_scale_power": 16  # !
  }
}
""",
            name="ds_config.json",
            fixed="""\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {
    "enabled": true
  }
}
""",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        for entry in document.entries():
            if len(entry.path) != 2 or entry.path[0] not in ("bf16", "bfloat16"):
                continue
            if entry.key in schemas.deepspeed.FP16 - schemas.deepspeed.BF16 and entry.value != "auto":
                fix = config_edits.set_values("Remove it", document, {".".join(entry.path): targets.ABSENT})
                yield self.at(entry, fix=fix, section=entry.path[0], key=entry.key)
