"""FP8 in one file: the recipe of a region, torchao's config of a conversion, the layers that run in FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program.dtypes import AnyDtype, PossibleDtypes, only_dtype
from mpguard.lint.facts.program.lattice import Class, Constant, Object, Ref
from mpguard.lint.facts.program.mentions import mentions
from mpguard.lint.facts.syntax.nodes import constant
from mpguard.lint.facts.syntax.path_condition import PathCondition, compatible
from mpguard.lint.facts.syntax.records import Call, Record, Scope, With

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.regions import Region
    from mpguard.lint.facts.domain.view import DomainView

TE = "transformer_engine.pytorch."
#: The positions of the sizes among the arguments of a layer's constructor.
SIZES = {
    "Linear": {"in_features": 0, "out_features": 1},
    "LayerNormLinear": {"in_features": 0, "out_features": 1},
    "GroupedLinear": {"in_features": 1, "out_features": 2},
    "LayerNormMLP": {"hidden_size": 0, "ffn_hidden_size": 1},
    "TransformerLayer": {"hidden_size": 0, "ffn_hidden_size": 1},
    "MultiheadAttention": {"hidden_size": 0},
}
_CONTAINERS = frozenset({"Sequential", "ModuleList"})
_MAX_DEPTH = 6
_MAX_CALLERS = 12


def is_never_switched_on(record: Record, facts: DomainView) -> bool:
    """True for FP8 under a condition in a project of which no script, config or text mentions FP8."""
    return bool(record.guard) and not facts.project.asks_for(facts.path, "fp8")


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a library, created by `made`; `call` runs it in `region`, if these are known."""

    made: Call
    path: str
    facts: DomainView
    call: Call | None = None
    region: Region | None = None

    def sizes(self) -> Iterator[tuple[cst.BaseExpression, int]]:
        """Yield the sizes that are literals, or names of literals: the argument and its value."""
        for name, place in SIZES.get(self.path.rsplit(".", 1)[-1], {}).items():
            given = self.made.argument(place, name)
            value = number(self.facts, given, self.made) if given is not None else None
            if given is not None and value is not None:
                yield given, value


def number(facts: DomainView, node: cst.CSTNode, at: Record) -> int | None:
    """Return the integer that an expression definitely is, or None."""
    found = facts.scalars.number(node, at)
    return int(found.value) if found is not None and found.value.is_integer() else None


def is_true(facts: DomainView, node: cst.CSTNode | None, at: Record) -> bool:
    """True if an expression is definitely True."""
    return node is not None and all(each.atom == Constant(True) for each in facts.evaluate(node, at))


# -- Transformer Engine -----------------------------------------------------------------------------


def recipe_of(region: Region) -> set[str]:
    """Return the class names of the recipes that an FP8 region may have; "" for an unknown or the default one."""
    call = region.call
    given = call.argument(2, "recipe", "fp8_recipe") if call is not None else None
    if call is None or given is None:
        return {""}
    found = set()
    for each in region.facts.evaluate(given, call):
        is_recipe = isinstance(each.atom, Object) and each.atom.kind == "fp8_recipe"
        found.add(each.atom.path.rsplit(".", 1)[-1] if is_recipe and isinstance(each.atom, Object) else "")
    return found


def fp8_region(facts: DomainView, record: Record) -> Region | None:
    """Return the FP8 region around a record in its own function; None if there is none or it is disabled."""
    found: Region | None = None
    for region in facts.regions(record):
        if region.kind == "fp8_autocast":
            found = region if region.guard.possible and compatible(region.guard, record.guard) else None
    return found


def entered(facts: DomainView) -> Iterator[tuple[With, Region]]:
    """Yield each `with` item of the file that enters FP8, with its region."""
    for scope in facts.index.scopes:
        for item in scope.withs:
            for region in facts.regions_index.entered(item):
                if region.kind == "fp8_autocast" and region.guard.possible:
                    yield item, region


