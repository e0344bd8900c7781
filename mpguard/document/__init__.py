"""Config files as nodes with positions, which lint, apply, launch and init read and change.

YAML values have the types that accelerate gives them (YAML 1.1: an unquoted `no` is False). Duplicate keys, tags and
alias bombs are problems with a position; nothing in a file is ever executed. Changes are text edits, so that comments,
order, anchors, quotes and line endings stay.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpguard.core import tracked_fs
from mpguard.core.errors import ConfigError, did_you_mean_file
from mpguard.core.text_edits import line_starts
from mpguard.document.json_reader import read_json
from mpguard.document.nodes import MAX_LENGTH, DocumentTree, Node, Pair, Problem

if TYPE_CHECKING:
    from mpguard.core.text_edits import Edit, Span
    from mpguard.targets.inject import Change

__all__ = ["Document", "Entry", "Problem", "decode", "parse", "read"]

Format = Literal["yaml", "json", "python"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key of a config, its plain value, and the spans of both.

    path: the keys that lead to it, list indices as text. For a value that comes through an alias, `value_span` is the
    alias; for one that comes through `<<`, it is the span of the value that `<<` merges.
    """

    key: str
    key_span: Span
    value: Any
    value_span: Span
    path: tuple[str, ...]

    @property
    def span(self) -> Span:
        return self.key_span


@dataclasses.dataclass(frozen=True)
class Document:
    """One config file.

    path: as the caller passed it, for messages. text: decoded, with its own line endings, without byte-order mark
    (`bom` is True if there was one). problems: why it is not a usable config; empty if it is.
    root: the nodes; None for an empty file, and for a text that cannot be read at all.
    given_to: for a dict in Python code (format `python`), the calls that take it; "" stands for unknown calls.
    attribute: for such a dict, the attribute of another object that it is set on: `config.ds_config`.
    """

    path: str
    text: str
    format: Format
    root: Node | None
    problems: list[Problem]
    bom: bool = False
    given_to: tuple[str, ...] = ()
    attribute: str = ""

    @functools.cached_property
    def data(self) -> Any:
        """The plain value; None for an empty file."""
        return None if self.root is None else self.root.plain()

    @functools.cached_property
    def kind(self) -> str | None:
        """The plugin that detects the content (`accelerate`, `deepspeed`, `axolotl`), or None."""
        from mpguard.targets.plugin import plugins

        if not isinstance(self.data, dict):
            return None
        return next((name for name, plugin in plugins().items() if plugin.detect(self.data)), None)

    def entry(self, key: str) -> Entry | None:
        """Return the entry at a dotted path (`fp8_config.backend`), also through aliases and `<<`; None if absent."""
        parts = tuple(key.split("."))
        node = self.root
        for depth, part in enumerate(parts):
            if node is None:
                return None
            if node.target.kind == "sequence":
                items = node.target.items
                node = items[int(part)] if part.isdecimal() and int(part) < len(items) else None
                continue
            pair = node.target.members.get(part)
            if pair is None:
                return None
            if depth == len(parts) - 1:
                return _entry(pair, parts)
            node = pair.value
        return None

    def entries(self) -> Iterator[Entry]:
        """Yield all entries, depth first, in the order of the file; those of an alias where it is used."""
        if self.root is not None:
            yield from _entries(self.root, ())

    def edits(self, changes: Iterable[Change]) -> tuple[Edit, ...]:
        """Return edits of `text` that change `data` as `targets.merged` does, and change nothing else.

        Raises `ConfigError` if a change would affect more than its key (through an anchor), or the document has
        problems; `PolicyError` if there is a value in the place of a section.
        """
        from mpguard.document.rewrite import edits

        return edits(self, changes)

    def require(self) -> dict[str, Any]:
        """Return `data` of a usable config; else raise a `ConfigError` that names file, line and reason."""
        if self.problems:
            raise ConfigError(
                "\n".join(f"{self.place(problem.span[0])}: {problem.message}" for problem in self.problems)
            )
        if self.root is None:
            raise ConfigError(f"{self.path}: is empty; a config with keys and values is needed")
        if not isinstance(self.data, dict):
            what = "a list" if isinstance(self.data, list) else "a single value"
            raise ConfigError(f"{self.path}: is {what}; a config of keys and values is needed")
        return self.data

    def place(self, offset: int) -> str:
        """Return path and line of an offset for messages, such as `mp.yaml:3`."""
        return f"{self.path}:{self.position(offset)[0]}"

    def where(self, key: str) -> str:
        """Return a dotted path for messages: ``mp.yaml:5: `fp8_config.backend` ``, without the line if it is absent."""
        entry = self.entry(key)
        return f"{self.path if entry is None else self.place(entry.key_span[0])}: `{key}`"

    def position(self, offset: int) -> tuple[int, int]:
        """Return line and column of an offset, both from 1; columns count code points."""
        line = bisect.bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1] + 1

    @functools.cached_property
    def _lines(self) -> list[int]:
        return list(line_starts(self.text))

    def encoded(self, text: str) -> bytes:
        """Return a new text of this file as bytes, with the byte-order mark if the file had one."""
        return text.encode("utf-8-sig" if self.bom else "utf-8")


