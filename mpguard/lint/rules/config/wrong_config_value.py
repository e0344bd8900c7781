from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, accelerate_config, any_of, validation


class WrongConfigValue(ConfigRule, form_of="MPG813"):
    """A value of an accelerate config with which nothing can be launched.

    accelerate fails after it has imported torch, with an error that names a temporary copy of the file or none.

    Values that a template fills in (`${GPUS}`) are unknown, and not reported.
    """

    message = "`{key}`: {reason}"
    help = "write a value that accelerate can launch with; `accelerate config` lists them"
    kinds = ("accelerate",)
    triggers = (any_of(b"distributed_type"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if document.data.get("compute_environment") == "AMAZON_SAGEMAKER" or "distributed_type" not in document.data:
            return
        for problem in validation.accelerate_values(document):
            entry = document.entry(problem.key)
            replaced = problem.flag == "mixed_precision" and accelerate_config.names_recipe(document)
            if entry is not None and not replaced:
                yield self.at(entry, key=problem.key, reason=problem.reason)
