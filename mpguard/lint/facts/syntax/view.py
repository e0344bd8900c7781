"""`SyntaxView`: one Python file, its statements, and the index of what is written where.

The views of the layers build on each other: the modules of a layer get the view of their layer, and no more.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import libcst as cst

from mpguard.lint.facts.syntax import partial_parse
from mpguard.lint.facts.syntax.index import Indexer
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import Condition
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope
from mpguard.lint.project import summaries
from mpguard.lint.project.api import ProjectApi
from mpguard.lint.source.libcst_internals import Frames
from mpguard.lint.source.source import Chunk, Source
from mpguard.lint.source.test_paths import is_test

#: A class in an imported module whose code is longer than this (in characters) is indexed by its name and its bases
#: only: parsing hundreds of methods costs more than they contribute to the analysis of the importing file.
LARGEST_IMPORTED = 100_000

View = TypeVar("View", bound="SyntaxView")
Part = TypeVar("Part")


class SyntaxView:
    """The statements of one file.

    Raises `text.Unparsable` for a file that Python accepts and LibCST does not.
    """

    def __init__(self, source: Source, project: ProjectApi | None = None, imported: bool = False) -> None:
        """Index the file.

        imported: this is a module that a linted file imports. Its statements are parsed on demand, when one of the
        names that they bind is needed.
        """
        self.source = source
        self.imported_module = imported
        self.project: ProjectApi = project if project is not None else ProjectApi()
        self.path = source.path
        self.parsed_bytes = 0
        chunks = source.chunks
        self.module = Scope("module", "", cst.Pass(), None, chunks[0])
        self.index = Indexer(self.module)
        self.calls: dict[str, list[Call]] = {}
        self._parts: dict[object, object] = {}
        self._indexed: dict[Scope, int] = {}
        self._aliases: tuple[int, dict[str, list[str]]] = (-1, {})
        self._unparsed: list[Chunk] = list(chunks) if imported else []
        self._relevance = partial_parse.Relevance(chunks)
        self._chunks_by_name: dict[str, list[Chunk]] = partial_parse.chunks_by_name(chunks) if imported else {}
        self._searched: set[str] = set()
        if not imported:
            self._index_chunks(self._relevance.skip_irrelevant_methods(self._relevant_chunks(chunks)))
            for chunk in self._unparsed:
                self.index.stub(chunk)
            self._unparsed = []

    def part(self: View, make: Callable[[View], Part]) -> Part:
        """Return the analysis of the file that a class makes: one object for all that ask."""
        if make not in self._parts:
            self._parts[make] = make(self)
        found: Part = self._parts[make]  # type: ignore[assignment]
        return found

    def need(self, name: str) -> None:
        """Parse the statements that may bind a top-level name.

        Does nothing for the linted file, which is parsed at once; an imported module is parsed on demand.
        """
        if self._unparsed and name in self._chunks_by_name:
            chunks = [chunk for chunk in self._chunks_by_name.pop(name) if chunk in self._unparsed]
            large = [chunk for chunk in chunks if chunk.end - chunk.start > LARGEST_IMPORTED]
            for chunk in large:
                self._unparsed.remove(chunk)
                self.index.stub(chunk)
            self._index_chunks(
                self._relevance.skip_irrelevant_methods(
                    [chunk for chunk in chunks if chunk not in large and not self._relevance.is_table(chunk)]
                )
            )

    def need_uses(self, name: str) -> None:
        """Parse the statements of an imported module that mention a name, and those that are no definitions."""
        if self._unparsed and name not in self._searched:
            self._searched.add(name)
            word = re.compile(rf"\b{re.escape(name)}\b")
            found = [
                chunk
                for chunk in self._unparsed
                if chunk.defines is None or (name in (text := chunk.text) and word.search(text))
            ]
            self._index_chunks(
                self._relevance.skip_irrelevant_methods(
                    [chunk for chunk in found if not self._relevance.is_table(chunk)]
                )
            )

    def need_all(self) -> None:
        """Parse all relevant statements of an imported module, which its events need, and those about gradients."""
        if self._unparsed:
            self._index_chunks(
                self._relevance.skip_irrelevant_methods(
                    [
                        chunk
                        for chunk in self._unparsed
                        if self._relevance.is_relevant(chunk) or ".grad" in chunk.text or "clip_grad" in chunk.text
                    ]
                )
            )
            self._unparsed = []

    def _index_chunks(self, chunks: Sequence[Chunk]) -> None:
        with Frames(), _without_gc():
            for chunk in chunks:
                if chunk in self._unparsed:
                    self._unparsed.remove(chunk)
                self.parsed_bytes += chunk.end - chunk.start - sum(each.end - each.body for each in chunk.skipped)
                self.index.chunk(chunk)
        for scope in self.index.scopes:
            done = self._indexed.get(scope, 0)
            for call in scope.calls[done:]:
                self.calls.setdefault(call.name, []).append(call)
            self._indexed[scope] = len(scope.calls)

    def _relevant_chunks(self, chunks: tuple[Chunk, ...]) -> Sequence[Chunk]:
        """Return the chunks of the linted file to parse; the others get stubs."""
        if len(self.source.normal) <= partial_parse.WHOLE_FILE_LIMIT:
            return chunks
        wanted = self._relevance.relevant_chunks(chunks)
        self._unparsed = [chunk for chunk in chunks if chunk not in wanted]
        return [chunk for chunk in chunks if chunk in wanted]

    def aliases(self, name: str) -> list[str]:
        """Return the local names that the file gives to an object of this name.

        Examples: `c` for `compile` after `from torch import compile as c`, `ac` for `autocast` after
        `ac = amp.autocast`.
        """
        if self._aliases[0] != self.parsed_bytes:
            found: dict[str, list[str]] = {}
            for scope in self.index.scopes:
                for key, bindings in scope.bindings.items():
                    for original in dict.fromkeys(map(_original_name, bindings)):
                        if original and original != key:
                            found.setdefault(original, []).append(key)
            self._aliases = self.parsed_bytes, found
        return self._aliases[1].get(name, [])

    # -- other files --------------------------------------------------------------------------------

    def of(self: View, record: Record | Scope) -> View:
        """Return the facts of the file that contains a record or a scope."""
        source = record.chunk.source
        if source is self.source or source.path == self.path:
            return self
        found: View | None = self.project.facts_at(source.path)
        return found or self

    def elsewhere(self, record: Record) -> str | None:
        """Return the path of the file that contains a record if that is another file than this one."""
        path = record.chunk.source.path
        return path if path != self.path else None

    @cached_property
    def may_train(self) -> bool:
        """True if the code may train, or decide in which dtype other code runs."""
        return summaries.trains(self.source.data)

    @cached_property
    def is_test(self) -> bool:
        """True for a test or a benchmark."""
        return is_test(self.path, self.source.data)

    @property
    def declared(self) -> str | None:
        """The role that the settings declare for the file: "training", "inference", or None."""
        return self.project.declared(self.path)

    # -- nodes --------------------------------------------------------------------------------------

    @property
    def scopes(self) -> list[Scope]:
        """The module, and every class and function of the file that is parsed."""
        return self.index.scopes

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node that directly contains a node; None for a whole top-level statement."""
        return self.index.parents.get(node)

    def call_of(self, node: cst.CSTNode | None) -> Call | None:
        """Return the record of a call; None if the node is no call."""
        return self.index.call_of.get(node) if node is not None else None

    def condition(self, node: cst.CSTNode, scope: Scope) -> Condition:
        """Return the truth of an expression as a formula over flags."""
        return self.of(scope).index.conditions.of(node, scope)

    @property
    def file_text(self) -> str:
        """The text of the file, in which spans and edits are offsets."""
        return self.source.text

    def span(self, node: cst.CSTNode, at: Record) -> tuple[int, int]:
        """Return the start and end of a node in `file_text`, without its parentheses."""
        return at.chunk.span(node)

    def outer_span(self, node: cst.CSTNode, at: Record) -> tuple[int, int]:
        """Return the start and end of a node in `file_text`, with its parentheses."""
        return at.chunk.outer_span(node)

    def text(self, node: cst.CSTNode, at: Record) -> str:
        """Return the code of a node as it is in the file, with its parentheses."""
        return at.chunk.source.text[slice(*at.chunk.outer_span(node))]

    def short(self, node: cst.CSTNode | None) -> str:
        """Return a node's code on one line, cut to 60 characters for a message."""
        text = " ".join(cst.Module([]).code_for_node(node).split()) if node is not None else ""
        return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection while trees are built.

    They consist of many objects, none of them garbage, and collecting meanwhile takes a tenth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _original_name(binding: Binding) -> str:
    """Return the original last name that an import or an assignment of a dotted name renames; or an empty string."""
    if binding.kind == "from":
        return binding.name
    return dotted(binding.value).rpartition(".")[2] if binding.kind == "assign" and "." in dotted(binding.value) else ""


def called(facts: SyntaxView, *wanted: str) -> Iterator[Call]:
    """Yield the calls with one of these last names."""
    for name in wanted:
        yield from facts.calls.get(name, ())


def aliases(facts: SyntaxView, name: str) -> list[str]:
    """Return the local names that the file gives to an object of this name."""
    return facts.aliases(name)
