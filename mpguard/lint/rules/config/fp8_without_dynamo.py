from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    ConfigRule,
    Diagnostic,
    Document,
    Note,
    accelerate_config,
    any_of,
    config_edits,
    siblings,
    targets,
)

#: Code that compiles, or that has an option to do so.
_COMPILES = r"\bcompile\(|torch_compile|dynamo_backend|dynamo_plugin|TorchDynamoPlugin|HfArgumentParser"


class Fp8WithoutDynamo(ConfigRule, form_of="MPG401"):
    """FP8 with torchao in an accelerate config without a dynamo backend.

    torchao's casts and scales are many small kernels, which only a compiler fuses. Without it FP8 is slower than BF16:
    on an H200 0.55 times the speed of plain BF16 (benchmarks/results).

    Not reported if related Python code compiles or takes transformers' `TrainingArguments` from the command line.
    Related is code in the config's folder, in its parent folder, and in the folder of a script that a launch line of
    the tree starts with the config. Not reported either if such a line has `--dynamo_backend`, or if the file names an
    mpguard recipe. Backend `TE` needs no compile. Under `DEEPSPEED` the file's dynamo settings have no effect:
    accelerate 1.15.0 passes them to no worker there.
    """

    message = "FP8 with torchao, but nothing compiles the model: slower than BF16"
    help = "set `dynamo_config: {dynamo_backend: INDUCTOR}`, or compile the model in the code"
    kinds = ("accelerate",)
    triggers = (any_of(b"fp8_config"), any_of(b"AO", b"ao"))
    fixes = True

    def check(self, document: Document) -> Iterator[Diagnostic]:
        backend = accelerate_config.setting(document, "fp8_config", "backend")
        if backend is None or not accelerate_config.is_fp8(document, "AO") or accelerate_config.names_recipe(document):
            return
        dynamo = document.entry("dynamo_backend") or accelerate_config.setting(document, "dynamo_config", "backend")
        launches = self.project.launched_with(document.path)
        if siblings.mentions(document.path, _COMPILES, launches):
            return
        if accelerate_config.distributed_type(document) == "DEEPSPEED":  # the workers get no dynamo setting
            yield self.at(backend, help="compile the model in the code: under DEEPSPEED `dynamo_config` has no effect")
            return
        if dynamo is not None and str(dynamo.value).lower() not in ("no", "false", "none"):
            return
        if siblings.flagged("dynamo_backend", launches):
            return
        wanted = {"dynamo_config.dynamo_backend": "INDUCTOR"}
        if dynamo is not None:
            wanted = {".".join(dynamo.path): "INDUCTOR"}
        elif document.data.get("dynamo_config", targets.ABSENT) is None:
            wanted = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}  # type: ignore[dict-item]
        notes = (Note("nothing is compiled", dynamo.key_span),) if dynamo is not None else ()
        yield self.at(
            backend, notes=notes, fix=config_edits.set_values("Compile with INDUCTOR", document, wanted, "unsafe")
        )
