"""FP32 master weights and loss scaling by other means than torch.amp: apex, a framework's or a project's own code."""

from __future__ import annotations

import functools
from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events import Event, EventKind, is_optimizer
from mpguard.lint.facts.domain.training import Weights
from mpguard.lint.facts.program import project_words, roles
from mpguard.lint.facts.program.lattice import Object
from mpguard.lint.facts.program.mentions import mentions
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.records import Call, Scope, Use

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

#: The events that name an optimizer that steps.
_STEPS: tuple[EventKind, ...] = ("step", "scaler_step")
#: What the code of an optimizer with FP32 masters contains: `param_groups_fp32`, `master_params`, `p.clone().float()`;
#: `p_data_fp32` of Rectified Adam lives for one step.
_KEEPS_MASTERS = lazy_pattern(r"(?i)master|(?<!data)_fp32\b|\bfp32_|clone\(\)\.float\(|\.float\(\)\.clone")
#: Names of arguments that may switch masters off.
_CHOOSES = lazy_pattern(r"(?i)fp32|float32|master|precision|dtype")
_GRAD = lazy_pattern(r"\.grad\b")


class MasterWeights:
    """The FP32 master weights that one file, or what launches it, may keep."""

    def __init__(self, facts: DomainView) -> None:
        self.facts = facts
        self._sharding: dict[Scope, bool] = {}

    @cached_property
    def may_be_kept(self) -> bool:
        """True if FP32 master weights may be kept, and the loss scaled, by other means than torch.amp."""
        return _may_keep_masters(self.facts)

    def kept_for(self, weights: Weights) -> bool:
        """True if FP32 copies of these low-precision weights may be kept.

        By an FP16 optimizer of a project, a DeepSpeed engine that takes the model, a sharding framework in the code
        that is connected with its training, or one in the file's launch config (accelerate's FSDP upcasts weights), or
        by DeepSpeed in all accelerate configs of the project.
        """
        if self.are_always_kept or weights.training.reach.meets("initialize"):
            return True
        if self.runs_in_deepspeed:
            return True
        takes = (sink.call.scope for sink in weights.training.sinks if sink.kind != "backward")
        starts = dict.fromkeys((weights.event.scope, *takes))
        programs = (self.facts.programs_of(scope, _may_shard) for scope in starts)
        near = {each for program in programs for each in program if each.kind != "class"}
        return any(self.mentions_sharding(each, weights.event.call) for each in near)

    @cached_property
    def runs_in_deepspeed(self) -> bool:
        """True if the project launches the Accelerators of the file with DeepSpeed, which keeps FP32 masters."""
        return bool(self.facts.events("accelerator")) and self.facts.project.launches_with_deepspeed_only(
            self.facts.path
        )

    @cached_property
    def are_always_kept(self) -> bool:
        """True if masters may be kept whatever the weights are: by code of the file, or by the strategy of a launch."""
        launched = {config.distributed_type for config in self.facts.project.configs_for(self.facts.path)}
        return self.may_be_kept or bool(launched & {"DEEPSPEED", "FSDP", "MEGATRON_LM"})

    def mentions_sharding(self, scope: Scope, model: Call | None = None) -> bool:
        """True if a function uses a sharding framework, of a model if one is given."""
        if scope not in self._sharding:
            self._sharding[scope] = mentions(self.facts, scope, project_words.SHARDING.search)
        if not self._sharding[scope] or model is None:
            return self._sharding[scope]
        return mentions(self.facts, scope, project_words.SHARDING.search, {model})


def _may_shard(callee: Scope) -> bool:
    """True if a callee may shard a model: not a module by what it defines, nor what saves or loads a checkpoint."""
    return callee.kind == "function" and not roles.CHECKPOINTS.search(callee.name)


def _may_keep_masters(facts: DomainView) -> bool:
    """True if FP32 master weights may be kept, and the loss scaled, by other means than torch.amp.

    These are apex, a framework's or project's own FP16 optimizer or module, and gradients copied from one set of
    parameters to another.
    """
    facts.need_all()
    for scope in facts.index.scopes:
        if any(map(_names_masters, scope.base_names)):
            return True
        if any(_names_masters(use.path) for uses in scope.uses.values() for use in uses):
            return True
        for key, bindings in scope.bindings.items():
            for binding in bindings:
                if binding.kind in ("from", "import") and project_words.FP16_MODULES.search(f"{binding.target}."):
                    return True
                if key.endswith(".grad") and binding.value is not None:
                    given = facts.short(binding.value)
                    if _GRAD.search(given) and key not in given:
                        return True
        grads = [use for uses in scope.uses.values() for use in uses if ".grad" in use.path and _GRAD.search(use.path)]
        if any(_goes_to_grad(facts, use) for use in grads):
            return True
    if any(_copies_grad(facts, call) for call in facts.calls.get("copy_", ())):
        return True
    # What needs the values of variables, and so perhaps other files, comes last.
    for call in facts.calls.get("backward", ()):
        if call.receiver is not None and call.positional and is_optimizer(facts, call.receiver, call):
            return True
    if any(_has_masters(facts, each) for kind in _STEPS for each in facts.events(kind)):
        return True
    return any(
        _is_wrapped_with_masters(facts, call)
        for name in facts.calls
        for call in facts.calls[name]
        if roles.OPTIMIZER.search(name)
    )


@functools.lru_cache(maxsize=1 << 14)
def _names_masters(path: str) -> bool:
    """True if a dotted name is one of FP32 master weights, or of what keeps them."""
    return project_words.MASTER_WEIGHTS.search(path) is not None


def _has_masters(facts: DomainView, step: Event) -> bool:
    """True if the optimizer that steps keeps FP32 masters: by its name, or by the code of its class in the tree.

    One of several that a function chooses from says nothing of the others.
    """
    found = [each.atom for each in facts.evaluate(step.subject, step.call) if isinstance(each.atom, Object)]
    return bool(found) and all(
        project_words.MASTER_WEIGHTS.search(each.path)
        or (each.kind == "own_optimizer" and each.cls is not None and _KEEPS_MASTERS.search(each.cls.chunk.text))
        for each in found
    )


def _is_wrapped_with_masters(facts: DomainView, call: Call) -> bool:
    """True if a call gives an optimizer to a class of the project, whose code keeps FP32 masters by default."""
    if call.starred or any(_CHOOSES.search(name) for name in call.keywords):
        return False
    if not any(is_optimizer(facts, given, call) for given in (*call.positional, *call.keywords.values())):
        return False
    made = [each.atom for each in facts.evaluate(call.node, call)]
    classes = [atom.cls for atom in made if isinstance(atom, Object) and atom.cls is not None]
    return any(_KEEPS_MASTERS.search(cls.chunk.text) for cls in classes)


def _copies_grad(facts: DomainView, call: Call) -> bool:
    """True if a call copies the gradient of one parameter to another: `master.grad.copy_(p.grad)`."""
    to, given = facts.short(call.receiver).removesuffix(".data"), facts.short(call.argument(0))
    return to.endswith(".grad") and _GRAD.search(given) is not None and to not in given


def _goes_to_grad(facts: DomainView, use: Use) -> bool:
    """True if a use is assigned to the gradient of an element: `masters[n].grad = p.grad.float()`."""
    node: cst.CSTNode | None = use.node
    while node is not None and not isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
        node = facts.index.parents.get(node)
    return isinstance(node, cst.Assign) and any(
        isinstance(each.target, cst.Attribute) and each.target.attr.value == "grad" and not dotted(each.target)
        for each in node.targets
    )
