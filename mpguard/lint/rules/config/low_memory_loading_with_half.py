from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import Bad, ConfigRule, Diagnostic, Good, Note, accelerate_config, any_of

if TYPE_CHECKING:
    from mpguard.lint import Document


class LowMemoryLoadingWithHalf(ConfigRule):
    """`cpu_ram_efficient_loading` of FSDP with FP8 by torchao.

    ## Why is this bad
    accelerate 1.15.0 refuses it: `ValueError: torchao with FSDP2 and cpu_ram_efficient_loading is not supported` (for
    FSDP1 too), in each worker, when the Accelerator is built. If the key is missing, `accelerate launch` uses its own
    default, which is true.

    ## Known limits
    Observed for FSDP2; for FSDP1 read in the source, which treats both alike. If the key is missing, `backend` is
    reported; a run that is not started by `accelerate launch` has the key off.
    """

    code, name = "MPG808", "low-memory-loading-with-half"
    severity = "warning"
    message = "`cpu_ram_efficient_loading` {state} with FSDP and torchao FP8: accelerate stops with a ValueError"
    help = "set `fsdp_cpu_ram_efficient_loading: false`"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8_config"), any_of(b"FSDP"), any_of(b"AO", b"ao"))
    examples = (
        Bad(
            """\
distributed_type: FSDP
mixed_precision: fp8
fp8_config:
  backend: AO
fsdp_config:
  fsdp_version: 2
  fsdp_cpu_ram_efficient_loading: true  # !
""",
            name="mp.yaml",
        ),
        Bad(
            """\
distributed_type: FSDP
mixed_precision: fp8
fp8_config:
  backend: AO  # !
fsdp_config:
  fsdp_version: 2
""",
            name="mp.yaml",
        ),
        Good(
            """\
distributed_type: FSDP
mixed_precision: fp8
fp8_config:
  backend: AO
fsdp_config:
  fsdp_version: 2
  cpu_ram_efficient_loading: false
""",
            name="mp.yaml",
        ),
        Good(
            """\
distributed_type: FSDP
mixed_precision: bf16
fp8_config:
  backend: AO
fsdp_config:
  cpu_ram_efficient_loading: true
""",
            name="mp.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        backend = accelerate_config.setting(document, "fp8_config", "backend")
        if (
            backend is None
            or not accelerate_config.is_fp8(document, "AO")
            or accelerate_config.distributed_type(document) != "FSDP"
        ):
            return
        loading = accelerate_config.setting(document, "fsdp_config", "cpu_ram_efficient_loading")
        if loading is None:
            yield self.at(backend, state="is on by default")
        elif accelerate_config.is_true(loading.value):
            yield self.at(loading, notes=(Note("torchao is selected here", backend.key_span),), state="is on")
