"""Forward data flow in the linted tree: the sinks that a value reaches.

A value is followed through names, attributes, calls, returns and parameters to the *sinks* that show training:
`backward`, an optimizer, `prepare`, `initialize`, a trainer, FSDP/DDP.

It is not followed where gradients or training end: `no_grad`, `detach`, comparisons, shapes, a frozen model, an engine
that runs its own precision.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program import api_names, project_words, roles
from mpguard.lint.facts.program.lattice import Object, Ref
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import PathCondition, compatible, equality
from mpguard.lint.facts.syntax.records import BY_ORDER, Call, Record, Scope, Use
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: Nodes visited for one value, and nesting of functions. Beyond these limits the flow of the value is unknown.
_MAX_NODES = 400
_MAX_DEPTH = 40
_CASTS = frozenset({"float", "double", "to", "type", "type_as"})
#: Statements and expressions that use a value, and give it to nothing else.
_USES_UP = (cst.Expr, cst.If, cst.While, cst.Comparison, cst.Index, cst.Slice, cst.Assert)
#: Methods and functions whose result has no gradient, or that only read the value.
_ENDS_FLOW = frozenset({
    "item", "detach", "detach_", "numpy", "tolist", "size", "dim", "numel", "data_ptr", "element_size", "state_dict",
    "get_device",
    "is_floating_point", "argmax", "argmin", "print", "len", "isinstance", "type_as", "str", "repr", "int", "bool",
    "hash",
    "format", "save", "save_pretrained", "save_model", "save_file", "savez", "dump", "info", "debug", "warning",
    "log", "log_metrics",
    "add_scalar", "write", "assert_close", "allclose", "equal", "finfo", "stop_gradient", "hasattr", "getattr", "id",
    "load_state_dict",
    "summary", "export", "trace", "script", "update_parameters", "generate", "predict", "evaluate", "named_modules",
    "modules",
})  # fmt: skip
_METADATA = frozenset(
    {"shape", "device", "dtype", "ndim", "config", "requires_grad", "is_cuda", "data", "grad", "__class__", "training"}
)
#: Methods whose result a framework calls `backward` on.
FRAMEWORK_STEPS = frozenset({"training_step", "compute_loss"})
#: Prefixes of the full names of functions that only read a value.
_READERS = ("numpy.", "logging.", "os.", "json.", *project_words.LOGGERS)
#: Names of losses that take an output and a target; not of methods that compute the output themselves.
_LOSS = lazy_pattern(
    r"(?i)^(?!(?:compute|get|calc|calculate|training|forward|model)_)"
    rf"\w*(?:{roles.LOSSES}|cross_entropy|cross_entropy_with_logits|kl_div)$"
)
#: Names of models, where nothing else shows that an object is one.
_MODEL = lazy_pattern(r"(?i)(?:^|_)(?:model|net|network)$")
_COMPUTES = lazy_pattern(r"^(?:encode|decode|forward|extract|get_\w+_features)(?:_|$)")
_TARGETS = lazy_pattern(
    r"^(?:tgt|gt|target|label)s?(?:_(?:masks?|box|boxes|bbox|labels?|classes))?$"
    r"|^(?!pred|output|logit|student)\w+_(?:targets?|labels?|true|gt)$"
)
#: Classes that keep an average of a model's copy, and what makes the copy FP32.
_AVERAGES = lazy_pattern(r"EMA|Ema|MovingAverage")
_COPIES, _WIDENS = lazy_pattern(r"\bdeepcopy\(|\.clone\("), lazy_pattern(r"\.float\(|float32|fp32|\.double\(")
_TRAIN_SINKS = frozenset({"backward", "optimizer", "prepare", "initialize", "trainer", "parallel"})


@dataclasses.dataclass(eq=False)
class Sink:
    """A place where the flow of a value ends.

    kind: `backward`, `optimizer`, `prepare`, `initialize`, `trainer`, `parallel`, `gradient` (a backward pass whose
    gradients are never applied in the file), `saved`, `engine`, `frozen`, `peft`, `average` (a class of the project
    averages a copy of it).
    """

    kind: str
    call: Call


@dataclasses.dataclass(eq=False)
class Reach:
    """All that a value reaches.

    outside: it leaves the analysed code (returned by a function without callers, or beyond the limits). models: the
    calls of a model or module that take the value, or one computed from it, as an argument. names: the names and
    attributes that hold it, or what is computed from it, and the keywords by which models take it.
    """

    sinks: list[Sink] = dataclasses.field(default_factory=list)
    models: list[Call] = dataclasses.field(default_factory=list)
    names: set[str] = dataclasses.field(default_factory=set)
    outside: bool = False

    @property
    def training_sinks(self) -> list[Sink]:
        """The sinks that show that the value is trained with."""
        return [sink for sink in self.sinks if sink.kind in _TRAIN_SINKS]

    def meets(self, kind: str) -> bool:
        """True if a sink of this kind is reached."""
        return any(sink.kind == kind for sink in self.sinks)


class _Walk:
    """The state of one walk: what it has seen and reached, and where a value loses its dtype or leaves the code."""

    def __init__(
        self, facts: BehaviourView, guard: PathCondition, past_targets: bool = True, past_models: bool = True
    ) -> None:
        self.facts, self.guard, self.past_targets, self.past_models = facts, guard, past_targets, past_models
        self.reach = Reach()
        self.seen: set[object] = set()
        self.nodes_left = _MAX_NODES
        self.depth = 0
        self.cast: tuple[str, Scope] | None = None
        #: Where the value is made; and functions that it enters, with the calls through whose arguments it does.
        self.home: Scope | None = None
        self.entries: dict[Scope, list[Call]] = {}
        self.results: dict[Scope, list[int | None]] = {}  # of functions that return the value, the element that it is

    def sink(self, kind: str, call: Call) -> None:
        """Record a sink; a backward pass in a file that applies no gradients is recorded as `gradient`."""
        if self.facts.measures.only_probes_gradients or (kind == "backward" and not self.facts.has_step(call.scope)):
            kind = "gradient" if kind in _TRAIN_SINKS else kind
        self.reach.sinks.append(Sink(kind, call))

    @contextlib.contextmanager
    def in_file_of(self, place: Record | Scope) -> Iterator[None]:
        """Continue in another module: `facts` are those of the file of a place."""
        before, self.facts = self.facts, self.facts.of(place)
        try:
            yield
        finally:
            self.facts = before

    def cast_back(self, call: Call) -> bool:
        """True if a kernel's result is cast immediately: `kernel(x.half()).float()`.

        Also in the next statement: `out = kernel(q.half())`, `out.to(t)`. A kernel is a function of a library other
        than torch, or an undefined one; not a model or a parameter.
        """
        atoms = [each.atom for each in self.facts.evaluate(call.func, call)]
        library = bool(atoms) and all(
            isinstance(atom, Ref)
            and not atom.path.startswith("torch.")
            and not api_names.CAPITAL.match(atom.path.rsplit(".", 1)[-1])
            for atom in atoms
        )
        if not library and (
            not call.path or self.facts.values.reaching(call.path.split(".", 1)[0], call.scope, call.order)
        ):
            return False
        parents = self.facts.index.parents
        above = parents.get(call.node)
        if isinstance(above, cst.Attribute):
            return above.attr.value in _CASTS
        if not isinstance(above, cst.Assign) or not (key := dotted(above.targets[0].target)):
            return False
        uses = [u for u in call.scope.uses.get(key.split(".", 1)[0], ()) if u.order > call.order]
        return any(use.path.startswith(key + ".") and use.path.rsplit(".", 1)[-1] in _CASTS for use in uses)

    def ends(self, key: str, scope: Scope, order: int) -> int:
        """Return the place where `model.float()` upcasts an object that was cast in place (`model.half()`)."""
        if self.cast is None or (key, scope) != self.cast:
            return 1 << 60
        ups = (
            use.order
            for use in scope.uses.get(key.split(".", 1)[0], ())
            if use.order > order and not (use.guard - self.guard) and self.upcasts(use, key)
        )
        return min(ups, default=1 << 60)

    def upcasts(self, use: Use, key: str) -> bool:
        """True if a use is `model.float()` or `model.to(torch.float32)`, in place or assigned to the same name."""
        if use.path.rpartition(".")[0] != key or not (
            use.path.endswith(".to") or use.path[len(key) + 1 :] in api_names.UPCASTS
        ):
            return False
        parent = self.facts.index.parents.get(use.node)
        call = self.facts.index.call_of.get(parent) if isinstance(parent, cst.Call) else None
        if call is None or call.func is not use.node:
            return False
        if call.name == "to":
            given = [call.keywords["dtype"]] if "dtype" in call.keywords else call.positional[:2]
            dtypes = {dtype for each in given for _, dtype in self.facts.dtypes(each, call)} - {None}
            if not dtypes or not dtypes <= {Dtype.FP32, Dtype.FP64}:
                return False
        above = self.facts.index.parents.get(call.node)
        if isinstance(above, cst.Assign):
            return any(dotted(each.target) == key for each in above.targets)
        return isinstance(above, cst.Expr)

    def rebound(self, key: str, scope: Scope, order: int, use: Record) -> bool:
        """True if the name has been bound to another value before the use.

        A loop under `no_grad` is taken to run: `for layer in frozen: x = layer(x)`.
        """
        return (
            order >= 0
            and use.scope is scope
            and any(
                binding.kind not in ("item", "augmented")
                and not (binding.guard - use.guard)
                and (set(binding.loops) <= set(use.loops) or self._in_no_grad(binding))
                for binding in self.facts.flow.between(scope.bindings.get(key, ()), order, use.order)
            )
        )

    def _in_no_grad(self, record: Record) -> bool:
        """True if a record is in a `no_grad` region."""
        return any(
            region.kind == "no_grad" and not (region.guard - record.guard) for region in self.facts.regions(record)
        )

    def _is_target(self, call: Call, arg: cst.Arg) -> bool:
        """True if an argument is the target of a loss: `criterion(output, y)`, `F.mse_loss(output, target=y)`."""
        if not _LOSS.search(call.name) and "criterion" not in self.facts.kinds(call.func, call):
            return False
        given = (*call.positional[:1], *call.keywords.values())
        if any(dotted(each).rsplit(".", 1)[-1] in self.facts.module_names for each in given):
            return False
        if arg.keyword is not None:
            return _TARGETS.search(arg.keyword.value) is not None
        return len(call.positional) > 1 and arg.value is call.positional[1]

    def through_library(self, path: str, call: Call, arg: cst.Arg) -> bool:
        """Handle a library function with the value as an argument. True if the flow continues with its result."""
        last = path.rsplit(".", 1)[-1]
        kind = api_names.kind_of(path)
        if roles.SAVES.search(last):
            self.sink("saved", call)
            return False
        if last in _ENDS_FLOW or path.startswith(_READERS):
            if last == "save":
                self.sink("saved", call)
            return False
        if kind == "optimizer":
            if self._may_step(call):
                self.sink("optimizer", call)
            return False
        if kind == "trainer":
            first = bool(call.positional) and arg.value is call.positional[0]  # a second model is the reference model
            taken = first or (arg.keyword is not None and arg.keyword.value in ("model", "args"))
            if taken and not self.facts.measures.only_evaluates(call):
                self.sink("trainer", call)
            return False
        if kind == "engine":
            self.sink("initialize", call)
            return True
        if last in api_names.PARALLEL:
            if self._may_step(call):
                self.sink("parallel", call)
            return True
        return not path.startswith("copy.deepcopy")

    def _into_class(self, cls: Scope, call: Call, arg: cst.Arg) -> bool:
        """True if a class of the project is an optimizer, or a Trainer of transformers, which takes the value."""
        kind = self.facts.class_kind(cls)
        if _averages_copy(cls):
            self.sink("average", call)
        if kind == "own_optimizer" and self._may_step(call):
            self.sink("optimizer", call)
            return True
        bases = self.facts.ancestry(cls) if kind == "trainer" else ()
        base = next((each for each in bases if api_names.kind_of(each) == "trainer"), "")
        return bool(base) and not self.through_library(base, call, arg)

    def _may_step(self, call: Call) -> bool:
        """True if the file that creates an optimizer or wrapper trains, or one that calls it or takes it."""
        if self.facts.any_training or self.facts.events("step"):  # a helper may run the backward pass
            return True
        statement = call.statement  # `optimizer = Sharded(Adam(...))`
        key = dotted(statement.targets[0].target) if isinstance(statement, cst.Assign) else ""
        for taker in call.scope.calls if key else ():
            if key in map(dotted, (*taker.positional, *taker.keywords.values())):
                functions = self.facts.functions(taker)
                if any(self.facts.of(each.scope).any_training for each in functions):
                    return True
        users = {self.facts.of(each) for each in self.facts.programs_of(call.scope, lambda _: False)}
        return any(each.any_training for each in users)

    def _may_be_model(self, call: Call) -> bool:
        """True if an unknown callee is a model by its name, by that of its method, or because a call creates it."""
        last = call.path.rsplit(".", 1)[-1]
        if _MODEL.search(last) or (call.receiver is not None and _COMPUTES.search(last)):
            return True
        bindings = self.facts.values.reaching(call.path, call.scope, call.order, call.guard)
        makers = [dotted(each.value.func) for each in bindings if isinstance(each.value, cst.Call)]
        return bool(bindings) and len(makers) == len(bindings) and not any(map(roles.MEASURED.search, (last, *makers)))

    def into_model(self, call: Call, arg: cst.Arg) -> bool:
        """Record a model that takes the value. True if the flow continues through it."""
        self.reach.models.append(call)
        if arg.keyword is not None:
            self.reach.names.add(arg.keyword.value)
        return self.past_models

    def _is_followed(self, scope: Scope, call: Call) -> bool:
        """True if a value that a function of the same file returns is followed to this call of it."""
        return self.facts.of(scope) is self.facts and call in self.facts.callers(scope)

    def _is_own_method(self, call: Call) -> bool:
        """True if a model calls a method of its own: `self.encode(x)` in `forward` is no inference."""
        owner = call.scope.owner
        return dotted(call.receiver) == "self" and owner is not None and self.facts.class_kind(owner) == "model"

    def _leaves_out(self, call: Call, scope: Scope) -> bool:
        """True if the constants that a call passes contradict the condition under which the function makes the value.

        With `load(path, base=None)` no function merges adapters under `if base is not None`.
        """
        if scope is not self.home:
            return False
        for param in scope.params:
            if param.name in self.guard.flags() and len(scope.bindings.get(param.name, ())) == 1:
                literal = constant(self.facts.values.given(call, scope, param.name))
                if literal is not None and not self.guard.given(equality(param.name, literal[0])).possible:
                    return True
        return False


class ForwardFlow(_Walk):
    """One forward traversal; the result is in `reach`."""

    def start(self, node: cst.CSTNode, at: Record) -> Reach:
        """Follow the value of an expression."""
        self.follow(node, at)
        return self.reach

    def follow(self, node: cst.CSTNode, at: Record, index: int | None = None) -> None:
        """Follow the value of `node`, in the file of `at`, to the enclosing expressions and statements.

        index: the value is this element of the tuple that the node returns.
        """
        self.home = self.home or at.scope
        with self.in_file_of(at):
            self._follow(node, at, index)

    def _follow(self, node: cst.CSTNode, at: Record, index: int | None) -> None:
        parents = self.facts.index.parents
        given = ""
        while self.nodes_left > 0 and ("node", node, index) not in self.seen:
            self.seen.add(("node", node, index))
            self.nodes_left -= 1
            parent, element = parents.get(node), index
            index = None
            if parent is None or isinstance(parent, _USES_UP):
                return
            if isinstance(parent, cst.Attribute):
                if parent.attr.value in _METADATA:
                    return
                above = parents.get(parent)
                called = above if isinstance(above, cst.Call) and above.func is parent else None
                if called is not None and not self.method(parent.attr.value, called):
                    return
                node = called or parent
            elif isinstance(parent, cst.Call):  # the callee: model(x)
                node = parent
            elif isinstance(parent, cst.Arg):
                call = self.facts.index.call_of.get(parents[parent])
                if call is None or not self.argument(call, parent) or self.cast_back(call):
                    return
                given = dotted(node)
                node, at = call.node, call
            elif isinstance(parent, cst.Assign):
                for target in parent.targets:
                    same = None if self.past_models else _same_place(target.target, node, given)
                    self.bind(_element(target.target, element) if same is None else same, at)
                return
            elif isinstance(parent, cst.Element) and isinstance(above := parents[parent], cst.Tuple):
                node, index = above, above.elements.index(parent)
            elif isinstance(parent, (cst.AnnAssign, cst.AugAssign, cst.For)):
                self.bind(parent.target, at)
                return
            elif isinstance(parent, cst.NamedExpr):
                self.bind(parent.target, at)
                node = parent
            elif isinstance(parent, (cst.Return, cst.Yield)):
                self.returned(at.scope, element)
                return
            elif isinstance(parent, cst.CompFor):
                if node is parent.iter:
                    self.bind(parent.target, at)
                return
            elif isinstance(parent, cst.With):
                for item in parent.items:
                    if item.item is node and item.asname is not None:
                        self.bind(item.asname.name, at)
                return
            elif isinstance(parent, cst.Lambda):
                self.anonymous(parent, at)
                return
            elif (isinstance(parent, cst.IfExp) and node is parent.test) or isinstance(
                parent, (cst.FunctionDef, cst.ClassDef, cst.Decorator)
            ):
                return
            else:
                node = parent

    def anonymous(self, node: cst.Lambda, at: Record) -> None:
        """Follow the result of a lambda: to the calls of its name, or the result of `map`."""
        parents = self.facts.index.parents
        parent = parents.get(node)
        if isinstance(parent, cst.Assign) and isinstance(name := parent.targets[0].target, cst.Name):
            for call in self.facts.calls.get(name.value, ()):
                bound = self.facts.values.reaching(name.value, call.scope, call.order)
                if (
                    call.receiver is None
                    and any(binding.value is node for binding in bound)
                    and not self._in_no_grad(call)
                ):
                    self.follow(call.node, call)
        elif isinstance(parent, cst.Arg) and not self._in_no_grad(at):
            above = parents[parent]
            if isinstance(above, cst.Call) and dotted(above.func) == "map":
                self.follow(above, at)

    def bind(self, target: cst.CSTNode, at: Record) -> None:
        """Follow the target of an assignment."""
        if isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                self.bind(element.value, at)
            return
        if isinstance(target, cst.Subscript):
            target = target.value
        key = dotted(target)
        if key:
            bindings = at.scope.bindings.get(key, ())
            place = bisect.bisect_right(bindings, at.order, key=BY_ORDER)
            self.taint(key, at.scope, bindings[place].order if place < len(bindings) else at.order)

    def taint(self, key: str, scope: Scope, order: int) -> None:
        """Follow all uses of a name that may hold the value."""
        if (key, scope, order) in self.seen or self.nodes_left <= 0:
            return
        if self.depth > _MAX_DEPTH or self.facts.flow.exhausted:
            self.reach.outside = True
            return
        self.seen.add((key, scope, order))
        self.reach.names.add(key)
        self.home = self.home or scope
        self.depth += 1
        with self.in_file_of(scope):
            self.uses(key, scope, order)
        self.depth -= 1

    def uses(self, key: str, scope: Scope, order: int) -> None:
        """Visit the uses of a name from a place on."""
        places: list[Scope] = list(scope.descendants())
        if key.startswith("self.") and scope.owner is not None:
            places = list(scope.owner.descendants())
        elif scope.kind == "module":
            places = [s for s in self.facts.index.scopes if key not in s.bindings or s is scope]
        else:
            places = [s for s in places if s is scope or key not in s.bindings]
        root = key.split(".", 1)[0]
        last = self.ends(key, scope, order)
        for place in places:
            for use in place.uses.get(root, ()):
                self.facts.flow.uses_left -= 1
                if self.facts.flow.exhausted:
                    self.reach.outside = True
                    return
                if use.path != key and not use.path.startswith(key + "."):
                    continue
                if (place is scope and not order < use.order < last) or (use, key) in self.seen:
                    continue
                if not compatible(self.guard, use.guard) or self.rebound(
                    key, place if key.startswith("self.") else scope, order, use
                ):
                    continue
                self.seen.add((use, key))
                if self._in_no_grad(use):
                    continue
                self.used(use.path[len(key) + 1 :], use)
        if key.startswith("self.") and key.count(".") == 1 and scope.owner is not None:
            for use, rest in _of_objects(key[5:], scope.owner, self.facts):
                if (use, key) not in self.seen and compatible(self.guard, use.guard):
                    self.seen.add((use, key))
                    with self.in_file_of(use):
                        if not self._in_no_grad(use):
                            self.used(rest, use)

    def used(self, rest: str, use: Record) -> None:
        """Follow one use; `rest` is the attribute path after the name."""
        parts = rest.split(".") if rest else []
        if any(part in _METADATA and part != "data" for part in parts):
            return
        parent = self.facts.index.parents.get(use.node)
        if isinstance(parent, cst.Call) and parent.func is use.node:
            if parts:
                if self.method(parts[-1], parent):
                    self.follow(parent, use)
            else:
                call = self.facts.index.call_of.get(parent)
                if call is not None:
                    self.follow(parent, call)
            return
        self.follow(use.node, use)

    def method(self, name: str, node: cst.Call) -> bool:
        """Handle a method call on the value. True if the flow continues with the method's result."""
        call = self.facts.index.call_of.get(node)
        if call is None:
            return False
        if name == "backward":
            if self.facts.is_inference(call):
                return False
            self.sink("backward", call)
            return False
        if name in api_names.ADDS_TO_CONTAINER or name in _ENDS_FLOW:
            if name.startswith("save"):
                self.sink("saved", call)
            return False
        if project_words.ADAPTERS.search(name):
            self.sink("peft", call)
        return self.past_models or name not in api_names.UPCASTS

    def argument(self, call: Call, arg: cst.Arg) -> bool:
        """Handle a call with the value as an argument. True if the flow continues with the call's result."""
        facts, name = self.facts, call.name
        if name in ("backward", "manual_backward"):
            self.sink("backward", call)
            return False
        if name in api_names.ADDS_TO_CONTAINER and call.receiver is not None:
            self.bind(call.receiver, call)
            return False
        if name in _ENDS_FLOW:
            if name.startswith("save"):
                self.sink("saved", call)
            return False
        if self._in_no_grad(call) or (not self.past_targets and self._is_target(call, arg)):
            return False
        if name == "prepare" and call.receiver is not None:
            kinds = facts.kinds(call.receiver, call)
            if "accelerator" in kinds or "accelerator" in dotted(call.receiver).lower():
                self.sink("prepare", call)
                return True
        if facts.frozen_params.is_frozen_name(dotted(call.receiver)) or facts.frozen_params.is_frozen_name(call.path):
            self.sink("frozen", call)
            return False
        if project_words.ADAPTERS.search(name) or project_words.ADAPTER_LOADERS.search(call.path):
            self.sink("peft", call)
        carries, known = False, False
        for each in facts.evaluate(call.func, call):
            atom = each.atom
            kind = type(atom).__name__
            if kind == "Ref":
                known = True
                carries = self.through_library(atom.path, call, arg) or carries  # type: ignore[union-attr]
            elif kind in ("Function", "Class"):
                known = True
                if atom.facts is not facts and roles.SAVES.search(name):  # type: ignore[union-attr]
                    self.sink("saved", call)
                if kind == "Class" and self._into_class(atom.scope, call, arg):  # type: ignore[union-attr]
                    continue
                followed = self.entered(atom.scope, call, arg)  # type: ignore[union-attr]
                carries = carries or kind == "Class" or not followed
            elif kind == "Object":
                known = True
                carries = self.module(atom, call, arg) or carries
        if not known:
            last = call.path.rsplit(".", 1)[-1]
            is_model = last in facts.module_names or (not self.past_models and self._may_be_model(call))
            if last and is_model and not self.into_model(call, arg):
                return False
            for function in facts.functions(call):
                known = True
                carries = not self.entered(function.scope, call, arg) or carries
            if not known and roles.SAVES.search(name):
                self.sink("saved", call)
                return False
        return carries or not known

    def module(self, atom: object, call: Call, arg: cst.Arg) -> bool:
        """Handle a call of an object with the value as an argument. True if the flow continues with its result."""
        kind = getattr(atom, "kind", "")
        if kind == "engine":
            self.sink("engine", call)
            return False
        if kind == "pipeline":
            return False
        if kind == "optimizer":
            return False
        if kind == "model" and not self.into_model(call, arg):
            return False
        functions = self.facts.functions(call)
        for function in functions:
            self.entered(function.scope, call, arg)
        return not functions or not all(self._is_followed(function.scope, call) for function in functions)

    def entered(self, scope: Scope, call: Call, arg: cst.Arg) -> bool:
        """Follow the value into the parameter of a function of the file, or of a module that may train.

        False for a tensor that a function of another module takes, such as a loss: the result is computed from it. What
        such a function gives for a model may be a wrapper that keeps masters.
        """
        if scope.kind == "class":
            init = scope.method("__init__")
            if init is None:
                return True
            scope = init
        inference = roles.evaluates(scope.name) and not self._is_own_method(call)
        facts = self.facts.of(scope)
        if facts is not self.facts and not facts.may_train:
            return inference or self.past_targets
        name = None
        if arg.keyword is not None:
            name = arg.keyword.value
        elif arg.value in call.positional:
            params = [p for p in scope.params if p.kind == "plain"]
            if scope.is_bound:
                params = params[1:]
            place = call.positional.index(arg.value)
            name = params[place].name if place < len(params) else None
        if name is not None and not inference:
            entries = self.entries.setdefault(scope, [])
            results = tuple(self.results.get(scope, ())) if entries and call not in entries else ()
            entries.append(call)
            self.taint(name, scope, scope.order)
            for index in results if not self._in_no_grad(call) else ():
                self.follow(call.node, call, index)
        return True

    def returned(self, scope: Scope, index: int | None) -> None:
        """Follow the value to the callers of the function that returns it: those that it came from, if it did."""
        results = self.results.setdefault(scope, [])
        if index in results:
            return
        results.append(index)
        entries = self.entries.get(scope) if scope is not self.home else None
        callers = entries or (self.facts.callers(scope) if scope.kind == "function" else [])
        if scope.name in FRAMEWORK_STEPS and scope.is_method and self.facts.base_unknown(scope.owner):
            call = next(iter(scope.calls), None)
            if call is not None:
                self.sink("trainer", call)
        if not callers:
            self.reach.outside = True
        for call in tuple(callers):
            if not self._in_no_grad(call) and not self._leaves_out(call, scope):
                self.follow(call.node, call, index)


