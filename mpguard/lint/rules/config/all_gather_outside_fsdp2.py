from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, accelerate_config, any_of, config_edits, siblings


class AllGatherOutsideFsdp2(ConfigRule, form_of="MPG413"):
    """torchao's float8 all-gather, accelerate's default, without FSDP2.

    The converted weights never train: with all-gather on, torchao wraps each weight in a tensor subclass whose updates
    outside FSDP2 are lost. On an H200, 4 of 4 converted weights were unchanged after training while the loss fell,
    since the layers that are not converted did train. Such weights cannot be saved as safetensors either.
    `enable_fsdp_float8_all_gather` is true by default (accelerate 1.15.0, `AORecipeKwargs`).

    Not reported if code in the config's folder builds an `AORecipeKwargs`, and if the file names an mpguard recipe,
    which passes accelerate a config without it.
    """

    message = "float8 all-gather {state} without FSDP2: the converted weights never train"
    help = "set `fp8_config.enable_fsdp_float8_all_gather: false`"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8_config"), any_of(b"AO", b"ao"))
    fixes = True

    def check(self, document: Document) -> Iterator[Diagnostic]:
        backend = accelerate_config.setting(document, "fp8_config", "backend")
        if (
            backend is None
            or not accelerate_config.is_fp8(document, "AO")
            or accelerate_config.distributed_type(document) is None
        ):
            return
        if accelerate_config.is_fsdp2(document) or accelerate_config.names_recipe(document):
            return
        if siblings.mentions(document.path, r"AORecipeKwargs\b", self.project.launched_with(document.path)):
            return
        gather = accelerate_config.setting(document, "fp8_config", "enable_fsdp_float8_all_gather")
        key = ".".join(gather.path) if gather is not None else "fp8_config.enable_fsdp_float8_all_gather"
        fix = config_edits.set_values("Switch it off", document, {key: False})
        if gather is None:
            yield self.at(backend, fix=fix, state="is on by default")
        elif accelerate_config.is_true(gather.value):
            yield self.at(gather, fix=fix, state="is on")
