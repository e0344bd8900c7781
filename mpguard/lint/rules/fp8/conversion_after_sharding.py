from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Call, Diagnostic, Event, Facts, Note, Record, Rule, Scope, any_of, compatible, dotted, lattice


class ConversionAfterSharding(Rule, form_of="MPG417"):
    """torchao converts a model that `fully_shard` or FSDP has wrapped already: the first forward pass raises.

    The new layers take over what FSDP has made of the weights. With `fully_shard` they multiply a plain tensor by a
    DTensor ("got mixed torch.Tensor and DTensor"); with FSDP1 a weight is no parameter, or a part of one in one
    dimension (torch 2.13, torchao 0.18). After DDP and `torch.compile` the conversion works.
    """

    severity = "error"
    in_tests = True
    message = "`{convert}` comes after `{shard}`: the converted layers cannot compute with sharded weights"
    help = "convert the model first, then compile its blocks, then shard it"
    triggers = (any_of(b"convert_to_float8_training"), any_of(b"fully_shard", b"FullyShardedDataParallel", b"shard"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in facts.events("convert"):
            wraps = facts.wrappers.of(event.subject, event.call, "fsdp")
            shards = [wrap.call for wrap in wraps if compatible(wrap.guard, event.guard)]
            for shard in (*shards, *_in_a_list_of_steps(event, facts))[:1]:
                notes = (Note("sharded here", shard.span, facts.elsewhere(shard)),)
                yield self.at(event, convert=event.call.name, shard=shard.name, notes=notes)


def _in_a_list_of_steps(event: Event, facts: Facts) -> Iterator[Call]:
    """Yield what shards the parameter of a function that converts it, in an earlier function of a list of steps.

    `for step in [shard, convert, compile]: model = step(model)`.
    """
    for scope in facts.scopes:
        for key, bindings in scope.bindings.items():
            for loop in (each for each in bindings if each.kind == "for" and not each.index):
                given = [each.value for each in facts.bindings(dotted(loop.value), loop)] or [loop.value]
                steps = given[0].elements if len(given) == 1 and isinstance(given[0], (cst.List, cst.Tuple)) else ()
                run = [_function(each.value, loop, facts) for each in steps if any(c.path == key for c in scope.calls)]
                if event.scope in run and event.key in {param.name for param in event.scope.params[:1]}:
                    for step in run[: run.index(event.scope)]:
                        first = step.params[0].name if step is not None and step.params else ""
                        calls = facts.of(step).wrappers.shards if step is not None else ()
                        yield from (
                            w.call for w in calls if w.call.scope is step and dotted(w.call.argument(0)) == first
                        )


def _function(node: cst.BaseExpression, at: Record, facts: Facts) -> Scope | None:
    """Return the function of the tree that an expression is."""
    atoms = [each.atom for each in facts.evaluate(node, at)]
    return atoms[0].scope if len(atoms) == 1 and isinstance(atoms[0], lattice.Function) else None
