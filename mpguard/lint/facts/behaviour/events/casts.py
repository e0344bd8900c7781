"""Events of explicit casts, and of weights created or loaded in a dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour import layer_dtypes
from mpguard.lint.facts.behaviour.events.event import Event, finds, last_name
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.dtypes import PossibleDtypes
from mpguard.lint.facts.program.lattice import Class, Constant, Function, Object, Ref
from mpguard.lint.facts.syntax.nodes import constant
from mpguard.lint.facts.syntax.path_condition import ALWAYS
from mpguard.lint.facts.syntax.records import Call
from mpguard.lint.facts.syntax.view import aliases, called
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView


#: A module that a Trainer may train, but other code as well.
_LIGHTNING = lazy_pattern(r"(?:^|\.)LightningModule$")
#: Methods that cast, and their dtypes: of torch, and of networks that descend from those of guided-diffusion.
_CASTS = {
    "half": Dtype.FP16, "bfloat16": Dtype.BF16, "convert_to_fp16": Dtype.FP16, "convert_to_bf16": Dtype.BF16,
}  # fmt: skip
#: Methods that are called on their class: `torch.Tensor.half(x)`.
_UNBOUND = frozenset(f"torch.{owner}.{name}" for owner in ("Tensor", "nn.Module") for name in _CASTS)


@finds("cast")
def _casts(facts: BehaviourView) -> Iterator[Event]:
    """Yield `x.half()`, `x.to(torch.float16)`, `x.type(...)` and the same for BF16, with their dtypes."""
    for call in called(facts, *_CASTS):
        if call.receiver is not None and not call.node.args and _is_torch(facts, call):
            yield Event("cast", call, facts, call.receiver, ((ALWAYS, _CASTS[call.name]),))
    for call in called(facts, *_CASTS):
        if call.positional and _UNBOUND.intersection(path for _, path in facts.paths(call)):
            yield Event("cast", call, facts, call.positional[0], ((ALWAYS, _CASTS[call.name]),))
    for call in called(facts, "to"):
        if call.receiver is None:
            continue
        given = call.keywords.get("dtype")
        for argument in [given] if given is not None else call.positional[:2]:
            dtypes = () if last_name(argument) == "device" else facts.dtypes(argument, call)
            if any(dtype is not None for _, dtype in dtypes):
                if _widens(dtypes) or _is_torch(facts, call):
                    yield Event("cast", call, facts, call.receiver, dtypes)
                break
    for call in called(facts, "type"):
        given = call.argument(0, "dtype")
        if call.receiver is None or given is None:
            continue
        text = constant(given)
        if text is None:
            dtypes = facts.dtypes(given, call)
        else:
            dtypes = ((ALWAYS, Dtype.FP16),) if text[0] in api_names.HALF_TENSOR_STRINGS else ()
        if any(dtype is not None for _, dtype in dtypes) and (_widens(dtypes) or _is_torch(facts, call)):
            yield Event("cast", call, facts, call.receiver, dtypes)


def _widens(dtypes: PossibleDtypes) -> bool:
    """True if a cast is to FP32 only: what has it is not asked, which may need other files."""
    return all(dtype is Dtype.FP32 for _, dtype in dtypes)


def _is_torch(facts: BehaviourView, call: Call) -> bool:
    """True if a method's receiver may be a tensor or a module.

    It is neither a library nor an object of another known kind, and its class defines no such method itself.
    """
    for each in facts.evaluate(call.receiver, call):
        if isinstance(each.atom, Constant) and each.atom.value is None:
            continue  # what a factory returns for an unknown name
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
            is_module = each.atom.cls is not None and any(map(_LIGHTNING.search, facts.ancestry(each.atom.cls)))
            if not is_module:
                return False
    return not any(
        isinstance(each.atom, Function) and each.atom.scope.parent is not None
        for each in facts.evaluate(call.func, call)
    )


@finds("construct")
def _constructs(facts: BehaviourView) -> Iterator[Event]:
    """Yield layers and parameters of torch that are created in a dtype: `nn.Linear(8, 8, dtype=torch.float16)`."""
    for name, calls in facts.calls.items():
        for call in calls if api_names.CAPITAL.match(name) or name.endswith(("cls", "class")) else ():
            if "dtype" not in call.keywords and not call.starred and name != "Parameter":
                continue
            paths = [path for _, path in facts.paths(call) if path.startswith("torch.nn.")]
            dtypes: PossibleDtypes = ()
            if any(path.rsplit(".", 1)[-1] == "Parameter" for path in paths):
                is_trained = constant(call.argument(1, "requires_grad")) in (None, (True,))
                dtypes = layer_dtypes.of_parameter(call, facts) if is_trained else ()
            elif any(api_names.kind_of(path) == "model" for path in paths):
                dtypes = layer_dtypes.of_layer(call, facts)
            if dtypes:
                yield Event("construct", call, facts, call.node, dtypes)


@finds("load")
def _loads(facts: BehaviourView) -> Iterator[Event]:
    """Yield calls of `from_pretrained` and similar loaders, with the dtype of the weights."""
    for call in called(facts, *api_names.LOADERS):
        given = call.argument(None, "dtype", "torch_dtype")
        yield Event(
            "load", call, facts, call.node, facts.dtypes(given, call, strings=True) if given is not None else ()
        )


@finds("default_dtype")
def _default_dtypes(facts: BehaviourView) -> Iterator[Event]:
    """Yield `torch.set_default_dtype(...)` and `set_default_tensor_type(...)`, with the dtype of the tensor type."""
    for call in called(facts, "set_default_dtype", *aliases(facts, "set_default_dtype")):
        if "torch.set_default_dtype" in {path for _, path in facts.paths(call)}:
            yield Event("default_dtype", call, facts, call.node, facts.dtypes(call.argument(0, "d"), call))
    for call in called(facts, "set_default_tensor_type", *aliases(facts, "set_default_tensor_type")):
        if "torch.set_default_tensor_type" in {path for _, path in facts.paths(call)}:
            given = call.argument(0, "t")
            text = constant(given)
            dtype = api_names.DTYPES.get(text[0]) if text is not None and isinstance(text[0], str) else None
            dtypes = ((ALWAYS, dtype),) if text is not None else facts.dtypes(given, call)
            yield Event("default_dtype", call, facts, call.node, dtypes)
