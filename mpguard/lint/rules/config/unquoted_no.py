from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Edit, Entry, Fix, accelerate_config, any_of

#: Key -> the option of `accelerate launch` that takes its place.
_KEYS = {
    "mixed_precision": "mixed_precision",
    "deepspeed_config.mixed_precision": "mixed_precision",
    "dynamo_backend": "dynamo_backend",
    "dynamo_config.dynamo_backend": "dynamo_backend",
    "dynamo_config.backend": "dynamo_backend",
}


class UnquotedNo(ConfigRule):
    """Unquoted `mixed_precision: no`, `dynamo_backend: no` or `distributed_type: NO`, which YAML reads as a boolean.

    ## Why is this bad
    YAML 1.1, which accelerate reads, treats `no`, `off`, `yes` and `on` in any case as booleans. With accelerate 1.15.0
    `mixed_precision: no` raises `AttributeError: 'bool' object has no attribute 'lower'` at launch, and
    `dynamo_backend: no` the same error about `upper` (accelerate PR#1386 fixed the first for a while); only the options
    `--mixed_precision` and `--dynamo_backend` take their place.
    `distributed_type: NO` stops the launch if neither the file nor `--num_processes` gives a number of processes; with
    one, accelerate runs what it runs for `'NO'`, and nothing is reported.

    ## Fix safety
    Safe: the value is put in quotes.

    ## Known limits
    `yes`, `on` and `true` are reported too, but have no fix: the intention is not clear. Under `DEEPSPEED` dynamo's
    keys have no effect: accelerate passes them to no worker. A key is not reported if the project has launch lines with
    this config, and all of them pass the option.
    """

    code, name = "MPG802", "unquoted-no"
    severity = "error"
    message = "`{key}: {written}` is the boolean {value} in YAML; {what}"
    help = "put it in quotes"
    kinds = ("accelerate",)
    triggers = (any_of(b"mixed_precision", b"distributed_type", b"dynamo_backend", b"dynamo_config"),)
    examples = (
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: no  # !
num_processes: 8
""",
            name="mp.yaml",
            fixed="""\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'no'
num_processes: 8
""",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        deepspeed = accelerate_config.distributed_type(document) == "DEEPSPEED"  # the workers get no dynamo setting
        for key, option in _KEYS.items():
            entry = document.entry(key)
            if entry is None or not isinstance(entry.value, bool) or (deepspeed and "dynamo" in key):
                continue
            if not self._is_passed(option, document):
                yield self._at(
                    document, entry, f"without `--{option}` `accelerate launch` stops with an AttributeError"
                )
        distributed = document.entry("distributed_type")
        if distributed is not None and distributed.value is True:
            yield self._at(document, distributed, "accelerate runs one process, as for `'NO'`", "warning")
        elif distributed is not None and distributed.value is False and not self._has_processes(document):
            yield self._at(document, distributed, "without `num_processes` the launch stops")

    def _has_processes(self, document: Document) -> bool:
        return "num_processes" in document.data or self._is_passed("num_processes", document)

    def _is_passed(self, option: str, document: Document) -> bool:
        """True if the project has launch lines with this config, and all of them pass an option."""
        launches = self.project.launched_with(document.path)
        return bool(launches) and all(option in launch.options for _, launch in launches)

    def _at(
        self, document: Document, entry: Entry, what: str, severity: Literal["error", "warning"] = "error"
    ) -> Diagnostic:
        start, end = entry.value_span
        written = document.text[start:end]
        fix = None
        if entry.value is False and document.format == "yaml" and written.lower() in ("no", "off", "false"):
            word = "NO" if written.isupper() or entry.key == "distributed_type" else "no"
            fix = Fix(f"Write `'{word}'`", "safe", (Edit(start, end, f"'{word}'"),))
        value = str(entry.value).lower()
        return self.at(
            entry, fix=fix, severity=severity, key=".".join(entry.path), written=written, value=value, what=what
        )
