from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, Dtype, Note, any_of

_SECTIONS = {"bf16": Dtype.BF16, "bfloat16": Dtype.BF16, "fp16": Dtype.FP16}


class Bf16AndTorchAutocast(ConfigRule, form_of="MPG821"):
    """A DeepSpeed config whose `torch_autocast` has another dtype than its enabled `bf16` or `fp16` section.

    `bf16` and `fp16` store the parameters in the low precision, `torch_autocast` casts the inputs of operations.
    DeepSpeed 0.19.8 accepts both without a warning. With two dtypes each matmul casts BF16 parameters to FP16
    or the reverse, and loses range or precision twice; gradients of Linear layers are reduced in the autocast's dtype,
    which under `bf16` has no loss scale to protect them. Without a `dtype`, `torch_autocast` is FP16 on a GPU: torch's
    default.

    Both in one dtype are not reported, though DeepSpeed PR#6993 excluded it at first: since PR#7700 its own examples
    combine `torch_autocast` with `bf16_master_weights_and_grads`, and code uses it for FP32 inputs. `"enabled": "auto"`
    counts as on in `torch_autocast`, since DeepSpeed reads the text as true. In `bf16` and `fp16` it depends on the
    program that fills it in, and is not reported.
    """

    message = "`{low}` is enabled and `torch_autocast` computes in {dtype}: two precisions at once"
    help = "enable one of them, or give `torch_autocast` the dtype of the other"
    kinds = ("deepspeed",)
    triggers = (any_of(b"torch_autocast"), any_of(b"bf16", b"fp16", b"bfloat16"))

    def check(self, document: Document) -> Iterator[Diagnostic]:
        autocast, setting = document.entry("torch_autocast.enabled"), document.entry("torch_autocast.dtype")
        if autocast is None or autocast.value not in (True, "auto"):
            return
        if setting is not None and setting.value is not None and not isinstance(setting.value, str):
            return
        dtype = Dtype.FP16 if setting is None or setting.value is None else Dtype.spelled(setting.value)
        for name, held in _SECTIONS.items():
            low = document.entry(f"{name}.enabled")
            if low is None or low.value is not True or dtype in (None, held):
                continue
            notes = (Note(f"`{name}` is enabled here", low.key_span),)
            place = autocast if setting is None or setting.value is None else setting
            yield self.at(place, notes=notes, low=name, dtype=str(dtype).upper())
