from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Call, Diagnostic, Dtype, Event, Facts, Note, Rule, accelerate_precision, any_of

_RUNS = ("", ".encode", ".decode", ".forward")


class Float32PartInFp16Autocast(Rule, form_of="MPG519"):
    """A frozen part is cast to FP32, and called inside an FP16 autocast region, which computes it in FP16.

    Autocast casts the inputs and weights of each matmul and convolution, whatever dtype the weights are stored in. A
    VAE that is kept in FP32 because its activations overflow in FP16, as SDXL's do, overflows all the same.

    Reported for casts to FP32 that are written out, of models that are frozen, where the region is in the function of
    the call.
    """

    message = "`{model}` is cast to FP32, and autocast computes it in FP16 here"
    help = "call it before the region, or under `torch.autocast(..., enabled=False)`"
    triggers = (any_of(b"float32", b".float()"), any_of(b"autocast"), any_of(b"backward("), any_of(b"requires_grad"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        for event in (*facts.events("cast"), *facts.events("load")):
            if {dtype for _, dtype in event.dtypes} != {Dtype.FP32} or not facts.casts.is_module(event):
                continue
            name = _name(event, facts)
            if not name or not facts.frozen_params.is_frozen_name(name):
                continue
            calls = (call for calls in facts.calls.values() for call in calls)
            for call in calls:
                same = call.scope is event.scope or name.startswith("self.")
                if same and call.path in {f"{name}{each}" for each in _RUNS} and _in_fp16(call, facts):
                    notes = (Note("cast to FP32 here", event.span),)
                    yield self.at(call, model=name, notes=notes)
                    break


def _name(event: Event, facts: Facts) -> str:
    """Return the name of what is cast, or loaded."""
    bound = facts.bound_to(event.call)
    return bound.key if bound is not None else event.key if event.call.is_statement else ""


def _in_fp16(call: Call, facts: Facts) -> bool:
    """True if the innermost autocast around a call is on, and in FP16."""
    for region in reversed(facts.regions(call)):
        if region.kind == "autocast":
            return region.guard.possible and {dtype for _, dtype in region.dtypes} == {Dtype.FP16}
        if region.kind == "accelerator_autocast":
            return accelerate_precision.precision(facts) == "fp16"
    return False
