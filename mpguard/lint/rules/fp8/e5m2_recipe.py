from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Constant, Diagnostic, Facts, Good, Ref, Rule, any_of


class E5m2Recipe(Rule):
    """An FP8 recipe selects E5M2 for the forward pass too, which Transformer Engine refuses.

    ## What it does
    Reports `fp8_format=Format.E5M2` of Transformer Engine's recipes, and `fp8_format="E5M2"` of accelerate's
    `TERecipeKwargs` and `FP8RecipeKwargs`, if this is the only value that it can have.

    ## Why is this bad
    E5M2 has two bits of mantissa: enough for gradients, too coarse for weights and activations. The recipes of
    Transformer Engine 2.20 raise "Pure E5M2 training is not supported" (NVFP4: "Only E4M3 is supported"). accelerate
    accepts the string and passes it on, so the run stops in `prepare`.

    ## Known limits
    A format that is chosen at run time is not checked.
    """

    code, name = "MPG416", "e5m2-recipe"
    severity = "error"
    in_tests = True
    message = "`{call}` selects pure E5M2, which Transformer Engine refuses"
    help = "use HYBRID (E4M3 forward, E5M2 backward) or E4M3"
    triggers = (any_of(b"E5M2"), any_of(b"Scaling(", b"RecipeKwargs(", b" as "))
    examples = (
        Bad(
            """\
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

recipe = DelayedScaling(fp8_format=Format.E5M2, amax_history_len=16)  # !
with te.autocast(recipe=recipe):
    out = model(x)
"""
        ),
        Bad(
            """\
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from transformer_engine.common import recipe

FORMAT = "E5M2"
handlers = [TERecipeKwargs(fp8_format=FORMAT)]  # !
block = recipe.MXFP8BlockScaling(0, recipe.Format.E5M2)  # !
"""
        ),
        Good(
            """\
from accelerate.utils import TERecipeKwargs
from transformer_engine.common.recipe import DelayedScaling, Format
from ours import DelayedScaling as Ours

hybrid = DelayedScaling(fp8_format=Format.HYBRID)
chosen = DelayedScaling(fp8_format=Format.E4M3 if args.e4m3 else Format.E5M2)
looked_up = DelayedScaling(fp8_format=getattr(Format, args.format))
handler = TERecipeKwargs(fp8_format="HYBRID")  # not E5M2
own = Ours(fp8_format=Format.E5M2)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in (*facts.events("fp8_recipe"), *facts.events("fp8_handler")):
            given = event.call.argument(1 if event.kind == "fp8_recipe" else None, "fp8_format")
            if given is None:
                continue
            atoms = [each.atom for each in facts.evaluate(given, event.call)]
            if atoms and all(
                (isinstance(atom, Ref) and atom.path.endswith("Format.E5M2"))
                or (isinstance(atom, Constant) and atom.value == "E5M2")
                for atom in atoms
            ):
                yield self.at(event, call=event.call.path or event.call.name)
