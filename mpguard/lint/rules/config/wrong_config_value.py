from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, accelerate_config, any_of, validation


class WrongConfigValue(ConfigRule, form_of="MPG813"):
    """A value of an accelerate config with which nothing can be launched.

    accelerate fails after it has imported torch, with an error that names a temporary copy of the file or none.

    - `override_linear_precision: false`, which older versions of `accelerate config` wrote: a list of three is needed,
      and the launch stops with `TypeError: 'bool' object is not subscriptable` (accelerate#3489).
      `(false, false, false)`, which accelerate's documentation recommends, is text in YAML, and stops the workers.
    - `gpu_ids: 0` is a number, and accelerate splits text; with one id `MULTI_GPU` stops.
    - `fsdp_reshard_after_forward: FULL_SHARD` under FSDP2, which takes a boolean there.
    - Sizes of `parallelism_config` whose product is not `num_processes`.

    A warning is what `deepspeed_config` offloads at a ZeRO stage that ignores it, as `offload_param_device: cpu` below
    stage 3.

    A value that is not in accelerate's list is a warning where a newer accelerate is installed.
    Values that a template fills in (`${GPUS}`) are unknown, and not reported.
    """

    message = "`{key}`: {reason}"
    help = "write a value that accelerate can launch with; `accelerate config` lists them"
    kinds = ("accelerate",)
    triggers = (any_of(b"distributed_type"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if document.data.get("compute_environment") == "AMAZON_SAGEMAKER" or "distributed_type" not in document.data:
            return
        for problem in validation.accelerate_wrong_values(document):
            entry = document.entry(problem.key)
            replaced = problem.flag == "mixed_precision" and accelerate_config.names_recipe(document)
            if entry is not None and not replaced and not problem.unless:
                yield self.at(entry, severity=problem.severity, key=problem.key, reason=problem.reason)
        for problem in validation.without_effect(document):
            if (entry := document.entry(problem.key)) is not None:
                yield self.at(entry, severity="warning", key=problem.key, reason=problem.reason)
