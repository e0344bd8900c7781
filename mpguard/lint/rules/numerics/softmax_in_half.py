from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Call, Diagnostic, Facts, Fix, Note, Object, Rule, any_of, dtype_triggers, python_edits

_WITH_DTYPE = frozenset({"softmax", "log_softmax"})
_OPERATIONS = (*sorted(_WITH_DTYPE), "exp", "logsumexp")
_LAYERS = frozenset({"torch.nn.Softmax", "torch.nn.LogSoftmax"})


class SoftmaxInHalf(Rule):
    """A softmax, exponential or logsumexp is computed outside autocast, on values in FP16 or BF16.

    ## What it does
    Follows explicit casts (`x.half()`, `x.to(torch.bfloat16)`, a tensor created in that dtype, and matmuls of
    these), and what leaves an autocast region or a model of transformers that is loaded in 16 bits, to `softmax`,
    `log_softmax`, `exp` and `logsumexp` that run outside autocast and are trained through.

    ## Why is this bad
    Autocast runs these operations in FP32 on CUDA; an explicit cast prevents that. FP16's `exp` overflows above 11.09
    (`torch.full((1,), 20.).half().exp()` is inf), and probabilities keep 11 bits, 8 in BF16: those of a vocabulary of
    50,000 words are mostly subnormal numbers or zero in FP16, and so are the gradients through them.

    ## Fix safety
    Unsafe: `dtype=torch.float32` casts before the operation, and the result is FP32 too, which the code that follows
    may not accept.

    ## Known limits
    Inference, values of unknown dtype, and code that may run under autocast are not reported: a module whose callers
    are unknown, and functions of a file that mentions autocast or a trainer.
    """

    code, name = "MPG603", "softmax-in-half"
    severity = "warning"
    message = "`{operation}` on values {cause}"
    help = "compute it in float32: cast the values with `.float()`, or pass `dtype=torch.float32`"
    triggers = (
        any_of(*dtype_triggers.CASTS_LOW_PRECISION, b"log_softmax(", b"logsumexp(", b"LogSoftmax("),
        any_of(b"softmax(", b".exp(", b"logsumexp(", b"Softmax("),
    )
    triggers_nearby = (
        any_of(*dtype_triggers.CASTS_LOW_PRECISION, *dtype_triggers.NAMED_LOW_PRECISION),
        any_of(b"backward("),
    )
    examples = (
        Bad(
            """\
import torch
import torch.nn.functional as F

def train(model, loader, optimizer):
    for x, y in loader:
        logits = model(x).half()
        loss = F.nll_loss(F.log_softmax(logits, dim=-1), y)  # !
        loss.backward()
        optimizer.step()
""",
            fixed="""\
import torch
import torch.nn.functional as F

def train(model, loader, optimizer):
    for x, y in loader:
        logits = model(x).half()
        loss = F.nll_loss(F.log_softmax(logits, dim=-1, dtype=torch.float32), y)
        loss.backward()
        optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        for call in (*(call for name in _OPERATIONS for call in facts.calls.get(name, ())), *self._layers(facts)):
            given = call.argument(None, "dtype")
            tensor = call.receiver if facts.precision.is_method(call) else call.argument(0, "input")
            if given is not None or tensor is None or facts.is_inference(call):
                continue
            found = facts.precision.outside_autocast(tensor, call)
            if found is None:
                continue
            notes = (Note("from here", found.origin.span, facts.elsewhere(found.origin)),) if found.origin else ()
            operation, fix = call.name or "Softmax", self._fix(call, facts)
            yield self.at(call, operation=operation, cause=found.cause, notes=notes, fix=fix)

    def _layers(self, facts: Facts) -> list[Call]:
        """Return the calls of softmax layers."""
        if not {"Softmax", "LogSoftmax"} & facts.calls.keys():
            return []
        return [call for calls in list(facts.calls.values()) for call in calls if self._is_layer(call, facts)]

    def _is_layer(self, call: Call, facts: Facts) -> bool:
        atoms = [each.atom for each in facts.evaluate(call.func, call)]
        return any(isinstance(atom, Object) and atom.path in _LAYERS for atom in atoms)

    def _fix(self, call: Call, facts: Facts) -> Fix | None:
        torch = python_edits.name_of_torch(facts)
        if torch is None or call.name not in _WITH_DTYPE or not call.node.args or call.starred:
            return None
        edit = python_edits.after(call.node.args[-1].value, call, f", dtype={torch}.float32")
        return Fix("Compute it in float32", "unsafe", (edit,))
