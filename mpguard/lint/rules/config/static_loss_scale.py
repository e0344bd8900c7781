from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Good, any_of

#: mpguard's bounds: 2**32 is the largest initial scale of known recipes (Megatron). DeepSpeed accepts more.
_LOWEST, _HIGHEST = 0, 32


class StaticLossScale(ConfigRule):
    """A fixed FP16 loss scale in a DeepSpeed config, or an initial one out of bounds.

    ## Why is this bad
    The right loss scale changes as gradients shrink during training: a fixed one underflows late, or overflows early,
    and then every step is skipped. `loss_scale: 0` lets DeepSpeed adapt it. `initial_scale_power` above 32 starts with
    a scale that overflows for many steps, each of them skipped; a negative one scales gradients down.

    ## Known limits
    The bound of 32 is mpguard's; DeepSpeed 0.19.8 accepts any whole number. Nothing is reported if `fp16` is off.
    """

    code, name = "MPG828", "static-loss-scale"
    severity = "warning"
    message = "`fp16.{key}: {value}` {reason}"
    kinds = ("deepspeed",)
    triggers = (any_of(b"loss_scale", b"initial_scale_power"),)
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "fp16": {
    "enabled": true,
    "loss_scale": 1024  # !
  }
}
""",
            name="ds_config.json",
        ),
        Good(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 32}
}
""",
            name="ds_config.json",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        enabled, scale, power = (
            document.entry(f"fp16.{key}") for key in ("enabled", "loss_scale", "initial_scale_power")
        )
        if enabled is None or enabled.value not in (True, "auto"):
            return
        if scale is not None and _number(scale.value) and scale.value > 0:
            why = "is fixed: it underflows or overflows as training goes on"
            yield self.at(scale, key="loss_scale", value=scale.value, reason=why, help="0 lets DeepSpeed adapt it")
        elif power is not None and _number(power.value) and not _LOWEST <= power.value <= _HIGHEST:
            why = "starts with a scale that overflows" if power.value > 0 else "scales gradients down"
            yield self.at(
                power, key="initial_scale_power", value=power.value, reason=why, help="DeepSpeed's default is 16"
            )


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
