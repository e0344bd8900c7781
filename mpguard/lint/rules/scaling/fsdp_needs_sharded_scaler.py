from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from mpguard.lint import (
    Bad,
    Binding,
    Call,
    Diagnostic,
    Dtype,
    Edit,
    Event,
    Facts,
    Fix,
    Good,
    Note,
    Object,
    PathCondition,
    Rule,
    Wrap,
    any_of,
    compatible,
    python_edits,
    unscaled_steps,
    wrappers,
)

_PLAIN = frozenset({"torch.amp.GradScaler", "torch.cuda.amp.GradScaler"})
_SHARDED = "ShardedGradScaler"
_IMPORT = f"from torch.distributed.fsdp.sharded_grad_scaler import {_SHARDED}"


class FsdpNeedsShardedScaler(Rule):
    """A model sharded by FSDP1 trains in FP16 with a plain GradScaler, or without one.

    ## What it does
    Reports a `GradScaler` of torch that scales the loss of a model in `FullyShardedDataParallel`, and a `backward` of
    such a loss that nothing scales, if the loss is computed in FP16: under an FP16 autocast, or with
    `MixedPrecision(param_dtype=torch.float16)`.

    ## Why is this bad
    Each rank of FSDP1 holds different shards of the gradients. A plain GradScaler checks only its own shards for
    infinities: the rank that finds one skips its step while the others step. From then on the shards belong to
    different models and the scales differ. `ShardedGradScaler` combines the result of all ranks (torch 2.13). Without a
    scaler, gradients that are too small for FP16 are zero.

    ## Fix safety
    Safe if a scaler exists: `ShardedGradScaler` takes the same arguments and behaves the same on one rank. There is no
    fix if none exists, nor for positional arguments whose order differs.

    ## Known limits
    `fully_shard` (FSDP2) is not reported: its gradients are DTensors, over which a plain GradScaler reduces by itself.
    `ShardingStrategy.NO_SHARD` is not reported either. A
    scaler that another module of the project makes is reported where it scales the loss; an optimizer or a model from
    outside the file is unknown.
    """

    code, name = "MPG211", "fsdp-needs-sharded-scaler"
    severity = "error"
    fixes = True
    message = "{what}"
    triggers = (any_of(b"FullyShardedDataParallel"), any_of(b".backward("))
    triggers_nearby = (any_of(b"autocast", b"float16", b"half"),)
    examples = (
        Bad(
            """\
from contextlib import nullcontext

import torch
from torch.amp import GradScaler, autocast
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, strategy="ddp", mixed_precision=True):
        self.strategy = strategy
        self.scaler = GradScaler("cuda") if mixed_precision and strategy == "ddp" else None
        if self.strategy == "ddp":
            self.model = DDP(model)
        elif self.strategy == "fsdp":
            self.model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.float16))

    def train_step(self, batch, optimizer):
        loss = self.model(batch).mean()
        if self.scaler:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()  # !
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
"""
        ),
        Good(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

def sharded(net, loader):
    net = FSDP(net, mixed_precision=MixedPrecision(param_dtype=torch.float16))
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = ShardedGradScaler()
    for x in loader:
        scaler.scale(net(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

def brain(net, loader):
    net = FSDP(net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(net.parameters())
    for x in loader:
        net(x).sum().backward()
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not facts.events("shard"):
            return
        reported: set[tuple[int, int]] = set()
        for backward in facts.events("backward"):
            if backward.subject is None or facts.is_inference(backward.call):
                continue
            scale = facts.scalers.scale_of(backward.subject, backward.call, depth=3)
            for wrap, guard in self._float16_models(backward, facts):
                if scale is not None:
                    found = self._plain(scale, wrap, guard, facts)
                else:
                    found = self._missing(backward, wrap, guard, facts)
                if found is not None:
                    if found.span not in reported:
                        reported.add(found.span)
                        yield found
                    break

    def _float16_models(self, backward: Event, facts: Facts) -> Iterator[tuple[Wrap, PathCondition]]:
        """Yield the FSDP1 models that compute the loss in FP16, each with the condition under which they do."""
        for call, wrap in facts.wrappers.differentiated(backward.subject, backward.call, "fsdp1"):
            strategy = wrap.call.argument(None, "sharding_strategy")
            if strategy is not None and "NO_SHARD" in facts.short(strategy):
                continue
            for guard in self._float16_conditions(call, wrap, facts):
                both = guard.joined(wrap.guard, backward.guard, facts.guard_of(call))
                if both.possible:
                    yield wrap, both

    def _float16_conditions(self, call: Call, wrap: Wrap, facts: Facts) -> Iterator[PathCondition]:
        regions = facts.autocasts(call)
        for region, guard in regions:
            for low in region.may_be(Dtype.FP16):
                yield low.joined(guard)
        for policy, chosen in wrappers.policies_of(wrap) if not regions else ():
            yield from (low.joined(chosen) for low in policy.may_be(Dtype.FP16))

    def _never_made(self, backward: Event, guard: PathCondition, facts: Facts) -> bool:
        """True if the scalers of the other branches are all made under conditions in which nothing is sharded."""
        made = [
            each
            for scale in facts.events("scale")
            if scale.scope is backward.scope
            for each in facts.evaluate(scale.subject, scale.call)
            if isinstance(each.atom, Object) and each.atom.kind == "scaler"
        ]
        return bool(made) and not any(compatible(guard, each.guard) for each in made)

    # -- a scaler that is not sharded ---------------------------------------------------------------

    def _plain(self, scale: Event, wrap: Wrap, guard: PathCondition, facts: Facts) -> Diagnostic | None:
        for each in facts.evaluate(scale.subject, scale.call):
            atom = each.atom
            if not isinstance(atom, Object) or atom.call is None or atom.path not in _PLAIN:
                continue
            origin = facts.of(atom.call)
            if compatible(guard, each.guard, scale.guard, facts.enabled(atom.call, atom.path)):
                notes: tuple[Note, ...] = (Note("sharded here", wrap.call.span, facts.elsewhere(wrap.call)),)
                what = f"`{facts.short(atom.call.node)}` checks only the shards of its own rank for infinities"
                fix = self._fix(atom.call, wrap, facts) if origin is facts else None
                place = atom.call if origin is facts else scale.call
                if origin is not facts:
                    notes = (Note("the scaler is created here", atom.call.span, facts.elsewhere(atom.call)), *notes)
                return self.at(place, what=what, help=f"FSDP1 needs `{_SHARDED}`", notes=notes, fix=fix)
        return None

    def _fix(self, created: Call, wrap: Wrap, facts: Facts) -> Fix | None:
        legacy = ".cuda." in facts.called_path(created)
        if created.starred or len(created.positional) > (0 if legacy else 2):
            return None
        edits = [python_edits.replaced(created.func, created, _SHARDED)]
        unused = self._import_of(created, facts)
        if unused is not None and (unused.name != "GradScaler" or self._uses(unused, facts) != 1):
            unused = None
        if _SHARDED not in facts.module.bindings:
            place = self._import_of(wrap.call, facts)
            if place is None or place.statement is None:
                return None
            if unused is not None and unused.statement is not None and len(self._names(unused)) == 1:
                edits.append(python_edits.replaced(unused.statement, unused, _IMPORT))
                return Fix(f"Use `{_SHARDED}`", "safe", tuple(edits))
            edits.append(python_edits.line_after(facts, place.statement, place, _IMPORT))
        if unused is not None and len(self._names(unused)) > 1:
            edits.append(self._without(unused, facts))
        return Fix(f"Use `{_SHARDED}`", "safe", tuple(edits))

    def _import_of(self, call: Call, facts: Facts) -> Binding | None:
        """Return the top-level import that binds the name of a call."""
        bindings = facts.module.bindings.get(call.path.split(".", 1)[0], [])
        return bindings[0] if len(bindings) == 1 and bindings[0].kind in ("from", "import") else None

    def _uses(self, binding: Binding, facts: Facts) -> int:
        return sum(len(scope.uses.get(binding.key, ())) for scope in facts.scopes)

    def _names(self, binding: Binding) -> Sequence[cst.CSTNode]:
        """Return the names in the import statement of a binding."""
        names = getattr(binding.statement, "names", ())
        return names if isinstance(names, Sequence) else ()

    def _without(self, binding: Binding, facts: Facts) -> Edit:
        """Return the edit that removes one name of several, and its comma, from an import."""
        names = self._names(binding)
        spans = [facts.span(alias, binding) for alias in names]
        place = next(i for i, alias in enumerate(names) if alias is binding.node)
        if place + 1 < len(names):
            return Edit(spans[place][0], spans[place + 1][0], "")
        return Edit(spans[place - 1][1], spans[place][1], "")

    # -- no scaler ----------------------------------------------------------------------------------

    def _missing(self, backward: Event, wrap: Wrap, guard: PathCondition, facts: Facts) -> Diagnostic | None:
        if facts.may_keep_masters or facts.base_unknown(backward.scope.owner):
            return None
        if unscaled_steps.arm_scales(backward, facts) and not self._never_made(backward, guard, facts):
            return None
        program = facts.reachable(backward.scope)
        step = unscaled_steps.plain_step(backward, guard, program, facts)
        if step is None or unscaled_steps.may_be_scaled(guard.joined(step.guard), program, facts):
            return None
        notes = (Note("sharded here", wrap.call.span), Note("this step applies the gradients", step.span))
        what = "FP16 under FSDP, but the gradients are never scaled"
        return self.at(backward, what=what, help=f"scale them with `{_SHARDED}`; or use BF16", notes=notes)
