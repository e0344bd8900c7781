from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import HALF_DTYPES, Call, Diagnostic, Dtype, Event, Facts, Note, Record, Rule, any_of, dotted, events

#: Calls that put the weights back that a cast has rounded.
_RESTORES = frozenset({"load_state_dict", "copy_", "restore"})


class TrainedModelCastAndBack(Rule, form_of="MPG117"):
    """A model is cast in place for each validation or checkpoint, and cast back to go on training.

    `Module.half`, `bfloat16` and `to` change the parameters that the optimizer holds: `float()` after it restores
    their dtype, and none of the bits that 16-bit weights lack. Each time undoes the small updates since the last one.

    Reported where a loop that trains calls what casts the model of its optimizer, and casts it back: in one function,
    around the `yield` of a context manager, or in `__enter__` and `__exit__`. A copy may be cast, as may a model whose
    state is loaded again afterwards.
    """

    severity = "error"
    message = "`{cast}` rounds the weights of `{model}`, which is cast back and trained on: small updates are lost"
    help = "validate under autocast, or cast a copy: `copy.deepcopy(model).half()`"
    triggers = (any_of(b".half()", b".bfloat16()", b"float16"), any_of(b".float()", b".to(", b".type("))
    triggers_nearby = (any_of(b".backward("), any_of(b".parameters()"))
    yields_to = ("MPG117",)

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        casts = [each for each in facts.events("cast") if each.call.is_statement and each.key]
        upcasts = [each.call for each in casts if {dtype for _, dtype in each.dtypes} == {Dtype.FP32}]
        upcasts += facts.calls.get("float", ()) if casts else ()
        for cast in casts:
            low = next((dtype for dtype in HALF_DTYPES if cast.may_be(dtype)), None)
            back = next((each for each in upcasts if low is not None and _is_later(each, cast)), None)
            if back is None or _is_restored(cast, facts):
                continue
            optimizer = _optimizer_of(cast.key, cast.call, facts)
            if optimizer is not None:
                where = facts.elsewhere(optimizer)
                notes = (Note("cast back here", back.span), Note("trained by this optimizer", optimizer.span, where))
                yield self.at(cast, cast=facts.short(cast.call.node), model=cast.key, notes=notes)


def _is_later(back: Call, cast: Event) -> bool:
    """True if a call casts what another one has cast, after it: in the function, or where the `with` block ends."""
    if dotted(back.receiver) != cast.key:
        return False
    if back.scope is cast.scope:
        return back.order > cast.order
    methods = (cast.scope.name, back.scope.name)
    return back.scope.owner is cast.scope.owner is not None and methods == ("__enter__", "__exit__")


def _is_restored(cast: Event, facts: Facts) -> bool:
    """True if the function, or the object, may put the weights back."""
    calls = [call for name in _RESTORES for call in facts.calls.get(name, ())]
    return any(call.scope is cast.scope or call.scope.owner is cast.scope.owner is not None for call in calls)


def _optimizer_of(key: str, at: Record, facts: Facts, repeated: bool = False, depth: int = 6) -> Call | None:
    """Return the optimizer of the model of a name, if a loop that trains contains a place, or a call that leads to it.

    The name is followed from parameters, and attributes that are set from parameters, to what callers give.
    """
    home = facts.of(at)
    bindings = home.bindings(key, at) if depth else []
    places = [at]
    if key.startswith("self."):
        places += [call for call in home.callers(at.scope) if call.scope.owner is at.scope.owner]
        if len(bindings) == 1 and (name := dotted(bindings[0].value)):
            bindings = home.bindings(name, bindings[0])
    repeated = repeated or any(_trains(loop, each, home) for each in places for loop in each.loops)
    found = _built(key, at, home) if repeated and depth else None
    if found is None and repeated and places[1:] and bindings:  # built in `__init__`, from its parameter
        found = _built(bindings[0].key, bindings[0], home)
    if found is None and len(bindings) == 1 and bindings[0].kind == "param":
        for call in home.callers(bindings[0].scope):
            given = dotted(home.argument_for(call, bindings[0]))
            found = found or (_optimizer_of(given, call, home, repeated, depth - 1) if given else None)
    return found


def _built(key: str, at: Record, facts: Facts, depth: int = 2) -> Call | None:
    """Return the optimizer of a model's parameters that a function builds, or what it calls or is defined in."""
    owner = at.scope.owner if key.startswith("self.") else None
    for parameters in facts.calls.get("parameters", ()):
        here = parameters.scope in at.scope.within() or parameters.scope.owner is owner is not None
        argument = facts.parent(parameters.node)
        made = facts.call_of(facts.parent(argument)) if isinstance(argument, cst.Arg) else None
        is_same = here and dotted(parameters.receiver) == key
        if is_same and made is not None and events.is_optimizer(facts, made.node, made):
            return made
    for call in at.scope.calls if depth else ():
        for function in facts.functions(call) if key in map(dotted, call.positional) else ():
            params = [each for found in function.scope.bindings.values() for each in found if each.kind == "param"]
            taken = [each for each in params if dotted(facts.argument_for(call, each)) == key]
            home = facts.of(function.scope)
            for each in taken if function.scope.calls else ():
                if (found := _built(each.key, function.scope.calls[0], home, depth - 1)) is not None:
                    return found
    return None


def _trains(loop: cst.CSTNode, at: Record, facts: Facts) -> bool:
    """True if a loop around a place has a backward pass, or calls a function that has one."""
    inside = [call for call in at.scope.calls if loop in call.loops]
    called = [call for each in inside for function in facts.functions(each) for call in function.scope.calls]
    return any(call.name == "backward" for call in (*inside, *called))
