from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, any_of, validation


class WrongDeepspeedValue(ConfigRule, form_of="MPG823"):
    """A value of a DeepSpeed config that DeepSpeed 0.19.8 cannot parse: each process stops.

    Checked are the sections `bf16`, `fp16`, `torch_autocast`, `data_types` and `zero_optimization`, the batch sizes,
    `gradient_clipping`, and `communication_data_type`, which has three names of dtypes: `float32` is refused there.
    So are misspelled classes of `optimizer` and `scheduler`, and `device: nvme` without `nvme_path` at ZeRO stage 3.

    What is offloaded at a stage that ignores it is a warning: `offload_param` below stage 3, `offload_optimizer` at
    stage 0, and NVMe below stage 3, where the CPU's memory is used.

    Values that a template or the Trainer fills in (`"auto"`) are unknown. A dict that is set on another library's
    config is read by that library, and not reported.
    """

    message = "`{key}`: {reason}"
    help = "write a value that DeepSpeed parses"
    kinds = ("deepspeed",)
    triggers = (
        any_of(
            b"bf16", b"fp16", b"stage", b"data_type", b"bfloat16", b"torch_autocast", b"batch_size", b"gradient_",
            b"zero_optimization", b"optimizer", b"scheduler",
        ),
    )  # fmt: skip

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if document.attribute:
            return
        for problem in validation.every(document):
            entry = document.entry(problem.key)
            if entry is not None and not problem.unknown:
                yield self.at(entry, severity=problem.severity, key=problem.key, reason=problem.reason)
        for problem in validation.without_effect(document):
            if (entry := document.entry(problem.key)) is not None:
                yield self.at(entry, severity="warning", key=problem.key, reason=problem.reason)
