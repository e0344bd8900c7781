from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Entry, Good, accelerate_config, any_of, schemas

_INTERVAL = "Transformer Engine removed it in 2.0 and ignores it without a warning"
_MOST_RECENT = "it is accelerate's default, which is not passed on; Transformer Engine's own is `max`"


class DroppedTeSetting(ConfigRule):
    """An FP8 setting of an accelerate config that never reaches Transformer Engine.

    ## Why is this bad
    - `interval` and `override_linear_precision`: Transformer Engine 2.0 removed them from its recipes, which
      ignore unknown arguments (observed with 2.20).
    - `amax_compute_algo: most_recent`: accelerate 1.15.0 passes on values that differ from its own default, which
      is `most_recent`. Transformer Engine's default is `max`, so the run uses that.

    ## Known limits
    Values that Transformer Engine uses anyway (`interval: 1`, a list of `false`) are not reported. Not reported if the
    file names an mpguard recipe, whose policy builds the recipe itself. `most_recent` is reported only if the backend
    is `TE` or not set; under DeepSpeed no such key arrives (MPG809).
    """

    code, name = "MPG809", "dropped-te-setting"
    severity = "error"
    message = "`{key}: {value}` never reaches Transformer Engine: {reason}"
    help = "remove it; pass a recipe of Transformer Engine in the code, or name an mpguard recipe"
    kinds = ("accelerate",)
    triggers = (any_of(b"interval", b"override_", b"most_recent"), any_of(b"fp8_config"))
    examples = (
        Bad(
            """\
distributed_type: MULTI_GPU
mixed_precision: fp8
fp8_config:
  backend: TE
  amax_history_len: 16
  amax_compute_algo: most_recent  # !
  interval: 4  # !
  override_linear_precision: [false, false, true]  # !
""",
            name="mp.yaml",
        ),
        Good(
            """\
distributed_type: MULTI_GPU
mixed_precision: fp8
fp8_config:
  backend: TE
  amax_compute_algo: max
  interval: 1
  override_linear_precision: [false, false, false]
""",
            name="mp.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if not accelerate_config.is_fp8(document) or accelerate_config.fp8_backend(document) not in (None, "TE"):
            return
        override = accelerate_config.setting(document, "fp8_config", "override_linear_precision")
        if accelerate_config.names_recipe(document):
            return
        interval = accelerate_config.setting(document, "fp8_config", "interval")
        if interval is not None and interval.value not in (1, "1", None):
            yield self._at(interval, _INTERVAL)
        if override is not None and isinstance(override.value, list) and any(override.value):
            yield self._at(override, _INTERVAL)
        for entry in (
            accelerate_config.setting(document, "fp8_config", f"override_{gemm}")
            for gemm in ("fprop", "dgrad", "wgrad")
        ):
            if entry is not None and entry.value is True:
                yield self._at(entry, _INTERVAL)
        algorithm = accelerate_config.setting(document, "fp8_config", "amax_compute_algo")
        if (
            algorithm is not None
            and algorithm.value == "most_recent"
            and accelerate_config.distributed_type(document) != "DEEPSPEED"
        ):
            yield self._at(algorithm, _MOST_RECENT)

    def _at(self, entry: Entry, why: str) -> Diagnostic:
        shown = str(entry.value).lower() if isinstance(entry.value, (bool, list)) else entry.value
        return self.at(entry, key=schemas.accelerate.FP8.bare(entry.key), value=shown, reason=why)
