from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Fix, Note, Policy, errors, settings, targets


class ConfigAgainstRecipe(ConfigRule):
    """A config whose keys differ from the recipe that it names, or that `[tool.mpguard] recipe` names.

    ## What it does
    Compares an accelerate config, a DeepSpeed file or an axolotl config with the recipe: with
    `fp8_config.mpguard_recipe` and its `mpguard_overrides` if the file has them, otherwise with the `recipe` of the
    nearest `[tool.mpguard]`. Reports what `mpguard apply` would change, except for missing keys whose default is what
    the recipe needs.

    ## Why is this bad
    The file contradicts itself. Under `mpguard launch` the recipe applies and the key has no effect; under plain
    `accelerate launch` the key applies and the recipe has no effect.

    ## Fix safety
    Safe: writes what `mpguard apply` writes, key by key. Comments, order and quotes are kept.

    ## Known limits
    Keys that the recipe leaves open are not compared. Intended differences belong in `mpguard_overrides`. If the recipe
    cannot be applied to what the file configures, this is reported if the file names the recipe itself. A recipe of
    `[tool.mpguard]` is skipped there, since the project may have files of several kinds.
    """

    code, name = "MPG865", "config-against-recipe"
    severity = "error"
    message = "{what}, the recipe `{recipe}` needs {needed}"
    help = "run `mpguard apply`, or list intended differences in `mpguard_overrides`"
    kinds = ("accelerate", "deepspeed", "axolotl", "llamafactory", "megatron-bridge", "nemo")
    examples = (
        Bad(
            """\
distributed_type: FSDP
mixed_precision: fp16  # !
num_processes: 8  # a node
fp8_config:
  mpguard_recipe: bf16_mixed
fsdp_config:
  fsdp_version: 2
""",
            name="mp.yaml",
            fixed="""\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8  # a node
fp8_config:
  mpguard_recipe: bf16_mixed
fsdp_config:
  fsdp_version: 2
""",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if document.format == "python":
            return
        from mpguard.lint import capabilities, mp_yaml, recipes, targets

        named = document.entry(mp_yaml.RECIPE)
        place: tuple[int, int] | None = named.span if named is not None else None
        found = settings.nearest(Path(document.path))
        if named is None and (found.recipe is None or found.source is None):
            return
        kind = document.kind
        assert kind is not None  # the engine passes only documents of `kinds`
        notes: tuple[Note, ...] = ()
        try:
            policy = self._policy(document, found.recipe)
            if policy is None or policy.name.startswith(recipes.AUTO):
                return  # `auto` is decided by the machine of the launch
            capabilities.require_supported(kind, policy, targets.get(kind).read_strategy(document.data))
            changes = targets.differences(document.data, policy, kind)
        except errors.PolicyError as error:
            if place is None:
                return  # a recipe of the project, which does not apply to this kind of file
            yield self.at(place, message="{error}", error=_without_place(error, document))
            return
        except errors.ConfigError:
            return  # MPG801 reports wrong values of mpguard's keys
        if place is not None:
            notes = (Note("the recipe is named here", place),)
        elif found.source is not None:
            notes = (Note(f"`recipe` in {found.source.name} names it"),)
        name = named.value if named is not None else found.recipe
        missing_at: dict[tuple[int, int], list[targets.Change]] = {}  # keys missing in one place are one finding
        for change in changes:
            if change.old is targets.ABSENT:
                missing_at.setdefault(_place(document, change.key), []).append(change)
            else:
                yield self._difference(document, [change], str(name), notes)
        for missing in missing_at.values():
            if all(change.implied for change in missing):
                continue  # the run is the same without them
            yield self._difference(document, missing, str(name), notes)

    def _policy(self, document: Document, recipe: str | None) -> Policy | None:
        from mpguard.lint import mp_yaml, recipes

        own = mp_yaml.policy_of(document) if document.kind == "accelerate" else None
        return own if own is not None or recipe is None else recipes.recipe(recipe)

    def _difference(
        self, document: Document, changes: list[targets.Change], recipe: str, notes: tuple[Note, ...]
    ) -> Diagnostic:
        try:
            fix = Fix(f"Write the values of `{recipe}`", "safe", document.edits(changes))
        except errors.MpguardError:
            fix = None
        changes = [change for change in changes if not change.implied]  # which the fix writes, as `apply` does
        change = changes[0]
        if change.old is targets.ABSENT:
            what = f"{', '.join(f'`{each.key}`' for each in changes)} {'is' if len(changes) == 1 else 'are'} missing"
            needed = ", ".join(f"`{targets.show(each.new)}`" for each in changes)
        else:
            what = f"`{change.key}` is {_shown(change.old)}"
            needed = "it to be absent" if change.new is targets.ABSENT else f"{_shown(change.new)}"
        why = f": {change.reason}" if change.reason and len(changes) == 1 else ""
        place = _place(document, change.key)
        return self.at(place, what=what, recipe=recipe, needed=needed + why, notes=notes, fix=fix)


def _shown(value: object) -> str:
    """Return a value for a message; a section is not written out."""
    return "a section" if isinstance(value, dict) else f"`{targets.show(value)}`"


def _place(document: Document, key: str) -> tuple[int, int]:
    """Return the span of the key, or of the section that it belongs to, or of the first key."""
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        entry = document.entry(".".join(parts[:depth]))
        if entry is not None:
            return entry.span
    first = next(document.entries(), None)
    return first.span if first is not None else (0, 0)


def _without_place(error: errors.PolicyError, document: Document) -> str:
    """Return the error's text without the place at its beginning, which the finding already has."""
    text = str(error)
    return text.partition(": ")[2] if text.startswith(document.path) else text
