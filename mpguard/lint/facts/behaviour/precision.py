"""The dtype of tensors: set by a cast or a constructor, or cast by autocast.

`facts.precision.of(expression, record)` returns the dtypes that a tensor may have, each with its path condition and the
operation that produced it. A cast, a constructor's dtype and a matmul in a known autocast region set the
low-precision dtype; `.float()`, a softmax under CUDA autocast and arithmetic with FP32 end it. A tensor whose dtype
cannot be derived has dtype None, and no rule reports it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour import autocast_ops as ops
from mpguard.lint.facts.behaviour import layer_dtypes
from mpguard.lint.facts.behaviour.autocast_state import AutocastStates
from mpguard.lint.facts.behaviour.flow import Flow
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.dtypes import AnyDtype, OtherDtype, as_dtype
from mpguard.lint.facts.program.keywords import alternatives_of
from mpguard.lint.facts.program.lattice import Class, Constant, Function, Object, Ref
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition, negated
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope
from mpguard.lint.source.libcst_internals import Frames
from mpguard.policy.dtype import HALF_DTYPES, Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: A Python number, or a tensor without dimensions: arithmetic with it keeps the dtype of the other operand.
NUMBER: Literal["number"] = "number"
#: The dtype of the weights of the module whose layer computes a value: known for an object of it.
WEIGHTS: Literal["weights"] = "weights"
LOW: frozenset[object] = frozenset(HALF_DTYPES)
_FLOATS = (Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.FP64)
#: Methods of a tensor that cast it, and the dtypes to which they cast: each is named as the attribute of `torch`.
_CASTS = {
    name: api_names.DTYPES[f"torch.{name}"] for name in ("half", "bfloat16", "float", "double", "long", "int", "bool")
}
#: Expressions followed for one request, those of all requests of a file, the depth of nesting, and the alternatives of
#: one expression.
_MAX_PER_REQUEST = 600
_MAX_PER_FILE = 100_000
_MAX_DEPTH = 60
_MAX_ALTERNATIVES = 12
_DEVICE = lazy_pattern(r"(?i)device|cuda|gpu|rank|cpu")
_TENSOR = lazy_pattern(r"(?i)tensor|param|weight|module")
_LOGITS = lazy_pattern(r"(?i)(?:^|[._])logits?$|(?:^|[._])logits?_")
_SETTING = lazy_pattern(
    r"(?i)(?:^|\.)(?:config|cfg|conf|args|opts?|hparams|settings)\.[\w.]+$|(?:^|[._])(?:temperature|temp|tau)$"
)
_CONSTANTS = frozenset({"math.pi", "math.e", "numpy.pi", "math.tau"})
_BUILTIN_NUMBERS = frozenset({"len", "int", "float", "round", "range", "bool", "ord", "hash", "id"})


@dataclasses.dataclass(frozen=True, eq=False)
class TensorDtype:
    """One dtype that a tensor may have.

    dtype: None if it is unknown. origin: the call or product that produced it. by_autocast: set by autocast, not by an
    explicit cast.
    """

    guard: PathCondition
    dtype: AnyDtype | Literal["number", "weights"] | None
    origin: Record | None = None
    by_autocast: bool = False

    @property
    def label(self) -> str:
        """The name of the dtype in messages: `FP16`."""
        return self.dtype.label if isinstance(self.dtype, Dtype) else str(self.dtype)

    @property
    def cause(self) -> str:
        """Why values have a low-precision dtype: the end of `log_softmax on values ...`."""
        if isinstance(self.origin, Call) and self.origin.name == "MixedPrecision":
            return f"of a model that FSDP computes in {self.label}"
        if isinstance(self.origin, Call) and self.origin.name == "initialize":
            return f"of a model that DeepSpeed casts to {self.label}"
        if self.by_autocast:
            return f"that autocast computed in {self.label}, after it ended"
        loaded = isinstance(self.origin, Call) and self.origin.name in api_names.LOADERS
        return f"of a model that is loaded in {self.label}" if loaded else f"that were cast to {self.label} by hand"


_UNKNOWN = (TensorDtype(ALWAYS, None),)


class TensorDtypes:
    """The dtypes of the tensors of one file."""

    def __init__(self, facts: BehaviourView) -> None:
        self.facts = facts
        self._known: dict[cst.CSTNode, tuple[TensorDtype, ...]] = {}
        self._active: set[object] = set()
        self._incomplete = self._file_used = self._request_left = 0
        self._records: dict[cst.CSTNode, Record] | None = None

    def of(self, node: cst.CSTNode | None, at: Record) -> tuple[TensorDtype, ...]:
        """Return the dtypes that a tensor expression may have at a record."""
        self._request_left = _MAX_PER_REQUEST
        with Frames():
            return self._under(self._of(node, at), at.guard)

    def low(self, node: cst.CSTNode | None, at: Record, *dtypes: AnyDtype | str) -> TensorDtype | None:
        """Return the first of an expression's dtypes that is one of `dtypes` (default: FP16, BF16), or None."""
        wanted = frozenset(map(as_dtype, dtypes)) or LOW
        return next((each for each in self.of(node, at) if each.dtype in wanted), None)

    def outside_autocast(self, node: cst.CSTNode | None, call: Call) -> TensorDtype | None:
        """Return the low-precision dtype of an expression that a call computes with outside autocast, and trains.

        None where autocast may be active, or no backward pass takes the result.
        """
        found = self.low(node, call)
        return found if found is not None and self._is_trained_outside(call) else None

    def in_dtype_of_weights(self, node: cst.CSTNode | None, call: Call) -> bool:
        """True for the same if the dtype is that of the weights of the module whose method contains the call."""
        return any(each.dtype == WEIGHTS for each in self.of(node, call)) and self._is_trained_outside(call)

    def _is_trained_outside(self, call: Call) -> bool:
        is_off = all(state.dtype == "off" for state in self.facts.part(AutocastStates).at(call))
        return is_off and bool(self.facts.part(Flow).forward(call.node, call, past_targets=False).training_sinks)

    # -- expressions --------------------------------------------------------------------------------

    def _of(self, node: cst.CSTNode | None, at: Record) -> tuple[TensorDtype, ...]:
        if node is None:
            return _UNKNOWN
        if node in self._known:
            return self._known[node]
        if node in self._active:
            self._incomplete += 1
            return ()
        if self._request_left <= 0 or self._file_used > _MAX_PER_FILE or len(self._active) > _MAX_DEPTH:
            self._incomplete += 1
            return _UNKNOWN
        self._request_left -= 1
        self._file_used += 1
        self._active.add(node)
        cut = self._incomplete
        try:
            found = self._expression(node, at)
        finally:
            self._active.discard(node)
        if len(found) > _MAX_ALTERNATIVES:
            found = (*found[:_MAX_ALTERNATIVES], *_UNKNOWN)
        if cut == self._incomplete:  # within a cycle the result may be incomplete
            self._known[node] = found
        return found

    def _expression(self, node: cst.CSTNode, at: Record) -> tuple[TensorDtype, ...]:
        literal = constant(node)
        if literal is not None:
            return (TensorDtype(ALWAYS, NUMBER if isinstance(literal[0], (int, float)) else None),)
        if isinstance(node, (cst.Name, cst.Attribute)):
            return self._named(node, at)
        if isinstance(node, cst.Call):
            call = self.facts.index.call_of.get(node)
            return self._call(call) if call is not None else _UNKNOWN
        if isinstance(node, cst.BinaryOperation):
            if isinstance(node.operator, cst.MatrixMultiply):
                return self._by_autocast((node.left, node.right), self._record(node, at))
            both = self._promoted((node.left, node.right), at)
            if isinstance(node.operator, cst.Power) and any(each.dtype != NUMBER for each in both):
                return self._float32_under_autocast(node.left, self._record(node, at))
            return both
        if isinstance(node, cst.UnaryOperation) and not isinstance(node.operator, cst.Not):
            return self._of(node.expression, at)
        if isinstance(node, cst.Subscript):
            return self._logits(node.value, at) if _is_item(node, "logits") else self._of(node.value, at)
        if isinstance(node, cst.NamedExpr):
            return self._of(node.value, at)
        if isinstance(node, cst.Comparison):
            return (TensorDtype(ALWAYS, OtherDtype.BOOL),)
        if isinstance(node, cst.IfExp):
            condition = self.facts.condition(node.test, at.scope)
            return (
                *self._under(self._of(node.body, at), ALWAYS.given(condition)),
                *self._under(self._of(node.orelse, at), ALWAYS.given(negated(condition))),
            )
        return _UNKNOWN

    def _under(self, found: tuple[TensorDtype, ...], guard: PathCondition) -> tuple[TensorDtype, ...]:
        if not guard:
            return found
        joined = (dataclasses.replace(each, guard=each.guard.joined(guard)) for each in found)
        return tuple(each for each in joined if each.guard.possible)

    # -- names --------------------------------------------------------------------------------------

    def _named(self, node: cst.Name | cst.Attribute, at: Record) -> tuple[TensorDtype, ...]:
        path = dotted(node)
        bindings = self.facts.values.reaching(path, at.scope, at.order, at.guard) if path else []
        if not bindings:
            if isinstance(node, cst.Attribute):
                name = node.attr.value
                if name in ("T", "mT", "H", "data", "grad"):
                    return self._of(node.value, at)
                limits = isinstance(node.value, cst.Call) and dotted(node.value.func).endswith(("finfo", "iinfo"))
                if name in ("shape", "ndim") or limits:
                    return (TensorDtype(ALWAYS, NUMBER),)
                if path.startswith("self.") and path.count(".") == 1:
                    return _buffer(self, name, at)
                if name == "logits":
                    return self._logits(node.value, at)
            paths = {each.atom.path for each in self.facts.evaluate(node, at) if isinstance(each.atom, Ref)}
            return (TensorDtype(ALWAYS, NUMBER),) if paths and paths <= _CONSTANTS else _UNKNOWN
        found: list[TensorDtype] = []
        later: list[PathCondition] = []
        for binding in bindings[:_MAX_ALTERNATIVES]:
            if any(guard <= binding.guard for guard in later) and not path.startswith("self."):
                continue  # replaced by a later binding under the same condition
            if binding.kind == "augmented":
                found += [
                    each
                    for each in self._bound(binding)
                    if each.dtype not in (NUMBER, OtherDtype.INT64, OtherDtype.BOOL)
                ]
                continue
            later.append(binding.guard)
            found += self._under(self._bound(binding), binding.guard)
        augmented = any(binding.kind == "augmented" for binding in bindings)
        if augmented:  # in place: a tensor keeps its dtype, a number takes that of the added operand
            kept = [each for each in found if each.dtype == NUMBER]
            first = [b for b in bindings if b.kind != "augmented"]
            if not kept and first:
                return tuple(each for b in first[:_MAX_ALTERNATIVES] for each in self._under(self._bound(b), b.guard))
            found = [each for each in found if each.dtype != NUMBER] or found
        return tuple(found)

    def _logits(self, output: cst.BaseExpression, at: Record) -> tuple[TensorDtype, ...]:
        """Return the dtypes of the logits of a model of transformers: those of its last matmul."""
        bindings = self.facts.values.reaching(dotted(output), at.scope, at.order, at.guard)
        calls = [
            self.facts.index.call_of.get(each)
            for each in [b.value for b in bindings if b.value is not None] or [output]
        ]
        found: list[TensorDtype] = []
        for call in calls:
            for each in self.facts.evaluate(call.func, call) if call is not None else ():
                model = each.atom if isinstance(each.atom, Object) and not each.atom.prepared else None
                if call is None:
                    return _UNKNOWN
                if model is None or model.call is None or not model.path.startswith("transformers."):
                    decided = _by_wrapper(self, model, call) if model is not None else _as_loaded(self, call)
                    found += decided or _under_autocast(self, call)  # some model: its last operation is a matmul
                    continue
                given = model.call.argument(None, "dtype", "torch_dtype")
                stored = self.facts.of(model.call).dtypes(given, model.call, strings=True) if given is not None else ()
                for state in self._by_autocast((), call):
                    of_weights = [TensorDtype(guard.joined(state.guard), dtype, model.call) for guard, dtype in stored]
                    found += [state] if state.dtype is not None or not of_weights else of_weights
        return tuple(found) or _UNKNOWN

    def _bound(self, binding: Binding) -> tuple[TensorDtype, ...]:
        facts, value = self.facts, binding.value
        if binding.kind in ("assign", "augmented"):
            found = self._of(value, binding)
            if found == _UNKNOWN and _LOGITS.search(binding.key):
                found = _of_network(self, facts.call_of(value))
            if binding.key.startswith("self."):  # an attribute of a module: `model.half()` may change it
                return tuple(each if each.dtype in (*LOW, NUMBER) else TensorDtype(each.guard, None) for each in found)
            return found
        if binding.kind == "element" and value is not None:
            if isinstance(value, (cst.Tuple, cst.List)) and len(binding.index) == 1:
                place = binding.index[0]
                return self._of(value.elements[place].value, binding) if place < len(value.elements) else _UNKNOWN
            call = facts.index.call_of.get(value)
            if call is not None and call.name in ("chunk", "split", "unbind", "size", "tensor_split"):
                return self._of(value, binding)
            if call is not None and len(binding.index) == 1 and self._is_of_project(call):
                return self._call(call, binding.index[0])
            if call is not None and call.name in ("topk", "sort", "max", "min") and binding.index == (0,):
                return self._of(call.receiver if self.is_method(call) else call.argument(0), binding)
            if isinstance(value, cst.Attribute) and value.attr.value == "shape":
                return (TensorDtype(ALWAYS, NUMBER),)
            return _UNKNOWN
        if binding.kind == "for" and value is not None:
            call = facts.index.call_of.get(value)
            if call is not None and call.path == "range":
                return (TensorDtype(ALWAYS, NUMBER),)
            return _of_row(self, value, call, binding)
        if binding.kind == "param":
            return self._param(binding)
        return _UNKNOWN

    def _param(self, binding: Binding) -> tuple[TensorDtype, ...]:
        scope, facts = binding.scope, self.facts
        if scope.is_bound and scope.params and scope.params[0].name == binding.key:
            return _UNKNOWN
        if scope.name == "__init__":  # sizes and factors, unless the annotation or the name indicates a tensor
            given = next((param for param in scope.params if param.name == binding.key), None)
            annotation = facts.short(given.annotation) if given is not None and given.annotation is not None else ""
            return _UNKNOWN if _TENSOR.search(annotation + binding.key) else (TensorDtype(ALWAYS, NUMBER),)
        callers = facts.callers(scope)
        found: list[TensorDtype] = []
        for call in callers[:_MAX_ALTERNATIVES]:
            value = facts.values.given(call, scope, binding.key)
            if value is None:
                found.append(TensorDtype(call.guard, None))
            elif (other := facts.of(call)) is not facts:
                found += self._under(other.part(TensorDtypes).of(value, call), call.guard)
            elif value is binding.value:
                found += self._under(self._of(value, binding), call.guard)
            else:
                found += self._under(self._of(value, call), call.guard)
        if not callers or len(callers) > _MAX_ALTERNATIVES or facts.escapes(scope):
            found.append(TensorDtype(ALWAYS, None))
        return tuple(found)

    # -- operations ---------------------------------------------------------------------------------

    def is_method(self, call: Call) -> bool:
        """True if a call is a method of an object that is presumably a tensor.

        The object is neither a library module nor a known function.
        """
        return call.receiver is not None and not any(
            isinstance(each.atom, (Ref, Function)) for each in self.facts.evaluate(call.func, call)
        )

    def _is_of_project(self, call: Call) -> bool:
        """True if a call runs a function, or a module, of the project."""
        atoms = [each.atom for each in self.facts.evaluate(call.func, call)]
        return any(isinstance(atom, Function) or (isinstance(atom, Object) and atom.cls is not None) for atom in atoms)

    def _call(self, call: Call, index: int | None = None) -> tuple[TensorDtype, ...]:
        """Return the dtypes of what a call gives, or of the element at an index of the tuple that it gives."""
        facts = self.facts
        atoms = [each.atom for each in facts.evaluate(call.func, call)]
        paths = {atom.path for atom in atoms if isinstance(atom, Ref)}
        if paths:
            known = len(paths) == 1 and all(isinstance(atom, Ref) for atom in atoms)
            return self._function(paths.pop(), call) if known else _UNKNOWN
        if len(atoms) == 1 and isinstance(atoms[0], Object):
            return _module(self, atoms[0], call, index)
        if call.receiver is not None and not any(isinstance(atom, (Function, Object, Class)) for atom in atoms):
            return _of_method(self, call)
        found: list[TensorDtype] = []
        for function in facts.functions(call):
            if function.scope.name == "__init__" or not function.scope.returns:
                return _UNKNOWN
            found += self._returned(function.scope, index)
        return _as_called(self, found, call) or _UNKNOWN

    def _returned(self, scope: Scope, index: int | None) -> list[TensorDtype]:
        """Return the dtypes of what a function of any file returns, or of an element of it."""
        own = self.facts.of(scope).part(TensorDtypes)
        found: list[TensorDtype] = []
        for each in scope.returns:
            value: cst.CSTNode | None = each.value
            if index is not None:
                several = isinstance(value, cst.Tuple) and index < len(value.elements)
                value = value.elements[index].value if several else None  # type: ignore[union-attr]
            found += self._under((own._of if own is self else own.of)(value, each), each.guard)
        return found

    def _function(self, path: str, call: Call) -> tuple[TensorDtype, ...]:
        last = path.rsplit(".", 1)[-1]
        if path in _BUILTIN_NUMBERS or path.startswith("math."):
            return (TensorDtype(ALWAYS, NUMBER),)
        if path in ("abs", "sum", "max", "min"):
            return self._promoted(tuple(call.positional), call)
        if path.startswith("einops.") and last in ("rearrange", "repeat"):
            return self._of(call.argument(0, "tensor"), call)
        if path.split(".", 1)[0] != "torch":
            return _UNKNOWN
        given = call.argument(None, "dtype")
        if given is not None and constant(given) != (None,):
            return self._argument_dtypes(given, call)
        if last in ops.MAKES_FLOAT32:
            default = "set_default_dtype" in self.facts.calls or "set_default_tensor_type" in self.facts.calls
            return (TensorDtype(ALWAYS, None if default or call.starred else Dtype.FP32),)
        if last in ("tensor", "as_tensor", "scalar_tensor"):
            value = call.argument(0, "data")
            return self._of(value, call) if constant(value) is not None else _UNKNOWN
        first = call.argument(0, "input", "a", "x", "tensor", "tensors")
        if last in ("cat", "stack", "concat", "hstack", "vstack"):
            several = isinstance(first, (cst.List, cst.Tuple))
            return self._promoted(tuple(e.value for e in first.elements), call) if several else _UNKNOWN  # type: ignore[union-attr]
        if last == "einsum":
            return self._by_autocast(tuple(call.positional[1:]), call)
        return self._operation(last, first, tuple(call.positional[1:]), call)

    def _argument_dtypes(self, node: cst.BaseExpression, call: Call) -> tuple[TensorDtype, ...]:
        """Return the dtypes that an argument stands for: a dtype, or that of another tensor (`x.dtype`)."""
        if isinstance(node, cst.Attribute) and node.attr.value == "dtype":
            found = self._of(node.value, call)
            if any(each.dtype not in (None, NUMBER) for each in found):
                return found
        return tuple(TensorDtype(guard, dtype, call) for guard, dtype in self.facts.dtypes(node, call))

    def _operation(
        self, name: str, first: cst.BaseExpression | None, others: tuple[cst.BaseExpression, ...], call: Call
    ) -> tuple[TensorDtype, ...]:
        if name in ops.LOWERED:
            return self._by_autocast((*((first,) if first is not None else ()), *others[:1]), call)
        if name in ops.FLOAT32_ON_CUDA:
            return self._float32_under_autocast(first, call)
        if name == "where":
            both = (call.receiver, *others[1:2]) if self.is_method(call) else others[:2]
            return self._promoted(tuple(each for each in both if each is not None), call)
        if name in ops.PROMOTES:
            return self._promoted((*((first,) if first is not None else ()), *others[:1]), call)
        return self._of(first, call) if name in ops.KEEPS else _UNKNOWN

    def _promoted(self, parts: tuple[cst.BaseExpression, ...], at: Record) -> tuple[TensorDtype, ...]:
        found: tuple[TensorDtype, ...] = (TensorDtype(ALWAYS, NUMBER),)
        for part in parts:
            both = [_join(a, b) for a in found for b in self._operand(part, at)]
            found = tuple(each for each in both if each.guard.possible)[: _MAX_ALTERNATIVES + 1]
        return found

    def _operand(self, node: cst.BaseExpression, at: Record) -> tuple[TensorDtype, ...]:
        """Return the dtypes of an operand; a setting whose value is not known is a number, as in `logits / cfg.t`."""
        found = self._of(node, at)
        is_setting = all(each.dtype is None for each in found) and _SETTING.search(dotted(node)) is not None
        return (TensorDtype(ALWAYS, NUMBER),) if is_setting else found

    def _by_autocast(self, parts: tuple[cst.BaseExpression, ...], at: Record) -> tuple[TensorDtype, ...]:
        """Return the dtypes of a matmul: that of the autocast region, otherwise that of the operands."""
        found: list[TensorDtype] = []
        for state in self.facts.part(AutocastStates).at(at):
            if state.dtype is None or state.dtype == "off":
                given = [each for part in parts for each in self._of(part, at) if each.dtype in _FLOATS]
                found += self._under(tuple(given), state.guard) or (TensorDtype(state.guard, None),)
            else:
                found.append(TensorDtype(state.guard, state.dtype, at, by_autocast=True))
        return tuple(found)

    def _float32_under_autocast(self, first: cst.BaseExpression | None, at: Record) -> tuple[TensorDtype, ...]:
        """Return the dtypes of an operation that CUDA autocast runs in FP32."""
        found: list[TensorDtype] = []
        for state in self.facts.part(AutocastStates).at(at):
            if state.dtype == "off":
                found += self._under(self._of(first, at), state.guard)
            else:
                found.append(TensorDtype(state.guard, Dtype.FP32 if state.device == "cuda" else None, at))
        return tuple(found)

    # -- records ------------------------------------------------------------------------------------

    def _record(self, node: cst.BinaryOperation, at: Record) -> Record:
        return self.record(node) or at

    def record(self, node: cst.CSTNode) -> Record | None:
        """Return a record for an expression that has none of its own.

        It is a copy of that of the first name or call in it.
        """
        if self._records is None:
            self._records = {call.node: call for scope in self.facts.index.scopes for call in scope.calls}
            for scope in self.facts.index.scopes:
                for uses in scope.uses.values():
                    self._records.update((use.node, use) for use in uses)
        stack = [node]
        while stack:
            current = stack.pop()
            found = self._records.get(current)
            if found is not None:
                return Record(node, found.scope, found.order, found.guard, found.withs, found.loops, found.chunk)
            if isinstance(current, cst.BinaryOperation):
                stack += (current.right, current.left)
            elif isinstance(current, cst.UnaryOperation):
                stack.append(current.expression)
            elif isinstance(current, (cst.Subscript, cst.Attribute)):
                stack.append(current.value)
        return None


