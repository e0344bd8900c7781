"""Keep `is_causal` in the attention of transformers' causal models under `torch.compile`.

Eager, transformers reads two tensors to find out that a mask is plainly causal, and then leaves it to SDPA's
`is_causal`: the padding mask (no padding) and the position ids (no packed sequences). A compiler cannot read them, so
a compiled model gets an explicit mask, which keeps SDPA off its fast kernels and repeats the keys of grouped heads.

What can be known without reading is decided here, as eager code would decide it:

- position ids that are counted up in the model itself, which dynamo's graph shows: no packed sequences;
- a padding mask of ones, made in the model or read before compiled code was called (`reading_masks`): no padding;
- no padding mask, as many queries as keys, no shorter window: older versions give up because they are traced.

Everything else is left to transformers, and all of it outside of compiled code. If something fails here, it is "not
known". Dynamo traces the wrappers: they are not in `mpguard.runtime`, whose frames it skips. Importing this module
does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.fx import Node

log = logging.getLogger("mpguard")

#: The implementation of attention that takes `is_causal`.
SDPA = "sdpa"

#: The attribute of a padding mask that was read before compiled code was called: True if it is all ones.
MARK = "_mpguard_all_ones"

#: The attribute of a function that reads masks, and of what wraps it with `functools.wraps`.
READS = "_mpguard_reads_masks"

#: Masks that are read in any case: a padded one among the first does not decide for the run.
FIRST_MASKS = 4

#: Calls in dynamo's graphs that keep the values of integers, calls that only place them elsewhere, and calls that add a
#: number to all of them.
CASTS = frozenset(("to", "bool", "int", "long", "contiguous", "clone"))
VIEWS = frozenset(("unsqueeze", "expand", "view", "reshape", "repeat", "getitem"))
SHIFTS = frozenset(("add", "sub"))

#: Calls whose result is all ones.
ONES = frozenset(("ones", "ones_like", "new_ones"))


class _Switch:
    """on: False to leave everything to transformers. Dynamo guards the attribute."""

    on = True


_switch = _Switch()


def switch(on: bool) -> None:
    """Set if masks are decided here: `attention_fix` of a policy."""
    _switch.on = on


# -- wrappers of transformers' functions ---------------------------------------------------------


def skip_causal_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_ignore_causal_mask_sdpa`, which returns False where it would have to read a padding mask to return True.

    The number of queries is the parameter before `kv_length`: `query_length` in transformers 5.0, `q_length` later.
    """
    import torch
    from torch._dynamo.comptime import comptime

    names = list(inspect.signature(original).parameters)
    queries = names[names.index("kv_length") - 1]
    decided = torch.compiler.assume_constant_result(_decided)  # type: ignore[no-untyped-call]

    @functools.wraps(original)
    def _ignore_causal_mask_sdpa(*args: Any, **kwargs: Any) -> Any:
        if _applies(torch):
            given = dict(zip(names[: len(args)], args, strict=True), **kwargs)
            length, window = given.get("kv_length"), given.get("local_attention_size")
            plain = not isinstance(given.get("q_offset"), torch.Tensor) and length == given.get(queries)
            if plain and (window is None or length < window):
                padding_mask = given.get("padding_mask")
                if padding_mask is None:
                    return True
                comptime(_decide_mask)
                if decided():
                    return True
        return original(*args, **kwargs)

    return _ignore_causal_mask_sdpa


