from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Call,
    Diagnostic,
    Event,
    Facts,
    Note,
    Rule,
    Scope,
    Wrap,
    any_of,
    compatible,
    constant,
    dotted,
    text_of,
    wrappers,
)

#: Functions whose results differ by orders of magnitude for the integers of an `arange`.
_SPREADS = frozenset({"exp", "exp2", "pow", "float_power"})
#: Functions whose results are a table that may be rounded, and arguments that leave modules to themselves.
_TABLES = frozenset({"cos", "sin", "tril", "triu", "polar"})
_EXEMPTS = frozenset({"ignored_modules", "ignored_states", "ignored_parameters"})


class FsdpRoundsFrequencies(Rule, form_of="MPG512"):
    """FSDP1's `buffer_dtype` rounds the frequencies of a rotary or sinusoidal embedding.

    FSDP1 casts all floating-point buffers of the wrapped modules to `buffer_dtype`, also those that are not persistent
    (torch 2.13). A `.float()` in the forward pass restores no bits. The angle is the frequency times the position: with
    frequencies in BF16, and a base of 10,000, angles at position 4096 are wrong by up to 1.8.

    Reported for models of the project in which a module registers powers, or `exp`, of an `arange` in FP32, and
    computes with them. Not with `ignored_modules` or `ignored_states`.
    """

    severity = "warning"
    message = "FSDP casts the buffer `{buffer}` to {dtype}: positions far out get wrong angles"
    help = "leave `buffer_dtype` out, or set it to `torch.float32`"
    triggers = (any_of(b"buffer_dtype"), any_of(b"MixedPrecision"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for policy in facts.events("policy"):
            given = policy.call.argument(2, "buffer_dtype")
            found = [dtype for _, dtype in facts.dtypes(given, policy.call)] if given is not None else []
            low = [dtype for dtype in HALF_DTYPES if dtype in found]
            if given is None or not low or len(found) > len(low):
                continue
            for wrap in self._wraps(policy, facts):
                cls = wrappers.class_of(wrap.call.argument(0, "module"), wrap.call, wrap.facts)
                buffer = _frequencies(cls, facts) if cls is not None else None
                if buffer is not None:
                    name = str((constant(buffer.argument(0, "name")) or ("",))[0])
                    notes = (
                        Note("the buffer is registered here", buffer.span, facts.elsewhere(buffer)),
                        Note("wrapped here", wrap.call.span, facts.elsewhere(wrap.call)),
                    )
                    place = facts.span(given, policy.call)
                    yield self.at(place, buffer=name, dtype=low[0].label, notes=notes)
                    break

    def _wraps(self, policy: Event, facts: Facts) -> Iterator[Wrap]:
        """Yield the calls of FSDP1 that get a policy, in its file and in those that take a name of it."""
        names = [name for name in facts.module.bindings if facts.project.imported_elsewhere(facts.path, name)]
        users = [other for name in names for other in facts.users(name) or ()]
        for home in dict.fromkeys((facts, *users)):
            for wrap in home.wrappers.shards:
                given = [each.call for each, guard in wrappers.policies_of(wrap) if compatible(guard, wrap.guard)]
                if wrap.kind == "fsdp1" and policy.call in given and _EXEMPTS.isdisjoint(wrap.call.keywords):
                    yield wrap


def _frequencies(cls: Scope, facts: Facts) -> Call | None:
    """Return the call that registers a buffer of frequencies in a model, and computes with it."""
    for each in wrappers.classes_of(cls, facts):
        home = facts.of(each)
        for call in (call for scope in each.descendants() for call in scope.calls if call.name == "register_buffer"):
            given, name = call.argument(1, "tensor"), constant(call.argument(0, "name"))
            if given is None or name is None or not _is_spread(given, call, home):
                continue
            used = f"self.{name[0]}"
            methods = (scope for scope in each.descendants() if scope.name != "__init__")
            paths = (use.path for scope in methods for use in scope.uses.get("self", ()))
            if any(f"{path}.".startswith(f"{used}.") for path in paths):
                return call
    return None


def _is_spread(given: cst.BaseExpression, call: Call, facts: Facts) -> bool:
    """True if a tensor has powers of the numbers of an `arange` in FP32, and nothing that a table is made by."""
    if any(dtype.dtype in HALF_DTYPES for dtype in facts.precision.of(given, call)):
        return False
    made = [each for each in facts.flow.backward(given, call) if isinstance(each, Call)]
    names = {each.name for each in made}
    if "arange" not in names or names & _TABLES:
        return False
    path = dotted(given)
    values = [given, *(each.value for each in (facts.bindings(path, call) if path else ()))]
    return bool(names & _SPREADS) or any("**" in text_of(each) for each in values if each is not None)
