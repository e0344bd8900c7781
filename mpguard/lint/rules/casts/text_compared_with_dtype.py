from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Diagnostic,
    Facts,
    Record,
    Rule,
    Use,
    any_of,
    dotted,
    lattice,
    options,
    text_of,
)

_EQUAL = (cst.Equal, cst.Is, cst.In)
_UNEQUAL = (cst.NotEqual, cst.IsNot, cst.NotIn)


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
        any_of(
            b"= torch.", b"is torch.", b"is not torch.", b"in (torch.", b"in [torch.", b"in {torch.", b"torch.float16 ="
        ),
        any_of(b"torch.float16", b"torch.bfloat16", b"torch.half", b"torch.float32"),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        seen: set[cst.CSTNode] = set()
        for scope in facts.scopes:
            for use in scope.uses.get("torch", ()):
                compared = self._compared(use, facts)
                if compared is None or compared in seen:
                    continue
                seen.add(compared)
                target = compared.comparisons[0]
                option = next(
                    (each for each in (compared.left, target.comparator) if self._is_text(each, use, facts)), None
                )
                dtypes = target.comparator if option is compared.left else compared.left
                if option is None or not self._are_dtypes(dtypes, use, facts) or self._takes_both(compared, facts):
                    continue
                value = not isinstance(target.operator, _EQUAL)
                yield self.at(
                    facts.span(compared, use),
                    expr=facts.short(compared),
                    value=value,
                    option=facts.short(option),
                    help=self.help.format(option=facts.short(option)),
                )

    def _compared(self, use: Use, facts: Facts) -> cst.Comparison | None:
        """Return the comparison of one value with this dtype, or with a list that it is in."""
        node: cst.CSTNode | None = facts.parent(use.node)
        while isinstance(node, (cst.Element, cst.Tuple, cst.List, cst.Set, cst.ComparisonTarget)):
            node = facts.parent(node)
        if not isinstance(node, cst.Comparison) or len(node.comparisons) != 1:
            return None
        return node if isinstance(node.comparisons[0].operator, (*_EQUAL, *_UNEQUAL)) else None

    def _are_dtypes(self, node: cst.BaseExpression, at: Record, facts: Facts) -> bool:
        several = [each.value for each in node.elements] if isinstance(node, (cst.Tuple, cst.List, cst.Set)) else [node]
        atoms = [each.atom for one in several for each in facts.evaluate(one, at)]
        return bool(atoms) and all(isinstance(atom, lattice.DtypeValue) for atom in atoms)

    def _is_text(self, node: cst.BaseExpression, at: Record, facts: Facts) -> bool:
        """True if a name, or a field of an object, is text wherever it is set."""
        path = dotted(node)
        if not path:
            return False
        name, found = path.rpartition(".")[2], facts.evaluate(node, at)
        if "." in path and options.is_set_later(name, facts):
            return False
        atoms = [each.atom for each in found]
        texts = [isinstance(atom, lattice.Constant) and isinstance(atom.value, str) for atom in atoms]
        return all(texts) or ("." in path and not any(texts) and options.is_text_option(path, at, facts))

    def _takes_both(self, compared: cst.Comparison, facts: Facts) -> bool:
        """True if the condition compares with text, too: `dtype == "float16" or dtype == torch.float16`."""
        node: cst.CSTNode = compared
        while isinstance(above := facts.parent(node), cst.BooleanOperation):
            node = above
        return any(quote in text_of(node) for quote in "\"'")
