from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.errors import near
from mpguard.lint.accelerate_config import on_sagemaker
from mpguard.lint.accelerate_keys import SAGEMAKER, TOP, VERSION, unknown_key
from mpguard.lint.config_mend import renamed
from mpguard.lint.rule import Bad, ConfigRule, Diagnostic, Fix, Good, any_of

if TYPE_CHECKING:
    from mpguard.document import Document, Entry


class UnknownKey(ConfigRule):
    """A top-level key of an accelerate config that accelerate does not know.

    ## Why is this bad
    accelerate 1.15.0 refuses the whole file: `ValueError: The config file ... had unknown keys`. Nothing
    is launched, and it does not say which key was meant.

    ## Fix safety
    Safe: the key gets the name that is known, where one name differs by a slip of the hand and is not
    there already.

    ## Known limits
    The keys are those of accelerate 1.15.0; a key that a newer one reads is reported until mpguard
    knows it. Only files with a `distributed_type`, which accelerate requires, are taken for its configs.
    """

    code, name = "MPG813", "unknown-key"
    severity = "error"
    message = "`{key}`: accelerate has no such key and refuses the file{hint}"
    help = f"the keys are those of accelerate {VERSION}; settings of one's own belong into another file"
    kinds = ("accelerate",)
    triggers = (any_of(b"distributed_type"),)
    examples = (
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precission: bf16  # !
num_processes: 8
""",
            name="mp.yaml",
            fixed="""\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_processes: 8
""",
        ),
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
mpguard_recipe: bf16_mixed  # !
fsdp_version: 2  # !
""",
            name="mp.yaml",
        ),
        Good(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
fp16: true
dynamo_backend: 'NO'
num_processes: 1
tpu_env: []
tpu_use_cluster: false
""",
            name="default_config.yaml",
        ),
        Good(
            """\
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p4d.24xlarge
iam_role_name: accelerate_sagemaker
mixed_precision: bf16
""",
            name="sagemaker.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if "distributed_type" not in document.data:
            return
        sagemaker = on_sagemaker(document)
        for entry in document.entries():
            hint = unknown_key(entry.key, sagemaker) if len(entry.path) == 1 else None
            if hint is not None:
                yield self.at(entry, fix=_rename(document, entry, sagemaker), key=entry.key, hint=hint)


def _rename(document: Document, entry: Entry, sagemaker: bool) -> Fix | None:
    close = near(entry.key, SAGEMAKER if sagemaker else TOP, 2)
    if len(close) != 1 or close[0] in document.data or entry.key.startswith("mpguard_"):
        return None
    return renamed(f"Rename it to `{close[0]}`", document, entry, close[0])
