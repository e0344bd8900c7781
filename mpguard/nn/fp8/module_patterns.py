"""What is wrong with the patterns of `fp8_modules` for a model; used by the converter and the proof."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch

from mpguard.core.errors import near
from mpguard.nn.fp8 import filters
from mpguard.policy.fp8_modules import NONE, ModuleRecipe, entry_for
from mpguard.policy.policy import Policy

#: The recipe of experts in FP8, whatever that of the policy: they have no other one.
OF_EXPERTS = "rowwise"

#: How many names a message shows.
_SHOWN = 3

#: `fp8_modules` of a policy -> its patterns that have matched a layer of a model that this process has converted. A
#: pattern may be for another model than the one that is examined: a generator and a discriminator share a policy.
_matched: dict[tuple[ModuleRecipe, ...], set[str]] = {}


def note_matches(modules: filters.Named, policy: Policy) -> None:
    """Note which patterns of `fp8_modules` match a layer of a model that is converted."""
    names = [name for name, module in modules if filters.is_linear(module) or filters.is_experts(module)]
    found = {each.pattern for each in policy.fp8_modules if any(fnmatch(name, each.pattern) for name in names)}
    _matched.setdefault(policy.fp8_modules, set()).update(found)


def for_other_models(policy: Policy) -> frozenset[str]:
    """Return the patterns of `fp8_modules` that have matched a layer of a model of this process."""
    return frozenset(_matched.get(policy.fp8_modules, ()))


def wrong_patterns(
    modules: filters.Named, policy: Policy, reasons: Mapping[int, str], others: Collection[str] = ()
) -> list[str]:
    """Return what is wrong with entries of `fp8_modules`, each as a text that names the pattern; empty if nothing is.

    An entry is wrong if it matches no layer, if earlier ones decide all layers that it matches, if none of its layers
    can have its recipe, or if it gives experts alone another recipe than theirs. reasons: those of `filters.reasons`,
    and of experts. others: patterns that may match none here.
    """
    if not policy.fp8_modules:
        return []
    names: dict[int, list[str]] = {}
    for name, module in modules:
        if id(module) in reasons:
            names.setdefault(id(module), []).append(name)
    decided = {key: entry_for(own, policy.fp8_modules) for key, own in names.items()}
    of_experts = {id(module) for _, module in modules if filters.is_experts(module)}
    wrong = []
    for entry in policy.fp8_modules:
        what = f"`{entry.pattern}`"
        matched = [key for key, own in names.items() if any(fnmatch(name, entry.pattern) for name in own)]
        own = [key for key in matched if decided[key] == entry]
        if not matched and entry.pattern in others:
            continue
        if not matched:
            every = [name for own_names in names.values() for name in own_names]
            wrong.append(f"{what} matches no layer{_hint(entry.pattern, every, modules)}")
        elif not own:
            before = dict.fromkeys(str(each.pattern) for key in matched if (each := decided[key]) is not None)
            wrong.append(f"{what} decides no layer: {' and '.join(before)} before it matches all of its; put it first")
        elif entry.recipe != NONE and policy.fp8_required and all(reasons[key] for key in own):
            why = "; ".join(f"{names[key][0]}: {reasons[key]}" for key in own[:_SHOWN])
            wrong.append(f"{what} has the recipe {entry.recipe}, and no layer of it can be FP8: {why}")
        elif entry.recipe not in (NONE, OF_EXPERTS) and of_experts.issuperset(own):
            shown = names[own[0]][0]
            wrong.append(
                f"{what} has the recipe {entry.recipe}, and all that it decides are experts ({shown}), in FP8 "
                f"with a scale per row only; write {OF_EXPERTS} or {NONE}"
            )
    return wrong


def _hint(pattern: str, names: list[str], modules: filters.Named) -> str:
    """Return a clause for a pattern that matches no layer: a similar one that does, or the names of layers."""
    if nearest := similar(pattern, names):
        found = [name for name in names if fnmatch(name, nearest)]
        return f"; did you mean `{nearest}` (as {found[0]})?"
    others = [(name, type(module).__name__) for name, module in modules if fnmatch(name, pattern)]
    if others:
        return f"; it matches {others[0][0]}, a {others[0][1]}, which is no Linear"
    return f"; the first layers are {', '.join(names[:_SHOWN])}" if names else "; the model has none"


def similar(pattern: str, names: Iterable[str]) -> str | None:
    """Return a pattern that matches a name, and is similar to one that matches none; None if there is none."""
    names = list(names)
    words = sorted({part for name in names for part in name.split(".")})
    corrected = ".".join(_part(part, words) for part in pattern.split("."))
    for stem in dict.fromkeys((pattern, corrected)):
        for candidate in (stem, f"{stem}.*", f"*.{stem}", f"*.{stem}.*", f"*{stem}*", stem.partition(".")[2]):
            if candidate.strip("*.") and candidate != pattern and any(fnmatch(name, candidate) for name in names):
                return candidate
    return None


def _part(part: str, words: list[str]) -> str:
    """Return a part of a pattern, between dots, or the most similar word of the names if none has it."""
    text = part.strip("*")
    if not text or any(fnmatch(word, part) for word in words):
        return part
    nearest = near(text, words, 1)
    return part.replace(text, nearest[0]) if nearest else part
