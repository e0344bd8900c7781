from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Constant, Diagnostic, Event, Facts, Good, Rule, any_of, launch_expectations


class TrainingArgumentsAgainstConfig(Rule):
    """`TrainingArguments(bf16=True)` or `fp16=True` under a launch config with another precision.

    ## What it does
    Compares the precision of `TrainingArguments`, and of the classes that derive from it (`SFTConfig`, `DPOConfig`,
    `Seq2SeqTrainingArguments`, ...), with the launch configs of the script.

    ## Why is this bad
    The Trainer uses the launcher's `mixed_precision` only if neither `fp16` nor `bf16` is set; otherwise it silently
    overrides it. Under a config with `fp8`, `bf16=True` disables FP8: the run is slower than expected, and the loss
    looks normal (transformers 5.23, training_args.py, observed; transformers#34027). With a DeepSpeed file that has
    another precision the run stops.

    ## Known limits
    Only arguments that are known to be True are compared; the values of a command line or a YAML file are unknown. With
    several configs all of them must differ. Under a config with `no` the arguments are assumed to be intended.
    """

    code, name = "MPG863", "training-arguments-against-config"
    severity = "error"
    message = "`{option}=True` overrides the launch config, which has {wanted}{off}"
    help = "remove the argument, so that the config decides, or change the config"
    triggers = (any_of(b"TrainingArguments", b"from trl", b"import trl"), any_of(b"fp16", b"bf16"))
    needs_config = True
    examples = (
        Bad(
            """\
from transformers import Trainer, TrainingArguments

args = TrainingArguments("out", learning_rate=1e-5, bf16=True)  # !
Trainer(model, args, train_dataset=data).train()
""",
            files={"mp.yaml": "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: AO\n"},
        ),
        Bad(
            """\
from trl import SFTConfig, SFTTrainer

HALF = True
config = SFTConfig(output_dir="out", fp16=HALF)  # !
SFTTrainer("gpt2", args=config, train_dataset=data).train()
""",
            files={"ds.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
                   "run.sh": "deepspeed --num_gpus 8 example.py --deepspeed ds.json\n"},
        ),
        Good(
            """\
from transformers import Trainer, TrainingArguments

def main(cli):
    same = TrainingArguments("out", bf16=True)
    other = TrainingArguments("out", fp16=cli.fp16)
    third = TrainingArguments("out", fp16=False)
    Trainer(model, same, train_dataset=data).train()
""",
            files={"mp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\n"},
        ),
        Good(
            """\
from transformers import TrainingArguments

args = TrainingArguments("out", bf16=True)
""",
            files={"no.yaml": "distributed_type: FSDP\nmixed_precision: 'no'\n"},
        ),
        Good(
            """\
from transformers import TrainingArguments

args = TrainingArguments("out", bf16=True)
""",
            files={"a.yaml": "distributed_type: FSDP\nmixed_precision: fp8\n",
                   "b.yaml": "distributed_type: FSDP\nmixed_precision: bf16\n"},
        ),
    )  # fmt: skip

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        configs = launch_expectations.configs(facts)
        if not configs or any(config.mixed_precision not in ("fp16", "bf16", "fp8") for config in configs):
            return
        for arguments in facts.events("arguments"):
            options = [option for option in ("fp16", "bf16") if self._is_true(arguments, option, facts)]
            if (
                len(options) != 1
                or not launch_expectations.is_unconditional(arguments.guard, arguments.call)
                or any(config.mixed_precision == options[0] for config in configs)
            ):
                continue
            off = ": FP8 is off" if any(config.mixed_precision == "fp8" for config in configs) else ""
            yield self.at(
                facts.span(arguments.call.keywords[options[0]], arguments.call),
                option=options[0],
                wanted=launch_expectations.wanted(configs),
                off=off,
                notes=launch_expectations.places(configs),
            )

    def _is_true(self, arguments: Event, option: str, facts: Facts) -> bool:
        given = arguments.call.keywords.get(option)
        values = facts.evaluate(given, arguments.call) if given is not None else ()
        return bool(values) and all(isinstance(each.atom, Constant) and each.atom.value is True for each in values)
