"""Backward data flow: the records that an expression is computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.syntax.nodes import children, dotted
from mpguard.lint.facts.syntax.path_condition import PathCondition, compatible
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Return, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: Expressions followed for one request.
_MAX_EXPRESSIONS = 400
#: Methods of a tensor, and functions of torch, whose results have no gradient.
_CONSTANT_METHODS = frozenset({
    "detach", "detach_", "numpy", "item", "tolist", "argmax", "argsort", "multinomial", "generate", "long", "bool",
})  # fmt: skip
_CONSTANT_FUNCTIONS = frozenset({"torch.tensor", "torch.from_numpy"})


class BackwardFlow:
    """Collects the origins of one expression in `found`, as far back as gradients go."""

    def __init__(self, facts: BehaviourView) -> None:
        self.facts = facts
        self.found: list[Record] = []
        self.seen: set[object] = set()
        self._called: set[Scope] = set()

    def expression(self, node: cst.CSTNode | None, scope: Scope, order: int, guard: PathCondition, depth: int) -> None:
        """Follow the names and calls in an expression."""
        if node is None or depth < 0 or node in self.seen or len(self.seen) > _MAX_EXPRESSIONS:
            return
        self.seen.add(node)
        if type(node) is cst.Call:
            if self._has_no_gradient(node, scope, order):
                return
            call = self.facts.of(scope).index.call_of.get(node)
            if call is not None:
                self.found.append(call)
                self.call(call, guard, depth)
        if (type(node) is cst.Name or type(node) is cst.Attribute) and (path := dotted(node)):
            self.name(path, scope, order, guard, depth)
            return
        for child in children(node):
            self.expression(child, scope, order, guard, depth)

    def name(self, path: str, scope: Scope, order: int, guard: PathCondition, depth: int) -> None:
        """Follow a dotted name to its reaching definitions, and a parameter to the arguments of the callers."""
        if path == "_":
            return  # a value that is not used
        parts, facts = path.split("."), self.facts.of(scope)
        for length in range(len(parts), 0, -1):
            if self.facts.flow.exhausted:
                return
            key = ".".join(parts[:length])
            bindings = [
                b
                for b in self.facts.flow.between(scope.bindings.get(key, ()), -1, order)
                if compatible(b.guard, guard) and b.kind in ("assign", "element", "augmented", "item", "with", "for")
            ] or facts.values.reaching(key, scope, order, guard)
            for binding in bindings:
                if binding in self.seen:
                    continue
                self.seen.add(binding)
                if self._has_no_gradient(binding.value, binding.scope, binding.order):
                    continue
                if binding.kind in ("assign", "element", "augmented", "item", "for", "with"):
                    self.found.append(binding)
                    if not self._is_constant(binding):
                        self.expression(binding.value, binding.scope, binding.order, guard, depth)
                        self._added(binding, order, guard, depth)
                elif binding.kind == "param" and binding.scope not in self._called:  # else its argument is followed
                    for call in facts.callers(binding.scope):
                        given = facts.values.given(call, binding.scope, binding.key)
                        if given is not None and given is not binding.value:
                            self.expression(given, call.scope, call.order, guard, depth - 1)
            if bindings:
                return

    def _added(self, made: Binding, order: int, guard: PathCondition, depth: int) -> None:
        """Follow what a function adds to a list that it makes, before the place where the list is read."""
        if not isinstance(made.value, cst.List) or made.value.elements or made.scope.kind != "function":
            return
        for call in made.scope.calls:
            adds = (
                call.name in api_names.ADDS_TO_CONTAINER and dotted(call.receiver) == made.key and bool(call.positional)
            )
            if adds and made.order < call.order < order and compatible(call.guard, guard):
                self.expression(call.positional[-1], call.scope, call.order, guard, depth)

    def _is_constant(self, binding: Binding) -> bool:
        """True for a value that is bound inside `torch.no_grad()`: no gradient goes further back."""
        return bool(binding.withs) and any(
            region.kind == "no_grad" for region in self.facts.of(binding).regions(binding)
        )

    def call(self, call: Call, guard: PathCondition, depth: int) -> None:
        """Follow a call to the values that its functions return."""
        for function in self.facts.functions(call):
            scope = function.scope
            foreign = function.facts is not self.facts and not function.facts.may_train
            if scope in self.seen or foreign or scope.name == "__init__":
                continue
            self.seen.add(scope)
            self._called.add(scope)
            returns = [each for each in scope.returns if each.value is not None]
            with_gradient = [each for each in returns if self._may_have_gradient(each)]
            if returns and not with_gradient:
                continue
            self.found += [each for each in scope.calls if not self._loses_gradient(each)]
            for each in with_gradient:
                if compatible(each.guard, guard):
                    self.expression(each.value, scope, each.order, guard, depth - 1)

    def _may_have_gradient(self, given: Return) -> bool:
        """True if a function may return a value with a gradient: not of `@torch.no_grad()`, nor `x.cpu().numpy()`."""
        regions = self.facts.of(given).regions(given)
        if any(each.kind == "no_grad" and each.guard.possible and not each.guard - given.guard for each in regions):
            return False
        parts = [each.value for each in given.value.elements] if isinstance(given.value, cst.Tuple) else [given.value]
        return not all(self._has_no_gradient(part, given.scope, given.order) for part in parts)

    def _loses_gradient(self, call: Call) -> bool:
        """True if a call has no gradient, or the expression that uses it: `model(x)` in `model(x).argmax()`."""
        parents = self.facts.of(call).index.parents
        node: cst.CSTNode | None = call.node
        while isinstance(node, (cst.Call, cst.Attribute, cst.Subscript)):
            if self._has_no_gradient(node, call.scope, call.order):
                return True
            node = parents.get(node)
        return False

    def _has_no_gradient(self, node: cst.CSTNode | None, scope: Scope, order: int) -> bool:
        """True for `x.detach()`, `x.numpy().astype(...)`, `frozen.encode(x).sample()`: no gradient goes through it."""
        if isinstance(node, cst.Call) and dotted(node.func) in _CONSTANT_FUNCTIONS:
            return True
        inner = node
        while isinstance(inner, (cst.Call, cst.Attribute)):
            if isinstance(inner, cst.Call):
                name = inner.func.attr.value if isinstance(inner.func, cst.Attribute) else ""
                if name in _CONSTANT_METHODS and (name == "numpy" or inner is node):
                    return True
                if self._is_frozen(inner, scope) and all(self._is_data(arg.value, scope, order) for arg in inner.args):
                    return True
            inner = inner.func if isinstance(inner, cst.Call) else inner.value
        return False

    def _is_frozen(self, node: cst.Call, scope: Scope) -> bool:
        """True for a call of a frozen model, or of a method of one."""
        path = dotted(node.func)
        models = (path, path.rpartition(".")[0])
        frozen = self.facts.of(scope).frozen_params
        return any(each and frozen.is_frozen_name(each, by_eval=False) for each in models)

    def _is_data(self, node: cst.BaseExpression, scope: Scope, order: int) -> bool:
        """True for an expression that no model computes: it comes from a loop, and is only moved."""
        if isinstance(node, cst.Call):
            moves = isinstance(node.func, cst.Attribute) and node.func.attr.value in api_names.SAME
            return moves and self._is_data(cst.ensure_type(node.func, cst.Attribute).value, scope, order)
        path = dotted(node)
        if not path:
            return isinstance(node, cst.Subscript) and self._is_data(node.value, scope, order)
        bindings = self.facts.of(scope).values.reaching(path, scope, order)
        return bool(bindings) and all(
            each.kind == "for"
            or (each.value is not None and each.order < order and self._is_data(each.value, scope, each.order))
            for each in bindings
        )