def find_no_packed_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `find_packed_sequence_indices`: None, which means none, for position ids that count up in the graph."""
    import torch
    from torch._dynamo.comptime import comptime

    decided = torch.compiler.assume_constant_result(_decided)  # type: ignore[no-untyped-call]

    @functools.wraps(original)
    def find_packed_sequence_indices(position_ids: Any) -> Any:
        if _applies(torch):
            comptime(_decide_positions)
            if decided():
                return None
        return original(position_ids)

    return find_packed_sequence_indices


def leave_to_eager_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that creates a causal mask: dynamo does not compile it alone.

    It would, where the caller's loop over FSDP2's blocks is left to eager code. There masks can be read.
    """
    import torch
    from torch._dynamo.comptime import comptime

    eager = torch.compiler.disable(original)  # type: ignore[no-untyped-call]

    @functools.wraps(original)
    def create_mask(*args: Any, **kwargs: Any) -> Any:
        config = args[0] if args else kwargs.get("config")
        if not _switch.on or getattr(config, "_attn_implementation", None) != SDPA:
            return original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return eager(*args, **kwargs)
        if _applies(torch):
            comptime(_skip_if_alone)
        return original(*args, **kwargs)

    return create_mask


def _applies(torch: Any) -> bool:
    """True in compiled code. False in `torch.export`, whose program has other inputs later, or if that is not known."""
    return _switch.on and torch.compiler.is_compiling() and not getattr(torch.compiler, "_is_exporting_flag", True)


# -- what dynamo's graph shows -------------------------------------------------------------------

_answers: list[bool] = []


def _decide_positions(context: Any) -> None:
    _decide(_counts_up, context, "position_ids")


def _decide_mask(context: Any) -> None:
    _decide(_is_all_ones, context, "padding_mask")


def _skip_if_alone(context: Any) -> None:
    """Leave the function that dynamo traces to eager code, if it is not part of another one."""
    from torch._dynamo.exc import SkipFrame

    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator  # not that of an inlined call

        alone = isinstance(context._i_will_not_complain_if_bc_breaks_InstructionTranslator(), InstructionTranslator)
    except (AttributeError, ImportError) as error:
        log.debug("mpguard: attention: the function that dynamo traces is not known", exc_info=error)
        return
    if alone:
        raise SkipFrame("the values of masks are known in eager code")


def _decide(holds: Callable[[Node], bool], context: Any, name: str) -> None:
    """Decide about the value of a local variable while dynamo traces the function that has it."""
    _answers.clear()
    try:
        node = context.get_local(name).as_proxy().node
        _answers.append(holds(node) and not _is_written(node))
    except Exception as error:  # what dynamo keeps of its graph has changed, or is not there
        log.debug("mpguard: attention: %s is not known", name, exc_info=error)


def _decided() -> bool:
    """Return the decision, which is a constant of the compiled code."""
    return any(_answers)


def _counts_up(node: Node) -> bool:
    """True if the last dimension of a value counts up by one, from wherever, in any run of the graph."""
    import torch

    nodes = _chain(node, CASTS | VIEWS | SHIFTS)
    start = nodes[-1]
    sizes = (*start.args, *start.kwargs.values())
    if _called(start) != "arange" or len(start.args) > 2 or "step" in start.kwargs or any(map(_has_tensor, sizes)):
        return False
    # Every view has the dimension of the start as its last one, so that no view can have changed the order in it.
    return all(
        _value(each).dtype in (torch.int64, torch.int32) and _same(_value(each).shape[-1], _value(start).shape[0])
        for each in nodes
    )


def _is_all_ones(node: Node) -> bool:
    """True if a value is all ones: made so in the graph, or an input that was read, by which the graph is guarded."""
    start = _chain(node, CASTS | VIEWS)[-1]
    if _called(start) in ONES:
        return True
    given = start.meta.get("grapharg") if start.op == "placeholder" else None
    if given is None or MARK not in vars(given.example):
        return False
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    for masks in _called_last:
        masks.asked = True
    install_guard(AttrSource(given.source, MARK).make_guard(GuardBuilder.EQUALS_MATCH))
    return bool(vars(given.example)[MARK])


def _chain(node: Node, through: Collection[str]) -> list[Node]:
    """Return a node, what it is a cast or view of, and so on, while the calls are known and take no other tensor."""
    nodes = [node]
    while _called(node) in through and hasattr(node.args[0], "op") and not any(map(_has_tensor, node.args[1:])):
        node = node.args[0]  # type: ignore[assignment]
        nodes.append(node)
    return nodes


