from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Entry, Good, accelerate_config, any_of, schemas

#: DeepSpeed's key -> accelerate's own key for it.
_INSTEAD = {
    "bf16": "`mixed_precision: bf16` at the top level",
    "bfloat16": "`mixed_precision: bf16` at the top level",
    "fp16": "`mixed_precision: fp16` at the top level",
    "zero_optimization": "`zero_stage`, `offload_optimizer_device` ... in this section",
}


class DeepspeedSectionInAccelerateConfig(ConfigRule):
    """DeepSpeed's own sections under `deepspeed_config` of an accelerate config, where nothing reads them.

    ## Why is this bad
    `deepspeed_config` contains accelerate's own keys (`zero_stage` ...), not a DeepSpeed config. accelerate 1.15.0
    accepts `bf16: {enabled: true}` there without a warning and passes it to nothing: the run is FP32, or what
    `mixed_precision` sets. The same holds for `zero_optimization`: the stage is accelerate's default, 2.

    ## Known limits
    The keys are those of DeepSpeed 0.19.8. A value of `auto` is not reported, nor a section that is switched off: both
    are in force anyway.
    """

    code, name = "MPG815", "deepspeed-section-in-accelerate-config"
    severity = "error"
    message = "`deepspeed_config.{key}`: a key of DeepSpeed's own config; accelerate does not read it here"
    help = "move it into a DeepSpeed JSON and name that in `deepspeed_config.deepspeed_config_file`"
    kinds = ("accelerate",)
    triggers = (any_of(b"deepspeed_config"),)
    examples = (
        Bad(
            """\
distributed_type: DEEPSPEED
deepspeed_config:
  bf16: {enabled: true}  # !
  zero_optimization:  # !
    stage: 3
  gradient_clipping: 1.0
""",
            name="ds.yaml",
        ),
        Good(
            """\
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  gradient_clipping: 1.0
  gradient_accumulation_steps: 4
""",
            name="ds.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if accelerate_config.is_sagemaker(document):
            return
        misplaced = schemas.deepspeed.KEYS | set(schemas.deepspeed.RENAMED)
        misplaced -= schemas.accelerate.DEEPSPEED.keys | schemas.accelerate.ARGUMENTS
        precision = document.entry("mixed_precision")
        for entry in document.entries():
            if precision is not None and entry.key == str(precision.value) and _is_enabled_only(entry):
                continue
            if len(entry.path) != 2 or entry.path[0] != "deepspeed_config":
                continue
            if entry.key in misplaced and not _asks_for_what_is(entry):
                instead = _INSTEAD.get(schemas.deepspeed.RENAMED.get(entry.key, entry.key))
                yield self.at(entry, key=entry.key, help=f"write {instead}" if instead else None)


def _is_enabled_only(entry: Entry) -> bool:
    """True for a section that switches a precision on, and says no more."""
    return entry.value in (True, {"enabled": True})


def _asks_for_what_is(entry: Entry) -> bool:
    """True if a value is in force anyway: `auto`, as accelerate writes itself, or a section that is switched off."""
    value = entry.value.get("enabled", True) if isinstance(entry.value, dict) else entry.value
    return value == "auto" or value is False
