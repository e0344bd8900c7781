from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Good, Note, any_of


class DeepspeedBf16AndFp16(ConfigRule):
    """A DeepSpeed config with both `bf16` and `fp16` enabled.

    ## Why is this bad
    DeepSpeed 0.19.8 stops: `AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled`.

    ## Known limits
    `"auto"` does not count as enabled: the program that fills it in selects one of them.
    """

    code, name = "MPG821", "deepspeed-bf16-and-fp16"
    severity = "error"
    message = "`bf16` and `fp16` are both enabled; DeepSpeed stops with an AssertionError"
    help = "enable one of them"
    kinds = ("deepspeed",)
    triggers = (any_of(b"bf16", b"bfloat16"), any_of(b"fp16"), any_of(b"enabled"))
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "fp16": {"enabled": true},
  "bf16": {
    "enabled": true  # !
  }
}
""",
            name="ds_config.json",
        ),
        Good(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "fp16": {"enabled": "auto"},
  "bf16": {"enabled": "auto"}
}
""",
            name="ds_config.json",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        on = [
            entry
            for name in ("bf16" if "bf16" in document.data else "bfloat16", "fp16")
            if (entry := document.entry(f"{name}.enabled")) is not None and entry.value is True
        ]
        if len(on) == 2:
            first, second = sorted(on, key=lambda entry: entry.key_span)
            yield self.at(second, notes=(Note(f"`{first.path[0]}` is enabled here", first.key_span),))
