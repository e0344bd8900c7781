from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Binding,
    Diagnostic,
    Edit,
    Facts,
    Fix,
    Ref,
    Rule,
    Use,
    any_of,
    constant,
    dotted,
    fp8_facts,
    imports,
    lazy_pattern,
    python_edits,
)

_MODULE = "transformer_engine.pytorch.fp8"
#: Modules that re-export the deprecated functions.
_HOMES = ("transformer_engine.pytorch", "transformer_engine.pytorch.quantization")
_NEW = {"fp8_autocast": "autocast", "fp8_model_init": "quantized_model_init"}
_KEYWORDS = {"fp8_recipe": "recipe", "fp8_group": "amax_reduction_group"}
#: Names that the deprecated module re-exports from the new one (read in 2.20). Its other old names are gone from both.
_REEXPORTED = lazy_pattern(
    r"fp8_autocast$|fp8_model_init$|FP8GlobalStateManager$|\w*RecipeState$|split_and_copy$|check_\w+_support$"
    r"|get_(?:default_fp8_recipe|fp8_torch_dtype|fp8_te_dtype|fp4_te_dtype|fp8_max)$|_(?:update_amax_history"
    r"|default_get_amax_and_update_history|default_sf_compute|compute_amax_and_update_history|compute_scaling_factor"
    r"|amax_and_scale_update)$"
)
#: The first version that is certain to have the new names (added by pull request 2256, October 2025).
_SINCE = (2, 10)


