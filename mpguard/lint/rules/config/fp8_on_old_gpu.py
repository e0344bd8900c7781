from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import NEEDS, Bad, ConfigRule, Diagnostic, Good, Note, PolicyError, accelerate_config, any_of, named

if TYPE_CHECKING:
    from mpguard.lint import Document

#: GPUs of SageMaker's instance types, by family (aws.amazon.com/sagemaker/pricing).
_INSTANCES = {
    "p2": "K80", "p3": "V100", "p3dn": "V100", "p4d": "A100", "p4de": "A100", "p5": "H100", "p5e": "H200",
    "p5en": "H200", "p6-b200": "B200", "g4dn": "T4", "g5": "A10", "g6": "L4", "g6e": "L40S",
}  # fmt: skip
_K80 = (3, 7)


class Fp8OnOldGpu(ConfigRule):
    """`mixed_precision: fp8` for a GPU without FP8.

    ## Why is this bad
    FP8 needs compute capability 8.9 (Ada, Hopper or newer). On an older GPU accelerate 1.15.0 warns once and continues
    in FP16, not BF16 (state.py). Layers may have been converted all the same, and then run or fail depending on the
    backend.

    ## Known limits
    The GPU is taken from SageMaker's `ec2_instance_type`, from `--gpu NAME`, or from `gpu` in [tool.mpguard]; without
    one of them nothing is reported.
    """

    code, name = "MPG814", "fp8-on-old-gpu"
    severity = "error"
    message = "`mixed_precision: fp8` on {gpu} (compute capability {has}): accelerate continues in FP16; FP8 needs 8.9"
    help = "use `bf16` from compute capability 8.0 on, `fp16` below"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8", b"FP8"),)
    examples = (
        Bad(
            """\
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p4d.24xlarge
iam_role_name: accelerate_sagemaker
mixed_precision: fp8  # !
""",
            name="sagemaker.yaml",
        ),
        Bad(
            """\
distributed_type: MULTI_GPU
mixed_precision: fp8  # !
num_processes: 8
fp8_config: {backend: TE}
""",
            name="mp.yaml",
            files={"pyproject.toml": '[tool.mpguard]\ngpu = "a100"\n'},
        ),
        Good(
            """\
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p5.48xlarge
iam_role_name: accelerate_sagemaker
mixed_precision: fp8
""",
            name="sagemaker.yaml",
        ),
        Good(
            """\
distributed_type: MULTI_GPU
mixed_precision: fp8
num_processes: 8
fp8_config: {backend: TE}
""",
            name="mp.yaml",
            files={"pyproject.toml": '[tool.mpguard]\ngpu = "sm_89"\n'},
        ),
        Good(
            """\
distributed_type: MULTI_GPU
mixed_precision: fp8
fp8_config: {backend: TE}
""",
            name="mp.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        entry = accelerate_config.mixed_precision_entry(document)
        if entry is None or accelerate_config.mixed_precision_mode(document) != "fp8":
            return
        gpu, notes = self.project.gpu(document.path), ()
        instance = document.entry("ec2_instance_type")
        family = re.match(r"ml\.([\w-]+)\.", instance.value) if instance and isinstance(instance.value, str) else None
        if instance is not None and family is not None:
            gpu, notes = _INSTANCES.get(family[1]), (Note("the instance", instance.value_span),)  # type: ignore[assignment]
        has = _capability(gpu) if gpu is not None else None
        if gpu is not None and has is not None and has < NEEDS["delayed"].low:
            yield self.at(entry, notes=notes, gpu=gpu, has=".".join(map(str, has)))


def _capability(gpu: str) -> tuple[int, ...] | None:
    try:
        return _K80 if gpu == "K80" else named(gpu).capability
    except PolicyError:
        return None
