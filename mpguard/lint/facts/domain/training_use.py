"""The values that a file trains, and the dtype of the weights that it trains.

`trained.cast(event, dtype)` returns what trains with the value of one cast; `trained.weights(dtype, ...)` returns the
models whose weights are cast, loaded or created in a low-precision dtype and then trained, each with what trains them.
Frozen towers, LoRA bases, inference, rounding and copies for a checkpoint are excluded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour import lightning
from mpguard.lint.facts.behaviour.accelerate_precision import follows_policy
from mpguard.lint.facts.behaviour.autocast_ops import LOWERED
from mpguard.lint.facts.behaviour.events import Event, EventKind
from mpguard.lint.facts.behaviour.events.event import creates_optimizer, is_optimizer
from mpguard.lint.facts.behaviour.forward_flow import FRAMEWORK_STEPS, Reach, Sink
from mpguard.lint.facts.domain import wrapped_loads
from mpguard.lint.facts.domain.master_weights import may_keep_masters
from mpguard.lint.facts.program import api_names, keywords, project_words
from mpguard.lint.facts.program.dtypes import AnyDtype, PossibleDtypes, as_dtype
from mpguard.lint.facts.program.lattice import Class, Function, Object, Ref
from mpguard.lint.facts.program.mentions import mentions
from mpguard.lint.facts.syntax.nodes import constant, dotted, text_of
from mpguard.lint.facts.syntax.path_condition import ALWAYS, Flag, PathCondition, compatible, negated
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

#: Events that may set the dtype of weights.
_SETS_DTYPE: tuple[EventKind, ...] = ("cast", "construct", "load")
#: Events of training.
_TRAINS: tuple[EventKind, ...] = ("backward", "framework", "trainer")
#: Iterators over the parts of a model: a cast of each part is a cast of the model.
_PARTS = frozenset({"parameters", "named_parameters", "modules", "named_modules", "children", "named_children"})
#: Functions that collect parameters.
_COLLECTS = frozenset({"list", "tuple", "filter", "chain", "sorted", "iter"})
#: The condition under which a loop casts what is not trained.
_FROZEN = negated(Flag("requires_grad"))
#: Arguments of a load that quantize: adapters are trained, the weights stay.
_QUANTIZES = ("quantization_config", "load_in_8bit", "load_in_4bit")
#: Arguments of a Trainer that add adapters to its model or replace its optimizer; arguments of its settings that shard.
_OTHER_OPTIMIZER = ("peft_config", "optimizers", "optimizer_cls_and_kwargs")
#: Methods of `HfArgumentParser`; flags of launchers and scripts that shard, add adapters or choose another optimizer.
_PARSES = frozenset({"parse_args_into_dataclasses", "parse_args_and_config"})
_OTHER_LAUNCH = frozenset({"config_file", "use_fsdp", "use_deepspeed"})
_OTHER_FLAGS = lazy_pattern(r"(?i)^--(?:deepspeed|fsdp|optim|load_in|use_)|lora|peft|quant|bits|\.(?:json|ya?ml)$")
_SHARDING_ARGUMENTS = frozenset({"deepspeed", "fsdp", "fsdp_config"})
#: What gives the tensors of a checkpoint.
_LOADS = frozenset({"state_dict", "load", "load_file", "safe_open"})
#: Names of checkpoints: they may come from anywhere.
_CHECKPOINT = lazy_pattern(r"(?i)state_?dict|ckpt|checkpoint|(?:^|_)sd$")
#: Functions whose results are zeros and ones; names of losses and masks.
_ZEROS_AND_ONES = frozenset({"one_hot", "eq", "ne", "gt", "lt", "ge", "le", "bool", "isnan", "isinf", "bernoulli"})
_CRITERION = lazy_pattern(r"(?i)(?:^|[._])(?:loss|loss_?fn|loss_?func(?:tion)?|criterion)$")
_MASK = lazy_pattern(r"(?i)mask")
#: What a helper may return that gives the dtype of any name.
_ANY_DTYPE = frozenset({Dtype.FP32, Dtype.BF16, Dtype.FP16})


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """How a value is trained: `sink` is the first place that shows it, `reach` all that the value reaches.

    by_engine: in other arms of the program an engine of DeepSpeed or the like runs the backward pass.
    """

    reach: Reach
    sinks: tuple[Sink, ...]
    by_engine: bool = False

    @property
    def sink(self) -> Sink:
        """The first place that shows that the value is trained."""
        return self.sinks[0]

    def of(self, kind: str) -> list[Call]:
        """Return the calls of the sinks of a kind.

        Kinds are `optimizer` (that takes the parameters), `trainer`, `prepare`, `parallel`.
        """
        return [sink.call for sink in self.sinks if sink.kind == kind]


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Low-precision weights that are trained: `event` (a `cast`, `construct` or `load`) is where they get the dtype."""

    event: Event
    dtype: AnyDtype
    guard: PathCondition
    training: Training


