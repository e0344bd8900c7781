from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Constant,
    Diagnostic,
    Dtype,
    Facts,
    Good,
    HasSpan,
    Note,
    Rule,
    any_of,
    constant,
    launch_expectations,
)

_MODES = {"fp16": Dtype.FP16, "bf16": Dtype.BF16}


class BnbComputeDtype(Rule):
    """The compute dtype of 4-bit layers is not that of the run.

    ## What it does
    Compares `bnb_4bit_compute_dtype` of `BitsAndBytesConfig(load_in_4bit=True)`, FP32 by default, with the precision of
    `TrainingArguments`, of the `Accelerator`, or of the launch configs.

    ## Why is this bad
    A 4-bit layer casts its input to that dtype. FP16 in a BF16 run makes activations above 65504 infinite (bitsandbytes
    0.50, observed); BF16 in an FP16 run rounds them to 8 bits. The default FP32 is "slow inference or training speed",
    as bitsandbytes warns for FP16 input.

    ## Known limits
    Only precisions that are known in the file or its launch configs are compared.
    """

    code, name = "MPG517", "bnb-compute-dtype"
    severity = "warning"
    message = "4-bit layers compute in {found}{default}, the run in {wanted}{effect}"
    help = "pass the dtype of the run: `bnb_4bit_compute_dtype=torch.{dtype}`"
    preview = True
    triggers = (any_of(b"BitsAndBytesConfig"), any_of(b"load_in_4bit"))
    examples = (
        Bad(
            """\
import torch
from transformers import BitsAndBytesConfig, TrainingArguments

config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)  # !
default = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")  # !
args = TrainingArguments("out", bf16=True)
"""
        ),
        Good(
            """\
import torch
from transformers import BitsAndBytesConfig, TrainingArguments

def main(dtype, cli):
    same = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    unknown = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
    eight = BitsAndBytesConfig(load_in_8bit=True)
    optional = BitsAndBytesConfig(load_in_4bit=cli.four)
    return TrainingArguments("out", bf16=True)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        configs = [
            (call, found)
            for call in facts.calls.get("BitsAndBytesConfig", ())
            if not facts.is_inference(call) and (found := self._computes(call, facts)) is not None
        ]
        if not configs:
            return
        run = self._run(facts)
        if run is None:
            return
        wanted, place = run
        for call, found in configs:
            if found is wanted:
                continue
            given = call.keywords.get("bnb_4bit_compute_dtype")
            yield self.at(
                call if given is None else facts.span(given, call),
                found=found.label,
                default="" if given is not None else " by default",
                wanted=wanted.label,
                effect=": activations above 65504 become infinite" if found is Dtype.FP16 else "",
                help=self.help.format(dtype=wanted.torch_name),
                notes=place,
            )

    def _computes(self, call: Call, facts: Facts) -> Dtype | None:
        """Return the compute dtype of a 4-bit config; None if it is unknown."""
        if constant(call.keywords.get("load_in_4bit")) != (True,) or call.starred:
            return None
        given = call.keywords.get("bnb_4bit_compute_dtype")
        if given is None:
            return Dtype.FP32
        dtypes = {dtype for _, dtype in facts.dtypes(given, call, strings=True)}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return dtype if isinstance(dtype, Dtype) and dtype in (*HALF_DTYPES, Dtype.FP32) else None

    def _run(self, facts: Facts) -> tuple[Dtype, tuple[Note, ...]] | None:
        """Return the dtype that the run computes in, and where that is set; None if it is unknown."""
        found: list[tuple[Dtype | None, HasSpan]] = []
        for arguments in facts.events("arguments"):
            given = {
                name: self._truth(arguments.call, name, facts) for name in _MODES if name in arguments.call.keywords
            }
            if given:
                on = [name for name, truth in given.items() if truth is True]
                found.append((_MODES[on[0]] if len(on) == 1 and None not in given.values() else None, arguments))
        for event in facts.events("accelerator"):
            mode = event.call.argument(2, "mixed_precision")
            if mode is not None:
                text = launch_expectations.literal(facts.evaluate(mode, event.call))
                found.append((_MODES.get(text or ""), event))
        if found:
            dtypes = {dtype for dtype, _ in found}
            dtype = found[0][0]
            return (dtype, (Note("the run's precision", found[0][1].span),)) if len(dtypes) == 1 and dtype else None
        configs = launch_expectations.configs(facts)
        modes = {config.mixed_precision for config in configs}
        dtype = _MODES.get(modes.pop() or "") if len(modes) == 1 else None
        return (dtype, launch_expectations.places(configs)) if dtype is not None else None

    def _truth(self, call: Call, name: str, facts: Facts) -> bool | None:
        """Return the value of a switch; None if it is unknown."""
        values = {
            each.atom.value if isinstance(each.atom, Constant) else None
            for each in facts.evaluate(call.keywords[name], call)
        }
        value = values.pop() if len(values) == 1 else None
        return value if isinstance(value, bool) else None
