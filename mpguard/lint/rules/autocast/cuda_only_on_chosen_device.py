from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Call, Diagnostic, Facts, Good, Note, Rule, any_of, constant, dotted, lazy_pattern

#: Accelerators other than CUDA's, as modules of torch.
_OTHERS = ("mps", "xpu", "npu", "hpu")
_CHOOSES = lazy_pattern(rf"(?:{'|'.join(_OTHERS)})\.is_available\(|\btorch\.accelerator\b")


class CudaOnlyOnChosenDevice(Rule):
    """Autocast or a GradScaler is written for CUDA, and the program chooses its device.

    ## What it does
    Reports `torch.autocast("cuda")` and `torch.amp.GradScaler("cuda")`, also in the spellings of `torch.cuda.amp`,
    that no condition limits, in code that trains and moves its model to a device which it chooses among CUDA and
    another accelerator (`torch.backends.mps.is_available()`, `torch.xpu.is_available()`, `torch.accelerator`).

    ## Why is this bad
    On the other device a region for `"cuda"` does nothing: the run is FP32, slower, with twice the memory. A GradScaler
    for `"cuda"` disables itself where there is no CUDA, with a warning: FP16 gradients are then not scaled, and those
    below 6e-8 become zero (pytorch/pytorch#147731).

    A region for `"cuda"` that switches autocast off does nothing there either: inside a region of the other device its
    part, such as a head that must be in FP32, is computed in 16 bits.

    ## Known limits
    Not reported: a region or scaler whose `enabled=` is not known, one under any condition, and a device that a class
    of another file chooses.
    """

    code, name = "MPG317", "cuda-only-on-chosen-device"
    severity = "warning"
    message = "`{call}` is for CUDA, and the device is chosen: on another one it {effect}"
    help = "pass the type of the device: `device.type`"
    triggers = (any_of(b"autocast", b"GradScaler"), any_of(b".to("), any_of(b".backward("))
    triggers_nearby = (
        any_of(*(f"{each}.is_available(".encode() for each in _OTHERS), b"torch.accelerator"),
        any_of(b"cuda.is_available(", b"torch.accelerator"),
    )
    examples = (
        Bad(
            """\
import torch

if torch.cuda.is_available():
    device = torch.device("cuda")
elif torch.backends.mps.is_available():
    device = torch.device("mps")
else:
    device = torch.device("cpu")

model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):  # !
        loss = model(x.to(device)).sum()
    loss.backward()
    optimizer.step()
"""
        ),
        Good(
            """\
import torch

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler(device)
for x in loader:
    with torch.autocast(device, dtype=torch.float16):
        loss = model(x.to(device)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if not facts.events("backward"):
            return
        here = _CHOOSES.search(facts.file_text) is not None
        moves = (call for call in facts.calls.get("to", ()) if _to_chosen(call))
        moved = next((call for call in moves if here or _is_chosen_elsewhere(call, facts)), None)
        if moved is None:
            return
        found = [(event, "does nothing") for event in facts.events("autocast")]
        found += [(event, "is disabled") for event in facts.events("scaler")]
        followed = [event for event in facts.events("autocast") if not _is_for_cuda(event.call, facts)]
        for event, effect in found:
            call = event.call
            off = constant(call.keywords.get("enabled")) == (False,)
            if off and not followed:
                continue  # no region is on there, which it could switch off
            if not event.guard and not facts.is_inference(call) and _for_cuda(call, facts, off=off):
                notes = (Note("the model, or its input, is moved to the chosen device here", moved.span),)
                yield self.at(
                    call, call=facts.short(call.node), effect="leaves autocast on" if off else effect, notes=notes
                )


def _to_chosen(call: Call) -> bool:
    """True for `model.to(device)`."""
    return any(dotted(given).rsplit(".", 1)[-1].endswith("device") for given in call.positional)


def _is_chosen_elsewhere(call: Call, facts: Facts) -> bool:
    """True if a function of another file chooses the device of `model.to(device)`."""
    for given in call.positional:
        for record in facts.flow.backward(given, call, depth=2):
            functions = facts.functions(record) if isinstance(record, Call) else []
            asked = (f"{call.path}(" for each in functions if each.facts is not facts for call in each.scope.calls)
            if any(map(_CHOOSES.search, asked)):
                return True
    return False


def _for_cuda(call: Call, facts: Facts, *, off: bool) -> bool:
    """True if a region or a scaler is for CUDA, whatever the device is, and always does the same.

    off: it is a region with `enabled=False`.
    """
    if call.starred or ("enabled" in call.keywords and not off):
        return False
    return _is_for_cuda(call, facts)


def _is_for_cuda(call: Call, facts: Facts) -> bool:
    path = facts.called_path(call)
    if not path.startswith("torch."):
        return False
    if path.startswith("torch.cuda.amp."):
        return not call.positional
    device = call.argument(0, "device_type" if path.endswith("autocast") else "device")
    return device is None or constant(device) == ("cuda",)
