from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    NEEDS,
    ConfigRule,
    Diagnostic,
    Document,
    Entry,
    accelerate_config,
    any_of,
    axolotl_keys,
    library_names,
)


class Bf16OnOldGpu(ConfigRule, form_of="MPG408"):
    """BF16 for a GPU that has no BF16 arithmetic.

    torch emulates BF16 there (pytorch#148322): values are converted to FP32, computed without tensor cores, and rounded
    again. FP16 has tensor cores from 7.0 on. `torch.compile` skips such graphs, and cuDNN has no BF16 convolutions
    below 8.0 (diffusers#14129). With torch 2.2, `torch.cuda.is_bf16_supported()` is False on a V100 (pytorch#124996):
    there accelerate, DeepSpeed and transformers raise, and the finding is an error. Since then it is True, and nothing
    warns.

    The GPU is taken from SageMaker's `ec2_instance_type`, from `--gpu NAME`, or from `gpu` in [tool.mpguard]; without
    one of them nothing is reported. axolotl's `bf16: auto` is decided on the machine.
    """

    severity = "warning"
    message = "BF16 on {gpu} (compute capability {has}): {what}; BF16 needs 8.0"
    help = "use FP16 with loss scaling on this GPU"
    kinds = ("accelerate", "deepspeed", "axolotl")
    triggers = (any_of(b"bf16", b"BF16", b"bfloat16"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        entry = _bf16(document)
        if entry is None:
            return
        gpu, notes = accelerate_config.gpu(document, self.project)
        has = accelerate_config.capability(gpu)
        if gpu is None or has is None or has >= NEEDS["bf16"].low:
            return
        raises = self.project.required(document.path, "torch").before(library_names.COUNTS_EMULATION)
        what = (
            "with the torch that the project requires, the run stops"
            if raises
            else "it is emulated, without tensor cores"
        )
        yield self.at(
            entry, gpu=gpu, has=".".join(map(str, has)), what=what, notes=notes, severity="error" if raises else None
        )


def _bf16(document: Document) -> Entry | None:
    if document.kind == "accelerate":
        mode = accelerate_config.mixed_precision_mode(document)
        return accelerate_config.mixed_precision_entry(document) if mode == "bf16" else None
    if document.kind == "axolotl":
        return axolotl_keys.is_on(document, "bf16") or axolotl_keys.is_on(document, "bfloat16")
    entry = document.entry("bf16.enabled")
    return entry if entry is not None and entry.value is True else None
