from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Call,
    Constant,
    Diagnostic,
    Facts,
    Note,
    Record,
    Rule,
    any_of,
    constant,
    dotted,
    lazy_pattern,
    option_values,
)

_BF16 = lazy_pattern(r"(?i)bf16|bfloat16|dtype|precision")


class Fp16IgnoresBf16Option(Rule, form_of="MPG310"):
    """The program has an option `--bf16`, and its Trainer computes in FP16 with and without it.

    With `--bf16` the run computes in FP16 all the same: activations above 65504 overflow, and a model that is loaded in
    BF16 is cast to FP16 for each matmul.

    Options of `HfArgumentParser`, and values that are not constants, are not checked.
    """

    message = "`fp16={value}` does not depend on the option `--bf16`: the Trainer computes in FP16 with it too"
    help = "pass `bf16=` from the option, and `fp16=` only without it"
    triggers = (any_of(b"fp16"), any_of(b"TrainingArguments(", b"Config("))
    triggers_nearby = (any_of(b"bf16"), any_of(b"add_argument("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in facts.events("arguments"):
            call, given = event.call, event.call.keywords.get("fp16")
            if given is None or "bf16" in call.keywords or call.starred or self._chosen(event.guard.flags()):
                continue
            option = self._option(call, facts) if self._is_on(given, call, facts) else None
            if option is not None:
                notes = (Note("the option", option.span, facts.elsewhere(option)),)
                yield self.at(facts.span(given, call), value=facts.short(given), notes=notes)

    def _chosen(self, flags: set[str]) -> bool:
        return any(map(_BF16.search, flags))

    def _is_on(self, given: cst.BaseExpression, call: Call, facts: Facts) -> bool:
        """True if a value is True under conditions that are not about the precision, and no value is unknown."""
        found = facts.evaluate(given, call)
        if any(self._chosen(each.guard.flags()) for each in found):
            return False
        values = [each.atom.value if isinstance(each.atom, Constant) else None for each in found]
        return True in values and None not in values

    def _option(self, call: Call, facts: Facts) -> Record | None:
        """Return the flag `--bf16` of the parser whose options are arguments of a call."""
        read = {dotted(each).rpartition(".")[2] for each in call.keywords.values() if "." in dotted(each)}
        for there in (facts, *facts.imported_modules()):
            there.need("add_argument")
            options = {
                name: added
                for added in there.calls.get("add_argument", ())
                for name in option_values.option_names(added)
            }
            flag = options.get("bf16")
            if flag is not None and constant(flag.keywords.get("action")) == ("store_true",) and read & options.keys():
                return flag
        return None
