"""`Event`, the kinds of events, the registry of their finders, and helpers that finders share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.dtypes import AnyDtype, PossibleDtypes, as_dtype, guards_of
from mpguard.lint.facts.program.lattice import Class, Object
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import PathCondition
from mpguard.lint.facts.syntax.records import Call, Record, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

_OPTIMIZER = lazy_pattern(r"optim(?!.*sched)|^opt(?:_|$)|_opt$")


#: The kinds of events. A test compares them with the registered `FINDERS`.
EventKind = Literal[
    "accelerator",  # an `Accelerator` is created
    "arguments",  # a `TrainingArguments` of transformers, or a class derived from it, is created
    "autocast",  # an autocast is created; `dtypes` of its region
    "backward",  # `loss.backward()`
    "cast",  # `x.half()`, `x.to(torch.float16)`, `x.type(...)`, and the same for other dtypes; `dtypes`
    "clip",  # `clip_grad_norm_`, `clip_grad_value_`
    "compile",  # `torch.compile`, `model.compile`, a dynamo option
    "construct",  # a layer is created with `dtype=`; `dtypes`
    "convert",  # torchao's `convert_to_float8_training`
    "convert_accelerate",  # accelerate's functions that convert to Transformer Engine or torchao
    "default_dtype",  # `torch.set_default_dtype`, `torch.set_default_tensor_type`; `dtypes`
    "float8_config",  # torchao's `Float8LinearConfig` is created
    "fp8_handler",  # accelerate's FP8 `kwargs_handlers` are created
    "fp8_recipe",  # a recipe of Transformer Engine is created
    "framework",  # a backward pass that a framework runs: `accelerator.backward(loss)`
    "get_scale",  # the scale of a GradScaler is read
    "initialize",  # `deepspeed.initialize`
    "load",  # `from_pretrained` and similar loaders; `dtypes`
    "policy",  # FSDP's `MixedPrecision` or `MixedPrecisionPolicy` is created; `dtypes` of the parameters
    "prepare",  # `accelerator.prepare`
    "restore",  # `x.load_state_dict(...)`, or torch.distributed.checkpoint's functions for it
    "scale",  # `scaler.scale(loss)`
    "scaler",  # a GradScaler is created
    "scaler_step",  # `scaler.step(optimizer)`
    "shard",  # FSDP wraps a model
    "state",  # `x.state_dict()`, or torch.distributed.checkpoint's functions for it
    "step",  # `optimizer.step()`
    "trainer",  # a framework's trainer is created
    "unscale",  # `scaler.unscale_(optimizer)`, `accelerator.unscale_gradients()`
    "update",  # `scaler.update()`
]


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """One operation on an object.

    subject: the expression of the object; `key` is its dotted name, or "". dtypes: of casts, loads and autocasts: (path
    condition, dtype) alternatives, with None for unknown.
    """

    kind: EventKind
    call: Call
    facts: ProgramView
    subject: cst.BaseExpression | None = None
    dtypes: PossibleDtypes = ()

    @property
    def key(self) -> str:
        """The dotted name of the subject, or ""."""
        return dotted(self.subject)

    @property
    def scope(self) -> Scope:
        """The scope of the call."""
        return self.call.scope

    @property
    def order(self) -> int:
        """The order of evaluation within the file."""
        return self.call.order

    @cached_property
    def guard(self) -> PathCondition:
        """The path condition, including the conditions under which its function is called."""
        return self.facts.guard_of(self.call)

    @property
    def span(self) -> tuple[int, int]:
        """Start and end of the call in `Source.text`."""
        return self.call.span

    def may_be(self, dtype: AnyDtype | str) -> list[PathCondition]:
        """Return the path conditions under which the dtype is this one."""
        wanted = as_dtype(dtype)
        if not any(each is wanted for _, each in self.dtypes):
            return []  # its path condition may need other files
        return guards_of(wanted, self.dtypes, self.guard)


#: In the name of a parameter that takes a class.
_CLASS = lazy_pattern(r"cls|class|kind|type|factory|constructor")

#: A function of the behaviour of a file.
Finder = Callable[[Any], Iterator[Event]]
FINDERS: dict[EventKind, Finder] = {}


def finds(kind: EventKind) -> Callable[[Finder], Finder]:
    """Register a function that yields all events of a kind in a file, in any order."""

    def register(finder: Finder) -> Finder:
        FINDERS[kind] = finder
        return finder

    return register


def created(facts: ProgramView, kind: EventKind) -> Iterator[Event]:
    """Yield the calls that create an object of a kind.

    Methods and functions, whose names begin with a small letter, are excluded.
    """
    for name, calls in facts.calls.items():
        small = name[:1].islower()
        for call in calls:
            if small and (call.receiver is not None or _is_function(call)):
                continue
            if any(api_names.kind_of(path) == kind for _, path in facts.paths(call)) or any(
                isinstance(each.atom, Class) and facts.class_kind(each.atom.scope) == kind
                for each in facts.evaluate(call.func, call)
                if call.name[:1].isupper()
            ):
                yield Event(kind, call, facts, call.node)


def _is_function(call: Call) -> bool:
    """True if the callee is a function of the file, imported under a name that begins with a small letter, or passed.

    What is passed may be a class only if it is named like one: `trainer_cls`, `model_class`.
    """
    bindings = next((found for place in call.scope.chain() if (found := place.bindings.get(call.name))), [])
    return bool(bindings) and all(
        binding.kind == "def"
        or (binding.kind == "from" and binding.name[:1].islower())
        or (binding.kind == "param" and not _CLASS.search(call.name))
        for binding in bindings
    )


def is_scaler(facts: ProgramView, node: cst.CSTNode, at: Record) -> bool:
    """True if an expression is a GradScaler, or, if its kind is unknown, is named like one: `state["scaler"]` too."""
    kinds = facts.kinds(node, at)
    key = node.slice[0].slice if isinstance(node, cst.Subscript) and len(node.slice) == 1 else None
    name = constant(key.value) if isinstance(key, cst.Index) else (last_name(node),)
    return "scaler" in kinds or (kinds <= {""} and name is not None and "scaler" in str(name[0]).lower())


def creates_optimizer(facts: ProgramView, call: Call) -> bool:
    """True for a call of a class of optimizers that is known by its full name: `torch.optim.SGD(...)`."""
    return any(api_names.kind_of(path) == "optimizer" for _, path in facts.paths(call))


def is_optimizer(facts: ProgramView, node: cst.CSTNode, at: Record) -> bool:
    """True if an expression is an optimizer, or, if its kind is unknown, is named like one."""
    kinds = facts.kinds(node, at)
    if kinds & {"optimizer", "own_optimizer"}:
        return "sched" not in last_name(node).lower()  # a scheduler with an optimizer's methods, or named wrongly
    if kinds - {"", "parameters", "apex_optimizer"} and not _wraps_optimizer(facts, node, at):
        return False
    return kinds != {"apex_optimizer"} and bool(_OPTIMIZER.search(last_name(node).lower()))


def _wraps_optimizer(facts: ProgramView, node: cst.CSTNode, at: Record) -> bool:
    """True for an object of a class of the tree that steps and clears the gradients, as `Noam` around an Adam."""
    made = [each.atom for each in facts.evaluate(node, at) if isinstance(each.atom, Object)]
    return bool(made) and all(
        atom.kind == "own" and atom.cls is not None and atom.cls.method("step") and atom.cls.method("zero_grad")
        for atom in made
    )


def last_name(node: cst.CSTNode) -> str:
    """Return the last name of a name, attribute or subscripted expression; "" for others."""
    if isinstance(node, cst.Subscript):
        node = node.value
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""
