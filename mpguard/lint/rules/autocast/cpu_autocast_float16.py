from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Bad, Call, Constant, Diagnostic, Event, Facts, Good, Note, Rule, any_of, dotted

#: What else may bring a GPU: then the code is not for the CPU alone.
_GPU = re.compile(r"(?i)cuda|gpu|xpu|npu|mps|hpu|device_map|accelerat|deepspeed|fabric|trainer|rank|parallel")
#: An autocast, a scaler and imports of them name the device too.
_AMP = re.compile(r"autocast|GradScaler|import")


class CpuAutocastFloat16(Rule):
    """FP16 mixed precision that is asked for on the CPU, and is not there.

    ## What it does
    Reports `Accelerator(mixed_precision="fp16", cpu=True)`, `TrainingArguments(fp16=True, use_cpu=True)`, an
    Accelerator whose launch config says `mixed_precision: fp16` and `use_cpu: true`, and a `"cuda"` autocast around a
    model that is moved to the CPU, in a file that names no GPU otherwise.

    ## Why is this bad
    The run is in FP32. Accelerate 1.15 sets no autocast and no scaler up where the device is the CPU and the precision
    FP16, and says nothing (run: `native_amp` is False, `scaler` None, the model's output FP32; with BF16 it does). A
    `"cuda"` autocast changes nothing for tensors on the CPU; where there is no GPU, torch warns and switches it off.

    ## Known limits
    Plain torch has FP16 autocast on the CPU: `torch.autocast("cpu", dtype=torch.float16)` with `GradScaler("cpu")`
    works, and is not reported. A device that is chosen by an option is unknown.
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
        Bad(
            """\
from transformers import TrainingArguments

args = TrainingArguments("out", fp16=True, use_cpu=True)  # !
"""
        ),
        Bad(
            """\
from accelerate import Accelerator

accelerator = Accelerator()  # !
model = accelerator.prepare(model)
""",
            files={"mp.yaml": "distributed_type: 'NO'\nmixed_precision: fp16\nuse_cpu: true\n"},
        ),
        Bad(
            """\
import torch

device = torch.device("cpu")
model = torch.nn.Linear(8, 8).to(device)
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):  # !
        loss = model(x.to(device)).sum()
    loss.backward()
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
        Good(
            """\
import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Linear(8, 8).to(device)
other = torch.nn.Linear(8, 8).to("cpu")
with torch.autocast("cuda", dtype=torch.float16):
    model(x.to(device)).cpu()
    other(x)
"""
        ),
        Good(
            """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
other = Accelerator(cpu=True)
""",
            files={
                "a.yaml": "distributed_type: 'NO'\nmixed_precision: fp16\nuse_cpu: true\n",
                "b.yaml": "distributed_type: MULTI_GPU\nmixed_precision: fp16\n",
            },
        ),
        Good(
            """\
from accelerate import Accelerator

accelerator = Accelerator()
""",
            files={"mp.yaml": "distributed_type: MULTI_GPU\nmixed_precision: fp16\nuse_cpu: true\nnum_processes: 2\n"},
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in facts.events("accelerator"):
            given = event.call.argument(2, "mixed_precision")
            if self._is(event.call, "mixed_precision", "fp16", facts) and self._is(event.call, "cpu", True, facts):
                yield self.at(event, what="Accelerate's FP16")
            elif given is None and not event.call.starred and (notes := self._launched_on_cpu(facts)):
                yield self.at(event, what="Accelerate's FP16, which the launch config asks for,", notes=notes)
        for call in facts.calls.get("TrainingArguments", ()):
            if self._is(call, "fp16", True, facts) and self._is(call, "use_cpu", True, facts):
                yield self.at(call, what="the Trainer's FP16")
        for event in facts.events("autocast"):
            if facts.autocast(event.call, facts.called_path(event.call)).device == "cuda":
                model = self._model_on_cpu(event, facts)
                if model is not None:
                    notes = (Note("this model is on the CPU", model.span),)
                    yield self.at(event, what='a "cuda" autocast', notes=notes)

    def _is(self, call: Call, name: str, value: object, facts: Facts) -> bool:
        """Whether a keyword argument has a value for certain."""
        given = call.keywords.get(name)
        return given is not None and self._surely(given, value, call, facts)

    def _surely(self, node: cst.BaseExpression, value: object, call: Call, facts: Facts) -> bool:
        atoms = [each.atom for each in facts.evaluate(node, call)]
        return bool(atoms) and all(isinstance(atom, Constant) and atom.value == value for atom in atoms)

    def _launched_on_cpu(self, facts: Facts) -> tuple[Note, ...]:
        """Where the launch configs say FP16 and the CPU, if all of them do."""
        notes = []
        for config in facts.project.configs_for(facts.path):
            entry = config.entry("use_cpu")
            if config.mixed_precision != "fp16" or entry is None or entry.value is not True:
                return ()
            if config.distributed_type not in ("NO", "MULTI_CPU"):
                return ()  # the launcher ignores `use_cpu` there: MPG811
            notes.append(Note("the config asks for the CPU", entry.span, config.path))
        return tuple(notes)

    def _model_on_cpu(self, event: Event, facts: Facts) -> Call | None:
        """A model that is called in the region, and is moved to the CPU for certain."""
        if _names_gpu(facts.source.normal):
            return None
        moved = {}
        for name in ("to", "cpu"):
            for call in facts.calls.get(name, ()):
                target = call.argument(0, "device")
                if name == "to" and (target is None or not self._surely(target, "cpu", call, facts)):
                    return None
                above = facts.walker.parents.get(call.node)
                targets = getattr(above, "targets", ())
                moved[dotted(targets[0].target) if targets else dotted(call.receiver)] = call
        for calls in facts.calls.values():
            for call in calls:
                if call.path in moved and any(region.call is event.call for region, _ in facts.autocasts(call)):
                    return moved[call.path]
        return None


def _names_gpu(text: str) -> bool:
    """Whether any line names a GPU but for what `_AMP` is on."""
    for found in _GPU.finditer(text):
        start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
        if not _AMP.search(text, start, end if end >= 0 else len(text)):
            return True
    return False
