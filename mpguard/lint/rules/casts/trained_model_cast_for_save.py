from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Call, Diagnostic, Facts, Note, Rule, any_of, dotted, lazy_pattern, text_of

_LOW = lazy_pattern(r"(?i)(?:b?float16|half|save_?dtype|save_?precision)$")
_BACK = lazy_pattern(r"(?i)(?:float32|float|\w*dtype|\w*precision)$")
_SAVES = ("save_pretrained", "save", "save_file", "save_model")


class TrainedModelCastForSave(Rule, form_of="MPG117"):
    """A model is cast in place to be saved, and cast back to go on training.

    `to` of a module rounds its weights: casting back to FP32 does not restore the bits that 16-bit weights lack, so
    each save undoes the small updates since the last one.

    Reported where one function casts a model, saves it, and casts it to another dtype. A copy may be cast.
    """

    severity = "warning"
    message = "`{cast}` rounds the weights of `{model}`, which is cast back after the save: small updates are lost"
    help = "cast a copy, or the tensors of the state dict that is saved"
    triggers = (
        any_of(b"float16", b"half", b"save_dtype", b"save_precision"),
        any_of(b".to(", b".float("),
        any_of(b"save"),
    )
    triggers_nearby = (any_of(b".backward("),)

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        for name in ("to", "half", "bfloat16"):
            for cast in facts.calls.get(name, ()):
                model, low = dotted(cast.receiver), _dtype(cast)
                if not model or not cast.is_statement or not _LOW.search(low):
                    continue
                back = self._cast_back(cast, model, low)
                if back is not None and facts.kinds(cast.receiver, cast) <= {"", "model", "pipeline"}:
                    notes = (Note("cast back here", back.span),)
                    yield self.at(cast, cast=facts.short(cast.node), model=model, notes=notes)

    def _cast_back(self, cast: Call, model: str, low: str) -> Call | None:
        """Return the next call that casts the model to another dtype, if the model is saved before it."""
        saved = False
        for call in sorted(cast.scope.calls, key=lambda each: each.order):
            if call.order <= cast.order:
                continue
            of_model = dotted(call.receiver) == model
            if call.name in _SAVES:
                saved = saved or of_model or any(f"{model}.state_dict(" in text_of(each) for each in call.positional)
            elif of_model and call.is_statement and call.name in ("to", "float", "half", "bfloat16"):
                wanted = _dtype(call)
                if _BACK.search(wanted) and wanted != low:
                    bound = cast.scope.bindings.get(model, ())
                    again = any(cast.order < each.order < call.order for each in bound)  # then it is another model
                    return call if saved and not again and not _LOW.search(wanted) else None
        return None


def _dtype(call: Call) -> str:
    """Return the text of the dtype that a cast asks for; empty if it only moves."""
    if call.name != "to":
        return call.name
    given = call.keywords.get("dtype") or (call.positional[-1] if call.positional else None)
    return dotted(given)
