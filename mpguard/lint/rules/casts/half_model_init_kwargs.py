from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import HALF_DTYPES, Diagnostic, Facts, Note, Record, Rule, any_of, constant

_QUANTIZES = frozenset({"quantization_config", "load_in_8bit", "load_in_4bit"})


class HalfModelInitKwargs(Rule, form_of="MPG107"):
    """A config of TRL has a 16-bit dtype among its `model_init_kwargs`, and the Trainer trains the whole model.

    The Trainer loads the model that it is given by name with these arguments. `bf16=True` is autocast over the weights
    as they are: without FP32 weights an update below 2^-9 of a BF16 weight is rounded away (2^-12 in FP16).

    Not reported with `peft_config`, with quantization, or with an optimizer or sharding that may keep FP32 weights.
    """

    message = "`{expr}` loads the weights in {dtype}, and the Trainer's optimizer updates them"
    help = 'write `"dtype": "float32"`: the Trainer computes in BF16 by autocast'
    triggers = (any_of(b"model_init_kwargs"), any_of(b"float16"), any_of(b"Trainer("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or facts.master_weights.are_always_kept:
            return
        for event in facts.events("trainer"):
            given = event.call.argument(1, "args")
            made = facts.optimizers.arguments(given, event.call) if given is not None else None
            if made is None or not facts.optimizers.trains_whole(event.call):
                continue
            items, place = _items(made.keywords.get("model_init_kwargs"), made, facts)
            dtype = items.get("dtype", items.get("torch_dtype"))
            found = {each for _, each in facts.dtypes(dtype, place, strings=True)} if dtype is not None else set()
            low = next((each for each in HALF_DTYPES if found == {each}), None)
            if dtype is not None and low is not None and _QUANTIZES.isdisjoint(items):
                notes = (Note("trained here", event.span),)
                yield self.at(facts.span(dtype, place), expr=facts.short(dtype), dtype=low.label, notes=notes)


def _items(node: cst.CSTNode | None, at: Record, facts: Facts) -> tuple[dict[object, cst.BaseExpression], Record]:
    """Return the items of a dict that is written out, and where it is: a name's is where the name is bound."""
    if isinstance(node, cst.Name) and len(bound := facts.bindings(node.value, at)) == 1:
        node, at = bound[0].value, bound[0]
    if isinstance(node, cst.Call) and facts.short(node.func) == "dict":
        return {each.keyword.value: each.value for each in node.args if each.keyword is not None}, at
    pairs = [each for each in node.elements if isinstance(each, cst.DictElement)] if isinstance(node, cst.Dict) else []
    return {key[0]: each.value for each in pairs if (key := constant(each.key)) is not None}, at
