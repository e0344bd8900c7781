from __future__ import annotations

import math
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Edit,
    Event,
    Facts,
    Fix,
    Record,
    Rule,
    any_of,
    constant,
    dotted,
    dtype_triggers,
    dtypes,
    input_casts,
    lazy_pattern,
    python_edits,
)

_INTEGERS = {dtypes.OtherDtype.INT64, dtypes.OtherDtype.INT32}
#: Names for numbers that are seldom above 256: of examples in a batch, heads, layers, levels, the sides of windows.
_SMALL = lazy_pattern(
    r"(?i)(?:^|[._])(?:batch_?size|bsz|bs|num_?examples|ws|(?:num_?|n_?)(?:attention_)?(?:heads?|layers?|levels?|experts?)"
    r"|(?:kernel|window)_?size)$"
)
#: A literal range of more values is not looked at one by one.
_MANY = 10_000
_EVERY_DTYPE = {Dtype.FP32, *HALF_DTYPES}
#: Names of positions, which the frequencies of rotary embeddings may share a dtype with.
_POSITIONS = lazy_pattern(r"(?i)^t$|pos|seq|idx|ids|steps?$|freq")
#: Functions of each element, and those that only change the shape.
_ELEMENTWISE = frozenset({
    "div", "true_divide", "floor_divide", "floor", "trunc", "mul", "repeat", "expand", "view", "reshape", "unsqueeze",
    "contiguous", "to", "cuda", "flip", "half", "bfloat16", "type",
})  # fmt: skip
_CASTS = ("to", "type_as", "half", "bfloat16", "type")
#: Functions whose results differ much where rounding makes their arguments differ little.
_AMPLIFIES = frozenset({"log", "exp"})
#: Methods that undo a cast: then it only rounds.
_UPCASTS = frozenset({"float", "double", "to"})
#: Names of the integers that diffusion models take.
_TIMESTEPS = lazy_pattern(r"t|time_?steps?")
_TESTS = lazy_pattern(r"(?:^|[/\\])(?:tests?|testing)[/\\]|(?:^|[/\\])(?:test_[^/\\]*|conftest)\.py$|_test\.py$")