def parse(text: str, path: str, format: Format | None = None) -> Document:
    """Read a config from its text. Never raises for its content: see `problems`.

    format: by default JSON for a name in `.json`, YAML for `.yaml` and `.yml`; for other names JSON if the text begins
    with `{`, else YAML.
    """
    bom = text.startswith("\ufeff")
    text = text[1:] if bom else text
    form = format or _format(path, text)
    if len(text) > MAX_LENGTH:
        problem = Problem(f"has {len(text):,} characters; a config has at most {MAX_LENGTH:,}", (0, 0))
        return Document(path, text, form, None, [problem], bom)
    if form == "json":
        tree: DocumentTree = read_json(text)
    else:
        from mpguard.document.yaml_reader import read_yaml  # imports PyYAML, which most runs do not need

        tree = read_yaml(text)
    if bom and form == "json":
        tree.problems.append(
            Problem("begins with a byte-order mark, which JSON readers refuse. Save it as UTF-8 without one", (0, 0))
        )
    return Document(path, text, form, tree.root, tree.problems, bom)


def read(path: Path, format: Format | None = None) -> Document:
    """Read a config file. Text that is not UTF-8 is a problem. Raises `ConfigError` if the file cannot be opened."""
    try:
        data = tracked_fs.read(path)
    except OSError as error:
        similar = did_you_mean_file(str(path)) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}{similar}") from None
    return decode(data, str(path), format)


def decode(data: bytes, path: str, format: Format | None = None) -> Document:
    """Read a config from its bytes. Never raises for its content: see `problems`."""
    try:
        return parse(data.decode("utf-8"), path, format)
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", "replace")
        start = len(data[: error.start].decode("utf-8"))
        problem = Problem(f"is not UTF-8 (byte 0x{data[error.start]:02X}). Save it as UTF-8", (start, start + 1))
        return Document(path, text, format or _format(path, text), None, [problem])


def _format(path: str, text: str) -> Format:
    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        return "json"
    if suffix in (".yaml", ".yml"):
        return "yaml"
    return "json" if text.lstrip(" \t\r\n").startswith("{") else "yaml"


def _entry(pair: Pair, path: tuple[str, ...]) -> Entry:
    return Entry(pair.name, pair.key_span, pair.value.plain(), pair.value.span, path)


def _entries(node: Node, path: tuple[str, ...]) -> Iterator[Entry]:
    node = node.target
    for pair in node.members.values():
        inner = (*path, pair.name)
        yield _entry(pair, inner)
        yield from _entries(pair.value, inner)
    for index, item in enumerate(node.items):
        yield from _entries(item, (*path, str(index)))
