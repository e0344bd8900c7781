"""Write a recipe into existing configs: accelerate, DeepSpeed, axolotl, LLaMA-Factory, Megatron Bridge, NeMo 1.x.

Comments, order, anchors, quotes and file mode are kept. All files are checked before the
first one is written, and each is replaced atomically.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mpguard import targets
from mpguard.core.console import Line, columns, folded, printable, write_lines
from mpguard.core.errors import ConfigError, PolicyError
from mpguard.core.text_edits import apply_edits, write_atomically
from mpguard.document import Document, deepspeed_file, dialects, mp_yaml, parse, read, validation
from mpguard.document.ignored_keys import ignored
from mpguard.document.schemas import deepspeed
from mpguard.policy import hardware, recipes
from mpguard.policy.policy import Policy
from mpguard.targets import capabilities
from mpguard.targets.inject import Change
from mpguard.targets.settings import ABSENT

#: A file of another kind, such as a script, is not reported with an error of the YAML parser.
_SUFFIXES = (".yaml", ".yml", ".json", "")
#: On a narrow terminal what continues a line is indented by so much at most, however long the path is.
_WIDEST_INDENT = 16


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe (see `mpguard recipes`)")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="config files; their kind is detected from their content"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="another value for a field of the recipe, such as grad_reduce_in_fp32=false (repeatable)",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file differs from the recipe"
    )
    parser.add_argument("--diff", action="store_true", help="write nothing; print the changes as a unified diff")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


@dataclasses.dataclass(frozen=True)
class Job:
    """One file: the changes that the recipe needs, the text after them, and notes for the user.

    problems: what its program refuses in the text after them, with the places.
    at_launch: the recipe is `auto`, which each launch decides, so that nothing of it is in the file.
    """

    document: Document
    kind: str
    policy: Policy
    strategy: str | None
    changes: tuple[Change, ...]
    text: str
    notes: tuple[str, ...]
    problems: tuple[str, ...] = ()
    at_launch: bool = False

    @property
    def path(self) -> str:
        return self.document.path

    @property
    def not_carried(self) -> list[str]:
        if self.at_launch:
            return []
        found = targets.get(self.kind).not_carried(self.policy, self.strategy)
        if self.kind == "accelerate":  # whose file has mpguard's own keys: the launch applies these fields
            found = [field for field in found if field not in capabilities.CONVERTER_FIELDS]
        sharded = self.kind not in capabilities.GUARDED_TARGETS and (self.strategy or "").startswith("fsdp")
        if sharded and not self.policy.grad_reduce_in_fp32:  # accelerate's FSDP reduces in the compute dtype (S13)
            found = [field for field in found if field != "grad_reduce_in_fp32"]
        return found


def run(options: argparse.Namespace) -> int:
    policy = recipes.recipe(options.recipe)
    recipe = options.recipe.replace("-", "_")
    given = _given(options.override, options.recipe)
    documents = _documents(options.files, recipe)
    jobs = []
    for document in documents:
        if recipe == mp_yaml.AUTO_RECIPE:
            jobs.append(_job_of_auto(document, policy, given, documents))
        else:
            jobs.append(_job(document, recipe, _policy(document, documents, recipe, policy, given), documents, given))
    writes = not (options.check or options.diff)
    if writes:
        _write([job for job in jobs if job.changes])
    if options.format == "json":
        print(json.dumps(_as_json(jobs, recipe, writes), indent=2))
    elif options.diff:
        write_lines((line for job in jobs for line in _diff(job)), fold=False)
    else:
        write_lines(_lines(jobs, recipe, writes))
    differs = options.check and any(job.changes for job in jobs)
    return 1 if differs or any(job.problems for job in jobs) else 0


def _of_code(document: Document, recipe: str) -> str:
    """Return why a file that is no YAML or JSON is not changed, for the end of a message."""
    if document.path.endswith(".py") and "megatron.bridge" in document.text:
        return (
            f'is code, which `apply` does not change. Write `config.mixed_precision = "{recipe}"` in it, or '
            f"`mixed_precision: {recipe}` in a YAML file of overrides"
        )
    return "is not a config; a YAML or JSON file is needed"


def _documents(paths: list[Path], recipe: str) -> list[Document]:
    """Read each file once. Raise `ConfigError` if one is not a config that a plugin recognizes."""
    documents = [read(path) for path in {os.path.realpath(path): path for path in paths}.values()]
    wrong = []
    for document in documents:
        try:
            document.require()
        except ConfigError as error:
            if Path(document.path).suffix.lower() in _SUFFIXES:
                wrong.append(str(error))
            else:
                reason = dialects.other_file(Path(document.path)) or _of_code(document, recipe)
                wrong.append(f"{document.path}: {reason}")
            continue
        if document.kind is None:
            wrong.append(f"{document.path}: {dialects.unread(document)}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return documents


def _given(words: list[str], recipe: str) -> dict[str, Any]:
    """Return the fields that `--override` names. Raises `ConfigError` for words of another form."""
    import yaml

    found: dict[str, Any] = {}
    for word in words:
        field, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--override {word}: FIELD=VALUE is needed, such as grad_reduce_in_fp32=false")
        found[field.replace("-", "_")] = yaml.safe_load(value)
    recipes.recipe(recipe).replace(**found)  # raises for an unknown field, and for values that cannot be
    return found


def _policy(
    document: Document, documents: list[Document], recipe: str, policy: Policy, given: dict[str, Any]
) -> Policy:
    """Return the recipe with the overrides for it in the file, or in the accelerate config that names the file.

    given: the overrides of the command line, which replace those.
    """
    if given:
        return policy.replace(**given)
    named_in = [each for each in documents if each.kind == "accelerate" and _names(each, document)]
    for source in [document] if document.kind == "accelerate" else named_in:
        stored = mp_yaml.stored(source)
        if stored.fields and stored.recipe is not None and stored.recipe.replace("-", "_") == recipe:
            return mp_yaml.policy_of(source) or policy
    return policy


def _deepspeed_file(document: Document) -> str | None:
    """Return the DeepSpeed file that a config names, as written; None without one."""
    if document.kind == "accelerate":
        return mp_yaml.deepspeed_file(document.data)
    return deepspeed_file.named_file(document)


def _names(document: Document, other: Document) -> bool:
    """True if a config names another file, relative to the current folder or to its own."""
    named_file = _deepspeed_file(document)
    if named_file is None:
        return False
    candidates = (Path(named_file), Path(document.path).parent / named_file)
    return os.path.realpath(other.path) in map(os.path.realpath, candidates)


def _job_of_auto(document: Document, policy: Policy, given: dict[str, Any], documents: list[Document]) -> Job:
    """Return the job of `auto`: for a run that mpguard launches, the decision is left to each launch.

    Other trainers have no launch of mpguard that decides: their files get what this machine's GPU selects.
    Raises `PolicyError` without a GPU.
    """
    name = policy.name.removeprefix(recipes.AUTO)
    if document.kind in capabilities.GUARDED_TARGETS:
        changes = mp_yaml.changes(document.data, mp_yaml.AUTO_RECIPE, given) if document.kind == "accelerate" else []
        text = apply_edits(document.text, document.edits(changes))
        note = f"each launch decides by its own GPU (here: {name}); other keys of the file are left as they are"
        return Job(document, str(document.kind), policy, None, tuple(changes), text, (note,), at_launch=True)
    if hardware.detect().gpu is None:
        raise PolicyError(
            f"{document.path}: `auto` is decided by the GPU, and this machine has none. Name a recipe, or apply it "
            "where the run will be"
        )
    return _job(document, name, recipes.recipe(name).replace(**given), documents, given)


def _job(document: Document, recipe: str, policy: Policy, documents: list[Document], given: dict[str, Any]) -> Job:
    kind = document.kind
    assert kind is not None  # `_documents` has checked it
    target = targets.get(kind)
    notes: list[str] = []
    try:
        changes = targets.differences(document.data, policy, kind)
        if kind == "accelerate":
            changes = [*mp_yaml.changes(document.data, recipe, given or _overrides(document, recipe)), *changes]
        if all(change.implied for change in changes):
            changes = []  # the file has the recipe: its program's defaults are the other values
        strategy = target.read_strategy(document.data)
        capabilities.require_supported(kind, policy, strategy)
        text = apply_edits(document.text, document.edits(changes))
    except PolicyError as error:
        raise PolicyError(f"{document.path}: {error}") from None
    except ConfigError as error:
        where = "" if str(error).startswith(document.path) else f"{document.path}: "
        raise ConfigError(f"{where}{error}") from None
    after = parse(text, document.path)
    refused: list[str] = []
    if (other := _deepspeed_file(document)) is not None and not any(_names(document, each) for each in documents):
        notes.append(f"the precision is set in {other} too; pass that file to `mpguard apply`")
        named = deepspeed_file.read_named(after)
        refused = _mismatches(after, named) if named is not None else []
    elif (section := deepspeed_file.inline(after)) is not None:
        refused = list(deepspeed_file.refusals(after, section))
    if kind == "deepspeed" and (line := deepspeed.other_optimizer(document.data, after.data)):
        notes.append(line)
    found = list(validation.every(after))
    problems = [each for each in found if not each.undecided and not each.unless]
    if (unknown := dialects.unknown_keys(after, {each.key for each in problems})) is not None:
        notes.append(unknown)
    undecided = [each for each in found if each.undecided]
    notes += [each.message(after) for each in (*undecided, *ignored(after), *validation.without_effect(after))]
    messages = (*(each.message(after) for each in problems), *refused)
    return Job(document, kind, policy, strategy, tuple(changes), text, tuple(notes), messages)


def _mismatches(document: Document, named: Document) -> list[str]:
    return [f"{document.where(key)}: {reason}" for key, reason in deepspeed_file.mismatches(document, named)]


def _overrides(document: Document, recipe: str) -> dict[str, Any] | None:
    """Return the overrides in the file if they belong to this recipe."""
    stored = mp_yaml.stored(document)
    same = stored.recipe is not None and stored.recipe.replace("-", "_") == recipe
    return stored.fields if same else None


def _write(jobs: list[Job]) -> None:
    """Write all of the files or none: if one cannot be written, those written before it are restored."""
    for job in jobs:
        path = Path(os.path.realpath(job.path))
        if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"{job.path}: is read-only. Nothing was changed")
    written: list[Job] = []
    for job in jobs:
        try:
            write_atomically(Path(job.path), job.document.encoded(job.text))
        except OSError as error:
            for earlier in written:
                write_atomically(Path(earlier.path), earlier.document.encoded(earlier.document.text))
            reason = error.strerror or error
            raise ConfigError(f"{job.path}: cannot be written: {reason}. Nothing was changed") from None
        written.append(job)


def _diff(job: Job) -> list[Line]:
    """Return the lines of a unified diff that `patch` accepts."""
    old, new = (list(io.StringIO(text, newline="\n")) for text in (job.document.text, job.text))
    styles = {"---": "bold", "+++": "bold", "-": "red", "+": "green", "@": "cyan"}
    lines: list[Line] = []
    for line in difflib.unified_diff(old, new, job.path, job.path):
        style = styles.get(line[:3], styles.get(line[:1], ""))
        lines.append([(line.removesuffix("\n"), style)])
        if not line.endswith("\n"):
            lines.append([("\\ No newline at end of file", "")])
    return lines


def _lines(jobs: list[Job], recipe: str, written: bool) -> Iterator[Line]:
    width = max(len(job.path) for job in jobs)
    for job in jobs:
        rows = [(str(change), "yellow" if change.overrides else "green") for change in job.changes]
        rows = rows or [(_without_changes(job, recipe), "")]
        notes = (*job.notes, *map(partial(_not_carried_note, job), job.not_carried))
        rows += [(f"note: {note}", "") for note in notes]
        rows += [(f"problem: {problem}", "red") for problem in job.problems]
        for index, (text, style) in enumerate(rows):
            line = [(f"{'' if index else job.path:{width}}  ", "bold"), (printable(text), style)]
            yield from folded(line, min(width + 4, _WIDEST_INDENT), columns())
    changed = [job for job in jobs if job.changes]
    count = sum(len(job.changes) for job in changed)
    if not changed:
        return
    files = f"{len(changed)} file{'s' * (len(changed) > 1)}"
    settings = f"{count} setting{'s' * (count > 1)}"
    if written:
        yield [(f"{files} changed, {settings}. Comments and order are kept.", "")]
    else:
        differ = "differ" if len(changed) > 1 else "differs"
        yield [(f"{files} {differ} from {recipe}, {settings}. Nothing was written.", "")]


def _without_changes(job: Job, recipe: str) -> str:
    """Return the line of a file without changes. It matches only if its keys of precision are known, and accepted."""
    if job.problems:
        return f"has the keys of {recipe}, and others that are refused"
    document = job.document
    unclear = dialects.unknown_keys(document) or any(ignored(document)) or any(validation.undecided(document))
    if job.at_launch or not unclear:
        return f"matches {recipe}"
    return f"has the keys of {recipe} that mpguard knows"


def _not_carried_note(job: Job, field: str) -> str:
    carriers = targets.carriers(field)
    by = f"supported by {', '.join(carriers)}" if carriers else "no target supports it"
    return f"this file has no setting for {field}={job.policy.format_field(field)} ({by})"


def _as_json(jobs: list[Job], recipe: str, written: bool) -> dict[str, Any]:
    """Return the JSON output. A change without `old` adds its key, one without `new` removes it."""
    return {
        "version": 1,
        "recipe": recipe,
        "written": written,
        "files": [
            {
                "path": job.path,
                "kind": job.kind,
                "strategy": job.strategy,
                "changes": [_change(change) for change in job.changes],
                "not_carried": [
                    {"field": field, "value": job.policy.format_field(field), "carriers": targets.carriers(field)}
                    for field in job.not_carried
                ],
                "notes": list(job.notes),
                "problems": list(job.problems),
            }
            for job in jobs
        ],
    }


def _change(change: Change) -> dict[str, Any]:
    values = {name: value for name, value in (("old", change.old), ("new", change.new)) if value is not ABSENT}
    return {"key": change.key, **values, "why": change.reason}
