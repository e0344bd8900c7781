from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    ConfigRule,
    Diagnostic,
    Document,
    Entry,
    accelerate_config,
    any_of,
    hardware,
    library_names,
    schemas,
)


class PrecisionOnOldGpu(ConfigRule, form_of="MPG408"):
    """FP8 or BF16 in a config, for a GPU that has no arithmetic for it.

    FP8 needs compute capability 8.9 (Ada, Hopper or newer). On an older GPU accelerate 1.15.0 warns once and continues
    in FP16, not BF16 (state.py). Layers may have been converted all the same, and then run or fail depending on the
    backend.

    torch emulates BF16 below 8.0 (pytorch#148322): values are converted to FP32, computed without tensor cores, and
    rounded again. FP16 has tensor cores from 7.0 on. `torch.compile` skips such graphs, and cuDNN has no BF16
    convolutions there (diffusers#14129). With torch 2.2, `torch.cuda.is_bf16_supported()` is False on a V100
    (pytorch#124996): there accelerate, DeepSpeed and transformers raise, and the finding is an error. Since then it is
    True, and nothing warns.

    The GPU is taken from SageMaker's `ec2_instance_type`, from `--gpu NAME`, or from `gpu` in [tool.mpguard]; without
    one of them nothing is reported. axolotl's `bf16: auto` is decided on the machine.
    """

    severity = "warning"
    message = "{what} on {gpu} (compute capability {has}): {effect}"
    kinds = ("accelerate", "deepspeed", "axolotl")
    triggers = (any_of(b"fp8", b"FP8", b"bf16", b"BF16", b"bfloat16"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        mode, entry = _selected(document)
        gpu, notes = accelerate_config.gpu(document, self.project) if entry is not None else (None, ())
        has = accelerate_config.capability(gpu)
        if (
            entry is None
            or gpu is None
            or has is None
            or has >= hardware.NEEDS["delayed" if mode == "fp8" else "bf16"].low
        ):
            return
        raises = self.project.required(document.path, "torch").before(library_names.COUNTS_EMULATION)
        if mode == "fp8":
            what, effect = "`mixed_precision: fp8`", "accelerate continues in FP16; FP8 needs 8.9"
            help = "use `bf16` from compute capability 8.0 on, `fp16` below"
        else:
            stops = "with the torch that the project requires, the run stops"
            what, effect = "BF16", f"{stops if raises else 'it is emulated, without tensor cores'}; BF16 needs 8.0"
            help = "use FP16 with loss scaling on this GPU"
        yield self.at(
            entry, notes=notes, help=help, severity="error" if mode == "fp8" or raises else None,
            what=what, gpu=gpu, has=".".join(map(str, has)), effect=effect,
        )  # fmt: skip


def _selected(document: Document) -> tuple[str | None, Entry | None]:
    """Return `fp8` or `bf16`, and the key that selects it."""
    if document.kind == "accelerate":
        mode = accelerate_config.mixed_precision_mode(document)
        return mode, accelerate_config.mixed_precision_entry(document) if mode in ("fp8", "bf16") else None
    if document.kind == "axolotl":
        return "bf16", schemas.axolotl.is_on(document, "bf16") or schemas.axolotl.is_on(document, "bfloat16")
    entry = document.entry("bf16.enabled")
    return "bf16", entry if entry is not None and entry.value is True else None