def _is_item(node: cst.Subscript, key: str) -> bool:
    """True for `node["key"]`."""
    index = node.slice[0].slice
    return isinstance(index, cst.Index) and constant(index.value) == (key,)


def _join(one: TensorDtype, other: TensorDtype) -> TensorDtype:
    """Return the dtype of arithmetic with two tensors, by torch's type promotion."""
    guard = one.guard.joined(other.guard)
    if one.dtype is None or other.dtype is None:
        return TensorDtype(guard, None)
    if one.dtype in (NUMBER, other.dtype):
        return dataclasses.replace(other, guard=guard)
    if other.dtype == NUMBER:
        return dataclasses.replace(one, guard=guard)
    floats = [each for each in (one, other) if each.dtype in _FLOATS]
    if len(floats) == 1:
        return dataclasses.replace(floats[0], guard=guard)
    if len(floats) == 2:
        if {one.dtype, other.dtype} == LOW:
            return TensorDtype(guard, Dtype.FP32)
        wider = max(floats, key=lambda each: _FLOATS.index(each.dtype))
        return dataclasses.replace(wider, guard=guard)
    return TensorDtype(guard, None)


def _buffer(tensors: TensorDtypes, name: str, at: Record) -> tuple[TensorDtype, ...]:
    """Return the dtypes of an attribute set by `register_buffer("name", tensor)`.

    An FP32 one may be cast with the module, so only low precision is known.
    """
    found: list[TensorDtype] = []
    for call in tensors.facts.calls.get("register_buffer", ()):
        given = call.argument(1, "tensor")
        if constant(call.argument(0, "name")) == (name,) and call.scope.owner is at.scope.owner:
            found += [each if each.dtype in LOW else TensorDtype(each.guard, None) for each in tensors._of(given, call)]
    return tuple(found) or _UNKNOWN


