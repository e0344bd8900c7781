"""What trains: optimizers, the parameters that they take, and Trainers with an optimizer of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events import EventKind
from mpguard.lint.facts.domain.training import Training
from mpguard.lint.facts.program import api_names, project_words
from mpguard.lint.facts.program.lattice import Class, Function, Object, Ref
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import compatible
from mpguard.lint.facts.syntax.records import Binding, Call, Record

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

#: Events of training.
_TRAINS: tuple[EventKind, ...] = ("backward", "framework", "trainer")
#: Code of an optimizer that may keep FP32 copies of weights, or round them stochastically.
_MAY_KEEP = lazy_pattern(
    r"(?i)master|fp32|float32|\.float\(|\.double\(|kahan|stochastic|compensat|(?<!a)round|super\(\)\.step"
)
#: Functions that collect parameters.
_COLLECTS = frozenset({"list", "tuple", "filter", "chain", "sorted", "iter"})
#: Arguments of a Trainer that add adapters to its model or replace its optimizer; arguments of its settings that shard.
_OTHER_OPTIMIZER = ("peft_config", "optimizers", "optimizer_cls_and_kwargs")
#: Methods of `HfArgumentParser`; flags of launchers and scripts that shard, add adapters or choose another optimizer.
_PARSES = frozenset({"parse_args_into_dataclasses", "parse_args_and_config"})
_OTHER_LAUNCH = frozenset({"config_file", "use_fsdp", "use_deepspeed"})
_OTHER_FLAGS = lazy_pattern(r"(?i)^--(?:deepspeed|fsdp|optim|load_in|use_)|lora|peft|quant|bits|\.(?:json|ya?ml)$")
_SHARDING_ARGUMENTS = frozenset({"deepspeed", "fsdp", "fsdp_config"})
#: Iterators over the parts of a model: a cast of each part is a cast of the model.
_PARTS = frozenset({"parameters", "named_parameters", "modules", "named_modules", "children", "named_children"})


class Optimizers:
    """The optimizers and Trainers of one file."""

    def __init__(self, facts: DomainView) -> None:
        self.facts = facts

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

    def of_torch(self) -> Iterator[Call]:
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
            if is_parts(name) and isinstance(node.func, cst.Attribute):
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

    def plain(self, training: Training) -> list[Call]:
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
        if not path:  # of the project: one that casts nothing keeps no FP32 copy
            made = [each.atom for each in self.facts.evaluate(call.func, call)]
            return bool(made) and all(
                isinstance(each, Class)
                and self.facts.class_kind(each.scope) == "own_optimizer"
                and not _MAY_KEEP.search(each.scope.chunk.text)
                for each in made
            )
        if path.startswith(("bitsandbytes.optim.", "torchao.optim.")):
            return constant(call.keywords.get("bf16_stochastic_round")) in (None, (False,)) and not call.starred
        return path.startswith(("torch.optim.", "transformers.AdamW", "transformers.optimization.AdamW"))

    def trainers(self, training: Training) -> list[Call]:
        """Return the Trainers that train all weights of a model by an optimizer of their own, as far as files show."""
        return [call for call in training.of("trainer") if self.trains_whole(call)]

    def trains_whole(self, call: Call) -> bool:
        """True for a Trainer of transformers, or of a related package, that trains all weights by its own optimizer.

        As far as the file shows: no adapters, no DeepSpeed, no optimizer passed in, arguments visible.
        """
        root = (self.facts.called_path(call) or self._base_of(call)).split(".", 1)[0]
        given = call.argument(1, "args")
        other = any(key in call.keywords and constant(call.keywords[key]) != (None,) for key in _OTHER_OPTIMIZER)
        if root not in project_words.TRAINER_PACKAGES or call.starred or other or given is None:
            return False
        arguments = self.arguments(given, call)
        if arguments is None:
            return self._parsed_plainly(given, call)
        if arguments.starred or not _SHARDING_ARGUMENTS.isdisjoint(arguments.keywords):
            return False
        return (optim := arguments.keywords.get("optim")) is None or _is_plain_name(constant(optim))

    def _base_of(self, call: Call) -> str:
        """Return the Trainer from which a class of the project derives that makes no optimizer; "" if there is none."""
        for each in self.facts.evaluate(call.func, call):
            if isinstance(each.atom, Class) and not each.atom.scope.method("create_optimizer"):
                return next((base for base in self.facts.ancestry(each.atom.scope) if base.endswith("Trainer")), "")
        return ""

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


def is_parts(method: str) -> bool:
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