def fp8_around(facts: DomainView, record: Record, depth: int = _MAX_DEPTH) -> Region | None:
    """Return the FP8 region around a record: that of its function, otherwise that of one of its callers."""
    own = fp8_region(facts, record)
    if own is not None or depth <= 0 or any(each.kind in ("fp8_autocast", "") for each in facts.regions(record)):
        return own
    callers = facts.callers(record.scope)[:_MAX_CALLERS]
    regions = (fp8_around(facts.of(call), call, depth - 1) for call in callers if compatible(call.guard, record.guard))
    return next((region for region in regions if region is not None), None)


def layers_in_fp8(facts: DomainView) -> list[Layer]:
    """Return the layers of Transformer Engine that the file calls in an FP8 region, which a caller may have entered."""
    found: list[Layer] = []
    for scope in facts.index.scopes:
        for call in scope.calls:
            layers = [
                each for each in made_layers(facts, call.func, call, TE) if compatible(each.made.guard, call.guard)
            ]
            region = fp8_around(facts, call) if layers else None
            if region is not None:
                found += [dataclasses.replace(layer, call=call, region=region) for layer in layers]
    unique = {(layer.made, layer.path): layer for layer in reversed(found)}
    return sorted(unique.values(), key=lambda layer: layer.made.order)


# -- layers -----------------------------------------------------------------------------------------


def made_layers(
    facts: DomainView, node: cst.CSTNode, at: Record, library: str, depth: int = _MAX_DEPTH
) -> Iterator[Layer]:
    """Yield the layers of a library that an expression is, or contains in a `Sequential`."""
    for each in facts.evaluate(node, at):
        atom = each.atom
        if not isinstance(atom, Object) or atom.call is None or depth <= 0:
            continue
        last = atom.path.rsplit(".", 1)[-1]
        if atom.path.startswith(library) and last in SIZES:
            yield Layer(atom.call, atom.path, facts.of(atom.call))
        elif last in _CONTAINERS:
            for argument in atom.call.positional:
                elements = argument.elements if isinstance(argument, (cst.List, cst.Tuple)) else ()
                for inner in [e.value for e in elements] or [argument]:
                    yield from made_layers(facts, inner, atom.call, library, depth - 1)


def layers_of(
    facts: DomainView, node: cst.CSTNode, at: Record, library: str, depth: int = _MAX_DEPTH
) -> Iterator[Layer]:
    """Yield all layers of a library in a model, as far as its classes are in the file."""
    yield from made_layers(facts, node, at, library, depth)
    pending = [each.atom.cls for each in facts.evaluate(node, at) if isinstance(each.atom, Object)]
    seen: set[Scope] = set()
    while pending:
        cls = pending.pop()
        if cls is None or cls in seen or cls not in facts.index.scopes or len(seen) > 40:
            continue
        seen.add(cls)
        for scope in cls.descendants():
            for call in scope.calls:
                yield from made_layers(facts, call.node, call, library, 1)
                pending += [e.atom.scope for e in facts.evaluate(call.func, call) if isinstance(e.atom, Class)]


# -- torchao ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Float8Config:
    """torchao's config of a conversion: the calls that create it, the outermost first; `name` of its recipe, or ""."""

    calls: tuple[Call, ...]
    name: str
    facts: DomainView
    guard: PathCondition

    def setting(self, name: str) -> cst.BaseExpression | None:
        """Return the value of a field in the outermost call that sets it, or None."""
        return next((call.keywords[name] for call in self.calls if name in call.keywords), None)

    def on(self, name: str) -> bool:
        """True if a field is definitely True."""
        for call in self.calls:
            if name in call.keywords:
                return is_true(self.facts, call.keywords[name], call)
        return False

    @property
    def whole(self) -> bool:
        """True if all of its fields are visible."""
        return not any(call.starred for call in self.calls)


