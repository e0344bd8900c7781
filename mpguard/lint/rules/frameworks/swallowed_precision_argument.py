from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Call, Constant, Diagnostic, Facts, Rule, Scope, any_of, lazy_pattern

_NAME = lazy_pattern(
    r"(?:use_|enable_)?(?:mixed_precision|(?:amp|autocast|compute|train|training)_precision|fp16|bf16|amp)"
)
_LOW = lazy_pattern(r"True|fp16|bf16|fp8|float16|bfloat16|half|16-mixed|bf16-mixed")


class SwallowedPrecisionArgument(Rule, form_of="MPG518"):
    """A function of the project takes an argument for the precision in its `**kwargs`, which it does not read.

    The run computes in FP32, or in the precision that the code names elsewhere, without a message.

    The argument is passed by name, or is an item of a dict that is passed as `**config`.
    """

    message = (
        "`{function}` takes `{name}` in its `**{kwargs}`, which it does not read: the precision does not depend on it"
    )
    help = "give the function a parameter of this name and use it, or remove the argument"
    triggers = (
        any_of(*(b"%s%s" % (name, end) for name in (b"precision", b"p16", b"amp") for end in (b"=", b"'", b'"'))),
        any_of(b"**", b"16", b"=True"),
    )
    triggers_nearby = (any_of(b"**kw", b"**_", b"**opt", b"**extra", b"**other"), any_of(b".backward("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call in [call for calls in facts.calls.values() for call in calls]:
            for name in self._precisions(call, facts):
                functions = [each.scope for each in facts.functions(call)]
                swallowing = [kwargs for each in functions if (kwargs := self._swallows(each, name))]
                if functions and len(swallowing) == len(functions):
                    yield self.at(call, function=facts.short(call.func), name=name, kwargs=swallowing[0])

    def _precisions(self, call: Call, facts: Facts) -> list[str]:
        """Return the names of arguments that ask for low precision, as keywords or in `**config`."""
        given = {name: facts.evaluate(each, call) for name, each in call.keywords.items() if _NAME.fullmatch(name)}
        return [
            name
            for name, values in given.items()
            if any(isinstance(each.atom, Constant) and _LOW.fullmatch(str(each.atom.value)) for each in values)
        ]

    def _swallows(self, function: Scope, name: str) -> str:
        """Return the name of `**kwargs` that a function does not read, if that takes an argument; else ""."""
        kwargs = next((param.name for param in function.params if param.kind == "double"), "")
        named = any(param.name == name for param in function.params)
        used = any(kwargs in scope.uses for scope in function.descendants())
        return "" if named or used or function.decorators else kwargs
