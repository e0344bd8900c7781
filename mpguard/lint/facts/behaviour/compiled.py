"""Does the code of a file compile a model, by a call, an option, or a decorator?"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events import Event
from mpguard.lint.facts.behaviour.scalers import Scalers
from mpguard.lint.facts.program import project_words, roles
from mpguard.lint.facts.program.lattice import Class, Function, Object, Ref
from mpguard.lint.facts.syntax.nodes import dotted, iterated
from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition, compatible
from mpguard.lint.facts.syntax.records import Call, Scope, Use

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: Functions that may compile, by words in their names: `maybe_compile(model)`.
_COMPILES = lazy_pattern("|".join(("compile", *project_words.COMPILING_FUNCTIONS)))
#: Of these, functions that take a compiled model apart, or ask for one.
_UNWRAPS = lazy_pattern(r"(?i)^_*(?:un|is_|has_|was_|strip_|remove_)")
#: Names of arguments about an optimizer: `compile_optimizer=args.compile`.
_OF_OPTIMIZER = lazy_pattern(r"(?i)optim|(?:^|_)opt(?:_|$)")
#: Functions that a flag is passed to and that do not compile.
_ONLY_READS = lazy_pattern(rf"(?i){roles.PRINTS}|str$|bool$|^int$|^get(?:env)?$|add_argument")


def compiled(facts: BehaviourView, guard: PathCondition = ALWAYS, model: Event | None = None) -> bool:
    """True if something may be compiled under a path condition: by a call, an option, or a decorator.

    model: the event whose subject it may be; what is definitely another object, as a teacher, does not count.
    """
    if any(compatible(event.guard, guard) and not _differ(event, model, facts) for event in facts.events("compile")):
        return True
    # A Trainer may be told to compile on the command line (`--torch_compile`); a loop of the file's own is not.
    if ("HfArgumentParser" in facts.calls and not facts.events("backward")) or any(
        call.starred for name, calls in facts.calls.items() if name.endswith("TrainingArguments") for call in calls
    ):
        return True
    for name, calls in facts.calls.items():
        if name != "compile" and may_compile(name):
            may = (call for call in calls if compatible(facts.guard_of(call), guard))
            if not all(_only_keeps(call, facts) for call in may):
                return True
    return any(
        use.path.endswith("compile")
        and compatible(use.guard, guard)
        and not use.path.startswith(("re.", "regex."))
        and _may_compile(facts, use, model)
        for scope in facts.index.scopes
        for uses in scope.uses.values()
        for use in uses
    )


def compiled_by(facts: BehaviourView, scopes: Collection[Scope], model: Event) -> bool:
    """True if one of these functions, outside of the file (`facts`) of a model's event, may compile the model."""
    others = dict.fromkeys(facts.of(scope) for scope in scopes)
    return any(
        compiled.scope in scopes and not _differ(compiled, model, other)
        for other in others
        if other is not facts
        for compiled in other.events("compile")
    ) or any(
        "compile" in each.name and each.name != "compile" and may_compile(each.name)
        for scope in scopes
        if facts.of(scope) is not facts
        for each in scope.calls
    )


def may_compile(function: str) -> bool:
    """True if a function may compile, by its name."""
    return bool(_COMPILES.search(function)) and not _UNWRAPS.search(function)


def _may_compile(facts: BehaviourView, use: Use, model: Event | None) -> bool:
    """True if a use of `torch.compile`, or of a flag with such a name, may compile.

    It is a decorator, is passed on, or is `torch.compile` under another name. A flag that is only tested compiles
    nothing by itself: what it selects counts.
    """
    parent = facts.index.parents.get(use.node)
    if isinstance(parent, cst.Call):
        return False
    if isinstance(parent, cst.Arg):
        if parent.keyword is not None and _OF_OPTIMIZER.search(parent.keyword.value):
            return False
        call = facts.index.call_of.get(facts.index.parents.get(parent))  # type: ignore[arg-type]
        return call is None or not (_ONLY_READS.search(call.name) or _only_keeps(call, facts))
    if isinstance(parent, cst.Decorator):
        decorated = (scope for scope in facts.index.scopes if use.node in scope.decorators)
        name = model.key.rsplit(".", 1)[-1] if model is not None else ""
        return not any(_without(name, scope) for scope in decorated)
    return any(
        isinstance(each.atom, Ref) and each.atom.path.startswith("torch.") for each in facts.evaluate(use.node, use)
    )