def _averages_copy(cls: Scope) -> bool:
    """True for a class of the project that keeps an average of a model, in a copy that has the model's dtype."""
    text = cls.chunk.text if _AVERAGES.search(cls.name) else ""
    return _COPIES.search(text) is not None and _WIDENS.search(text) is None


def _of_objects(name: str, owner: Scope, facts: BehaviourView) -> Iterator[tuple[Use, str]]:
    """Yield the uses of an attribute outside of its class, as of objects of the class, with the rest of their paths.

    `sd.unet.parameters()` is one of `self.unet`, where `sd` is an object of the class.
    """
    for other in (facts, *(facts.users(owner.name) or ())):
        if f".{name}" not in other.source.text:
            continue
        other.need_uses(name)
        for scope in other.index.scopes:
            for use in (use for uses in scope.uses.values() for use in uses if name in use.path):
                parts = use.path.split(".")
                if name not in parts[1:] or scope.owner is owner:
                    continue
                place = parts.index(name, 1)
                objects = other.values.lookup(".".join(parts[:place]), scope, use.order)
                if any(isinstance(each.atom, Object) and each.atom.cls is owner for each in objects):
                    yield use, ".".join(parts[place + 1 :])


def _same_place(target: cst.CSTNode, value: cst.CSTNode, given: str) -> cst.CSTNode | None:
    """Return `x` of `x, y = f(x, y)` for the argument `x`: each result is taken for that of the argument so named."""
    if not isinstance(target, cst.Tuple) or not isinstance(value, cst.Call):
        return None
    arguments = {dotted(arg.value) for arg in value.args} - {""}
    names = {dotted(element.value): element.value for element in target.elements}
    return names.get(given) if names.keys() <= arguments else None


def _element(target: cst.BaseExpression, index: int | None) -> cst.BaseExpression:
    """Return the element of a target that gets the element of a tuple; the whole target if that is unknown."""
    if index is None or not isinstance(target, (cst.Tuple, cst.List)):
        return target
    starred = any(isinstance(each, cst.StarredElement) for each in target.elements)
    return target if starred or index >= len(target.elements) else target.elements[index].value
