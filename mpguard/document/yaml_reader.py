"""YAML as accelerate reads it (PyYAML's SafeLoader, YAML 1.1), with positions and with checks that PyYAML lacks.

The parser's events are composed here and not by PyYAML, which discards the position of an alias and silently takes the
last of two equal keys. No tag is ever constructed except those of plain scalars.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from mpguard.document.nodes import MAX_DEPTH, MAX_VALUES, DocumentTree, Node, Pair, Problem, Unreadable

_PREFIX = "tag:yaml.org,2002:"
_SCALARS = tuple(_PREFIX + name for name in ("null", "bool", "int", "float", "str", "timestamp", "binary"))
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


def read_yaml(text: str) -> DocumentTree:
    """Return the nodes of a text, and its problems. Never raises for its content."""
    composer = _Composer()
    try:
        return DocumentTree(composer.document(text), composer.problems)
    except Unreadable as error:
        return DocumentTree(None, [error.problem])
    except yaml.reader.ReaderError as error:
        return DocumentTree(None, [_unprintable(error)])
    except yaml.MarkedYAMLError as error:
        return DocumentTree(None, [_syntax(error, text)])


class _Composer:
    """Composes nodes from the events of PyYAML's parser."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._anchors: dict[str, Node | None] = {}

    def document(self, text: str) -> Node | None:
        self._loader = _loader(text)
        try:
            self._loader.get_event()
            if self._loader.check_event(yaml.StreamEndEvent):
                return None
            self._loader.get_event()
            root = self._node(0)
            self._loader.get_event()
            if not self._loader.check_event(yaml.StreamEndEvent):
                start = self._loader.get_event().start_mark.index
                self._problem(
                    "a second document begins here; a config is one document. Remove the `---`", start, start + 3
                )
            return root if root.end > root.start or root.value is not None else None
        finally:
            self._loader.dispose()

    def _problem(self, message: str, start: int, end: int) -> None:
        self.problems.append(Problem(message, (start, end)))

    def _node(self, depth: int) -> Node:
        if self._loader.check_event(yaml.AliasEvent):
            return self._alias(self._loader.get_event())
        event = self._loader.peek_event()
        start = event.start_mark.index
        if depth > MAX_DEPTH:
            raise Unreadable(f"nested more than {MAX_DEPTH} levels deep, the most that a config may have", start)
        anchor = event.anchor
        if anchor is not None:
            if anchor in self._anchors:
                raise Unreadable(f"the anchor `&{anchor}` is defined twice. Rename one", start)
            self._anchors[anchor] = None  # is being read: an alias inside it would refer to itself
        if self._loader.check_event(yaml.ScalarEvent):
            node = self._scalar(self._loader.get_event())
        elif self._loader.check_event(yaml.SequenceStartEvent):
            node = self._sequence(self._loader.get_event(), depth)
        else:
            node = self._mapping(self._loader.get_event(), depth)
        node.anchor = anchor
        if anchor is not None:
            self._anchors[anchor] = node
        if node.size > MAX_VALUES:
            raise Unreadable(
                f"more than {MAX_VALUES} values once its aliases are expanded, the most that a config may have", start
            )
        return node

    def _alias(self, event: Any) -> Node:
        start, end = event.start_mark.index, event.end_mark.index
        if event.anchor not in self._anchors:
            raise Unreadable(f"there is no anchor `&{event.anchor}` before this alias", start, end)
        target = self._anchors[event.anchor]
        if target is None:
            raise Unreadable(f"the value of `&{event.anchor}` contains itself", start, end)
        target.users.append(start)
        return Node(target.kind, start, end, alias_of=target, size=target.size)

    def _scalar(self, event: Any) -> Node:
        node = Node("scalar", event.start_mark.index, event.end_mark.index, style=event.style or "")
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag not in _SCALARS:
            message = (
                f"`{event.value}` is a special value in YAML. Quote it if it is text"
                if event.tag is None
                else f"{_tag(tag)}. Quote the value, or remove the tag"
            )
            self._problem(message, *node.span)
            return node
        try:
            node.value = yaml.SafeLoader.yaml_constructors[tag](_CONSTRUCTOR, yaml.ScalarNode(tag, event.value))
        except (ValueError, KeyError, IndexError, OverflowError, AttributeError, yaml.YAMLError) as error:
            short = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._problem(
                f"`{event.value[:40]}` is not a valid {_tag(tag)} ({short}). Quote it if it is text", *node.span
            )
        return node

    def _sequence(self, event: Any, depth: int) -> Node:
        node = Node("sequence", event.start_mark.index, event.end_mark.index, flow=bool(event.flow_style))
        self._check_tag(event, "seq")
        while not self._loader.check_event(yaml.SequenceEndEvent):
            item = self._node(depth + 1)
            node.items.append(item)
            node.size += item.size
            node.end = max(node.end, item.end)
        self._close(node, self._loader.get_event())
        return node

    def _mapping(self, event: Any, depth: int) -> Node:
        node = Node("mapping", event.start_mark.index, event.end_mark.index, flow=bool(event.flow_style))
        self._check_tag(event, "map")
        merged: dict[Hashable, Pair] = {}
        ambiguous: dict[Hashable, Pair] = {}
        while not self._loader.check_event(yaml.MappingEndEvent):
            plain = self._loader.check_event(yaml.ScalarEvent) and self._loader.peek_event().implicit[0]
            text = self._loader.peek_event().value if plain else None
            merges = text == "<<"
            key = self._key() if plain and text in ("<<", "=") else self._node(depth + 1)
            pair = Pair(key.plain(), "", key.span, self._node(depth + 1), merges)
            pair.name = str(text) if plain and not merges and not isinstance(pair.key, str) else str(pair.key)
            node.pairs.append(pair)
            node.size += pair.value.size
            node.end = max(node.end, pair.end)
            if merges:
                members = self._merged(pair.value)
                ambiguous.update(_ambiguous(pair, members))
                merged.update(reversed(members))
            elif key.target.kind != "scalar":
                self._problem("a mapping or list is used as a key. Use a plain name", *key.span)
            else:
                if pair.key in node.members:
                    message = f"`{pair.name}` is a duplicate key; YAML readers silently take the last. Remove one"
                    self.problems.append(Problem(message, pair.key_span, pair.name))
                node.members[pair.key] = pair
        self._close(node, self._loader.get_event())
        for name, pair in ambiguous.items():
            if name not in node.members:
                message = (
                    f"`{name}` has different values in the mappings of this list: PyYAML 6.0.4 takes the last, other "
                    "versions the first. Write the key next to `<<`"
                )
                self.problems.append(Problem(message, pair.key_span, str(name)))
        node.members = {**merged, **node.members}
        return node

    def _key(self) -> Node:
        """Return a plain `<<` or `=` as a key that is text, whatever type the resolver gives it."""
        event = self._loader.get_event()
        return Node("scalar", event.start_mark.index, event.end_mark.index, value=event.value)

    def _merged(self, value: Node) -> list[tuple[Hashable, Pair]]:
        """Return the members that `<<` merges, those with precedence first."""
        sources = value.target.items if value.target.kind == "sequence" else [value]
        members: list[tuple[Hashable, Pair]] = []
        for source in sources:
            if source.target.kind != "mapping":
                self._problem("`<<` takes a mapping, or a list of them", *source.span)
                continue
            members += source.target.members.items()
        return members

    def _check_tag(self, event: Any, name: str) -> None:
        if event.tag not in (None, "!", _PREFIX + name):
            start = event.start_mark.index
            self._problem(f"{_tag(event.tag)}. Remove the tag", start, start + 1)

    @staticmethod
    def _close(node: Node, event: Any) -> None:
        if node.flow:
            node.end = event.end_mark.index


