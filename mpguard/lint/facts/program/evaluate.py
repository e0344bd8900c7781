"""Abstract evaluation: names, attributes and calls are resolved to the abstract values that an expression may have."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program import api_names, config_values, mappings
from mpguard.lint.facts.program.call_results import CallResults, condition_of
from mpguard.lint.facts.program.lattice import (
    ANOTHER_CONFIG,
    NOTHING_KNOWN,
    UNKNOWN,
    Alternative,
    Alternatives,
    Atom,
    Class,
    ConfigValue,
    Constant,
    DictValue,
    DtypeValue,
    Function,
    Method,
    Module,
    Object,
    Ref,
    TupleValue,
    are_text_and_dtype,
    constants_of,
    element_at,
    ref,
    restrict,
)
from mpguard.lint.facts.program.reaching import ReachingDefinitions
from mpguard.lint.facts.syntax.conditions import subject
from mpguard.lint.facts.syntax.constant_flags import asks_for_bf16
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import (
    ALWAYS,
    negated,
)
from mpguard.lint.facts.syntax.records import Binding, Call, Param, Record, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: How deep calls, parameters and names are followed.
DEPTH = 24
_MAX_ALTERNATIVES = 16
#: Expressions evaluated for one request. In real code it is 4 for nearly all, and at most 900 with few exceptions.
_MAX_STEPS = 1_000
#: Marks in `cuts` a result that is incomplete because a limit was reached; equal to nothing that is being evaluated.
_LIMIT_REACHED = object()


class _Search:
    """The state of one evaluation across the modules of a linted file.

    It holds the expressions being evaluated, outermost first. cuts: the expressions (or `_LIMIT_REACHED`) because of
    which a result since the last reset is incomplete: a cycle, or a limit. Such a result may be more precise when it is
    requested by itself, so it is cached only as long as these expressions are being evaluated, and not for a request at
    a lower depth (`partial`).
    """

    def __init__(self) -> None:
        self.active: dict[object, None] = {}
        self.steps = 0
        self.cuts: set[object] = set()
        self.partial: dict[cst.CSTNode, tuple[Alternatives, set[object], int]] = {}


#: Functions that take one whose parameters are the options of a command line.
_COMMANDS = ("Fire", "run", "CLI", "auto_cli")
#: Comparisons that two constants decide.
_COMPARES: dict[type[cst.BaseCompOp], Callable[[object, object], bool]] = {
    cst.Equal: operator.eq, cst.Is: operator.eq, cst.NotEqual: operator.ne, cst.IsNot: operator.ne,
}  # fmt: skip


class _Attributes:
    """The state of an evaluation, what is known without one, and the attributes of values."""

    def __init__(self, facts: ProgramView) -> None:
        self.facts = facts
        self._known: dict[cst.CSTNode, Alternatives] = {}
        self._search = _Search()
        self.reaching = ReachingDefinitions(facts).at
        self._attributes_at = -1
        self._attributes_set: dict[str, list[Binding]] = {}

    def share_search(self, other: _Attributes) -> None:
        """Share the state of an evaluation in another module, so that cycles through both modules are detected."""
        self._search = other._search

    def _at(self, record: Record | Scope) -> Values:
        """Return the values of the file that contains a record or a scope."""
        return self.facts.of(record).part(Values)

    @property
    def is_active(self) -> bool:
        """True while an expression is being evaluated."""
        return bool(self._search.active)

    def known(self, node: cst.CSTNode | None) -> Alternatives | None:
        """Return the alternatives of an expression that was evaluated before, or None."""
        return self._known.get(node) if node is not None else None

    def _must_stop(self, what: object) -> bool:
        """True if evaluation must stop: `what` is already being evaluated, or a limit is reached."""
        search = self._search
        if not search.active:
            search.steps = 0
            search.partial = {}
        elif what in search.active:
            search.cuts.add(what)
            return True
        elif len(search.active) > DEPTH or search.steps > _MAX_STEPS:
            search.cuts.add(_LIMIT_REACHED)
            return True
        return False

    @staticmethod
    def _finish(search: _Search, what: object) -> None:
        """End the evaluation of `what`: results that were incomplete because of it are complete for its caller.

        search: the one in which it began. An import that is read meanwhile may have shared another with this file.
        """
        del search.active[what]
        search.cuts.discard(what)

    def _of_derived(self, name: str, scope: Scope, found: Alternatives) -> Alternatives:
        """Return the alternatives of a class attribute, with those that derived classes give it."""
        if scope.owner is None:
            return found
        others, is_used = self.facts.classes.overriding(scope.owner, name)
        values = (each for cls, binding in others for each in self._at(cls.scope).bound(binding))
        return (*(found if is_used or not others else ()), *values)

    def _executed(self, binding: Binding) -> Alternatives:
        """Return what a config of the project may set a setting of a script to, which runs one with `exec`."""
        literal = constant(binding.value) if binding.kind == "assign" else None
        runs = [call for call in self.facts.calls.get("exec", ()) if call.scope is binding.scope]
        if literal is None or not any(call.path == "exec" and call.order > binding.order for call in runs):
            return ()
        given = self.facts.project.executed_settings(self.facts.path, frozenset(binding.scope.bindings))
        values = dict.fromkeys(given.get(binding.key, ()))
        return tuple(Alternative(ALWAYS, Constant(value)) for value in values if value != literal[0])

    def _module(self, module: str) -> Alternatives:
        other = self.facts.imported(module)
        return (Alternative(ALWAYS, Module(other) if other is not None else Ref(module)),)

    def given(self, call: Call, scope: Scope, name: str) -> cst.BaseExpression | None:
        """Return the argument that a call passes for a parameter, or its default; None if it is not visible."""
        if name in call.keywords:
            return call.keywords[name]
        params = [p for p in scope.params if p.kind == "plain"]
        if scope.is_bound:
            params = params[1:]
        place = next((i for i, p in enumerate(params) if p.name == name), None)
        if place is not None and place < len(call.positional):
            return call.positional[place]
        if call.starred:
            return None
        param: Param | None = next((p for p in scope.params if p.name == name), None)
        return param.default if param is not None else None

    def _instance(self, scope: Scope) -> Alternative:
        return Alternative(ALWAYS, Object(self.facts.class_kind(scope), None, scope.name, scope, self.facts))

    def attribute(self, owners: Alternatives, name: str) -> Alternatives:
        """Return the alternatives of an attribute of an object."""
        found: list[Alternative] = []
        for alternative in owners:
            for each in self._attribute_of(alternative.atom, name):
                guard = alternative.guard.joined(each.guard)
                if guard.possible:
                    found.append(Alternative(guard, each.atom))
        return tuple(found) or NOTHING_KNOWN

    def _attribute_of(self, atom: Atom, name: str) -> Alternatives:
        if isinstance(atom, Ref):
            return (Alternative(ALWAYS, ref(f"{atom.path}.{name}")),)
        if isinstance(atom, Constant) and isinstance(atom.value, str) and name == "type":
            return (Alternative(ALWAYS, Constant(atom.value.split(":", 1)[0])),)  # the type of a `torch.device`
        if isinstance(atom, Module):
            atom.facts.need(name)
            module = atom.facts.module
            if name not in module.bindings:
                atom.facts.need("*")
            if name in module.bindings or "*" in module.bindings:
                return self._at(module).lookup(name, module, 1 << 60)
            return NOTHING_KNOWN
        if isinstance(atom, DictValue):  # a config whose keys are attributes
            return next((part() for key, part in atom.parts if key == name), ()) or NOTHING_KNOWN
        if isinstance(atom, (Class, Object)):
            scope = atom.scope if isinstance(atom, Class) else atom.cls
            if scope is not None and atom.facts is not None:
                classes, values = self.facts.of(scope).classes, self._at(scope)
                bindings = classes.attributes(scope).get(name)
                given = self._field(atom, name) if isinstance(atom, Object) else None
                if given is not None:
                    return given
                if bindings:
                    found = tuple(each for binding in bindings for each in values.bound(binding))
                    return values.set_from_outside(name, found)
                inherited = classes.inherited(scope, name)
                if inherited is not None:
                    return (Alternative(ALWAYS, inherited),)
                above = (self._at(each.scope).bound(each) for each in classes.set_above(scope, name))
                found = tuple(each for alternatives in above for each in alternatives)
                if found and all(isinstance(a.atom, Object) or a.atom in (UNKNOWN, Constant(None)) for a in found):
                    return found  # a dtype or an option may be that of another class with this base
            if isinstance(atom, Object):
                return (Alternative(ALWAYS, Method(atom, name)),)
            if name in api_names.LOADERS:
                kind = self.facts.class_kind(atom.scope)
                return (Alternative(ALWAYS, Method(Object(kind, None, atom.scope.name, atom.scope, atom.facts), name)),)
        return NOTHING_KNOWN

    def _field(self, atom: Object, name: str) -> Alternatives | None:
        """Return what an object got for a field when it was created; None if it has the field's default.

        That is an object of a dataclass, or of another class that takes its fields as arguments.
        """
        call, cls = atom.call, atom.cls
        if call is None or cls is None or not call.node.args or cls.method("__init__") is not None:
            return None
        if name not in cls.bindings:
            return None
        values = self._at(call)
        if name in call.keywords:
            return values.evaluate(call.keywords[name], call.scope, call.order)
        if not cls.decorators:
            return None
        by_place = dict(zip(_fields(cls), call.positional, strict=False))
        if name in by_place:
            return values.evaluate(by_place[name], call.scope, call.order)
        return NOTHING_KNOWN if call.starred else None


class Values(_Attributes):
    """Evaluates the expressions of one file.

    Results are cached unless they are incomplete because of the calling context.
    """

    def __init__(self, facts: ProgramView) -> None:
        super().__init__(facts)
        self._results = CallResults(facts, self)

    def evaluate(self, node: cst.CSTNode | None, scope: Scope, order: int = 1 << 60) -> Alternatives:
        """Return the alternatives of an expression at a place (`order`)."""
        if node is None:
            return NOTHING_KNOWN
        if node in self._known:
            return self._known[node]
        search = self._search
        if self._must_stop(node):
            return NOTHING_KNOWN
        if node in search.partial:
            found, cuts, place = search.partial[node]
            if search.active.keys() >= cuts - {_LIMIT_REACHED} and (
                _LIMIT_REACHED not in cuts or len(search.active) >= place
            ):
                search.cuts |= cuts
                return found
        search.steps += 1
        outside, search.cuts = search.cuts, set()
        search.active[node] = None
        try:
            found = self._evaluate(node, scope, order)
        finally:
            del search.active[node]
        found = (
            found[:_MAX_ALTERNATIVES]
            if len(found) <= _MAX_ALTERNATIVES
            else (*found[:_MAX_ALTERNATIVES], Alternative(ALWAYS, UNKNOWN))
        )
        cuts = search.cuts - {node}
        if not cuts or not search.active:
            self._known[node] = found
        else:
            search.partial[node] = found, cuts, len(search.active)
            outside |= cuts
        search.cuts = outside
        return found

    def _evaluate(self, node: cst.CSTNode, scope: Scope, order: int) -> Alternatives:
        literal = constant(node)
        if literal is not None:
            return (Alternative(ALWAYS, Constant(literal[0])),)
        if type(node) is cst.Name or type(node) is cst.Attribute:
            path = dotted(node)
            if path:
                return self.lookup(path, scope, order)
            assert isinstance(node, cst.Attribute)
            return self.attribute(self.evaluate(node.value, scope, order), node.attr.value)
        if type(node) is cst.IfExp:
            known = self.truth(node.test, scope, order)
            if known is not None:
                return self.evaluate(node.body if known else node.orelse, scope, order)
            condition = self.facts.condition(node.test, scope)
            return (
                *restrict(self.evaluate(node.body, scope, order), ALWAYS.given(condition)),
                *restrict(self.evaluate(node.orelse, scope, order), ALWAYS.given(negated(condition))),
            )
        if type(node) is cst.BooleanOperation:
            condition = self.facts.condition(node.left, scope)
            if type(node.operator) is cst.And:
                return restrict(self.evaluate(node.right, scope, order), ALWAYS.given(condition))
            return (
                *self.evaluate(node.left, scope, order),
                *restrict(self.evaluate(node.right, scope, order), ALWAYS.given(negated(condition))),
            )
        if type(node) is cst.Call:
            call = self.facts.index.call_of.get(node)
            return self.result(call) if call is not None else NOTHING_KNOWN
        if type(node) is cst.Tuple or type(node) is cst.List:
            parts = tuple(functools.partial(self.evaluate, element.value, scope, order) for element in node.elements)
            return (Alternative(ALWAYS, TupleValue(parts)),)
        if type(node) is cst.Lambda:
            return _anonymous(self, node, scope, order)
        if type(node) is cst.Await:
            return self.evaluate(node.expression, scope, order)
        if type(node) is cst.NamedExpr:
            return self.evaluate(node.value, scope, order)
        if type(node) is cst.Subscript and len(node.slice) == 1 and type(node.slice[0].slice) is cst.Index:
            return self.item(node.value, node.slice[0].slice.value, scope, order) or NOTHING_KNOWN
        if type(node) is cst.Dict and len(node.elements) <= mappings.MOST_ITEMS:
            return mappings.display(self, node, scope, order)
        return NOTHING_KNOWN

    def item(self, owner: cst.CSTNode, key: cst.BaseExpression, scope: Scope, order: int) -> Alternatives:
        """Return the alternatives of `owner[key]`: of a dict, each value under the condition that the key is its own.

        Nothing, if the dict does not have the key.

        The condition remains where the key is a constant with a name, because tests of that name agree with it:
        `GradScaler(enabled=(dtype == "float16"))` next to `autocast(dtype={"float16": torch.float16, ...}[dtype])`.
        """
        owners, literal = self.evaluate(owner, scope, order), constant(key)
        if literal is not None and isinstance(literal[0], int):
            return element_at(owners, (literal[0],))
        tables = [each for each in owners if isinstance(each.atom, DictValue)]
        if not tables:
            return NOTHING_KNOWN
        found: list[Alternative] = []
        for table in tables:
            assert isinstance(table.atom, DictValue)
            for value, part in table.atom.parts:
                condition = condition_of(subject(key), Constant(value)) if literal is None else None
                chosen = table.guard if condition is None else table.guard.given(condition)
                for each in self.evaluate(key, scope, order):
                    if isinstance(each.atom, ConfigValue) and each.atom.value == value:
                        found += restrict(part(), each.guard.joined(table.guard))
                    elif isinstance(each.atom, ConfigValue):
                        found += restrict(part(), each.guard.joined(chosen).given(ANOTHER_CONFIG))
                    elif not isinstance(each.atom, Constant) or each.atom.value == value:
                        found += restrict(part(), each.guard.joined(chosen))
        return tuple(found)

    def truth(self, test: cst.CSTNode, scope: Scope, order: int) -> bool | None:
        """Return the truth of a tested name, or of a comparison with constants, if all values agree, else None."""
        if self.facts.always_supports_bf16() and asks_for_bf16(test):
            return True
        if isinstance(test, cst.Comparison):
            truths = _compared(self, test, scope, order)
        else:
            values = constants_of(self.evaluate(test, scope, order)) if dotted(test) else []
            truths = {bool(value) for value in values}
        return truths.pop() if len(truths) == 1 else None

    # -- names --------------------------------------------------------------------------------------

    def lookup(self, path: str, scope: Scope, order: int) -> Alternatives:
        """Return the alternatives of a dotted name at a place."""
        found = self._lookup_bound(path, scope, order)
        if found is not None:
            return found
        self.facts.need("*")
        if self.facts.module.bindings.get("*"):
            return self._starred(path)
        return (Alternative(ALWAYS, Ref(path)),) if path.split(".", 1)[0] in _BUILTINS else NOTHING_KNOWN

    def _lookup_bound(self, path: str, scope: Scope, order: int) -> Alternatives | None:
        """Return the alternatives of a name that the file itself binds; None if it does not bind it."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            key = ".".join(parts[:length])
            bindings = self.reaching(key, scope, order, most=_MAX_ALTERNATIVES + 1)
            if not bindings:
                if key == "self" and scope.owner is not None:
                    found: Alternatives = (self._instance(scope.owner),)
                else:
                    continue
            else:
                found = ()
                enough = _MAX_ALTERNATIVES if length == len(parts) else 1 << 60  # the rest is replaced by UNKNOWN
                for binding in bindings[:_MAX_ALTERNATIVES]:
                    found += self.bound(binding)
                    if len(found) > enough:
                        break
                if len(bindings) > _MAX_ALTERNATIVES:
                    found += NOTHING_KNOWN
                is_constant = all(each.kind == "assign" and each.scope.kind == "class" for each in bindings)
                if is_constant and key.startswith("self."):
                    found = self._of_derived(key[5:], scope, found)
                if key.startswith("self.") and key.count(".") == 1:
                    found = self.set_from_outside(key[5:], found)
                if length == 1 and bindings[0].scope.kind == "module":
                    found += self._executed(bindings[0])
            is_param = length == 1 < len(parts) and all(binding.kind == "param" for binding in bindings)
            for name in parts[length:]:
                found = self.attribute(found, name)
            if is_param and all(each.atom is UNKNOWN for each in found):
                return self._set_elsewhere(path) or found
            return found
        return None

    def set_from_outside(self, name: str, found: Alternatives) -> Alternatives:
        """Return the alternatives of an attribute that is a dtype, with those that code outside of its class gives it.

        The class's own are replaced if some code sets it always: `config.dtype = torch.bfloat16`.
        """
        if not any(isinstance(each.atom, DtypeValue) for each in found):
            return found
        self.facts.need_uses(name)
        own = [
            binding
            for scope in self.facts.index.scopes
            for key, bindings in scope.bindings.items()
            if key.endswith(f".{name}") and not key.startswith("self.")
            for binding in bindings
            if binding.kind == "assign"
        ]
        values = tuple(each for binding in own[:_MAX_ALTERNATIVES] for each in self.bound(binding))
        if self.facts.project.attribute_set_from_outside(self.facts.path, name):
            return (*values, *NOTHING_KNOWN)
        is_kept = all(binding.guard - binding.scope.guard for binding in own)
        return (*(found if is_kept else ()), *values)

    def _set_elsewhere(self, path: str) -> Alternatives:
        """Return the scaler or autocast that other functions of the file set an attribute of a parameter to.

        A namespace that they all get keeps it: `args.scaler = GradScaler()`. Nothing if they set it to anything else.
        """
        if self._attributes_at != self.facts.parsed_bytes:
            self._attributes_at, self._attributes_set = self.facts.parsed_bytes, {}
            for scope in self.facts.index.scopes:
                for key, bindings in scope.bindings.items():
                    if "." in key and not key.startswith("self."):
                        kept = [each for each in bindings if each.kind in ("assign", "element")]
                        self._attributes_set.setdefault(key, []).extend(kept)
        found: Alternatives = ()
        for binding in self._attributes_set.get(path, ())[:_MAX_ALTERNATIVES]:
            found += self.bound(binding)
        made = [each.atom for each in found if not (isinstance(each.atom, Constant) and each.atom.value is None)]
        return found if made and all(map(_is_of_amp, made)) else ()

    def _starred(self, path: str) -> Alternatives:
        """Return the alternatives of a name that a module imported with `*` binds.

        It binds the name directly, or by a `*` import of its own.
        """
        seen = {self.facts}
        pending = _starred(self.facts)
        while pending:
            other = pending.pop()
            if other in seen:
                continue
            seen.add(other)
            found = other.part(Values)._lookup_bound(path, other.module, 1 << 60)
            if found is None:
                pending += _starred(other)
            elif all(alternative.atom is not UNKNOWN for alternative in found):
                return found
        if path.split(".", 1)[0] in _BUILTINS:
            return (Alternative(ALWAYS, Ref(path)),) if len(seen) > 1 else NOTHING_KNOWN
        return self._starred_library(path)

    def _starred_library(self, path: str) -> Alternatives:
        """Return the alternatives of a name of a known API that a library imported with `*` may bind."""
        first, *rest = path.split(".")
        for binding in reversed(self.facts.module.bindings["*"]):
            if binding.target.split(".", 1)[0] not in api_names.LIBRARIES:
                continue
            found = self._from(binding.target, first)
            for name in rest:
                found = self.attribute(found, name)
            atoms = [each.atom for each in found]
            known = (not isinstance(atom, Ref) or api_names.kind_of(atom.path) for atom in atoms)
            if atoms and UNKNOWN not in atoms and all(known):
                return found
        return NOTHING_KNOWN

    def bound(self, binding: Binding) -> Alternatives:
        """Return the alternatives that a binding gives to its name."""
        if self._must_stop(binding):
            return NOTHING_KNOWN
        search = self._search
        search.active[binding] = None
        try:
            found = self._bound(binding)
        finally:
            self._finish(search, binding)
        return restrict(found, binding.guard)

    def _bound(self, binding: Binding) -> Alternatives:
        kind = binding.kind
        if kind in ("assign", "with"):
            return self.evaluate(binding.value, binding.scope, binding.order)
        if kind == "element":
            return element_at(self.evaluate(binding.value, binding.scope, binding.order), binding.index)
        if kind == "import":
            return self._module(binding.target)
        if kind == "from":
            return self._from(binding.target, binding.name)
        if kind == "param":
            return self._param(binding)
        if kind == "def" and binding.defines is not None:
            if any(dotted(each).endswith("property") for each in binding.defines.decorators):
                return self._results.returned(Function(binding.defines, self.facts))
            return (Alternative(ALWAYS, Function(binding.defines, self.facts)),)
        if kind in ("class", "stub") and binding.defines is not None:
            return (Alternative(ALWAYS, Class(binding.defines, self.facts)),)
        if kind == "for" and isinstance(binding.value, (cst.Tuple, cst.List)) and not binding.index:
            return tuple(
                alternative
                for element in binding.value.elements
                for alternative in self.evaluate(element.value, binding.scope, binding.order)
            )
        return _layers(self, binding) if kind == "for" else NOTHING_KNOWN

    def _from(self, module: str, name: str) -> Alternatives:
        other = self.facts.imported(module)
        if other is not None:
            other.need(name)
            if name in other.module.bindings:
                return other.part(Values).lookup(name, other.module, 1 << 60)
            if not other.source.path.endswith("__init__.py"):
                return NOTHING_KNOWN
        inner = self.facts.imported(f"{module}.{name}" if not module.endswith(".") else module + name)
        if inner is not None:
            return (Alternative(ALWAYS, Module(inner)),)
        return (Alternative(ALWAYS, ref(f"{module}.{name}")),) if other is None else NOTHING_KNOWN

    def _param(self, binding: Binding) -> Alternatives:
        scope = binding.scope
        if scope.is_bound and scope.params and scope.params[0].name == binding.key and scope.parent is not None:
            return (self._instance(scope.parent),)
        if scope.decorators and (config := config_values.of_hydra(scope, self.facts)):
            return config
        found: list[Alternative] = []
        callers = self.facts.callers(scope)
        for call in callers:
            given = self.given(call, scope, binding.key)
            if given is None:
                found.append(Alternative(call.guard, UNKNOWN))
            elif given is binding.value:
                found += restrict(self.evaluate(given, scope.parent or scope), call.guard)
            else:
                facts = self.facts.of(call)
                found += restrict(facts.values.evaluate(given, call.scope, call.order), call.guard)
        if not callers or self.facts.escapes(scope):
            return (*found, *_default_of_command(self.facts, scope, binding), *NOTHING_KNOWN)
        return tuple(found)

    # -- attributes and calls -------------------------------------------------------------------------

    def result(self, call: Call) -> Alternatives:
        """Return the alternatives of a call's result."""
        if self._must_stop(call):
            return NOTHING_KNOWN
        search = self._search
        search.active[call] = None
        try:
            if call.name == "get" and call.receiver is not None and call.positional:
                items = self.item(call.receiver, call.positional[0], call.scope, call.order)
                if all(each.atom is not UNKNOWN for each in items):
                    default = call.argument(1)
                    return (*items, *(self.evaluate(default, call.scope, call.order) if default is not None else ()))
            found: list[Alternative] = []
            for alternative in self.evaluate(call.func, call.scope, call.order):
                found += restrict(self._results.of(alternative.atom, call), alternative.guard)
                if len(found) > _MAX_ALTERNATIVES:
                    break
            return tuple(found) or NOTHING_KNOWN
        finally:
            self._finish(search, call)


