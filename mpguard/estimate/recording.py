"""Record the forward pass of a model on the meta device, as a tape: for architectures that no program here describes.

Imports torch. Operators are recorded as they are dispatched, with what autograd saves for each. Three are replaced by
the tape's own: `F.linear` (FP8 and adapters follow from it), attention (the meta device has no fused kernel), and the
casts of CUDA's autocast, which does not exist on the meta device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from mpguard.estimate.tape import FULL, Op, Storage, Tape, TapeDtypes, Value
from mpguard.estimate.weights import Kind

#: Functions that autocast computes in the 16-bit dtype (aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP).
LOWERED = {
    "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "addmm", "baddbmm", "addbmm", "mv", "einsum", "conv1d",
    "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "bilinear", "prelu",
    "grouped_mm", "_grouped_mm", "multi_head_attention_forward", "scaled_dot_product_attention", "lstm", "gru",
}  # fmt: skip
#: Functions that CUDA's autocast computes in FP32 (AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE).
RAISED = {
    "layer_norm", "group_norm", "softmax", "log_softmax", "pow", "__pow__", "__rpow__", "exp", "log", "rsqrt", "norm",
    "cumsum", "cumprod", "prod", "sum", "softplus", "cosine_similarity", "cross_entropy", "nll_loss", "mse_loss",
    "l1_loss", "smooth_l1_loss", "kl_div", "cdist", "renorm", "logsumexp",
}  # fmt: skip
#: Operators of the dispatcher -> their names on a tape. Other names have no meaning there.
_NAMES = {
    "_to_copy": "cast", "mm": "attention", "bmm": "attention", "addmm": "attention", "baddbmm": "attention",
    "convolution": "linear", "_grouped_mm": "linear", "embedding": "embedding", "native_dropout": "dropout",
    "sum": "mean", "mean": "mean", "index": "index", "gather": "index", "cat": "cat", "add": "add", "mul": "mul",
}  # fmt: skip
#: Operators whose gradient is that of the result.
_PASSES = {"cat", "add", "sub", "clone", "expand"}
#: The most elements of a tensor whose values are computed: indices and masks, and other numbers.
MANY, FEW = 2**22, 2**12


def recorded(
    model: nn.Module, batch: Mapping[str, torch.Tensor], precision: TapeDtypes, compiled: bool = False
) -> Tape:
    """Return the tape of `model(**batch)`.

    The model is on the meta device; its parameters get the dtypes of `precision`. batch: its indices are tensors with
    values, because models decide by them; all else is on the meta device.

    Raises whatever the model raises, such as for code that depends on values.
    """
    recorder = MetaForward(model, precision, compiled)
    if precision.adapters is not None:
        precision.adapters.check(recorder.tape.weights.values())
    wide = torch.float32 if precision.weights == FULL else recorder.compute
    inputs = {
        name: each.to("meta", wide) if each.is_floating_point() else each.to("meta") for name, each in batch.items()
    }
    with recorder.blocks(), recorder.head(), recorder.recording(), torch.enable_grad():
        for name, each in inputs.items():
            recorder.input(each)
            if batch[name].device.type != "meta":
                recorder.know(each, batch[name])
        recorder.end(model(**inputs))
    return recorder.tape


class MetaForward:
    """The tape of a model, and which of its values each tensor is.

    saved: what autograd keeps, by the sequence number of its node; nodes: those that an operator has. inside: operators
    that ran without gradients, which those of an `autograd.Function` do. numbers: the values of some tensors, by their
    ids. alive: all tensors, so that no id is used twice.
    """

    def __init__(self, model: nn.Module, precision: TapeDtypes, compiled: bool) -> None:
        self.model, self.precision = model, precision
        self.tape = Tape(precision, compiled)
        self.values: dict[int, Value] = {}
        self.numbers: dict[int, torch.Tensor] = {}
        self.storages: dict[int, Storage] = {}
        self.saved: dict[int, dict[Storage, None]] = defaultdict(dict)
        self.nodes: set[int] = set()
        self.inside: dict[Value, _Late] = {}
        self.names: dict[int, str] = {}
        self.copies: dict[tuple[int | None, int], torch.Tensor] = {}
        self.alive: list[torch.Tensor] = []
        self.compute = torch.bfloat16 if precision.compute != FULL else torch.float32
        self._declare()

    # -- the structure of the model ----------------------------------------------------------------------------------

    def _declare(self) -> None:
        """Declare all parameters and buffers, each in its block, and give them their dtypes."""
        kinds = _kinds(self.model)
        self.units = _blocks(self.model)
        owners = {name: number for number, name in enumerate(self.units)}
        for name, parameter in self.model.named_parameters():
            unit = next((each for each in owners if name.startswith(f"{each}.")), None)
            self.tape._segment = None if unit is None else owners[unit]
            value = self.tape.parameter(name, tuple(parameter.shape), kinds.get(name, "vector"))
            wide = value.width == FULL
            parameter.data = parameter.data.to(torch.float32 if wide else self.compute)
            parameter.requires_grad_(value.grad and parameter.is_floating_point())
            self._remember(parameter, value)
            self.names[id(parameter)] = name
        self.tape._segment = None
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self.compute if self.precision.weights != FULL else torch.float32)
                self.tape.buffer(name, buffer.numel(), buffer.element_size())
            self._remember(buffer, Value(buffer.numel(), buffer.element_size(), False, Storage(0, "weight")))
        self.tape.blocks = len(self.units)

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """Mark what runs in a repeated block."""
        handles = []
        for number, name in enumerate(self.units):
            module = self.model.get_submodule(name)

            def enter(*_: Any, number: int = number) -> None:
                self.tape._segment = number

            def leave(*_: Any) -> None:
                self.tape._segment = None

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def head(self) -> Iterator[None]:
        """Mark what the head of a language model computes as logits."""
        finder = getattr(self.model, "get_output_embeddings", None)
        head = finder() if finder is not None else None
        if not isinstance(head, nn.Module):
            yield
            return

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            for each in inputs[:1]:
                self.tape.head(self.value(each))

        handle = head.register_forward_pre_hook(enter)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), _Functions(self), _Operators(self):
            yield

    # -- tensors -----------------------------------------------------------------------------------------------------

    def input(self, tensor: torch.Tensor) -> None:
        """Make a tensor an input of the model."""
        self._remember(tensor, self.tape.constant(tensor.numel(), tensor.element_size(), "input"))

    def _remember(self, tensor: torch.Tensor, value: Value) -> Value:
        self.values[id(tensor)] = value
        self.storages[_key(tensor)] = value.storage
        self.alive.append(tensor)
        return value

    def know(self, tensor: torch.Tensor, numbers: torch.Tensor) -> None:
        """Remember the values of a tensor."""
        self.numbers[id(tensor)] = numbers
        self.alive.append(tensor)

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor, if they are known."""
        return tensor if tensor.device.type == "cpu" else self.numbers.get(id(tensor))

    def number(self, each: Any) -> Any:
        """Return the number that a tensor has, if it is known, for a tensor that is made of such."""
        numbers = self.known(each) if isinstance(each, torch.Tensor) else None
        return each if numbers is None else numbers

    def storage(self, tensor: torch.Tensor) -> Storage:
        """Return the memory of a tensor."""
        key = _key(tensor)
        if key not in self.storages:
            self.storages[key] = Storage(tensor.untyped_storage().nbytes())
            self.alive.append(tensor)
        return self.storages[key]

    def value(self, tensor: torch.Tensor) -> Value:
        """Return what a tensor is on the tape."""
        found = self.values.get(id(tensor))
        if found is None:
            storage = self.storage(tensor)
            found = Value(tensor.numel(), tensor.element_size(), tensor.requires_grad, storage)
            self._remember(tensor, found)
        if tensor.requires_grad and not found.grad:
            self._differentiate(found)
        return found

    def _differentiate(self, value: Value) -> None:
        """Give a gradient to what an `autograd.Function` has returned, and to what it has computed it from."""
        value.grad = True
        op = self.inside.pop(value, None)
        if op is not None:
            for node in op.nodes - self.nodes:
                self.nodes.add(node)
                op.kept = self.saved[node]
            for each in op.inputs:
                if each in self.inside:
                    self._differentiate(each)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.numel():
            self.saved[_node()][self.storage(tensor)] = None
        return tensor

    # -- operators ---------------------------------------------------------------------------------------------------

    def ran(self, operator: torch._ops.OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
            before: Mapping[int, Value]) -> None:  # fmt: skip
        """Record an operator that the dispatcher has run. before: what tensors were that it has changed."""
        name = operator._schema.name.removeprefix("aten::").rstrip("_")
        read = [before.get(id(each)) or self.value(each) for each in inputs if each.numel()]
        differentiable = torch.is_grad_enabled() and any(each.grad for each in read)
        known = {_key(each) for each in inputs}
        first = True
        for output in outputs:
            if not output.numel():
                continue
            floating = output.is_floating_point() or output.is_complex()
            changed = id(output) in before
            if not changed and _key(output) in known:  # a view
                source = next(each for each in inputs if _key(each) == _key(output))
                self._view(self.value(source), output)
                continue
            if not floating and not differentiable:
                self._integers(name, read, output)
                continue
            storage = self.storage(output)
            if self.tape._kind == "logits" and not changed:
                storage.kind = "logits"
            value = Value(output.numel(), output.element_size(), differentiable and floating, storage)
            self._remember(output, value)
            self.tape.ops.append(self._op(operator, name, tuple(read), value, first))
            first = False

    def _op(self, operator: torch._ops.OpOverload, name: str, read: tuple[Value, ...], value: Value, first: bool) -> Op:
        cheap = torch.Tag.pointwise in operator.tags or name in ("_to_copy", "clone", "cat", "copy")
        own = _NAMES.get(name, name)
        if own == "attention" and any(each.weight is not None for each in read):
            own = "linear"
        op = _Late(own, read, value, passes=name in _PASSES, segment=self.tape._segment, cheap=cheap)
        op.nodes = {_node()}
        if not value.grad:
            if any(each.grad or each in self.inside for each in read):
                self.inside[value] = op
        elif first and not op.nodes <= self.nodes:
            self.nodes |= op.nodes
            op.kept = self.saved[_node()]
        return op

    def _view(self, source: Value, output: torch.Tensor) -> None:
        """A view of the whole is the same value. One of a part has a gradient as large as the whole."""
        if output.numel() == source.count and output.element_size() == source.width:
            self._remember(output, source)
            return
        value = Value(output.numel(), output.element_size(), source.grad and torch.is_grad_enabled(), source.storage)
        self._remember(output, value)
        own = "expand" if output.numel() > source.count else "slice"
        self.tape.ops.append(Op(own, (source,), value, segment=self.tape._segment, cheap=True))

    def _integers(self, name: str, read: Sequence[Value], output: torch.Tensor) -> None:
        value = Value(output.numel(), output.element_size(), False, self.storage(output))
        self._remember(output, value)
        self.tape.ops.append(Op(name, tuple(read), value, segment=self.tape._segment, cheap=True))

    def made(self, value: Value, shape: Sequence[int], like: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor for a value that the tape has made. like: queries, as which a fused kernel lays out results:
        by rows of tokens, if they are dense in no other order.
        """
        dtype = torch.float32 if value.width == FULL else self.compute
        with _paused():
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
            if like is not None and like.shape == tensor.shape:
                tensor = torch.empty_like(like.transpose(-3, -2), dtype=dtype).transpose(-3, -2)
            if value.grad:
                tensor = tensor.requires_grad_().mul(1)
        self._remember(tensor, value)
        return tensor

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """Record `F.linear` as the tape has it. None if the weight is no parameter."""
        name = self.names.get(id(weight))
        if name is None or weight.ndim != 2 or not x.numel():
            return None
        outputs, inputs = weight.shape
        value = self.value(x)
        known = bias is None or self.names.get(id(bias)) == f"{name.removesuffix('.weight')}.bias"
        if name.endswith(".weight") and known:
            y = self.tape.linear(value, name.removesuffix(".weight"), inputs, outputs, bias is not None)
        else:
            more = [] if bias is None else [self.value(bias)]
            y = self.tape._linear(value, self.value(weight), name, (inputs, outputs), more)
        return self.made(y, (*x.shape[:-1], outputs))

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Record a fused kernel."""
        bias = self.value(mask) if mask is not None and mask.requires_grad else None
        queries, keys, values = (self.value(each) for each in (q, k, v))
        y = self.tape.attention(queries, keys, values, q.numel() // q.shape[-1], bias)
        if v.shape[-1] != q.shape[-1]:
            y.resize(q.numel() // q.shape[-1] * v.shape[-1])
        return self.made(y, (*q.shape[:-1], v.shape[-1]), like=q)

    def grouped(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Record a grouped matmul, whose matrices follow each other in `weight`."""
        read = [self.value(self.cast(each, self.compute)) for each in (x, weight)]
        y = self.tape._new("linear", read, (x.shape[0] * weight.shape[-1], self.precision.compute), read)
        return self.made(y, (x.shape[0], weight.shape[-1]))

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast a tensor for autocast. Copies of parameters are kept until autocast ends."""
        if tensor.dtype == dtype or not tensor.is_floating_point():
            return tensor
        if not isinstance(tensor, nn.Parameter) or dtype == torch.float32:
            return tensor.to(dtype)
        key = (self.tape._segment, id(tensor))
        if key not in self.copies:
            self.copies[key] = tensor.to(dtype)
            self.storage(self.copies[key]).kind = "copy"
        return self.copies[key]

    def end(self, result: Any) -> None:
        """End the tape with the loss, and name what the model returns."""
        outputs = [each for each in tree_iter(dict(result) if hasattr(result, "keys") else result)
                   if isinstance(each, torch.Tensor) and each.is_floating_point()]  # fmt: skip
        given = getattr(result, "loss", None)
        loss = given if isinstance(given, torch.Tensor) else outputs[0].float().mean()
        self.tape.returned += [self.value(each) for each in outputs if each is not given and each.numel()]
        if not loss.requires_grad:
            raise ValueError("the result of the model does not depend on trained parameters")
        end = self.value(loss)
        for op in self.tape.ops:
            if isinstance(op, _Late):
                op.saved = tuple(op.kept)
        if self.tape.ops[-1].output is not end:
            self.tape.ops.append(Op("loss", (end,), Value(1, FULL, True, Storage(FULL)), passes=True))


class _Late(Op):
    """An operator whose saved tensors autograd adds while and after it runs."""

    kept: Mapping[Storage, None]
    nodes: set[int]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.kept, self.nodes = {}, set()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hand operators of the dispatcher to a recorder.

    Computes the values of tensors that follow from the batch's indices too, since models decide by them: which tokens
    are images, is there padding. The meta device has none.
    """

    def __init__(self, recorder: MetaForward) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.numbers = recorder, recorder.numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        changed: dict[int, Value] = {}
        if func._schema.is_mutable:
            written = [
                args[index] if index < len(args) else kwargs.get(argument.name)
                for index, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            changed = {id(each): self.recorder.value(each) for each in _tensors(written)}
        result = self._result(func, args, kwargs, inputs)
        self.recorder.ran(func, inputs, _tensors(result), changed)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """Run an operator on the meta device, and on the values of its inputs where they are known."""
        known = all(self.recorder.known(each) is not None for each in inputs)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if not known:
                raise
            real = self._on_numbers(func, args, kwargs)
            result = tree_map(lambda each: each.to("meta") if isinstance(each, torch.Tensor) else each, real)
        else:
            if not known or any(not _countable(each) for each in _tensors(result)):
                for each in inputs if func._schema.is_mutable else ():
                    self.numbers.pop(id(each), None)
                return result
            real = self._on_numbers(func, args, kwargs)
        for meta, each in zip(_tensors(result), _tensors(real), strict=True):
            self.recorder.know(meta, each)
        return result

    def _on_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return self.recorder.known(each)
            return torch.device("cpu") if isinstance(each, torch.device) else each

        with torch.no_grad():
            return func(*tree_map(real, args), **tree_map(real, kwargs))


def _countable(tensor: torch.Tensor) -> bool:
    """True for tensors whose values are computed: masks, positions and other indices, and a few other numbers."""
    return tensor.numel() <= (FEW if tensor.is_floating_point() or tensor.is_complex() else MANY)


class _Functions(TorchFunctionMode):
    """Replace functions that the meta device runs otherwise than a GPU."""

    def __init__(self, recorder: MetaForward) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder, precision = self.recorder, self.recorder.precision
        if func is F.linear:
            found = recorder.linear(*args, **kwargs) if "input" not in kwargs else None
            if found is not None:
                return found
        if func is F.scaled_dot_product_attention:
            q, k, v, *rest = args
            return recorder.attention(q, k, v, rest[0] if rest else kwargs.get("attn_mask"))
        name = getattr(func, "__name__", "")
        if name in ("grouped_mm", "_grouped_mm"):
            return recorder.grouped(*args[:2])
        if name == "tolist" and (numbers := recorder.known(args[0])) is not None:
            return numbers.tolist()
        if func is torch.tensor:
            numbers = func(*tree_map(recorder.number, args), **{**kwargs, "device": "cpu"})
            tensor = numbers.to(kwargs.get("device", "cpu"))
            recorder.know(tensor, numbers)
            return tensor
        if name == "__getitem__" and (numbers := recorder.known(args[0])) is not None:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, list) for each in index):  # which makes a tensor on the meta device
                tensor = func(*args)
                recorder.know(tensor, numbers[args[1]])
                return tensor
        if name in LOWERED:
            dtypes = {each.dtype for each in _tensors((args, kwargs)) if each.is_floating_point()}
            if precision.autocast or len(dtypes) > 1:
                args, kwargs = tree_map(self._caster(recorder.compute), (args, kwargs))
        elif name in RAISED and precision.autocast and precision.cuda:
            args, kwargs = tree_map(self._caster(torch.float32), (args, kwargs))
        return func(*args, **kwargs)

    def _caster(self, dtype: torch.dtype) -> Callable[[Any], Any]:
        return lambda each: self.recorder.cast(each, dtype) if isinstance(each, torch.Tensor) else each


@contextmanager
def _paused() -> Iterator[None]:
    """Run without recording."""
    with (
        torch.utils._python_dispatch._disable_current_modes(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, _unpack),
    ):
        yield


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _node() -> int:
    """Return the sequence number of the node of autograd's graph that the running operator has."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number - 1


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_iter(tree) if isinstance(each, torch.Tensor)]


def _kinds(model: nn.Module) -> dict[str, Kind]:
    """Return the kinds of parameters by name: matrices, tables and stacked experts. Others are vectors."""
    found: dict[str, Kind] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if isinstance(module, nn.Embedding):
                found[name] = "embedding"
            elif parameter.ndim == 2 or (parameter.ndim > 2 and name.endswith(".weight")):
                found[name] = "linear"
            elif parameter.ndim == 3 and "expert" in name:
                found[name] = "expert"
    return found


def _blocks(model: nn.Module) -> list[str]:
    """Return the names of the repeated blocks: the entries of the outermost lists with several equal modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0 and not _inside(name, found):
            kinds = {type(each) for each in module}
            if (
                len(kinds) <= 3
                and any(True for _ in module[0].parameters())
                and any(True for _ in module[0].children())
            ):
                found += [f"{name}.{index}" for index in range(len(module))]
    return found


def _inside(name: str, blocks: Iterable[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)
