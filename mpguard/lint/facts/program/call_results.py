"""The results of calls: of functions of the tree, and of the functions and methods of libraries."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program import api_names, config_values
from mpguard.lint.facts.program.lattice import (
    NOTHING_KNOWN,
    UNKNOWN,
    Alternative,
    Alternatives,
    Atom,
    Class,
    Constant,
    DtypeValue,
    Function,
    Method,
    Object,
    Ref,
    TupleValue,
    ref,
    restrict,
    tuple_of,
)
from mpguard.lint.facts.program.option_values import option_values
from mpguard.lint.facts.syntax.conditions import subject
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import (
    ALWAYS,
    Condition,
    Flag,
    PathCondition,
    compatible,
    equality,
)
from mpguard.lint.facts.syntax.records import Call
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import Evaluation, ProgramView


class CallResults:
    """The results of the calls of one file."""

    def __init__(self, facts: ProgramView, values: Evaluation) -> None:
        self.facts, self.values = facts, values

    def of(self, atom: Atom, call: Call) -> Alternatives:
        """Return the alternatives of the result of a call of an abstract value."""
        if isinstance(atom, Ref):
            return self._library_call(atom.path, call)
        if isinstance(atom, Function):
            return self._returned_for(call, atom)
        if isinstance(atom, Class):
            kind = self.facts.class_kind(atom.scope)
            return (Alternative(ALWAYS, Object(kind, call, atom.scope.name, atom.scope, atom.facts)),)
        if isinstance(atom, Method):
            return self._method_call(atom, call)
        if isinstance(atom, Object) and atom.kind == "partial" and not call.node.args:
            return (Alternative(ALWAYS, dataclasses.replace(atom, kind=api_names.kind_of(atom.path))),)
        if isinstance(atom, Object) and atom.cls is not None and atom.facts is not None:
            called = atom.cls.method("__call__")
            return self._returned_for(call, Function(called, atom.facts)) if called is not None else NOTHING_KNOWN
        return NOTHING_KNOWN

    def _library_call(self, path: str, call: Call) -> Alternatives:
        last = path.rsplit(".", 1)[-1]
        if path == "getattr":
            return self._getattr(call)
        if path in ("torch.compile", "copy.copy") or last in api_names.WRAPPERS:
            inner = call.argument(0, "model", "module")
            found = self.values.evaluate(inner, call.scope, call.order)
            if last in api_names.PARALLEL:  # the wrapper's `forward` calls that of the model inside
                inside = [each.atom for each in found if isinstance(each.atom, Object) and each.atom.cls is not None]
                cls = inside[0] if len(inside) == len(found) == 1 else Object("")
                return (Alternative(ALWAYS, Object("model", call, path, cls.cls, cls.facts)),)
            return found
        if path == "copy.deepcopy":
            return tuple(
                Alternative(each.guard, dataclasses.replace(each.atom, call=call))
                if isinstance(each.atom, Object)
                else each
                for each in self.values.evaluate(call.argument(0), call.scope, call.order)
            )
        if path == "torch.device":
            return self.values.evaluate(call.argument(0), call.scope, call.order)
        if path == "torch.set_grad_enabled":
            given = constant(call.argument(0, "mode"))
            return (Alternative(ALWAYS, Object("no_grad", call, path)),) if given == (False,) else NOTHING_KNOWN
        if path == "functools.partial" and call.positional:
            made = [each.atom for each in self.values.evaluate(call.positional[0], call.scope, call.order)]
            paths = [atom.path for atom in made if isinstance(atom, Ref) and _is_known_partial(atom.path, call)]
            return (Alternative(ALWAYS, Object("partial", call, paths[0])),) if len(paths) == 1 else NOTHING_KNOWN
        if config := config_values.of_call(path, call, self.facts):
            return config
        kind = api_names.kind_of(path)
        if kind in ("engine", "apex"):
            return (Alternative(ALWAYS, self._initialized(call, path, kind)),)
        return (Alternative(ALWAYS, Object(kind, call, path)),) if kind else NOTHING_KNOWN

    def _getattr(self, call: Call) -> Alternatives:
        """Evaluate `getattr`.

        Of `torch.optim` with an unknown name it is some optimizer; of `torch` with a string or an option, the dtypes
        that have these names; with a literal name, that attribute.
        """
        owners, name = self.values.evaluate(call.argument(0), call.scope, call.order), constant(call.argument(1))
        if name is not None and isinstance(name[0], str):
            default = call.argument(2)
            other = self.values.evaluate(default, call.scope, call.order) if default is not None else ()
            return (*self.values.attribute(owners, name[0]), *other)
        paths = {each.atom.path for each in owners if isinstance(each.atom, Ref)}
        if paths == {"torch"} and (given := call.argument(1)) is not None:
            return self._dtype_by_name(given, call)
        return (Alternative(ALWAYS, Ref("torch.optim.Optimizer")),) if paths == {"torch.optim"} else NOTHING_KNOWN

    def _dtype_by_name(self, name: cst.BaseExpression, call: Call) -> Alternatives:
        """Return the dtypes of torch whose names an expression may be: a constant, or the values of an option."""
        named = self.values.evaluate(name, call.scope, call.order)
        if not any(isinstance(each.atom, Constant) for each in named):
            for value in option_values(dotted(name).rsplit(".", 1)[-1], self.facts):
                condition = condition_of(subject(name), Constant(value))
                named += (Alternative(ALWAYS.given(condition) if condition else ALWAYS, Constant(value)),)
        found = [
            Alternative(each.guard, ref(f"torch.{each.atom.value}")) if isinstance(each.atom, Constant) else each
            for each in named
        ]
        return tuple(each for each in found if not isinstance(each.atom, Ref)) or NOTHING_KNOWN

    def _initialized(self, call: Call, path: str, kind: str) -> TupleValue:
        kinds = ("model", "apex_optimizer") if kind == "apex" else ("engine", "engine_optimizer", "", "scheduler")
        return tuple_of(*(Object(kind, call, path) if kind else UNKNOWN for kind in kinds))

    def _returned_for(self, call: Call, atom: Function) -> Alternatives:
        """Return what a function may return for the arguments of a call, as far as they are literals."""
        found = self.returned(atom)
        flags = {flag for each in found for flag in each.guard.flags()}
        for param in atom.scope.params if len(found) > 1 else ():
            if param.name not in flags or len(atom.scope.bindings.get(param.name, ())) > 1:
                continue
            given = self.values.evaluate(self.values.given(call, atom.scope, param.name), call.scope, call.order)
            conditions = [condition_of(param.name, each.atom) for each in given]
            if any(condition is None for condition in conditions):
                continue
            known = [ALWAYS.given(condition) for condition in conditions if condition is not None]
            found = tuple(each for each in found if any(compatible(each.guard, one) for one in known))
        return found or NOTHING_KNOWN

    def returned(self, atom: Function) -> Alternatives:
        """Return what a function may return, whatever its arguments are."""
        scope, values = atom.scope, self.facts.of(atom.scope).values
        found: list[Alternative] = []
        for each in scope.returns:
            if each.yields:
                return (Alternative(ALWAYS, Object("context", None, scope.name, scope, atom.facts)),)
            for alternative in values.evaluate(each.value, scope, each.order) if each.value is not None else ():
                if not _is_ruled_out(each.value, alternative.atom, each.guard):
                    found += restrict((alternative,), each.guard)
        return tuple(found) or NOTHING_KNOWN

    def _method_call(self, atom: Method, call: Call) -> Alternatives:
        owner, name = atom.owner, atom.name
        if owner.kind == "accelerator" and name in ("prepare", "prepare_model", "prepare_optimizer"):
            if len(call.positional) == 1 and not call.starred:
                return self._prepared(call.positional[0], call)
            parts = tuple(functools.partial(self._prepared, each, call) for each in call.positional)
            return (Alternative(ALWAYS, TupleValue(parts)),) if not call.starred else NOTHING_KNOWN
        if owner.kind == "accelerator" and name == "autocast":
            return (Alternative(ALWAYS, Object("accelerator_autocast", call)),)
        if owner.kind == "accelerator" and name == "unwrap_model":
            return self.values.evaluate(call.argument(0), call.scope, call.order)
        if owner.kind in ("trainer", "fabric") and name in ("setup", "setup_module", "setup_optimizers"):
            several = len(call.positional) + len(call.keywords) > 1 or call.starred
            return (Alternative(ALWAYS, tuple_of(owner, owner) if several else owner),)
        if owner.kind in ("model", "tensor", "engine", "criterion", "pipeline") and name in api_names.SAME:
            return (Alternative(ALWAYS, owner),)
        if owner.kind == "model" and name in ("parameters", "named_parameters"):
            return (Alternative(ALWAYS, Object("parameters", call, "", owner.cls, owner.facts)),)
        if name in api_names.LOADERS:
            return (Alternative(ALWAYS, dataclasses.replace(owner, call=call)),)
        return NOTHING_KNOWN

    def _prepared(self, node: cst.CSTNode, call: Call) -> Alternatives:
        return tuple(
            Alternative(each.guard, dataclasses.replace(each.atom, prepared=True))
            if isinstance(each.atom, Object)
            else each
            for each in self.values.evaluate(node, call.scope, call.order)
        )


def _is_known_partial(path: str, call: Call) -> bool:
    """True for a partial of what clips, and of an autocast with its device: `partial(torch.autocast, "cuda", ...)`.

    Of positional arguments it may have the device only, with the dtype as a keyword.
    """
    if len(call.positional) == 1:
        return path in api_names.CLIPS or (path in api_names.AUTOCASTS and "device_type" in call.keywords)
    takes_device = path in api_names.AUTOCASTS and not path.startswith(("torch.cuda.", "torch.cpu."))
    return takes_device and len(call.positional) == 2 and "dtype" in call.keywords


def _is_ruled_out(node: cst.BaseExpression | None, atom: Atom, guard: PathCondition) -> bool:
    """True if a name cannot have a dtype at a place: after `if dtype not in (torch.float32, torch.bfloat16): raise`."""
    if not isinstance(node, cst.Name) or not isinstance(atom, DtypeValue) or not isinstance(atom.dtype, Dtype):
        return False
    return not compatible(guard, ALWAYS.given(Flag(node.value, atom.dtype.torch_name)))


def condition_of(name: str, atom: Atom) -> Condition | None:
    """Return the condition that a flag has the value of an atom: of a string, a truth value or None."""
    if isinstance(atom, Constant) and (atom.value is None or isinstance(atom.value, (bool, str))):
        return equality(name, atom.value)
    return None