def _to(tensors: TensorDtypes, call: Call) -> tuple[TensorDtype, ...]:
    given = call.keywords.get("dtype")
    for argument in [given] if given is not None else call.positional[:2]:
        found = tensors._argument_dtypes(argument, call)
        if any(each.dtype is not None for each in found):
            return found
        literal = constant(argument)
        known = literal is not None or _DEVICE.search(tensors.facts.short(argument))
        if not known or (call.name == "type" and literal not in (("torch.HalfTensor",), ("torch.cuda.HalfTensor",))):
            return _UNKNOWN
        if call.name == "type":
            return (TensorDtype(ALWAYS, Dtype.FP16, call),)
    return tensors._of(call.receiver, call) if not call.starred else _UNKNOWN


def _module(tensors: TensorDtypes, atom: Object, call: Call, index: int | None) -> tuple[TensorDtype, ...]:
    """Return the dtypes of a layer's output, or of an element of it."""
    last = atom.path.rsplit(".", 1)[-1]
    first = call.argument(0, "input")
    if atom.cls is None and atom.path.startswith("torch.nn."):
        if last in ops.LOWERED_LAYERS:
            return _in_dtype_of_weights(tensors._by_autocast((first,) if first is not None else (), call), call)
        if last in ops.FLOAT32_LAYERS:
            return tensors._float32_under_autocast(first, call)
        if last == "Sequential" and atom.call is not None and not atom.call.starred:
            layers = [tensors.facts.of(atom.call).call_of(each) for each in atom.call.positional]
            names = [each.name if each is not None else "" for each in layers]
            deciding = next((each for each in reversed(names) if each not in ops.KEEPING_LAYERS), "")
            found = tensors._by_autocast((), call) if deciding in ops.LOWERED_LAYERS else _UNKNOWN
            return _in_dtype_of_weights(found, call) if deciding in ops.LOWERED_LAYERS else found
        return tensors._of(first, call) if last in ops.KEEPING_LAYERS else _UNKNOWN
    if atom.cls is None or atom.prepared:
        return _UNKNOWN
    forward = atom.cls.method("forward")
    returned = tensors._returned(forward, index) if forward is not None else []
    if any(each.dtype == WEIGHTS for each in returned) and (weights := _weights_of(tensors, atom)):
        rest = [each for each in returned if each.dtype != WEIGHTS]
        returned = rest + [w for each in returned if each.dtype == WEIGHTS for w in tensors._under(weights, each.guard)]
    return _as_called(tensors, returned, call) or _UNKNOWN


