from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Binding,
    Call,
    Diagnostic,
    Edit,
    Event,
    Facts,
    Fix,
    Note,
    Object,
    Rule,
    Use,
    any_of,
    python_edits,
)

#: FSDP version -> its policy argument, the policy class, its name in messages, and the fields that both classes have.
_POLICIES = {
    "fsdp1": ("mixed_precision", "MixedPrecision", "FSDP1", {"param_dtype", "reduce_dtype", "cast_forward_inputs"}),
    "fsdp2": (
        "mp_policy",
        "MixedPrecisionPolicy",
        "`fully_shard`",
        {"param_dtype", "reduce_dtype", "cast_forward_inputs"},
    ),
}
#: Fields of `MixedPrecision` that have no counterpart in `MixedPrecisionPolicy`, and that the fix removes.
_ONLY_FSDP1 = {"buffer_dtype", "keep_low_precision_grads", "cast_root_forward_inputs"}


class WrongFsdpPolicyClass(Rule, form_of="MPG512"):
    """FSDP1 is given the policy class of FSDP2, or the reverse.

    FSDP1 raises an AttributeError on a `MixedPrecisionPolicy` (it has no `keep_low_precision_grads`). `fully_shard`
    accepts a `MixedPrecision` without a warning, but leaves the inputs in FP32 (`cast_forward_inputs` is off there by
    default): the first matmul raises for mixed dtypes, and modules without one fail later because the policy
    has no `output_dtype` (torch 2.13).

    A policy that is created elsewhere is not checked.
    """

    in_tests = True
    message = "{what} takes a `{wanted}`, but this is a `{found}`"
    help = "FSDP1 takes `MixedPrecision`, `fully_shard` (FSDP2) takes `MixedPrecisionPolicy`"
    triggers = (any_of(b"MixedPrecision"), any_of(b"mp_policy", b"mixed_precision"), any_of(b"fsdp"))
    fixes = True

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for shard in facts.events("shard"):
            kind = next(iter(wrap.kind for wrap in facts.wrappers.of(shard.call.node, shard.call)), "")
            if kind not in _POLICIES:
                continue
            argument, wanted, what, _ = _POLICIES[kind]
            given = shard.call.argument(None, argument)
            made = self._other_policy(shard, given, kind, facts)
            if made is not None and given is not None:
                found = "MixedPrecision" if kind == "fsdp2" else "MixedPrecisionPolicy"
                notes = (Note("created here", made.span),) if made.node is not given else ()
                fix = self._fix(made, kind, facts)
                yield self.at(
                    facts.span(given, shard.call), what=what, wanted=wanted, found=found, notes=notes, fix=fix
                )

    def _other_policy(self, shard: Event, given: cst.BaseExpression | None, kind: str, facts: Facts) -> Call | None:
        """Return the call that creates the policy of the other FSDP, if the policy is certain to be that one."""
        alternatives = [
            each.atom for each in facts.evaluate(given, shard.call) if shard.guard.joined(each.guard).possible
        ]
        other = "fsdp1_policy" if kind == "fsdp2" else "fsdp2_policy"
        for atom in alternatives:
            if not isinstance(atom, Object) or atom.kind != other or atom.call is None:
                return None
        made = alternatives[0] if alternatives else None
        return made.call if isinstance(made, Object) else None

    def _fix(self, made: Call, kind: str, facts: Facts) -> Fix | None:
        if facts.of(made) is not facts or made.starred or len(made.positional) > 2:
            return None
        _, wanted, _, fields = _POLICIES[kind]
        dropped = set(made.keywords) & _ONLY_FSDP1 if kind == "fsdp2" else set()
        if not set(made.keywords) <= fields | dropped or len(dropped) > 1 or self._other_uses(made, kind, facts):
            return None
        edits = [Edit(*facts.span(self._class_name(made.func), made), wanted)]
        edits += [python_edits.without_argument(made, made.keywords[name]) for name in dropped]
        if isinstance(made.func, cst.Name):
            bindings = facts.module.bindings.get(made.func.value, [])
            if len(bindings) != 1 or bindings[0].kind != "from" or bindings[0].key != bindings[0].name:
                return None
            edit = self._import(bindings[0], wanted, facts)
            edits += [edit] if edit is not None else []
        return Fix(f"Use `{wanted}`", "unsafe" if dropped else "safe", tuple(edits))

    def _class_name(self, func: cst.BaseExpression) -> cst.CSTNode:
        return func.attr if isinstance(func, cst.Attribute) else func

    def _other_uses(self, made: Call, kind: str, facts: Facts) -> bool:
        """True if the policy may be used elsewhere: it is neither an argument, nor a name that only such calls take."""
        above = facts.parent(made.node)
        if isinstance(above, cst.Arg):
            return False
        for key, bindings in made.scope.bindings.items():
            if any(binding.value is made.node for binding in bindings):
                scopes = (
                    made.scope.owner.descendants() if key.startswith("self.") and made.scope.owner else (facts.scopes)
                )
                uses = [use for scope in scopes for use in scope.uses.get(key.split(".", 1)[0], ()) if use.path == key]
                return not uses or not all(self._taken(use, kind, facts) for use in uses)
        return True

    def _taken(self, use: Use, kind: str, facts: Facts) -> bool:
        """True if a name is the policy of a call that shards with this version of FSDP."""
        arg = facts.parent(use.node)
        call = facts.call_of(facts.parent(arg)) if isinstance(arg, cst.Arg) else None
        return any(
            shard.call is call
            and call.argument(None, _POLICIES[kind][0]) is use.node
            and any(wrap.kind == kind for wrap in facts.wrappers.of(call.node, call))
            for shard in facts.events("shard")
        )

    def _import(self, binding: Binding, wanted: str, facts: Facts) -> Edit | None:
        """Return the edit that imports the other class, in addition to this one if this one has other uses."""
        if wanted in facts.module.bindings:
            return None
        uses = [use for scope in facts.scopes for use in scope.uses.get(binding.key, ())]
        first, last = facts.span(binding.node, binding)
        return Edit(first, last, wanted) if len(uses) == 1 else Edit(last, last, f", {wanted}")
