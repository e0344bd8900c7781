from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Diagnostic,
    Edit,
    Facts,
    Fix,
    Good,
    Object,
    Rule,
    any_of,
    dotted,
    lazy_pattern,
    text_of,
)

#: Contexts in which a call is a probe for an error or a warning.
_PROBES = lazy_pattern(r"(?i)raises|warns|warnings|subtest|suppress")
#: Kinds of contexts that are entered; a function with `autocast` in its name may choose one, or be one by `yield`.
_CONTEXTS = frozenset({"autocast", "accelerator_autocast", "fp8_autocast", "nullcontext", "context"})


class AutocastNotEntered(Rule):
    """An autocast context is created but never entered.

    ## What it does
    Reports `torch.autocast(...)`, its deprecated forms, `accelerator.autocast()`, `autocast(...)` of Transformer Engine
    and functions of the project with such a name that return or are a context manager, if the call is a statement of
    its own, is assigned to a name of a function or script that is never used, or is the left operand of `and`. A
    context is truthy, so `with torch.autocast("cuda") and torch.no_grad():` enters only the second one.

    ## Why is this bad
    `torch.autocast` is a context manager: it has no effect until `with` or a decorator enters it. The code below it
    runs in FP32, at the speed and with the memory of FP32, and nothing warns.

    ## Fix safety
    Unsafe: a comma instead of `and` enters both contexts. This is the evident intention, but it changes what the run
    computes.

    ## Known limits
    A context that is stored in an attribute, a dict or a list, passed on or returned counts as entered, and so does a
    name that is read anywhere. A dropped autocast is not reported if the function, or its class, casts the weights of
    the models in the block to its dtype: they compute in it anyway. A call that probes for support is not reported:
    under `try`, or inside `pytest.raises`.
    """

    code, name = "MPG304", "autocast-not-entered"
    severity = "error"
    fixes = True
    in_tests = True
    message = "`{call}` is never entered: nothing runs under it"
    help = "enter it: `with torch.autocast(...):`, or decorate a function with it"
    triggers = (any_of(b"autocast(", b"autocast as"),)
    # A line with an autocast (or an alias of one) that is no `with`, `def` or decorator, or that has an `and`.
    pattern = lazy_pattern(
        rb"^(?![ \t]*(?:async[ \t]+)?(?:with|def)\b[^:\n]*(?::[ \t]*)?$)[^\n@]*autocast[ (]"
        rb"|autocast\([^\n]*\)[ \t]+and\b",
        re.M,
    )
    examples = (
        Bad(
            """\
import torch

def train(model, loader):
    torch.autocast("cuda", dtype=torch.bfloat16)  # !
    for x in loader:
        loss = model(x).sum()
        loss.backward()
"""
        ),
        Good(
            """\
import torch

def right(args, model, x):
    with torch.no_grad() and torch.autocast("cuda"):
        y = model(x)
    with args.amp and torch.autocast("cuda") or torch.no_grad():
        y = model(y)
    with torch.autocast("cuda", enabled=args.amp and args.gpu), torch.no_grad():
        return model(y)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call in self._created(facts):
            if self._is_probe(call, facts):
                continue
            dropped = self._dropped(call, facts)
            if dropped is not None:
                if not self._runs_low_weights(dropped, call, facts):
                    help = "write a comma: a context is truthy, so `and` evaluates to its second operand"
                    yield self.at(call, call=facts.short(call.node), help=help, fix=self._fix(dropped, call, facts))
            elif not self._is_used(call, facts):
                yield self.at(call, call=facts.short(call.node))

    def _created(self, facts: Facts) -> Iterator[Call]:
        created = [event.call for event in facts.events("autocast")]
        yield from created
        for call in (each for name, calls in facts.calls.items() if name.endswith("autocast") for each in calls):
            atoms = [each.atom for each in facts.evaluate(call.node, call)] if call not in created else []
            if any(isinstance(atom, Object) and _is_context(atom) for atom in atoms):
                yield call  # Accelerate's or Transformer Engine's, or one of a `partial`, a `lambda` or a function

    def _is_probe(self, call: Call, facts: Facts) -> bool:
        """True if the call only tries whether there is such an autocast: alone in a `try`, or in `pytest.raises`."""
        block = facts.parent(call.line)
        alone = isinstance(block, cst.IndentedBlock) and len(block.body) == 1
        tried = any(flag.startswith("try#") for flag in call.guard.flags())
        return (tried and alone) or any(_PROBES.search(text_of(item.expr)) for item in call.withs)

    def _dropped(self, call: Call, facts: Facts) -> cst.BooleanOperation | None:
        """Return the `and` that drops this call, its left operand: a context is truthy."""
        above = facts.parent(call.node)
        if not isinstance(above, cst.BooleanOperation) or not isinstance(above.operator, cst.And):
            return None
        return above if above.left is call.node else None

    def _runs_low_weights(self, dropped: cst.BooleanOperation, call: Call, facts: Facts) -> bool:
        """True if the function or its class casts the weights of all models that the block calls to the dtype."""
        dtypes = {dtype for dtype in HALF_DTYPES if facts.autocast(call, facts.called_path(call)).may_be(dtype)}
        owner = call.scope.owner
        near = [call.scope, *(owner.descendants() if owner is not None else ())]
        casts = [cast for cast in facts.events("cast") if cast.scope in near and any(map(cast.may_be, dtypes))]
        weights = {facts.casts.bound_name(cast) for cast in casts if facts.casts.is_module(cast)} - {""}
        paths = [
            each.path.split(".") for each in call.scope.calls if any(entered.expr is dropped for entered in each.withs)
        ]
        others = [path for path in paths if weights.isdisjoint(path)]
        return len(others) < len(paths) and not any(
            (path[0] == "self" and len(path) == 2) or not facts.module_names.isdisjoint(path) for path in others
        )

    def _fix(self, dropped: cst.BooleanOperation, call: Call, facts: Facts) -> Fix | None:
        statement = facts.parent(dropped)
        if not isinstance(statement, cst.With) or dropped.lpar:
            return None
        edit = Edit(facts.outer_span(dropped.left, call)[1], facts.outer_span(dropped.right, call)[0], ", ")
        return Fix("Enter both contexts", "unsafe", (edit,))

    def _is_used(self, call: Call, facts: Facts) -> bool:
        """True if code may enter the context: not for a statement or for a local name that is never read."""
        above = facts.parent(call.node)
        while isinstance(above, (cst.IfExp, cst.BooleanOperation)):
            above = facts.parent(above)
        if isinstance(above, cst.Expr):
            return False
        if isinstance(above, cst.AnnAssign):
            target = dotted(above.target)
        elif isinstance(above, cst.Assign) and len(above.targets) == 1:
            target = dotted(above.targets[0].target)
        else:
            return True
        if not target or "." in target or target in call.scope.globals:
            return True
        places = call.scope.descendants()
        if call.scope.kind != "function":  # other modules may import it, unless this is a script
            if call.scope.kind == "class" or not facts.any_training or facts.exported(target):
                return True
            places = iter(facts.scopes)
        return any(use.path.split(".", 1)[0] == target for place in places for use in place.uses.get(target, ()))


def _is_context(atom: Object) -> bool:
    """True for an autocast of a library, and for an object of a class of the project that is entered."""
    return atom.kind in _CONTEXTS or (atom.cls is not None and atom.cls.method("__enter__") is not None)
