"""Measure how long an editor waits for `mpguard server`: a client types into real and synthetic files over stdio.

    python benchmarks/server.py [FOLDER [--files 100]] [--edits 60] [-o benchmarks/results/server.json]

From a keystroke to its diagnostics, with the pause in which the server waits for a further keystroke; and the CPU time
of the server for it, which a busy machine changes less. `check_alone` is one check of the same text in a new engine in
this process, without what a server keeps from the previous version; it is run in turn with the keystrokes. For
the files of FOLDER, the time that libcst takes to parse them is measured too: a server without a cache would need it at
each keystroke.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libcst
from lsprotocol import types
from startup import _cpu, training_script

from mpguard.lint.model.rule import Rule, rules
from mpguard.lint.run import prefilter
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target, kind_of
from mpguard.server.session import TYPING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from lsp_client import Editor, editor

#: The targets for a file of 1,000 lines, after the first check.
BOUND_MS = 100


#: Lines of a file that counts as one of 1,000 lines.
LINES = (850, 1150)


def files() -> Iterator[tuple[str, str, str]]:
    """A text that is typed into: its kind, name and content."""
    yield "training loops one after another, made up", "train.py", training_script(33_000)
    yield "a launch config with many comments, made up", "mp.yaml", launch_config(1_000)
    for name in ("accelerate.utils.fsdp_utils", "transformers.trainer_seq2seq", "torch.amp.grad_scaler"):
        package = name.split(".")[0]
        top = importlib.util.find_spec(package)
        assert top is not None and top.origin is not None
        path = Path(top.origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
        what = f"{package} {importlib.metadata.version(package)}: {path.name}"
        yield what, path.name, path.read_text(encoding="utf-8")


def launch_config(lines: int) -> str:
    """Return an accelerate config with comments and old keys, as in real projects."""
    keys = "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  amax_history_length: 16\n"
    own = "".join(
        f"  fsdp_own_{n}: {{a: [1, 2], b: text}}\n" + "  # as before: fsdp_version: 1\n" * 19
        for n in range(lines // 20)
    )
    return f"{keys}fsdp_config:\n{own}"


def cpu_ms(process: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def alone_ms(text: str, path: str) -> float:
    """Return the CPU time of one check in a new engine."""
    engine = Engine(rules(own_only=True), Options())
    target = Target(path, kind_of(path) or "python", data=text.encode())
    gc.collect()
    begin = time.process_time()
    engine.check(target)
    return (time.process_time() - begin) * 1000


def parse_ms(text: str) -> float:
    """Return the CPU time in which libcst parses the whole text."""
    gc.collect()
    begin = time.process_time()
    libcst.parse_module(text)
    return (time.process_time() - begin) * 1000


class Typist:
    """Types into an open text, a character at a time, and measures the time until findings are published."""

    def __init__(self, client: Editor, uri: str, text: str) -> None:
        assert client._server is not None
        self.client, self.uri, self.lines, self.version = client, uri, text.split("\n"), 1
        self.server = client._server.pid
        self.waits: list[float] = []
        self.cpu = 0.0

    def places(self, count: int) -> list[int]:
        """Return lines with an assignment in the middle of a text, and between the middle and its ends."""
        found = [n for n, line in enumerate(self.lines) if line.startswith("    ") and "=" in line]
        found = found or list(range(len(self.lines)))
        return [found[len(found) * part // (count + 1)] for part in range(1, count + 1)]

    async def key(self, line: int, typed: str) -> None:
        place = types.Position(line, len(self.lines[line]))
        change = types.TextDocumentContentChangePartial(types.Range(place, place), typed)
        self.lines[line] += typed
        self.version += 1
        before, begin = cpu_ms(self.server), time.perf_counter()
        await self.client.change(self.uri, self.version, change)
        self.waits.append((time.perf_counter() - begin) * 1000)
        self.cpu += cpu_ms(self.server) - before

    def close(self) -> None:
        identifier = types.TextDocumentIdentifier(self.uri)
        self.client.text_document_did_close(types.DidCloseTextDocumentParams(identifier))
        self.client.published.pop(self.uri, None)


async def typed(client: Editor, folder: Path, name: str, text: str, edits: int) -> dict[str, Any]:
    """Open one file, then type one character at a time in the middle of a line in its middle."""
    path = folder / name
    begin = time.perf_counter()
    found = await client.open(path.as_uri(), text, "python" if name.endswith(".py") else "yaml")
    opened = (time.perf_counter() - begin) * 1000
    typist = Typist(client, path.as_uri(), text)
    (line,) = typist.places(1)
    alone = []
    for number in range(edits):
        await typist.key(line, "x" if number else "  #")
        if number % 6 == 0:
            alone.append(alone_ms("\n".join(typist.lines), str(path)))
    typist.close()
    quartiles = statistics.quantiles(typist.waits[1:], n=4)
    return {
        "lines": len(typist.lines),
        "bytes": len(text.encode()),
        "findings": len(found),
        "opened_ms": round(opened, 1),
        "keystroke_to_diagnostics_ms": round(quartiles[1], 1),
        "quartiles_ms": [round(quartiles[0], 1), round(quartiles[2], 1)],
        "server_cpu_ms": round(typist.cpu / edits, 1),
        "check_alone_cpu_ms": round(statistics.median(alone), 1),
        "server_to_check_alone": round(typist.cpu / edits / max(statistics.median(alone), 0.1), 2),
    }


def awake(folder: Path, most: int) -> list[Path]:
    """Return the largest files of about 1,000 lines below a folder that pass the prefilter, each content once."""
    on = [rule for rule in rules(own_only=True).values() if issubclass(rule, Rule)]
    found: dict[bytes, Path] = {}
    for path in sorted(folder.rglob("*.py")):
        data = path.read_bytes() if path.is_file() else b""
        if LINES[0] <= data.count(b"\n") <= LINES[1] and prefilter.relevant(data, on):
            found.setdefault(data, path)
    return [found[data] for data in sorted(found, key=len, reverse=True)[:most]]


async def typed_into(client: Editor, folder: Path, path: Path) -> dict[str, float] | None:
    """Do the same for one of many files, at three positions. Return None if libcst cannot parse it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        parse = min(parse_ms(text) for _ in range(2))
    except libcst.ParserSyntaxError:
        return None
    uri = (folder / path.name).as_uri()
    await client.open(uri, text)
    typist = Typist(client, uri, text)
    for line in typist.places(3):
        for character in ("  #", "x", "y", "z"):
            await typist.key(line, character)
    typist.close()
    return {
        "keystroke_to_diagnostics_ms": statistics.median(typist.waits),
        "longest_ms": max(typist.waits),
        "server_cpu_ms": typist.cpu / len(typist.waits),
        "libcst_parse_cpu_ms": parse,
    }


