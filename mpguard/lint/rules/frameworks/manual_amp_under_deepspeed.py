from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    Object,
    PathCondition,
    Rule,
    Wrap,
    any_of,
    compatible,
    path_condition,
    wrappers,
)

#: The versions in which an engine runs its model in an autocast of its own, which is disabled by default.
_DISABLES_AUTOCAST = {"deepspeed": ">=0.17.2"}


class ManualAmpUnderDeepspeed(Rule):
    """Manual autocast or a manual GradScaler around a DeepSpeed engine.

    ## What it does
    Reports an enabled `torch.autocast` region in which an engine that `deepspeed.initialize` returned is called for
    training, and a GradScaler that scales its loss.

    ## Why is this bad
    Since version 0.17.2 DeepSpeed disables autocast inside the engine unless its own `torch_autocast` section enables
    it, and reports it in a single warning: the region has no effect on the model, although the code suggests otherwise.
    A GradScaler scales a loss that DeepSpeed's FP16 mode scales again, and its step bypasses the engine.

    ## Known limits
    Not reported if the config enables `torch_autocast`, or the code writes this section into it, under a flag that is
    read from this section, in evaluation, and for an engine that is a parameter, which is unknown. A region is not
    reported if the project requires an older DeepSpeed, in which it has an effect.
    """

    code, name = "MPG505", "manual-amp-under-deepspeed"
    severity = "error"
    message = "manual `{expr}` in addition to the DeepSpeed engine `{model}`"
    help = "use the `bf16`, `fp16` or `torch_autocast` section of the DeepSpeed config"
    triggers = (any_of(b"deepspeed"), any_of(b"initialize("), any_of(b"autocast", b"Scaler"))
    yields_to = ("MPG862",)
    examples = (
        Bad(
            """\
import deepspeed
import torch

engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
scaler = torch.amp.GradScaler("cuda")  # !
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):  # !
        loss = engine(x).sum()
    engine.backward(scaler.scale(loss))
    engine.step()
"""
        ),
        Good(
            """\
import deepspeed
import torch

engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = engine(x).sum()
    engine.backward(loss)
    engine.step()
""",
            files={"README.md": "    pip install torch \\\n        deepspeed==0.6.3\n", "pyproject.toml": ""},
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if not facts.events("initialize"):
            return
        reported: set[Call] = set()
        for call, wrap in facts.wrappers.forwards("deepspeed"):
            if facts.is_inference(call) or wrap.index not in (0, None) or wrappers.settings_of(wrap).may_autocast:
                continue
            for region, guard in facts.autocasts(call):
                place = region.call
                if place is None or place in reported or facts.of(place) is not facts or facts.is_inference(place):
                    continue
                if self._follows_config(place, guard, facts):
                    continue
                if compatible(guard, wrap.guard) and not wrappers.other_way(guard, "deepspeed"):
                    reported.add(place)
                    yield self._found(place, call, wrap, facts, _DISABLES_AUTOCAST)
        for scale in facts.events("scale"):
            if not wrappers.other_way(scale.guard, "deepspeed"):
                yield from self._scaled(scale, reported, facts)

    def _follows_config(self, place: Call, guard: PathCondition, facts: Facts) -> bool:
        """True if a region is entered only under a flag that the code reads from the `torch_autocast` section."""
        entered = place.guard.joined(guard)
        return any(
            path_condition.implies(entered, PathCondition([path_condition.Flag(flag)]))
            and any(
                bound.value is not None and "torch_autocast" in facts.text(bound.value, bound)
                for bound in facts.bindings(flag, place)
            )
            for flag in entered.flags()
        )

    def _scaled(self, scale: Event, reported: set[Call], facts: Facts) -> Iterator[Diagnostic]:
        """Yield torch scalers that scale the loss of an engine."""
        for call, wrap in facts.wrappers.differentiated(scale.call.positional[0], scale.call, "deepspeed"):
            if wrap.index not in (0, None):
                continue
            for each in facts.evaluate(scale.subject, scale.call):
                atom = each.atom
                if not isinstance(atom, Object) or atom.call is None or not atom.path.startswith("torch."):
                    continue
                if facts.of(atom.call) is facts and atom.call not in reported:
                    reported.add(atom.call)
                    yield self._found(atom.call, call, wrap, facts)
            return

    def _found(
        self, place: Call, call: Call, wrap: Wrap, facts: Facts, versions: dict[str, str] | None = None
    ) -> Diagnostic:
        notes = (Note("the engine is made here", wrap.call.span), Note("called here", call.span))
        return self.at(place, expr=facts.short(place.node), model=call.path, notes=notes, versions=versions)
