"""The values that a file trains, and the dtype of the weights that it trains.

`trained.cast(event, dtype)` returns what trains with the value of one cast; `trained.weights(dtype, ...)` returns the
models whose weights are cast, loaded or created in a low-precision dtype and then trained, each with what trains them.
Frozen towers, LoRA bases, inference, rounding and copies for a checkpoint are excluded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour import lightning
from mpguard.lint.facts.behaviour.accelerate_precision import follows_policy
from mpguard.lint.facts.behaviour.events import Event, EventKind
from mpguard.lint.facts.behaviour.events.event import creates_optimizer, is_optimizer
from mpguard.lint.facts.behaviour.forward_flow import FRAMEWORK_STEPS, Reach, Sink
from mpguard.lint.facts.domain import wrapped_loads
from mpguard.lint.facts.domain.adapted import Adapted
from mpguard.lint.facts.domain.casts import CastFacts
from mpguard.lint.facts.domain.master_weights import MasterWeights
from mpguard.lint.facts.domain.optimizers import Optimizers
from mpguard.lint.facts.domain.training import Training, Weights
from mpguard.lint.facts.program import keywords, project_words, roles
from mpguard.lint.facts.program.dtypes import AnyDtype, as_dtype
from mpguard.lint.facts.program.lattice import ANOTHER_CONFIG, Object
from mpguard.lint.facts.syntax.nodes import constant, dotted, text_of
from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition
from mpguard.lint.facts.syntax.records import Call, Record, Scope
from mpguard.policy.dtype import HALF_DTYPES, Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

#: Events that may set the dtype of weights.
_SETS_DTYPE: tuple[EventKind, ...] = ("cast", "construct", "load")
#: Arguments of a load that quantize: adapters are trained, the weights stay.
_QUANTIZES = ("quantization_config", "load_in_8bit", "load_in_4bit")
_CRITERION = lazy_pattern(rf"(?i)(?:^|[._])(?:{roles.LOSSES})$")
#: What a helper may return that gives the dtype of any name.
_ANY_DTYPE = frozenset({Dtype.FP32, Dtype.BF16, Dtype.FP16})


#: Names of modules that are put into a model, which is mostly frozen.
_ADAPTER = lazy_pattern(r"(?i)lora|adapter|(?:^|_)dora|LoKr|LoHa")
_MOST_OBJECTS = 8


def _of_program(call: Call, facts: DomainView) -> list[Sink]:
    """Return the optimizers of a program that runs a call and trains, and its backward pass."""
    trainer = facts.part(Optimizers).trainer_of(call)
    if trainer is None or facts.is_inference(call):
        return []
    calls = [each for scope in facts.programs_of(call.scope) for each in scope.calls]
    made = [each for each in calls if creates_optimizer(facts.of(each), each)]
    return [*(Sink("optimizer", each) for each in made), Sink("backward", trainer)] if made else []


class TrainingUse:
    """The training in one file."""

    def __init__(self, facts: DomainView) -> None:
        self.facts = facts
        self._casts = facts.part(CastFacts)
        self._weights: dict[AnyDtype, list[Weights]] = {}
        self._adapted = facts.part(Adapted)

    # -- casts --------------------------------------------------------------------------------------

    def cast(self, cast: Event, dtype: AnyDtype | str, guards: list[PathCondition] | None = None) -> Training | None:
        """Return what trains with the value that a cast to `dtype` gives, under one of the path conditions, or None."""
        guards = cast.may_be(dtype) if guards is None else guards
        if (
            not guards
            or cast.subject is None
            or self._casts.is_rounding_or_copy(cast, dtype)
            or self.facts.is_inference(cast.call)
        ):
            return None
        if self._casts.is_exact(cast) or self._casts.is_replaced_by_callers(cast, dtype):
            return None
        is_frozen = self.facts.frozen_params.is_frozen
        if (is_frozen(cast.subject) or is_frozen(cast.call.node)) and not self._casts_adapters(cast):
            return None
        if self.facts.kinds(cast.subject, cast.call) & {"engine", "pipeline", "criterion"}:
            return None
        if (_CRITERION.search(cast.key) and self._casts.is_module(cast)) or self._casts.is_quantized_next(cast):
            return None
        whole = self._casts.cast_model(cast)
        if whole is not None and (
            self.facts.frozen_params.is_frozen_name(whole[0]) or self.has_adapters(whole[0], cast.call)
        ):
            return None
        if (inside := self._inside_module(cast, guards[0])) is not None:
            return inside
        is_module = whole is not None or self._casts.is_module(cast)
        reach = self._reach(cast, guards[0], whole)
        if is_module and whole is None:  # adapters that it got before are cast with it
            reach.sinks = [
                each for each in reach.sinks if each.kind != "peft" or not self._adapted.precedes(each.call, cast.call)
            ]
            if reach.meets("backward") and not reach.meets("optimizer"):
                reach.sinks += self._earlier_optimizers(cast, guards[0])
            if not reach.meets("optimizer"):
                reach.sinks += self._of_callers(cast, guards[0])
        later = not is_module and self._is_frozen_later(cast, reach)
        training = self._training(reach, cast.call, weights=is_module, frozen_later=later)
        if training is None and whole is not None and cast.key == "self":
            training = self._own_training(cast, reach)
        if training is None or (training.by_engine and not is_module):
            return None  # the inputs of a model that an engine may run in low precision
        if not is_module or whole is not None:
            return training
        bound = self.facts.bound_to(cast.call)
        untaken = (
            self.facts.part(Optimizers).is_untaken(bound.key, bound)
            if bound is not None
            else self.facts.part(Optimizers).is_untaken(cast.key, cast.call)
        )
        return None if untaken else training

    def _casts_adapters(self, cast: Event) -> bool:
        """True if a model got its adapters before it is cast: they are trained, though the model is frozen."""
        adapted = bool(cast.key) and self.has_adapters(cast.key, cast.call)
        return adapted and not self.has_adapters(cast.key, cast.call, cast=True)

    def _of_callers(self, cast: Event, guard: PathCondition) -> list[Sink]:
        """Return the optimizers of the module that callers give, and that a function casts in place."""
        bindings = self.facts.bindings(cast.key, cast.call) if cast.key and "." not in cast.key else []
        if not bindings or bindings[0].kind != "param":
            return []
        found: dict[Call, Sink] = {}
        for call in self.facts.callers(cast.scope)[:_MOST_OBJECTS]:
            facts, key = self.facts.of(call), dotted(self.facts.argument_for(call, bindings[0]))
            for binding in facts.bindings(key, call, guard) if key else ():
                sinks = facts.flow.forward_key(key, binding, guard).sinks
                found |= {sink.call: sink for sink in sinks if sink.kind in ("optimizer", "backward", "peft")}
        return list(found.values())

    def _inside_module(self, cast: Event, guard: PathCondition) -> Training | None:
        """Return what trains parameters, or layers, of a module of the project, or an adapter that is cast as a whole.

        Their optimizer takes the parameters of an object of the module, or of one that contains it; an adapter, which
        is put into a model, has that of its program.
        """
        owner = cast.scope.owner if cast.kind == "construct" or self._casts.is_own_layer(cast) else None
        if owner is not None and self.facts.class_kind(owner) == "model":
            created = list(wrapped_loads.objects_of(owner, self.facts))[:_MOST_OBJECTS]
        else:
            atoms = [each.atom for each in self.facts.evaluate(cast.subject, cast.call)]
            made = [atom.call for atom in atoms if isinstance(atom, Object) and atom.cls is not None]
            if cast.kind != "cast" or not made or made[0] is None or not _ADAPTER.search(made[0].name):
                return None
            owner, created = None, [("", None, made[0])]
        for key, binding, call in created:
            facts = self.facts.of(call)
            if binding is not None and not facts.frozen_params.is_frozen_name(key):
                reach = facts.flow.forward_key(key, binding, guard)
                if reach.meets("optimizer"):
                    return self._training(reach, cast.call, weights=True)
            elif binding is None and (owner is None or _ADAPTER.search(owner.name)):
                sinks = _of_program(call, facts)
                if sinks:
                    return Training(Reach(sinks), tuple(sinks))
        return None

    def _earlier_optimizers(self, cast: Event, guard: PathCondition) -> list[Sink]:
        """Return the optimizers that took the parameters of a module before it was cast: `to` changes them in place."""
        bound = self.facts.bound_to(cast.call)
        if not (cast.call.is_statement or (bound is not None and bound.key == cast.key)):
            return []
        found: dict[Call, Sink] = {}
        for binding in self.facts.bindings(cast.key, cast.call, guard):
            if binding.scope is cast.scope:
                sinks = self.facts.flow.forward_key(cast.key, binding, guard).sinks
                found |= {sink.call: sink for sink in sinks if sink.kind == "optimizer"}
        return [sink for call, sink in found.items() if call.scope is cast.scope and call.order < cast.order]

    def _training(self, reach: Reach, at: Record, weights: bool = False, frozen_later: bool = False) -> Training | None:
        """Return what trains with the value of a record.

        weights: it is a model. An optimizer trains it even if a frozen model takes its output. frozen_later: it is an
        input of a model that is trained, and frozen models take only what this one makes of it.
        """
        is_trained = frozen_later or (weights and reach.meets("optimizer"))
        adding = [sink.call for sink in reach.sinks if sink.kind == "peft"]
        if (adding and not self._adapted.are_optional(adding, at)) or (reach.meets("frozen") and not is_trained):
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
        past_targets = self._casts.is_module(cast)  # the target of a loss has no gradient
        bound = self.facts.bound_to(cast.call)
        outer = wrapped_loads.outer_module(cast, bound) if cast.kind == "construct" else None
        if outer is not None:
            return self.facts.of(outer[1]).flow.forward_key(*outer, guard)
        if bound is not None and bound.key == cast.key:
            return self.facts.flow.forward_key(bound.key, bound, guard, past_targets, past_models)
        return self.facts.flow.forward(cast.call.node, cast.call, guard, past_targets, past_models)

    def _by_engine(self, sink: Sink) -> bool:
        """True if an engine of DeepSpeed or the like runs the backward pass: its parameters may be FP16."""
        call = sink.call
        is_step = sink.kind == "trainer" and call.scope.name in FRAMEWORK_STEPS
        if is_step or call.name == "manual_backward":  # Lightning's, maybe with DeepSpeed
            strategies = (each.keywords.get("strategy") for each in lightning.created(self.facts, "Trainer"))
            return (
                self.facts.part(MasterWeights).are_always_kept
                or any(project_words.SHARDING.search(text_of(each)) for each in strategies if each is not None)
                or any(map(self.facts.part(MasterWeights).mentions_sharding, self.facts.scopes))
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
                if not guards or not self._casts.is_module(event):
                    continue
                adding = self._adapted.adding(event.key, event.call, cast=event.kind == "cast")
                if adding and not self._adapted.are_optional(adding, event.call):
                    continue
                settled = any(ANOTHER_CONFIG in guard for guard, _ in event.dtypes)  # a config has chosen one
                guards = [guard for guard in guards if ANOTHER_CONFIG not in guard]
                any_dtype = {each for _, each in event.dtypes} >= _ANY_DTYPE and not settled
                if not guards or (any_dtype and not any(map(follows_policy, guards))):
                    continue  # a helper that returns the dtype of a name, which is not known
                loaded = event.kind == "load"
                training = self._loaded(event, dtype, guards[0]) if loaded else self.cast(event, dtype)
                if training is not None and not self._casts.is_cast_back(event):
                    self._weights[dtype].append(Weights(event, dtype, guards[0], training))
        return self._weights[dtype]

    def of_module(self, owner: Scope) -> Weights | None:
        """Return how a module of the project gets the 16-bit dtype in which its weights are trained."""
        for facts in (self.facts, *(self.facts.users(owner.name) or ())):
            use: TrainingUse = facts.part(TrainingUse)
            for weights in (each for dtype in HALF_DTYPES for each in use.weights(dtype)):
                made = [each.atom for each in facts.evaluate(weights.event.subject, weights.event.call)]
                if any(isinstance(atom, Object) and atom.cls is owner for atom in made):
                    return weights
        return None

    def in_dtype_of_checkpoint(self) -> list[Weights]:
        """Return the models of transformers that are trained, and loaded without a dtype.

        transformers 5 loads them in the dtype in which they were saved, mostly BF16; older versions in FP32.
        """
        found = []
        for event in self.facts.events("load"):
            of_library = any(path.startswith("transformers.") for _, path in self.facts.paths(event.call))
            if event.dtypes or event.call.starred or not of_library or event.call.name != "from_pretrained":
                continue
            if event.call.argument(None, "dtype", "torch_dtype") is not None or not self._casts.is_module(event):
                continue
            training = self._loaded(event, Dtype.BF16, ALWAYS)
            if (
                training is not None
                and not self.has_adapters(event.key, event.call)
                and not self._casts.is_cast_back(event)
            ):
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
            or self._casts.is_rounding_or_copy(load, dtype)
            or self.facts.is_inference(call)
            or self.facts.frozen_params.is_frozen(call.node)
        ):
            return None
        if "pipeline" in self.facts.kinds(call.node, call):
            return None
        return self._training(self.reach_of_loaded(load, guard), call, weights=True)

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

    def has_adapters(self, key: str, at: Record, cast: bool = False) -> bool:
        """True if an object of this (last) name gets adapters in code connected with a record: see `Adapted.adding`."""
        return bool(self._adapted.adding(key, at, cast))
