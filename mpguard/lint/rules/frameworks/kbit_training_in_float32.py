from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import HALF_DTYPES, Bad, Call, Diagnostic, Dtype, Facts, Good, Note, Rule, any_of, constant

_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
#: Arguments that set the precision, or hand it to a config.
_SETS_PRECISION = frozenset({"bf16", "fp16", "deepspeed", "fsdp", "fsdp_config", "accelerator_config", "use_cpu"})


class KbitTrainingInFloat32(Rule):
    """4-bit layers compute in BF16 or FP16, and the Trainer leaves everything else in FP32.

    ## What it does
    Reports `TrainingArguments` without `bf16=` and `fp16=` in a file that calls `prepare_model_for_kbit_training`, and
    has a `BitsAndBytesConfig` with a 4-bit compute dtype of BF16 or FP16.

    ## Why is this bad
    `prepare_model_for_kbit_training` makes all parameters FP32 that are not quantized (peft 0.21), and without one of
    the flags no autocast runs. Each 4-bit layer casts its input to the compute dtype and its output back: attention,
    norms, the head and all activations are FP32, which takes twice the memory. FlashAttention takes no FP32 ("only
    supports fp16 and bf16 data type"); transformers casts for its own models, others stop.

    ## Known limits
    Not reported: TRL's configs, which turn on BF16 by themselves; files with a cast to a low dtype or with an autocast;
    programs that `accelerate launch` starts, which may set the precision.
    """

    code, name = "MPG872", "kbit-training-in-float32"
    severity = "warning"
    message = "without `bf16=` and `fp16=` everything but the 4-bit layers computes in FP32; these compute in {dtype}"
    help = "pass `{flag}=True`"
    triggers = (
        any_of(b"prepare_model_for_kbit_training"),
        any_of(b"bnb_4bit_compute_dtype"),
        any_of(b"TrainingArguments("),
    )
    examples = (
        Bad(
            """\
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", quantization_config=quantization)
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8))
args = TrainingArguments("out", learning_rate=2e-4)  # !
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
"""
        ),
        Good(
            """\
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", quantization_config=quantization)
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8))
args = TrainingArguments("out", learning_rate=2e-4, bf16=True)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        configs = [call for call in facts.calls.get("BitsAndBytesConfig", ()) if self._low(call, facts)]
        if not configs or not facts.calls.get("prepare_model_for_kbit_training") or not self._is_plain(facts):
            return
        low = self._low(configs[0], facts)
        made = [call for name in _ARGUMENTS for call in facts.calls.get(name, ()) if not facts.is_inference(call)]
        if low is None or not all(self._leaves_out(call, facts) for call in made):
            return
        for call in made:
            note = Note("the compute dtype of the 4-bit layers", configs[0].span)
            yield self.at(call, dtype=low.label, notes=(note,), help=self.help.format(flag=low.label.lower()))

    def _low(self, call: Call, facts: Facts) -> Dtype | None:
        """Return the compute dtype of a 4-bit config, if it is BF16 or FP16."""
        given = call.keywords.get("bnb_4bit_compute_dtype")
        if given is None or constant(call.keywords.get("load_in_4bit")) != (True,):
            return None
        dtypes = {dtype for _, dtype in facts.dtypes(given, call, strings=True)}
        return next((dtype for dtype in HALF_DTYPES if dtypes == {dtype}), None)

    def _leaves_out(self, call: Call, facts: Facts) -> bool:
        """True if arguments of transformers' Trainer set no precision."""
        return (
            facts.called_path(call).startswith("transformers.")
            and not call.starred
            and not any(name in _SETS_PRECISION or name.startswith("half_precision") for name in call.keywords)
        )

    def _is_plain(self, facts: Facts) -> bool:
        """True if nothing else sets a precision: no autocast, low cast or later assignment, and no `accelerate`."""
        if facts.events("autocast") or any(
            each.may_be(dtype) for each in facts.events("cast") for dtype in HALF_DTYPES
        ):
            return False
        keys = {key.rpartition(".")[2] for scope in facts.scopes for key in scope.bindings if "." in key}
        launches = facts.project.launches_of(facts.path)
        return not keys & {"bf16", "fp16"} and not (
            facts.project.configs_for(facts.path)
            or any(launch.hidden or launch.launcher == "accelerate" for launch in launches)
        )