class TrainingUse:
    """The training in one file."""

    def __init__(self, facts: DomainView) -> None:
        self.facts = facts
        self._weights: dict[AnyDtype, list[Weights]] = {}
        self._adapted: dict[str, set[Scope]] | None = None
        self._sharding: dict[Scope, bool] = {}

    # -- casts --------------------------------------------------------------------------------------

    def cast(self, cast: Event, dtype: AnyDtype | str, guards: list[PathCondition] | None = None) -> Training | None:
        """Return what trains with the value that a cast to `dtype` gives, under one of the path conditions, or None."""
        guards = cast.may_be(dtype) if guards is None else guards
        if (
            not guards
            or cast.subject is None
            or self.is_rounding_or_copy(cast, dtype)
            or self.facts.is_inference(cast.call)
        ):
            return None
        if self._is_exact(cast) or self._is_replaced_by_callers(cast, dtype):
            return None
        if self.facts.frozen_params.is_frozen(cast.subject) or self.facts.frozen_params.is_frozen(cast.call.node):
            return None
        if self.facts.kinds(cast.subject, cast.call) & {"engine", "pipeline", "criterion"}:
            return None
        if (_CRITERION.search(cast.key) and self.is_module(cast)) or self._is_quantized_next(cast):
            return None
        whole = self._cast_model(cast)
        if whole is not None and (
            self.facts.frozen_params.is_frozen_name(whole[0]) or self.has_adapters(whole[0], cast.call)
        ):
            return None
        reach = self._reach(cast, guards[0], whole)
        is_module = whole is not None or self.is_module(cast)
        later = not is_module and self._is_frozen_later(cast, reach)
        training = self._training(reach, weights=is_module, frozen_later=later)
        if training is None and whole is not None and cast.key == "self":
            training = self._own_training(cast, reach)
        if training is None or (training.by_engine and not is_module):
            return None  # the inputs of a model that an engine may run in low precision
        if not is_module or whole is not None:
            return training
        bound = self.facts.bound_to(cast.call)
        untaken = self.is_untaken(bound.key, bound) if bound is not None else self.is_untaken(cast.key, cast.call)
        return None if untaken else training

    def _is_replaced_by_callers(self, cast: Event, dtype: AnyDtype | str) -> bool:
        """True if a dtype is only what a parameter falls back to (`if dtype is None`), and all calls pass another."""
        scope, facts = cast.scope, self.facts
        for given in (*cast.call.positional, *cast.call.keywords.values()):
            name = dotted(given)
            bindings = scope.bindings.get(name, [])
            calls = facts.callers(scope) if [each.kind for each in bindings] == ["param", "assign"] else []
            fallback = rf"\bif (?:not {name}|{name} is None)\s*:\s*{name}\s*="
            if not calls or re.search(fallback, scope.chunk.text) is None:
                continue
            passed = [(facts.values.given(call, scope, name), call) for call in calls]
            if all(
                value is not None and _is_another(facts.of(call).dtypes(value, call), dtype) for value, call in passed
            ):
                return True
        return False

    def _is_quantized_next(self, cast: Event) -> bool:
        """True if integers replace the weights after a cast: `net.half().quantize(4)`, `net = net.quantize(4)`."""
        bound = self.facts.bound_to(cast.call)
        return any(
            call.scope is cast.scope
            and not call.guard - cast.guard
            and (
                call.receiver is cast.call.node
                or (bound is not None and call.order > bound.order and dotted(call.receiver) == bound.key)
            )
            for call in self.facts.calls.get("quantize", ())
        )

    def _training(self, reach: Reach, weights: bool = False, frozen_later: bool = False) -> Training | None:
        """Return what trains with a value.

        weights: it is a model. An optimizer trains it even if a frozen model takes its output. frozen_later: it is an
        input of a model that is trained, and frozen models take only what this one makes of it.
        """
        is_trained = frozen_later or (weights and reach.meets("optimizer"))
        if reach.meets("peft") or (reach.meets("frozen") and not is_trained):
            return None
        trained = [sink for sink in reach.training_sinks if not self._only_places(sink)]
        sinks = tuple(sink for sink in trained if not self._by_engine(sink))
        return Training(reach, sinks, len(sinks) < len(trained)) if sinks else None

    def _is_frozen_later(self, cast: Event, reach: Reach) -> bool:
        """True if a model takes a value by its name, and the frozen models of the function, after it, do not."""
        bound = self.facts.bound_to(cast.call)
        if bound is None:
            return False

        word = re.compile(rf"(?<![\w.]){re.escape(bound.key)}\b")

        def takes(call: Call) -> bool:
            return any(word.search(text_of(given)) for given in (*call.positional, *call.keywords.values()))

        takers = (
            call for call in reach.models if bound.key in map(dotted, (*call.positional, *call.keywords.values()))
        )
        first = min((call.order for call in takers if call.scope is cast.scope), default=None)
        frozen = [sink.call for sink in reach.sinks if sink.kind == "frozen"]
        return first is not None and all(
            call.scope is cast.scope and call.order > first and not takes(call) for call in frozen
        )

    def _own_training(self, cast: Event, reach: Reach) -> Training | None:
        """Return what trains a model in its own methods: it makes an optimizer of its parameters, and steps with it."""
        owner = cast.scope.owner
        calls = [call for scope in owner.descendants() for call in scope.calls] if owner is not None else []
        if not {"backward", "step"} <= {call.name for call in calls}:
            return None
        for call in calls:
            takes_all = any(text_of(given) == "self.parameters()" for given in call.positional)
            if takes_all and creates_optimizer(self.facts, call):
                return Training(reach, (Sink("optimizer", call),), False)
        return None

    def _only_places(self, sink: Sink) -> bool:
        """True if Accelerate prepares a model without an optimizer in a file that runs no backward pass."""
        if sink.kind != "prepare":
            return False
        facts = self.facts.of(sink.call)
        given = (*sink.call.positional, *sink.call.keywords.values())
        return not (
            sink.call.starred
            or facts.events("backward")
            or facts.calls.get("backward")
            or any(is_optimizer(facts, each, sink.call) for each in given)
        )

    def inputs(self, cast: Event, guard: PathCondition) -> Reach:
        """Return what the value of a cast reaches in its dtype, and without the models that take it."""
        return self._reach(cast, guard, None, past_models=False)

    def _reach(
        self, cast: Event, guard: PathCondition, whole: tuple[str, Record] | None, past_models: bool = True
    ) -> Reach:
        if whole is not None:
            return self.facts.of(whole[1]).flow.forward_key(*whole, guard)
        if cast.call.is_statement and cast.key:
            return self.facts.flow.forward_key(cast.key, cast.call, guard)
        past_targets = self.is_module(cast)  # the target of a loss has no gradient
        bound = self.facts.bound_to(cast.call)
        if bound is not None and bound.key == cast.key:
            return self.facts.flow.forward_key(bound.key, bound, guard, past_targets, past_models)
        return self.facts.flow.forward(cast.call.node, cast.call, guard, past_targets, past_models)

    def _is_exact(self, cast: Event) -> bool:
        """True if a cast rounds nothing: of a mask, or of other zeros and ones."""
        if isinstance(cast.subject, (cst.Comparison, cst.BooleanOperation)):
            return True
        bound = self.facts.bindings(cast.key, cast.call) if cast.key and "." not in cast.key else []
        if bound and all(each.kind == "assign" and isinstance(each.value, cst.Comparison) for each in bound):
            return True
        if isinstance(cast.subject, cst.Call):
            return dotted(cast.subject.func).rsplit(".", 1)[-1] in _ZEROS_AND_ONES
        return bool(_MASK.search(cast.key.rsplit(".", 1)[-1])) and not self.is_module(cast)

    def _cast_model(self, cast: Event) -> tuple[str, Record] | None:
        """Return the name and record of the model whose parts are cast.

        They are cast in a loop over them, or by the function that `apply` takes.
        """
        parents = self.facts.index.parents
        above = parents.get(cast.call.node)
        if isinstance(above, cst.Lambda):
            arg = parents.get(above)
            call = self.facts.index.call_of.get(parents[arg]) if isinstance(arg, cst.Arg) else None
            return self._applied(call) if call is not None and call.name == "apply" else None
        if cast.call.is_statement and isinstance(cast.subject, cst.Subscript) and (key := dotted(cast.subject.value)):
            return key, cast.call  # model[0].half()
        if cast.call.is_statement and cast.key == "self":
            return self._instance(cast.scope)
        part = cast.key.removesuffix(".data")
        changed = cast.call.is_statement or (
            isinstance(above, cst.Assign) and any(dotted(target.target) == f"{part}.data" for target in above.targets)
        )
        if not changed or not part or "." in part or _FROZEN in cast.call.guard:
            return None
        if any(map(project_words.PARTLY_FROZEN.search, cast.call.guard.flags())):
            return None
        for binding in self.facts.values.reaching(part, cast.scope, cast.order):
            if binding.kind == "for":
                return self._looped(binding)
            if binding.kind == "param":
                return self._applied_function(binding.scope)
        return None

    def _instance(self, scope: Scope) -> tuple[str, Record] | None:
        """Return the name of an object whose class casts itself in `__init__`, and where it is created."""
        owner = scope.owner
        if scope.name != "__init__" or owner is None or self.facts.class_kind(owner) != "model":
            return None
        for facts in (self.facts, *(self.facts.users(owner.name) or ())):
            for call in facts.calls.get(owner.name, ()):
                bound = facts.bound_to(call)
                if bound is not None and (call.receiver is None or facts is not self.facts):
                    return bound.key, bound
        return None

    def _looped(self, binding: Binding) -> tuple[str, Record] | None:
        over = binding.value
        if isinstance(over, (cst.Tuple, cst.List)):  # for each in (encoder, decoder)
            keys = [dotted(element.value) for element in over.elements]
            named = (key for key in keys if key and not self.facts.frozen_params.is_frozen_name(key))
            key = next(named, "")
            return (key, binding) if key else None
        if isinstance(over, cst.Call) and isinstance(over.func, cst.Attribute) and _is_parts(over.func.attr.value):
            over = over.func.value
        elif isinstance(over, cst.Attribute):  # model.layers
            over = over.value
        key = dotted(over)
        return (key, binding) if key and key != "self" else None

    def _applied(self, call: Call) -> tuple[str, Record] | None:
        key = dotted(call.receiver)
        return (key, call) if key and key != "self" else None

    def _applied_function(self, scope: Scope) -> tuple[str, Record] | None:
        """Return the model that a function of the file is applied to, if there is one."""
        for call in self.facts.calls.get("apply", ()):
            given = self.facts.evaluate(call.argument(0, "fn"), call)
            if any(isinstance(each.atom, Function) and each.atom.scope is scope for each in given):
                return self._applied(call)
        return None

    def autocast_inputs(self, cast: Event) -> list[Call]:
        """Return the calls that take the value of a cast itself and that autocast runs in low precision anyway.

        Autocast runs their matrix products so: they are calls of a model, or of one of torch's operations.
        """
        bound = self.facts.bound_to(cast.call)
        found = []
        parents = self.facts.index.parents
        given: list[cst.CSTNode] = [cast.call.node]
        if bound is not None:
            uses = cast.scope.uses.get(bound.key.split(".", 1)[0], ())
            given += [use.node for use in uses if use.path == bound.key and use.order > bound.order]
        calls = {
            self.facts.index.call_of.get(parents[arg])
            for each in given
            if isinstance(arg := parents.get(each), cst.Arg)
        }
        for call in sorted((c for c in calls if c is not None and c.scope is cast.scope), key=lambda c: c.order):
            arguments = (*call.positional, *call.keywords.values())
            if cast.call.node in arguments or (
                bound is not None
                and call.order > bound.order
                and any(
                    dotted(each) == bound.key
                    and bound in self.facts.values.reaching(bound.key, call.scope, call.order, call.guard)
                    for each in arguments
                )
            ):
                found.append(call)
        return [call for call in found if self._is_autocast(call)]

    def _is_autocast(self, call: Call) -> bool:
        for each in self.facts.evaluate(call.func, call):
            if isinstance(each.atom, Ref) and each.atom.path.startswith("torch.") and call.name in LOWERED:
                return True
            if (
                isinstance(each.atom, Object)
                and each.atom.kind == "model"
                and not self.facts.frozen_params.is_frozen_name(call.path)
            ):
                return True
        last = call.path.rsplit(".", 1)[-1]
        known = self.facts.kinds(call.func, call) - {""}
        return not known and last in self.facts.module_names and not self.facts.frozen_params.is_frozen_name(call.path)

    def is_rounding_or_copy(self, cast: Event, dtype: AnyDtype | str) -> bool:
        """True if the cast only rounds (`.half().float()`), or makes a copy for a checkpoint."""
        parents = self.facts.index.parents
        above = parents.get(cast.call.node)
        if isinstance(above, cst.Attribute) and above.attr.value in api_names.UPCASTS:
            return True
        if isinstance(above, cst.Attribute) and above.attr.value == "to":
            outer = self.facts.index.call_of.get(parents[above])
            if outer is not None and any(e.call is outer and not e.may_be(dtype) for e in self.facts.events("cast")):
                return True
        if isinstance(cast.subject, cst.Call) and dotted(cast.subject.func).endswith("deepcopy"):
            return True
        return cast.subject is not None and not self.is_module(cast) and self._from_checkpoint(cast.subject, cast.call)

    def _from_checkpoint(self, node: cst.CSTNode, at: Record, depth: int = 6) -> bool:
        """True if a value is a checkpoint or a part of one: `state["weight"]`, `v` in `for k, v in state.items()`."""
        parts: list[tuple[cst.BaseExpression | None, Record]]
        if isinstance(node, cst.Call):
            call = self.facts.index.call_of.get(node)
            if call is None or (call.name in _LOADS and "model" not in self.facts.kinds(node, call)):
                return call is not None
            returns = [each for function in self.facts.functions(call) for each in function.scope.returns]
            parts = [(each.value, each) for each in returns] or [(call.receiver, at)]
        elif isinstance(node, cst.Subscript):
            parts = [(node.value, at)]
        elif _CHECKPOINT.search(dotted(node)):
            return True
        else:
            bindings = self.facts.values.reaching(dotted(node), at.scope, at.order, at.guard)
            parts = [(each.value, each) for each in bindings if each.kind != "param"]
            if not parts and isinstance(node, cst.Attribute):  # v.data
                parts = [(node.value, at)]
        return depth > 0 and any(
            part is not None and self.facts.of(record) is self.facts and self._from_checkpoint(part, record, depth - 1)
            for part, record in parts
        )

    def _by_engine(self, sink: Sink) -> bool:
        """True if an engine of DeepSpeed or the like runs the backward pass: its parameters may be FP16."""
        call = sink.call
        is_step = sink.kind == "trainer" and call.scope.name in FRAMEWORK_STEPS
        if is_step or call.name == "manual_backward":  # Lightning's, maybe with DeepSpeed
            strategies = (each.keywords.get("strategy") for each in lightning.created(self.facts, "Trainer"))
            return (
                self._all_keep_masters
                or any(project_words.SHARDING.search(text_of(each)) for each in strategies if each is not None)
                or any(map(self._mentions_sharding, self.facts.scopes))
            )
        if sink.kind != "backward" or not call.positional or call.receiver is None:
            return False
        kinds = self.facts.kinds(call.receiver, call)
        return "engine" in kinds or ("accelerator" not in kinds and "accelerator" not in dotted(call.receiver).lower())

    # -- weights ------------------------------------------------------------------------------------

    def weights(self, dtype: AnyDtype | str) -> list[Weights]:
        """Return the models whose weights are in a low-precision dtype when they are trained.

        They are cast to it, created in it or loaded in it.
        """
        dtype = as_dtype(dtype)
        if dtype not in self._weights:
            self._weights[dtype] = []
            events = (event for kind in _SETS_DTYPE for event in self.facts.events(kind))
            for event in events:
                guards = event.may_be(dtype)
                if not guards or not self.is_module(event) or self.has_adapters(event.key, event.call):
                    continue
                if {each for _, each in event.dtypes} >= _ANY_DTYPE and not any(map(follows_policy, guards)):
                    continue  # a helper that returns the dtype of a name, which is not known
                loaded = event.kind == "load"
                training = self._loaded(event, dtype, guards[0]) if loaded else self.cast(event, dtype)
                if training is not None and not self._cast_back(event):
                    self._weights[dtype].append(Weights(event, dtype, guards[0], training))
        return self._weights[dtype]

    def in_dtype_of_checkpoint(self) -> list[Weights]:
        """Return the models of transformers that are trained, and loaded without a dtype.

        transformers 5 loads them in the dtype in which they were saved, mostly BF16; older versions in FP32.
        """
        found = []
        for event in self.facts.events("load"):
            of_library = any(path.startswith("transformers.") for _, path in self.facts.paths(event.call))
            if event.dtypes or event.call.starred or not of_library or event.call.name != "from_pretrained":
                continue
            if event.call.argument(None, "dtype", "torch_dtype") is not None or not self.is_module(event):
                continue
            training = self._loaded(event, Dtype.BF16, ALWAYS)
            if training is not None and not self.has_adapters(event.key, event.call) and not self._cast_back(event):
                found.append(Weights(event, Dtype.BF16, ALWAYS, training))
        return found

    def has_layers_in(self, dtype: AnyDtype, node: cst.CSTNode | None, at: Record) -> bool:
        """True if a model, or its parameters, is a layer created in a dtype, or its class creates layers in it."""
        for each in self.facts.evaluate(node, at):
            model = each.atom
            if not isinstance(model, Object):
                continue
            inside = [call for scope in model.cls.descendants() for call in scope.calls] if model.cls else []
            created = [call for call in inside if call.name[:1].isupper()]
            if model.call is not None and model.kind == "model":
                created.append(model.call)
            for call in created:
                given = call.keywords.get("dtype")
                if given is not None and any(own is dtype for _, own in self.facts.of(call).dtypes(given, call)):
                    return True
        return False

    def _cast_back(self, event: Event) -> bool:
        """True if the trained parameters are cast back to FP32, after the cast of the model, in the same function.

        By a loop (`for p in net.parameters(): p.data = p.data.float()`), or by `cast_training_params` of diffusers.
        """
        bound = self.facts.bound_to(event.call)
        whole = self._cast_model(event) if event.kind == "cast" else None
        model = bound.key if bound is not None else whole[0] if whole is not None else event.key
        casts = (call for call in event.scope.calls if call.name == "cast_training_params" and call.order > event.order)
        if any(model in _parts(call.argument(0, "model")) for call in casts):
            return True
        return any(
            each.order > event.order
            and key.endswith(".data")
            and isinstance(each.value, cst.Call)
            and self._is_upcast(each.value, key.removesuffix(".data"))
            and PathCondition(each.guard - event.guard).flags() <= {"requires_grad"}
            and any(
                loop.kind == "for" and (looped := self._looped(loop)) is not None and looped[0] == model
                for loop in self.facts.values.reaching(key.removesuffix(".data"), each.scope, each.order)
            )
            for key, bindings in event.scope.bindings.items()
            for each in bindings
        )

    def _is_upcast(self, node: cst.Call, name: str) -> bool:
        """True for `p.float()`, `p.data.to(torch.float32)` and the like."""
        owner, _, method = dotted(node.func).rpartition(".")
        call = self.facts.index.call_of.get(node)
        if owner not in (name, f"{name}.data") or call is None:
            return False
        dtypes = self.facts.dtypes(call.argument(0, "dtype"), call) if method == "to" else ()
        return method in api_names.UPCASTS or any(dtype is Dtype.FP32 for _, dtype in dtypes)

    def _loaded(self, load: Event, dtype: AnyDtype, guard: PathCondition) -> Training | None:
        call = load.call
        if project_words.ADAPTER_LOADERS.search(call.path):
            return None
        if any(constant(call.keywords.get(name)) not in (None, (None,), (False,)) for name in _QUANTIZES):
            return None
        if any(name in call.keywords and constant(call.keywords[name]) is None for name in _QUANTIZES):
            return None
        if (
            (call.starred and not self._adds_nothing_else(call))
            or self.is_rounding_or_copy(load, dtype)
            or self.facts.is_inference(call)
            or self.facts.frozen_params.is_frozen(call.node)
        ):
            return None
        if "pipeline" in self.facts.kinds(call.node, call):
            return None
        return self._training(self.reach_of_loaded(load, guard), weights=True)

    def reach_of_loaded(self, load: Event, guard: PathCondition) -> Reach:
        """Return what a loaded model reaches, or the module of the project that contains it."""
        bound = self.facts.bound_to(load.call)
        whole = wrapped_loads.outer_module(load, bound)
        if whole is not None:
            return self.facts.of(whole[1]).flow.forward_key(*whole, guard)
        if bound is not None:
            return self.facts.flow.forward_key(bound.key, bound, guard)
        return self.facts.flow.forward(load.call.node, load.call, guard)

    def _adds_nothing_else(self, call: Call) -> bool:
        """True if the items of a call's `**options` are known, and quantize nothing."""
        ways = keywords.passed(call, self.facts)
        return ways is not None and all(way.keys().isdisjoint(_QUANTIZES) for way in ways)

    def is_module(self, event: Event) -> bool:
        """True if the object that is cast or loaded is a model: by its origin, or by how it is used."""
        if event.kind == "load":
            return "weightless" not in self.facts.kinds(event.call.node, event.call)
        kinds = self.facts.kinds(event.subject, event.call)
        if (
            event.kind == "construct"
            or kinds & {"model", "parameters"}
            or event.call.is_statement
            or self._cast_model(event) is not None
        ):
            return True
        if "tensor" in kinds:
            return False
        bound = self.facts.bound_to(event.call)
        keys = {event.key, bound.key if bound is not None else ""} - {""}
        if bound is not None and self._is_called(bound):
            return True
        return bool({key.rsplit(".", 1)[-1] for key in keys} & self.facts.module_names)

    def bound_name(self, cast: Event) -> str:
        """Return the last name of what a cast changes in place, or of what its result is bound to; empty without."""
        bound = self.facts.bound_to(cast.call)
        return (bound.key if bound is not None else cast.key if cast.call.is_statement else "").rsplit(".", 1)[-1]

    def _is_called(self, bound: Binding) -> bool:
        """True if what is bound to a name is called as a function."""
        return any(
            use.path == bound.key
            and isinstance(above := self.facts.parent(use.node), cst.Call)
            and above.func is use.node
            and bound in self.facts.bindings(bound.key, use, use.guard)
            for use in bound.scope.uses.get(bound.key.split(".", 1)[0], ())
        )

    def has_adapters(self, key: str, at: Record) -> bool:
        """True if an object of this (last) name gets adapters in code connected with a record.

        As an argument, a receiver or a result of the call that adds them.
        """
        if self._adapted is None:
            self._adapted = {}
            for name, calls in self.facts.calls.items():
                adapts = project_words.ADAPTERS.search(name)
                for call in calls if adapts or name == "from_pretrained" else ():
                    if not adapts and not project_words.ADAPTER_LOADERS.search(call.path):
                        continue
                    given = [call.receiver, *call.positional, call.keywords.get("model")]
                    if isinstance(call.statement, cst.Assign):
                        given += [target.target for target in call.statement.targets]
                    for each in given:
                        self._adapted.setdefault(dotted(each).rsplit(".", 1)[-1], set()).add(call.scope)
        places = self._adapted.get(key.rsplit(".", 1)[-1], ()) if key else ()
        return any(
            at.scope in self.facts.reachable(place) or place in self.facts.reachable(at.scope) for place in places
        )

    def keeps_masters(self, weights: Weights) -> bool:
        """True if FP32 copies of these low-precision weights may be kept.

        By an FP16 optimizer of a project, a DeepSpeed engine that takes the model, a sharding framework in the code
        that is connected with its training, or one in the file's launch config (accelerate's FSDP upcasts weights), or
        by DeepSpeed in all accelerate configs of the project.
        """
        if self._all_keep_masters or weights.training.reach.meets("initialize"):
            return True
        if self.runs_in_deepspeed:
            return True
        takes = (sink.call.scope for sink in weights.training.sinks if sink.kind != "backward")
        starts = dict.fromkeys((weights.event.scope, *takes))
        programs = (self.facts.programs_of(scope, _may_shard) for scope in starts)
        near = {each for program in programs for each in program if each.kind != "class"}
        return any(self._mentions_sharding(each, weights.event.call) for each in near)

    @cached_property
    def runs_in_deepspeed(self) -> bool:
        """True if the project launches the Accelerators of the file with DeepSpeed, which keeps FP32 masters."""
        return bool(self.facts.events("accelerator")) and self.facts.project.launches_with_deepspeed_only(
            self.facts.path
        )

    @cached_property
    def _all_keep_masters(self) -> bool:
        launched = {config.distributed_type for config in self.facts.project.configs_for(self.facts.path)}
        return may_keep_masters(self.facts) or bool(launched & {"DEEPSPEED", "FSDP", "MEGATRON_LM"})

    def _mentions_sharding(self, scope: Scope, model: Call | None = None) -> bool:
        if scope not in self._sharding:
            self._sharding[scope] = mentions(self.facts, scope, project_words.SHARDING.search)
        if not self._sharding[scope] or model is None:
            return self._sharding[scope]
        return mentions(self.facts, scope, project_words.SHARDING.search, {model})

    # -- what trains --------------------------------------------------------------------------------

    def trainer_of(self, call: Call) -> Call | None:
        """Return what trains in the programs that run a call.

        That is a backward pass with a step, `prepare`, or a Trainer.
        """
        near = set(self.facts.programs_of(call.scope))
        if call.scope.kind == "module":  # code that runs on import affects whatever uses the functions of the file
            near.update(*(self.facts.programs_of(each) for each in self.facts.scopes), self.facts.scopes)
        for kind in _TRAINS:
            for event in self.facts.events_around(kind, call.scope):
                if (measures := self.facts.of(event.call).measures).only_measures or measures.only_evaluates(
                    event.call
                ):
                    continue
                together = event.scope in near and compatible(event.guard, self.facts.guard_of(call))
                if together and (kind == "trainer" or self.facts.has_step(event.scope)):
                    return event.call
        return None

    def torch_optimizers(self) -> Iterator[Call]:
        """Yield the calls that create the optimizers of torch which the file steps, once for each step."""
        for step in self.facts.events("step"):
            for each in self.facts.evaluate(step.subject, step.call):
                made = each.atom.call if isinstance(each.atom, Object) and each.atom.kind == "optimizer" else None
                if made is not None and self.facts.called_path(made).startswith("torch.optim."):
                    yield made

    def is_untaken(self, key: str, at: Record, depth: int = 3) -> bool:
        """True if no optimizer takes the model of a name: each one of the file has the parameters of others.

        The file creates it, and it is no part of another model, nor an attribute of an object.
        """
        bindings = [at] if isinstance(at, Binding) else self.facts.bindings(key, at, at.guard)
        optimized = self._optimized
        if optimized is None or not bindings or not optimized.isdisjoint(key.split(".")) or depth == 0:
            return False
        return all(self._is_created(each, depth) and self._is_apart(key, each) for each in bindings)

    def _is_apart(self, key: str, binding: Binding) -> bool:
        """True if a model, from its binding on, reaches no optimizer, other object or unknown code."""
        reach = self.facts.flow.forward_key(key, binding)
        taken = any(sink.kind != "backward" for sink in reach.training_sinks)
        owner = binding.scope.owner
        plain = owner is not None and self.facts.class_kind(owner) == "own"
        stored = any("." in (name.removeprefix("self.") if plain else name) for name in reach.names)
        return not taken and not stored and not reach.outside

    def _is_created(self, binding: Binding, depth: int) -> bool:
        """True if a function or class that takes no model gives an object: not `DDP(model)`, `model.get_encoder()`."""
        node = binding.value
        while binding.kind in ("assign", "element") and (call := self.facts.call_of(node)) is not None:
            if any(dotted(arg.value).rsplit(".", 1)[-1] in self.facts.module_names for arg in call.node.args):
                return False
            if call.name not in api_names.SAME or call.receiver is None:
                atoms = [each.atom for each in self.facts.evaluate(call.func, call)]
                known = any(isinstance(atom, (Ref, Class, Function)) for atom in atoms)
                return known or call.receiver is None
            node = call.receiver
            if key := dotted(node):
                return self.is_untaken(key, call, depth - 1)
        return False

    @cached_property
    def _optimized(self) -> set[str] | None:
        """The last names of the objects whose parameters the optimizers of the file take; None if one is unknown."""
        steps = [*self.facts.events("step"), *self.facts.events("scaler_step")]
        optimizers = [each.atom for step in steps for each in self.facts.evaluate(step.subject, step.call)]
        found: set[str] = set()
        for atom in optimizers:
            if not isinstance(atom, Object) or atom.kind != "optimizer" or atom.call is None:
                return None
            names = self._parameters(atom.call.argument(0, "params"), atom.call)
            if names is None:
                return None
            found |= names
        return found if optimizers else None

    def _parameters(self, node: cst.CSTNode | None, at: Record, depth: int = 6) -> set[str] | None:
        """Return the last names of the objects in `[{"params": a.parameters()}, *b.parameters()]` and the like.

        Names of collections are followed. The result is None if something else is in it.
        """
        parts: list[cst.CSTNode] = []
        if isinstance(node, cst.Call):
            name = node.func.attr.value if isinstance(node.func, cst.Attribute) else dotted(node.func)
            if name in api_names.TENSOR_MAKERS or name == "Parameter":
                return set()
            if _is_parts(name) and isinstance(node.func, cst.Attribute):
                return _objects(node.func.value)
            if name in _COLLECTS:
                parts = [arg.value for arg in node.args if not isinstance(arg.value, cst.Lambda)]
        elif isinstance(node, (cst.List, cst.Tuple, cst.Set)):
            parts = [element.value for element in node.elements]
        elif isinstance(node, cst.Dict):
            given = (each for each in node.elements if isinstance(each, cst.DictElement))
            parts = [each.value for each in given if constant(each.key) == ("params",)]
        elif isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            parts = [node.for_in.iter]
        elif isinstance(node, cst.BinaryOperation):
            parts = [node.left, node.right]
        elif node is not None and (key := dotted(node)):
            bindings = self.facts.values.reaching(key, at.scope, at.order, at.guard)
            if all(each.kind in ("assign", "augmented") for each in bindings):
                parts = [each.value for each in bindings if each.value is not None]
        found = [self._parameters(each, at, depth - 1) for each in parts] if depth else []
        known = [each for each in found if each is not None]
        return set().union(*known) if known and len(known) == len(found) else None

    def plain_optimizers(self, training: Training) -> list[Call]:
        """Return the optimizers that take the weights and update them directly, without other ones on the same arm.

        They update without FP32 masters, stochastic rounding or Kahan rounding. One that is unknown may have them.
        """
        found = training.of("optimizer")
        plain = [call for call in found if self._is_plain(call)]
        guards = [self.facts.guard_of(call) for call in found if call not in plain]
        return [call for call in plain if not any(compatible(self.facts.guard_of(call), each) for each in guards)]

    def _is_plain(self, call: Call) -> bool:
        path = self.facts.called_path(call)
        if path.endswith(".ZeroRedundancyOptimizer"):  # it shards the states of the optimizer that it is given
            atoms = [each.atom for each in self.facts.evaluate(call.argument(1, "optimizer_class"), call)]
            return bool(atoms) and all(isinstance(each, Ref) and each.path.startswith("torch.optim.") for each in atoms)
        if path.startswith(("bitsandbytes.optim.", "torchao.optim.")):
            return constant(call.keywords.get("bf16_stochastic_round")) in (None, (False,)) and not call.starred
        return path.startswith(("torch.optim.", "transformers.AdamW", "transformers.optimization.AdamW"))

    def trainers(self, training: Training) -> list[Call]:
        """Return the Trainers of transformers and related packages that train all weights.

        They use an optimizer of their own. As far as the file shows: no adapters, no DeepSpeed, no optimizer passed in,
        arguments visible.
        """
        found = []
        for call in training.of("trainer"):
            root = self.facts.called_path(call).split(".", 1)[0]
            given = call.argument(1, "args")
            other = any(key in call.keywords and constant(call.keywords[key]) != (None,) for key in _OTHER_OPTIMIZER)
            if root not in project_words.TRAINER_PACKAGES or call.starred or other or given is None:
                continue
            arguments = self.arguments(given, call)
            if arguments is None and self._parsed_plainly(given, call):
                found.append(call)
            if arguments is None or arguments.starred or not _SHARDING_ARGUMENTS.isdisjoint(arguments.keywords):
                continue
            if (optim := arguments.keywords.get("optim")) is None or _is_plain_name(constant(optim)):
                found.append(call)
        return found

    def _parsed_plainly(self, node: cst.BaseExpression, at: Call) -> bool:
        """True if the arguments are parsed from launch lines that are all known, and do not concern the weights."""
        records = self.facts.flow.backward(node, at, depth=2)
        parsed = any(isinstance(record, Call) and record.name in _PARSES for record in records)
        launches = self.facts.project.launches_of(self.facts.path) if parsed else ()
        return bool(launches) and all(
            not launch.hidden
            and not _OTHER_LAUNCH & set(launch.options)
            and launch.launcher in ("torchrun", "accelerate")
            and all(each.text is not None and not _OTHER_FLAGS.search(each.text) for each in launch.arguments)
            for launch in launches
        )

    def arguments(self, node: cst.BaseExpression, at: Call) -> Call | None:
        """Return the only call of `TrainingArguments`, or of a similar class, that an expression is from, or None."""
        records = [
            record
            for record in self.facts.flow.backward(node, at, depth=2)
            if isinstance(record, Call) and record.name.endswith(("Arguments", "Config", "Args"))
        ]
        return records[0] if len(records) == 1 else None


