"""Record real runs as pictures for the README and the site: python docs/record.py

Launches in an empty folder, on this machine: a script that computes in BF16, the same script without autocast, and one
whose loss becomes NaN. Their output, as a terminal of 92 columns shows it, becomes docs/launch-light.svg and
docs/launch-dark.svg, and docs/watch-light.svg and docs/watch-dark.svg. The colors of the rows are added here: green as
asked, red if not.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

DOCS = Path(__file__).resolve().parent
COLUMNS = 92
THEMES: dict[str, TerminalTheme] = {"light": DEFAULT_TERMINAL_THEME, "dark": DIMMED_MONOKAI}

SCRIPT = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(20):
    x = torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
#: An RMSNorm without epsilon; at step 40 one position of the batch is padding, zeros.
WATCHED = """\
import torch
from torch import nn

model = nn.Sequential(nn.RMSNorm(64, eps=0.0), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(1, 61):
    x = torch.randn(8, 16, 64)
    if step == 40:
        x[3, 5] = 0
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
#: What accelerate prints about its own defaults is left out.
_ACCELERATE = re.compile(r"The following values were not passed|\t`--|To avoid this warning")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        work.joinpath("train.py").write_text(SCRIPT, "utf-8")
        work.joinpath("forgotten.py").write_text(SCRIPT.replace("torch.bfloat16)", "enabled=False)"), "utf-8")
        mpguard = Path(sys.executable).with_name("mpguard")
        subprocess.run(
            [mpguard, "init", "bf16_mixed", "-o", "mp.yaml"], cwd=work, check=True, stdout=subprocess.DEVNULL
        )
        work.joinpath("watched.py").write_text(WATCHED, "utf-8")
        pictures = {
            "launch": [*recorded(mpguard, work, "train.py", 0), "", *recorded(mpguard, work, "forgotten.py", 1)],
            "watch": recorded(mpguard, work, "watched.py", 0),
        }
    for name, lines in pictures.items():
        for kind, theme in THEMES.items():
            DOCS.joinpath(f"{name}-{kind}.svg").write_text(picture(lines, theme, name), "utf-8")
    return 0


def recorded(mpguard: Path, work: Path, script: str, wanted: int) -> list[str]:
    """Launch a script, and return the lines of the terminal. Raises `SystemExit` for another status than `wanted`."""
    command = ["launch", "--config", "mp.yaml", script]
    status, printed = in_terminal([str(mpguard), *command], work)
    if status != wanted:
        raise SystemExit(f"{script}: status {status}, not {wanted}:\n{printed}")
    shown = f"\x1b[1m$ mpguard {' '.join(command)}\x1b[0m"
    lines, refusal = [], False
    for line in printed.splitlines():  # a refusal has several lines where the terminal is narrow
        refusal = line.startswith("mpguard: not in force") or (refusal and line.startswith("  "))
        lines.append(f"\x1b[31m{line}\x1b[0m" if refusal else colored(line))
    return [shown, *lines, f"\x1b[2m[status {status}]\x1b[0m"]


def colored(line: str) -> str:
    """Return a line of a proof with the color of its verdict."""
    if re.search(r"\S  +as asked$|^step 1 proven|^in force at", line):
        return f"\x1b[32m{line}\x1b[0m"
    return f"\x1b[31m{line}\x1b[0m" if re.search(r"\S  +asked: |not in force|^mpguard watch: step", line) else line


def in_terminal(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in a terminal, and return its status and what it printed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal is closed
            break
        if not part:
            break
        found += part
    os.close(ours)
    text = found.decode("utf-8", "replace").replace("\r", "")
    return process.wait(), "\n".join(line for line in text.splitlines() if not _ACCELERATE.search(line))


def picture(lines: list[str], theme: TerminalTheme, name: str) -> str:
    """Return an SVG that loads nothing from elsewhere."""
    with Path(os.devnull).open("w", encoding="utf-8") as nothing:
        console = Console(record=True, width=COLUMNS, file=nothing, force_terminal=True)
        console.print(Text.from_ansi("\n".join(lines)))
        svg = console.export_svg(title="mpguard launch", theme=theme, unique_id=name)
    svg = svg.replace("rgba(255,255,255,0.35)", "rgba(128,128,128,0.5)")  # a frame that shows on white, too
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
