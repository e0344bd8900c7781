from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Diagnostic, Facts, Record, Rule, any_of, constant, dotted, options, text_of

_EQUAL, _UNEQUAL = (cst.Equal, cst.Is, cst.In), (cst.NotEqual, cst.IsNot, cst.NotIn)
_SEVERAL = (cst.Tuple, cst.List, cst.Set)
_COMPARED = (b"== ", b"!= ", b" is ", b" is not ", b"in (", b"in [", b"in {")
_DTYPES = (b"torch.float16", b"torch.bfloat16", b"torch.half", b"torch.float32")
_TEXTS = (b"float", b"bfloat", b"fp", b"bf", b"half", b"torch.")


class TextComparedWithDtype(Rule, form_of="MPG310"):
    """An option that is text is compared with a dtype of torch: `args.dtype == torch.float16`.

    No text equals a `torch.dtype`: the comparison is False for each value of the option. What it decides, such as
    `GradScaler(enabled=...)`, ignores the option, without a message.

    The option is a field of a dataclass, a name or an option of argparse that is text wherever it is set. Not reported
    next to a comparison with text, which is meant for the other kind of value.
    """

    message = "`{expr}` is always {value}: `{option}` is text, which equals no `torch.dtype`"
    help = "compare with the text, or with `getattr(torch, {option})`"
    triggers = (
        any_of(*(how + dtype for how in _COMPARED for dtype in _DTYPES), *(dtype + b" ==" for dtype in _DTYPES)),
    )
    triggers_nearby = (any_of(b"add_argument(", *(quote + text for text in _TEXTS for quote in (b'"', b"'"))),)

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        seen: set[cst.CSTNode] = set()
        for use in [use for scope in facts.scopes for use in scope.uses.get("torch", ())]:
            node = facts.parent(use.node)
            while isinstance(node, (cst.Element, *_SEVERAL, cst.ComparisonTarget)):
                node = facts.parent(node)
            if node in seen or not isinstance(node, cst.Comparison) or len(node.comparisons) != 1:
                continue
            seen.add(node)
            how, other = node.comparisons[0].operator, node.comparisons[0].comparator
            sides = ((node.left, other), (other, node.left)) if isinstance(how, (*_EQUAL, *_UNEQUAL)) else ()
            for option, dtypes in sides:
                if _is_text(option, use, facts) and _are_dtypes(dtypes, use, facts) and not _takes_both(node, facts):
                    name, value = facts.short(option), isinstance(how, _UNEQUAL)
                    help, expr = self.help.format(option=name), facts.short(node)
                    yield self.at(facts.span(node, use), expr=expr, value=value, option=name, help=help)


def _are_dtypes(node: cst.BaseExpression, at: Record, facts: Facts) -> bool:
    several = [each.value for each in node.elements] if isinstance(node, _SEVERAL) else [node]
    dtypes = [dtype for one in several for _, dtype in facts.dtypes(one, at)]
    return bool(dtypes) and None not in dtypes


def _is_text(node: cst.BaseExpression, at: Record, facts: Facts) -> bool:
    """True if a name, or a field of an object, is text wherever it is set; not what a caller passes."""
    root, _, name = (path := dotted(node)).rpartition(".")
    if not path or (root and options.is_set_later(name, facts)):
        return False
    values = facts.constants(node, at)
    if not values:
        return bool(root) and options.is_text_option(path, at, facts)
    owners = [each.atom for each in facts.resolve(root, at.scope, at.order)] if root else []
    fields = [facts.attributes(cls).get(name, []) if (cls := getattr(each, "cls", None)) else [] for each in owners]
    bound = fields if root else [facts.bindings(path, at)]
    literal = (each.kind == "assign" and constant(each.value) is not None for found in bound for each in found)
    return all(isinstance(value, str) for value in values) and bool(bound) and all(bound) and all(literal)


def _takes_both(node: cst.CSTNode, facts: Facts) -> bool:
    """True if a condition compares with text, too: `dtype == "float16" or dtype == torch.float16`."""
    while isinstance(above := facts.parent(node), cst.BooleanOperation):
        node = above
    return any(quote in text_of(node) for quote in "\"'")