def _ambiguous(pair: Pair, members: list[tuple[Hashable, Pair]]) -> dict[Hashable, Pair]:
    """Return the keys that `<<` merges with different values, of which readers do not take the same one.

    PyYAML 6.0.4 has reversed the precedence in a list of mappings (yaml/pyyaml#953).
    """
    values: dict[Hashable, set[str]] = {}
    for key, each in members:
        values.setdefault(key, set()).add(repr(each.value.plain()))
    return {key: pair for key, found in values.items() if len(found) > 1}


def _loader(text: str) -> Any:
    """Return PyYAML's parser and resolver; as Any, since their methods have no type annotations."""
    return yaml.SafeLoader(text)


def _tag(tag: str) -> str:
    """Return a clause about a tag: the name of a scalar's type, or that the tag is refused."""
    if tag in _SCALARS:
        return tag.removeprefix(_PREFIX)
    short = tag.replace(_PREFIX, "!!", 1) if tag.startswith(_PREFIX) else tag
    return f"the tag `{short}` is never executed here, and accelerate refuses it"


def _unprintable(error: Any) -> Problem:
    what = "a NUL byte" if error.character == 0 else f"the character U+{error.character:04X}"
    return Problem(f"{what}, which no YAML file may contain. Remove it", (error.position, error.position + 1))


def _syntax(error: yaml.MarkedYAMLError, text: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    start = min(mark.index, len(text)) if mark else 0
    message = ", ".join(part for part in (error.context, error.problem) if part)
    if "'\\t'" in message:
        message += "; YAML is indented with spaces"
    return Problem(f"invalid YAML: {message}", (start, min(start + 1, len(text))))
