from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Constant,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    PathCondition,
    Rule,
    any_of,
    compatible,
    keywords,
)

#: Arguments that exclude each other, and the effect of setting both.
_PAIRS = (
    ("fp16", "bf16", "transformers refuses both"),
    ("fp16_full_eval", "bf16_full_eval", "transformers refuses both"),
    ("bf16", "fp16_full_eval", "evaluation runs in another dtype than training"),
    ("fp16", "bf16_full_eval", "evaluation runs in another dtype than training"),
)


class TrainingArgumentsConflict(Rule):
    """`TrainingArguments` that enable FP16 and BF16 at once.

    ## What it does
    Reports `fp16=True` together with `bf16=True`, `fp16_full_eval=True` together with `bf16_full_eval=True`, and a
    `*_full_eval` in another dtype than training. Covers transformers' `TrainingArguments`, classes of that name that
    other libraries derive from it, and TRL's configs.

    ## Why is this bad
    transformers 5.23 raises a ValueError for the first two. The others run: the model that was trained in BF16 is cast
    to FP16 as a whole for evaluation. Its activations may exceed the range of FP16 (65504), and the metric that selects
    the best checkpoint is then not that of the trained model.

    ## Known limits
    Only values that are certain to be True count: `fp16=not bf16_supported(), bf16=bf16_supported()` is not reported.
    """

    code, name = "MPG506", "training-arguments-conflict"
    severity = "error"
    in_tests = True
    message = "`{one}=True` and `{other}=True`: {reason}"
    help = "keep one of the two"
    triggers = (any_of(b"TrainingArguments(", b"from trl", b"import trl"),)
    triggers_nearby = (any_of(b"fp16"), any_of(b"bf16"))
    yields_to = ("MPG862", "MPG863", "MPG864")
    examples = (
        Bad(
            """\
from transformers import TrainingArguments

args = TrainingArguments(output_dir="out", fp16=True, bf16=True)  # !
"""
        ),
        Good(
            """\
from transformers import TrainingArguments

args = TrainingArguments(output_dir="out", bf16=True)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for made in facts.events("arguments"):
            for one, other, why in _PAIRS:
                both = [
                    (a, b) for a in self._true_guards(made, one, facts) for b in self._true_guards(made, other, facts)
                ]
                if any(compatible(made.guard, a, b) for a, b in both):
                    written = [made.call.keywords[name] for name in (one, other) if name in made.call.keywords]
                    places = sorted({facts.span(place, made.call) for place in written})
                    if len(places) == 2:
                        first, last = places
                        notes = (Note("the other argument", first),)
                    else:
                        last, notes = made.call.span, (Note("`**` passes the items of a dict"),)
                    yield self.at(last, one=one, other=other, reason=why, notes=notes)
                    break

    def _true_guards(self, made: Event, name: str, facts: Facts) -> list[PathCondition]:
        """Return the guards under which an argument is True, also as an item of `**options` whose items are known."""
        given = made.call.keywords.get(name)
        if given is not None:
            values = [*facts.evaluate(given, made.call)]
        else:
            ways = keywords.passed(made.call, facts) if made.call.starred else None
            values = [each for way in ways or () if name in way for each in way[name]()]
        return [each.guard for each in values if isinstance(each.atom, Constant) and each.atom.value is True]
