from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Constant,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Good,
    Note,
    Record,
    Rule,
    any_of,
    constant,
    dotted,
    launch_expectations,
    library_names,
    option_values,
)

#: Classes whose `from_pretrained` gives a model with a loss: encoders alone are mostly frozen.
_WITH_LOSS = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForSeq2SeqLM",
    "Seq2SeqLM",
    "ForSequenceClassification",
    "LMHead",
)
#: `precision=` of Lightning that is FP16.
_FP16 = frozenset({16, "16", "16-mixed", "16-true"})
#: The flag of `if __name__ == "__main__":`, which is no choice of the user.
_SCRIPT = {"__name__"}


class Bf16ModelInFp16(Rule):
    """A checkpoint whose activations overflow in FP16 is trained in FP16.

    ## What it does
    Reports `from_pretrained` of T5 v1.1, mT5, ByT5, Flan-T5, UL2, T0, of T5 from `t5-large` on, and of Gemma 3, in a
    program that trains in FP16: `TrainingArguments(fp16=True)`, Lightning's `precision="16-mixed"`,
    `Accelerator(mixed_precision="fp16")`, FP16 autocast. The name may be the default of an option or of a parameter.

    ## Why is this bad
    They were pretrained in BF16, which has the range of FP32. Activations of the feed-forward layers exceed 65504, the
    largest FP16 number: the loss is NaN or 0, or the GradScaler skips all steps (transformers issues 9295, 10830,
    11461, 23918; for Gemma 3 36822 and 39972). transformers clamps them only in T5, and there only if the hidden states
    are FP16, which they are not under autocast over FP32 weights (modeling_t5.py, transformers 5.23).

    ## Known limits
    The FP16 must be unconditional, and visible in the same file or in those that use the class or function with the
    load. Names from a command line are checked by MPG519.
    """

    code, name = "MPG519", "bf16-model-in-fp16"
    severity = "warning"
    message = "the activations of `{name}` overflow in FP16, in which this program trains it"
    help = 'train it in BF16 (`bf16=True`, `precision="bf16-mixed"`), or in FP32 on a GPU without BF16'
    triggers = (any_of(b"t5-", b"T0", b"mt0-", b"ul2", b"gemma-3"), any_of(b"from_pretrained("))
    triggers_nearby = (any_of(b"16"), any_of(b"Trainer(", b".backward("))
    examples = (
        Bad(
            """\
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

CHECKPOINT = "google/mt5-small"
model = AutoModelForSeq2SeqLM.from_pretrained(CHECKPOINT)  # !
args = Seq2SeqTrainingArguments("out", learning_rate=2e-5, fp16=True)
Seq2SeqTrainer(model, args, train_dataset=data).train()
"""
        ),
        Good(
            """\
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments

def bf16(data):
    model = AutoModelForSeq2SeqLM.from_pretrained("google/flan-t5-xl")
    Seq2SeqTrainer(model, Seq2SeqTrainingArguments("out", bf16=True), train_dataset=data).train()

def chosen(data, half):
    model = AutoModelForSeq2SeqLM.from_pretrained("google/mt5-base")
    args = Seq2SeqTrainingArguments("out", fp16=half and not torch.cuda.is_bf16_supported())
    Seq2SeqTrainer(model, args, train_dataset=data).train()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        loads = [(call, name) for call in facts.calls.get("from_pretrained", ()) if (name := self._name(call, facts))]
        for call, name in loads:
            half = None if facts.is_inference(call) or _gives_config(call, facts) else self._trained_with(call, facts)
            if half is not None:
                notes = (Note("FP16 here", half.span, facts.elsewhere(half)),)
                yield self.at(call, name=name, notes=notes)

    def _name(self, call: Call, facts: Facts) -> str | None:
        """Return the name of the checkpoint that a call loads, if it is one of those in every case."""
        given = call.argument(0, "pretrained_model_name_or_path")
        if given is None or not dotted(call.receiver).endswith(_WITH_LOSS):
            return None
        values = [each.atom.value if isinstance(each.atom, Constant) else None for each in facts.evaluate(given, call)]
        if not all(isinstance(each, str) for each in values) and (option := dotted(given).rpartition(".")[2]):
            defaults = (self._parameter(given, call), *self._defaults(option, facts))
            values = [each for each in defaults if isinstance(each, str)]
        names = [each for each in values if isinstance(each, str) and library_names.OVERFLOWS_FP16.fullmatch(each)]
        return names[0] if names and len(names) == len(values) else None

    def _parameter(self, given: cst.BaseExpression, call: Call) -> object:
        """Return the default of the parameter that an argument is, None if it is none."""
        if not isinstance(given, cst.Name):
            return None
        found = [param.default for param in call.scope.params if param.name == given.value]
        default = constant(found[0]) if found else None
        return default[0] if default is not None else None

    def _trained_with(self, call: Call, facts: Facts) -> Record | None:
        """Return what makes the training FP16: in the file, or else in those that use what loads the model."""
        here = self._precisions(facts)
        if here:
            return self._only_fp16(here)
        outer = [scope for scope in call.scope.within() if scope.kind != "module"]
        users = facts.users(outer[-1].name) if outer else None
        for user in users or ():
            user.need_all()
        return self._only_fp16([each for user in users or () for each in self._precisions(user)])

    def _defaults(self, option: str, facts: Facts) -> Iterator[object]:
        """Yield the defaults of the command-line options of a name."""
        for call in facts.calls.get("add_argument", ()):
            if option in option_values.option_names(call):
                default = constant(call.keywords.get("default"))
                yield default[0] if default is not None else None

    def _precisions(self, facts: Facts) -> list[tuple[Call, bool]]:
        """Return what sets a precision in a file, with True where it is FP16."""
        found = [
            *((event.call, self._is_true(event, "fp16", facts)) for event in facts.events("arguments")),
            *((event.call, self._mode(event.call, "precision")) for event in facts.events("trainer")),
            *((event.call, self._mode(event.call, "mixed_precision")) for event in facts.events("accelerator")),
            *((event.call, self._autocast(event)) for event in facts.events("autocast")),
        ]
        return [(call, half) for call, half in found if half is not None]

    def _only_fp16(self, known: list[tuple[Call, bool]]) -> Record | None:
        """Return the first of the precisions, if all are FP16."""
        return (
            known[0][0] if known and all(half for _, half in known) and known[0][0].guard.flags() <= _SCRIPT else None
        )

    def _is_true(self, arguments: Event, option: str, facts: Facts) -> bool:
        values = facts.constants(arguments.call.keywords.get(option), arguments.call)
        return bool(values) and all(value is True for value in values)

    def _mode(self, call: Call, keyword: str) -> bool | None:
        """Return True if an argument is FP16, None without the argument, False for any other value."""
        given = call.keywords.get(keyword)
        value = constant(given) if given is not None else None
        return None if given is None else value is not None and value[0] in (*_FP16, "fp16")

    def _autocast(self, event: Event) -> bool | None:
        given = event.call.argument(1, "dtype")
        return launch_expectations.low(event.dtypes) is Dtype.FP16 if given is not None else None


def _gives_config(call: Call, facts: Facts) -> bool:
    """True if only the config of what is loaded is kept: `T5Model.from_pretrained(name).config`."""
    parent = facts.parent(call.node)
    return isinstance(parent, cst.Attribute) and parent.attr.value.endswith("config")
