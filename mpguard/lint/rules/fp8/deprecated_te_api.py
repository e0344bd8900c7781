from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.edits import Edit
from mpguard.lint import imports
from mpguard.lint.facts import Facts
from mpguard.lint.rule import Bad, Diagnostic, Fix, Good, Rule, any_of
from mpguard.lint.values import Ref
from mpguard.lint.walk import Binding, Use

_MODULE = "transformer_engine.pytorch.fp8"
_NEW = {"fp8_autocast": "autocast", "fp8_model_init": "quantized_model_init"}
_KEYWORDS = {"fp8_recipe": "recipe", "fp8_group": "amax_reduction_group"}
#: The first version that has the new names for certain (they came with pull request 2256, October 2025).
_SINCE = (2, 10)


class DeprecatedTeApi(Rule):
    """A name of Transformer Engine that is deprecated and will be removed.

    ## What it does
    Reports `fp8_autocast` and `fp8_model_init` of Transformer Engine, and the module `transformer_engine.pytorch.fp8`:
    at the import that brings a name, otherwise where it is used.

    ## Why is this bad
    Each of them warns that it "will be removed in a future release" (read in 2.20). What replaces them says nothing
    of FP8, since it serves FP4 too: `autocast` with `recipe=` and `amax_reduction_group=`, `quantized_model_init`, and
    the module `transformer_engine.pytorch.quantization`.

    ## Fix safety
    Safe where the project asks for a Transformer Engine that has the new names (2.10 or newer, as pyproject.toml or a
    requirements file says), otherwise unsafe: an older one stops at the import.

    ## Known limits
    A fallback for old versions (in an `except` arm, under a condition on the version) is fine and not reported.
    There is no fix where a name is handed on, or another name of the file would clash.
    """

    code, name = "MPG406", "deprecated-te-api"
    severity = "warning"
    message = "`{old}` is deprecated and will be removed from Transformer Engine: `{new}`"
    triggers = (
        any_of(b"transformer_engine"),
        any_of(b"fp8_autocast", b"fp8_model_init", b"pytorch.fp8", b"import fp8"),
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
        Bad(
            """\
import transformer_engine.pytorch as te
from transformer_engine.pytorch import fp8_autocast, Linear  # !
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # !

def run(recipe):
    with fp8_autocast(True, fp8_recipe=recipe):
        return FP8GlobalStateManager.is_fp8_enabled()

print(te.fp8.check_fp8_support())  # !
""",
            fixed="""\
import transformer_engine.pytorch as te
from transformer_engine.pytorch import autocast, Linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

def run(recipe):
    with autocast(True, recipe=recipe):
        return FP8GlobalStateManager.is_fp8_enabled()

print(te.quantization.check_fp8_support())
""",
        ),
        Bad(
            """\
from torch import autocast
from transformer_engine.pytorch.fp8 import fp8_autocast  # !

with autocast("cuda"), fp8_autocast():
    model(x)
""",
            fixed="""\
from torch import autocast
from transformer_engine.pytorch.quantization import autocast as fp8_autocast

with autocast("cuda"), fp8_autocast():
    model(x)
""",
        ),
        Good(
            """\
import transformer_engine.pytorch as te
from intel_transformer_engine import fp8_autocast as gaudi
from ours import fp8_autocast

try:
    from transformer_engine.pytorch import quantized_model_init as init
except ImportError:
    from transformer_engine.pytorch import fp8_model_init as init

if te_version >= (2, 10):
    region = te.autocast
else:
    region = te.fp8_autocast
with te.autocast(recipe=recipe), te.quantized_model_init(), fp8_autocast(), gaudi():
    model(x)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        brought = [b for b in imports.imports(facts) if self._deprecated(b)]
        for binding in brought:
            if imports.stands_in(binding) or self._other_arm(binding) or not imports.uses(facts, binding):
                continue
            old = binding.target if binding.target == _MODULE else f"{binding.target}.{binding.name}"
            old = f"{old}.{binding.name}" if binding.name in _NEW and old == _MODULE else old
            span = facts.span(binding.statement or binding.node, binding)
            yield self.at(span, old=old, new=_modern(old), fix=self._fix_import(binding, facts))
        keys = {id(binding.node) for binding in brought}
        for scope in facts.walker.scopes:
            for root, uses in scope.uses.items():
                if any(
                    id(binding.node) in keys
                    for binding in (*scope.bindings.get(root, ()), *facts.module.bindings.get(root, ()))
                ):
                    continue
                for use in uses:
                    old = self._old(use, facts)
                    if old and not imports.stands_in(use):
                        yield self.at(use, old=old, new=_modern(old), fix=self._fix_use(use, facts))

    def _deprecated(self, binding: Binding) -> bool:
        if binding.kind == "from" and binding.target.startswith("transformer_engine."):
            return binding.name in _NEW or _MODULE in (binding.target, f"{binding.target}.{binding.name}")
        return binding.kind == "import" and binding.target == _MODULE

    def _other_arm(self, binding: Binding) -> bool:
        """Whether the same name also comes from elsewhere: an arm for another version."""
        return any(
            other is not binding
            and other.guard != binding.guard
            and other.kind == "from"
            and not self._deprecated(other)
            for other in binding.scope.bindings.get(binding.key, ())
        )

    def _old(self, use: Use, facts: Facts) -> str:
        """The deprecated name that a dotted name spells out, up to where it does."""
        last = use.path.rsplit(".", 1)[-1]
        if "." not in use.path or (last not in _NEW and ".fp8." not in f"{use.path}."):
            return ""
        for each in facts.values.lookup(use.path, use.scope, use.order):
            path = each.atom.path if isinstance(each.atom, Ref) else ""
            if path.startswith("transformer_engine.") and (last in _NEW or path.startswith(_MODULE + ".")):
                return path
        return ""

    # -- fixes --------------------------------------------------------------------------------------

    def _made(self, edits: list[Edit], facts: Facts) -> Fix:
        safe = facts.project.required(facts.path, "transformer_engine").since(_SINCE)
        return Fix("Use the new name", "safe" if safe else "unsafe", tuple(edits))

    def _fix_use(self, use: Use, facts: Facts) -> Fix | None:
        edits = self._keywords(use, facts)
        if edits is None:
            return None
        node = use.node
        while isinstance(node, cst.Attribute):
            name = node.attr.value
            if name in _NEW or (name == "fp8" and facts.short(node.value).rsplit(".", 1)[-1] not in ("", "fp8")):
                edits.append(Edit(*use.chunk.span(node.attr), _NEW.get(name, "quantization")))
            node = node.value
        return self._made(edits, facts)

    def _keywords(self, use: Use, facts: Facts) -> list[Edit] | None:
        """The edits of the keywords of a call of a deprecated function; None where it is not called but handed on."""
        parent = facts.walker.parents.get(use.node)
        if use.path.rsplit(".", 1)[-1] == "fp8_model_init" or (
            ".fp8." in f".{use.path}" and "autocast" not in use.path
        ):
            return []
        if not isinstance(parent, cst.Call) or parent.func is not use.node or any(a.star == "**" for a in parent.args):
            return None
        return [
            Edit(*use.chunk.span(arg.keyword), _KEYWORDS[arg.keyword.value])
            for arg in parent.args
            if arg.keyword is not None and arg.keyword.value in _KEYWORDS
        ]

    def _fix_import(self, binding: Binding, facts: Facts) -> Fix | None:
        statement = binding.statement
        if (
            not isinstance(statement, cst.ImportFrom)
            or statement.module is None
            or isinstance(statement.names, cst.ImportStar)
        ):
            return None
        alias = next(
            (a for a in statement.names if isinstance(a.name, cst.Name) and a.name.value == binding.name), None
        )
        if alias is None or (len(statement.names) > 1 and binding.target == _MODULE) or facts.exported(binding.key):
            return None
        edits: list[Edit] = []
        if binding.target == _MODULE:
            edits.append(Edit(*binding.chunk.span(statement.module), _MODULE.replace(".fp8", ".quantization")))
        if binding.name in _NEW:
            new = _NEW[binding.name]
            clash = any(new in scope.bindings or new in scope.uses for scope in facts.walker.scopes)
            renamed = new if alias.asname is not None or not clash else f"{new} as {binding.name}"
            edits.append(Edit(*binding.chunk.span(alias.name), renamed))
            for use in imports.uses(facts, binding):
                parent = facts.walker.parents.get(use.node)
                called = isinstance(parent, cst.Call) and parent.func is use.node
                if binding.name == "fp8_autocast" and (not called or any(a.star == "**" for a in parent.args)):  # type: ignore[union-attr]
                    return None
                if called and isinstance(parent, cst.Call):
                    edits += [
                        Edit(*use.chunk.span(arg.keyword), _KEYWORDS[arg.keyword.value])
                        for arg in parent.args
                        if arg.keyword is not None and arg.keyword.value in _KEYWORDS
                    ]
                if renamed == new and alias.asname is None:
                    edits.append(Edit(*use.chunk.span(use.node), new))
        elif binding.target != _MODULE:
            return None  # the module as a whole: `from transformer_engine.pytorch import fp8`
        return self._made(edits, facts)


def _modern(old: str) -> str:
    new = f"{old}.".replace(".fp8.", ".quantization.")[:-1]
    head, _, last = new.rpartition(".")
    return f"{head}.{_NEW.get(last, last)}"
