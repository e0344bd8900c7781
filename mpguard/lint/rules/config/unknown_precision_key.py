from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, dialects, misspelling_of


class UnknownPrecisionKey(ConfigRule, form_of="MPG813"):
    """A key about precision that axolotl, LLaMA-Factory, Megatron Bridge or NeMo 1.x does not have: `fp8_recpie`.

    Most of these programs ignore keys that they do not have, so that a misspelt one changes nothing. Where a newer
    version has the key, mpguard cannot tell what it does: `mpguard apply` does not say that such a file matches. The
    schemas are of the versions that the message names.
    """

    severity = "warning"
    message = "`{key}`: {program} has no such key{hint}"
    help = "correct the name, or remove it; with a newer version of the program its documentation says what it does"
    kinds = tuple(dialects.DIALECTS)
    triggers = ()

    def check(self, document: Document) -> Iterator[Diagnostic]:
        dialect = dialects.DIALECTS[str(document.kind)]
        for entry in dialect.unknown(document):
            if document.kind == "axolotl" and entry.path[0] in dialect.strict and len(entry.path) == 2:
                continue  # axolotl stops there: MPG849
            meant = misspelling_of(entry.key, dialect.keys, cutoff=0.75)
            yield self.at(
                entry,
                key=".".join(entry.path),
                program=f"{dialect.title} {dialect.version}",
                hint=f"; did you mean `{meant}`?" if meant else "",
            )