def _is_written(node: Node) -> bool:
    """True if something was written in place into a value that may share memory with that of a node."""
    start = _chain(node, CASTS | VIEWS | SHIFTS)[-1]
    written = [each.args[0] for each in node.graph.nodes if _writes(_called(each)) and each.args]
    known: set[Any] = set()
    while written:
        each = written.pop()
        if hasattr(each, "op") and each not in known:
            known.add(each)
            written += each.all_input_nodes
    return start in known


def _writes(call: str) -> bool:
    """True if a function writes into its first argument: `setitem`, `iadd` and so on, `masked_fill_` and so on."""
    in_place = call.startswith("i") and call[1:] in ("add", "sub", "mul", "and", "or", "xor", "truediv", "floordiv")
    return call == "setitem" or in_place or (call.endswith("_") and not call.endswith("__"))


def _called(node: Node) -> str:
    """Return the name of the function or method that a node calls; its kind if it calls none."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else node.op


def _has_tensor(argument: Any) -> bool:
    """True if an argument of a call is, or has in it, a tensor or something unknown; sizes and numbers are known."""
    if isinstance(argument, (tuple, list)):
        return any(map(_has_tensor, argument))
    if isinstance(argument, slice):
        return any(map(_has_tensor, (argument.start, argument.stop, argument.step)))
    return hasattr(argument, "op") and type(_value(argument)).__name__ not in ("SymInt", "int")


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _same(one: Any, other: Any) -> bool:
    """True if two sizes are equal for all inputs."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(one == other))


# -- masks that are read before compiled code is called ------------------------------------------


@dataclasses.dataclass
class _Masks:
    """The padding masks that a model was trained with. ones, padded: how many were, or were not, all ones.

    asked: True if compiled code of the model depends on it. That of encoders never does.
    """

    ones: int = 0
    padded: int = 0
    asked: bool = False

    @property
    def are_read(self) -> bool:
        """True while the next one is worth a check."""
        return (self.asked and self.ones >= self.padded) or self.ones + self.padded < FIRST_MASKS

    def count(self, ones: bool) -> bool:
        """Count a mask, and return what it is."""
        self.ones += ones
        self.padded += not ones
        return ones


_models: weakref.WeakKeyDictionary[nn.Module, _Masks | None] = weakref.WeakKeyDictionary()

#: The masks of the model that was called last, whose mask is the one that dynamo meets.
_called_last: list[_Masks] = []


def reading_masks(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reads the padding mask of a compiled model before it calls its compiled code.

    Dynamo traces it if the script compiles what calls the model. A function that reads them is returned as it is.
    """
    import torch

    if hasattr(call, READS):
        return call

    @functools.wraps(call)
    def read_and_call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            read_mask(model, kwargs.get("attention_mask"))
        return call(*args, **kwargs)

    setattr(read_and_call, READS, True)
    return read_and_call


def read_mask(model: nn.Module, mask: Tensor | None) -> None:
    """Mark a padding mask that is all ones, if a model of transformers is trained with it.

    Reading waits for the device, and one more program is compiled for the first padded batch. Both stop where more
    batches are padded than not, and where no code depends on them; the first ones are read in any case.
    """
    import torch

    if mask is None or type(mask) is not torch.Tensor or mask.ndim != 2:
        return
    vars(mask).pop(MARK, None)
    if not _switch.on or not model.training or not torch.is_grad_enabled():
        return
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    try:
        if model not in _models:
            _models[model] = _Masks() if _takes_is_causal(model) else None
        masks = _models[model]
        if masks is not None:
            _called_last[:] = [masks]
            vars(mask)[MARK] = masks.count(bool((mask == 1).all()) if masks.are_read else False)
    except Exception as error:
        log.debug("mpguard: attention: a mask is not known", exc_info=error)


def _takes_is_causal(model: nn.Module) -> bool:
    """True if a model, or a model in it, is one of transformers that computes attention with SDPA."""
    return any(
        getattr(module.config, "_attn_implementation", None) == SDPA
        for module in model.modules()
        if any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
    )
