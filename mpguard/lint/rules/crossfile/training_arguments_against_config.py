from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Constant,
    Diagnostic,
    Event,
    Facts,
    Good,
    LaunchConfig,
    Rule,
    any_of,
    launch_expectations,
    library_names,
)

#: The version of TRL since which `bf16` is on unless `fp16` is.
_SINCE = (0, 20)
_MODES = {"fp16", "bf16", "fp8"}


class TrainingArgumentsAgainstConfig(Rule):
    """`TrainingArguments(bf16=True)` or `fp16=True` under a launch config with another precision.

    ## What it does
    Compares the precision of `TrainingArguments`, and of the classes that derive from it (`SFTConfig`, `DPOConfig`,
    `Seq2SeqTrainingArguments`, ...), with the DeepSpeed file or dict that they get (`deepspeed="ds.json"`), else with
    the launch configs of the script. TRL's settings are BF16 unless `fp16` or `bf16` is given.

    ## Why is this bad
    The Trainer uses the launcher's `mixed_precision` only if neither `fp16` nor `bf16` is set; otherwise it silently
    overrides it. Under a config with `fp8`, `bf16=True` disables FP8: the run is slower than expected, and the loss
    looks normal (transformers 5.23, training_args.py, observed; transformers#34027). With a DeepSpeed file that has
    another precision the run stops ("Please correct the following DeepSpeed config values that mismatch
    TrainingArguments values"). TRL sets `bf16` if neither is given (trl 1.16, base_config.py).

    ## Known limits
    Only arguments that are known to be True are compared; the values of a command line or a YAML file are unknown. With
    several configs all of them must differ. Under a config with `no` the arguments are assumed to be intended.
    """

    code, name = "MPG863", "training-arguments-against-config"
    severity = "error"
    message = "`{option}=True` overrides the launch config, which has {wanted}{off}"
    _by_default = (
        "without `fp16` or `bf16` TRL sets `bf16=True` and overrides the launch config, which has {wanted}{off}"
    )
    help = "remove the argument, so that the config decides, or change the config"
    triggers = (any_of(b"TrainingArguments", b"from trl", b"import trl"), any_of(b"fp16", b"bf16", b"trl"))
    examples = (
        Bad(
            """\
from transformers import Trainer, TrainingArguments

args = TrainingArguments("out", learning_rate=1e-5, bf16=True)  # !
Trainer(model, args, train_dataset=data).train()
""",
            files={"mp.yaml": "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: AO\n"},
        ),
        Good(
            """\
from trl import SFTConfig

def ds_config(fp16):
    config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    config["fp16"]["enabled"] = fp16
    return config

off = SFTConfig(output_dir="out", deepspeed=ds_config(False))
""",
            files={"requirements.txt": "trl==0.24\n"},
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        launched = launch_expectations.configs(facts)
        for arguments in facts.events("arguments"):
            config = self._deepspeed(arguments, facts)
            configs = launched if config is None else (config,)
            option = self._option(arguments, facts)
            if (
                not configs
                or option is None
                or any(config.mixed_precision not in _MODES - {option} for config in configs)
                or not launch_expectations.is_unconditional(arguments.guard, arguments.call)
            ):
                continue
            off = ": FP8 is off" if any(config.mixed_precision == "fp8" for config in configs) else ""
            given = arguments.call.keywords.get(option)
            yield self.at(
                facts.span(given, arguments.call) if given is not None else arguments,
                message=None if given is not None else self._by_default,
                option=option,
                wanted=launch_expectations.wanted(configs),
                off=off,
                help=None if given is not None else f"pass `bf16=False`{self._fp16(configs)}, or change the config",
                notes=launch_expectations.places(configs),
            )

    def _fp16(self, configs: launch_expectations.Configs) -> str:
        return " and `fp16=True`" if any(config.mixed_precision == "fp16" for config in configs) else ""

    def _option(self, arguments: Event, facts: Facts) -> str | None:
        """Return the option that is definitely on: the only one that is True, or `bf16` by TRL's default."""
        call = arguments.call
        given = [option for option in ("fp16", "bf16") if option in call.keywords]
        if not given and call.name in library_names.TRL_CONFIGS and not call.starred:
            old = facts.required("trl").before(_SINCE)
            return None if old or not facts.called_path(call).startswith("trl.") else "bf16"
        options = [option for option in given if self._is_true(arguments, option, facts)]
        return options[0] if len(options) == 1 else None

    def _deepspeed(self, arguments: Event, facts: Facts) -> LaunchConfig | None:
        """Return the DeepSpeed config that the arguments name, or are given as a dict; None if it is not known."""
        given = arguments.call.keywords.get("deepspeed")
        if given is None:
            return None
        atoms = [each.atom for each in facts.evaluate(given, arguments.call)]
        if len(atoms) == 1 and isinstance(atoms[0], Constant) and isinstance(atoms[0].value, str):
            return launch_expectations.deepspeed_config(facts, atoms[0].value)
        return launch_expectations.deepspeed_dict(arguments.call, facts)

    def _is_true(self, arguments: Event, option: str, facts: Facts) -> bool:
        values = facts.constants(arguments.call.keywords.get(option), arguments.call)
        return bool(values) and all(value is True for value in values)
