from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Fix, Rule, any_of, constant, launch_expectations, python_edits


class CodeOverridesLaunchConfig(Rule):
    """`Accelerator(mixed_precision="...")` repeats what the launch config sets already.

    ## What it does
    Reports a literal `mixed_precision` if all launch configs of the script (`--config`, `[tool.mpguard] configs`, those
    that launch lines name, those in the same folder) have the same value. A different value is reported by MPG862.

    ## Why is this bad
    accelerate 1.15 uses the value of the code instead of that of the config and of `--mixed_precision`. The next edit
    of the config silently has no effect.

    ## Fix safety
    Safe: the argument is removed; launched with its config, the program is the same. Started without one
    (`python train.py`) it would compute in FP32.

    ## Known limits
    Values that are computed, or come from an option, are the script's own decision and not reported.
    """

    code, name = "MPG514", "code-overrides-launch-config"
    severity = "warning"
    message = "`mixed_precision` is {found} in the launch config already; this argument would override an edit of it"
    help = "leave it to the config"
    triggers = (any_of(b"mixed_precision"), any_of(b"Accelerator("))
    needs_config = True
    yields_to = ("MPG862",)
    examples = (
        Bad(
            """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)  # !
""",
            files={"mp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\n"},
            fixed="""\
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4)
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        configs = launch_expectations.configs(facts)
        if not configs or any(not _sets(config.place, config.entry("mixed_precision")) for config in configs):
            return
        for event in facts.events("accelerator"):
            given = event.call.argument(2, "mixed_precision")
            if (
                given is None
                or constant(given) is None
                or event.call.starred
                or not launch_expectations.is_unconditional(event.guard, event.call)
            ):
                continue
            found = launch_expectations.literal(facts.evaluate(given, event.call))
            if found is None or any(config.mixed_precision != found for config in configs):
                continue
            fix = None
            if "mixed_precision" in event.call.keywords or len(event.call.positional) == 3:
                fix = Fix("Remove the argument", "safe", (python_edits.without_argument(event.call, given),))
            yield self.at(
                facts.span(given, event.call), found=f"`{found}`", notes=launch_expectations.places(configs), fix=fix
            )


def _sets(*places: object) -> bool:
    """True if accelerate's own key, or flag, sets it; a DeepSpeed file that does has further effects."""
    return any(place is not None for place in places)
