"""Write a recipe into existing configs: accelerate YAML, DeepSpeed JSON, axolotl YAML.

Comments, order, anchors, quotes and file mode are kept; all files are checked before the first is
written, and each is replaced as a whole. --check exits 1 if a file is out of line.
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
from mpguard.core.console import Line, write_lines
from mpguard.core.errors import ConfigError, PolicyError
from mpguard.core.text_edits import apply_edits, write_atomically
from mpguard.document import Document, mp_yaml, read
from mpguard.policy.policy import Policy
from mpguard.targets import capabilities
from mpguard.targets.inject import Change
from mpguard.targets.settings import ABSENT


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe; `mpguard recipes` lists them")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="recognised by what is in it, not by its name"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of line")
    parser.add_argument("--diff", action="store_true", help="write nothing; print what would change as a unified diff")
    parser.add_argument("--format", choices=("text", "json"), default="text")


@dataclasses.dataclass(frozen=True)
class Job:
    """One file: what must change in it, its text after that, and what it has no place for."""

    document: Document
    kind: str
    policy: Policy
    strategy: str | None
    changes: tuple[Change, ...]
    text: str
    notes: tuple[str, ...]

    @property
    def path(self) -> str:
        return self.document.path

    @property
    def not_carried(self) -> list[str]:
        return targets.get(self.kind).not_carried(self.policy, self.strategy)


def run(options: argparse.Namespace) -> int:
    recipe, policy = mp_yaml.resolved(options.recipe)
    documents = _documents(options.files)
    jobs = [_job(document, recipe, _policy(document, documents, recipe, policy), documents) for document in documents]
    writes = not (options.check or options.diff)
    if writes:
        _write([job for job in jobs if job.changes])
    if options.format == "json":
        print(json.dumps(_facts(jobs, recipe, writes), indent=2))
    elif options.diff:
        write_lines(line for job in jobs for line in _diff(job))
    else:
        write_lines(_lines(jobs, recipe, writes))
    return 1 if options.check and any(job.changes for job in jobs) else 0


def _documents(paths: list[Path]) -> list[Document]:
    """The files, each once, and each a config that some plugin knows. Raises `ConfigError`."""
    documents = [read(path) for path in {os.path.realpath(path): path for path in paths}.values()]
    wrong = []
    for document in documents:
        try:
            document.require()
        except ConfigError as error:
            wrong.append(str(error))
            continue
        if document.kind is None:
            wrong.append(
                f"{document.path}: is no accelerate, DeepSpeed or axolotl config, nor another one that a plugin knows; "
                f"its keys are {_keys(document)}"
            )
    if wrong:
        raise ConfigError("\n".join(wrong))
    return documents


def _keys(document: Document) -> str:
    names = [f"`{key}`" for key in document.data]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "none"


def _policy(document: Document, documents: list[Document], recipe: str, policy: Policy) -> Policy:
    """The recipe, with the overrides that the file, or the accelerate config that names it, has for it."""
    sources = [document] if document.kind == "accelerate" else [each for each in documents if _names(each, document)]
    for source in sources:
        stored = mp_yaml.stored(source)
        if stored.overrides and stored.recipe is not None and stored.recipe.replace("-", "_") == recipe:
            return mp_yaml.policy_of(source) or policy
    return policy


def _names(document: Document, other: Document) -> bool:
    """Whether an accelerate config names another file: from the present folder, or from its own."""
    named_file = mp_yaml.deepspeed_file(document.data) if document.kind == "accelerate" else None
    if named_file is None:
        return False
    places = (Path(named_file), Path(document.path).parent / named_file)
    return os.path.realpath(other.path) in map(os.path.realpath, places)


def _job(document: Document, recipe: str, policy: Policy, documents: list[Document]) -> Job:
    kind = document.kind
    assert kind is not None  # checked in `_documents`
    target = targets.get(kind)
    notes: list[str] = []
    try:
        changes = targets.differences(document.data, policy, kind)
        if kind == "accelerate":
            changes = [*mp_yaml.changes(document.data, recipe, _kept(document, recipe)), *changes]
        strategy = target.strategy(document.data)
        capabilities.require_supported(kind, policy, strategy)
        text = apply_edits(document.text, document.edits(changes))
    except PolicyError as error:
        raise PolicyError(f"{document.path}: {error}") from None
    except ConfigError as error:
        where = "" if str(error).startswith(document.path) else f"{document.path}: "
        raise ConfigError(f"{where}{error}") from None
    other = mp_yaml.deepspeed_file(document.data) if kind == "accelerate" else None
    if other is not None and not any(_names(document, each) for each in documents):
        notes.append(f"the precision is said in {other}; give that file to `mpguard apply` too")
    return Job(document, kind, policy, strategy, tuple(changes), text, tuple(notes))


def _kept(document: Document, recipe: str) -> dict[str, Any] | None:
    """The overrides of the file, if they are those of this recipe."""
    stored = mp_yaml.stored(document)
    same = stored.recipe is not None and stored.recipe.replace("-", "_") == recipe
    return dict(stored.overrides) if same and stored.overrides else None


def _write(jobs: list[Job]) -> None:
    """All of the files or none: what was written is put back when a later one cannot be."""
    for job in jobs:
        path = Path(os.path.realpath(job.path))
        if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"{job.path}: is read-only. Nothing was changed")
    done: list[Job] = []
    for job in jobs:
        try:
            write_atomically(Path(job.path), job.document.encoded(job.text))
        except OSError as error:
            for before in done:
                write_atomically(Path(before.path), before.document.encoded(before.document.text))
            reason = error.strerror or error
            raise ConfigError(f"{job.path}: cannot be written: {reason}. Nothing was changed") from None
        done.append(job)


def _diff(job: Job) -> list[Line]:
    """A unified diff, as `patch` takes it."""
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
        said = [(str(change), "yellow" if change.overrides else "green") for change in job.changes]
        said = said or [(f"in line with {recipe}", "")]
        said += [
            (f"note: {note}", "") for note in (*job.notes, *map(partial(_carried_elsewhere, job), job.not_carried))
        ]
        for index, (text, style) in enumerate(said):
            printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
            yield [(f"{'' if index else job.path:{width}}  ", "bold"), (printable, style)]
    changed = [job for job in jobs if job.changes]
    count = sum(len(job.changes) for job in changed)
    if not changed:
        return
    files = f"{len(changed)} file{'s' * (len(changed) > 1)}"
    settings = f"{count} setting{'s' * (count > 1)}"
    if written:
        yield [(f"{files} changed, {settings}. Comments and order are kept.", "")]
    else:
        yield [(f"{files} out of line, {settings}. Nothing was written.", "")]


def _carried_elsewhere(job: Job, field: str) -> str:
    carriers = targets.carriers(field)
    by = f"carried by {', '.join(carriers)}" if carriers else "no target carries it"
    return f"no place here for {field}={job.policy.format_field(field)} ({by})"


def _facts(jobs: list[Job], recipe: str, written: bool) -> dict[str, Any]:
    """For machines. A change without `old` adds its key, one without `new` removes it."""
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
            }
            for job in jobs
        ],
    }


def _change(change: Change) -> dict[str, Any]:
    values = {name: value for name, value in (("old", change.old), ("new", change.new)) if value is not ABSENT}
    return {"key": change.key, **values, "why": change.reason}