class DeprecatedTeApi(Rule):
    """A name of Transformer Engine that is deprecated and will be removed.

    ## What it does
    Reports `fp8_autocast` and `fp8_model_init` of Transformer Engine, and the module `transformer_engine.pytorch.fp8`:
    at the import of the name, otherwise where it is used.

    ## Why is this bad
    Each of them warns that it "will be removed in a future release" (read in 2.20). The replacements do not mention FP8
    in their names, since they serve FP4 too: `autocast` with `recipe=` and `amax_reduction_group=`,
    `quantized_model_init`, and the module `transformer_engine.pytorch.quantization`.

    ## Fix safety
    Safe if the project requires a Transformer Engine that has the new names (2.10 or newer, in pyproject.toml or a
    requirements file), otherwise unsafe: an older version fails at the import.

    ## Known limits
    Not reported if the project requires a Transformer Engine older than 2.10, or the code can only run with one: it
    calls a function, or passes an argument, that was removed before. A fallback for old versions (in an `except` arm,
    under a condition on the version, after `getattr(te, "autocast", None)`) is not reported either, nor a call under a
    condition if no script, config or text of the project mentions FP8: nothing switches it on. There is no fix if a
    name is passed on as a value, if the new module has no such name, or if another name of the file would clash.
    """

    code, name = "MPG406", "deprecated-te-api"
    severity = "warning"
    in_tests = True
    message = "`{old}` is deprecated and will be removed from Transformer Engine; use `{new}`"
    help = "rename it; the names of its arguments changed too"
    versions = {"transformer_engine": ">=2.10"}
    triggers = (
        any_of(b"transformer_engine"),
        any_of(b"fp8_autocast", b"fp8_model_init", b".fp8", b"import fp8"),
    )
    examples = (
        Bad(
            """\
import transformer_engine.pytorch as te

with te.fp8_model_init(enabled=True):  # !
    model = te.Linear(1024, 1024)
with te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group):  # !
    model(x)
""",
            fixed="""\
import transformer_engine.pytorch as te

with te.quantized_model_init(enabled=True):
    model = te.Linear(1024, 1024)
with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group):
    model(x)
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        imported = [b for b in imports.imports(facts) if self._deprecated(b)]
        for statement, bindings in imports.by_statement(imported).items():
            found = [
                b for b in bindings if not imports.stands_in(b) and not self._other_arm(b) and imports.uses(facts, b)
            ]
            if found:
                first = found[0]
                module = first.target == _MODULE or first.name == "fp8"
                old = _MODULE if module else f"{first.target}.{first.name}"
                fix = self._fix_import(statement, bindings, facts)
                yield self.at(facts.span(statement, first), old=old, new=_replacement(old), fix=fix)
        roots = {id(binding) for binding in imported}
        for scope in facts.scopes:
            for root, uses in scope.uses.items():
                bound = (*scope.bindings.get(root, ()), *facts.module.bindings.get(root, ()))
                if any(id(binding) in roots for binding in bound):
                    continue  # reported at the import
                for use in uses:
                    old = self._deprecated_name(use, facts)
                    if not old or imports.stands_in(use) or self._follows_getattr(use, facts):
                        continue
                    if fp8_facts.is_never_switched_on(use, facts):
                        continue
                    fix = self._fix_use(use, facts)
                    if old.startswith(f"{_MODULE}.") and not _REEXPORTED.match(old.split(".")[3]):
                        old, fix = _MODULE, None
                    yield self.at(use, old=old, new=_replacement(old), fix=fix)

    def _deprecated(self, binding: Binding) -> bool:
        if binding.kind == "from" and binding.target in (_MODULE, *_HOMES):
            return binding.name in _NEW or _MODULE in (binding.target, f"{binding.target}.{binding.name}")
        return binding.kind == "import" and binding.target == _MODULE

    def _other_arm(self, binding: Binding) -> bool:
        """True if another arm imports the same name from a version of Transformer Engine that has the new one."""
        return any(
            other is not binding
            and other.guard != binding.guard
            and other.target.startswith("transformer_engine.")
            and not self._deprecated(other)
            for other in binding.scope.bindings.get(binding.key, ())
        )

    def _follows_getattr(self, use: Use, facts: Facts) -> bool:
        """True if a name is bound to the old function where it is not the new one: `getattr(te, "autocast", None)`."""
        new = _NEW.get(use.path.rsplit(".", 1)[-1])
        others = [b for bindings in use.scope.bindings.values() for b in bindings if b.value is use.node]
        calls = (facts.call_of(b.value) for other in others for b in use.scope.bindings[other.key])
        return any(
            call is not None and call.path == "getattr" and (new,) in map(constant, call.positional) for call in calls
        )

    def _deprecated_name(self, use: Use, facts: Facts) -> str:
        """Return the full name of the deprecated function or module that a dotted name refers to."""
        last = use.path.rsplit(".", 1)[-1]
        if "." not in use.path or (last not in _NEW and ".fp8." not in f"{use.path}."):
            return ""
        for each in facts.resolve(use.path, use.scope, use.order):
            path = each.atom.path if isinstance(each.atom, Ref) else ""
            if path.startswith("transformer_engine.pytorch.") and (last in _NEW or path.startswith(_MODULE + ".")):
                return path
        return ""

    # -- fixes --------------------------------------------------------------------------------------

    def _new_name_fix(self, edits: list[Edit], facts: Facts) -> Fix:
        safe = facts.required("transformer_engine").since(_SINCE)
        return Fix("Use the new name", "safe" if safe else "unsafe", tuple(edits))

    def _fix_use(self, use: Use, facts: Facts) -> Fix | None:
        edits = self._keywords(use, facts)
        if edits is None:
            return None
        node = use.node
        while isinstance(node, cst.Attribute):
            name = node.attr.value
            if name in _NEW or (name == "fp8" and facts.short(node.value).rsplit(".", 1)[-1] not in ("", "fp8")):
                edits.append(python_edits.replaced(node.attr, use, _NEW.get(name, "quantization")))
            node = node.value
        return self._new_name_fix(edits, facts)

    def _keywords(self, use: Use, facts: Facts) -> list[Edit] | None:
        """Return the edits of the keywords of an `fp8_autocast` call; None if it is passed on instead of called."""
        last = use.path.rsplit(".", 1)[-1]
        if "." in use.path and last != "fp8_autocast":
            return []
        parent = facts.parent(use.node)
        if not isinstance(parent, cst.Call) or parent.func is not use.node:
            return None
        edits = [
            python_edits.replaced(arg.keyword, use, _KEYWORDS[arg.keyword.value])
            for arg in parent.args
            if arg.keyword is not None and arg.keyword.value in _KEYWORDS
        ]
        for spread in (arg.value for arg in parent.args if arg.star == "**"):
            keys = self._keys(spread, use, facts)
            if keys is None:
                return None
            edits += keys
        return edits

    def _keys(self, spread: cst.BaseExpression, use: Use, facts: Facts) -> list[Edit] | None:
        """Return the edits of the keys of `**options`, if it is one dict that only this call takes; else None."""
        key = dotted(spread)
        bindings = facts.bindings(key, use) if key else []
        made = bindings[0] if len(bindings) == 1 and bindings[0].kind == "assign" else None
        uses = [each for scope in facts.scopes for each in scope.uses.get(key.split(".", 1)[0], ())]
        if made is None or len(uses) != 1 or any(b.kind == "item" for b in made.scope.bindings.get(key, ())):
            return None
        if isinstance(made.value, cst.Dict):
            found = [
                (each.key, constant(each.key)) for each in made.value.elements if isinstance(each, cst.DictElement)
            ]
            if len(found) != len(made.value.elements) or any(name is None for _, name in found):
                return None
            return [
                python_edits.replaced(node, made, f'"{_KEYWORDS[str(name[0])]}"')
                for node, name in found
                if name is not None and name[0] in _KEYWORDS
            ]
        call = facts.call_of(made.value)
        if call is None or call.path != "dict" or call.starred or call.positional:
            return None
        return [
            python_edits.replaced(arg.keyword, call, _KEYWORDS[arg.keyword.value])
            for arg in call.node.args
            if arg.keyword is not None and arg.keyword.value in _KEYWORDS
        ]

    def _fix_import(self, statement: cst.CSTNode, bindings: list[Binding], facts: Facts) -> Fix | None:
        if not isinstance(statement, cst.ImportFrom) or statement.module is None:
            return None
        first = bindings[0]
        edits: list[Edit] = []
        if first.target == _MODULE:
            edits.append(python_edits.replaced(statement.module, first, _MODULE.replace(".fp8", ".quantization")))
        for binding in bindings:
            if first.target == _MODULE and not _REEXPORTED.match(binding.name):
                return None
            if binding.name in _NEW:
                made = self._renamed(statement, binding, facts)
                if made is None or facts.exported(binding.key):
                    return None
                edits += made
            elif first.target != _MODULE:
                return None  # the whole module: `from transformer_engine.pytorch import fp8`
        return self._new_name_fix(edits, facts)

    def _renamed(self, statement: cst.ImportFrom, binding: Binding, facts: Facts) -> list[Edit] | None:
        """Return the edits that import the new function, under the old name if the new one is already used."""
        names = () if isinstance(statement.names, cst.ImportStar) else statement.names
        alias = next((a for a in names if isinstance(a.name, cst.Name) and a.name.value == binding.name), None)
        if alias is None:
            return None
        new = _NEW[binding.name]
        clash = any(new in scope.bindings or new in scope.uses for scope in facts.scopes)
        keep = alias.asname is not None or clash
        imported = f"{new} as {binding.name}" if clash and not alias.asname else new
        edits = [python_edits.replaced(alias.name, binding, imported)]
        for use in imports.uses(facts, binding):
            keywords = self._keywords(use, facts) if binding.name == "fp8_autocast" else []
            if keywords is None:
                return None
            edits += keywords if keep else [python_edits.replaced(use.node, use, new), *keywords]
        return edits


def _replacement(old: str) -> str:
    new = f"{old}.".replace(".fp8.", ".quantization.")[:-1]
    head, _, last = new.rpartition(".")
    return f"{head}.{_NEW.get(last, last)}"
