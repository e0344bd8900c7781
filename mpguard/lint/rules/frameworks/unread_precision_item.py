from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Diagnostic, Facts, Rule, any_of, constant, lazy_pattern

_KEY = lazy_pattern(r"(?:use_|enable_)?(?:mixed_precision|amp|amp_dtype|autocast_dtype|fp16|bf16|half_precision)")
_LOW = lazy_pattern(r"(?i)(?:torch\.)?(?:fp16|bf16|float16|bfloat16|half|16-mixed|bf16-mixed|True)")


class UnreadPrecisionItem(Rule, form_of="MPG518"):
    """A dict of settings in the script has a key for the precision that the script does not read.

    The run computes in FP32, or in the precision that the code names elsewhere, without a message.

    Reported where the script trains, reads other items of the dict by their constant keys, and does nothing else with
    the dict: it is not passed on, iterated over, or imported by another file.
    """

    message = "`{key}` of `{name}` is read nowhere: the precision does not depend on it"
    help = "use the value (autocast, `Accelerator(mixed_precision=...)`), or remove the key"
    triggers = (
        any_of(b"precision", b"amp", b"fp16", b"bf16"),
        any_of(b"{"),
        any_of(b"16", b"half", b"True"),
        any_of(b".backward(", b".backward"),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        module = next(scope for scope in facts.scopes if scope.kind == "module")
        for name, bindings in module.bindings.items() if facts.any_training else ():
            if len(bindings) == 1 and isinstance(bindings[0].value, cst.Dict):
                at = facts.span(bindings[0].value, bindings[0])[0]
                for key, node in _unread(name, bindings[0].value, at, facts):
                    yield self.at(facts.span(node, bindings[0]), key=key, name=name)


def _unread(name: str, items: cst.Dict, at: int, facts: Facts) -> Iterator[tuple[str, cst.BaseExpression]]:
    """Yield the keys of a dict, and of the dicts in it, that ask for low precision and are not read."""
    for each in items.elements:
        key = constant(each.key) if isinstance(each, cst.DictElement) else None
        if key is None or not isinstance(each, cst.DictElement):
            continue
        handed_on = rf"\[[\"']{key[0]}[\"']\](?!\s*\[)|\.(?:get|pop)\(\s*[\"']{key[0]}[\"']"
        if isinstance(each.value, cst.Dict) and not re.search(handed_on, facts.file_text):
            yield from _unread(name, each.value, at, facts)
        given = constant(each.value)
        asks = given is not None and _KEY.fullmatch(str(key[0])) and _LOW.fullmatch(str(given[0]))
        if asks and _is_unread(name, str(key[0]), at, facts.file_text) and facts.users(name) == []:
            yield str(key[0]), each.key


def _is_unread(name: str, key: str, at: int, text: str) -> bool:
    """True if a file reads items of the dict that begins at `at`, not this one, and does nothing else with it."""
    if len(re.findall(rf"[\"']{key}[\"']|\.{key}\b", text)) != 1 or not re.search(rf"(?<![\w.]){name}\[[\"']", text):
        return False
    for use in re.finditer(rf"(?<![\w.]){name}\b(?!\s*(?:\[\s*[\"']|\.get\(\s*[\"']|=[^=]))", text):
        start = max(text.rfind("def ", 0, use.start()), 0)
        function = text[start : use.end()] if not start <= at < use.start() else ""
        if not re.search(rf"^def \w+\([^()]*\b{name}\b|^[ \t]+{name}\s*=", function, re.M):
            return False  # it is no local of that name
    return True
