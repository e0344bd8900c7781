"""The models that are never trained: frozen, or only evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.behaviour.events.event import creates_optimizer
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.callgraph import CallGraph
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.records import Binding, Scope, Use

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: Names of helpers that freeze their argument, for helpers outside the file.
_FREEZERS = frozenset({"freeze", "freeze_model", "freeze_params", "freeze_module", "freeze_parameters"})


class FrozenModels:
    """The frozen models of one file, by their (last) name or by expression."""

    def __init__(self, facts: ProgramView) -> None:
        self.facts = facts
        self._named: dict[tuple[str, bool], bool] = {}
        self._frozen_params: dict[Scope, set[str]] = {}
        self._index: tuple[int, dict[str, list[tuple[Use, str, cst.Call]]], dict[str, list[Binding]]] = (-1, {}, {})

    def is_frozen_name(self, key: str, by_eval: bool = True) -> bool:
        """True if a model of this name is never trained: `requires_grad_(False)`, or `eval()` without `train()`.

        by_eval: the latter is enough.
        """
        name = key.rsplit(".", 1)[-1]
        if (name, by_eval) not in self._named:
            self._named[name, by_eval] = bool(name) and name != "self" and self._decides_frozen(name, by_eval)
        return self._named[name, by_eval]

    def is_frozen(self, node: cst.CSTNode) -> bool:
        """True if the value of an expression is frozen.

        The name that it is bound to, or a method on the way there, shows it.
        """
        if (key := dotted(node)) and self.is_frozen_name(key):
            return True
        parents = self.facts.index.parents
        while (parent := parents.get(node)) is not None:
            above = parents.get(parent)
            if isinstance(parent, cst.Attribute) and isinstance(above, cst.Call) and above.func is parent:
                name = parent.attr.value
                if name not in api_names.SAME:
                    return False
                if name == "requires_grad_" and above.args and constant(above.args[0].value) == (False,):
                    return True
                node = above
            elif isinstance(parent, cst.Arg) and isinstance(above, cst.Call):
                return self._freezes_argument(above, parent.value)
            elif isinstance(parent, cst.Assign):
                return any(self.is_frozen_name(dotted(target.target)) for target in parent.targets)
            elif isinstance(parent, cst.AnnAssign):
                return self.is_frozen_name(dotted(parent.target))
            else:
                return False
        return False

    def _decides_frozen(self, name: str, by_eval: bool) -> bool:
        methods, made = self._by_name()
        optimized = {use.scope for use, method, call in methods.get(name, ()) if self._is_optimized(method, call)}
        frozen = evaluated = False
        trained = bool(optimized)
        for use, method, call in methods.get(name, ()):
            given = constant(call.args[0].value) if call.args else None
            if method == "eval" and not call.args:  # another object's `eval` takes what it evaluates
                evaluated = True
            elif method == "train":
                trained = trained or given != (False,)
                evaluated = evaluated or given == (False,)
            freezes = not frozen and self._sets_grad(use, method, call, False) and not _is_another(name, use, optimized)
            frozen = frozen or (freezes and not (self._trained_before(use, name) or self._in_turns(use, name)))
        frozen = frozen or self._is_frozen_layer(name) or (not optimized and self._is_frozen_member(name))
        for binding in made.get(name, ()):
            chain = _method_chain(binding.value)
            frozen = frozen or chain.get("requires_grad_") == (False,) or self._returned_by_freezer(binding)
            evaluated = evaluated or "eval" in chain
        return frozen or self._passed_to_freezer(name) or (by_eval and evaluated and not trained)

    def _is_frozen_layer(self, name: str) -> bool:
        """True for a layer without bias whose weight is frozen: `layer.weight.requires_grad_(False)`."""
        methods, made = self._by_name()
        return any(
            use.path.endswith(f"{name}.weight.{method}") and self._sets_grad(use, method, call, False)
            for use, method, call in methods.get("weight", ())
        ) and all(_has_no_bias(binding.value) for binding in made.get(name, ()))

    def _is_frozen_member(self, name: str) -> bool:
        """True if a loop over several models freezes each: `for m in (vae, net):`, or a list that got the model.

        The name is bound in that function only, and nothing trains a part of it again.
        """
        methods, made = self._by_name()
        scopes = {binding.scope for binding in made.get(name, ())}
        loops = [
            (key, each)
            for key, bindings in made.items()
            for each in bindings
            if each.kind == "for" and each.loops and each.scope in scopes and self._is_member(name, each)
        ]
        if not loops or len(scopes) != 1 or self._may_be_thawed(name):
            return False
        inside = [
            (use, method, call)
            for key, each in loops
            for use, method, call in methods.get(key, ())
            if use.scope is each.scope and each.loops[-1] in use.loops
        ]
        freezes = [use for use, method, call in inside if self._sets_grad(use, method, call, False)]
        others = [
            use
            for use, method, call in inside
            if use not in freezes and (method == "requires_grad_" or self._sets_grad(use, method, call, True))
        ]
        return not others and any(not use.guard - loop.guard for use in freezes for _, loop in loops)

    def _may_be_thawed(self, name: str) -> bool:
        """True if a part of the model is trained, or a helper gets it and True: `set_requires_grad([net], True)`."""
        if any(
            f".{name}." in f".{use.path}" and self._sets_grad(use, method, call, True)
            for uses in self._by_name()[0].values()
            for use, method, call in uses
        ):
            return True

        def names(value: cst.BaseExpression) -> bool:
            parts = [each.value for each in value.elements] if isinstance(value, (cst.List, cst.Tuple)) else [value]
            return any(dotted(each).rpartition(".")[2] == name for each in parts)

        calls = (call for scope in self.facts.index.scopes for call in scope.calls)
        given = ((*call.positional, *call.keywords.values()) for call in calls)
        return any(any(map(names, each)) and any(constant(value) == (True,) for value in each) for each in given)

    def _is_member(self, name: str, loop: Binding) -> bool:
        """True if a loop runs over a literal with a name, or over a list of the same function that got it."""
        given = loop.value
        if isinstance(given, (cst.Tuple, cst.List)):
            return any(dotted(each.value).rpartition(".")[2] == name for each in given.elements)
        return any(
            call.name == "append"
            and dotted(call.receiver) == dotted(given)
            and dotted(call.argument(0)).rpartition(".")[2] == name
            and call.order < loop.order
            for call in loop.scope.calls
        )

    def _by_name(self) -> tuple[dict[str, list[tuple[Use, str, cst.Call]]], dict[str, list[Binding]]]:
        """Return, by the last name of an object, the calls of its methods and its bindings."""
        walker = self.facts.index
        if self._index[0] != self.facts.parsed_bytes:
            methods: dict[str, list[tuple[Use, str, cst.Call]]] = {}
            made: dict[str, list[Binding]] = {}
            for scope in walker.scopes:
                for use in _uses(scope):
                    parts = use.path.rsplit(".", 2)
                    parent = walker.parents.get(use.node)
                    if len(parts) > 1 and isinstance(parent, cst.Call):
                        methods.setdefault(parts[-2], []).append((use, parts[-1], parent))
                for key, bindings in scope.bindings.items():
                    made.setdefault(key.rsplit(".", 1)[-1], []).extend(bindings)
            self._index = self.facts.parsed_bytes, methods, made
        return self._index[1:]

    def _sets_grad(self, use: Use, method: str, call: cst.Call, value: bool) -> bool:
        """True if a method call on a name sets `requires_grad` to a value, as `m.requires_grad_(False)` does.

        That may be the call whose result a loop runs over: `for p in m.parameters()`.
        """
        if method == "requires_grad_":
            return constant(call.args[0].value) == (value,) if call.args else value
        if method not in ("parameters", "named_parameters"):
            return False
        above = self.facts.index.parents.get(call)
        loop = above if isinstance(above, cst.For) else use.loops[-1] if use.loops else None
        return isinstance(loop, cst.For) and _loop_sets_grad(use.scope, loop, value)

    def _in_turns(self, use: Use, name: str) -> bool:
        """True if a loop in which a model is frozen trains it again, as that of a GAN."""
        return bool(use.loops) and any(
            each.scope is use.scope and set(each.loops) & set(use.loops) and self._sets_grad(each, method, call, True)
            for each, method, call in self._by_name()[0].get(name, ())
        )

    def _trained_before(self, use: Use, name: str) -> bool:
        """True if an optimizer takes all parameters of a model before a use in the same function, and trains them."""
        methods, made = self._by_name()
        earlier = [
            each
            for each, method, call in methods.get(name, ())
            if method == "parameters" and each.scope is use.scope and each.order < use.order and self._optimized(call)
        ]
        if not earlier or use.guard != earlier[-1].guard:
            return False
        after = earlier[-1].order
        passed = any(
            dotted(value).rsplit(".", 1)[-1] == name and after < call.order < use.order
            for call in use.scope.calls
            for value in call.positional
        )
        rebound = any(each.scope is use.scope and after < each.order < use.order for each in made.get(name, ()))
        called = any(each.scope is use.scope and after < each.order < use.order for each, _, _ in methods.get(name, ()))
        return (passed or called) and not rebound

    def _is_optimized(self, method: str, call: cst.Call) -> bool:
        """True for the parameters of an object that an optimizer takes."""
        return method in ("parameters", "named_parameters") and self._optimized(call)

    def _optimized(self, call: cst.Call) -> bool:
        """True if the result of a call is passed to an optimizer."""
        parents = self.facts.index.parents
        above = parents.get(call)
        outer = self.facts.index.call_of.get(parents[above]) if isinstance(above, cst.Arg) else None
        return outer is not None and creates_optimizer(self.facts, outer)

    # -- helpers ------------------------------------------------------------------------------------

    def _params_frozen_by(self, scope: Scope) -> set[str]:
        """Return the parameters that a function freezes."""
        if scope not in self._frozen_params:
            self._frozen_params[scope] = found = set()
            params = {param.name for param in scope.params} - {"self"}
            for use in _uses(scope):
                root, _, method = use.path.partition(".")
                parent = self.facts.index.parents.get(use.node)
                always = root in params and not (use.guard - scope.guard)
                if always and isinstance(parent, cst.Call) and self._sets_grad(use, method, parent, False):
                    found.add(root)
        return self._frozen_params[scope]

    def _freezes_argument(self, node: cst.Call, value: cst.BaseExpression) -> bool:
        """True if a call freezes its argument."""
        call = self.facts.index.call_of.get(node)
        if call is None:
            return False
        if call.name in _FREEZERS:
            return True
        return any(
            self.facts.values.given(call, scope, name) is value
            for scope in self.facts.part(CallGraph).named(call.name)
            for name in self._params_frozen_by(scope)
        )

    def _passed_to_freezer(self, name: str) -> bool:
        """True if an object of this name is passed to a helper that freezes it."""
        helpers = {
            s.name for s in self.facts.index.scopes if s.kind == "function" and self._params_frozen_by(s)
        } | _FREEZERS

        def is_passed(value: cst.BaseExpression) -> bool:
            return dotted(value).rsplit(".", 1)[-1] == name

        return any(
            is_passed(value) and self._freezes_argument(call.node, value)
            for helper in helpers
            if not any(is_passed(each) for call in self.facts.calls.get(f"un{helper}", ()) for each in call.positional)
            for call in self.facts.calls.get(helper, ())
            for value in call.positional
        )

    def _returned_by_freezer(self, binding: Binding) -> bool:
        """True if a binding's value is returned by a helper that freezes it."""
        value = binding.value
        return isinstance(value, cst.Call) and any(self._freezes_argument(value, arg.value) for arg in value.args)


