from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Facts, Rule, Scope, any_of, constant, dotted, lazy_pattern

#: Names of fields that select the precision of a run.
_FIELD = lazy_pattern(
    r"(?:use_|enable_)?(?:mixed_precision|(?:amp|autocast|compute|train|training|mixed)_(?:dtype|precision)"
    r"|fp16|bf16|fp8|half_precision|amp|tf32|allow_tf32)(?:_training)?"
)
#: Names of classes of settings, and the bases that read no field themselves.
_CLASS = lazy_pattern(r"\w*(?:Conf|Config|Cfg|Args|Arguments|Settings|Options|HParams|Params|Hyperparameters)")
_PLAIN_BASES = frozenset({"object", "BaseModel", "BaseSettings", "NamedTuple"})
#: Defaults of a switch, or of a name of a precision.
_LOW = lazy_pattern(r"(?i)True|False|fp16|bf16|fp8|float16|bfloat16|half|16|16-mixed|bf16-mixed|amp")


class UnreadPrecisionField(Rule, form_of="MPG518"):
    """A class of settings has a field for the precision that nothing in the project reads.

    A run that sets the field trains in another precision, without a message.

    Reported in a class without a base other than `BaseModel` and the like, of which other fields are read. Silent if
    the project may read fields without naming them (`asdict`, `fields`, `vars`, `**config`).
    """

    message = "nothing in the project reads `{cls}.{field}`: the precision does not depend on it"
    help = "use the value (autocast, `Accelerator(mixed_precision=...)`, the dtype of the weights), or remove the field"
    triggers = (any_of(b"class "), any_of(b"precision", b"dtype", b"16", b"fp8", b"amp", b"tf32"))
    triggers_nearby = (any_of(b".backward("),)

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for scope in facts.scopes:
            if scope.kind != "class" or not _CLASS.fullmatch(scope.name):
                continue
            if any(dotted(base).rsplit(".", 1)[-1] not in _PLAIN_BASES for base in scope.bases):
                continue
            for field, bindings in scope.bindings.items():
                default = constant(bindings[0].value) if len(bindings) == 1 and bindings[0].value is not None else None
                if default is None or not _FIELD.fullmatch(field) or not _LOW.fullmatch(str(default[0])):
                    continue
                if facts.project.drops_field(facts.path, field) and self._is_used(scope, facts):
                    yield self.at(bindings[0], cls=scope.name, field=field)

    def _is_used(self, scope: Scope, facts: Facts) -> bool:
        """True if the project reads most other fields of the class: it is no description of another program."""
        bindings = scope.bindings.items()
        others = [each for each, bound in bindings if bound[0].kind == "assign" and not _FIELD.fullmatch(each)]
        read = [each for each in others if not facts.project.drops_field(facts.path, each)]
        return len(read) * 2 > len(others)
