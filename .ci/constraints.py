"""Write constraints-newest.txt: the versions of an environment, with the date, and print what has moved since.

python .ci/constraints.py PYTHON     PYTHON: the interpreter of the environment
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "constraints-newest.txt"
PINNED = FILE.with_name("constraints.txt")

#: What torch brings for CUDA: a CPU build has none of it.
CUDA = ("nvidia-", "triton", "cuda-")


def pins(text: str) -> dict[str, str]:
    """Return the versions of a constraints file, or of `pip freeze`."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {name: version for name, _, version in (line.partition("==") for line in lines) if version}


def main(python: str) -> None:
    command = [python, "-m", "pip", "freeze", "--exclude-editable"]
    frozen = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {name: each for name, each in pins(frozen.stdout).items() if not name.startswith((*CUDA, "mpguard"))}
    found = {name: version.partition("+")[0] for name, version in found.items()}
    if "torch" not in found:
        sys.exit(f"{python} has no torch")
    before = pins(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    lines = [f"{name}=={found[name]}" for name in sorted(found, key=str.lower)]
    head = (
        f"# What pip installed on {today}, written by `make test-newest`. `make test-newest-short` uses it as it is,\n"
        "# with the torch of constraints.txt.\n"
    )
    FILE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    for name in sorted(before.keys() | found.keys(), key=str.lower):
        if before.get(name) != found.get(name):
            print(f"{name}: {before.get(name, '-')} -> {found.get(name, '-')}")


def short() -> None:
    """Print the constraints of the short test."""
    pinned = pins(PINNED.read_text(encoding="utf-8"))
    newest = pins(FILE.read_text(encoding="utf-8"))
    known = {_plain(name) for name in newest}
    others = {name: version for name, version in pinned.items() if _plain(name) not in known}
    for name, version in {**others, **newest, "torch": pinned["torch"]}.items():
        print(f"{name}=={version}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    if sys.argv[1] == "--short":
        short()
    else:
        main(sys.argv[1])
