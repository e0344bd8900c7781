from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, Entry, any_of

#: The keys of the model that GPT-NeoX requires, and the degree of pipeline parallelism, which its configs set.
_MODEL = {"num_layers", "hidden_size", "num_attention_heads", "pipe_parallel_size"}


class NeoxPrecision(ConfigRule, form_of="MPG849"):
    """A GPT-NeoX config asks for BF16 in a DeepSpeed section only, and not by `precision`.

    GPT-NeoX builds its model in the dtype of `precision`. Its releases, and its main branch before 13 November 2024, do
    not look at the `bf16` section: without the key they build an FP32 model, rotary embedding included, and DeepSpeed
    casts the parameters to BF16. Products of the two dtypes then fail, or compute in another precision than meant. With
    `fp16` enabled and no key, all versions set `precision` to `fp16`. Only DeeperSpeed 1.0 reads `type` in that
    section; later ones train in FP16 with a loss scale. DeeperSpeed 2.0 casts all inputs of the model, token ids as
    well, with `auto_cast: true`.

    GPT-NeoX reads several files for a run: `precision` in another one is not seen. Later versions of its main branch
    derive `precision` from the `bf16` section.
    """

    severity = "warning"
    message = "{what}, and `precision` is not set: {effect}"
    help = 'set `"precision": "bfloat16"`, which every version of GPT-NeoX reads'
    kinds = ("deepspeed",)
    triggers = (any_of(b"pipe_parallel_size", b"pipe-parallel-size"), any_of(b"num_layers", b"num-layers"))

    def check(self, document: Document) -> Iterator[Diagnostic]:
        keys = {str(key).replace("-", "_") for key in document.require()}
        if not keys >= _MODEL or "precision" in keys:
            return
        bf16, fp16, kind = map(document.entry, ("bf16.enabled", "fp16.enabled", "fp16.type"))
        if bf16 is not None and bf16.value is True:
            yield self.at(
                bf16,
                what="`bf16` is enabled",
                effect="GPT-NeoX before November 2024 builds the model in FP32",
            )
        elif _is_on(fp16) and kind is not None and kind.value == "bfloat16":
            casts = _is_on(document.entry("fp16.auto_cast"))
            inputs = ", and DeeperSpeed 2 casts token ids too (`auto_cast`)" if casts else ""
            yield self.at(
                kind,
                what="`fp16.type` is `bfloat16`",
                effect=f"no DeepSpeed since DeeperSpeed 1.0 reads that key, so the run trains in FP16{inputs}",
            )


def _is_on(entry: Entry | None) -> bool:
    return entry is not None and entry.value is True
