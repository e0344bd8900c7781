from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Constant,
    Diagnostic,
    Facts,
    Fix,
    Rule,
    any_of,
    constant,
    fp8_facts,
    library_names,
    python_edits,
)

#: The fields of the recipes of Transformer Engine 2.20 (`common/recipe/__init__.py`), without those that all have.
_FIELDS = {
    "DelayedScaling": {"margin", "amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo", "reduce_amax"},
    "Float8CurrentScaling": {"use_power_2_scales"},
    "MXFP8BlockScaling": {"margin", "enable_2d_quantization"},
    "Float8BlockScaling": {"use_f32_scales", "x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"},
    "NVFP4BlockScaling": {"disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "fp4_format"},
}
#: Fields of Transformer Engine 1.x that version 2.0 removed, or 2.2 (`interval`).
_REMOVED = {"interval", "override_linear_precision"}
_KNOWN = set[str]().union(*_FIELDS.values()) | _REMOVED


class RemovedRecipeArgument(Rule):
    """An argument of an FP8 recipe that Transformer Engine ignores without a warning.

    ## What it does
    Reports `override_linear_precision=`, which Transformer Engine 2.0 removed, and `interval=`, which 2.2 removed and
    versions before it do not use, on its recipes and on accelerate's `TERecipeKwargs` and `FP8RecipeKwargs`; and a
    setting that only another recipe has, such as `amax_history_len=` on `Float8CurrentScaling`.

    ## Why is this bad
    The recipes are pydantic dataclasses, which ignore unknown arguments: no error, no warning (2.0 and 2.1 still warn
    about `interval`). With `override_linear_precision=(False, False, True)` the weight gradients are meant to be
    computed in high precision; since 2.0 they are computed in FP8 all the same. Tried with the recipes of 2.20.

    ## Fix safety
    Safe: the argument has no effect, so it is removed. Its purpose has to be achieved in another way.

    ## Known limits
    Not reported with the value that is in force anyway (`interval=1`, or a setting whose value is not in the code), nor
    if the project requires a Transformer Engine older than 2.0, or the code can only run with one: it
    calls a function, or passes an argument to a layer, that was removed before. Arguments that no known recipe ever had
    are not checked (a newer version may have them), nor arguments from `**kwargs`, nor a recipe under a condition if no
    script, config or text of the project mentions FP8: nothing switches it on.
    """

    code, name = "MPG407", "removed-recipe-argument"
    severity = "error"
    in_tests = True
    message = "`{argument}=` has no effect: `{recipe}` ignores it without a warning"
    help = "remove it; Transformer Engine 2.0 and later do not read it"
    versions = {"transformer_engine": ">=2.0"}
    triggers = (
        any_of(b"Scaling(", b"RecipeKwargs(", b"Scaling as", b"RecipeKwargs as"),
        any_of(*(name.encode() for name in sorted(_KNOWN - {"margin"})), b"margin="),
    )
    examples = (
        Bad(
            """\
from transformer_engine.common.recipe import DelayedScaling, Format

recipe = DelayedScaling(margin=0, interval=4, fp8_format=Format.HYBRID)  # !
last = DelayedScaling(
    margin=0,  # keep
    override_linear_precision=(False, False, True),  # !
)
""",
            fixed="""\
from transformer_engine.common.recipe import DelayedScaling, Format

recipe = DelayedScaling(margin=0, fp8_format=Format.HYBRID)
last = DelayedScaling(
    margin=0,
)
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        found = []
        for event in (*facts.events("fp8_recipe"), *facts.events("fp8_handler")):
            recipe = facts.called_path(event.call).rsplit(".", 1)[-1]
            dropped = _REMOVED if recipe in library_names.FP8_HANDLERS else _KNOWN - _FIELDS.get(recipe, _KNOWN)
            if recipe == "AORecipeKwargs":
                continue
            found += [
                (event.call, recipe, name, value) for name, value in event.call.keywords.items() if name in dropped
            ]
        for call, recipe, name, value in found:
            if fp8_facts.is_never_switched_on(call, facts) or _is_default(name, value, call, facts):
                continue
            keyword = next(arg.keyword for arg in call.node.args if arg.value is value)
            first = facts.span(keyword, call)[0] if keyword is not None else call.span[0]
            fix = Fix("Remove the argument", "safe", (python_edits.without_argument(call, value),))
            yield self.at((first, facts.span(value, call)[1]), argument=name, recipe=recipe, fix=fix)


def _is_default(name: str, value: cst.BaseExpression, call: Call, facts: Facts) -> bool:
    """True if an argument asks for what happens anyway: `interval=1`, an update in each step."""
    if name == "interval":  # a setting of a program is 1 as a rule
        given = facts.evaluate(value, call)
        return not any(isinstance(each.atom, Constant) and each.atom.value != 1 for each in given)
    if name == "override_linear_precision" and isinstance(value, cst.Tuple):
        return all(constant(element.value) == (False,) for element in value.elements)
    return False