class LowPrecisionPositions(Rule):
    """Positions (`arange`, `linspace`, and what is computed from them) are created in FP16 or BF16.

    ## What it does
    Reports `torch.arange(n, dtype=torch.bfloat16)`, `torch.linspace(..., dtype=torch.float16)` and an `arange` that is
    cast before anything is computed from it (`torch.arange(0, dim, 2).half() / dim`). Reports inverse frequencies that
    get the dtype of the activations before they are multiplied by the positions (`inv_freq.to(x.dtype)`), and timesteps
    that get it, or BF16, before they are divided (`timesteps.to(x.dtype) / 1000`).

    ## Why is this bad
    BF16 holds all integers up to 256, FP16 up to 2048: of 4,096 positions in BF16, 769 different numbers are left, of
    5,000 in FP16, 3,299 (torch 2.13). Tokens far from the beginning get the same rotary angles or sinusoids. Inverse
    frequencies that are rounded to BF16 give angles that are wrong by up to 3.6 at 8,192 positions. A table
    that is computed in FP32 and stored in BF16 at the end is fine.

    ## Why it is a preview rule
    How many positions there are is often decided elsewhere. Of the 13 repositories with findings that were not looked
    at before, those of 8 were right.

    ## Fix safety
    The fix computes the positions in FP32. It is unsafe because results computed from them become FP32 too. There is no
    fix for positions that are stored in another tensor (`ids[:, 0] = torch.arange(n, dtype=...)`), whose dtype they
    get.

    ## Known limits
    Silent if the dtype holds all values of a literal range, if the end is the size of a batch, the number of heads or
    another small number by its name, for a `linspace` of unknown length and an `arange` with a fraction as its step,
    for an unknown dtype (`dtype=x.dtype`), for a function whose callers compare all dtypes, and in tests, which use
    `arange` for data. Inverse frequencies are not reported in the code of a `PreTrainedModel`, whose weights are
    trained with them, nor where the class has rounded them before. Silent for the rows and columns of a
    grid (`meshgrid`, `[:, None]` together with `[None, :]`): the sides of feature maps are seldom longer than 256.
    """

    code, name = "MPG108", "low-precision-positions"
    severity = "warning"
    preview = True
    message = "positions in {dtype}, which holds integers exactly up to {exact} only"
    _rounded = "`{name}` is rounded to {dtype} before it is multiplied by the positions: angles far out are wrong"
    _divided = "`{name}` is rounded to {dtype} before it is divided: integers above 256 may become others"
    help = "compute them in float32, and cast the result"
    triggers = (
        any_of(b"arange(", b"linspace(", b"inv_freq", b"timestep", b"randint("),
        # Not `inv_freq.to(`, which most models that move their frequencies to a device have.
        any_of(
            *dtype_triggers.CASTS_LOW_PRECISION, b"inv_freq.to(x.dtype", b"inv_freq.to(q.dtype", b"inv_freq.to(t.dtype",
            b"inv_freq.to(k.dtype", b"inv_freq.to(dtype", b"inv_freq.to(hidden_states.dtype", b"inv_freq.type_as(",
            b"timesteps.to(", b"timestep.to(", b" t.to(", b"steps[:, None].to(",
        ),
    )  # fmt: skip
    examples = (
        Bad(
            """\
import torch

def rotary(dim, length):
    t = torch.arange(length, device="cuda", dtype=torch.bfloat16)  # !
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).half() / dim))  # !
    return torch.outer(t, inv_freq).cos()
""",
            fixed="""\
import torch

def rotary(dim, length):
    t = torch.arange(length, device="cuda", dtype=torch.float32)
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
    return torch.outer(t, inv_freq).cos()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if _TESTS.search(facts.path):
            return
        for name in ("arange", "linspace"):
            for call in facts.calls.get(name, ()):
                given = call.argument(None, "dtype")
                if given is None or facts.called_path(call) != f"torch.{name}":
                    continue
                if name == "linspace" and self._largest(call, facts) is None:
                    continue  # as often data as positions
                low = self._low_dtype(facts.dtypes(given, call), call, call, facts)
                if low is not None and not self._of_a_grid(call, facts):
                    edit = python_edits.replaced(given, call, f"{python_edits.name_of_torch(facts)}.float32")
                    yield self._at(call, low, edit if python_edits.name_of_torch(facts) else None)
        for cast in facts.events("cast"):
            arange = self._arange(cast, facts)
            low = self._low_dtype(cast.dtypes, arange, cast.call, facts) if arange is not None else None
            if low is not None:
                yield self._at(cast.call, low, self._upcast(cast, facts))
        yield from self._frequencies(facts)
        yield from self._timesteps(facts)

    def _timesteps(self, facts: Facts) -> Iterator[Diagnostic]:
        """Yield the casts of timesteps to BF16, or to the dtype of activations, whose result is divided."""
        for call in (call for name in _CASTS for call in facts.calls.get(name, ())):
            key = dotted(call.receiver).rsplit(".", 1)[-1]
            tensor = call.receiver
            if isinstance(tensor, cst.Subscript):  # t[:, None]
                key = dotted(tensor.value).rsplit(".", 1)[-1]
            if not _TIMESTEPS.fullmatch(key) or not self._is_divided(call, facts):
                continue
            dtype = self._frequency_dtype(call, facts)
            floats = any(each.dtype in (Dtype.FP32, Dtype.FP64) for each in facts.precision.of(tensor, call))
            if dtype and dtype != Dtype.FP16.label and not floats:
                yield self.at(call, message=self._divided, name=key, dtype=dtype)

    def _is_divided(self, call: Call, facts: Facts) -> bool:
        """True if the result of a call is divided, directly or by the name that it gets."""
        bound = call.statement if isinstance(call.statement, cst.Assign) else None
        name = dotted(bound.targets[0].target) if bound is not None and bound.value is call.node else ""
        uses = call.scope.uses.get(name, ()) if name else ()
        nodes = [call.node, *(use.node for use in uses if use.path == name and use.order > call.order)]
        parents = ((facts.parent(node), node) for node in nodes)
        return any(
            isinstance(above, cst.BinaryOperation) and isinstance(above.operator, cst.Divide) and above.left is node
            for above, node in parents
        )

    def _frequencies(self, facts: Facts) -> Iterator[Diagnostic]:
        """Yield the casts of inverse frequencies to a low dtype, or to that of activations."""
        for name in _CASTS:
            for call in facts.calls.get(name, ()):
                key = dotted(call.receiver)
                above = facts.parent(call.node)
                rounds = isinstance(above, cst.Attribute) and above.attr.value in _UPCASTS
                stored = isinstance(call.statement, cst.Assign) and not dotted(call.statement.targets[0].target)
                if not input_casts.FREQUENCIES.search(key) or rounds or stored or _is_published(facts):
                    continue
                if key.startswith("self.") and self._rounded_before(call, facts):
                    continue
                dtype = self._frequency_dtype(call, facts)
                if dtype:
                    yield self.at(call, message=self._rounded, name=key.rsplit(".", 1)[-1], dtype=dtype)

    def _rounded_before(self, call: Call, facts: Facts) -> bool:
        """True if the class casts its frequencies when it is created: then they have that dtype already."""
        init = call.scope.owner.method("__init__") if call.scope.owner is not None else None
        if init is None or init is call.scope:
            return False
        return any(
            each.name in ("half", "bfloat16")
            or (each.name == "to" and any("dtype" in dotted(given) for given in _arguments(each)))
            or any(dtype in HALF_DTYPES for given in _arguments(each) for _, dtype in facts.dtypes(given, each))
            for each in init.calls
            if each.name in _CASTS and input_casts.FREQUENCIES.search(dotted(each.receiver))
        )

    def _frequency_dtype(self, call: Call, facts: Facts) -> str:
        """Return the dtype of a cast for the message; "" if it is not low."""
        if call.name in ("half", "bfloat16"):
            return (Dtype.FP16 if call.name == "half" else Dtype.BF16).label
        given = call.argument(0, "other") if call.name == "type_as" else call.keywords.get("dtype")
        arguments = [given] if given is not None else call.positional[:2]
        for argument in arguments:
            given_dtypes = [dtype for _, dtype in facts.dtypes(argument, call)]
            if low := [dtype for dtype in HALF_DTYPES if dtype in given_dtypes]:
                return low[0].label
            key = dotted(argument)
            tensor = key if call.name == "type_as" else key.removesuffix(".dtype") if key.endswith(".dtype") else ""
            exact = any(each.dtype is Dtype.FP32 for each in facts.precision.of(_tensor(argument), call))
            if tensor and not exact and not _POSITIONS.search(tensor.rsplit(".", 1)[-1]) and tensor != "self":
                return f"the dtype of `{tensor}`"
        return ""

    def _at(self, call: Call, dtype: Dtype, edit: Edit | None) -> Diagnostic:
        stored = isinstance(call.statement, cst.Assign) and isinstance(call.statement.targets[0].target, cst.Subscript)
        fix = Fix("Compute in float32", "unsafe", (edit,)) if edit is not None and not stored else None
        return self.at(call, dtype=dtype.label, exact=f"{dtype.largest_exact_integer:,}", fix=fix)

    def _low_dtype(self, possible: dtypes.PossibleDtypes, arange: Call, at: Record, facts: Facts) -> Dtype | None:
        """Return the low dtype of positions if it cannot hold them."""
        if any(scope.kind == "function" and scope.name.startswith("test") for scope in at.scope.within()):
            return None
        if {dtype for _, dtype in possible} >= _EVERY_DTYPE:
            return None  # the callers compare the dtypes
        largest, values = self._largest(arange, facts), self._values(arange, facts)
        low = (half for _, dtype in possible for half in HALF_DTYPES if half is dtype)
        return next(
            (
                half
                for half in low
                if not (largest and largest <= half.largest_exact_integer)
                and not (values and all(half.holds(value) for value in values))
            ),
            None,
        )

    def _values(self, call: Call, facts: Facts) -> list[float]:
        """Return the values of a range of known numbers; an empty list for an unknown or long one, or for exponents."""
        given = [call.argument(place, name) for place, name in enumerate(("start", "end", "step"))]
        if call.name != "arange" or self._is_exponent(call, facts):
            return []
        if given[1] is None:
            given = [None, given[0], None]
        numbers = [facts.scalars.number(each, call) if each is not None else None for each in given]
        if any(each is not None and number is None for each, number in zip(given, numbers, strict=True)):
            return []
        start, end, step = (
            number.value if number is not None else default for number, default in zip(numbers, (0, 0, 1), strict=True)
        )
        count = math.ceil((end - start) / step) if step else 0
        return [start + step * i for i in range(count)] if 0 < count <= _MANY else []

    def _largest(self, call: Call, facts: Facts) -> float | None:
        """Return the largest position; None if it is unknown, or for exponents: also powers of small ones round."""
        if self._is_exponent(call, facts):
            return None
        if call.name == "linspace":
            steps = facts.scalars.number(call.argument(2, "steps"), call)
            return steps.value if steps is not None else None
        step = call.argument(2, "step")
        if isinstance(step, cst.Float):
            return 1 if float(step.value) % 1 else None  # fractions are data, as those of a `linspace`
        if step is not None and not isinstance(step, cst.Integer):
            return None
        end = call.argument(1 if len(call.positional) > 1 else 0, "end")
        if dotted(end) and _SMALL.search(dotted(end)):
            return 1
        number = facts.scalars.number(end, call)
        return abs(number.value) if number is not None else None

    def _is_exponent(self, call: Call, facts: Facts) -> bool:
        """True for `temperature ** (arange(...) / n)`, `log(arange(...))` and `exp`, also through a name."""
        if _in_exponent(call.node, facts):
            return True
        node: cst.CSTNode = call.node
        while not isinstance(bound := facts.parent(node), (cst.Assign, cst.BaseStatement, type(None))):
            node = bound
        names = [dotted(each.target) for each in bound.targets] if isinstance(bound, cst.Assign) else []
        return any(_in_exponent(use.node, facts) for name in names for use in call.scope.uses.get(name, ()))

    def _of_a_grid(self, call: Call, facts: Facts) -> bool:
        """True for the rows or columns of a grid: an argument of `meshgrid`, or one of two axes (`[:, None]`)."""
        bound = facts.parent(call.node)
        names = {dotted(each.target) for each in bound.targets} if isinstance(bound, cst.Assign) else set()
        for mesh in facts.calls.get("meshgrid", ()):
            if mesh.scope is call.scope and any(
                axis is call.node or dotted(axis) in names for axis in _elements(mesh.positional)
            ):
                return True
        axis_order = _orientation(facts.parent(call.node))
        others = (facts.parent(other.node) for other in facts.calls.get(call.name, ()) if other.scope is call.scope)
        return axis_order is not None and any(_orientation(other) == (not axis_order) for other in others)

    def _arange(self, cast: Event, facts: Facts) -> Call | None:
        """Return the `arange` that is cast: directly, after a move, or through its name."""
        node: cst.CSTNode | None = cast.subject
        for _ in range(4):
            call = facts.call_of(node)
            if call is not None:
                if call.name == "arange":
                    given = call.keywords.get("dtype")
                    integers = given is None or {dtype for _, dtype in facts.dtypes(given, call)} <= _INTEGERS
                    return call if facts.called_path(call) == "torch.arange" and integers else None
                node = call.receiver if call.name in ("to", "cuda", "view", "unsqueeze", "expand", "reshape") else None
                continue
            bindings = facts.bindings(cast.key, cast.call, cast.call.guard) if node is cast.subject else []
            if len(bindings) != 1 or bindings[0].kind != "assign" or bindings[0].key.startswith("self."):
                return None
            node = bindings[0].value
        return None

    def _upcast(self, cast: Event, facts: Facts) -> Edit | None:
        call, torch = cast.call, python_edits.name_of_torch(facts)
        if call.name in ("half", "bfloat16"):
            return python_edits.without_method(call, ".float()")
        given = call.argument(0, "dtype")
        if torch is None or given is None or constant(given) is not None or len(call.positional) > 1:
            return None
        return python_edits.replaced(given, call, f"{torch}.float32")


def _in_exponent(node: cst.CSTNode, facts: Facts) -> bool:
    """True if a value, or what elementwise functions make of it, is an exponent, or in a `log` or `exp`."""
    while (parent := facts.parent(node)) is not None:
        if isinstance(parent, cst.BinaryOperation):
            if isinstance(parent.operator, cst.Power) and parent.right is node:
                return True
        elif isinstance(parent, cst.Arg) and isinstance(call := facts.parent(parent), cst.Call):
            name = dotted(call.func).rpartition(".")[2]
            if name in _AMPLIFIES or name not in _ELEMENTWISE:
                return name in _AMPLIFIES
            parent = call
        elif isinstance(parent, cst.Attribute) and isinstance(call := facts.parent(parent), cst.Call):
            if parent.attr.value in _AMPLIFIES or parent.attr.value not in _ELEMENTWISE:
                return parent.attr.value in _AMPLIFIES
            parent = call
        else:
            return False
        node = parent
    return False


def _arguments(call: Call) -> list[cst.BaseExpression]:
    """Return all arguments of a call."""
    return [*call.positional, *call.keywords.values()]


def _is_published(facts: Facts) -> bool:
    """True for the code of a model of transformers: its weights are trained with the angles that it computes."""
    return any(
        base.endswith("PreTrainedModel") for scope in facts.scopes if scope.kind == "class" for base in scope.base_names
    )


def _tensor(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return `x` of `x.dtype`."""
    return node.value if isinstance(node, cst.Attribute) and node.attr.value == "dtype" else node


def _elements(arguments: list[cst.BaseExpression]) -> list[cst.BaseExpression]:
    """Return the arguments; the elements if there is only one and it is a list or a tuple."""
    if len(arguments) == 1 and isinstance(arguments[0], (cst.List, cst.Tuple)):
        return [element.value for element in arguments[0].elements]
    return arguments


def _orientation(node: cst.CSTNode | None) -> bool | None:
    """Return True for `x[:, None]`, False for `x[None, :]`, None for anything else."""
    if not isinstance(node, cst.Subscript) or len(node.slice) != 2:
        return None
    new = [isinstance(s.slice, cst.Index) and dotted(s.slice.value) == "None" for s in node.slice]
    whole = [isinstance(s.slice, cst.Slice) for s in node.slice]
    return new[1] if any(new) and any(whole) else None
