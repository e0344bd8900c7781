"""Events: what happens to models, losses, optimizers and scalers, each found by one small function.

A new kind of event is a function decorated with `@finds("kind")` that yields `Event`s; `Facts.events`
sorts and remembers them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint import names
from mpguard.lint.guard import ALWAYS, Guard, compatible
from mpguard.lint.values import Class, Constant, Function, Object, Ref
from mpguard.lint.walk import Call, Record, Scope, constant, dotted

if TYPE_CHECKING:
    from mpguard.lint.facts import Facts
    from mpguard.lint.regions import Region

_OPTIMIZER = re.compile(r"optim(?!.*sched)|^opt(?:_|$)|_opt$")
#: Functions that may compile, by their names: `maybe_compile(model)`, torchtitan's `parallelize_llama(model)`.
_COMPILES = re.compile(r"compile|parallelize")
_COMPILE_OPTIONS = frozenset(
    {"dynamo_backend", "dynamo_plugin", "torch_compile", "torch_compile_backend", "torch_compile_mode"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """Something that happens to an object.

    subject: the expression of the object that it concerns; `key` its dotted name, or empty.
    dtypes: of casts, loads and autocasts: (guard, name) alternatives, None for unknown.
    """

    kind: str
    call: Call
    facts: Facts
    subject: cst.BaseExpression | None = None
    dtypes: tuple[tuple[Guard, str | None], ...] = ()

    @property
    def key(self) -> str:
        return dotted(self.subject)

    @property
    def scope(self) -> Scope:
        return self.call.scope

    @property
    def order(self) -> int:
        return self.call.order

    @cached_property
    def guard(self) -> Guard:
        """Its own conditions and those under which its function is called."""
        return self.facts.guard_of(self.call)

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.facts.regions(self.call)

    @property
    def span(self) -> tuple[int, int]:
        return self.call.span

    def may_be(self, dtype: str) -> list[Guard]:
        return [both for guard, name in self.dtypes if name == dtype and (both := self.guard.joined(guard)).possible]


Finder = Callable[["Facts"], Iterator[Event]]
FINDERS: dict[str, Finder] = {}


def finds(kind: str) -> Callable[[Finder], Finder]:
    """Decorator: the function yields all events of a kind in a file, in any order."""

    def register(finder: Finder) -> Finder:
        FINDERS[kind] = finder
        return finder

    return register


def _called(facts: Facts, *wanted: str) -> Iterator[Call]:
    for name in wanted:
        yield from facts.calls.get(name, ())


@finds("cast")
def _casts(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "half", "bfloat16"):
        if call.receiver is not None and not call.node.args and _is_torch(facts, call):
            yield Event(
                "cast", call, facts, call.receiver, ((ALWAYS, "float16" if call.name == "half" else "bfloat16"),)
            )
    for call in _called(facts, "to"):
        if call.receiver is None or not _is_torch(facts, call):
            continue
        given = call.keywords.get("dtype")
        for argument in [given] if given is not None else call.positional[:2]:
            dtypes = facts.dtypes(argument, call)
            if any(name is not None for _, name in dtypes):
                yield Event("cast", call, facts, call.receiver, dtypes)
                break
    for call in _called(facts, "type"):
        given = call.argument(0, "dtype")
        if call.receiver is None or given is None or not _is_torch(facts, call):
            continue
        text = constant(given)
        if text is not None:
            if text[0] in names.HALF_TENSOR_STRINGS:
                yield Event("cast", call, facts, call.receiver, ((ALWAYS, "float16"),))
            continue
        dtypes = facts.dtypes(given, call)
        if any(name is not None for _, name in dtypes):
            yield Event("cast", call, facts, call.receiver, dtypes)


def _is_torch(facts: Facts, call: Call) -> bool:
    """Whether a method's receiver may be a tensor or a module: no class of the user's with that method, no library."""
    for each in facts.evaluate(call.receiver, call):
        if isinstance(each.atom, (Ref, Class, Constant)):
            return False
        if isinstance(each.atom, Object) and each.atom.kind not in (
            "model",
            "tensor",
            "engine",
            "criterion",
            "pipeline",
            "",
        ):
            return False
    for each in facts.evaluate(call.func, call):
        if isinstance(each.atom, Function) and each.atom.scope.parent is not None:
            return facts.class_kind(each.atom.scope.parent) == "model" and False
    return True


@finds("scaler")
def _scalers(facts: Facts) -> Iterator[Event]:
    yield from _creates(facts, "scaler")


@finds("accelerator")
def _accelerators(facts: Facts) -> Iterator[Event]:
    yield from _creates(facts, "accelerator")


@finds("trainer")
def _trainers(facts: Facts) -> Iterator[Event]:
    yield from _creates(facts, "trainer")


@finds("initialize")
def _initializes(facts: Facts) -> Iterator[Event]:
    yield from _creates(facts, "engine")


def _creates(facts: Facts, kind: str) -> Iterator[Event]:
    for calls in facts.calls.values():
        for call in calls:
            if any(names.kind_of(path) == kind for _, path in facts.paths(call)) or any(
                isinstance(each.atom, Class) and each.atom.facts.class_kind(each.atom.scope) == kind
                for each in facts.evaluate(call.func, call)
                if call.name[:1].isupper()
            ):
                yield Event(kind, call, facts, call.node)


@finds("scale")
def _scales(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "scale"):
        if call.receiver is not None and call.positional and is_scaler(facts, call.receiver, call):
            yield Event("scale", call, facts, call.receiver)


@finds("unscale")
def _unscales(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "unscale_"):
        yield Event("unscale", call, facts, call.argument(0, "optimizer"))


@finds("update")
def _updates(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "update"):
        if call.receiver is not None and is_scaler(facts, call.receiver, call):
            yield Event("update", call, facts, call.receiver)


@finds("backward")
def _backwards(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "backward"):
        if call.receiver is not None and _plain_backward(facts, call):
            yield Event("backward", call, facts, call.receiver)


def _plain_backward(facts: Facts, call: Call) -> bool:
    """`loss.backward()`, as against `engine.backward(loss)` and an autograd function's."""
    if call.positional and constant(call.positional[0]) is None and not isinstance(call.positional[0], cst.Call):
        return False
    if dotted(call.receiver).split(".")[-1] in (
        "self",
        "super",
        "ctx",
        "optimizer",
        "engine",
        "accelerator",
        "fabric",
    ):
        return False
    if isinstance(call.receiver, cst.Call) and dotted(call.receiver.func) == "super":
        return False
    kinds = facts.kinds(call.receiver, call)
    return not kinds & {
        "engine",
        "accelerator",
        "trainer",
        "fabric",
        "model",
        "framework",
        "optimizer",
        "own",
        "scaler",
    }


