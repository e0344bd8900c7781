from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Good, dialects, misspelling_of


class UnknownPrecisionKey(ConfigRule):
    """A key of a training program's config that speaks of precision, and that mpguard does not know.

    ## What it does
    Reports keys such as `fp8_recpie` or `bf61` in configs of axolotl, LLaMA-Factory, Megatron Bridge and NeMo 1.x that
    the schema of that program does not have.

    ## Why is this bad
    Most of these programs ignore keys that they do not have, so that a misspelt one changes nothing. Where a newer
    version has the key, mpguard cannot tell what it does: `mpguard apply` does not say that such a file matches.

    ## Known limits
    The schemas are of the versions that the message names.
    """

    code, name = "MPG848", "unknown-precision-key"
    severity = "warning"
    message = "`{key}`: {program} has no such key{hint}"
    help = "correct the name, or remove it; with a newer version of the program its documentation says what it does"
    kinds = tuple(dialects.DIALECTS)
    triggers = ()
    examples = (
        Bad(
            """\
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: full
bf16: true
fp8: true
fp8_backand: torchao  # !
""",
            name="sft.yaml",
        ),
        Good(
            """\
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: full
bf16: true
fp8: true
fp8_backend: torchao
""",
            name="sft.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        dialect = dialects.DIALECTS[str(document.kind)]
        for entry in dialect.unknown(document):
            if document.kind == "axolotl" and len(entry.path) == 2:
                continue  # axolotl stops there: MPG849
            meant = misspelling_of(entry.key, dialect.keys, cutoff=0.75)
            yield self.at(
                entry,
                key=".".join(entry.path),
                program=f"{dialect.title} {dialect.version}",
                hint=f"; did you mean `{meant}`?" if meant else "",
            )
