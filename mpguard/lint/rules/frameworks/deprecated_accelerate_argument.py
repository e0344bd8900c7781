from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Binding,
    Call,
    Diagnostic,
    Edit,
    Facts,
    Fix,
    Rule,
    Use,
    any_of,
    constant,
    python_edits,
)

#: Parents in which the new expression needs no parentheses.
_NO_PARENTHESES = (cst.If, cst.Arg, cst.Assign, cst.BooleanOperation, cst.UnaryOperation, cst.Return, cst.IfExp)


class DeprecatedAccelerateArgument(Rule):
    """Removed or deprecated names of accelerate: `Accelerator(fp16=...)`, `use_fp16`, `FP8RecipeKwargs`.

    ## What it does
    Reports the argument `fp16=` of `Accelerator`, the attribute `use_fp16` of an Accelerator or its state, and
    `FP8RecipeKwargs`.

    ## Why is this bad
    In accelerate 1.15 `Accelerator(fp16=True)` raises a TypeError and `accelerator.use_fp16` an AttributeError.
    `FP8RecipeKwargs` warns, and will be removed in 2.0.

    ## Fix safety
    Safe: `mixed_precision="fp16"`, `accelerator.mixed_precision == "fp16"`, and `TERecipeKwargs` or `MSAMPRecipeKwargs`
    according to the given backend. `FP8RecipeKwargs` has a fix only if the launch configs of the code do not use
    DeepSpeed: accelerate 1.15 reads no other recipe there (it passes only `fp8_recipe_handler` to the engine). There is
    no fix either if no backend is given.

    ## Known limits
    An Accelerator that is created in another file is not recognised; `use_fp16` of other objects is not reported.
    Nothing is reported if the project requires an accelerate older than 1.0.
    """

    code, name = "MPG513", "deprecated-accelerate-argument"
    severity = "warning"
    in_tests = True
    message = "{what}"
    versions = {"accelerate": ">=1.0"}
    triggers = (any_of(b"FP8RecipeKwargs", b"use_fp16", b"fp16="), any_of(b"accelerate"))
    examples = (
        Bad(
            """\
from accelerate import Accelerator

accelerator = Accelerator(fp16=True)  # !
if accelerator.use_fp16:  # !
    print("half")
""",
            fixed="""\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
if accelerator.mixed_precision == "fp16":
    print("half")
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for made in facts.events("accelerator"):
            given = made.call.keywords.get("fp16")
            if given is not None and facts.called_path(made.call).startswith("accelerate."):
                what = "`Accelerator` has no argument `fp16`: a TypeError in accelerate 1.15"
                yield self.at(
                    facts.span(given, made.call),
                    what=what,
                    help='pass `mixed_precision="fp16"`',
                    severity="error",
                    fix=self._argument_fix(made.call, given, facts),
                )
        recipes = {binding.key for binding in self._imports(facts)}
        for scope in facts.scopes:
            for uses in scope.uses.values():
                for use in uses:
                    if use.path.endswith(".use_fp16"):
                        yield from self._attribute(use, facts)
                    elif use.path in recipes or use.path.endswith(".FP8RecipeKwargs"):
                        yield from self._recipe(use, facts)

    # -- Accelerator(fp16=...) ----------------------------------------------------------------------

    def _argument_fix(self, call: Call, given: cst.BaseExpression, facts: Facts) -> Fix | None:
        known = constant(given)
        if known in ((False,), (None,)):
            return Fix("Remove the argument", "safe", (python_edits.without_argument(call, given),))
        if "mixed_precision" in call.keywords or len(call.positional) > 2:
            return None
        arg = next(arg for arg in call.node.args if arg.value is given)
        text = '"fp16"' if known == (True,) else f'"fp16" if {facts.text(given, call)} else None'
        first = facts.span(arg.keyword, call)[0] if arg.keyword is not None else 0
        last = facts.outer_span(given, call)[1]
        return Fix('Pass `mixed_precision="fp16"`', "safe", (Edit(first, last, f"mixed_precision={text}"),))

    # -- accelerator.use_fp16 -----------------------------------------------------------------------

    def _attribute(self, use: Use, facts: Facts) -> Iterator[Diagnostic]:
        if not isinstance(use.node, cst.Attribute):
            return
        owner = use.node.value
        if isinstance(owner, cst.Attribute) and owner.attr.value == "state":
            owner = owner.value
        if facts.kinds(owner, use) != {"accelerator"}:
            return
        text = f'{facts.short(use.node.value)}.mixed_precision == "fp16"'
        if not isinstance(facts.parent(use.node), _NO_PARENTHESES):
            text = f"({text})"
        fix = Fix("Compare `mixed_precision`", "safe", (python_edits.replaced(use.node, use, text),))
        what = "`use_fp16` was removed: an AttributeError in accelerate 1.15"
        yield self.at(use, what=what, help='compare `mixed_precision == "fp16"`', fix=fix, severity="error")

    # -- FP8RecipeKwargs ----------------------------------------------------------------------------

    def _imports(self, facts: Facts) -> list[Binding]:
        return [
            binding
            for bindings in facts.module.bindings.values()
            for binding in bindings
            if binding.kind == "from"
            and binding.name == "FP8RecipeKwargs"
            and binding.target.split(".", 1)[0] == "accelerate"
        ]

    def _recipe(self, use: Use, facts: Facts) -> Iterator[Diagnostic]:
        paths = {getattr(each.atom, "path", "") for each in facts.evaluate(use.node, use)}
        node = facts.parent(use.node)
        if not all(path.startswith("accelerate.") for path in paths) or not isinstance(node, cst.Call):
            return
        call = facts.call_of(node)
        if call is None or call.func is not use.node:
            return
        yield self.at(
            use,
            what="`FP8RecipeKwargs` is deprecated and will be removed in accelerate 2.0",
            help="use `TERecipeKwargs`, `AORecipeKwargs` or `MSAMPRecipeKwargs`; DeepSpeed reads only the old class",
            fix=self._recipe_fix(facts),
        )

    def _recipe_fix(self, facts: Facts) -> Fix | None:
        """Return the fix that uses the class of the given backend, if all uses have the same backend."""
        configs = facts.project.configs_for(facts.path)
        imports = self._imports(facts)
        if not configs or any(config.distributed_type in (None, "DEEPSPEED") for config in configs):
            return None
        if len(imports) != 1 or imports[0].key != "FP8RecipeKwargs" or "deepspeed" in facts.file_text.lower():
            return None
        uses = [use for scope in facts.scopes for use in scope.uses.get("FP8RecipeKwargs", ())]
        calls = [facts.call_of(parent) for u in uses if (parent := facts.parent(u.node))]
        classes = {self._class(each) for each in calls}
        if len(classes) != 1 or (name := classes.pop()) is None or name in facts.module.bindings:
            return None
        edits = [Edit(*facts.span(imports[0].node, imports[0]), name)]
        for each in calls:
            if each is not None:
                edits += [
                    python_edits.replaced(each.func, each, name),
                    python_edits.without_argument(each, each.keywords["backend"]),
                ]
        return Fix(f"Use `{name}`", "safe", tuple(edits))

    def _class(self, call: Call | None) -> str | None:
        if call is None or call.starred or call.positional:
            return None
        backend = constant(call.keywords.get("backend"))
        if not backend or not isinstance(backend[0], str):
            return None
        return {"TE": "TERecipeKwargs", "MSAMP": "MSAMPRecipeKwargs"}.get(backend[0].upper())
