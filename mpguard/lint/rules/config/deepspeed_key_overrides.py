from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    ConfigRule,
    Diagnostic,
    Document,
    Good,
    Note,
    accelerate_config,
    any_of,
    config_edits,
    schemas,
    targets,
)


class DeepspeedKeyOverrides(ConfigRule):
    """A key of `deepspeed_config` that silently overrides the same key at the top level.

    ## Why is this bad
    accelerate copies each key of `deepspeed_config` to the launch argument of the same name, without a prefix, for
    every `distributed_type`. With accelerate 1.15.0 a file with `mixed_precision: bf16` and, under `deepspeed_config`,
    `mixed_precision: fp16` is an FP16 run. The same holds for `num_processes` and all other arguments of
    `accelerate launch`.

    ## Fix safety
    Safe, and only available if both have the same value: the key of `deepspeed_config` is removed.

    ## Known limits
    Only keys in both places are reported. A key that only `deepspeed_config` has applies as written.
    """

    code, name = "MPG804", "deepspeed-key-overrides"
    severity = "error"
    fixes = True
    message = "`deepspeed_config.{key}: {value}` overrides {top} of the top level, without a warning"
    help = "keep one key, at the top level"
    kinds = ("accelerate",)
    triggers = (any_of(b"deepspeed_config"),)
    examples = (
        Bad(
            """\
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  zero_stage: 2
  mixed_precision: fp16  # !
  num_processes: 4  # !
""",
            name="ds.yaml",
        ),
        Good(
            """\
distributed_type: DEEPSPEED
mixed_precision: bf16
gradient_clipping: 1.0
deepspeed_config:
  gradient_clipping: 1.0
  zero_stage: 3
""",
            name="ds.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        section = document.data.get("deepspeed_config")
        if not isinstance(section, dict) or accelerate_config.is_sagemaker(document):
            return
        for key in section:
            inner, top = document.entry(f"deepspeed_config.{key}"), document.entry(str(key))
            if key not in schemas.accelerate.ARGUMENTS or inner is None or top is None:
                continue
            same = inner.value == top.value
            fix = (
                config_edits.set_values("Remove it", document, {f"deepspeed_config.{key}": targets.ABSENT})
                if same
                else None
            )
            notes = (Note("the overridden key", top.key_span),)
            overridden = "the same value" if same else f"`{targets.show(top.value)}`"
            yield self.at(inner, notes=notes, fix=fix, key=key, value=targets.show(inner.value), top=overridden)
