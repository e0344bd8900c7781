"""How long an editor waits for `mpguard server`: a real client over stdio, typing into real and made-up files.

    python benchmarks/server.py [--edits 60] [-o benchmarks/results/server.json]

From a keystroke to its diagnostics, with the pause in which the server waits for a further keystroke; and the CPU time
of the server for it, which a busy machine changes less. `check_alone` is one check of the same text in a new engine in
this process, without what a server keeps from the version before; it takes turns with the keystrokes.
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

from lsprotocol import types
from startup import _cpu, training_script

from mpguard.lint.engine import Engine, Options
from mpguard.lint.files import Target
from mpguard.lint.rule import rules
from mpguard.server.session import TYPING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from editor import Editor, editor

#: What the issue asks for a file of 1,000 lines, after the first.
BOUND_MS = 100


def files() -> Iterator[tuple[str, str]]:
    """Name and text of what is typed into."""
    yield "training loops one after another, made up", training_script(33_000)
    for name in ("accelerate.utils.fsdp_utils", "transformers.trainer_seq2seq", "torch.amp.grad_scaler"):
        package = name.split(".")[0]
        top = importlib.util.find_spec(package)
        assert top is not None and top.origin is not None
        path = Path(top.origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
        yield f"{package} {importlib.metadata.version(package)}: {path.name}", path.read_text(encoding="utf-8")


def cpu_ms(process: int) -> float:
    """CPU time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def alone_ms(text: str, path: str) -> float:
    """CPU time of one check in a new engine."""
    engine = Engine(rules(own_only=True), Options())
    target = Target(path, "python", data=text.encode())
    gc.collect()
    begin = time.process_time()
    engine.check(target)
    return (time.process_time() - begin) * 1000


async def typed(client: Editor, folder: Path, text: str, edits: int) -> dict[str, Any]:
    """One file: opened, then a character typed at a time in the middle of a line in the middle of it."""
    uri, path = (folder / "train.py").as_uri(), str(folder / "train.py")
    begin = time.perf_counter()
    found = await client.open(uri, text)
    opened = (time.perf_counter() - begin) * 1000
    lines = text.split("\n")
    line = next(n for n in range(len(lines) // 2, len(lines)) if lines[n].startswith("    ") and "=" in lines[n])
    server = client._server
    assert server is not None
    waits, alone = [], []
    spent = 0.0
    for number in range(edits):
        place = types.Position(line, len(lines[line]))
        typing = types.TextDocumentContentChangePartial(types.Range(place, place), "  #" if not number else "x")
        lines[line] += typing.text
        before, begin = cpu_ms(server.pid), time.perf_counter()
        await client.change(uri, number + 2, typing)
        waits.append((time.perf_counter() - begin) * 1000)
        spent += cpu_ms(server.pid) - before
        if number % 6 == 0:
            alone.append(alone_ms("\n".join(lines), path))
    identifier = types.TextDocumentIdentifier(uri)
    client.text_document_did_close(types.DidCloseTextDocumentParams(identifier))
    client.published.pop(uri, None)
    quartiles = statistics.quantiles(waits[1:], n=4)
    return {
        "lines": len(lines),
        "bytes": len(text.encode()),
        "findings": len(found),
        "opened_ms": round(opened, 1),
        "keystroke_to_diagnostics_ms": round(quartiles[1], 1),
        "quartiles_ms": [round(quartiles[0], 1), round(quartiles[2], 1)],
        "server_cpu_ms": round(spent / edits, 1),
        "check_alone_cpu_ms": round(statistics.median(alone), 1),
        "server_to_check_alone": round(spent / edits / statistics.median(alone), 2),
    }


async def measured(edits: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mpguard-server-") as name:
        folder = Path(name)
        begin = time.perf_counter()
        async with editor(folder) as client:
            await client.until(lambda: client.watchers)
            started = (time.perf_counter() - begin) * 1000
            await client.open((folder / "first.py").as_uri(), "import torch\nscaler = torch.cuda.amp.GradScaler()\n")
            found = {what: await typed(client, folder, text, edits) for what, text in files()}
            assert client.messages == []
    return {"start_to_ready_ms": round(started, 1), "files": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=60)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "server.json")
    options = parser.parse_args()
    load = [round(each, 2) for each in os.getloadavg()]
    result = {
        "what": "from a keystroke to its diagnostics in an editor, over stdio",
        "unit": "ms, medians; wall clock where it does not say cpu",
        "edits": options.edits,
        "pause_in_it_ms": TYPING * 1000,
        "bound_ms_for_1000_lines": BOUND_MS,
        **asyncio.run(measured(options.edits)),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "load_average_before": load, "niceness": os.nice(0)},
        "versions": {
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            **{name: importlib.metadata.version(name) for name in ("mpguard", "libcst", "pygls", "lsprotocol")},
        },
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    for what, each in result["files"].items():
        print(
            f"{what:45}{each['lines']:6} lines {each['keystroke_to_diagnostics_ms']:7.1f} ms,"
            f" cpu {each['server_cpu_ms']:6.1f} ms, alone {each['check_alone_cpu_ms']:6.1f} ms"
        )
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
