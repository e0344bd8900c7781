from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, any_of, schemas


class LlamaFactoryWithoutMixedPrecision(ConfigRule, form_of="MPG849"):
    """A LLaMA-Factory config trains without mixed precision.

    LLaMA-Factory 0.9.5 casts the parameters that train to FP32, and without one of the switches there is no autocast:
    full fine-tuning computes in FP32, with twice the memory and a fraction of the speed. With LoRA, the base model is
    loaded in 16 bit all the same, and new tokens and other trained parts, which are FP32, meet 16-bit activations. A
    line of the log says only "We recommend enable mixed precision training".

    Values that a template fills in are unknown. Not reported: BAdam, GaLore and APOLLO, Unsloth, and configs that only
    tokenize (`tokenized_path`).
    """

    severity = "warning"
    message = "{what}: LLaMA-Factory trains without mixed precision"
    help = "set `bf16: true`, or `fp16: true` on a GPU without BF16"
    kinds = ("llamafactory",)
    triggers = (any_of(b"finetuning_type"), any_of(b"do_train"))

    def check(self, document: Document) -> Iterator[Diagnostic]:
        trains = document.entry("do_train")
        switches = [entry for key in schemas.llamafactory.SWITCHES if (entry := document.entry(key)) is not None]
        if trains is None or trains.value is not True or any(entry.value is not False for entry in switches):
            return
        if any(document.entry(key) is not None for key in schemas.llamafactory.OTHER):
            return
        written = f"`{switches[0].key}: false`" if switches else "neither `bf16` nor `fp16` is set"
        yield self.at(switches[0] if switches else trains, what=written)
