from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Call, Diagnostic, Dtype, Facts, Note, Record, Rule, any_of, constant, dotted

#: Methods whose result is a part of the same model, in its dtype.
_SAME_WEIGHTS = frozenset({
    "parameters", "get_input_embeddings", "get_output_embeddings", "requires_grad_", "train", "cuda",
})  # fmt: skip
#: Functions that collect parameters.
_COLLECTS = frozenset({"list", "tuple", "chain", "iter"})


class HalfPipelineTrained(Rule, form_of="MPG103"):
    """A part of a diffusers pipeline that is loaded in FP16 is trained.

    FP16 weights have no FP32 copy: an update below 2^-12 of a weight is lost. Adam's `eps` of 1e-8 is 0 in FP16, and so
    is the second moment of a gradient of 1e-3: the first step produces infinities (torch 2.13). A GradScaler raises
    "Attempting to unscale FP16 gradients".

    Not reported: files that cast something to FP32, and parameters that are copies.
    """

    message = "the optimizer trains weights of this pipeline, which are FP16"
    help = (
        "load the model that is trained in FP32, or cast its trained parameters to FP32 before the optimizer is created"
    )
    triggers = (any_of(b"Pipeline"), any_of(b"float16", b"half", b"fp16"), any_of(b"optim"), any_of(b".step("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        loads = [
            event.call
            for event in facts.events("load")
            if event.may_be(Dtype.FP16) and "pipeline" in facts.kinds(event.call.node, event.call)
        ]
        if not loads or facts.declared == "inference" or self._upcasts(facts):
            return
        reported: set[Call] = set()
        for made in facts.optimizers.of_torch():
            for load in self._trained(made.argument(0, "params"), made, facts):
                if load in loads and load not in reported:
                    reported.add(load)
                    yield self.at(load, notes=(Note("trained with here", made.span, facts.elsewhere(made)),))

    def _upcasts(self, facts: Facts) -> bool:
        return (
            bool(facts.calls.get("cast_training_params"))
            or any(call.receiver is not None for call in facts.calls.get("float", ()))
            or any(event.may_be(Dtype.FP32) for event in facts.events("cast"))
        )

    def _trained(self, node: cst.CSTNode | None, at: Record, facts: Facts, depth: int = 6) -> Iterator[Call]:
        """Yield the calls that load what a parameter, or a collection of them, is a part of."""
        if node is None or depth == 0:
            return
        parts: list[cst.CSTNode] = []
        if isinstance(node, (cst.List, cst.Tuple)):
            parts = [each.value for each in node.elements]
        elif isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            parts = [node.for_in.iter]
        elif isinstance(node, cst.Dict):
            given = (each for each in node.elements if isinstance(each, cst.DictElement))
            parts = [each.value for each in given if constant(each.key) == ("params",)]
        elif isinstance(node, cst.Call) and dotted(node.func).rpartition(".")[2] in _COLLECTS:
            parts = [each.value for each in node.args]
        elif isinstance(node, cst.Name):
            found = facts.bindings(node.value, at)
            parts = [found[0].value] if len(found) == 1 and found[0].kind == "assign" and found[0].value else []
        elif (path := _path(node)).count("."):
            yield from self._loads(path, at, facts)
        for part in parts:
            yield from self._trained(part, at, facts, depth - 1)

    def _loads(self, path: str, at: Record, facts: Facts) -> Iterator[Call]:
        """Yield the call that gives a pipeline of which a path is a part; none if the part is replaced."""
        names = path.split(".")
        owner = ".".join(names[: 2 if names[0] == "self" else 1])
        part = ".".join(names[: 3 if names[0] == "self" else 2])
        if part == owner or facts.bindings(part, at):
            return
        for binding in facts.bindings(owner, at):
            node: cst.CSTNode | None = binding.value if binding.kind == "assign" else None
            while isinstance(node, cst.Call):
                call = facts.call_of(node)
                if call is not None:
                    yield call
                node = node.func.value if isinstance(node.func, cst.Attribute) else None


def _path(node: cst.CSTNode) -> str:
    """Return `pipe.unet` of `pipe.unet.parameters()`; "" for what may have another dtype, or be another object."""
    while not (path := dotted(node)):
        if (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value in _SAME_WEIGHTS
        ):
            node = node.func.value
        elif isinstance(node, cst.Attribute):
            node = node.value
        else:
            return ""
    return path
