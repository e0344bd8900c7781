from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint.rule import Bad, ConfigRule, Diagnostic, Good, Note, any_of

if TYPE_CHECKING:
    from mpguard.document import Document


class Bf16AndTorchAutocast(ConfigRule):
    """A DeepSpeed config with `torch_autocast` and `bf16` or `fp16` enabled at once.

    ## Why is this bad
    They are two ways to the same end: `torch_autocast` keeps the parameters in FP32 and lets operations
    choose, `bf16` and `fp16` hold the parameters in the low precision. DeepSpeed 0.19.8 takes both
    without a word, although they were meant to exclude each other (DeepSpeed PR#6993); the parameters
    are in the low precision, so what `torch_autocast` was for is lost.

    ## Known limits
    `"enabled": "auto"` in `torch_autocast` is on, since DeepSpeed takes the text for true; in `bf16` and
    `fp16` it is whatever fills it in, and not reported.
    """

    code, name = "MPG825", "bf16-and-torch-autocast"
    severity = "error"
    message = "`{low}` and `torch_autocast` are both enabled: the parameters are {dtype}, autocast adds nothing"
    help = "enable one of them: `torch_autocast` for FP32 parameters, `bf16` for BF16 ones with FP32 masters"
    kinds = ("deepspeed",)
    triggers = (any_of(b"torch_autocast"), any_of(b"bf16", b"fp16", b"bfloat16"))
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "torch_autocast": {"enabled": true, "dtype": "bfloat16"}  # !
}
""",
            name="ds_config.json",
        ),
        Bad(
            """\
config = {
    "train_batch_size": 8,
    "torch_autocast": {"enabled": True, "dtype": "float16"},  # !
    "fp16": {"enabled": True},
}
""",
            name="train.py",
        ),
        Good(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": false},
  "torch_autocast": {"enabled": true, "dtype": "bfloat16"}
}
""",
            name="ds_config.json",
        ),
        Good(
            """\
config = {
    "train_batch_size": 8,
    "torch_autocast": {"enabled": autocast, "dtype": "float16"},
    "fp16": {"enabled": True},
}
""",
            name="train.py",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        autocast = document.entry("torch_autocast.enabled")
        if autocast is None or autocast.value not in (True, "auto"):
            return
        for name, dtype in (("bf16", "BF16"), ("fp16", "FP16")):
            low = document.entry(f"{name}.enabled")
            if low is not None and low.value is True:
                yield self.at(autocast, notes=(Note(f"`{name}` is enabled here", low.key_span),), low=name, dtype=dtype)