def _in_dtype_of_weights(found: tuple[TensorDtype, ...], call: Call) -> tuple[TensorDtype, ...]:
    """Return the dtypes of a layer's output: outside autocast, and for unknown inputs, that of the weights."""
    if not call.path.startswith("self."):
        return found
    return tuple(dataclasses.replace(each, dtype=WEIGHTS) if each.dtype is None else each for each in found)


def _weights_of(tensors: TensorDtypes, model: Object) -> tuple[TensorDtype, ...]:
    """Return the 16-bit dtypes in which an object of a module of the project is loaded, or to which it is cast."""
    made = model.call
    if made is None:
        return ()
    facts = tensors.facts.of(made)
    if made.name in api_names.LOADERS:
        given = made.argument(None, "dtype", "torch_dtype")
        dtypes = facts.dtypes(given, made, strings=True) if given is not None else ()
        return tuple(TensorDtype(guard, dtype, made) for guard, dtype in dtypes if dtype in LOW)
    if made.name in api_names.PARALLEL:
        inner = [each.atom for each in facts.evaluate(made.argument(0, "module"), made)]
        return tuple(w for each in inner if isinstance(each, Object) for w in _weights_of(tensors, each))
    return tuple(
        TensorDtype(guard, dtype, event.call)
        for each in dict.fromkeys((facts, tensors.facts))
        for event in each.events("cast")
        if any(isinstance(a.atom, Object) and a.atom.call is made for a in each.evaluate(event.subject, event.call))
        for guard, dtype in event.dtypes
        if dtype in LOW
    )


