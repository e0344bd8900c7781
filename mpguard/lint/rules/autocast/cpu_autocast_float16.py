from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Bad, Call, Constant, Diagnostic, Event, Facts, Good, Note, Rule, any_of, dotted, lazy_pattern

#: Words of code that may use a GPU: such code is not for the CPU alone.
_GPU = lazy_pattern(r"(?i)cuda|gpu|xpu|npu|mps|hpu|device_map|accelerat|deepspeed|fabric|trainer|rank|parallel")
#: Lines with an autocast, a scaler or an import are ignored: they name a device too.
_AMP = lazy_pattern(r"autocast|GradScaler|import")


class CpuAutocastFloat16(Rule):
    """FP16 mixed precision is requested on the CPU, where it has no effect.

    ## What it does
    Reports `Accelerator(mixed_precision="fp16", cpu=True)`, `TrainingArguments(fp16=True, use_cpu=True)`, an
    Accelerator whose launch config sets `mixed_precision: fp16` and `use_cpu: true`, and a `"cuda"` autocast around a
    model that is moved to the CPU, in a file that mentions no GPU elsewhere.

    ## Why is this bad
    The run is in FP32. Accelerate 1.15 sets up neither autocast nor a scaler if the device is the CPU and the precision
    FP16, without a message (observed: `native_amp` is False, `scaler` None, the model's output FP32; BF16 works). A
    `"cuda"` autocast has no effect on tensors on the CPU; without a GPU, torch warns and disables it.

    ## Known limits
    Plain torch supports FP16 autocast on the CPU: `torch.autocast("cpu", dtype=torch.float16)` with `GradScaler("cpu")`
    works, and is not reported. A device that an option selects is unknown.
    """

    code, name = "MPG303", "cpu-autocast-float16"
    severity = "warning"
    message = "{what} on the CPU: the run is in FP32"
    help = "use BF16 on the CPU, or run on a GPU"
    triggers = (
        any_of(b"cpu", b"Accelerator("),
        any_of(b"fp16=", b"fp16 =", b'"fp16"', b"'fp16'", b"autocast(", b"autocast as", b"Accelerator("),
        any_of(b"fp16", b'"cuda', b"'cuda", b"cuda.amp", b"Accelerator("),
    )
    examples = (
        Bad(
            """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16", cpu=True)  # !
"""
        ),
        Good(
            """\
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

bf16 = Accelerator(mixed_precision="bf16", cpu=True)
gpu = Accelerator(mixed_precision="fp16", cpu=False)
option = Accelerator(mixed_precision="fp16", cpu=args.cpu)
args = TrainingArguments("out", bf16=True, use_cpu=True)
args = TrainingArguments("out", fp16=not args.cpu, use_cpu=args.cpu)
model = torch.nn.Linear(8, 8).to("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    model(x)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in facts.events("accelerator"):
            given = event.call.argument(2, "mixed_precision")
            if self._has_value(event.call, "mixed_precision", "fp16", facts) and self._has_value(
                event.call, "cpu", True, facts
            ):
                yield self.at(event, what="Accelerate's FP16")
            elif given is None and not event.call.starred and (notes := self._cpu_notes(facts)):
                yield self.at(event, what="Accelerate's FP16, which the launch config sets,", notes=notes)
        for call in facts.calls.get("TrainingArguments", ()):
            if self._has_value(call, "fp16", True, facts) and self._has_value(call, "use_cpu", True, facts):
                yield self.at(call, what="the Trainer's FP16")
        for event in facts.events("autocast"):
            if facts.autocast(event.call, facts.called_path(event.call)).device == "cuda":
                model = self._model_on_cpu(event, facts)
                if model is not None:
                    notes = (Note("this model is on the CPU", model.span),)
                    yield self.at(event, what='a "cuda" autocast', notes=notes)

    def _has_value(self, call: Call, name: str, value: object, facts: Facts) -> bool:
        """True if a keyword argument is certain to have a value."""
        given = call.keywords.get(name)
        return given is not None and self._is_certainly(given, value, call, facts)

    def _is_certainly(self, node: cst.BaseExpression, value: object, call: Call, facts: Facts) -> bool:
        atoms = [each.atom for each in facts.evaluate(node, call)]
        return bool(atoms) and all(isinstance(atom, Constant) and atom.value == value for atom in atoms)

    def _cpu_notes(self, facts: Facts) -> tuple[Note, ...]:
        """Return notes at the launch configs' `use_cpu`, if all of them set FP16 and the CPU."""
        notes = []
        for config in facts.project.configs_for(facts.path):
            entry = config.entry("use_cpu")
            if config.mixed_precision != "fp16" or entry is None or entry.value is not True:
                return ()
            if config.distributed_type not in ("NO", "MULTI_CPU"):
                return ()  # the launcher ignores `use_cpu` there: MPG811
            notes.append(Note("the config selects the CPU", entry.span, config.path))
        return tuple(notes)

    def _model_on_cpu(self, event: Event, facts: Facts) -> Call | None:
        """Return the call that moves a model to the CPU, if the model is called in the region."""
        if _names_gpu(facts.file_text):
            return None
        moved = {}
        for name in ("to", "cpu"):
            for call in facts.calls.get(name, ()):
                target = call.argument(0, "device")
                if name == "to" and (target is None or not self._is_certainly(target, "cpu", call, facts)):
                    return None
                above = facts.parent(call.node)
                targets = getattr(above, "targets", ())
                moved[dotted(targets[0].target) if targets else dotted(call.receiver)] = call
        for calls in facts.calls.values():
            for call in calls:
                if (
                    call.path
                    and call.path in moved
                    and any(region.call is event.call for region, _ in facts.autocasts(call))
                ):
                    return moved[call.path]
        return None


def _names_gpu(text: str) -> bool:
    """True if any line names a GPU, apart from the lines that match `_AMP`."""
    return any(_GPU.search(line) and not _AMP.search(line) for line in text.splitlines())
