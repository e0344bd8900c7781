"""A recipe of FP8 per module: `fp8_modules` of a policy.

    fp8_modules:
      - {pattern: "*.mlp.*", recipe: rowwise}
      - {pattern: "*.attn.*", recipe: tensorwise}
      - {pattern: "model.layers.0.*", recipe: none}

The first pattern that the qualified name of a layer matches decides; layers that none matches have `fp8_recipe`.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any, Literal

from mpguard.core.errors import PolicyError, did_you_mean

#: How FP8 matmuls are scaled. `_with_bwd_hp`: both matmuls of the backward pass in the compute dtype (Transformer
#: Engine); `_with_gw_hp`: that of the weight's gradient (torchao).
Fp8Recipe = Literal[
    "delayed", "tensorwise", "blockwise", "mxfp8", "rowwise", "rowwise_with_gw_hp",
    "tensorwise_with_bwd_hp", "blockwise_with_bwd_hp", "mxfp8_with_bwd_hp",
]  # fmt: skip

#: The end of the name of a recipe with a backward pass in the compute dtype.
BACKWARD_HIGH = "_with_bwd_hp"

#: The recipe of layers that stay out of FP8. Not `off`, which YAML reads as False.
NONE = "none"

EXAMPLE = '{pattern: "*.mlp.*", recipe: rowwise}'


@dataclasses.dataclass(frozen=True)
class ModuleRecipe:
    """The recipe of the layers whose names a pattern matches. pattern: for `fnmatch`. recipe: a recipe, or `NONE`."""

    pattern: str
    recipe: str

    def __str__(self) -> str:
        return f"{self.pattern} {self.recipe}"

    def plain(self) -> dict[str, str]:
        """Return the entry as plain data, as a config has it."""
        return {"pattern": self.pattern, "recipe": self.recipe}


def module_recipes(given: object) -> tuple[ModuleRecipe, ...]:
    """Return the entries of `fp8_modules`. Raises `PolicyError`, which names the entry.

    given: a list of mappings or of `ModuleRecipe`.
    """
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise PolicyError(f"fp8_modules is {given!r:.80}; a list is needed, such as [{EXAMPLE}]")
    found: list[ModuleRecipe] = []
    for number, item in enumerate(given):
        entry = _entry(item, f"fp8_modules[{number}]")
        before = next((each for each in found if each.pattern == entry.pattern), None)
        if before is not None:
            raise PolicyError(
                f"fp8_modules[{number}]: `{entry.pattern}` is there already, with recipe {before.recipe}, and the "
                "first match decides. Remove one of them"
            )
        found.append(entry)
    return tuple(found)


def _entry(item: object, where: str) -> ModuleRecipe:
    if isinstance(item, ModuleRecipe):
        item = item.plain()
    if not isinstance(item, Mapping):
        raise PolicyError(f"{where} is {item!r:.80}; a pattern and a recipe are needed: {EXAMPLE}")
    for key in item:
        if key not in ("pattern", "recipe"):
            raise PolicyError(f"{where}: has the key `{key}`{did_you_mean(str(key), ('pattern', 'recipe'))}")
    pattern, recipe = item.get("pattern"), item.get("recipe")
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        pattern = str(pattern)  # the name of a module in a Sequential, as YAML reads it
    if not isinstance(pattern, str) or not pattern:
        raise PolicyError(f"{where}: pattern is {pattern!r}; a pattern of names of layers is needed: {EXAMPLE}")
    if recipe is False or recipe is None:
        why = "YAML reads `off` and `no` as a boolean" if recipe is False else "it names no recipe"
        raise PolicyError(
            f"{where}: `{pattern}` has the recipe {recipe!r} ({why}); write `{NONE}` to keep it out of FP8"
        )
    known = (NONE, *typing.get_args(Fp8Recipe))
    if recipe not in known:
        hint = did_you_mean(recipe, known) if isinstance(recipe, str) else f"; known are {', '.join(known)}"
        raise PolicyError(f"{where}: `{pattern}` has the recipe {recipe!r}, which is no recipe of FP8{hint}")
    return ModuleRecipe(pattern, recipe)


def entry_for(names: Iterable[str], entries: Iterable[ModuleRecipe]) -> ModuleRecipe | None:
    """Return the first entry that matches a layer, by any of its names; None if none does."""
    names = tuple(names)
    return next((each for each in entries if any(fnmatch(name, each.pattern) for name in names)), None)


def as_text(entries: Iterable[Any], most: int | None = None) -> str:
    """Return entries as text: `*.mlp.* rowwise, *.attn.* tensorwise`; more than `most` of them as their number."""
    entries = list(entries)
    if most is not None and len(entries) > most:
        return f"{len(entries)} patterns"
    return ", ".join(
        f"{each['pattern']} {each['recipe']}" if isinstance(each, Mapping) else str(each) for each in entries
    )
