"""Python numbers that are combined with tensors: the fill value of a mask, an epsilon, a limit.

`scalars.uses` returns each place with the tensor and the number. `scalars.number` evaluates an expression to a number:
a literal, arithmetic of numbers, a name or a default that stands for one, `torch.finfo(torch.float32).min`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import libcst as cst

from mpguard.lint.facts.behaviour.precision import TensorDtypes
from mpguard.lint.facts.program.dtypes import only_dtype
from mpguard.lint.facts.program.lattice import Constant, Function, Object, Ref, TupleValue
from mpguard.lint.facts.program.mappings import is_intact
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.records import Binding, Call, Record
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: Effect of a number beyond the dtype's range: `raises` an error, or becomes `inf`.
How = Literal["raises", "inf"]
_MAX_DEPTH = 12
_INFINITE = frozenset({"math.inf", "numpy.inf", "torch.inf"})
#: A limit of the norm of gradients beyond this clips nothing: with the first scale, 65536, a norm of 15 stays below.
_NO_LIMIT = 1e6
#: Method or function -> position of the number after the tensor, and its keyword.
_FILLS = {
    "masked_fill": (1, "value"), "masked_fill_": (1, "value"), "full_like": (0, "fill_value"), "fill_": (0, "value"),
    "new_full": (1, "fill_value"), "index_fill": (2, "value"), "index_fill_": (2, "value"), "pad": (2, "value"),
}  # fmt: skip
_CLAMPS = {
    "clamp": ("min", "max"), "clamp_": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",),
    "clamp_min_": ("min",), "clamp_max": ("max",), "clamp_max_": ("max",),
}  # fmt: skip
#: Formats whose `finfo` is evaluated, by name.
_FLOATS = {dtype.torch_name: dtype for dtype in Dtype if dtype.bits >= 16}
_FINFO = frozenset(_FLOATS.values())
_SUMS_AND_PRODUCTS: frozenset[type] = frozenset({cst.Add, cst.Subtract, cst.Multiply})


@dataclasses.dataclass(frozen=True)
class Number:
    """The value of an expression; `limit_of` is the dtype from whose `finfo` it is taken, or None."""

    value: float
    limit_of: Dtype | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ScalarUse:
    """A number that is combined with a tensor.

    kind: `fill`, `clamp`, `where`, `item`, `add` or `scale`. name: the function or operator.
    """

    kind: Literal["fill", "clamp", "where", "item", "add", "scale"]
    name: str
    record: Record
    tensor: cst.BaseExpression
    node: cst.BaseExpression
    number: Number
    #: For a `clamp`: the number is the lower limit.
    lower: bool = False

    @property
    def how(self) -> How:
        """The effect of a number that the tensor's dtype cannot represent (measured with torch 2.13 on a CPU)."""
        return "raises" if self.kind in ("fill", "clamp") else "inf"

    @property
    def span(self) -> tuple[int, int]:
        """Start and end of the number in `Source.text`."""
        return self.record.chunk.span(self.node)