def _parts(node: cst.CSTNode | None) -> set[str]:
    """Return the names in `net` or `[net, head]`."""
    parts = [each.value for each in node.elements] if isinstance(node, (cst.List, cst.Tuple)) else [node]
    return {dotted(each) for each in parts} - {""}


def _may_shard(callee: Scope) -> bool:
    """True if a callee may shard a model: not a module by what it defines, nor what saves or loads a checkpoint."""
    return callee.kind == "function" and not _CHECKPOINT.search(callee.name)


def _is_parts(method: str) -> bool:
    """True for the iterators over the parts of a model, and for a method of its own such as `trainable_parameters`."""
    return method in _PARTS or method.endswith("_parameters")


def _objects(node: cst.CSTNode) -> set[str]:
    """Return the names in an expression of an object: `model.get_head()`, `nets[0]`."""
    while not (path := dotted(node)):
        if isinstance(node, cst.Call):
            node = node.func
        elif isinstance(node, (cst.Attribute, cst.Subscript)):
            node = node.value
        else:
            return set()
    return set(path.split(".")) - {"self"}


def _is_plain_name(literal: tuple[object] | None) -> bool:
    """True if the optimizer that a setting names updates the weights directly.

    A value that is not a literal may be any optimizer.
    """
    return (
        literal is not None
        and isinstance(literal[0], str)
        and bool(api_names.TRAINER_PLAIN_OPTIMIZERS.match(literal[0]))
    )


def _is_another(dtypes: PossibleDtypes, dtype: AnyDtype | str) -> bool:
    """True if all alternatives of a dtype are known, and none is the given one."""
    return bool(dtypes) and all(isinstance(each, Dtype) and each is not dtype for _, each in dtypes)
