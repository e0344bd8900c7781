from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Good, any_of, config_edits, targets


class RemovedAmpSection(ConfigRule):
    """A DeepSpeed config with an `amp` section.

    ## Why is this bad
    DeepSpeed has removed Apex AMP. Version 0.19.8 stops if the section is present, even if it is not enabled:
    `DeepSpeedConfigError: NVIDIA Apex AMP integration has been removed`.

    ## Known limits
    Not reported if the project requires a DeepSpeed older than 0.19.6: those up to 0.19.5 have it.

    ## Fix safety
    Safe, and only available if the section is not enabled: it is removed.
    """

    code, name = "MPG826", "removed-amp-section"
    severity = "error"
    fixes = True
    message = "`amp`: DeepSpeed has removed Apex AMP, and stops if the section is present"
    help = "use `bf16`, `fp16` or `torch_autocast`"
    versions = {"deepspeed": ">=0.19.6"}
    kinds = ("deepspeed",)
    triggers = (any_of(b"amp"),)
    examples = (
        Bad(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "amp": {"enabled": true, "opt_level": "O1"}  # !
}
""",
            name="ds_config.json",
        ),
        Good(
            """\
{
  "train_micro_batch_size_per_gpu": 1,
  "amp": {"enabled": false, "opt_level": "O1"}
}
""",
            name="ds_config.json",
            files={"requirements.txt": "torch\ndeepspeed==0.18.2\n", "pyproject.toml": ""},
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        amp = document.entry("amp")
        if amp is None:
            return
        off = isinstance(amp.value, dict) and amp.value.get("enabled", False) is False
        yield self.at(amp, fix=config_edits.set_values("Remove it", document, {"amp": targets.ABSENT}) if off else None)
