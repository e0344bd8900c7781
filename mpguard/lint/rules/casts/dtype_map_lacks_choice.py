from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    NAMES_HALF,
    Bad,
    Call,
    Diagnostic,
    DtypeValue,
    Facts,
    Flag,
    Good,
    Note,
    PathCondition,
    Record,
    Rule,
    any_of,
    compatible,
    constant,
    dotted,
    lazy_pattern,
    library_names,
    literal_choices,
)


class DtypeMapLacksChoice(Rule):
    """A dict of dtypes lacks one of the values that the option allows.

    ## What it does
    Reports `{"fp16": torch.float16, "bf16": torch.bfloat16}[args.dtype]`, and `.get(args.dtype, ...)`, if `choices` of
    the option `--dtype` has a value that is no key of the dict.

    ## Why is this bad
    With that value the script stops with a KeyError, or computes in the default of `get`, which is another dtype.

    ## Known limits
    The option must be in the file of the dict, or in a module that it imports if it trains, and both be literals. A
    value that a condition excludes before is not reported, nor `auto`, `none` and `no` with `get`.
    """

    code, name = "MPG113", "dtype-map-lacks-choice"
    severity = "error"
    message = "`{option}` may be {values}, for which this dict of dtypes has no key{effect}"
    help = "add the key, or remove the value from `choices`"
    triggers = (any_of(b"float16", *NAMES_HALF),)
    triggers_nearby = (any_of(b"choices"), any_of(b"add_argument"))
    # Each alternative begins with a literal: the search is four times as fast.
    pattern = lazy_pattern(
        rb"\"\s*:\s*(?:\w+\.)?%(low)s|'\s*:\s*(?:\w+\.)?%(low)s|dict\([^)]*=\s*\w+\.%(low)s"
        % {b"low": rb"(?:b?float16|half)\b"}
    )
    examples = (
        Bad(
            """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bf16", choices=["fp16", "bf16", "fp32"])
args = parser.parse_args()
dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[args.dtype]  # !
"""
        ),
        Good(
            """\
import argparse
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = {"a": torch.float16}

def main(parser):
    parser.add_argument("--dtype", choices=["fp16", "bf16", "auto"], default="auto")
    parser.add_argument("--weights", choices=["fp16", "bf16"])
    parser.add_argument("--other", choices=["no", "fp16", "bf16"])
    args = parser.parse_args()
    if args.dtype != "auto":
        dtype = DTYPES[args.dtype]
    weights = DTYPES[args.weights]
    other = DTYPES.get(args.other, torch.float32)
    kind = KINDS[args.kind]
    table = dict(DTYPES)
    return dtype, weights, other, kind, table
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        lookups = list(self._lookups(facts))
        options = {name: (choices, call) for name, choices, call in self._options(facts)} if lookups else {}
        for record, table, key, default in lookups:
            choices, option = options.get(key, (None, None))
            keys = self._keys(table, record, facts)
            if choices is None or option is None or keys is None:
                continue
            guard = facts.guard_of(record)
            if any(flag.startswith("#") for flag in guard.flags()):
                continue  # a condition on a name that is bound again may exclude the value
            lacking = [
                each
                for each in choices
                if each not in keys
                and compatible(guard, PathCondition([Flag(key, each)]))
                and self._matters(each, default, record, facts)
            ]
            if not lacking:
                continue
            values = " or ".join(f"`{each}`" for each in lacking)
            effect = f": the dtype is then `{facts.short(default)}`" if default is not None else ""
            notes = (Note("the option", option.span, facts.elsewhere(option)),)
            yield self.at(record, option=f"--{key}", values=values, effect=effect, notes=notes)

    def _options(self, facts: Facts) -> Iterator[tuple[str, list[str], Call]]:
        """Yield the options with literal choices: their name in the namespace, and the choices.

        They are those of the file, or else of the modules that it imports.
        """
        for each in (facts, *facts.imported_modules()):
            each.need_uses("choices")
            calls = each.calls.get("add_argument", ())
            found = [(*chosen, call) for call in calls if (chosen := literal_choices(call)) is not None]
            yield from found
            if found:
                return

    def _lookups(self, facts: Facts) -> Iterator[tuple[Record, cst.BaseExpression, str, cst.BaseExpression | None]]:
        """Yield what looks an option up in a table: the table, the option's name, and the default of `get`."""
        for scope in facts.scopes:
            for uses in scope.uses.values():
                for use in uses:
                    index = facts.parent(use.node)
                    element = facts.parent(index) if isinstance(index, cst.Index) else None
                    subscript = facts.parent(element) if isinstance(element, cst.SubscriptElement) else None
                    if "." in use.path and isinstance(subscript, cst.Subscript):
                        yield use, subscript.value, use.path.rsplit(".", 1)[-1], None
        for call in facts.calls.get("get", ()):
            path = dotted(call.argument(0))
            if call.receiver is not None and "." in path and len(call.positional) == 2:
                yield call, call.receiver, path.rsplit(".", 1)[-1], call.positional[1]

    def _keys(self, table: cst.BaseExpression, at: Record, facts: Facts) -> set[object] | None:
        """Return the keys of a dict whose values are dtypes; None if it is none, or changed later."""
        if isinstance(table, cst.Name):
            bindings = facts.bindings(table.value, at)
            if len(bindings) != 1 or bindings[0].kind != "assign" or bindings[0].value is None:
                return None
            if any(b.kind == "item" for scope in facts.scopes for b in scope.bindings.get(table.value, ())):
                return None
            table, at = bindings[0].value, bindings[0]
        parts: list[tuple[object, cst.BaseExpression]] = []
        if isinstance(table, cst.Dict):
            for element in table.elements:
                key = constant(element.key) if isinstance(element, cst.DictElement) else None
                if key is None:
                    return None
                parts.append((key[0], element.value))
        elif (call := facts.call_of(table)) is not None and call.path == "dict" and not call.positional:
            parts = [*call.keywords.items()] if not call.starred else []
        if len(parts) < 2:
            return None
        if not all(isinstance(each.atom, DtypeValue) for _, value in parts for each in facts.evaluate(value, at)):
            return None
        return {key for key, _ in parts}

    def _matters(self, value: str, default: cst.BaseExpression | None, at: Record, facts: Facts) -> bool:
        """True if a value fails, or is the name of another dtype than the default."""
        if default is None:
            return True
        wanted = library_names.DTYPE_STRINGS.get(value)
        given = {dtype for _, dtype in facts.dtypes(default, at)}
        return wanted is not None and bool(given) and wanted not in given