def float8_configs(
    facts: DomainView, node: cst.CSTNode, at: Record, depth: int = _MAX_DEPTH
) -> list[Float8Config | None]:
    """Return the configs that an expression may be; None stands for an unknown one."""
    found: list[Float8Config | None] = []
    if isinstance(node, cst.Call) and node in facts.index.call_of and depth > 0:
        call = facts.index.call_of[node]
        if facts.called_path(call) == "dataclasses.replace" and call.positional:
            for inner in float8_configs(facts, call.positional[0], call, depth - 1):
                found.append(dataclasses.replace(inner, calls=(call, *inner.calls)) if inner is not None else None)
            return found
    for each in facts.evaluate(node, at):
        atom = each.atom
        if isinstance(atom, Object) and atom.kind == "float8_config" and atom.call is not None:
            home = facts.of(atom.call)
            found.append(Float8Config((atom.call,), _recipe_name(home, atom), home, each.guard))
        elif depth > 0 and isinstance(node, cst.Name):
            bindings = facts.values.reaching(node.value, at.scope, at.order, at.guard)
            values = [b for b in bindings if b.kind == "assign" and isinstance(b.value, cst.Call)]
            if not values or len(values) != len(bindings):
                return [None]
            return [c for b in values if b.value for c in float8_configs(facts, b.value, b, depth - 1)]
        else:
            found.append(None)
    return found


def _recipe_name(facts: DomainView, atom: Object) -> str:
    call = atom.call
    assert call is not None
    if not atom.path.endswith("from_recipe_name"):
        weight = call.keywords.get("cast_config_weight")
        if weight is None:
            return "tensorwise"
        casts = [each.atom for each in facts.evaluate(weight, call)]
        if len(casts) != 1 or not isinstance(casts[0], Object) or casts[0].call is None:
            return ""
        given = casts[0].call.argument(1, "scaling_granularity")
        if given is None:
            return "tensorwise"
        path = {each.atom.path if isinstance(each.atom, Ref) else "" for each in facts.evaluate(given, casts[0].call)}
        last = path.pop().rsplit(".", 1)[-1] if len(path) == 1 else ""
        return {"TENSORWISE": "tensorwise", "AXISWISE": "rowwise"}.get(last, "")
    given = call.argument(0, "recipe_name")
    atoms = [each.atom for each in facts.evaluate(given, call)] if given is not None else []
    if len(atoms) != 1:
        return ""
    if isinstance(atoms[0], Constant):
        return atoms[0].value if isinstance(atoms[0].value, str) else ""
    return atoms[0].path.rsplit(".", 1)[-1].lower() if isinstance(atoms[0], Ref) else ""


def emulated(facts: DomainView, call: Call) -> bool:
    """True if a conversion only emulates FP8, as on a CPU."""
    given = call.argument(None, "config")
    configs = float8_configs(facts, given, call) if given is not None else []
    if any(config is not None and config.on("emulate") for config in configs):
        return True
    records = facts.flow.backward(given, call, depth=2) if given is not None else []
    return any(isinstance(record, Call) and constant(record.argument(None, "emulate")) == (True,) for record in records)


# -- sharding ---------------------------------------------------------------------------------------


def may_shard(facts: DomainView, at: Record, model: Collection[Call] = frozenset()) -> bool:
    """True if something in the code connected with a record may apply FSDP2.

    By its name: a plugin of accelerate, or a helper that shards. An import alone applies nothing. model: the calls that
    create the model in question; what shards another one does not count.
    """
    return any(mentions(facts, scope, _shards, model) for scope in facts.reachable(at.scope))


def _shards(name: str) -> bool:
    name = (
        name.lower()
        .replace("enable_fsdp_float8_all_gather", "")
        .replace("precompute_float8_dynamic_scale_for_fsdp", "")
    )
    return any(word in name for word in ("fsdp", "shard", "paralleliz", "distributed_strategy"))


def only_float8(dtypes: PossibleDtypes) -> AnyDtype | None:
    """Return the dtype if it is the same FP8 format under every path condition, else None."""
    dtype = only_dtype(dtypes)
    return dtype if dtype is not None and dtype.torch_name.startswith("float8") else None


__all__ = [
    "SIZES",
    "TE",
    "Float8Config",
    "Layer",
    "emulated",
    "entered",
    "float8_configs",
    "fp8_region",
    "is_true",
    "layers_in_fp8",
    "layers_of",
    "made_layers",
    "may_shard",
    "number",
    "only_float8",
    "recipe_of",
]
