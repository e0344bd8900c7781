from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Call, Diagnostic, Facts, Note, Rule, any_of, fp8_facts

_STORES = ("enable_layerwise_casting", "apply_layerwise_casting")


class Float8ParamsDtype(Rule, form_of="MPG415"):
    """A float8 dtype is given as the dtype of parameters, for which no arithmetic exists.

    A float8 tensor without a scale is a storage format: it has no addition, no multiplication and no initialisation.
    `te.Linear(..., params_dtype=torch.float8_e4m3fn)` stops ("normal_kernel_cuda not implemented for Float8_e4m3fn"),
    `from_pretrained(dtype=torch.float8_e4m3fn)` too ("couldn't find storage object"), and AdamW and SGD cannot step on
    such parameters; tried with torch 2.11 and 2.13, Transformer Engine 2.20, transformers 5.23. FP8 training comes from
    a recipe (`te.autocast(recipe=...)`, `convert_to_float8_training`): the parameters stay in BF16 or FP32.
    `torch.float8_e4m3` does not exist.

    A module that is cast to float8 for storage (a frozen base under autocast, layerwise casting) works and is not
    reported. Loading in diffusers, which stores in float8, is not checked.
    """

    severity = "error"
    in_tests = True
    message = "parameters in {dtype}: no arithmetic exists for it"
    help = "keep the parameters in BF16 or FP32; FP8 comes from the recipe"
    triggers = (
        any_of(b".float8_e", b"import float8_e"),
        any_of(b"params_dtype", b".to(", b".type(", b"torch_dtype", b"dtype="),
        any_of(
            b"transformer_engine", b"megatron", b"nemo", b"import transformers", b"from transformers", b"parameters("
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for calls in facts.calls.values():
            for call in calls:
                given = call.keywords.get("params_dtype")
                if (
                    given is not None
                    and (dtype := self._float8(given, call, facts))
                    and self._builds_layers(call, facts)
                ):
                    yield self.at(facts.span(given, call), dtype=dtype)
        for load in facts.events("load"):
            given = load.call.argument(None, "dtype", "torch_dtype")
            dtype = self._float8(given, load.call, facts) if given is not None else ""
            owner = facts.called_path(load.call)
            if given is not None and dtype and owner.startswith("transformers.") and not self._is_quantized(load.call):
                yield self.at(facts.span(given, load.call), dtype=dtype)
        for cast in facts.events("cast"):
            held = fp8_facts.only_float8(cast.dtypes)
            if held is not None and not self._stores_float8(facts) and facts.casts.is_module(cast):
                training = facts.training_use.cast(cast, held)
                steps = training.of("optimizer") if training is not None else []
                if steps:
                    yield self.at(
                        cast,
                        dtype=f"torch.{held.torch_name}",
                        notes=(Note("trained here", steps[0].span, facts.elsewhere(steps[0])),),
                    )

    def _float8(self, node: cst.BaseExpression, call: Call, facts: Facts) -> str:
        dtype = fp8_facts.only_float8(facts.dtypes(node, call))
        return f"torch.{dtype.torch_name}" if dtype is not None else ""

    def _builds_layers(self, call: Call, facts: Facts) -> bool:
        """True if a call builds layers, or their config, of a library that creates parameters in this dtype."""
        path = facts.called_path(call)
        return path.startswith(fp8_facts.TE) or (
            path.startswith(("megatron.", "nemo.")) and path.rsplit(".", 1)[-1][:1].isupper()
        )

    def _is_quantized(self, call: Call) -> bool:
        return call.starred or "quantization_config" in call.keywords

    def _stores_float8(self, facts: Facts) -> bool:
        return any(name in facts.calls for name in _STORES)
