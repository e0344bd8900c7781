"""Markdown: its launch lines, and its blocks of Python, each one a program."""

from __future__ import annotations

import dataclasses

from mpguard.lint.model.finding import Lines
from mpguard.lint.model.result import SYNTAX, FileCheck
from mpguard.lint.run.readers import launch, python
from mpguard.lint.run.readers.context import Context, decode


def check(data: bytes, context: Context) -> FileCheck:
    """Check the launch lines of a Markdown file, and its blocks of Python."""
    from mpguard.lint.embedded import markdown

    found = launch.check(data, context)
    text, encode = decode(data)
    lines, blocks = Lines(text), markdown.blocks(text)
    # As if the block were found, not named, and without MPG000: what documentation shows is often a fragment.
    block_context = dataclasses.replace(
        context,
        target=dataclasses.replace(context.target, kind="python", named=False),
        selection=context.selection.without((SYNTAX,)),
    )
    for block in blocks:
        checked = python.check(block.program.encode("utf-8", "replace"), block_context)
        relocated = [block.relocated(diagnostic) for diagnostic in checked.diagnostics]
        found.diagnostics += relocated
        found.findings += context.placed(relocated, lines)
        found.defects += checked.defects
    recognized = found.recognized or context.target.named or bool(blocks)
    encode = markdown.keeping(blocks, encode)
    return FileCheck(lines, found.diagnostics, found.findings, found.defects, encode, recognized)
