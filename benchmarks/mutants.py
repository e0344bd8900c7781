"""Broken files break no rule: random changes of real files, linted with all rules, preview ones too.

    python benchmarks/mutants.py FOLDER [--mutants 200000] [--seed 1] [-j 2] [-o benchmarks/results/mutants.json]

FOLDER is what `evidence.py fetch` unpacked, or any other with Python and config files. A mutant is a file in which
bytes, tokens or lines were changed, moved or cut off; from files up to 16 KB about which a rule could speak, so that
the rules see them. Reported: rules that raised, files that a worker died of, files that took longer than 10 s.
The exit status is 1 if there was any.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mpguard.lint import gate, workers
from mpguard.lint.engine import Engine, Options
from mpguard.lint.files import Target, collect, kind_of
from mpguard.lint.rule import Rule, rules
from mpguard.lint.selection import Selectors

LARGEST = 16 << 10
#: Computing longer than this is a hang; waiting for a busy machine is none.
SECONDS = 10
_TOKEN = re.compile(rb"\w+|\s+|[^\w\s]")
#: What rules look for, put where it was not.
_WORDS = [
    *b"half float16 scaler scale backward step autocast with lambda self if else for while try except yield".split(),
    *rb"None 0 '' \ @ class def return await * ** ( ) [ ] : = := ,".split(),
    *(b"import torch", b"\xff", b"\x00", b"\r", b"\f", b"\t"),
]


class Outcome(NamedTuple):
    """What became of one mutant. failed: who failed, on which mutant, and how."""

    seconds: float
    findings: int
    failed: tuple[str, ...]


class Hang(BaseException):
    """A mutant took too long. No Exception, so that nothing on the way swallows it."""


def _bytes(data: bytes, random: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.randint(1, 8)):
        place = random.randrange(len(changed) + 1)
        changed[place : place + random.randint(0, 3)] = random.randbytes(random.randint(0, 3))
    return bytes(changed)


def _tokens(data: bytes, random: random.Random) -> bytes:
    tokens = _TOKEN.findall(data) or [b"x"]
    for _ in range(random.randint(1, 6)):
        place = random.randrange(len(tokens))
        tokens[place] = random.choice([b"", random.choice(_WORDS), random.choice(tokens), tokens[place] * 2])
    return b"".join(tokens)


def _lines(data: bytes, random: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b"x\n"]
    for _ in range(random.randint(1, 4)):
        place, other = random.randrange(len(lines)), random.randrange(len(lines))
        lines[place] = random.choice([b"", lines[other], b"    " + lines[place], lines[place].lstrip(b" ")])
    return b"".join(lines)


def _cut(data: bytes, random: random.Random) -> bytes:
    start = random.randrange(len(data) + 1)
    return random.choice([data[:start], data[start:]])


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (_bytes, _tokens, _lines, _cut)


class Mutant(NamedTuple):
    path: str
    seed: int

    def content(self) -> bytes:
        chance = random.Random(self.seed)
        data = Path(self.path).read_bytes()
        for _ in range(chance.choice((1, 1, 2))):
            data = chance.choice(MUTATIONS)(data, chance)
        return data


def check(mutant: Mutant, engine: Engine) -> Outcome:
    kind = kind_of(mutant.path)
    assert kind is not None
    data = mutant.content()
    begin = time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        report = engine.check(Target(mutant.path, kind, data=data, named=True, size=len(data)))
    except Hang:
        return Outcome(SECONDS, 0, (f"{mutant}: still at work after {SECONDS} s",))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    failed = tuple(f"{mutant}: {each.code}: {each.error}" for each in report.defects)
    return Outcome(time.perf_counter() - begin, len(report.findings), failed)


def _hang(*_: object) -> None:
    raise Hang


def files(folder: Path) -> list[str]:
    """The files that mutants are made of."""
    python = [rule for rule in rules(own_only=True).values() if issubclass(rule, Rule) and rule.triggers]
    chosen = []
    for target in collect([str(folder)]).targets:
        if target.problem is None and 0 < target.size <= LARGEST and target.kind in ("python", "config"):
            data = Path(target.path).read_bytes()
            if target.kind == "config" or gate.relevant(data, python):
                chosen.append(target.path)
    configs = [path for path in chosen if kind_of(path) == "config"]
    return [path for path in chosen if kind_of(path) == "python"] + configs[:: max(1, len(configs) // 200)]


def run(folder: Path, mutants: int, seed: int, jobs: int) -> dict[str, Any]:
    paths = files(folder)
    chance = random.Random(seed)
    tasks = [Mutant(chance.choice(paths), chance.getrandbits(64)) for _ in range(mutants)]
    engine = Engine(rules(own_only=True), Options(Selectors(select=("ALL",), preview=True)))
    signal.signal(signal.SIGPROF, _hang)
    begin = time.perf_counter()
    outcomes = workers.run(
        tasks,
        lambda task: check(task, engine),
        lambda task, how: Outcome(0, 0, (f"{task}: the worker {how}",)),
        lambda _: LARGEST,
        jobs,
    )
    failed = [line for outcome in outcomes for line in outcome.failed]
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {
            "mpguard": importlib.metadata.version("mpguard"),
            "libcst": importlib.metadata.version("libcst"),
            "python": platform.python_version(),
        },
        "hardware": {"cores": os.cpu_count(), "machine": platform.machine()},
        "files": len(paths),
        "mutants": mutants,
        "seed": seed,
        "findings": sum(outcome.findings for outcome in outcomes),
        "slowest_seconds": round(max(outcome.seconds for outcome in outcomes), 2),
        "seconds": round(time.perf_counter() - begin),
        "memory_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
        "failed": failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-j", "--jobs", type=int, default=workers.available())
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result = run(options.folder, options.mutants, options.seed, options.jobs)
    text = json.dumps(result, indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text, end="")
    return int(bool(result["failed"]))


if __name__ == "__main__":
    sys.exit(main())
