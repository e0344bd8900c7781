from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Call,
    Constant,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Fix,
    Note,
    Rule,
    any_of,
    constant,
    python_edits,
)

#: The version of peft since which `prepare_model_for_int8_training` makes FP16 parameters FP32.
_PREPARES = (0, 3)
_QUANTIZES = frozenset({"quantization_config", "load_in_8bit", "load_in_4bit"})


class Fp16Adapters(Rule, form_of="MPG103"):
    """The parameters of an adapter that train are FP16, like the model that it is added to.

    `get_peft_model` makes adapters of an FP16 or BF16 model FP32, unless the argument is False. `add_adapter` does not,
    and copies of `modules_to_save` keep the dtype of the model. FP16 parameters have FP16 gradients, which the
    GradScaler refuses: "Attempting to unscale FP16 gradients" (peft 0.21, transformers 5.23, torch 2.13, observed).
    Without a scaler they underflow.

    Not reported: adapters of quantized models, which are FP32 anyway, models from other files, files without training,
    and files that cast to FP32 or call `prepare_model_for_kbit_training`, which does. (Before peft 0.3
    `prepare_model_for_int8_training` did not.)
    """

    _scaler = "GradScaler cannot unscale their gradients"
    message = f"the adapters that are trained are FP16, like the model: {_scaler}"
    _cast = "cast the parameters that require gradients to FP32 afterwards (`param.data = param.data.float()`)"
    help = "remove `autocast_adapter_dtype=False`"
    triggers = (
        any_of(b"autocast_adapter_dtype", b"add_adapter(", b"modules_to_save"),
        any_of(b"float16", b".half", b"fp16"),
    )
    fixes = True

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call in (*facts.calls.get("get_peft_model", ()), *facts.calls.get("from_pretrained", ())):
            given = call.keywords.get("autocast_adapter_dtype")
            if given is None or constant(given) != (False,) or not self._trains(call, facts):
                continue
            source = self._half(call.argument(0, "model"), call, facts)
            if source is not None:
                fix = Fix("Create them in FP32", "safe", (python_edits.without_argument(call, given),))
                yield self.at(call, notes=(Note("FP16 here", source.span),), fix=fix)
        for call in (*facts.calls.get("add_adapter", ()), *facts.calls.get("get_peft_model", ())):
            added = call.name == "add_adapter"
            config = self._config(call.argument(0 if added else 1, "adapter_config", "peft_config"), call, facts)
            if config is None or facts.is_inference(call) or not facts.any_training or self._upcasts(facts):
                continue
            saved = config.keywords.get("modules_to_save")
            if not added and (not isinstance(saved, (cst.List, cst.Tuple)) or not saved.elements):
                continue
            source = self._half(call.receiver if added else call.argument(0, "model"), call, facts, added)
            if source is not None:
                what = None if added else "the copies of `modules_to_save` are FP16, like the model: " + self._scaler
                yield self.at(call, message=what, help=self._cast, notes=(Note("FP16 here", source.span),))

    def _config(self, node: cst.BaseExpression | None, at: Call, facts: Facts) -> Call | None:
        """Return the only call that makes a config of peft, if an expression is one."""
        found = [each for each in facts.flow.backward(node, at, depth=2) if isinstance(each, Call)] if node else []
        made = [each for each in found if facts.called_path(each).startswith("peft.")]
        return made[0] if len(made) == 1 and made[0].name.endswith("Config") else None

    def _upcasts(self, facts: Facts) -> bool:
        """True if the file casts something to FP32 that may be the adapter, or prepares the model for it."""
        old = facts.required("peft").before(_PREPARES)
        prepares = ("prepare_model_for_kbit_training", *(() if old else ("prepare_model_for_int8_training",)))
        if any(facts.calls.get(name) for name in (*prepares, "cast_training_params")):
            return True
        if any(call.receiver is not None for call in facts.calls.get("float", ())):
            return True
        return any(Dtype.FP32 in {dtype for _, dtype in each.dtypes} for each in facts.events("cast"))

    def _trains(self, call: Call, facts: Facts) -> bool:
        upcast = any(e.order > call.order and e.scope is call.scope for e in facts.calls.get("float", ()))
        if facts.is_inference(call) or not facts.any_training or upcast:
            return False
        return call.name == "get_peft_model" or constant(call.keywords.get("is_trainable")) == (True,)

    def _half(
        self, model: cst.BaseExpression | None, call: Call, facts: Facts, not_quantized: bool = True
    ) -> Event | None:
        """Return the load or cast that makes the model FP16."""
        if model is None:
            return None
        records = set(facts.flow.backward(model, call))
        found = [each for kind in ("load", "cast") for each in facts.events(kind) if each.call in records]
        if not_quantized and any(self._is_quantized(each, facts) for each in found):
            return None
        return next((each for each in found if {dtype for _, dtype in each.dtypes} == {Dtype.FP16}), None)

    def _is_quantized(self, load: Event, facts: Facts) -> bool:
        given = [load.call.keywords[key] for key in _QUANTIZES & set(load.call.keywords)]
        values = [each.atom for node in given for each in facts.evaluate(node, load.call)]
        return not all(isinstance(each, Constant) and not each.value for each in values)