def _as_called(tensors: TensorDtypes, found: list[TensorDtype], call: Call) -> tuple[TensorDtype, ...]:
    """Return those of a function's results that a call of it may give: not in the autocast of another call."""
    states = [state.dtype for state in tensors.facts.part(AutocastStates).at(call)]
    return tuple(
        each
        for each in found
        if not each.by_autocast
        or each.dtype in states
        or not isinstance(each.origin, Record)
        or any(region.kind == "autocast" for region in tensors.facts.of(each.origin).regions(each.origin))
        or (isinstance(each.origin, Call) and each.origin.name == "MixedPrecision")
    )


def _under_autocast(tensors: TensorDtypes, call: Call) -> tuple[TensorDtype, ...]:
    """Return the dtypes of logits that a network computes: those of the autocast around its call, else unknown."""
    states = tensors._by_autocast((), call)
    return tuple(each if each.by_autocast else TensorDtype(each.guard, None) for each in states)


def _of_row(
    tensors: TensorDtypes, over: cst.BaseExpression, call: Call | None, binding: Binding
) -> tuple[TensorDtype, ...]:
    """Return the dtypes of the rows of a tensor that a loop takes: `for row in logits`, `in zip(logits, labels)`."""
    if call is None:
        return tensors._of(over, binding) if dotted(over) and not binding.index else _UNKNOWN
    place = binding.index[0] if len(binding.index) == 1 else -1
    if call.path == "zip" and 0 <= place < len(call.positional):
        return tensors._of(call.positional[place], binding)
    return tensors._of(call.argument(0), binding) if call.path == "enumerate" and place == 1 else _UNKNOWN


