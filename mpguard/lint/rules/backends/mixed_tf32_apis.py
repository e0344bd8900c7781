from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, Note, Rule, Switch, any_of, backends, compatible

#: Old switch -> the operations that it controls.
_OLD = {
    "torch.backends.cuda.matmul.allow_tf32": "matmul",
    "torch.set_float32_matmul_precision": "matmul",
    "torch.backends.cudnn.allow_tf32": "conv",
}
#: New switch -> the operations that it controls. `torch.backends.fp32_precision` controls both kinds.
_NEW = {
    "torch.backends.fp32_precision": ("matmul", "conv"),
    "torch.backends.cuda.matmul.fp32_precision": ("matmul",),
    "torch.backends.cudnn.fp32_precision": ("conv",),
    "torch.backends.cudnn.conv.fp32_precision": ("conv",),
    "torch.backends.cudnn.rnn.fp32_precision": ("conv",),
}
_READS = {
    "torch.backends.cuda.matmul.allow_tf32": "matmul",
    "torch.get_float32_matmul_precision": "matmul",
    "torch.backends.cudnn.allow_tf32": "conv",
}


class MixedTf32Apis(Rule):
    """The old TF32 switches contradict the new `fp32_precision`, or are read after only the new one was set.

    ## What it does
    Compares `torch.backends.cuda.matmul.allow_tf32`, `torch.backends.cudnn.allow_tf32` and
    `torch.set_float32_matmul_precision` with the `fp32_precision` of torch 2.9 and later for the same operations.

    ## Why is this bad
    torch stores the two separately. With torch 2.13, after `allow_tf32 = True` and `matmul.fp32_precision = "ieee"`,
    reading `allow_tf32` raises "you have used mix of the legacy and new APIs"; in the other order the old switch
    overrides the new one without a warning. After `matmul.fp32_precision = "tf32"` alone,
    `torch.get_float32_matmul_precision()` raises, and so does any library that calls it.

    ## Known limits
    Not reported if the project requires a torch older than 2.9, if both agree, and for exclusive arms
    (`if hasattr(torch.backends, "fp32_precision"): ... else`).
    Values that are not literals are unknown. Reads in libraries are not seen.
    """

    code, name = "MPG701", "mixed-tf32-apis"
    severity = "error"
    in_tests = True
    message = "`{here}` together with `{there}`: {effect}"
    help = "Use `fp32_precision` alone, or the old switches alone"
    versions = {"torch": ">=2.9"}
    triggers = (any_of(b"fp32_precision"), any_of(b"allow_tf32", b"float32_matmul_precision"))
    examples = (
        Bad(
            """\
import torch

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cuda.matmul.fp32_precision = "ieee"  # !
"""
        ),
        Good(
            """\
import torch

def setup(enable):
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "tf32"
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

def same():
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    print(torch.get_float32_matmul_precision())

def unknown(value):
    torch.backends.cudnn.conv.fp32_precision = value
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        found = backends.switches(facts)
        old = [each for each in found if each.path in _OLD and not each.read and _allows_tf32(each) is not None]
        new = [each for each in found if each.path in _NEW and not each.read and _allows_tf32(each) is not None]
        reported = False
        seen: set[Switch] = set()
        for one in new:
            for other in old:
                contradict = _allows_tf32(one) != _allows_tf32(other) and _OLD[other.path] in _NEW[one.path]
                if not contradict or not self._together(one, other, facts):
                    continue
                first, last = sorted((one, other), key=lambda each: each.record.order)
                if last in seen:
                    continue
                seen.add(last)
                reported = True
                wins = "torch raises when it is read" if last is one else "it overrides the other without a warning"
                yield self._at(last, first, wins)
        if not reported:
            yield from self._reads(found, old, new, facts)

    def _reads(self, found: list[Switch], old: list[Switch], new: list[Switch], facts: Facts) -> Iterator[Diagnostic]:
        """Yield reads of old switches after only the new ones were set to TF32."""
        for read in found:
            operation = _READS.get(read.path)
            if not read.read or operation != "matmul":
                continue
            for one in new:
                before = one.record.order < read.record.order and _allows_tf32(one) and operation in _NEW[one.path]
                agrees = any(_OLD[other.path] == operation and _allows_tf32(other) for other in old)
                if before and not agrees and self._together(one, read, facts):
                    yield self._at(read, one, "torch raises here")
                    break

    def _together(self, one: Switch, other: Switch, facts: Facts) -> bool:
        """True if one run may execute both: not in exclusive arms, and in functions that calls connect."""
        connected = other.record.scope in facts.reachable(one.record.scope)
        return connected and compatible(facts.guard_of(one.record), facts.guard_of(other.record))

    def _at(self, place: Switch, other: Switch, effect: str) -> Diagnostic:
        notes = (Note(f"`{_short(other)}` here", other.span),)
        return self.at(place, here=_short(place), there=_short(other), effect=effect, notes=notes)


def _allows_tf32(switch: Switch) -> bool | None:
    """Return True if a switch allows TF32; None if its value is unknown or leaves that to another switch."""
    if isinstance(switch.value, bool):
        return switch.value
    allows = {"tf32": True, "ieee": False, "high": True, "medium": True, "highest": False}
    return allows.get(switch.value) if isinstance(switch.value, str) else None


def _short(switch: Switch) -> str:
    return ".".join(switch.path.split(".")[-2:])
