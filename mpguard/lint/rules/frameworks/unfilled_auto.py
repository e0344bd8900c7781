from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Facts, Note, Rule, any_of, events, schemas, wrappers

#: Who fills in "auto".
_FILL_IN: tuple[events.EventKind, ...] = ("accelerator", "trainer", "arguments")
_STOPS, _DROPS = "DeepSpeed stops", "DeepSpeed drops the key, and the section is off"


class UnfilledAuto(Rule, form_of="MPG824"):
    """`deepspeed.initialize` gets a config, or the name of a file, with `"auto"` in it, and nothing fills it in.

    DeepSpeed 0.19.8 compares the batch sizes and `gradient_clipping` with numbers and passes `optimizer.params` to the
    optimizer: it stops at the text. Both precision sections are off where the only value of `enabled` is `"auto"`.

    Not reported in a file with a Trainer or an `Accelerator`, which fill the values in, and where the code changes the
    config. `params` are not read where the call gets an optimizer or a scheduler of its own.
    """

    message = '`{key}`: "auto", but nothing fills it in: {what}'
    help = 'write a value; the Trainer and accelerate alone fill in "auto"'
    triggers = (any_of(b"deepspeed"), any_of(b"initialize("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if any(facts.events(kind) for kind in _FILL_IN):
            return
        for event in facts.events("initialize"):
            call = event.call
            document = wrappers.engine_config(facts, call)
            if document is None or not isinstance(document.data, dict) or "" in document.given_to:
                continue
            sections = [
                name
                for name, (argument, place) in schemas.deepspeed.OBJECTS.items()
                if call.argument(place, argument) is None and not call.starred
            ]
            entries = [document.entry(key) for key in schemas.deepspeed.unfilled(document.data, sections)]
            stops = [entry for entry in entries if entry is not None]
            if document.format == "python":  # whose switches UnresolvedAuto reports
                for entry in stops:
                    yield self.at(entry, key=".".join(entry.path), what=_STOPS)
                continue
            place = facts.span(call.argument(None, "config", "config_params") or call.node, call)
            switch = schemas.deepspeed.unresolved(document)
            for found, what in ((stops, _STOPS), ([switch] if switch is not None else [], _DROPS)):
                if found:
                    notes = tuple(Note('"auto"', entry.value_span, document.path) for entry in found)
                    key = "`, `".join(".".join(entry.path) for entry in found)
                    yield self.at(place, notes=notes, key=key, what=what)
