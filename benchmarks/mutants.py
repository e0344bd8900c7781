"""Lint randomly changed real files with all rules, preview rules included: no rule may raise or hang.

    python benchmarks/mutants.py FOLDER [--mutants 200000] [--seed 1] [-j 2] [-o benchmarks/results/mutants.json]

FOLDER is what `evidence.py fetch` unpacked, or any other with Python and config files. A mutant is a file in which
bytes, tokens, names or lines were changed, moved or cut off; from files up to 16 KB that pass the prefilter, so
that the rules run on them, and small ones more often. Reported: rules that raised, files that killed a worker, files
that took longer than 10 s. The exit status is 1 if there was any.

With `-o`, an existing result file is continued: mutants are numbered, those that failed before are tried again first,
and it is written after every part. `linters` counts the mutants that each state of the linter's code was tried with.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import keyword
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

import mpguard
from mpguard.core.text_edits import write_atomically
from mpguard.lint.model.result import CONFIG, SYNTAX
from mpguard.lint.model.rule import Rule, rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run import prefilter, workers
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target, collect, kind_of

LARGEST = 16 << 10
#: More CPU time than this is a hang; waiting for a busy machine is not.
SECONDS = 10
#: Mutants between two writes of the results.
PART = 2_000
_TOKEN = re.compile(rb"\w+|\s+|[^\w\s]")
#: Words that rules search for, inserted where they were not.
_WORDS = [
    *b"half float16 scaler scale backward step autocast with lambda self if else for while try except yield".split(),
    *rb"None 0 '' \ @ class def return await * ** ( ) [ ] : = := ,".split(),
    *(b"import torch", b"\xff", b"\x00", b"\r", b"\f", b"\t"),
]


_KEYWORDS = frozenset(map(str.encode, (*keyword.kwlist, "self")))
#: A line that holds a statement with its brackets closed.
_STATEMENT = re.compile(rb" *[A-Za-z_][^()\[\]{}:\"']*(?:\([^()\[\]{}]*\)[^()\[\]{}:\"']*)?\r?\n")


class Outcome(NamedTuple):
    """The outcome of one mutant. seconds: CPU time; failed: which rule failed, and how."""

    seconds: float
    findings: int
    parsed: bool
    failed: tuple[str, ...]


class Hang(BaseException):
    """A mutant took too long. A BaseException, so that no handler on the way catches it."""


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


def _names(data: bytes, random: random.Random) -> bytes:
    """Replace names and numbers by others of the file: most of it still parses and reaches the rules."""
    tokens = _TOKEN.findall(data)
    names, numbers = [], []
    for place, token in enumerate(tokens):
        if token.isdigit():
            numbers.append(place)
        elif (token[:1].isalpha() or token[:1] == b"_") and token not in _KEYWORDS:
            names.append(place)
    for _ in range(random.randint(1, 12)):
        places = random.choice([names, names, names, numbers])
        if places:
            tokens[random.choice(places)] = tokens[random.choice(places)]
    return b"".join(tokens)


def _statements(data: bytes, random: random.Random) -> bytes:
    """Remove or double lines that are a statement, or replace them by others of the same indentation."""
    lines = data.splitlines(keepends=True)
    whole = [i for i, line in enumerate(lines) if _STATEMENT.fullmatch(line)]
    depth = {i: len(lines[i]) - len(lines[i].lstrip(b" ")) for i in whole}
    for _ in range(random.randint(1, 4) if whole else 0):
        place = random.choice(whole)
        other = random.choice([i for i in whole if depth[i] == depth[place]])
        lines[place] = random.choice([b"", lines[place] * 2, lines[other]])
    return b"".join(lines)


def _lines(data: bytes, random: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b"x\n"]
    for _ in range(random.randint(1, 4)):
        place, other = random.randrange(len(lines)), random.randrange(len(lines))
        lines[place] = random.choice([b"", lines[other], b"    " + lines[place], lines[place].lstrip(b" ")])
    return b"".join(lines)


def _cut(data: bytes, random: random.Random) -> bytes:
    start = random.randrange(len(data) + 1)
    return random.choice([data[:start], data[start:]])


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _bytes,
    _tokens,
    _lines,
    _cut,
    _names,
    _names,
    _statements,
    _statements,
)


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
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        report = engine.check(Target(mutant.path, kind, data=data, named=True, size=len(data)))
    except Hang:
        return Outcome(SECONDS, 0, False, (f"still at work after {SECONDS} s",))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    failed = tuple(f"{each.code}: {each.error}" for each in report.defects)
    parsed = not any(each.code in (SYNTAX, CONFIG) for each in report.findings)
    return Outcome(time.process_time() - begin, len(report.findings), parsed, failed)


def _hang(*_: object) -> None:
    raise Hang


def files(folder: Path) -> list[str]:
    """Return the files that mutants are made from."""
    python = [rule for rule in rules(own_only=True).values() if issubclass(rule, Rule) and rule.triggers]
    chosen = []
    for target in collect([str(folder)]).targets:
        if target.problem is None and 0 < target.size <= LARGEST and target.kind in ("python", "config"):
            data = Path(target.path).read_bytes()
            if target.kind == "config" or prefilter.relevant(data, python):
                chosen.append(target.path)
    configs = [path for path in chosen if kind_of(path) == "config"]
    return [path for path in chosen if kind_of(path) == "python"] + configs[:: max(1, len(configs) // 200)]


class Tries:
    """Checks mutants, and counts the outcomes for the result file."""

    def __init__(self, folder: Path, result: dict[str, Any], jobs: int) -> None:
        self.paths, self.result, self._jobs, self._folder = files(folder), result, jobs, folder
        self._weights = [Path(path).stat().st_size ** -0.5 for path in self.paths]
        self._engine = Engine(rules(own_only=True), Options(Selectors(select=("ALL",), preview=True)))
        self._linter = linter()

    def again(self) -> None:
        """Return the mutants that failed before."""
        failed = [Mutant(str(self._folder / each["file"]), each["seed"]) for each in self.result["failed"]]
        if failed:
            self.result["failed"] = []
            self._check(failed)
            self.result["fixed"] += len(failed) - len(self.result["failed"])

    def part(self, mutants: int) -> None:
        done, seed = self.result["mutants"], self.result["seed"]
        tasks = []
        for number in range(done, done + mutants):
            chance = random.Random(f"{seed} {number}")
            tasks.append(Mutant(chance.choices(self.paths, self._weights)[0], chance.getrandbits(64)))
        self._check(tasks)
        self.result["mutants"] += mutants
        self.result["linters"][self._linter] = self.result["linters"].get(self._linter, 0) + mutants

    def _check(self, tasks: list[Mutant]) -> None:
        begin = time.perf_counter()
        outcomes = workers.run(
            tasks,
            lambda task: check(task, self._engine),
            lambda _, how: Outcome(0, 0, False, (f"the worker {how}",)),
            lambda _: LARGEST,
            self._jobs,
        )
        for task, outcome in zip(tasks, outcomes, strict=True):
            name = os.path.relpath(task.path, self._folder)
            self.result["failed"] += [{"file": name, "seed": task.seed, "how": how} for how in outcome.failed[:1]]
            self.result["findings"] += outcome.findings
            self.result["parsed"] += outcome.parsed
            self.result["slowest_seconds"] = max(self.result["slowest_seconds"], round(outcome.seconds, 2))
        self.result["seconds"] += round(time.perf_counter() - begin)
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
        self.result["memory_mib"] = max(self.result["memory_mib"], memory)


def linter() -> str:
    """Return a digest of the linter's code."""
    folder = Path(mpguard.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def described() -> dict[str, Any]:
    """Return the arguments of the next part."""
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("mpguard", "libcst")}
        | {"python": platform.python_version()},
        "hardware": {"cores": os.cpu_count(), "machine": platform.machine()},
    }


def begun(output: Path | None, seed: int) -> dict[str, Any]:
    """Return the results so far."""
    if output is not None and output.exists():
        result: dict[str, Any] = json.loads(output.read_text())
        if result["seed"] != seed:
            sys.exit(f"{output}: is of seed {result['seed']}, not {seed}; give that, or another file")
        return result | described()
    zeros = dict.fromkeys(("mutants", "findings", "parsed", "fixed", "seconds", "memory_mib"), 0)
    return described() | {"seed": seed, **zeros, "slowest_seconds": 0.0, "linters": {}, "failed": []}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", type=int, default=200_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-j", "--jobs", type=int, default=workers.available())
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result = begun(options.output, options.seed)
    tries = Tries(options.folder, result, options.jobs)
    signal.signal(signal.SIGPROF, _hang)
    result["files"] = len(tries.paths)
    tries.again()
    while result["mutants"] < options.mutants:
        tries.part(min(PART, options.mutants - result["mutants"]))
        if options.output:
            write_atomically(options.output, (json.dumps(result, indent=2) + "\n").encode())
    print(json.dumps(result, indent=2))
    return int(bool(result["failed"]))


if __name__ == "__main__":
    sys.exit(main())
