"""Adapters of peft that train in the low-precision dtype of the model that they are added to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.domain.casts import CastFacts
from mpguard.lint.facts.program.lattice import Constant
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.records import Call
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.events import Event
    from mpguard.lint.facts.domain.view import DomainView

#: The version of peft since which `prepare_model_for_int8_training` makes FP16 parameters FP32.
_PREPARES = (0, 3)
_QUANTIZES = frozenset({"quantization_config", "load_in_8bit", "load_in_4bit"})
#: Names of parameters and of models, whose casts may be of the adapters.
_WEIGHTS = lazy_pattern(
    r"(?i)(?:^[pvm]|param\w*|weights?|data|model|net|transformer|(?:lora|adapter)\w*|layers?|modules?)$"
)


@dataclasses.dataclass(frozen=True)
class LowPrecisionAdapters:
    """Adapters in low precision: the call that adds them, and what gave the model its dtype.

    copies: they are copies of `modules_to_save`. argument: the `autocast_adapter_dtype=False` that keeps the dtype.
    """

    call: Call
    source: Event
    copies: bool = False
    argument: cst.BaseExpression | None = None

    @property
    def what(self) -> str:
        """The subject of a message."""
        return "the copies of `modules_to_save` are" if self.copies else "the adapters that are trained are"

    @property
    def help(self) -> str:
        """What to do."""
        if self.argument is not None:
            return "remove `autocast_adapter_dtype=False`"
        return "cast the parameters that require gradients to FP32 afterwards (`param.data = param.data.float()`)"


def in_low_precision(facts: DomainView, dtype: Dtype, always: bool) -> Iterator[LowPrecisionAdapters]:
    """Yield the adapters that train in a low-precision dtype; always: the model has no other dtype on any path."""
    for call in (*facts.calls.get("get_peft_model", ()), *facts.calls.get("from_pretrained", ())):
        given = call.keywords.get("autocast_adapter_dtype")
        if given is None or constant(given) != (False,) or not _trains(call, facts):
            continue
        source = _low(call, facts, dtype, always)
        if source is not None:
            yield LowPrecisionAdapters(call, source, argument=given)
    for call in (*facts.calls.get("add_adapter", ()), *facts.calls.get("get_peft_model", ())):
        added = call.name == "add_adapter"
        config = _config(call.argument(0 if added else 1, "adapter_config", "peft_config"), call, facts)
        if config is None or facts.is_inference(call) or not facts.any_training or _upcasts(facts):
            continue
        saved = config.keywords.get("modules_to_save")
        if not added and (not isinstance(saved, (cst.List, cst.Tuple)) or not saved.elements):
            continue
        source = _low(call, facts, dtype, always)
        if source is not None:
            yield LowPrecisionAdapters(call, source, copies=not added)


def _config(node: cst.BaseExpression | None, at: Call, facts: DomainView) -> Call | None:
    """Return the only call that makes a config of peft, if an expression is one."""
    found = [each for each in facts.flow.backward(node, at, depth=2) if isinstance(each, Call)] if node else []
    made = [each for each in found if facts.called_path(each).startswith("peft.")]
    return made[0] if len(made) == 1 and made[0].name.endswith("Config") else None


def _upcasts(facts: DomainView) -> bool:
    """True if the file casts weights to FP32 that may be the adapter's, or prepares the model for it."""
    old = facts.required("peft").before(_PREPARES)
    prepares = ("prepare_model_for_kbit_training", *(() if old else ("prepare_model_for_int8_training",)))
    if any(facts.calls.get(name) for name in (*prepares, "cast_training_params")):
        return True
    casts = [event.call for event in facts.events("cast") if {each for _, each in event.dtypes} == {Dtype.FP32}]
    return any(_WEIGHTS.search(dotted(call.receiver)) for call in (*facts.calls.get("float", ()), *casts))


def _trains(call: Call, facts: DomainView) -> bool:
    upcast = any(each.order > call.order and each.scope is call.scope for each in facts.calls.get("float", ()))
    if facts.is_inference(call) or not facts.any_training or upcast:
        return False
    return call.name == "get_peft_model" or constant(call.keywords.get("is_trainable")) == (True,)


def _low(call: Call, facts: DomainView, dtype: Dtype, always: bool) -> Event | None:
    """Return the load or cast that gives a model that gets adapters the low-precision dtype."""
    added = call.name == "add_adapter"
    model = call.receiver if added else call.argument(0, "model")
    if model is None:
        return None
    records = set(facts.flow.backward(model, call))
    found = [
        each
        for kind in ("load", "cast")
        for each in facts.events(kind)
        if each.call in records or (each.call.is_statement and _casts_before(each, model, call, facts))
    ]
    unquantized = added or "autocast_adapter_dtype" in call.keywords
    if unquantized and any(_is_quantized(each, facts) for each in found):
        return None
    low = (each for each in found if each.may_be(dtype))
    return next((each for each in low if not always or {of for _, of in each.dtypes} == {dtype}), None)


def _casts_before(cast: Event, model: cst.BaseExpression, call: Call, facts: DomainView) -> bool:
    """True if a statement casts the model, or each of its parts, before it gets the adapter."""
    name, _ = facts.part(CastFacts).cast_model(cast) or (cast.key, cast.call)
    return bool(name) and name == dotted(model) and cast.scope is call.scope and cast.order < call.order


def _is_quantized(load: Event, facts: DomainView) -> bool:
    given = [load.call.keywords[key] for key in _QUANTIZES & set(load.call.keywords)]
    values = [each.atom for node in given for each in facts.evaluate(node, load.call)]
    return not all(isinstance(each, Constant) and not each.value for each in values)
