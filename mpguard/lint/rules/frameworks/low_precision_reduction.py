from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Fix,
    Rule,
    any_of,
    compatible,
    constant,
    dotted,
    lazy_pattern,
    options,
    python_edits,
    reachability,
    wrappers,
)

#: DDP's hooks that send the gradients in a lower precision.
_HOOKS = {"fp16_compress_hook": Dtype.FP16, "bf16_compress_hook": Dtype.BF16}

#: Options of a script that then trains nothing.
_EVALUATES = lazy_pattern(r"--(?:evaluate|(?:eval|test|predict|inference|infer)[-_]only)$")


class LowPrecisionReduction(Rule):
    """FSDP or DDP reduces gradients in BF16 or FP16.

    ## What it does
    Reports FSDP1's `MixedPrecision` and FSDP2's `MixedPrecisionPolicy` whose `reduce_dtype` is BF16 or FP16, and those
    with a low `param_dtype` and no `reduce_dtype`: both then reduce in `param_dtype` (torch 2.13, `_flat_param.py` and
    `_fsdp_collectives.py`). Reports DDP's `fp16_compress_hook` and `bf16_compress_hook`, registered or passed to
    Lightning or accelerate.

    ## Why is this bad
    The reduce-scatter adds the gradients of all ranks in that dtype. BF16 has 8 bits of mantissa: in a sum over 256
    ranks, the contribution of one rank may be lost entirely, and FP16 overflows at 65504. Megatron Bridge's
    `bf16_mixed` reduces in FP32 for that reason; it doubles the bytes of this one collective.

    ## Fix safety
    Safe: `reduce_dtype=torch.float32` keeps compute and weights unchanged. The gradients are the same or more exact,
    and need more memory while they are reduced.

    ## Known limits
    If an option selects FP32 or a lower precision, also between two policies, the choice is assumed to be intended. So
    is one whose default, for `param_dtype` and `reduce_dtype`, is FP32, if no script of the project passes the option.
    Policies of models that are frozen or only evaluated, under `torch.no_grad`, in tests, and policies that are only
    compared, or from which `dataclasses.replace` makes others, are not reported, nor is one in a config that is only
    launched with `--eval-only`, nor one in a copy of transformers' Trainer in a project of which nothing asks for FSDP,
    nor one whose name nothing mentions: in its project, in a program that shards with another policy, or in a module of
    a program that takes another one from it. If the use of the policy is not visible
    otherwise, it is assumed to train.
    """

    code, name = "MPG509", "low-precision-reduction"
    severity = "warning"
    message = "{by} reduces gradients in {dtype}{reason}"
    help = "reduce in FP32: `reduce_dtype=torch.float32`"
    triggers = (
        any_of(b"MixedPrecision", b"compress_hook"),
        any_of(b"fsdp", b"compress_hook"),
        any_of(b"float16", b".half", b"import half", b"compress_hook"),
    )
    examples = (
        Bad(
            """\
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # !
fully_shard(model, mp_policy=policy)
""",
            fixed="""\
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mp_policy=policy)
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if self._only_evaluates(facts) or self._is_copied_trainer(facts):
            return
        shards = any(map(wrappers.policies_of, facts.wrappers.shards)) if facts.events("policy") else False
        for policy in facts.events("policy"):
            above = facts.parent(policy.call.node)
            if policy.call.starred or facts.is_inference(policy.call):
                continue
            if isinstance(above, (cst.Comparison, cst.ComparisonTarget)) or self._only_frozen(policy, facts):
                continue
            if reachability.is_unused_value(policy.call, facts, shards) or self._only_replaced(policy, facts):
                continue
            given = policy.call.argument(1, "reduce_dtype")
            if given is None or constant(given) == (None,):
                yield from self._default(policy, given, facts)
            elif not self._is_chosen(policy, facts) and (dtype := self._reduces(policy, given, facts)) is not None:
                yield self.at(
                    facts.span(given, policy.call),
                    by="FSDP",
                    dtype=dtype,
                    reason="",
                    fix=self._fix(policy, given, facts),
                )
        for policy, given in self._replaced(facts):
            if not facts.is_inference(policy.call) and (dtype := self._reduces(policy, given, facts)) is not None:
                place, fix = facts.span(given, policy.call), self._fix(policy, given, facts)
                yield self.at(place, by="FSDP", dtype=dtype, reason="", fix=fix)
        yield from self._hooks(facts)

    def _replaced(self, facts: Facts) -> Iterator[tuple[Event, cst.BaseExpression]]:
        """Yield the policies that `dataclasses.replace` makes with another `reduce_dtype`, each with that."""
        for call in facts.calls.get("replace", ()):
            given = call.keywords.get("reduce_dtype")
            if given is None or facts.called_path(call) != "dataclasses.replace":
                continue
            if facts.kinds(call.argument(0), call) & {"fsdp1_policy", "fsdp2_policy"}:
                yield Event("policy", call, facts, call.node), given

    def _only_replaced(self, policy: Event, facts: Facts) -> bool:
        """True if a policy is nothing but the source of policies with another `reduce_dtype`."""
        replaced = {event.call.argument(0) for event, _ in self._replaced(facts)}
        names = [
            (scope, key)
            for scope in facts.scopes
            for key, bindings in scope.bindings.items()
            if any(binding.value is policy.call.node for binding in bindings)
        ]
        if not replaced or len(names) != 1 or "." in names[0][1]:
            return policy.call.node in replaced
        scope, name = names[0]
        uses = [use.node for inner in scope.descendants() for use in inner.uses.get(name, ())]
        is_public = scope is facts.module and facts.exported(name)
        return bool(uses) and replaced.issuperset(uses) and not is_public

    def _only_evaluates(self, facts: Facts) -> bool:
        """True for a config module that all launch lines of the project give to a script which only evaluates."""
        launches = facts.project.launches_given(facts.path)
        return bool(launches) and all(
            any(word.text is not None and _EVALUATES.match(word.text) for word in launch.arguments)
            for launch in launches
        )

    def _is_copied_trainer(self, facts: Facts) -> bool:
        """True in a copy of transformers' Trainer, which has each strategy, in a project that nowhere asks for FSDP."""
        is_trainer = "FSDPOption" in facts.file_text and "self.args.fsdp" in facts.file_text
        project, path = facts.project, facts.path
        return is_trainer and not project.asks_for(path, "fsdp") and not project.keyword_given_elsewhere(path, "fsdp")

    def _hooks(self, facts: Facts) -> Iterator[Diagnostic]:
        """Yield the hooks that compress the gradients of DDP, unless an option selects them."""
        for calls in facts.calls.values():
            for call in calls:
                given = call.argument(1, "hook") if call.name == "register_comm_hook" else None
                for hook in (given, *(call.keywords.get(name) for name in ("ddp_comm_hook", "comm_hook"))):
                    name = dotted(hook).rsplit(".", 1)[-1] if hook is not None and not facts.guard_of(call) else ""
                    dtype = _HOOKS.get(name)
                    if dtype is not None and hook is not None and not facts.is_inference(call):
                        place, reason = facts.span(hook, call), f": `{name}` compresses them"
                        help = "without the hook DDP reduces in the dtype of the gradients"
                        yield self.at(place, by="DDP", dtype=dtype.label, reason=reason, help=help)

    def _is_chosen(self, policy: Event, facts: Facts) -> bool:
        """True if another branch of the function has a policy with the same `param_dtype` that reduces in FP32."""
        low = {dtype for dtype in HALF_DTYPES if policy.may_be(dtype)}
        return any(
            other.scope is policy.scope
            and not compatible(other.guard, policy.guard)
            and low & {dtype for dtype in HALF_DTYPES if other.may_be(dtype)}
            and (given := other.call.argument(1, "reduce_dtype")) is not None
            and [dtype for _, dtype in facts.dtypes(given, other.call)] == [Dtype.FP32]
            for other in facts.events("policy")
        )

    def _only_frozen(self, policy: Event, facts: Facts) -> bool:
        """True if all known models with the policy are frozen or only evaluated."""
        shards = [
            shard
            for shard in facts.events("shard")
            for wrap in facts.wrappers.of(shard.call.node, shard.call, "fsdp")
            if (found := wrappers.policy_of(wrap)) is not None and found[0] is policy.call
        ]
        return bool(shards) and all(
            facts.frozen_params.is_frozen(shard.call.node) or facts.frozen_params.is_frozen_name(shard.key)
            for shard in shards
        )

    def _default(self, policy: Event, given: cst.BaseExpression | None, facts: Facts) -> Iterator[Diagnostic]:
        """Report a policy without `reduce_dtype`, which reduces in the dtype of the parameters."""
        low = [dtype for dtype in HALF_DTYPES if policy.may_be(dtype)]
        param = policy.call.argument(0, "param_dtype")
        if low and param is not None and all(dtype is not None for _, dtype in policy.dtypes):
            why = ", the dtype of `param_dtype`: no `reduce_dtype` is given"
            fix = self._fix(policy, given, facts)
            yield self.at(
                facts.span(param, policy.call),
                by="FSDP",
                dtype=" or ".join(dtype.label for dtype in low),
                reason=why,
                fix=fix,
            )

    def _reduces(self, policy: Event, given: cst.BaseExpression, facts: Facts) -> str | None:
        """Return the low dtype of the reduction: always low, or the same value as `param_dtype`.

        Not if both are FP32 by default, which an option that nobody passes may change.
        """
        found = [(guard, dtype) for guard, dtype in facts.dtypes(given, policy.call) if compatible(guard, policy.guard)]
        reduces = {dtype for _, dtype in found}
        low = [dtype for dtype in HALF_DTYPES if dtype in reduces]
        if not low or (reduces - set(HALF_DTYPES) and not self._same_value(policy, given, facts)):
            return None
        if any(dtype is Dtype.FP32 and options.is_default(guard, facts) for guard, dtype in found):
            return None
        return " or ".join(dtype.label for dtype in low)

    def _same_value(self, policy: Event, given: cst.BaseExpression, facts: Facts) -> bool:
        """True if `param_dtype` and `reduce_dtype` are the same name, or set by the same statements."""
        param = policy.call.argument(0, "param_dtype")
        key, other = dotted(given), dotted(param)
        if not key or not other:
            return False
        values = [{(b.value, b.index) for b in facts.bindings(name, policy.call)} for name in (key, other)]
        return key == other or (bool(values[0]) and values[0] == values[1])

    def _fix(self, policy: Event, given: cst.BaseExpression | None, facts: Facts) -> Fix | None:
        torch = python_edits.name_of_torch(facts)
        if torch is None:
            return None
        if given is not None:
            edit = python_edits.replaced(given, policy.call, f"{torch}.float32")
        else:
            param = policy.call.argument(0, "param_dtype")
            if param is None or len(policy.call.positional) > 1:
                return None
            edit = python_edits.after(param, policy.call, f", reduce_dtype={torch}.float32")
        return Fix("Reduce in FP32", "safe", (edit,))