class Scalars:
    """The Python numbers of one file."""

    def __init__(self, facts: BehaviourView) -> None:
        self.facts = facts
        self._known: dict[cst.CSTNode, Number | None] = {}

    # -- numbers ------------------------------------------------------------------------------------

    def number(self, node: cst.CSTNode | None, at: Record, depth: int = _MAX_DEPTH) -> Number | None:
        """Return the number that an expression evaluates to in every visible call; None if it is unknown."""
        if node is None or depth < 0:
            return None
        if (facts := self.facts.of(at)) is not self.facts:
            return facts.part(Scalars).number(node, at, depth)
        if node not in self._known:
            self._known[node] = None  # a name that is defined by itself has no value
            self._known[node] = self._number(node, at, depth)
        return self._known[node]

    def _number(self, node: cst.CSTNode, at: Record, depth: int) -> Number | None:
        literal = constant(node)
        if literal is not None:
            value = literal[0]
            return Number(float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
            inner = self.number(node.expression, at, depth - 1)
            return dataclasses.replace(inner, value=-inner.value) if inner is not None else None
        if isinstance(node, cst.BinaryOperation):
            return self._arithmetic(node, at, depth)
        if isinstance(node, cst.Call):
            return self._called(node, at, depth)
        if isinstance(node, cst.Subscript):
            items = set(self.facts.constants(node, at)) if is_intact(node.value, at, self.facts) else set()
            return self._number(cst.parse_expression(repr(items.pop())), at, depth) if len(items) == 1 else None
        if isinstance(node, cst.Attribute):
            limit = self._limit(node)
            if limit is not None:
                return limit
        path = dotted(node)
        if path.rpartition(".")[2] == "inf":
            atoms = [each.atom for each in self.facts.evaluate(node, at)]
            if all(isinstance(atom, Ref) and atom.path in _INFINITE for atom in atoms):
                return Number(math.inf)
        bindings = self.facts.values.reaching(path, at.scope, at.order, at.guard) if path else []
        if not bindings and isinstance(node, cst.Attribute):
            return self._attribute(node, at, depth)
        if len(bindings) != 1:
            return None
        binding = bindings[0]
        if binding.kind == "from":
            atoms = [each.atom for each in self.facts.evaluate(node, at)]
            value = atoms[0].value if len(atoms) == 1 and isinstance(atoms[0], Constant) else None
            return Number(float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        if binding.kind not in ("assign", "param"):
            return None
        if binding.kind == "assign":
            return self.number(binding.value, binding, depth - 1)
        return self._passed(binding, depth)

    def _passed(self, param: Binding, depth: int) -> Number | None:
        """Return the number that all known calls of a function pass for a parameter, or that is its default.

        The default counts without a call, where a call passes nothing else, and if there may be calls that are unknown.
        """
        scope, default = param.scope, self.number(param.value, param, depth - 1)
        if default is None and param.value is not None:  # `scale=None`: whatever the callers pass
            return None
        calls = self.facts.callers(scope)
        is_known = bool(calls) and not self.facts.escapes(scope)
        if not calls and default is not None:  # those in modules that do not train
            calls = [call for call in self.facts.all_calls(scope) or () if not self.facts.of(call).is_test]
            is_known = bool(calls)
        found = set() if is_known or param.value is None else {default}
        for call in calls:
            given = self.facts.values.given(call, scope, param.key)
            found.add(default if given is param.value else self.number(given, call, depth - 1))
        return found.pop() if len(found) == 1 else None

    def _attribute(self, node: cst.Attribute, at: Record, depth: int) -> Number | None:
        """Return the number that a class of the tree gives to an attribute of its instances, and sets nowhere else."""
        found: set[Number | None] = set()
        for each in self.facts.evaluate(node.value, at):
            atom = each.atom
            if not isinstance(atom, Object) or atom.cls is None or atom.facts is None:
                return None
            bindings = self.facts.attributes(atom.cls).get(node.attr.value, [])
            given = atom.call is None or atom.call.node.args  # what a dataclass is created with replaces its defaults
            if len(bindings) != 1 or bindings[0].kind != "assign" or (bindings[0].scope is atom.cls and given):
                return None
            found.add(self.facts.of(atom.cls).part(Scalars).number(bindings[0].value, bindings[0], depth - 1))
        return found.pop() if len(found) == 1 else None

    def _arithmetic(self, node: cst.BinaryOperation, at: Record, depth: int) -> Number | None:
        left, right = self.number(node.left, at, depth - 1), self.number(node.right, at, depth - 1)
        if left is None or right is None:
            return None
        try:
            if isinstance(node.operator, cst.Multiply):
                found = left.value * right.value
            elif isinstance(node.operator, cst.Divide):
                found = left.value / right.value
            elif isinstance(node.operator, cst.FloorDivide):
                found = left.value // right.value
            elif isinstance(node.operator, cst.Power):
                found = left.value**right.value
            elif isinstance(node.operator, (cst.Add, cst.Subtract)):
                found = left.value + (right.value if isinstance(node.operator, cst.Add) else -right.value)
            else:
                return None
        except (ArithmeticError, ValueError):
            return None
        return Number(found, left.limit_of or right.limit_of) if isinstance(found, float) else None

    def _called(self, node: cst.Call, at: Record, depth: int) -> Number | None:
        call = self.facts.index.call_of.get(node)
        if call is None or call.path not in ("float", "int", "len") or len(call.positional) != 1:
            return None
        if call.path == "len":
            atoms = [each.atom for each in self.facts.evaluate(call.positional[0], call)]
            lengths = {len(atom.parts) if isinstance(atom, TupleValue) else None for atom in atoms}
            length = lengths.pop() if len(lengths) == 1 else None
            return Number(float(length)) if length is not None else None
        text = constant(call.positional[0])
        if text is not None and isinstance(text[0], str):
            try:
                return Number(float(text[0]))
            except ValueError:
                return None
        found = self.number(call.positional[0], at, depth - 1)
        if found is not None and call.path == "int":
            return Number(float(math.trunc(found.value)), found.limit_of) if math.isfinite(found.value) else None
        return found

    def _limit(self, node: cst.Attribute) -> Number | None:
        """Return the value of an attribute of `torch.finfo(...)`, such as `torch.finfo(torch.float32).min`."""
        name = node.attr.value
        if name not in ("min", "max", "eps", "tiny", "smallest_normal") or not isinstance(node.value, cst.Call):
            return None
        call = self.facts.index.call_of.get(node.value)
        if call is None or call.name != "finfo":
            return None
        dtype = only_dtype(self.facts.dtypes(call.argument(0, "type", "dtype"), call))
        for each in self.facts.evaluate(call.argument(0, "type", "dtype"), call):
            if isinstance(each.atom, Ref) and each.atom.path.startswith("numpy."):
                dtype = _FLOATS.get(each.atom.path.rsplit(".", 1)[-1])
        if not isinstance(dtype, Dtype) or dtype not in _FINFO:
            return None
        numbers = {"min": -dtype.largest, "max": dtype.largest, "eps": dtype.eps}
        return Number(numbers.get(name, dtype.smallest_normal), dtype)

    def only_measures(self, clip: Call) -> bool:
        """True for `clip_grad_norm_` with a limit that also scaled gradients do not reach: it measures the norm."""
        limit = clip.argument(1, "max_norm") if clip.name == "clip_grad_norm_" else None
        number = self.number(limit, clip)
        values = [number.value] if number is not None else self.facts.constants(limit, clip)
        return bool(values) and all(isinstance(each, (int, float)) and each >= _NO_LIMIT for each in values)

    # -- uses ---------------------------------------------------------------------------------------

    @cached_property
    def uses(self) -> tuple[ScalarUse, ...]:
        """All places where a known number is combined with a tensor, in order."""
        self.facts.need_all()
        found = [*self._fills(), *self._wheres(), *self._items(), *self._sums()]
        return tuple(sorted(found, key=lambda each: each.record.order))

    def _use(
        self,
        kind: Literal["fill", "clamp", "where", "item", "add", "scale"],
        name: str,
        record: Record,
        tensor: cst.BaseExpression | None,
        node: cst.BaseExpression | None,
        *,
        lower: bool = False,
    ) -> Iterator[ScalarUse]:
        number = self.number(node, record)
        if number is not None and tensor is not None and node is not None:
            yield ScalarUse(kind, name, record, tensor, node, number, lower)

    def _tensor(self, call: Call) -> tuple[cst.BaseExpression | None, int]:
        """Return the tensor of a method or torch function, and the position of its first other argument."""
        atoms = [each.atom for each in self.facts.evaluate(call.func, call)]
        if any(isinstance(atom, Ref) and atom.path.startswith("torch.") for atom in atoms):
            return call.argument(0, "input", "self"), 1
        if any(isinstance(atom, (Ref, Function)) for atom in atoms):
            return None, 0
        return call.receiver, 0

    def _fills(self) -> Iterator[ScalarUse]:
        for name, (place, keyword) in _FILLS.items():
            for call in self.facts.calls.get(name, ()):
                tensor, first = self._tensor(call)
                yield from self._use("fill", name, call, tensor, call.argument(place + first, keyword))
        for name, limits in _CLAMPS.items():
            for call in self.facts.calls.get(name, ()):
                tensor, first = self._tensor(call)
                for place, limit in enumerate(limits):
                    given = call.argument(place + first, limit)
                    yield from self._use("clamp", name, call, tensor, given, lower=limit == "min")
        for call in self.facts.calls.get("full", ()):
            if self.facts.called_path(call) == "torch.full" and "dtype" in call.keywords:
                yield from self._use("fill", "full", call, call.node, call.argument(1, "fill_value"))

    def _wheres(self) -> Iterator[ScalarUse]:
        for call in self.facts.calls.get("where", ()):
            tensor, first = self._tensor(call)
            if first == 0:
                yield from self._use("where", "where", call, tensor, call.argument(1, "other"))
            elif tensor is not None:
                one, other = call.argument(1, "self"), call.argument(2, "other")
                yield from self._use("where", "where", call, one, other)
                yield from self._use("where", "where", call, other, one)
        for call in self.facts.calls.get("add", ()):
            tensor, first = self._tensor(call)
            yield from self._use("add", "add", call, tensor, call.argument(first, "other"))

    def _items(self) -> Iterator[ScalarUse]:
        """Yield assignments to elements: `scores[mask] = -1e9`; and `x += number`."""
        for scope in self.facts.index.scopes:
            for bindings in scope.bindings.values():
                for binding in bindings:
                    if binding.kind == "item" and isinstance(binding.node, cst.Subscript) and not binding.index:
                        yield from self._use("item", "", binding, binding.node.value, binding.value)
                    elif binding.kind == "augmented" and isinstance(binding.node, cst.AugAssign):
                        target = binding.node.target
                        if isinstance(binding.node.operator, cst.AddAssign) and isinstance(target, cst.BaseExpression):
                            yield from self._use("add", "+=", binding, target, binding.value)

    def _sums(self) -> Iterator[ScalarUse]:
        for node in self.facts.index.parents:
            if type(node) is not cst.BinaryOperation or type(node.operator) not in _SUMS_AND_PRODUCTS:
                continue
            record = self.facts.part(TensorDtypes).record(node)
            if record is None:
                continue
            scale = isinstance(node.operator, cst.Multiply)
            sign = "*" if scale else "+" if isinstance(node.operator, cst.Add) else "-"
            for tensor, number in ((node.left, node.right), (node.right, node.left)):
                if sign == "-" and number is node.left:
                    continue
                yield from self._use("scale" if scale else "add", sign, record, tensor, number)
