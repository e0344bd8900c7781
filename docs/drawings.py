"""Draw the flow of a run, the packages, and speeds, as SVG for light and dark pages: python docs/drawings.py

The packages, their descriptions and their layers are those of the diagram in docs/architecture.md; speeds are those of
benchmarks/results/fp8.json.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WIDTH = 960
THEMES = {
    "light": {"page": "#ffffff", "box": "#f3f5f9", "edge": "#9aa5b8", "text": "#1f2733", "dim": "#566276",
              "good": "#1a7f37", "bad": "#b42318"},
    "dark": {"page": "#1e2129", "box": "#2a2f3a", "edge": "#6b7689", "text": "#e6e9ef", "dim": "#aab3c2",
             "good": "#4cc26a", "bad": "#ff8a80"},
}  # fmt: skip
_SANS = "font-family=\"-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif\""

Theme = Mapping[str, str]

#: The bars of the speeds: a size and its name, and the variants of the benchmark with theirs.
SPEEDS = (
    ("4 x 8B, 2x4096", "4 blocks of width 4,096, one GPU", (
        ("bf16", "bf16_mixed"), ("auto", "auto"), ("fp8", "FP8"), ("fp8, head, fast", "FP8, head, fast accumulation"),
        ("fp8, head, fast, masters", "the same, masters in the optimizer"),
    )),
    ("6 x 8B, 2x4096, FSDP2", "6 blocks of width 4,096, FSDP2 on two GPUs", (("bf16", "bf16_mixed"), ("fp8", "FP8"))),
    ("6 x 8B, 2x4096, ZeRO-2", "6 blocks of width 4,096, ZeRO-2 on two GPUs", (
        ("fp8", "FP8, reduced in FP32"), ("fp8, reduced in bf16", "FP8, reduced in BF16 as stock"),
    )),
    ("8 x 2048, 2x4096", "8 blocks of width 2,048, one GPU", (("auto", "auto"), ("fp8", "FP8"))),
    ("12 x 768, 1x1024", "12 blocks of width 768, one row of 1,024 tokens", (
        ("bf16", "bf16_mixed"), ("auto", "auto"), ("bf16, graphs", "bf16_mixed, CUDA graphs"),
    )),
)  # fmt: skip

#: The steps of a run: title, the lines below it, and its color.
FLOW = (
    ("Declare", ("one policy:", "a recipe in mp.yaml", "or in the script"), "text"),
    ("Enforce", ("accelerate, DeepSpeed,", "FSDP, torch, torchao,", "Transformer Engine"), "text"),
    ("Prove", ("each rank compares what", "ran with the policy:", "steps 1, 2, 4, 8, ..."), "text"),
)


def main() -> int:
    for theme, colors in THEMES.items():
        for name, drawing in (("flow", flow(colors)), ("packages", packages(colors)), ("speed", speed(colors))):
            DOCS.joinpath(f"{name}-{theme}.svg").write_text(drawing, "utf-8")
    return 0


def flow(theme: Theme) -> str:
    """Return the drawing of declare, enforce, prove, and the two ends of a run."""
    parts = []
    width, gap, top, height = 210, 40, 40, 120
    for place, (title, lines, color) in enumerate(FLOW):
        x = place * (width + gap) + 10
        parts += [
            _box(x, top, width, height, theme),
            _text(x + width / 2, top + 32, title, theme[color], 20, bold=True),
        ]
        parts += [_text(x + width / 2, top + 58 + 20 * i, line, theme["dim"], 14) for i, line in enumerate(lines)]
        if place:
            parts.append(_arrow(x - gap, top + height / 2, x, top + height / 2, theme))
    x, middle = 3 * (width + gap) + 10, top + height / 2
    for y, title, line, color in ((30, "in force", "status 0, and a proof file", "good"),
                                  (110, "not in force", "status 1, and what to change", "bad")):  # fmt: skip
        parts.append(_box(x, y, 180, 60, theme, edge=theme[color]))
        parts.append(_text(x + 90, y + 26, title, theme[color], 16, bold=True))
        parts.append(_text(x + 90, y + 47, line, theme["dim"], 11))
        parts.append(_arrow(x - gap, middle, x, y + 30, theme))
    return _svg(parts, 200, theme, "Declare, enforce, prove; a run ends in force with status 0, or not with status 1")


def packages(theme: Theme) -> str:
    """Return the drawing of the packages in layers: each imports only from layers below it."""
    names, layers = _packages()
    parts, y, height, gap = [], 20, 62, 22
    for layer in layers:
        width = min(300.0, (WIDTH - 20 - 14 * (len(layer) - 1)) / len(layer))
        x = (WIDTH - len(layer) * width - 14 * (len(layer) - 1)) / 2
        for name in layer:
            parts += [
                _box(x, y, width, height, theme),
                _text(x + width / 2, y + 22, name, theme["text"], 15, bold=True),
            ]
            lines = _broken(names[name], int(width / 6.2))
            parts += [_text(x + width / 2, y + 39 + 14 * i, line, theme["dim"], 11) for i, line in enumerate(lines)]
            x += width + 14
        y += height + gap
    note = "A package imports only from layers below it; runtime and lint import nothing of each other."
    parts.append(_text(WIDTH / 2, y + 4, note, theme["dim"], 13))
    return _svg(parts, y + 20, theme, "The packages of mpguard in layers")


def speed(theme: Theme) -> str:
    """Return bars: how many times as fast a step is as the same script with `torch.compile` alone."""
    results = json.loads((DOCS.parent / "benchmarks" / "results" / "fp8.json").read_text("utf-8"))
    rows = {(row["size"], row["variant"]): row for row in results["rows"] if "ratio" in row}
    left, scale, y = 300, 270.0, 50
    one = left + scale
    parts = [_text(one, 24, "stock script with torch.compile: 1", theme["dim"], 13)]
    for size, name, variants in SPEEDS:
        devices = {rows[size, variant]["device"].split()[1] for variant, _ in variants}
        parts.append(
            _text(12, y + 4, f"{name} ({' and '.join(sorted(devices))})", theme["text"], 14, bold=True, at="start")
        )
        y += 16
        for variant, label in variants:
            ratio = rows[size, variant]["ratio"]
            color = theme["good"] if ratio >= 1.005 else theme["edge"]
            parts += [
                _text(left - 10, y + 14, label, theme["dim"], 13, at="end"),
                f'<rect x="{left}" y="{y}" width="{ratio * scale:.1f}" height="18" rx="3" fill="{color}"/>',
                _text(left + ratio * scale + 8, y + 14, f"{ratio:.2f}", theme["text"], 13, at="start"),
            ]
            y += 24
        y += 20
    line = f'<line x1="{one:g}" y1="34" x2="{one:g}" y2="{y - 16}" stroke="{theme["text"]}" stroke-dasharray="3 3"/>'
    return _svg([*parts, line], y, theme, "Speed of a training step against the same script with torch.compile alone")


def _packages() -> tuple[dict[str, str], list[list[str]]]:
    """Return the packages with their descriptions, and their layers from the top, as architecture.md has them."""
    diagram = DOCS.joinpath("architecture.md").read_text("utf-8").split("```mermaid")[1].split("```")[0]
    names = {name: text for name, text in re.findall(r"^    (\w+)\[\w+<br>(.*)\]$", diagram, re.M) if name != "plugins"}
    below: dict[str, set[str]] = {name: set() for name in names}
    for line in re.findall(r"^    (\w+(?: --> \w+)+)$", diagram, re.M):
        chain = line.split(" --> ")
        for upper, lower in itertools.pairwise(chain):
            below[upper].add(lower)
    depth: dict[str, int] = {}

    def depth_of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max(map(depth_of, below[name]), default=-1)
        return depth[name]

    highest = max(map(depth_of, names))
    return names, [[name for name in names if depth[name] == level] for level in range(highest, -1, -1)]


def _broken(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _box(x: float, y: float, width: float, height: float, theme: Theme, *, edge: str | None = None) -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"'
    return f'{shape} fill="{theme["box"]}" stroke="{edge or theme["edge"]}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, color: str, size: int, *, bold: bool = False, at: str = "") -> str:
    more = (' font-weight="600"' if bold else "") + (f' text-anchor="{at}"' if at else "")
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}"{more}>{escape(text)}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float, theme: Theme) -> str:
    line = f'<line x1="{x + 4:g}" y1="{y:g}" x2="{to_x - 6:g}" y2="{to_y:g}"'
    return f'{line} stroke="{theme["edge"]}" stroke-width="2" marker-end="url(#head)"/>'


def _svg(parts: Sequence[str], height: float, theme: Theme, title: str) -> str:
    head = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{theme["edge"]}"/></marker></defs>'
    )
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" text-anchor="middle"'
    )
    back = f'<rect width="{WIDTH}" height="{height:g}" fill="{theme["page"]}"/>'
    return "\n".join([f"{opening} {_SANS}>", f"<title>{escape(title)}</title>", head, back, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
