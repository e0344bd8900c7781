from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import Bad, ConfigRule, Diagnostic, Good, accelerate_config, any_of, siblings

if TYPE_CHECKING:
    from mpguard.lint import Document


class Fp8WithoutBackend(ConfigRule):
    """`mixed_precision: fp8` in an accelerate config that sets no FP8 backend.

    ## Why is this bad
    accelerate 1.15.0 then uses the first one that is installed: torchao, Transformer Engine, MS-AMP, in this order.
    torchao scales per tensor and needs `torch.compile` to be faster than BF16; Transformer Engine uses delayed scaling
    with a history. The same file is a different training run on another machine, or after an upgrade of the image.

    ## Known limits
    Not reported if code in the config's folder passes `Accelerator` a recipe (`AORecipeKwargs` ...), which sets the
    backend, and if the file names an mpguard recipe.
    """

    code, name = "MPG805", "fp8-without-backend"
    severity = "warning"
    message = "`mixed_precision: fp8` without a backend: accelerate uses torchao, Transformer Engine or MS-AMP"
    help = "set one: `fp8_config: {backend: AO}` (torchao) or `TE` (Transformer Engine)"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8", b"FP8"),)
    examples = (
        Bad(
            """\
distributed_type: MULTI_GPU
mixed_precision: fp8  # !
num_processes: 8
""",
            name="mp.yaml",
        ),
        Good(
            """\
distributed_type: MULTI_GPU
mixed_precision: fp8
fp8_config:
  fp8_backend: TE
""",
            name="mp.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        entry = accelerate_config.mixed_precision_entry(document)
        if entry is None or not accelerate_config.is_fp8(document) or accelerate_config.names_recipe(document):
            return
        launches = self.project.launched_with(document.path)
        if accelerate_config.setting(document, "fp8_config", "backend") is not None or siblings.flagged(
            "fp8_backend", launches
        ):
            return
        if not siblings.mentions(document.path, r"RecipeKwargs\b", launches):
            yield self.at(entry)
