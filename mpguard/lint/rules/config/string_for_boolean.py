from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import Bad, ConfigRule, Diagnostic, Good, any_of, config_edits, lazy_pattern

if TYPE_CHECKING:
    from mpguard.lint import Document

_SECTIONS = ("bf16", "bfloat16", "fp16", "torch_autocast")
_FILLED_IN = lazy_pattern(r"[\"']auto[\"']")
_BOOLEANS = {"true": True, "false": False}


class StringForBoolean(ConfigRule):
    """`"enabled": "false"` for a precision in a DeepSpeed config: a string instead of a boolean.

    ## What it does
    Reports the string `"false"`, in any case, in `bf16.enabled`, `fp16.enabled` and `torch_autocast.enabled`; and
    `"true"` in a config with `"auto"` values, which only the Trainer and accelerate fill in.

    ## Why is this bad
    Python takes every string that is not empty as true, `"false"` too. transformers and accelerate
    (`HfDeepSpeedConfig.is_true`, transformers 5.23, accelerate 1.15) read the value so, and the Trainer stops because
    `"true"` differs from its own `True`. DeepSpeed before pydantic read these sections returned the string: with
    `"true"` next to `"false"` it stops because `bf16` and `fp16` are both enabled. DeepSpeed 0.19.8 alone parses both.

    ## Fix safety
    Safe: the boolean that the string names.
    """

    code, name = "MPG870", "string-for-boolean"
    severity = "error"
    message = "`{key}` is the string `{written}`, not a boolean: {what}"
    help = 'write true or false without quotes, or "auto" if the Trainer or accelerate fills it in'
    kinds = ("deepspeed",)
    triggers = (any_of(b"enabled"), any_of(b"true", b"True", b"TRUE", b"false", b"False", b"FALSE"))
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": "auto",
  "bf16": {"enabled": "true"},  # !
  "fp16": {"enabled": "false"},  # !
  "zero_optimization": {"stage": 3}
}
""",
            name="ds_config.json",
            fixed="""\
{
  "train_micro_batch_size_per_gpu": "auto",
  "bf16": {"enabled": true},
  "fp16": {"enabled": false},
  "zero_optimization": {"stage": 3}
}
""",
        ),
        Bad(
            """\
import deepspeed

config = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": "False"},  # !
    "bf16": {"enabled": True},
}
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
""",
            name="train.py",
            fixed="""\
import deepspeed

config = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
}
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
""",
        ),
        Good(
            """\
{
  "train_micro_batch_size_per_gpu": "auto",
  "bf16": {"enabled": "auto"},
  "fp16": {"enabled": false},
  "tensorboard": {"enabled": "true"},
  "zero_optimization": {"stage": 3}
}
""",
            name="ds_config.json",
        ),
        Good(
            """\
{
  "train_micro_batch_size_per_gpu": 4,
  "fp16": {"enabled": "true", "auto_cast": "true", "loss_scale": 0}
}
""",
            name="ds_config.json",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        for section in _SECTIONS:
            entry = document.entry(f"{section}.enabled")
            if entry is None or not isinstance(entry.value, str) or entry.value.lower() not in _BOOLEANS:
                continue
            meant = _BOOLEANS[entry.value.lower()]
            if meant and not _FILLED_IN.search(document.text):
                continue  # DeepSpeed by itself takes it for true
            key = ".".join(entry.path)
            what = "the Trainer stops, since it differs from `True`" if meant else "it counts as true"
            fix = config_edits.set_values("Write the boolean", document, {key: meant})
            yield self.at(entry, fix=fix, key=key, written=f'"{entry.value}"', what=what)