@finds("framework")
def _frameworks(facts: Facts) -> Iterator[Event]:
    """Backward passes that something else runs: `accelerator.backward(loss)`, `facts.manual_backward(loss)`."""
    for call in _called(facts, "backward", "manual_backward"):
        if not _plain_backward(facts, call):
            yield Event("framework", call, facts, call.receiver)


@finds("step")
def _steps(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "step"):
        if (
            call.receiver is not None
            and not is_scaler(facts, call.receiver, call)
            and is_optimizer(facts, call.receiver, call)
        ):
            yield Event("step", call, facts, call.receiver)


@finds("scaler_step")
def _scaler_steps(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "step"):
        if call.receiver is not None and call.positional and is_scaler(facts, call.receiver, call):
            yield Event("scaler_step", call, facts, call.positional[0])


def is_scaler(facts: Facts, node: cst.CSTNode, at: Record) -> bool:
    kinds = facts.kinds(node, at)
    return "scaler" in kinds or (kinds <= {""} and "scaler" in _last_name(node).lower())


def is_optimizer(facts: Facts, node: cst.CSTNode, at: Record) -> bool:
    """By what it is, or where that is unknown, by its name."""
    kinds = facts.kinds(node, at)
    return "optimizer" in kinds or (kinds <= {"", "parameters"} and bool(_OPTIMIZER.search(_last_name(node).lower())))


