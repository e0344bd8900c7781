"""Which statements of a file are parsed: of a large one, those with words that matter, and those that these go with."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from mpguard.lint.source.source import Chunk

#: Files up to this size are walked whole; of larger ones the statements that matter.
WHOLE = 8_000
#: What makes a top-level statement matter: precision, training, and what decides between them.
#: Each alternative begins with a letter, which is three times as fast as one that begins with `\b`; what is in the
#: group is looked at more closely.
_MATTERS = re.compile(
    r"float16|bf16|fp16|autocast|[sS]caler|backward|\.step\(|float8|fp8|\.prepare\(|deepspeed|accelerat|"
    r"no_grad|inference_mode|Trainer|Optimizer|optim\b|HalfTensor|requires_grad|tf32|fp32_precision|"
    r"transformer_engine|Scaling\(|RecipeKwargs|fully_shard|matmul_precision|\.(?:load_)?state_dict\(|"
    r"(half\b|amp\b|compile|te(?=\.))"
)
_WORDS = re.compile(r"\bhalf|\bamp|(?<!\bre\.)compile|\bte")
#: What a method may do to the facts without a word that matters: give an attribute a value, be a context manager.
_SETS = re.compile(r"(?:self|cls)\.[\w.]+[^\n=()]*(?<![<>!])=(?!=)|(yield\b|global\b|as[ \t]+self\.)")
_BEFORE = re.compile(r"[=(#]")
#: Methods that are called without their names.
_ENTRIES = frozenset({"__init__", "__call__", "forward"})
_NAMED = re.compile(r"\.[ \t]*(\w+)")
_NAME = re.compile(r"[^\W\d]\w*")


def mentions(chunks: tuple[Chunk, ...]) -> dict[str, list[Chunk]]:
    """Name -> the top-level statements that may bind it: a definition, or any other that mentions it."""
    found: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        name = chunk.defines
        for each in {name} if name is not None else set(_NAME.findall(chunk.text)):
            found.setdefault(each, []).append(chunk)
        if name is None and "import *" in chunk.text:
            found.setdefault("*", []).append(chunk)
    return found


def wanted(chunks: Sequence[Chunk]) -> set[Chunk]:
    """The statements that matter, and those that call them."""
    found = {chunk for chunk in chunks if matters(chunk)}
    named = {chunk.defines for chunk in found} - {None}
    if named:
        calls = re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, filter(None, named)))) + r")\(")
        found |= {chunk for chunk in chunks if chunk not in found and calls.search(chunk.text)}
    return found


def matters(chunk: Chunk) -> bool:
    """Imports and small statements matter, and definitions with a word for it."""
    return chunk.defines is None or _speaks(chunk.text)


def _speaks(text: str, start: int = 0, end: int = sys.maxsize) -> bool:
    """Whether there is a word for precision, for training, or for what decides between them."""
    found = _MATTERS.finditer(text, start, end)
    return any(each.lastindex is None or _WORDS.match(text, each.start()) is not None for each in found)


def _sets(text: str, start: int, end: int) -> bool:
    """Whether a method gives an attribute a value, at the beginning of a statement, or yields, or sets a global."""
    for found in _SETS.finditer(text, start, end):
        if found.start() and (text[found.start() - 1].isalnum() or text[found.start() - 1] == "_"):
            continue
        line = text.rfind("\n", 0, found.start()) + 1
        if found.lastindex or not _BEFORE.search(text, line, found.start()):
            return True
    return False


def is_table(chunk: Chunk) -> bool:
    """A long literal without a word that matters: what is in it says nothing."""
    return chunk.defines is None and chunk.end - chunk.start > WHOLE and not _speaks(chunk.text)


def skimmed(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Skips, in large classes, the methods that do not matter, and neither call nor are called by those that do."""
    left = {
        method: chunk
        for chunk in chunks
        if chunk.end - chunk.start > WHOLE
        for method in chunk.methods
        if not (method.name in _ENTRIES or _speaks(chunk.text, method.start, method.end))
        and not _sets(chunk.text, method.start, method.end)
    }
    if not left:
        return chunks
    mattering = {m.name for chunk in chunks for m in chunk.methods if m not in left} - _ENTRIES
    for chunk in chunks:
        chunk.skipped = tuple(method for method, home in left.items() if home is chunk)
    read = set().union(*(_NAMED.findall(chunk.code) for chunk in chunks))
    for chunk in chunks:
        chunk.skipped = tuple(
            method
            for method in chunk.skipped
            if method.name not in read and mattering.isdisjoint(_NAMED.findall(chunk.text, method.body, method.end))
        )
    return chunks