async def of_folder(client: Editor, work: Path, folder: Path, most: int) -> dict[str, Any]:
    found: dict[str, dict[str, float]] = {}
    for path in awake(folder, most):
        measured = await typed_into(client, work, path)
        if measured is not None:
            found[str(path.relative_to(folder))] = measured

    def spread(what: str) -> dict[str, float]:
        values = sorted(each[what] for each in found.values())
        names = {"median": 0.5, "9 of 10 below": 0.9, "worst": 1.0}
        return {name: round(values[min(int(share * len(values)), len(values) - 1)], 1) for name, share in names.items()}

    ratios = sorted(each["server_cpu_ms"] / each["libcst_parse_cpu_ms"] for each in found.values())
    slowest = sorted(found, key=lambda name: -found[name]["server_cpu_ms"])[:10]
    return {
        "what": f"the {len(found)} largest of {LINES[0]} to {LINES[1]} lines that wake a rule",
        "keys": "12 in each, at 3 places",
        **{what: spread(what) for what in next(iter(found.values()))},
        "server_cpu_to_libcst_parse_cpu": {
            "median": round(statistics.median(ratios), 2),
            "worst": round(ratios[-1], 2),
        },
        "slowest": {name: {what: round(each, 1) for what, each in found[name].items()} for name in slowest},
    }


async def measured(edits: int, source: Path | None, most: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mpguard-server-") as name:
        folder = Path(name)
        begin = time.perf_counter()
        async with editor(folder) as client:
            await client.until(lambda: client.watchers)
            started = (time.perf_counter() - begin) * 1000
            await client.open((folder / "first.py").as_uri(), "import torch\nscaler = torch.cuda.amp.GradScaler()\n")
            found = {what: await typed(client, folder, name, text, edits) for what, name, text in files()}
            many = {"folder": await of_folder(client, folder, source, most)} if source is not None else {}
            assert client.messages == [], client.messages
    return {"start_to_ready_ms": round(started, 1), "files": found, **many}


def before(given: str) -> dict[str, Any]:
    """Return the result of another revision for the folder, without single files."""
    revision, _, file = given.partition("=")
    folder = json.loads(Path(file).read_text(encoding="utf-8"))["folder"]
    return {"revision": revision, **{what: figure for what, figure in folder.items() if what != "slowest"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="whose Python files are typed into besides")
    parser.add_argument("--edits", type=int, default=60)
    parser.add_argument("--files", type=int, default=100, help="so many of the folder's, the largest")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "server.json")
    parser.add_argument("--before", metavar="REVISION=FILE", help="the result of another revision, which is included")
    options = parser.parse_args()
    load = [round(each, 2) for each in os.getloadavg()]
    result = {
        "what": "from a keystroke to its diagnostics in an editor, over stdio",
        "unit": "ms, medians; wall clock where it does not say cpu",
        "edits": options.edits,
        "pause_in_it_ms": TYPING * 1000,
        "bound_ms_for_1000_lines": BOUND_MS,
        **asyncio.run(measured(options.edits, options.folder, options.files)),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "load_average_before": load, "niceness": os.nice(0)},
        "versions": {
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            **{name: importlib.metadata.version(name) for name in ("mpguard", "libcst", "pygls", "lsprotocol")},
        },
    }
    if options.before:
        result["before"] = before(options.before)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    for what, each in result["files"].items():
        print(
            f"{what:45}{each['lines']:6} lines {each['keystroke_to_diagnostics_ms']:7.1f} ms,"
            f" cpu {each['server_cpu_ms']:6.1f} ms, alone {each['check_alone_cpu_ms']:6.1f} ms"
        )
    for what, each in result.get("folder", {}).items():
        print(what, each)
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
