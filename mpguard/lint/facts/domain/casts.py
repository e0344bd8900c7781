"""What a cast changes: a model or a tensor, all of a model or a part of it, and whether it rounds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events import Event
from mpguard.lint.facts.domain.optimizers import is_parts
from mpguard.lint.facts.program import api_names, project_words, roles
from mpguard.lint.facts.program.dtypes import AnyDtype, PossibleDtypes
from mpguard.lint.facts.program.lattice import Function, Object
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import Flag, PathCondition, negated
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

#: The condition under which a loop casts what is not trained.
_FROZEN = negated(Flag("requires_grad"))
#: What gives the tensors of a checkpoint.
_LOADS = frozenset({"state_dict", "load", "load_file", "safe_open"})
#: Functions whose results are zeros and ones; names of losses and masks.
_ZEROS_AND_ONES = frozenset({"one_hot", "eq", "ne", "gt", "lt", "ge", "le", "bool", "isnan", "isinf", "bernoulli"})
_MASK = lazy_pattern(r"(?i)mask")


class CastFacts:
    """The casts in one file, and other events that set a dtype."""

    def __init__(self, facts: DomainView) -> None:
        self.facts = facts

    def is_replaced_by_callers(self, cast: Event, dtype: AnyDtype | str) -> bool:
        """True if a dtype is only what a parameter falls back to (`if dtype is None`), and all calls pass another."""
        scope, facts = cast.scope, self.facts
        for given in (*cast.call.positional, *cast.call.keywords.values()):
            name = dotted(given)
            bindings = scope.bindings.get(name, [])
            calls = facts.callers(scope) if [each.kind for each in bindings] == ["param", "assign"] else []
            fallback = rf"\bif (?:not {name}|{name} is None)\s*:\s*{name}\s*="
            if not calls or re.search(fallback, scope.chunk.text) is None:
                continue
            passed = [(facts.values.given(call, scope, name), call) for call in calls]
            if all(
                value is not None and _is_another(facts.of(call).dtypes(value, call), dtype) for value, call in passed
            ):
                return True
        return False

    def is_quantized_next(self, cast: Event) -> bool:
        """True if integers replace the weights after a cast: `net.half().quantize(4)`, `net = net.quantize(4)`."""
        bound = self.facts.bound_to(cast.call)
        return any(
            call.scope is cast.scope
            and not call.guard - cast.guard
            and (
                call.receiver is cast.call.node
                or (bound is not None and call.order > bound.order and dotted(call.receiver) == bound.key)
            )
            for call in self.facts.calls.get("quantize", ())
        )

    def is_exact(self, cast: Event) -> bool:
        """True if a cast rounds nothing: of a mask, or of other zeros and ones."""
        if isinstance(cast.subject, (cst.Comparison, cst.BooleanOperation)):
            return True
        bound = self.facts.bindings(cast.key, cast.call) if cast.key and "." not in cast.key else []
        if bound and all(each.kind == "assign" and isinstance(each.value, cst.Comparison) for each in bound):
            return True
        if isinstance(cast.subject, cst.Call):
            return dotted(cast.subject.func).rsplit(".", 1)[-1] in _ZEROS_AND_ONES
        return bool(_MASK.search(cast.key.rsplit(".", 1)[-1])) and not self.is_module(cast)

    def cast_model(self, cast: Event) -> tuple[str, Record] | None:
        """Return the name and record of the model whose parts are cast.

        They are cast in a loop over them, or by the function that `apply` takes.
        """
        parents = self.facts.index.parents
        above = parents.get(cast.call.node)
        if isinstance(above, cst.Lambda):
            arg = parents.get(above)
            call = self.facts.index.call_of.get(parents[arg]) if isinstance(arg, cst.Arg) else None
            return self._applied(call) if call is not None and call.name == "apply" else None
        if cast.call.is_statement and isinstance(cast.subject, cst.Subscript) and (key := dotted(cast.subject.value)):
            return key, cast.call  # model[0].half()
        if cast.call.is_statement and cast.key == "self":
            return self._instance(cast.scope)
        part = cast.key.removesuffix(".data")
        changed = cast.call.is_statement or (
            isinstance(above, cst.Assign) and any(dotted(target.target) == f"{part}.data" for target in above.targets)
        )
        if not changed or not part or "." in part or _FROZEN in cast.call.guard:
            return None
        if any(map(project_words.PARTLY_FROZEN.search, cast.call.guard.flags())):
            return None
        for binding in self.facts.values.reaching(part, cast.scope, cast.order):
            if binding.kind == "for":
                return self._looped(binding)
            if binding.kind == "param":
                return self._applied_function(binding.scope)
        return None

    def _instance(self, scope: Scope) -> tuple[str, Record] | None:
        """Return the name of an object whose class casts itself in `__init__`, and where it is created."""
        owner = scope.owner
        if scope.name != "__init__" or owner is None or self.facts.class_kind(owner) != "model":
            return None
        for facts in (self.facts, *(self.facts.users(owner.name) or ())):
            for call in facts.calls.get(owner.name, ()):
                bound = facts.bound_to(call)
                if bound is not None and (call.receiver is None or facts is not self.facts):
                    return bound.key, bound
        return None

    def _looped(self, binding: Binding) -> tuple[str, Record] | None:
        over = binding.value
        if isinstance(over, (cst.Tuple, cst.List)):  # for each in (encoder, decoder)
            keys = [dotted(element.value) for element in over.elements]
            named = (key for key in keys if key and not self.facts.frozen_params.is_frozen_name(key))
            key = next(named, "")
            return (key, binding) if key else None
        if isinstance(over, cst.Call) and isinstance(over.func, cst.Attribute) and is_parts(over.func.attr.value):
            over = over.func.value
        elif isinstance(over, cst.Attribute):  # model.layers
            over = over.value
        key = dotted(over)
        return (key, binding) if key and key != "self" else None

    def _applied(self, call: Call) -> tuple[str, Record] | None:
        key = dotted(call.receiver)
        return (key, call) if key and key != "self" else None

    def _applied_function(self, scope: Scope) -> tuple[str, Record] | None:
        """Return the model that a function of the file is applied to, if there is one."""
        for call in self.facts.calls.get("apply", ()):
            given = self.facts.evaluate(call.argument(0, "fn"), call)
            if any(isinstance(each.atom, Function) and each.atom.scope is scope for each in given):
                return self._applied(call)
        return None

    def is_rounding_or_copy(self, cast: Event, dtype: AnyDtype | str) -> bool:
        """True if the cast only rounds (`.half().float()`), or makes a copy for a checkpoint."""
        parents = self.facts.index.parents
        above = parents.get(cast.call.node)
        if isinstance(above, cst.Attribute) and above.attr.value in api_names.UPCASTS:
            return True
        if isinstance(above, cst.Attribute) and above.attr.value == "to":
            outer = self.facts.index.call_of.get(parents[above])
            if outer is not None and any(e.call is outer and not e.may_be(dtype) for e in self.facts.events("cast")):
                return True
        if isinstance(cast.subject, cst.Call) and dotted(cast.subject.func).endswith("deepcopy"):
            return True
        return cast.subject is not None and not self.is_module(cast) and self._from_checkpoint(cast.subject, cast.call)

    def _from_checkpoint(self, node: cst.CSTNode, at: Record, depth: int = 6) -> bool:
        """True if a value is a checkpoint or a part of one: `state["weight"]`, `v` in `for k, v in state.items()`."""
        parts: list[tuple[cst.BaseExpression | None, Record]]
        if isinstance(node, cst.Call):
            call = self.facts.index.call_of.get(node)
            if call is None or (call.name in _LOADS and "model" not in self.facts.kinds(node, call)):
                return call is not None
            returns = [each for function in self.facts.functions(call) for each in function.scope.returns]
            parts = [(each.value, each) for each in returns] or [(call.receiver, at)]
        elif isinstance(node, cst.Subscript):
            parts = [(node.value, at)]
        elif roles.CHECKPOINTS.search(dotted(node)):
            return True
        else:
            bindings = self.facts.values.reaching(dotted(node), at.scope, at.order, at.guard)
            parts = [(each.value, each) for each in bindings if each.kind != "param"]
            if not parts and isinstance(node, cst.Attribute):  # v.data
                parts = [(node.value, at)]
        return depth > 0 and any(
            part is not None and self.facts.of(record) is self.facts and self._from_checkpoint(part, record, depth - 1)
            for part, record in parts
        )

    def is_cast_back(self, event: Event) -> bool:
        """True if the trained parameters are cast back to FP32, after the cast of the model, in the same function.

        By a loop (`for p in net.parameters(): p.data = p.data.float()`), or by `cast_training_params` of diffusers.
        """
        bound = self.facts.bound_to(event.call)
        whole = self.cast_model(event) if event.kind == "cast" else None
        model = bound.key if bound is not None else whole[0] if whole is not None else event.key
        casts = (call for call in event.scope.calls if call.name == "cast_training_params" and call.order > event.order)
        if any(model in _parts(call.argument(0, "model")) for call in casts):
            return True
        return any(
            each.order > event.order
            and key.endswith(".data")
            and isinstance(each.value, cst.Call)
            and self._is_upcast(each.value, key.removesuffix(".data"))
            and PathCondition(each.guard - event.guard).flags() <= {"requires_grad"}
            and any(
                loop.kind == "for" and (looped := self._looped(loop)) is not None and looped[0] == model
                for loop in self.facts.values.reaching(key.removesuffix(".data"), each.scope, each.order)
            )
            for key, bindings in event.scope.bindings.items()
            for each in bindings
        )

    def _is_upcast(self, node: cst.Call, name: str) -> bool:
        """True for `p.float()`, `p.data.to(torch.float32)` and the like."""
        owner, _, method = dotted(node.func).rpartition(".")
        call = self.facts.index.call_of.get(node)
        if owner not in (name, f"{name}.data") or call is None:
            return False
        dtypes = self.facts.dtypes(call.argument(0, "dtype"), call) if method == "to" else ()
        return method in api_names.UPCASTS or any(dtype is Dtype.FP32 for _, dtype in dtypes)

    def is_module(self, event: Event) -> bool:
        """True if the object that is cast or loaded is a model: by its origin, or by how it is used."""
        if event.kind == "load":
            return "weightless" not in self.facts.kinds(event.call.node, event.call)
        kinds = self.facts.kinds(event.subject, event.call)
        if (
            event.kind == "construct"
            or kinds & {"model", "parameters"}
            or event.call.is_statement
            or self.cast_model(event) is not None
        ):
            return True
        if "tensor" in kinds:
            return False
        bound = self.facts.bound_to(event.call)
        keys = {event.key, bound.key if bound is not None else ""} - {""}
        if bound is not None and self._is_called(bound):
            return True
        return bool({key.rsplit(".", 1)[-1] for key in keys} & self.facts.module_names)

    def is_own_layer(self, cast: Event) -> bool:
        """True if a module of the project casts a layer where it creates it: `self.up = nn.Linear(8, 8).to(dtype)`."""
        bound = self.facts.bound_to(cast.call)
        if cast.kind != "cast" or bound is None or not bound.key.startswith("self.") or cast.scope.name != "__init__":
            return False
        made = [each.atom for each in self.facts.evaluate(cast.subject, cast.call)]
        return isinstance(cast.subject, cst.Call) and all(
            isinstance(atom, Object) and atom.kind == "model" and (atom.cls or atom.path.startswith("torch.nn."))
            for atom in made
        )

    def may_be_low(self, created: Call) -> bool:
        """True if an object may not have FP32 weights: it is loaded in a dtype, or a cast of the file changes it."""
        if created.argument(None, "dtype", "torch_dtype") is not None or created.starred:
            return True
        return any(
            isinstance(each.atom, Object) and each.atom.call is created
            for event in self.facts.events("cast")
            for each in self.facts.evaluate(event.subject, event.call)
        )

    def bound_name(self, cast: Event) -> str:
        """Return the last name of what a cast changes in place, or of what its result is bound to; empty without."""
        bound = self.facts.bound_to(cast.call)
        return (bound.key if bound is not None else cast.key if cast.call.is_statement else "").rsplit(".", 1)[-1]

    def _is_called(self, bound: Binding) -> bool:
        """True if what is bound to a name is called as a function."""
        return any(
            use.path == bound.key
            and isinstance(above := self.facts.parent(use.node), cst.Call)
            and above.func is use.node
            and bound in self.facts.bindings(bound.key, use, use.guard)
            for use in bound.scope.uses.get(bound.key.split(".", 1)[0], ())
        )


def _parts(node: cst.CSTNode | None) -> set[str]:
    """Return the names in `net` or `[net, head]`."""
    parts = [each.value for each in node.elements] if isinstance(node, (cst.List, cst.Tuple)) else [node]
    return {dotted(each) for each in parts} - {""}


def _is_another(dtypes: PossibleDtypes, dtype: AnyDtype | str) -> bool:
    """True if all alternatives of a dtype are known, and none is the given one."""
    return bool(dtypes) and all(isinstance(each, Dtype) and each is not dtype for _, each in dtypes)
