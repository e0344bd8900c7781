from __future__ import annotations

import posixpath
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Call,
    Diagnostic,
    Document,
    Dtype,
    Entry,
    Facts,
    Note,
    Rule,
    any_of,
    constant,
    lazy_pattern,
    library_names,
)

#: Sections with other weights or optimizers than those of the model: adapters, quantization, engines with masters.
_OTHER = lazy_pattern(r"(?i)peft|lora|adapter|quant|bnb|deepspeed|megatron|freeze|frozen|master")
_CREATES = lazy_pattern(r"(?i)^_?(?:hydra_)?instantiate")
_MODEL = lazy_pattern(r"(?i)(?!ref|teacher|reward)(?:\w+_)?model|(?:\w+_)?net|network|transformer|policy")


class RecipeWithoutMasters(Rule, form_of="MPG107"):
    """A recipe file creates the model in BF16 and a plain optimizer of torch, each by its `_target_`.

    `instantiate` of Hydra, and of the projects that do as it does, passes the keys of a section to its `_target_`:
    `torch_dtype: bfloat16` makes the weights BF16, and `torch.optim.AdamW` updates them. An update below 2^-9 of a
    weight is rounded away.

    Not reported where the recipe names adapters, quantization, frozen parts, or an engine that keeps FP32 weights.
    """

    message = "`{path}` creates the model in {dtype}, and `{optimizer}` updates its weights"
    help = "write `{key}: float32` in the recipe, and compute in BF16 by autocast or by FSDP's `param_dtype`"
    triggers = (any_of(b"instantiate("), any_of(b"config_name", b".yaml", b".yml"), any_of(b".step("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not facts.events("step"):
            return
        if any(policy.master_dtype is not Dtype.FP32 for policy in facts.project.policies(facts.path)):
            return
        created = [call for name in facts.calls if _CREATES.search(name) for call in facts.calls[name]]
        for name in _recipes(facts) if created else ():
            document = facts.project.config_named(facts.path, name)
            dtype = _low_model(document) if document is not None and not _OTHER.search(document.text) else None
            if document is None or dtype is None:
                continue
            optimizer = next((each.value for each in _targets(document) if each.value.startswith("torch.optim.")), None)
            makes = next((call for call in created if _makes(call, dtype.path[-2], facts)), None)
            if optimizer is not None and makes is not None:
                notes = (Note(f"`{dtype.key}: {dtype.value}`", dtype.span, document.path),)
                help = self.help.format(key=dtype.key)
                yield self.at(makes, path=name, dtype=dtype.value, optimizer=optimizer, notes=notes, help=help)


def _recipes(facts: Facts) -> list[str]:
    """Return the recipes that a file names: what it opens, and Hydra's `config_name` in its `config_path`."""
    found = []
    for call in (call for calls in facts.calls.values() for call in calls):
        name = constant(call.keywords.get("config_name"))
        if name is not None and isinstance(name[0], str):
            folder = constant(call.keywords.get("config_path")) or ("",)
            found.append(posixpath.join(str(folder[0] or ""), name[0].removesuffix(".yaml") + ".yaml"))
        opened = [str(text[0]) for each in call.positional[:1] if (text := constant(each)) is not None]
        found += [each for each in opened if each.endswith((".yaml", ".yml"))]
    return list(dict.fromkeys(found))


def _targets(document: Document) -> list[Entry]:
    return [each for each in document.entries() if each.key == "_target_" and isinstance(each.value, str)]


def _low_model(document: Document) -> Entry | None:
    """Return the entry that makes the weights of the model BF16 or FP16; None without one."""
    for target in _targets(document):
        section = target.path[:-1]
        if not section or not _MODEL.fullmatch(section[-1]):
            continue
        for key in ("torch_dtype", "dtype"):
            entry = document.entry(".".join((*section, key)))
            if entry is not None and library_names.DTYPE_STRINGS.get(str(entry.value)) in HALF_DTYPES:
                return entry
    return None


def _makes(call: Call, section: str, facts: Facts) -> bool:
    """True for `instantiate(cfg.model)` and `instantiate(cfg["model"], ...)`."""
    given = call.argument(0)
    key = constant(given.slice[0].slice.value) if _is_item(given) else None  # type: ignore[union-attr]
    return section in (str(key[0]) if key is not None else "", facts.short(given).rpartition(".")[2] if given else "")


def _is_item(node: cst.CSTNode | None) -> bool:
    return isinstance(node, cst.Subscript) and isinstance(node.slice[0].slice, cst.Index)
