from __future__ import annotations

from mpguard.lint import Bad, EngineRule, Good


class UnreadablePython(EngineRule):
    """A file cannot be read as Python, so nothing in it was checked.

    ## Why is this bad
    What is not checked looks like what is clean. The finding stands at the first bad place: a syntax
    error, bytes that are not in the file's encoding (UTF-8, or what its `coding:` line says), a NUL
    byte, nesting or size beyond the limits of the parser, a file without read permission. The other
    files are checked all the same.

    ## Known limits
    mpguard checks precision, not syntax. Of a file in a folder, only the statements are parsed that
    another rule could have anything to say about; syntax errors in the others are found where a rule
    finds something, and not otherwise. Files named on the command line are parsed as a whole in any
    case, and all files are where `--select` or the settings name MPG000.

    What the Python that runs mpguard refuses and its own parser (libcst) takes is no syntax error:
    newer syntax than that of this Python, and `except A, B:`, which is valid again since Python 3.14.
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
        Bad("""\
print "Python 2"  # !
"""),
        Good("""\
import torch

def train(model):
    model.train()
"""),
    )