def _only_keeps(call: Call, facts: BehaviourView) -> bool:
    """True for functions and classes that compile nothing themselves: `Config(compile=args.compile)` of the tree.

    Of torch's functions only those that say so compile: `parallelize_module` does not.
    """
    paths = [path for _, path in facts.paths(call)]
    if paths and all(path.startswith("torch.") and "compile" not in path for path in paths):
        return True
    atoms = [each.atom for each in facts.evaluate(call.func, call)]
    scopes = [function.scope for function in facts.functions(call)]
    if not atoms or not all(isinstance(atom, (Function, Class)) for atom in atoms):
        return False
    if any(isinstance(atom, Class) and facts.class_kind(atom.scope) != "own" for atom in atoms):
        return False
    return not any(
        _COMPILES.search(use.path)
        for scope in scopes
        for uses in scope.uses.values()
        for use in uses
        if isinstance(facts.of(scope).parent(use.node), (cst.Call, cst.Arg))
    )


def _differ(event: Event, model: Event | None, facts: BehaviourView) -> bool:
    """True if an event compiles definitely another object than the subject of `model`."""
    if model is None or event.call.name != "compile":
        return False
    owner = event.scope.owner
    if owner is not None and facts.class_kind(owner) == "own_optimizer":
        return True  # it compiles its own functions
    is_other = facts.part(Scalers).differ(event.subject, event.call, model.subject, model.call)
    if is_other and not _wraps(event, model, facts):
        return True
    if _are_parts(event.key, model.key):
        return True
    if _are_parameters(event, model, facts):
        return True
    atoms = [each.atom for each in facts.evaluate(event.subject, event.call)]
    if atoms and all(isinstance(atom, Ref) and atom.path.startswith("torch.") for atom in atoms):
        return True  # a function of torch, as flex_attention
    if facts is not model.facts:
        return False  # the model may have another name there
    name = model.key.rsplit(".", 1)[-1]
    return bool(atoms) and all(isinstance(atom, Function) and _without(name, atom.scope) for atom in atoms)


def _wraps(outer: Event, inner: Event, facts: BehaviourView) -> bool:
    """True if the subject of an event was made of that of another one: `DistributedDataParallel(model)`."""
    if outer.subject is not None and inner.call in facts.flow.backward(outer.subject, outer.call):
        return True
    parts = set(_creating(inner.subject, inner.call, facts))
    pending, seen = _creating(outer.subject, outer.call, facts), set[Call]()
    while pending:
        call = pending.pop()
        if call in parts:
            return True
        if call not in seen:
            seen.add(call)
            pending += [each for arg in call.node.args for each in _creating(arg.value, call, facts)]
    return False


def _creating(node: cst.BaseExpression | None, at: Call, facts: BehaviourView) -> list[Call]:
    atoms = [each.atom for each in facts.evaluate(node, at)]
    return [atom.call for atom in atoms if isinstance(atom, Object) and atom.call is not None]


def _are_parameters(event: Event, model: Event, facts: BehaviourView) -> bool:
    """True if two events are about different parameters of one function: `teacher.eval()` and `student`."""
    names = {dotted(iterated(event.subject)): event.call, model.key: model.call}
    bindings = [facts.bindings(name, at) for name, at in names.items() if name]
    return (
        event.scope is model.scope
        and len(bindings) == 2
        and all(found and all(each.kind == "param" for each in found) for found in bindings)
    )


def _are_parts(one: str, other: str) -> bool:
    """True for different parts of one model: `model.head` and `model.backbone`. Attributes of `self` may be aliases."""
    owner = one.rpartition(".")[0]
    return owner not in ("", "self") and other.startswith(f"{owner}.") and not f"{other}.".startswith(f"{one}.")


def _without(name: str, scope: Scope) -> bool:
    """True if a function neither takes nor reads an object of this (last) name: it is no step of the model."""
    words = {part for uses in scope.uses.values() for use in uses for part in use.path.split(".")}
    return bool(name) and name not in words | {param.name for param in scope.params}
