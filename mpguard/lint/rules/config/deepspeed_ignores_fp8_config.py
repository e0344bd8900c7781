from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, Note, accelerate_config, any_of

#: Keys of a recipe, and their values in Transformer Engine's default recipe.
_RECIPE = {
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
    "margin": 0,
    "format": "HYBRID",
    "use_mxfp8_block_scaling": False,
}


class DeepspeedIgnoresFp8Config(ConfigRule, form_of="MPG809"):
    """DeepSpeed with Transformer Engine in an accelerate config, and settings for the FP8 recipe.

    Under DeepSpeed accelerate 1.15.0 builds Transformer Engine's `DelayedScaling()` with its defaults and ignores
    `fp8_config`: it passes on `fp8_recipe_handler`, which only the deprecated `FP8RecipeKwargs` sets (accelerator.py,
    `_prepare_deepspeed`). MXFP8, E4M3 and the length of the history are lost without a warning.

    Values that are Transformer Engine's defaults are not reported. Not reported if the file, or `[tool.mpguard]`, names
    an mpguard recipe: its plugin enters FP8 autocast with the policy's recipe. Read in the source of accelerate 1.15.0.
    """

    message = "under DeepSpeed accelerate ignores `{key}`: Transformer Engine gets its default recipe, {default}"
    help = "pass `FP8RecipeKwargs` to `Accelerator` in the code, or name an mpguard recipe and use `mpguard launch`"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8_config"), any_of(b"DEEPSPEED"), any_of(b"TE", b"te"))

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if (
            not accelerate_config.is_fp8(document, "TE")
            or accelerate_config.distributed_type(document) != "DEEPSPEED"
            or accelerate_config.names_recipe(document)
        ):
            return
        where = document.entry("distributed_type")
        notes = (Note("DeepSpeed is selected here", where.key_span),) if where is not None else ()
        for key, default in _RECIPE.items():
            entry = accelerate_config.setting(document, "fp8_config", key)
            if entry is None or entry.value is None or str(entry.value).lower() == str(default).lower():
                continue
            shown = str(default).lower() if isinstance(default, bool) else default
            yield self.at(entry, notes=notes, key=entry.key, default=f"`{key}: {shown}`")
