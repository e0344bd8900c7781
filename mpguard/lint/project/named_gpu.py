"""The GPU that a project names for a file: Colab's runtime of a notebook, or the scripts that start a program."""

from __future__ import annotations

import re
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.project import siblings
from mpguard.lint.source.files import NOTEBOOK, SHELL

#: What Colab writes into the metadata of a notebook.
_COLAB = lazy_pattern(rb'"gpuType"\s*:\s*"(\w+)"')
#: GPUs in comments and options of scripts (`#SBATCH --gres=gpu:v100:2`, `# Tesla T4`), with what they are called here.
_GPU = lazy_pattern(
    rb"(?i)(?<![\w-])(?:tesla[ -]?|nvidia[ -]?|gpu:)?(t4|v100|p100|a100|a10g?|a40|a6000|l4|l40s?|h100|h200|b200"
    rb"|(?:rtx|geforce)[ -_]?\d{4})(?:[ -_]?(?:sxm|pcie|\d+ ?gb?))?(?![\w.])"
)


def gpu(path: str) -> str | None:
    """Return the only GPU that is named for a file; None if there is none, or more than one."""
    file = Path(path).absolute()
    if path.endswith(NOTEBOOK):
        found = {each.decode() for each in _COLAB.findall(tracked_fs.read(file))}
    else:
        scripts = [
            data
            for folder in (file.parent, file.parent.parent)
            for _, data in siblings.files(folder, SHELL, siblings.LARGEST)
            if re.search(rb"(?<![\w-])%s\b" % re.escape(file.name.encode()), data)
        ]
        found = {each.decode().lower() for data in scripts for each in _GPU.findall(data)}
    return found.pop() if len(found) == 1 else None
