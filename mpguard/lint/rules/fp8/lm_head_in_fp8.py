from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Note,
    Object,
    Ref,
    Rule,
    Scope,
    any_of,
    constant,
    events,
    fp8_facts,
    lattice,
    lazy_pattern,
    python_edits,
)

_LANGUAGE_MODEL = lazy_pattern(r"(?:ForCausalLM|LMHeadModel|ForConditionalGeneration|ForMaskedLM)$")
#: Names of the output head in user-defined models.
_HEADS = ("lm_head", "embed_out")
#: accelerate's public filter. It gets a single layer and searches that for the first and last Linear.
_FILTER = "filter_first_and_last_linear_layers"
_LAYERS = ("torch.nn.Linear", "transformer_engine.pytorch.Linear")

#: Event that takes a filter -> position and name of that argument.
_FILTERED: dict[events.EventKind, tuple[int | None, str]] = {
    "convert": (None, "module_filter_fn"),
    "convert_accelerate": (2, "module_filter_func"),
    "fp8_handler": (1, "module_filter_func"),
}


class LmHeadInFp8(Rule):
    """A whole language model is converted to FP8, including its output head.

    ## What it does
    Reports `convert_to_float8_training(model)` and accelerate's `convert_model(model)` of a language model (an
    `AutoModelForCausalLM`, a `...LMHeadModel`, a class with an `lm_head`) without a filter. Also reports accelerate's
    `filter_first_and_last_linear_layers` as the filter of any model: it is called with one layer at a time, finds no
    names inside that layer, and so leaves out none (observed with accelerate 1.15.0).

    ## Why is this bad
    The head's logits span many orders of magnitude and feed the loss directly. The recipes of torchao, torchtitan and
    Megatron keep it in BF16, and so does accelerate's default for torchao, which leaves out the first and the last
    Linear. The same holds for the router of a mixture of experts, where rounding sends tokens to other experts. With
    most vocabularies the head is not a multiple of 16 either, so the matmul raises.

    ## Fix safety
    Unsafe: the filter leaves out layers called `lm_head` (`embed_out`); routers and other heads have other names. For
    accelerate's own conversion the fix removes `filter_first_and_last_linear_layers`: accelerate's default does what
    its name promises.

    ## Known limits
    A filter is assumed to be right. A part of a model (`model.model`, `model.layers`) is not checked, nor is a model
    from an unknown factory. accelerate's conversion to Transformer Engine has no filter: convert by hand.
    """

    code, name = "MPG409", "lm-head-in-fp8"
    severity = "warning"
    message = "the output head `{head}` is converted to FP8 with the rest of the model"
    help = "leave the head (and routers) out with a filter"
    triggers = (
        any_of(b"convert_to_float8_training", b"convert_model", _FILTER.encode()),
        any_of(
            b"ForCausalLM",
            b"LMHead",
            b"ForConditionalGeneration",
            b"ForMaskedLM",
            b"lm_head",
            b"embed_out",
            _FILTER.encode(),
        ),
    )
    examples = (
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("x", dtype=torch.bfloat16).cuda()
convert_to_float8_training(model)  # !
model = torch.compile(model)
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("x", dtype=torch.bfloat16).cuda()
convert_to_float8_training(model, module_filter_fn=lambda module, name: "lm_head" not in name)
model = torch.compile(model)
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in (event for kind in _FILTERED for event in facts.events(kind)):
            given = event.call.argument(*_FILTERED[event.kind])
            atoms = [each.atom for each in facts.evaluate(given, event.call)] if given is not None else []
            if any(isinstance(atom, Ref) and atom.path == f"accelerate.utils.{_FILTER}" for atom in atoms):
                assert given is not None
                whole = len(atoms) == 1 and event.kind != "convert"
                edits = (python_edits.without_argument(event.call, given),) if whole else ()
                yield self.at(
                    facts.span(given, event.call),
                    message=f"`{_FILTER}` leaves no layer out: it is called with one layer at a time",
                    help="`partial(filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model))`",
                    fix=Fix("Leave it to accelerate, which keeps both out", "unsafe", edits) if edits else None,
                )
        for event in (*facts.events("convert"), *facts.events("convert_accelerate")):
            call = event.call
            chosen = call.argument(None, "module_filter_fn")
            if call.starred or (chosen is not None and constant(chosen) != (None,)) or event.subject is None:
                continue
            if event.kind == "convert_accelerate" and (
                "convert_model_to_fp8_ao" in facts.called_path(call) or len(call.node.args) > 1
            ):
                continue
            head = self._head(event, facts)
            if head is not None and not facts.is_inference(call) and not fp8_facts.emulated(facts, call):
                name, notes = head
                yield self.at(event, head=name, notes=notes, fix=self._fix(event, name, facts))

    def _head(self, event: Event, facts: Facts) -> tuple[str, tuple[Note, ...]] | None:
        """Return the name of the converted model's head; None if it is unknown."""
        found = [self._head_of(each.atom, facts) for each in facts.evaluate(event.subject, event.call)]
        return found[0] if found and None not in found else None

    def _head_of(self, atom: object, facts: Facts) -> tuple[str, tuple[Note, ...]] | None:
        if not isinstance(atom, Object) or atom.kind != "model" or isinstance(atom, lattice.Method):
            return None
        if atom.cls is not None:
            return self._head_of_class(atom.cls, facts)
        maker = atom.path.rsplit(".", 2)
        owner = maker[-2] if maker[-1].startswith(("from_", "_from")) and len(maker) > 1 else maker[-1]
        return ("lm_head", ()) if _LANGUAGE_MODEL.search(owner) and atom.path.startswith("transformers.") else None

    def _head_of_class(self, cls: Scope, facts: Facts) -> tuple[str, tuple[Note, ...]] | None:
        attributes = facts.attributes(cls)
        for name in _HEADS:
            for binding in attributes.get(name, ()):
                made = facts.call_of(binding.value) if binding.value is not None else None
                if isinstance(made, Call) and facts.called_path(made) in _LAYERS:
                    return name, (Note("the head", made.span),)
        return None

    def _fix(self, event: Event, head: str, facts: Facts) -> Fix | None:
        if event.kind != "convert" or "module_filter_fn" in event.call.keywords:
            return None
        text = f'module_filter_fn=lambda module, name: "{head}" not in name'
        return Fix("Leave the output head out", "unsafe", (python_edits.with_argument(facts, event.call, text),))
