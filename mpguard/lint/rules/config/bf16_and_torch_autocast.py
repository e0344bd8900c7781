from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import Bad, ConfigRule, Diagnostic, Good, Note, any_of
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint import Document

_SECTIONS = {"bf16": Dtype.BF16, "bfloat16": Dtype.BF16, "fp16": Dtype.FP16}


class Bf16AndTorchAutocast(ConfigRule):
    """A DeepSpeed config whose `torch_autocast` has another dtype than the `bf16` or `fp16` that is enabled too.

    ## Why is this bad
    `bf16` and `fp16` hold the parameters in the low precision, `torch_autocast` casts what operations
    take. DeepSpeed 0.19.8 takes both without a word. With two dtypes each matrix product casts BF16
    parameters to FP16 or the other way, and loses range or precision twice; gradients of Linear layers
    are reduced in the autocast's dtype, with no loss scale to hold them under `bf16`. Without a `dtype`,
    `torch_autocast` is FP16 on a GPU: torch's default.

    ## Known limits
    Both in one dtype are not reported, though DeepSpeed PR#6993 excluded it at first: since PR#7700 its
    own examples have `torch_autocast` beside `bf16_master_weights_and_grads`, and code uses it for
    inputs that are FP32. `"enabled": "auto"` counts as on in `torch_autocast`, since DeepSpeed takes the
    text for true; in `bf16` and `fp16` it is whatever fills it in, and not reported.
    """

    code, name = "MPG825", "bf16-and-torch-autocast"
    severity = "error"
    message = "`{low}` is enabled and `torch_autocast` computes in {dtype}: two precisions at once"
    help = "enable one of them, or give `torch_autocast` the dtype of the other"
    kinds = ("deepspeed",)
    triggers = (any_of(b"torch_autocast"), any_of(b"bf16", b"fp16", b"bfloat16"))
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "torch_autocast": {"enabled": true, "dtype": "float16"}  # !
}
""",
            name="ds_config.json",
        ),
        Bad(
            """\
config = {
    "train_batch_size": 8,
    "torch_autocast": {"enabled": True},  # !
    "bf16": {"enabled": True},
}
""",
            name="train.py",
        ),
        Good(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},
  "torch_autocast": {"enabled": true, "dtype": "bfloat16"}
}
""",
            name="ds_config.json",
        ),
        Good(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": false},
  "torch_autocast": {"enabled": true, "dtype": "float16"}
}
""",
            name="ds_config.json",
        ),
        Good(
            """\
config = {
    "train_batch_size": 8,
    "torch_autocast": {"enabled": autocast, "dtype": "bfloat16"},
    "fp16": {"enabled": True},
}
other = {
    "train_batch_size": 8,
    "torch_autocast": {"enabled": True, "dtype": str(dtype)},
    "bf16": {"enabled": True},
}
""",
            name="train.py",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        autocast, said = document.entry("torch_autocast.enabled"), document.entry("torch_autocast.dtype")
        if autocast is None or autocast.value not in (True, "auto"):
            return
        if said is not None and said.value is not None and not isinstance(said.value, str):
            return
        dtype = Dtype.FP16 if said is None or said.value is None else Dtype.spelled(said.value)
        for name, held in _SECTIONS.items():
            low = document.entry(f"{name}.enabled")
            if low is None or low.value is not True or dtype in (None, held):
                continue
            notes = (Note(f"`{name}` is enabled here", low.key_span),)
            place = autocast if said is None or said.value is None else said
            yield self.at(place, notes=notes, low=name, dtype=str(dtype).upper())
