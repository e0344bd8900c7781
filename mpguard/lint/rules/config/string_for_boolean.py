from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, any_of, config_edits, lazy_pattern

_SECTIONS = ("bf16", "bfloat16", "fp16", "torch_autocast")
_FILLED_IN = lazy_pattern(r"[\"']auto[\"']")
_BOOLEANS = {"true": True, "false": False}


class StringForBoolean(ConfigRule, form_of="MPG823"):
    """`"enabled": "false"` for a precision in a DeepSpeed config: a string instead of a boolean.

    Python takes every string that is not empty as true, `"false"` too. transformers and accelerate
    (`HfDeepSpeedConfig.is_true`, transformers 5.23, accelerate 1.15) read the value so, and the Trainer stops because
    `"true"` differs from its own `True`. DeepSpeed before pydantic read these sections returned the string: with
    `"true"` next to `"false"` it stops because `bf16` and `fp16` are both enabled. DeepSpeed 0.19.8 alone parses both.
    """

    message = "`{key}` is the string `{written}`, not a boolean: {what}"
    help = 'write true or false without quotes, or "auto" if the Trainer or accelerate fills it in'
    kinds = ("deepspeed",)
    triggers = (any_of(b"enabled"), any_of(b"true", b"True", b"TRUE", b"false", b"False", b"FALSE"))
    fixes = True

    def check(self, document: Document) -> Iterator[Diagnostic]:
        for section in _SECTIONS:
            entry = document.entry(f"{section}.enabled")
            if entry is None or not isinstance(entry.value, str) or entry.value.lower() not in _BOOLEANS:
                continue
            meant = _BOOLEANS[entry.value.lower()]
            if meant and not _FILLED_IN.search(document.text):
                continue  # DeepSpeed by itself takes it for true
            key = ".".join(entry.path)
            what = "the Trainer stops, since it differs from `True`" if meant else "it counts as true"
            fix = config_edits.set_values("Write the boolean", document, {key: meant})
            yield self.at(entry, fix=fix, key=key, written=f'"{entry.value}"', what=what)
