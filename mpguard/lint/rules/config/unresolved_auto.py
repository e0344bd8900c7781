from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpguard.lint import (
    Bad,
    ConfigRule,
    Diagnostic,
    Document,
    Entry,
    Good,
    accelerate_config,
    any_of,
    schemas,
    siblings,
)

_OFF = "DeepSpeed drops the key, and the section is off"


class UnresolvedAuto(ConfigRule):
    """`"enabled": "auto"` for the precision in a DeepSpeed config, where nothing fills it in.

    ## Why is this bad
    Only the HF Trainer fills in `"auto"` from its arguments, and accelerate from its `mixed_precision`. DeepSpeed
    0.19.8 itself drops such keys: both sections are off, and weights that nothing casts stay in FP32. accelerate
    1.15.0 without `mixed_precision` fills in `false`, with the same result.

    ## Known limits
    Two cases are reported. The first is a dict that the code passes to `deepspeed.initialize`. The second is a file
    that an accelerate config in the same folder names in `deepspeed_config_file` without setting `mixed_precision`, if
    the code there builds an `Accelerator` without it and has no Trainer, and no launch line of the tree has
    `--mixed_precision`. A file that `deepspeed --deepspeed_config` reads is not reported: the script may fill it in.
    """

    code, name = "MPG824", "unresolved-auto"
    severity = "error"
    message = '`{key}: "auto"`, but nothing fills it in: {what}'
    help = "write `true` or `false`"
    kinds = ("deepspeed",)
    triggers = (any_of(b"auto"), any_of(b"bf16", b"fp16", b"bfloat16"))
    examples = (
        Bad(
            """\
import deepspeed

config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": "auto"},  # !
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
""",
            name="train.py",
        ),
        Good(
            """\
import deepspeed
from transformers import TrainingArguments

config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
arguments = TrainingArguments(deepspeed=config, bf16=True)

FP16_ON = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": True},
}
engine = deepspeed.initialize(model=model, config=FP16_ON)

filled = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": "auto"}}
fill_in(filled)
engine = deepspeed.initialize(model=model, config=filled)
""",
            name="train.py",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        first = schemas.deepspeed.unresolved(document)
        if first is None:
            return
        if document.format == "python":
            if document.given_to == ("deepspeed.initialize",):
                yield self._at(first, _OFF)
            return
        configs = siblings.naming(document.path)
        if not configs or any(accelerate_config.mixed_precision_mode(config) not in (None, "no") for config in configs):
            return
        launched = [(config.path, self.project.launched_with(config.path)) for config in configs]
        if any(siblings.flagged("mixed_precision", launches) for _, launches in launched):
            return
        if not any(siblings.mentions(path, r"\bAccelerator\(", launches) for path, launches in launched):
            return
        if not any(siblings.mentions(path, siblings.FILLS_IN, launches) for path, launches in launched):
            named = Path(configs[0].path).name
            yield self._at(
                first, f"accelerate fills in `false`, since `{named}` sets no `mixed_precision`; the run is FP32"
            )

    def _at(self, entry: Entry, what: str) -> Diagnostic:
        return self.at(entry, key=".".join(entry.path), what=what)
