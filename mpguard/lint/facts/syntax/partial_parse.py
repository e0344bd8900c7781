"""Partial parsing: of a large file only the relevant statements are parsed, and those that call them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ahocorasick_rs import AhoCorasick, Implementation

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.source.source import Chunk
from mpguard.lint.source.strip_comments import stripped

#: Files up to this size (in characters) are parsed whole; of larger ones only the relevant statements.
WHOLE_FILE_LIMIT = 8_000
#: A top-level statement with one of these words is relevant: precision and training. What separates training from
#: inference (`no_grad`) matters only around calls of relevant code, which are parsed because of that.
_WORDS = (
    "float16", "bf16", "fp16", "autocast", "custom_fwd", "custom_bwd", "Scaler", "scaler", "backward", ".step(",
    "float8", "fp8", ".prepare(", "deepspeed", "accelerat", "Trainer", "Optimizer", "HalfTensor", "requires_grad",
    "tf32", "fp32_precision", "transformer_engine", "Scaling(", "RecipeKwargs", "fully_shard", "matmul_precision",
    ".state_dict(", ".load_state_dict(",
)  # fmt: skip
#: And with one of these, if a pattern matches from four characters before the word to the one after it.
_IN_CONTEXT = {
    "optim": lazy_pattern(r"optim\W?\Z"),
    "half": lazy_pattern(r"\bhalf\W?\Z"),
    "amp": lazy_pattern(r"\bamp\W?\Z"),
    "compile": lazy_pattern(r"(?<!\bre\.)compile.?\Z"),
    "te.": lazy_pattern(r"\bte\..?\Z"),
}
_CONTEXTS = tuple(_IN_CONTEXT.values())
#: Layers in any dtype: this, and on the same line the last word.
_LAYER = lazy_pattern(r"(?:Linear|Embedding|Conv[123]d)\(")
_SEARCH = AhoCorasick([*_WORDS, *_IN_CONTEXT, "dtype="], implementation=Implementation.DFA)
#: Methods without a relevant word that the facts need nevertheless: those that set an attribute, or may be context
#: managers.
_SETS_STATE = lazy_pattern(r"(?:self|cls)\.[\w.]+[^\n=()]*(?<![<>!])=(?!=)|(yield\b|global\b|as[ \t]+self\.)")
_INSIDE_EXPRESSION = lazy_pattern(r"[=(#]")
#: Methods that are called without being named.
_IMPLICIT_CALLS = frozenset({"__init__", "__call__", "forward"})
_ATTRIBUTE = lazy_pattern(r"\.[ \t]*(\w+)")
_NAME = lazy_pattern(r"[^\W\d]\w*")
_RENAMED = lazy_pattern(r"\bas[ \t]+(\w+)")


def chunks_by_name(chunks: tuple[Chunk, ...]) -> dict[str, list[Chunk]]:
    """Return the statements that may bind each name.

    A definition binds its own name, any other statement those that it contains.
    """
    found: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        name = chunk.defines
        for each in {name} if name is not None else set(_NAME.findall(chunk.text)):
            found.setdefault(each, []).append(chunk)
        if name is None and "import *" in chunk.text:
            found.setdefault("*", []).append(chunk)
    return found


class Relevance:
    """Decides which statements of a file need to be parsed, by their words.

    Relevant are also the names that imports give to relevant things: `from torch.cuda.amp import autocast as ac`.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        lines = [
            line
            for chunk in chunks
            if "import" in chunk.text and chunk.defines is None
            for line in chunk.text.splitlines()
            if " as " in line and _contains_relevant_word(line)
        ]
        names = {name for line in lines for name in _RENAMED.findall(line)}
        self._renamed = re.compile(rf"\b(?:{'|'.join(sorted(names))})\b") if names else None

    def relevant_chunks(self, chunks: Sequence[Chunk]) -> set[Chunk]:
        """Return the relevant statements, and those that call the definitions among them."""
        found = {chunk for chunk in chunks if self.is_relevant(chunk)}
        named = {chunk.defines for chunk in found} - {None}
        if named:
            calls = re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, filter(None, named)))) + r")\(")
            found |= {chunk for chunk in chunks if chunk not in found and calls.search(chunk.text)}
        return found

    def is_relevant(self, chunk: Chunk) -> bool:
        """True for imports and other small statements, and for definitions that contain a relevant word."""
        return chunk.defines is None or self._has_relevant_word(chunk.text)

    def is_table(self, chunk: Chunk) -> bool:
        """True for a long literal without a relevant word, such as a table of data."""
        is_long = chunk.defines is None and chunk.end - chunk.start > WHOLE_FILE_LIMIT
        return is_long and not self._contains(chunk.text)

    def skip_irrelevant_methods(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Skip the irrelevant methods of large classes.

        These contain no relevant word, and neither call relevant methods nor are called by them.
        """
        left = {
            method: chunk
            for chunk in chunks
            if chunk.end - chunk.start > WHOLE_FILE_LIMIT
            for method in chunk.methods
            if not (method.name in _IMPLICIT_CALLS or self._has_relevant_word(chunk.text[method.start : method.end]))
            and not _sets_state(chunk.text, method.start, method.end)
        }
        if not left:
            return chunks
        relevant = {m.name for chunk in chunks for m in chunk.methods if m not in left} - _IMPLICIT_CALLS
        for chunk in chunks:
            chunk.skipped = tuple(method for method, home in left.items() if home is chunk)
        used = set().union(*(_ATTRIBUTE.findall(chunk.code) for chunk in chunks))
        for chunk in chunks:
            chunk.skipped = tuple(
                method
                for method in chunk.skipped
                if method.name not in used
                and relevant.isdisjoint(_ATTRIBUTE.findall(chunk.text, method.body, method.end))
            )
        return chunks

    def _has_relevant_word(self, text: str) -> bool:
        """True if the code has a word for precision or training, outside of comments and docstrings."""
        return self._contains(text) and self._contains(stripped(text))

    def _contains(self, text: str) -> bool:
        return _contains_relevant_word(text) or (self._renamed is not None and self._renamed.search(text) is not None)


def _contains_relevant_word(text: str) -> bool:
    searched = 0  # no layer begins before it
    for word, start, end in _SEARCH.find_matches_as_indexes(text, overlapping=True):
        context = word - len(_WORDS)
        if context < 0:
            return True
        if context < len(_CONTEXTS):
            if _CONTEXTS[context].search(text[max(start - 4, 0) : end + 1].rstrip("\n")):
                return True
        else:
            line = max(text.rfind("\n", searched, start) + 1, searched)
            if _LAYER.search(text, line, start):
                return True
            searched = max(line, start - len("Embedding("))
    return False


def _sets_state(text: str, start: int, end: int) -> bool:
    """True if a method sets an attribute at the beginning of a statement, yields, or declares a global."""
    for found in _SETS_STATE.finditer(text, start, end):
        if found.start() and (text[found.start() - 1].isalnum() or text[found.start() - 1] == "_"):
            continue
        line = text.rfind("\n", 0, found.start()) + 1
        if found.lastindex or not _INSIDE_EXPRESSION.search(text, line, found.start()):
            return True
    return False
