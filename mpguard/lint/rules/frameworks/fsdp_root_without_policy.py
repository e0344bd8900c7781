from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Binding,
    Call,
    Diagnostic,
    Dtype,
    Facts,
    Note,
    Object,
    Rule,
    any_of,
    compatible,
    dotted,
    text_of,
    wrappers,
)

#: Layers whose input must have the dtype of their weights, and those that give what they get.
_NEEDS = frozenset({"Linear", "Conv1d", "Conv2d", "Conv3d"})
_KEEPS = frozenset({"LayerNorm", "RMSNorm", "GroupNorm", "Dropout", "Identity", "GELU", "ReLU", "SiLU"})
#: Methods of tensors that give their dtype.
_SHAPES = frozenset({"mean", "flatten", "view", "reshape", "permute", "transpose", "squeeze", "contiguous"})


class FsdpRootWithoutPolicy(Rule, form_of="MPG512"):
    """`fully_shard` has a policy for the blocks of a model and none for the rest: its last layer raises.

    A policy is about the parameters of its own call. Blocks with `param_dtype=torch.bfloat16` give BF16 results; the
    layers that the root call manages keep FP32 weights, and a linear layer or a convolution raises on these results
    ("mat1 and mat2 must have the same dtype", torch 2.13). With `output_dtype=torch.float32` it computes in FP32.

    Reported where `forward` of the model, a class of the project, gives the result of the blocks to such a layer,
    perhaps through a norm. Programs with autocast, or that cast the model, are not.
    """

    severity = "error"
    in_tests = True
    message = "`{layer}` gets {dtype} from the blocks, and has FP32 weights: this `fully_shard` has no `mp_policy`"
    help = "give the root the policy of the blocks too: `fully_shard(model, mp_policy=policy)`"
    triggers = (any_of(b"fully_shard"), any_of(b"mp_policy"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        shards = [wrap for wrap in facts.wrappers.shards if wrap.kind == "fsdp2"]
        for root in (each for each in shards if "mp_policy" not in each.call.keywords and not each.call.starred):
            key = dotted(root.call.argument(0, "module"))
            near = [each for each in shards if each.call.scope is root.call.scope and each is not root]
            for wrap in (each for each in near if compatible(each.guard, root.guard)):
                loops = facts.bindings(dotted(wrap.call.argument(0, "module")), wrap.call)
                owner, _, parts = _over(loops[0]).rpartition(".") if len(loops) == 1 else ("", "", "")
                policies = [event for event, _ in wrappers.policies_of(wrap)] if key and owner == key else []
                given = policies[0].call.argument(2, "output_dtype") if len(policies) == 1 else None
                low = policies[0].dtypes[0][1] if len(policies) == 1 and len(policies[0].dtypes) == 1 else None
                layer = _after(parts, key, root.call, facts) if low in HALF_DTYPES and given is None else ""
                sharded = [text_of(each.call.node.args[0]) for each in near]
                if layer and isinstance(low, Dtype) and not any(layer[5:] in each for each in sharded):
                    notes = (Note("the blocks have a policy here", wrap.call.span),)
                    yield self.at(root.call, layer=layer, dtype=low.label, notes=notes)
                    break


def _after(parts: str, key: str, root: Call, facts: Facts) -> str:
    """Return the layer of a model that gets the result of a loop over its blocks; "" without one."""
    params = [each for each in facts.bindings(key, root) if each.kind == "param"]
    places = [(root.argument(0, "module"), root)]
    if params:
        places = [(facts.argument_for(call, params[0]), call) for call in facts.callers(params[0].scope)]
    classes = {wrappers.class_of(node, at, facts.of(at)) for node, at in places}
    cls = classes.pop() if len(classes) == 1 else None
    forward = cls.method("forward") if cls is not None else None
    files = {facts, *(facts.of(at) for _, at in places), *([facts.of(forward)] if forward is not None else ())}
    if forward is None or any("autocast" in each.file_text or _casts_modules(each) for each in files):
        return ""
    home = facts.of(forward)
    loops = [each for found in forward.bindings.values() for each in found if each.kind == "for"]
    for loop in (each for each in loops if _over(each) == f"self.{parts}"):
        for call in forward.calls:
            first = call.order > loop.order and not call.loops and _kind(call, home) in _NEEDS
            if first and call.positional and _gives(call, loop, home):
                return call.path
    return ""


def _over(loop: Binding) -> str:
    """Return the dotted name of what a loop runs over: `self.blocks`, also in `enumerate(self.blocks)`."""
    value = loop.value
    return dotted(value.args[0].value if isinstance(value, cst.Call) and dotted(value.func) == "enumerate" else value)


def _gives(call: Call, loop: Binding, facts: Facts) -> bool:
    """True if a call gets the result of the last block, through nothing but what keeps its dtype."""
    before = [each for each in facts.flow.backward(call.positional[0], call) if isinstance(each, Call)]
    after = [each for each in before if each.scope is call.scope and each.order > loop.order]
    bound = {each.node: facts.bound_to(each) for each in after if each.path == loop.key}
    names = {each.key for each in bound.values() if each is not None}
    set_after = [each for name in names for each in call.scope.bindings[name] if loop.order < each.order < call.order]
    values = [call.positional[0], *(each.value for each in set_after if each.value is not None)]
    is_kept = all(each.node in bound or each.name in _SHAPES or _kind(each, facts) in _KEEPS for each in after)
    return bool(names) and is_kept and not any(set("+*/") & set(text_of(each)) for each in values)


def _casts_modules(facts: Facts) -> bool:
    """True if a file casts a model to a low precision, as a whole."""
    return any(any(map(each.may_be, HALF_DTYPES)) and facts.casts.is_module(each) for each in facts.events("cast"))


def _kind(call: Call, facts: Facts) -> str:
    """Return the class of torch's layer that a call runs: `Linear`."""
    atoms = [each.atom for each in facts.evaluate(call.func, call)]
    path = atoms[0].path if len(atoms) == 1 and isinstance(atoms[0], Object) else ""
    return path.rsplit(".", 1)[-1] if path.startswith("torch.nn.") else ""
