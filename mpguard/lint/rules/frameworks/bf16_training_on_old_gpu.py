from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Call,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Rule,
    accelerate_config,
    any_of,
    hardware,
    launch_expectations,
    lazy_pattern,
)

_EMULATES = (2, 3)
#: Values of `precision` and `mixed_precision` that are BF16.
_BF16 = frozenset({"bf16", "bf16-mixed", "bf16-true"})


class Bf16TrainingOnOldGpu(Rule, form_of="MPG408"):
    """BF16 training in code for a GPU that has no BF16 arithmetic.

    transformers stops with "Your setup doesn't support bf16/gpu" where torch reports no BF16 (before torch 2.3). Later
    versions emulate it: values are converted to FP32, computed without tensor cores, and rounded again. FP16 has tensor
    cores from 7.0 on.

    The GPU is taken from `--gpu NAME`, from `gpu` in [tool.mpguard], from the runtime that Colab wrote into a notebook,
    or from the shell scripts that start the file, if they name one GPU. Other values than literals are unknown.
    """

    severity = "warning"
    message = "BF16 on {gpu} (compute capability {has}): {what}; BF16 needs 8.0"
    help = 'use FP16 on this GPU (`fp16=True`, `precision="16-mixed"`)'
    triggers = (
        any_of(b"bf16", b"bfloat16"),
        any_of(b"TrainingArguments", b"Trainer(", b"Accelerator(", b"Config(", b"autocast("),
    )
    #: An argument or a key, a value, or the loop around an autocast.
    pattern = lazy_pattern(rb"""bf16["']?[ \t]*[=:]|["']bf16|\.backward\(""")

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        found = [
            *(event.call for event in facts.events("arguments") if self._is(event.call, "bf16", {True}, facts)),
            *(event.call for event in facts.events("trainer") if self._is(event.call, "precision", _BF16, facts)),
            *(
                event.call
                for event in facts.events("accelerator")
                if self._is(event.call, "mixed_precision", _BF16, facts)
            ),
            *(event.call for event in facts.events("autocast") if self._trains_in_bfloat16(event, facts)),
        ]
        gpu = facts.project.gpu(facts.path) if found else None
        has = accelerate_config.capability(gpu)
        if gpu is None or has is None or has >= hardware.NEEDS["bf16"].low:
            return
        raises = facts.required("torch").before(_EMULATES)
        what = "the run stops" if raises else "it is emulated, without tensor cores"
        for call in found:
            if not launch_expectations.is_unconditional(call.guard, None):
                continue
            yield self.at(call, gpu=gpu.upper(), has=".".join(map(str, has)), what=what)

    def _trains_in_bfloat16(self, autocast: Event, facts: Facts) -> bool:
        """True if an autocast on a GPU is BF16 in every case, in a function with a backward pass."""
        return (
            {dtype for _, dtype in autocast.dtypes} == {Dtype.BF16}
            and facts.constants(autocast.call.argument(0, "device_type"), autocast.call) == ["cuda"]
            and any(event.scope is autocast.scope for event in facts.events("backward"))
        )

    def _is(self, call: Call, keyword: str, wanted: frozenset[str] | set[bool], facts: Facts) -> bool:
        """True if an argument has one of some values in every case."""
        values = facts.constants(call.keywords.get(keyword), call)
        return bool(values) and all(value in wanted for value in values)