def _as_loaded(tensors: TensorDtypes, call: Call) -> tuple[TensorDtype, ...]:
    """Return the 16-bit dtypes in which a model is loaded that is not known otherwise, for a call outside autocast."""
    if any(state.dtype != "off" for state in tensors.facts.part(AutocastStates).at(call)):
        return ()
    model = call.receiver if call.name == "forward" else call.func
    loaded = layer_dtypes.loaded(model, call, tensors.facts)
    return tuple(TensorDtype(guard, dtype, load) for guard, dtype, load in loaded if dtype in LOW)


def _by_wrapper(tensors: TensorDtypes, wrapper: Object, call: Call) -> tuple[TensorDtype, ...]:
    """Return the dtypes in which FSDP or DeepSpeed computes outside autocast, by its policy or its config."""
    states, made = tensors.facts.part(AutocastStates).at(call), wrapper.call
    if made is None or any(state.dtype != "off" for state in states):
        return ()
    facts, found = tensors.facts.of(made), list[TensorDtype]()
    if wrapper.kind == "engine":
        config = facts.evaluate(made.argument(None, "config", "config_params"), made)
        for key, dtype in (("bf16", Dtype.BF16), ("fp16", Dtype.FP16)):
            enabled = facts.values.attribute(facts.values.attribute(config, key), "enabled")
            on = (each for each in enabled if isinstance(each.atom, Constant) and each.atom.value is True)
            found += [TensorDtype(each.guard, dtype, made) for each in on]
        return tuple(found)
    for each in alternatives_of(made, "mixed_precision", facts):
        policy = each.atom.call if isinstance(each.atom, Object) and each.atom.kind == "fsdp1_policy" else None
        param = policy.argument(0, "param_dtype") if policy is not None else None
        if policy is not None and param is not None:
            dtypes = facts.of(policy).dtypes(param, policy)
            found += [TensorDtype(guard, dtype, policy, by_autocast=True) for guard, dtype in dtypes]
    return tuple(found)