@finds("clip")
def _clips(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
        yield Event("clip", call, facts, call.argument(0, "parameters"))


@finds("prepare")
def _prepares(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "prepare"):
        if call.receiver is None:
            continue
        kinds = facts.kinds(call.receiver, call)
        if "accelerator" in kinds or (kinds <= {""} and "accelerator" in _last_name(call.receiver).lower()):
            yield Event("prepare", call, facts, call.receiver)


@finds("convert")
def _converts(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "convert_to_float8_training", *_aliases(facts, "convert_to_float8_training")):
        if any(path == "torchao.float8.convert_to_float8_training" for _, path in facts.paths(call)):
            yield Event("convert", call, facts, call.argument(0, "module"))


def _aliases(facts: Facts, name: str) -> list[str]:
    return [
        key
        for scope in facts.walker.scopes
        for key, bindings in scope.bindings.items()
        if key != name and any(binding.kind == "from" and binding.name == name for binding in bindings)
    ]


@finds("load")
def _loads(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, *names.LOADERS):
        given = call.argument(None, "dtype", "torch_dtype")
        yield Event(
            "load", call, facts, call.node, facts.dtypes(given, call, strings=True) if given is not None else ()
        )


@finds("autocast")
def _autocasts(facts: Facts) -> Iterator[Event]:
    """Calls of an autocast, with the dtypes of its region; see `regions` for where it is entered."""
    for calls in facts.calls.values():
        for call in calls:
            path = (
                next((path for _, path in facts.paths(call) if path in names.AUTOCASTS), None)
                if "autocast" in call.name or call.name in _autocast_names(facts)
                else None
            )
            if path is not None:
                yield Event("autocast", call, facts, call.node, facts.autocast(call, path).dtypes)


def _autocast_names(facts: Facts) -> set[str]:
    return set(_aliases(facts, "autocast"))


@finds("compile")
def _compiles(facts: Facts) -> Iterator[Event]:
    for call in _called(facts, "compile", "optimize", *_aliases(facts, "compile")):
        if call.path in ("re.compile", "regex.compile", "builtins.compile", "sre.compile") or (
            call.receiver is None and call.name == "compile" and not facts.paths(call)
        ):
            continue
        paths = [path for _, path in facts.paths(call)]
        if any(path.startswith(("torch.", "torch_xla.")) for path in paths) or (
            call.receiver is not None and not paths and call.name == "compile"
        ):
            yield Event("compile", call, facts, call.receiver)
    for calls in facts.calls.values():
        for call in calls:
            for keyword, value in call.keywords.items():
                if keyword in _COMPILE_OPTIONS and constant(value) not in ((False,), (None,), ("no",), ("NO",)):
                    yield Event("compile", call, facts, value)
                    break


def compiled(facts: Facts, guard: Guard = ALWAYS) -> bool:
    """Whether something may be compiled under a guard: a call, an option, or a decorator."""
    if any(compatible(event.guard, guard) for event in facts.events("compile")):
        return True
    if "HfArgumentParser" in facts.calls or any(
        call.starred for name, calls in facts.calls.items() if name.endswith("TrainingArguments") for call in calls
    ):
        return True  # `torch_compile` may come from outside
    for name, calls in facts.calls.items():
        if _COMPILES.search(name) and name != "compile" and any(compatible(facts.guard_of(c), guard) for c in calls):
            return True
    return any(
        use.path.endswith("compile") and compatible(use.guard, guard) and not use.path.startswith(("re.", "regex."))
        for scope in facts.walker.scopes
        for uses in scope.uses.values()
        for use in uses
        if not isinstance(facts.walker.parents.get(use.node), cst.Call)
    )


def _last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Subscript):
        node = node.value
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""
