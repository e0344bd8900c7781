from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Call, Diagnostic, Facts, Note, Rule, any_of, lazy_pattern, options

#: Methods that move a model, and a device whose number is a variable.
_MOVES = ("to", "cuda", "cpu")
_CUDA = lazy_pattern(r"""(?:torch\.device\()?f["']cuda:""")


class AutocastOnOtherDevice(Rule, form_of="MPG303"):
    """An autocast is for the CPU, and the model that it surrounds is on CUDA.

    Autocast acts on the operators of its own device type only: the run is in FP32, without a message.

    Both devices are constants, or that of the autocast is the default of an option. A device that the program chooses
    (`"cuda" if torch.cuda.is_available() else "cpu"`) and `device.type` are none.
    """

    message = 'this autocast is for "cpu", and `{model}` is on "cuda": the run is in FP32'
    help = 'pass the device of the model: `device_type="cuda"`'
    triggers = (any_of(b"backward"),)
    triggers_nearby = (any_of(b"autocast"), any_of(b"cpu"), any_of(b".cuda(", b".to("), any_of(b"cuda"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        seen: set[Call] = set()
        for backward in facts.events("backward"):
            for record in facts.flow.backward(backward.subject, backward.call) if backward.subject is not None else ():
                if not isinstance(record, Call) or not record.path or "model" not in facts.kinds(record.func, record):
                    continue
                regions = [region.call for region, _ in facts.autocasts(record)]
                for made in (call for call in regions if call is not None and facts.elsewhere(call) is None):
                    if made not in seen and _is_for_cpu(made, facts) and _on_cuda(record, facts):
                        seen.add(made)
                        notes = (Note("the model is called here", record.span, facts.elsewhere(record)),)
                        yield self.at(made, model=facts.short(record.func), notes=notes)


def _is_for_cpu(made: Call, facts: Facts) -> bool:
    """True if the device of an autocast is the CPU: a constant, or the default of an option."""
    device = facts.autocast(made, facts.called_path(made)).device
    return (device or options.default_of(made.argument(0, "device_type"), facts)) == "cpu"


def _on_cuda(called: Call, facts: Facts) -> bool:
    """True if a model is moved to CUDA wherever it is called, and nowhere else."""
    moves = [each for each in facts.flow.backward(called.func, called, depth=3) if isinstance(each, Call)]
    moves += [each for name in _MOVES for each in called.scope.calls if each.path == f"{called.path}.{name}"]
    moves = [each for each in moves if each.name in _MOVES]
    always = not any(each.guard - called.guard for each in moves)
    return always and {_device_of(each, facts.of(each)) for each in moves} - {""} == {"cuda"}


def _device_of(move: Call, facts: Facts) -> str | None:
    """Return the device of `model.cuda()` or `model.to("cuda:0")`, "" for a move to a dtype; None if it is unknown."""
    given = move.argument(0, "device")
    if move.name != "to":
        return move.name
    if given is not None and all(dtype for _, dtype in facts.dtypes(given, move)):
        return ""
    devices = {str(each).partition(":")[0] for each in facts.constants(given, move)}
    return devices.pop() if len(devices) == 1 else "cuda" if _CUDA.match(facts.short(given)) else None