def _of_network(tensors: TensorDtypes, call: Call | None) -> tuple[TensorDtype, ...]:
    """Return the dtypes of logits, by their name, that a call of a network gives whose code is not known."""
    if call is None or call.path.rsplit(".", 1)[-1] not in tensors.facts.module_names:
        return _UNKNOWN
    known = (Ref, Function, Class)
    made = [each.atom for each in tensors.facts.evaluate(call.func, call)]
    if any(isinstance(atom, known) or (isinstance(atom, Object) and atom.prepared) for atom in made):
        return _UNKNOWN
    wrapped = [w for atom in made if isinstance(atom, Object) for w in _by_wrapper(tensors, atom, call)]
    return tuple(wrapped) or _under_autocast(tensors, call) or _UNKNOWN


def _of_method(tensors: TensorDtypes, call: Call) -> tuple[TensorDtype, ...]:
    name, receiver = call.name, call.receiver
    if name in _CASTS and not call.node.args:
        return (TensorDtype(ALWAYS, _CASTS[name], call),)
    if name == "type_as":
        return tensors._of(call.argument(0, "other"), call)
    if name in ("to", "type"):
        return _to(tensors, call)
    if name in ops.NUMBERS:
        return (TensorDtype(ALWAYS, NUMBER),)
    given = call.argument(None, "dtype")
    if given is not None and constant(given) != (None,):
        return tensors._argument_dtypes(given, call)
    return tensors._operation(name, receiver, tuple(call.positional), call)
