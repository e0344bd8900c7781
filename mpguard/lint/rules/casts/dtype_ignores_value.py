from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Diagnostic,
    Dtype,
    Facts,
    Record,
    Rule,
    any_of,
    constant,
    lattice,
    lazy_pattern,
    library_names,
)

#: Names of options that select the precision of a run.
_OPTION = lazy_pattern(r"(?:\w+_)?(?:mixed_precision|precision|dtype)")
_VALUES = ("fp16", "bf16", "float16", "bfloat16", "half")
_COMPARED = [f"== {quote}{value}{quote}".encode() for value in _VALUES for quote in "\"'"]


class DtypeIgnoresValue(Rule, form_of="MPG310"):
    """A dtype is chosen for one value of an option, and a config of the project gives the other one.

    The value falls into the `else` branch: the run computes in FP32, without a message, and needs more memory and time.

    Values of commands outside of the project are unknown. Accelerate's own `mixed_precision` does not count.
    """

    message = "`{option}` is `{value}` in a config of the project, for which this gives {given}"
    help = "choose a dtype for each value of the option, and refuse others"
    triggers = (any_of(*_COMPARED), any_of(b"float32"), any_of(b"precision", b"dtype"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for scope in facts.scopes:
            for uses in scope.uses.values():
                for use in uses:
                    option = use.path.rpartition(".")[2]
                    chosen = self._chosen(use.node, use, facts) if _OPTION.fullmatch(option) else None
                    if chosen is None:
                        continue
                    for value in _VALUES:
                        dtype = library_names.DTYPE_STRINGS.get(value)
                        if dtype in chosen or not facts.project.gives_unhandled(facts.path, option, value):
                            continue
                        yield self.at(use, option=option, value=value, given=chosen[1].label)
                        break

    def _chosen(self, node: cst.CSTNode, at: Record, facts: Facts) -> tuple[Dtype, Dtype] | None:
        """Return the dtypes of `low if option == "low" else FP32`."""
        compared = facts.parent(node)
        choice = facts.parent(compared) if isinstance(compared, cst.Comparison) else None
        if not isinstance(choice, cst.IfExp) or choice.test is not compared or not isinstance(compared, cst.Comparison):
            return None
        target = compared.comparisons[0]
        value = constant(target.comparator)
        if len(compared.comparisons) != 1 or not isinstance(target.operator, cst.Equal) or value is None:
            return None
        found = [self._dtype(each, at, facts) for each in (choice.body, choice.orelse)]
        low, other = found
        if low not in HALF_DTYPES or other is not Dtype.FP32 or library_names.DTYPE_STRINGS.get(str(value[0])) != low:
            return None
        return low, other

    def _dtype(self, node: cst.BaseExpression, at: Record, facts: Facts) -> Dtype | None:
        values = facts.evaluate(node, at)
        atom = values[0].atom if len(values) == 1 else None
        return atom.dtype if isinstance(atom, lattice.DtypeValue) and isinstance(atom.dtype, Dtype) else None
