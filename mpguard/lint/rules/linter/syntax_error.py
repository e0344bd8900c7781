from __future__ import annotations

from mpguard.lint import Bad, EngineRule, Good


class UnreadablePython(EngineRule):
    """A file cannot be read as Python, so nothing in it was checked.

    ## Why is this bad
    A file that was not checked looks like a file without findings. The finding is at the first error: a syntax error,
    bytes that are not in the file's encoding (UTF-8, or that of its `coding:` line), a NUL byte, nesting or size beyond
    the limits of the parser, a file without read permission. The other files are checked nevertheless.

    ## Known limits
    mpguard checks precision, not syntax. In a file that was found in a folder, only the statements are parsed that
    another rule could report; syntax errors in the others are reported only if a rule reports something in the file.
    Files named on the command line are always parsed completely, and so are all files if `--select` or the settings
    name MPG000.

    A template of cookiecutter, Jinja or a script (`{{ name }}` in its path, or `{{ name }}` or `${name}` where Python
    finds the error) that was found in a folder is skipped, as it is no Python file; so is the pointer of a file that
    Git LFS has not fetched. One that is named is reported.

    Code that the Python that runs mpguard refuses but that mpguard's own parser (libcst) accepts is not a syntax error:
    syntax newer than that Python, and `except A, B:`, which is valid again since Python 3.14.
    """

    code, name = "MPG000", "syntax-error"
    severity = "error"
    message = "{problem}"
    help = "nothing in this file was checked"
    examples = (
        Bad("""\
import torch

def train(model:  # !
    model.half()
"""),
        Good("""\
import torch

def train(model):
    model.train()
"""),
    )