def _is_another(name: str, use: Use, optimized: set[Scope]) -> bool:
    """True if a function uses an object that it makes itself, and the optimizer takes one of that name elsewhere."""
    own = any(binding.kind == "assign" for binding in use.scope.bindings.get(name, ()))
    near = {*use.scope.within(), *use.scope.descendants()}
    return own and use.scope.kind == "function" and bool(optimized) and not optimized & near


def _uses(scope: Scope) -> Iterator[Use]:
    for uses in scope.uses.values():
        yield from uses


def _loop_sets_grad(scope: Scope, loop: cst.For, value: bool) -> bool:
    """True if a loop sets the `requires_grad` of its target, which for False may be by a method with any argument."""
    target = loop.target
    keys = [dotted(e.value) for e in target.elements] if isinstance(target, cst.Tuple) else [dotted(target)]
    for key in keys:
        for binding in scope.bindings.get(f"{key}.requires_grad", ()):
            if loop in binding.loops and constant(binding.value) == (value,) and not (binding.guard - scope.guard):
                return True
        for use in scope.uses.get(key, ()):
            if not value and use.path == f"{key}.requires_grad_" and loop in use.loops:
                return True
    return False


def _has_no_bias(node: cst.CSTNode | None) -> bool:
    """True for a layer that is created with `bias=False`; methods may follow."""
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and isinstance(node.func.value, cst.Call):
        node = node.func.value
    return isinstance(node, cst.Call) and any(
        arg.keyword is not None and arg.keyword.value == "bias" and constant(arg.value) == (False,) for arg in node.args
    )


def _method_chain(node: cst.CSTNode | None) -> dict[str, tuple[object] | None]:
    """Return the methods of a chain such as `Net().half().eval()`, each with its first literal argument."""
    found: dict[str, tuple[object] | None] = {}
    while isinstance(node, cst.Call):
        if not isinstance(node.func, cst.Attribute):
            break
        found[node.func.attr.value] = constant(node.args[0].value) if node.args else None
        node = node.func.value
    return found
