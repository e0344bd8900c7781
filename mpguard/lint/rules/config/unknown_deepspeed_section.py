from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    ConfigRule,
    Diagnostic,
    Document,
    Entry,
    Fix,
    config_edits,
    lazy_pattern,
    may_be_new,
    misspelling_of,
    schemas,
)

#: Matches keys about precision.
_PRECISION = lazy_pattern(r"fp8|fp16|bf16|fp32|float|precision|dtype|data_type|autocast|loss_?scal")
#: Matches sections that have an effect in another place.
_MISPLACED = lazy_pattern(r"offload|zero")
#: Keys of Apex, whose levels DeepSpeed does not have: nothing is lost where they are ignored.
_APEX = frozenset({"opt_level", "fp16_opt_level"})
#: The version since which an unknown key of `bf16` and `fp16` stops the run, at the latest.
_STRICT_SINCE = (0, 17, 1)
#: Defaults of keys at the top level (`*_DEFAULT` in deepspeed/runtime/constants.py); all other switches are off.
_DEFAULTS = {"zero_force_ds_cpu_optimizer": True, "gradient_predivide_factor": 1.0}
_IGNORED = "does not know this key, and ignores it"


class UnknownDeepspeedSection(ConfigRule):
    """A section, or a key about precision, that DeepSpeed does not have.

    ## Why is this bad
    DeepSpeed 0.19.8 ignores unknown keys at the top level, in `torch_autocast` and in `data_types` without a warning:
    `"fp8": {"enabled": true}` and `"bfloat_16": {"enabled": true}` are FP32 runs, `"zero_optimisation"` enables no
    ZeRO. `bfloat16`, the old name of `bf16`, is ignored if `bf16` is present too. In `bf16`, `fp16` and
    `zero_optimization` an unknown key stops the run; a DeepSpeed older than 0.17.1, if the project requires one,
    ignores it in `bf16` and `fp16`.

    ## Fix safety
    Safe: the key is renamed to the known key, if it is clear which one is intended and it is not already present.

    ## Known limits
    The keys are those of DeepSpeed 0.19.8. A file in which most keys are not DeepSpeed's is read by another program
    (GPT-NeoX, a training script), and so is a dict that is set on another library's config (`config.ds_config =
    {...}`); neither is reported, nor is a key that code of the project reads itself (`ds_config["precision"]`). Unknown
    keys are reported only if they are about precision or offloading, or similar to a known key; names that begin with
    `_`, `/` or `#` are comments. A misspelled key whose value is the default is not reported. Apex's `opt_level` is not
    reported where DeepSpeed ignores it. The keys of other sections are not checked. DeepSpeed has no FP8 of its own:
    FP8 modules (Transformer Engine, torchao) run inside its BF16 engine.
    """

    code, name = "MPG823", "unknown-deepspeed-section"
    severity = "error"
    message = "`{key}`: DeepSpeed {what}{hint}"
    help = f"the keys are those of DeepSpeed {schemas.deepspeed.VERSION}"
    kinds = ("deepspeed",)
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "bfloat_16": {"enabled": true},  # !
  "zero_optimisation": {"stage": 2},  # !
  "torch_autocast": {"enabled": true, "dtypes": "bfloat16"},  # !
  "data_types": {"grad_accum_type": "fp32"}  # !
}
""",
            name="ds_config.json",
            fixed="""\
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2},
  "torch_autocast": {"enabled": true, "dtype": "bfloat16"},
  "data_types": {"grad_accum_dtype": "fp32"}
}
""",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if _of_another_program(document):
            return
        for entry in document.entries():
            if len(entry.path) == 1:
                yield from self._top(document, entry)
            elif len(entry.path) == 2 and entry.path[0] in schemas.deepspeed.SECTIONS:
                yield from self._inner(document, entry, entry.path[0])

    def _top(self, document: Document, entry: Entry) -> Iterator[Diagnostic]:
        key = entry.key
        if key == "bfloat16" and "bf16" in document.data:
            yield self.at(entry, key=key, what="ignores this old name if `bf16` is present too", hint="")
        if key in schemas.deepspeed.KEYS or not key[:1].isalpha() or "comment" in key.lower():
            return
        meant = _meant(key)
        is_misplaced = isinstance(entry.value, dict) and _MISPLACED.search(key.lower())
        if meant is not None and entry.value == _DEFAULTS.get(meant, False):
            return  # it is in force anyway
        if meant is None and not is_misplaced and not _PRECISION.search(key.lower()):
            return
        if meant is None and self.project.reads_deepspeed_key(document.path, key):
            return
        hint = " It has no FP8 of its own" if key.lower().startswith("fp8") else ""
        if key.lower() in ("gradient_accumulation_dtype", "grad_accum_dtype"):
            hint = "; it reads `grad_accum_dtype` in the section `data_types`"
        if meant is not None:
            hint = f"; it reads `{meant}`"
        yield self.at(entry, fix=_fix(document, entry, meant), key=key, what=_IGNORED, hint=hint)

    def _inner(self, document: Document, entry: Entry, section: str) -> Iterator[Diagnostic]:
        known, key = schemas.deepspeed.SECTIONS[section], entry.key
        if key in known or not key[:1].isalpha() or (key in schemas.deepspeed.FP16 and section in ("bf16", "bfloat16")):
            return
        if section in schemas.deepspeed.STRICT and entry.value == "auto":
            return
        meant = misspelling_of(key.lower(), known, cutoff=0.88)
        hint = f"; it reads `{meant}`" if meant else ""
        strict = section in schemas.deepspeed.STRICT
        if strict and self.project.required(document.path, "deepspeed").before(_STRICT_SINCE):
            if section == "zero_optimization":
                return  # whose keys have changed with the versions
            strict = False
        if not strict and key in _APEX:
            return
        what = "stops: the section has no such key" if strict else _IGNORED
        if (why := may_be_new("key", "deepspeed")) is not None:
            fix = _fix(document, entry, meant)
            yield self.at(entry, fix=fix, message=f"`{section}.{key}`: {why}", severity="warning")
            return
        yield self.at(entry, fix=_fix(document, entry, meant), key=f"{section}.{key}", what=what, hint=hint)


def _of_another_program(document: Document) -> bool:
    """True if another program reads the config too, and the keys that are not DeepSpeed's.

    It is set on another library's config, or most of its keys are not DeepSpeed's.
    """
    keys = {str(key) for key in document.data}
    known = [key for key in keys if key in schemas.deepspeed.KEYS or _meant(key) is not None]
    return bool(document.attribute) or len(keys) > 2 * len(known)


def _meant(key: str) -> str | None:
    """Return the key of DeepSpeed that an unknown one is a misspelling of, or None."""
    known = schemas.deepspeed.RENAMED.get(key.lower())
    likely = known or misspelling_of(key.lower(), schemas.deepspeed.KEYS, cutoff=0.88)
    # `gradient_accumulation_dtype` is no misspelling of `gradient_accumulation_steps`.
    return None if likely is not None and ("dtype" in key.lower()) != ("dtype" in likely) else likely


def _fix(document: Document, entry: Entry, meant: str | None) -> Fix | None:
    holder = document.data if len(entry.path) == 1 else document.data[entry.path[0]]
    if meant is None or meant in holder:
        return None
    return config_edits.rename_key(f"Rename it to `{meant}`", document, entry, meant)