def _default_of_command(facts: ProgramView, scope: Scope, param: Binding) -> Alternatives:
    """Return the default of a parameter that is an option of a command line, as in `fire.Fire(main)`."""
    literal = constant(param.value) if param.value is not None else None
    taking = [call for name in _COMMANDS for call in facts.calls.get(name, ())] if literal is not None else []
    if literal is None or not any(dotted(call.argument(0)) == scope.name for call in taking):
        return ()
    condition = condition_of(param.key, Constant(literal[0]))
    return (Alternative(ALWAYS.given(condition) if condition else ALWAYS, Constant(literal[0])),)


def _is_of_amp(atom: Atom) -> bool:
    """True for a GradScaler, and for what creates an autocast."""
    if isinstance(atom, Object):
        return atom.kind in ("scaler", "partial")
    return isinstance(atom, Ref) and atom.path in api_names.AUTOCASTS


def _starred(facts: ProgramView) -> list[ProgramView]:
    """Return the modules of the linted tree that a file imports with `*`, the last import first."""
    facts.need("*")
    found = (facts.imported(binding.target) for binding in facts.module.bindings.get("*", ()))
    return [other for other in found if other is not None][::-1]


_BUILTINS = frozenset(dir(builtins))


def _fields(cls: Scope) -> list[str]:
    """Return the annotated names of a class, in order: the fields of a dataclass."""
    body = cls.node.body.body if isinstance(cls.node, cst.ClassDef) else ()
    lines = [part for line in body if isinstance(line, cst.SimpleStatementLine) for part in line.body]
    return [dotted(part.target) for part in lines if isinstance(part, cst.AnnAssign)]


