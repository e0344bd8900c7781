from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mpguard.lint import ConfigRule, Diagnostic, Document, Entry, Note, any_of, schemas


class AxolotlPrecisionConflict(ConfigRule, form_of="MPG849"):
    """Precision keys of an axolotl config that exclude each other, or a value that its schema refuses.

    With axolotl 0.19.0:

    - `bf16: true` with `fp16: true`: BF16 wins, `fp16` is turned off without a warning.
    - `bf16: true` with `bfloat16: true`: the second means weights and computation in BF16 without AMP, the first
      turns AMP on, and wins without a warning.
    - `fp16: true` without an adapter: the weights are loaded in FP16, and on a GPU the GradScaler of the Trainer stops
      at the first step ("Attempting to unscale FP16 gradients").
    - `bfloat16: true` with `fp16` or `float16`: BF16 weights, and both modes are passed to `TrainingArguments`,
      which raises (`At most one of fp16 and bf16 can be True`).
    - `float16: true` with `bf16: true` or `auto`: on a GPU with BF16 the weights are BF16.
    - `fp8: true` with `bf16: false`, `fp16` or `float16`: everything except FP8 is still computed in BF16, on
      weights of the other dtype.
    - `bf16: full`, which axolotl's documentation recommends: its schema accepts `auto` and booleans only, and
      axolotl stops.

    `bf16: auto` with `fp16: true` is clearly FP16, and is reported only without an adapter. Values that a template
    fills in (`${BF16}`) are unknown.
    """

    message = "`{key}: {value}` {reason}"
    kinds = ("axolotl",)
    triggers = (any_of(b"bf16", b"fp16", b"bfloat16", b"float16"),)

    def _weights(self, document: Document, low: Entry | None, weights: Entry | None) -> Iterator[Diagnostic]:
        """Report what concerns the weights: pure BF16 next to AMP, and FP16 weights that are all trained."""
        if weights is not None and low is not None:
            yield self._at(weights, "has no effect: `bf16: true` turns AMP on", low, "keep one of them", "warning")
        fp16 = schemas.axolotl.is_on(document, "fp16")
        others = ("adapter", "load_in_8bit", "load_in_4bit", "reward_model", "gptq", "unfrozen_parameters", "deepspeed")
        plain = all(document.entry(key) is None or document.data[key] in (None, "", False) for key in others)
        if fp16 is not None and low is None and weights is None and plain:
            reason = "loads FP16 weights and trains all of them: the GradScaler refuses FP16 gradients"
            yield self._at(fp16, reason, None, "use `bf16: true`, or an adapter")

    def check(self, document: Document) -> Iterator[Diagnostic]:
        bf16 = document.entry("bf16")
        if bf16 is not None and isinstance(bf16.value, str) and bf16.value.lower() not in schemas.axolotl.BF16_WORDS:
            if "$" not in bf16.value and "{" not in bf16.value:
                hint = "write `bf16: true`"
                yield self._at(bf16, "is refused by axolotl's schema: `auto`, `true` or `false`", None, hint)
            return
        fp8, low, weights = (schemas.axolotl.is_on(document, key) for key in ("fp8", "bf16", "bfloat16"))
        yield from self._weights(document, low, weights)
        halves = [entry for key in ("fp16", "float16") if (entry := schemas.axolotl.is_on(document, key)) is not None]
        for half in halves:
            if weights is not None:
                yield self._at(half, "and `bfloat16: true` exclude each other: axolotl stops", weights)
            elif low is not None:
                yield self._at(half, "is ignored without a warning: `bf16` wins", low)
            elif half.key == "float16" and bf16 is not None and bf16.value == "auto":
                yield self._at(half, "is ignored on a GPU with BF16: `bf16: auto` wins", bf16)
            elif fp8 is not None:
                yield self._at(half, "together with FP8, whose other operations run in BF16", fp8)
        if fp8 is not None and not halves and weights is None and bf16 is not None and bf16.value is False:
            yield self._at(bf16, "together with FP8, whose other operations run in BF16", fp8)

    def _at(
        self,
        entry: Entry,
        why: str,
        against: Entry | None,
        help: str = "keep one of them",
        severity: Literal["warning"] | None = None,
    ) -> Diagnostic:
        notes = (Note("the other key", against.key_span),) if against is not None else ()
        value = str(entry.value).lower() if isinstance(entry.value, bool) else entry.value
        return self.at(entry, notes=notes, help=help, severity=severity, key=entry.key, value=value, reason=why)
