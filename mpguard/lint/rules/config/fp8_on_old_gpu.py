from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import NEEDS, ConfigRule, Diagnostic, Document, accelerate_config, any_of


class Fp8OnOldGpu(ConfigRule, form_of="MPG408"):
    """`mixed_precision: fp8` for a GPU without FP8.

    FP8 needs compute capability 8.9 (Ada, Hopper or newer). On an older GPU accelerate 1.15.0 warns once and continues
    in FP16, not BF16 (state.py). Layers may have been converted all the same, and then run or fail depending on the
    backend.

    The GPU is taken from SageMaker's `ec2_instance_type`, from `--gpu NAME`, or from `gpu` in [tool.mpguard]; without
    one of them nothing is reported.
    """

    message = "`mixed_precision: fp8` on {gpu} (compute capability {has}): accelerate continues in FP16; FP8 needs 8.9"
    help = "use `bf16` from compute capability 8.0 on, `fp16` below"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8", b"FP8"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        entry = accelerate_config.mixed_precision_entry(document)
        if entry is None or accelerate_config.mixed_precision_mode(document) != "fp8":
            return
        gpu, notes = accelerate_config.gpu(document, self.project)
        has = accelerate_config.capability(gpu)
        if gpu is not None and has is not None and has < NEEDS["delayed"].low:
            yield self.at(entry, notes=notes, gpu=gpu, has=".".join(map(str, has)))