def _anonymous(values: Values, node: cst.Lambda, scope: Scope, order: int) -> Alternatives:
    """Return what a `lambda` without parameters gives that only creates an autocast; other ones are unknown."""
    params = node.params
    if params.params or params.kwonly_params or params.star_kwarg or not isinstance(params.star_arg, cst.MaybeSentinel):
        return NOTHING_KNOWN
    made = values.evaluate(node.body, scope, order)
    if not all(isinstance(each.atom, Object) and each.atom.kind == "autocast" for each in made):
        return NOTHING_KNOWN
    return tuple(
        Alternative(each.guard, dataclasses.replace(each.atom, kind="partial"))
        for each in made
        if isinstance(each.atom, Object)
    )


def _compared(values: Values, test: cst.Comparison, scope: Scope, order: int) -> set[bool]:
    """Return the truth values of a comparison of a name with constants; nothing if a value is unknown."""
    if len(test.comparisons) != 1 or not dotted(test.left):
        return set()
    if "exec" in values.facts.calls:  # a config, or the command line, may set the name
        return set()
    how, other = test.comparisons[0].operator, test.comparisons[0].comparator
    compare = _COMPARES.get(type(how))
    tested = values.evaluate(test.left, scope, order)
    own = constants_of(tested)
    if compare is not None:
        against = values.evaluate(other, scope, order)
        if are_text_and_dtype(tested, against):
            return {isinstance(how, (cst.NotEqual, cst.IsNot))}
        others = constants_of(against)
        return {compare(value, each) for each in others for value in own}
    if isinstance(how, (cst.In, cst.NotIn)) and isinstance(other, (cst.Tuple, cst.List, cst.Set)):
        wanted = [constants_of(values.evaluate(each.value, scope, order)) for each in other.elements]
        if all(len(each) == 1 for each in wanted):
            listed = [each[0] for each in wanted]
            return {(value in listed) is isinstance(how, cst.In) for value in own}
    return set()


def _layers(values: Values, binding: Binding) -> Alternatives:
    """Return the layers over which a loop runs: those of a `ModuleList` that one expression creates."""
    value, index = binding.value, binding.index
    while (call := values.facts.call_of(value)) is not None:
        place = index[0] if call.path == "zip" and index else 0
        same = call.path in ("reversed", "list", "tuple", "iter")
        known = same or (call.path == "zip" and index) or (call.path == "enumerate" and index[:1] == (1,))
        if not known or place >= len(call.positional):
            return NOTHING_KNOWN
        value, index = call.positional[place], index if same else index[1:]
    made = [each.atom for each in values.evaluate(value, binding.scope, binding.order)]
    atom = made[0] if len(made) == 1 else None
    if index or not isinstance(atom, Object) or atom.call is None or atom.path != "torch.nn.ModuleList":
        return NOTHING_KNOWN
    given = atom.call.argument(0, "modules")
    if not isinstance(given, (cst.ListComp, cst.GeneratorExp)):
        return NOTHING_KNOWN
    return values._at(atom.call).evaluate(given.elt, atom.call.scope, atom.call.order)
