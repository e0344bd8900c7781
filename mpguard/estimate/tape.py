"""A training step as a list of operators, each with the tensors that it saves for the backward pass.

A model family is written as the program that runs (families.py): it calls the operators of a `Tape` on `Value`s, which
have a size and a dtype and no numbers. The same program declares the weights, so counts and memory have one source.
Rules of saved tensors are those of torch 2.13's autograd formulas (tools/autograd/derivatives.yaml) and of CUDA
autocast (aten/src/ATen/autocast_mode.h). tests/estimate compares them with what real models save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from mpguard.estimate.adapters import MARK, Adapters
from mpguard.estimate.weights import Kind, Weight

#: Bytes of an element: FP32, the 16-bit compute dtype, integers (of indices), masks.
FULL, HALF, INDEX, MASK = 4, 2, 8, 1

#: Rows of FP8 matmuls are multiples of it.
PADDED = 16

#: Operators that torch.compile never fuses with others.
PRODUCTS = ("linear", "attention", "embedding")


class Storage:
    """Memory of one or more values."""

    __slots__ = ("kind", "size")

    def __init__(self, size: int, kind: str = "activation") -> None:
        self.size, self.kind = size, kind


class Value:
    """A tensor without numbers. width: bytes of an element; grad: it needs a gradient; weight: it is a parameter."""

    __slots__ = ("count", "grad", "storage", "weight", "width")

    def __init__(self, count: int, width: int, grad: bool, storage: Storage, weight: Weight | None = None) -> None:
        self.count, self.width, self.grad, self.storage, self.weight = count, width, grad, storage, weight

    def resize(self, count: int) -> None:
        """Set the number of elements of a tensor that has its memory to itself."""
        self.count, self.storage.size = count, count * self.width


@dataclasses.dataclass(eq=False)
class Op:
    """An operator that has run.

    saved: what autograd keeps until its backward has run. passes: its gradient is handed on without a copy. workspace:
    bytes that exist only while its backward runs. segment: the part of the model that checkpointing computes again.
    cheap: torch.compile computes it again in the backward pass instead of saving its result.
    """

    name: str
    inputs: tuple[Value, ...]
    output: Value
    saved: tuple[Storage, ...] = ()
    passes: bool = False
    workspace: int = 0
    segment: int | None = None
    cheap: bool = False


@dataclasses.dataclass(frozen=True)
class TapeDtypes:
    """How a model computes.

    weights: bytes of an element of the parameters that the forward pass sees; compute: bytes of an element of what
    matmuls read. They differ under autocast, which casts both for each matmul. fp8: bytes that Transformer
    Engine saves for an element of the weight of an FP8 layer; 0 without it (torchao's layers save what others save).
    fp8_layers, fp8_experts: which Linear layers, and which experts, are FP8: functions of name, inputs and outputs.
    row: tokens in a row if attention with grouped queries stores all scores in FP32, as on CUDA, which has no other
    kernel for it; 0 on the CPU.
    adapters: of a frozen model, of which nothing else trains.
    cuda: `pow`, softmax and layer norms are in FP32 under autocast, which they are on CUDA only.
    """

    weights: int = FULL
    compute: int = FULL
    fp8: int = 0
    fp8_layers: Callable[[str, int, int], bool] | None = None
    fp8_experts: Callable[[str, int, int], bool] | None = None
    row: int = 0
    cuda: bool = False
    adapters: Adapters | None = None

    @property
    def autocast(self) -> bool:
        """True if weights and inputs are cast for each matmul."""
        return self.weights != self.compute


class Tape:
    """Record the operators of a forward pass."""

    def __init__(self, precision: TapeDtypes, compiled: bool = False) -> None:
        self.precision, self.compiled = precision, compiled
        self.ops: list[Op] = []
        self.weights: dict[str, Weight] = {}
        self.frozen: dict[str, int] = {}
        self._parameters: dict[str, Value] = {}
        self._copies: dict[str, Value] = {}
        self._segment: int | None = None
        self._prefix = ""
        self.blocks = 0
        self.returned: list[Value] = []
        self._kind = "activation"

    # -- the structure of a model ------------------------------------------------------------------------------------

    @contextmanager
    def block(self, prefix: str) -> Iterator[None]:
        """Everything inside is one of the repeated blocks: a unit of FSDP and of checkpointing."""
        self._segment, self._prefix = self.blocks, f"{prefix}." if prefix else ""
        self.blocks += 1
        try:
            yield
        finally:
            self._segment, self._prefix = None, ""

    @contextmanager
    def unused(self, unused: bool) -> Iterator[None]:
        """What runs inside gives nothing that the loss depends on, if `unused`: its weights are there, and no more."""
        kept = len(self.ops)
        yield
        if unused:
            del self.ops[kept:]

    def head(self, x: Value) -> Value:
        """What follows are logits and the loss. The model holds `x` and the logits until it returns."""
        self.returned.append(x)
        self._kind = "logits"
        return x

    def parameter(self, name: str, shape: Sequence[int], kind: Kind = "vector") -> Value:
        """Return a parameter; the same one if its name is used again."""
        full = self._prefix + name
        if full not in self._parameters:
            weight = Weight(full, tuple(shape), kind, self._segment)
            self.weights[full] = weight
            adapters, width, grad = self.precision.adapters, self.precision.weights, True
            if adapters is not None and MARK not in name:
                width, grad = adapters.width(weight, self.precision.compute), False
            storage = Storage(weight.count * width, "weight")
            self._parameters[full] = Value(weight.count, width, grad, storage, weight)
        return self._parameters[full]

    def buffer(self, name: str, count: int, width: int = FULL) -> None:
        """Declare a tensor that is no parameter and stays for the whole run."""
        self.frozen[self._prefix + name] = count * width

    # -- values ------------------------------------------------------------------------------------------------------

    def constant(self, count: int, width: int, kind: str = "activation") -> Value:
        """Return a value that needs no gradient, such as token ids."""
        return Value(count, width, False, Storage(count * width, kind))

    def _new(
        self, name: str, inputs: Sequence[Value], size: tuple[int, int], saved: Sequence[Value] = (), **more: Any
    ) -> Value:
        """Record an operator. size: elements and width of its result; saved: what it keeps for its backward."""
        count, width = size
        output = Value(count, width, any(each.grad for each in inputs), Storage(count * width, self._kind))
        kept = tuple(dict.fromkeys(each.storage for each in saved)) if output.grad else ()
        self.ops.append(Op(name, tuple(inputs), output, kept, segment=self._segment, **more))
        return output

    def _saving_output(
        self, name: str, inputs: Sequence[Value], size: tuple[int, int], saved: Sequence[Value] = (), **more: Any
    ) -> Value:
        """Record an operator that keeps its result too."""
        output = self._new(name, inputs, size, saved, **more)
        if output.grad:
            self.ops[-1].saved = tuple(dict.fromkeys((*self.ops[-1].saved, output.storage)))
        return output

    # -- operators ---------------------------------------------------------------------------------------------------

    def cast(self, x: Value, width: int) -> Value:
        """`x.to(dtype)`: nothing if it has that dtype."""
        return x if x.width == width else self._new("cast", [x], (x.count, width), cheap=True)

    def view(self, x: Value) -> Value:
        """A view, or another shape of the same memory."""
        output = Value(x.count, x.width, x.grad, x.storage)
        self.ops.append(Op("view", (x,), output, passes=True, segment=self._segment, cheap=True))
        return output

    def copy(self, x: Value) -> Value:
        """`contiguous`, `cat`, `reshape` of what is not contiguous: another memory, nothing saved."""
        return self._new("copy", [x], (x.count, x.width), cheap=True)

    def new(self, name: str, x: Value, count: int) -> Value:
        """An operator that saves its input."""
        return self._new(name, [x], (count, x.width), [x])

    def placed(self, x: Value, rows: Value, tokens: int) -> Value:
        """`masked_scatter`: rows stand at the place of some of the tokens."""
        return self._new("masked_scatter", [x, rows], (x.count, x.width), [self.constant(tokens, MASK)])

    def repeated(self, x: Value, times: int) -> Value:
        """`repeat`, or `expand` that is made contiguous."""
        return self._new("repeat", [x], (times * x.count, x.width))

    def matmul(self, a: Value, b: Value, count: int) -> Value:
        """A matmul of two values that are no weights."""
        a, b = (self.cast(each, self.precision.compute) for each in (a, b))
        return self._new("attention", [a, b], (count, a.width), [a, b])

    def part(self, x: Value, count: int) -> Value:
        """A slice: the memory is that of the whole, the gradient is as large as the whole."""
        output = Value(count, x.width, x.grad, x.storage)
        self.ops.append(Op("slice", (x,), output, segment=self._segment, cheap=True))
        return output

    def joined(self, parts: Sequence[Value]) -> Value:
        """`cat`: the gradient of each part is a view of the whole gradient."""
        count = sum(each.count for each in parts)
        return self._new("cat", parts, (count, max(each.width for each in parts)), passes=True, cheap=True)

    def gathered(self, x: Value, count: int, index: int, *, keeps: bool = False) -> Value:
        """`x[index]`: saves `index` indices. keeps: it is `torch.gather`, which saves its input too."""
        saved = [self.constant(index, INDEX), *([x] if keeps else [])]
        return self._new("index", [x], (count, x.width), saved)

    def softmax(self, x: Value, width: int) -> Value:
        """`softmax` with results of a dtype."""
        return self._saving_output("softmax", [x], (x.count, width))

    def add(self, a: Value, b: Value) -> Value:
        """`a + b`; the dtype is the wider one."""
        width = max(a.width, b.width)
        return self._new("add", [a, b], (max(a.count, b.count), width), passes=True, cheap=True)

    def mul(self, a: Value, b: Value) -> Value:
        """`a * b`: each factor is saved if the other one needs a gradient."""
        saved = [each for each, other in ((a, b), (b, a)) if other.grad]
        return self._new("mul", [a, b], (max(a.count, b.count), max(a.width, b.width)), saved, cheap=True)

    def pointwise(self, x: Value, name: str = "pointwise", keeps: Literal["input", "output", ""] = "input") -> Value:
        """A function of each element that saves its input, its output or nothing."""
        if keeps == "output":
            return self._saving_output(name, [x], (x.count, x.width), cheap=True)
        return self._new(name, [x], (x.count, x.width), [x] if keeps else [], cheap=True)

    def mean(self, x: Value, count: int) -> Value:
        """A sum or mean over the last dimension, with `count` results."""
        return self._new("mean", [x], (count, x.width))

    def rsqrt(self, x: Value) -> Value:
        """`rsqrt(x + eps)`."""
        return self.pointwise(self.pointwise(x, "add", ""), "rsqrt", "output")

    def embedding(self, ids: Value, name: str, rows: int, width: int) -> Value:
        """A look-up in a table."""
        table = self.parameter(name, (rows, width), "embedding")
        return self._new("embedding", [table, ids], (ids.count * width, table.width), [ids])

    def _compute_copy(self, x: Value) -> Value:
        """Return a weight in the compute dtype. Autocast casts each once per forward pass."""
        if x.width == self.precision.compute or x.weight is None:
            return self.cast(x, self.precision.compute)
        name = f"{self._segment}:{x.weight.name}"
        if name not in self._copies:
            self._copies[name] = self.cast(x, self.precision.compute)
            self._copies[name].storage.kind = "copy"
        return self._copies[name]

    def linear(self, x: Value, name: str, inputs: int, outputs: int, bias: bool = False) -> Value:
        """`nn.Linear`, with the casts of autocast."""
        weight = self.parameter(f"{name}.weight", (outputs, inputs), "linear")
        more = [self.parameter(f"{name}.bias", (outputs,))] if bias else []
        adapters = self.precision.adapters
        if adapters is not None and MARK not in name and adapters.on(self._prefix + name, self._segment is not None):
            return self._adapted(x, name, inputs, self._linear(x, weight, name, (inputs, outputs), more))
        return self._linear(x, weight, name, (inputs, outputs), more)

    def _adapted(self, x: Value, name: str, inputs: int, base: Value) -> Value:
        """`peft.tuners.lora.Linear`: the result of the base, and of two small matrices, times a number.

        It casts its input to the dtype of its matrices; under autocast they get a copy of their own of it.
        """
        adapters = self.precision.adapters
        assert adapters is not None
        outputs = base.count // (x.count // inputs)
        small = self.linear(self.cast(x, self.precision.weights), f"{name}{MARK}A", inputs, adapters.rank)
        wide = self.linear(small, f"{name}{MARK}B", adapters.rank, outputs)
        return self.add(base, self.pointwise(wide, "mul", ""))

    def _linear(self, x: Value, weight: Value, name: str, sizes: tuple[int, int], more: Sequence[Value]) -> Value:
        inputs, outputs = sizes
        fp8 = self.precision.fp8_layers
        if self.precision.fp8 and fp8 is not None and fp8(self._prefix + name, inputs, outputs):
            return self._fp8_linear(x, weight, x.count // inputs * outputs, more)
        return self.product(x, weight, x.count // inputs * outputs, more)

    def _fp8_linear(self, x: Value, weight: Value, count: int, more: Sequence[Value]) -> Value:
        """A Linear of Transformer Engine: its input is saved in FP8, its weight in FP8 and often transposed too."""
        x = self.cast(x, self.precision.compute)
        kept = [self.constant(x.count, 1)] if weight.grad else []
        saved = [*kept, self.constant(weight.count, self.precision.fp8, "fp8")]
        return self._new("linear", [x, weight, *more], (count, self.precision.compute), saved)

    def product(
        self,
        x: Value,
        weight: Value,
        count: int,
        more: Sequence[Value] = (),
        *,
        width: int | None = None,
        convolution: bool = False,
    ) -> Value:
        """A matmul with a weight, which saves the input and the weight. width: of the result, if autocast is off.
        convolution: it saves its weight even if the input needs no gradient.
        """
        width = self.precision.compute if width is None or self.precision.autocast else width
        x = self.cast(x, width)
        expert = weight.weight is not None and weight.weight.kind == "expert"  # cast by the model, not by autocast
        copy = self.cast(weight, width) if expert or width > weight.width else self._compute_copy(weight)
        bias = [self._compute_copy(each) for each in more]
        saved = [*([x] if weight.grad else []), *([copy] if x.grad or convolution else [])]
        adapters, workspace = self.precision.adapters, 0
        if adapters is not None and weight.weight is not None and not weight.grad:
            workspace = weight.count * width if adapters.is_quantized(weight.weight) else 0  # dequantized for each use
        return self._new("linear", [x, copy, *bias], (count, width), saved, workspace=workspace)

    def expert_product(
        self, x: Value, name: str, stacked: tuple[int, int, int], *, transposed: bool = False, bias: bool = False
    ) -> Value:
        """A grouped matmul of rows with the matrices of their experts. stacked: experts, outputs and inputs.
        transposed: a weight has its inputs first.

        In FP8 the rows of each expert are padded to multiples of 16, and the weights are saved as they are; the
        backward pass rounds them again.
        """
        number, outputs, inputs = stacked
        shape = (number, inputs, outputs) if transposed else stacked
        weight, rows = self.parameter(f"mlp.experts.{name}", shape, "expert"), x.count // inputs
        if bias:
            added = self.gathered(self.parameter(f"mlp.experts.{name}_bias", (number, outputs)), rows * outputs, rows)
            y = self.product(x, weight, rows * outputs)
            return self._new("add", [y, added], (y.count, y.width), cheap=True)  # in place
        fp8 = self.precision.fp8_experts
        if fp8 is None or not fp8(f"{self._prefix}mlp.experts", inputs, outputs):
            return self.product(x, weight, rows * outputs)
        padded = -(-rows // PADDED) * PADDED + PADDED * number
        wide = self.gathered(self.cast(x, self.precision.compute), padded * inputs, rows)
        both = [wide, weight]
        y = self._new("linear", both, (padded * outputs, self.precision.compute), both, workspace=weight.count)
        return self.gathered(y, rows * outputs, padded)

    def layer_norm(self, x: Value, name: str, width: int, bias: bool = True) -> Value:
        """`nn.LayerNorm`, which autocast of CUDA computes in FP32."""
        more = [
            self.parameter(f"{name}.weight", (width,)),
            *([self.parameter(f"{name}.bias", (width,))] if bias else []),
        ]
        if self.precision.autocast and self.precision.cuda:
            x = self.cast(x, FULL)
        statistics = [self.constant(x.count // width, FULL) for _ in range(2)]
        return self._new("layer_norm", [x, *more], (x.count, x.width), [x, *more, *statistics])

    def attention(self, q: Value, k: Value, v: Value, sums: int, bias: Value | None = None) -> Value:
        """Flash attention: saves its inputs, its output, and `sums`: a number per row and head. bias: added to
        the scores."""
        if self.compiled and k.count < q.count:  # with a mask, keys and values are repeated for each head
            k, v = (self._new("repeat", [each], (q.count, each.width)) for each in (k, v))
        q, k, v, *more = (self.cast(each, self.precision.compute) for each in (q, k, v, bias) if each is not None)
        if k.count < q.count and q.width == FULL and self.precision.row:
            return self._scored_attention(q, k, v, sums * self.precision.row)
        numbers = self.constant(sums, FULL)
        # the kernel sums the gradient of queries in FP32, and those of keys and values for each head
        spread = 2 * q.count * q.width if k.count < q.count else 0
        workspace = q.count * FULL + numbers.count * FULL + spread
        saved = [q, k, v, numbers, *more]
        return self._saving_output("attention", [q, k, v, *more], (q.count, q.width), saved, workspace=workspace)

    def _scored_attention(self, q: Value, k: Value, v: Value, count: int) -> Value:
        """Attention as two matmuls and a softmax, with `count` scores."""
        k, v = (self._new("repeat", [each], (q.count, each.width)) for each in (k, v))
        q, k = (self.pointwise(each, "mul", "") for each in (q, k))
        scores = self._new("attention", [q, k], (count, q.width), [q, k])
        weights = self.softmax(self.pointwise(scores, "add", ""), q.width)
        return self._new("attention", [weights, v], (q.count, q.width), [weights, v])

    def eager_attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        sums: int,
        row: int,
        *,
        cap: bool = False,
        sinks: Value | None = None,
        bias: Value | None = None,
        full: bool = True,
    ) -> Value:
        """Attention of models that no fused kernel fits: all scores are computed, `row` for each of `sums`.

        cap: scores are bounded by tanh. sinks: a further score of each head, which takes a share of the softmax.
        bias: is added to the scores in place, as a mask is. full: the softmax is in FP32, and its result cast back.
        """
        width, count = q.width, sums * row
        if k.count < q.count:
            k, v = (self._new("repeat", [each], (q.count, each.width)) for each in (k, v))
        q, k = (self.cast(each, self.precision.compute) for each in (q, k))
        scores = self._new("attention", [q, k], (count, q.width), [q, k])
        scores = self.pointwise(scores, "mul", "")
        if cap:
            scores = self.pointwise(self.pointwise(self.pointwise(scores, "div", ""), "tanh", "output"), "mul", "")
        scores = self._new("add", [scores, *([bias] if bias else [])], (count, scores.width), cheap=True)
        if sinks is None:
            return self.eager_weights(scores, v, full=full, width=width)
        scores = self._new("cat", [scores, sinks], (count + sums, max(scores.width, sinks.width)), cheap=True)
        weights = self.softmax(self.pointwise(scores, "sub", ""), scores.width)
        weights = self.cast(self.part(weights, count), v.width)
        weights, v = (self.cast(each, self.precision.compute) for each in (weights, v))
        return self.copy(self._new("attention", [weights, v], (q.count, v.width), [weights, v]))

    def eager_weights(self, scores: Value, v: Value, *, full: bool, width: int | None = None, mask: int = 0) -> Value:
        """The softmax of scores, and its matmul with the values. mask: elements of a mask that is kept."""
        if mask:
            scores = self._new("masked_fill", [scores], (scores.count, scores.width), [self.constant(mask, MASK)])
        full_softmax = full or (self.precision.autocast and self.precision.cuda)
        weights = self.softmax(scores, FULL if full_softmax else scores.width)
        weights = self.cast(weights, width) if full and width else weights
        weights, v = (self.cast(each, self.precision.compute) for each in (weights, v))
        return self.copy(self._new("attention", [weights, v], (v.count, v.width), [weights, v]))

    def dropout(self, x: Value, probability: float) -> Value:
        """`dropout` on CUDA: saves a mask."""
        if not probability:
            return x
        return self._new("dropout", [x], (x.count, x.width), [self.constant(x.count, MASK)])

    def cross_entropy(self, logits: Value, rows: int, full: bool = False) -> Value:
        """`cross_entropy`: the logarithm of softmax is saved. full: the model casts its logits to FP32 first."""
        self.returned.append(logits)
        logits = self.cast(logits, FULL) if full else logits
        x = self.cast(logits, FULL) if self.precision.autocast else logits
        log = self._saving_output("log_softmax", [x], (x.count, x.width))
        targets = self.constant(rows, INDEX)
        return self._new("nll_loss", [log], (1, log.width), [targets, self.constant(1, log.width)])
