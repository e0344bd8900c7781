"""What the linter finds in public repositories with training code, and how much of a sample of it is right.

    python benchmarks/corpus.py lint FOLDER --half open -o FOUND.json       # lints the repositories of corpus.txt
    python benchmarks/corpus.py sample FOLDER FOUND.json [--per-rule 20]    # prints findings that have no verdict yet
    python benchmarks/corpus.py record FOUND.json VERDICTS.jsonl            # writes lots/LOT.json
    python benchmarks/corpus.py rules LOT                                   # the numbers of each rule in a lot

FOLDER contains one folder `owner+name` for each row of corpus.txt: a clone of the repository, or the files of the
listed commit (`fetch FOLDER` clones those that are missing). Nothing of them is built, imported or run, and nothing of
them is kept but names, paths and lines.

The hash of its name puts each repository in one of two halves, `open` and `held-out`. Rules may be changed because of
the open half. The other one is linted when the rules are done, and its first numbers are the ones reported.

The sample is drawn by the hash of each finding and of the seed: the same finding is drawn whatever else is found. One
finding of each repository comes before the second of any. It is judged by a reader who did not write the rule, with
the answers that `ANSWERS` lists.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpguard.lint.model.retired import successor
from mpguard.lint.model.rule import rules

HERE = Path(__file__).parent
LIST, LOTS = HERE / "corpus.txt", HERE / "lots"
#: The lots before the last ones: their numbers and verdicts, without the reasons.
EARLIER = LOTS / "earlier.json"
#: They report imports and calls that are everywhere, so they would hide what the others do.
FREQUENT = ("MPG302", "MPG305")
#: Retired rules that were preview rules, and rules that became preview rules after they had been judged: the batches
#: before that day count them, as they did then.
WERE_PREVIEW = frozenset(f"MPG{n}" for n in (105, 106, 308, 309, 313, 316, 410, 411, 412, 605, 607, 702, 703))
PREVIEW_SINCE = {"MPG704": "2026-11-25", **dict.fromkeys(("MPG108", "MPG301", "MPG309", "MPG511"), "2026-11-26")}
#: The answers of a reader to a finding; lots of which a reader gave only one have `verdict` alone.
ANSWERS = {
    "true": "what the message says is so in the code as it is written",
    "verdict": "a maintainer of the code would accept the remark, by the definition on the rule's page",
    "runs": "the place is reached, too, in the program as it was committed: no unrelated fault stops it before",
}
#: The rules that are the reason to run the linter.
HEADLINE = ("MPG101", "MPG201", "MPG401")
#: The lots that the table of rules counts by themselves.
LATEST = 10
SEED = 15
#: The sets of repositories, in the order in which they were judged.
HALVES = ("open", "held-out", "fresh", "latest", "unseen", "second", "wide", *(f"wide{n}" for n in range(2, 48)))

Key = tuple[str, str, int, str]
#: The seeded mistakes of a lot that were found, and all; the same of the headline rules.
Seeded = tuple[tuple[int, int], tuple[int, int]]


class Repository(NamedTuple):
    """A repository at a commit. later: the set that it was added in after the halves were fixed, as `fresh`."""

    name: str
    commit: str
    later: str = ""

    @property
    def folder(self) -> str:
        return self.name.replace("/", "+")

    @property
    def half(self) -> str:
        return self.later or half(self.name)


def half(name: str) -> str:
    """Return the half of the corpus that a repository belongs to, by the hash of its name alone."""
    return "held-out" if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 else "open"


def repositories() -> list[Repository]:
    lines = (line.split() for line in LIST.read_text("utf-8").splitlines() if not line.startswith("#"))
    return [Repository(*line) for line in lines]


def key(item: dict[str, Any]) -> Key:
    return item["repository"], item["path"], item["line"], item["code"]


def fetch(folder: Path) -> None:
    """Clone the repositories that are missing, at their commits."""
    for repository in repositories():
        target = folder / repository.folder
        if not target.exists():
            print(repository.name, file=sys.stderr, flush=True)
            url = f"https://github.com/{repository.name}"
            git = ["git", "-C", str(target)]
            subprocess.run(["git", "init", "--quiet", str(target)], check=True)
            subprocess.run([*git, "fetch", "--quiet", "--depth", "1", url, repository.commit], check=True)
            subprocess.run([*git, "checkout", "--quiet", "FETCH_HEAD"], check=True)


# -- findings -----------------------------------------------------------------------------------------


def lint(folder: Path, which: str) -> dict[str, Any]:
    """Return the findings of all rules, preview rules included, in the repositories of a half that are there.

    Files that no rule is about are not parsed, as in a run without options: who selects MPG000 asks for all of them.
    """
    codes = sorted(set(rules(own_only=True)) - {"MPG000"})
    command = [sys.executable, "-m", "mpguard", "lint", "--format", "json", "--no-cache", "--isolated"]
    command += ["--extend-select", ",".join(codes), "--preview", "-j", "1", "."]
    found: list[dict[str, Any]] = []
    missing, linted, files = [], 0, 0
    for repository in repositories():
        where = folder / repository.folder
        if which not in ("all", repository.half):
            continue
        if not where.is_dir():
            missing.append(repository.name)
            continue
        run = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
        if run.returncode not in (0, 1):
            raise SystemExit(f"{repository.name}: the linter failed: {run.stderr}")
        linted += 1
        files += sum(1 for _ in where.rglob("*.py"))
        for each in json.loads(run.stdout)["findings"]:
            found.append({name: each[name] for name in ("path", "line", "code", "message")})
            found[-1]["repository"] = repository.name
    return {
        "half": which,
        "date": datetime.date.today().isoformat(),
        "linter": _git("rev-parse", "HEAD"),
        "repositories": linted,
        "python files": files,
        "missing": missing,
        "findings": found,
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def drawn(findings: Iterable[dict[str, Any]], per_rule: int, seed: int = SEED) -> list[dict[str, Any]]:
    """Return up to `per_rule` findings of each rule: by hash, one of each repository before the second of any."""

    def order(item: dict[str, Any]) -> str:
        return hashlib.sha256(" ".join(map(str, (seed, *key(item)))).encode()).hexdigest()

    of_rule: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for item in findings:
        of_rule[item["code"]].append(item)
    chosen = []
    for code in sorted(of_rule):
        nth: collections.Counter[str] = collections.Counter()
        ranked = []
        for item in sorted(of_rule[code], key=order):
            nth[item["repository"]] += 1
            ranked.append((nth[item["repository"]], order(item), item))
        chosen += [item for _, _, item in sorted(ranked, key=lambda each: each[:2])[:per_rule]]
    return chosen


def verdicts() -> dict[Key, dict[str, Any]]:
    return {key(each): each for batch in batches() for each in batch["verdicts"]}


@functools.cache
def batches() -> list[dict[str, Any]]:
    """Return the results of the lots, in their order."""
    files = (LOTS / f"{name}.json" for name in HALVES)
    latest = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    return [*json.loads(EARLIER.read_text("utf-8")), *latest]


def show(folder: Path, found: dict[str, Any], per_rule: int, codes: list[str], around: int) -> None:
    """Print the drawn findings that have no verdict, with the lines around them."""
    judged = verdicts()
    for item in drawn(found["findings"], per_rule):
        if key(item) in judged or (codes and item["code"] not in codes):
            continue
        lines = (
            (folder / item["repository"].replace("/", "+") / item["path"]).read_text("utf-8", "replace").splitlines()
        )
        print(f"== {item['repository']} {item['path']}:{item['line']} {item['code']} {item['message']}")
        first = max(0, item["line"] - 1 - around)
        for number, line in enumerate(lines[first : item["line"] + around], first + 1):
            print(f"{number:5}{'>' if number == item['line'] else ' '} {line[:160]}")


def record(found: dict[str, Any], judged: Iterable[dict[str, Any]]) -> None:
    """Write the file of a lot: what was found of each rule, and the verdicts."""
    codes = collections.Counter(item["code"] for item in found["findings"])
    within = {(item["code"], item["repository"]) for item in found["findings"]}
    there = {key(item) for item in found["findings"]}
    kept = sorted(judged, key=key)
    if strange := [each for each in kept if key(each) not in there]:
        raise SystemExit(f"no such finding: {strange[0]}")
    batch = {name: found[name] for name in ("half", "date", "linter", "repositories", "python files")}
    reporting = {item["repository"] for item in found["findings"] if is_counted(item, found)}
    batch["without findings"] = found["repositories"] - len(reporting)
    batch["seed"] = SEED
    batch["findings"] = dict(sorted(codes.items()))
    batch["in repositories"] = {code: sum(each == code for each, _ in within) for code in sorted(codes)}
    batch["true"] = sum(each["true"] for each in kept if is_counted(each, batch))
    file = LOTS / f"{batch['half']}.json"
    batch["rules"] = sorted(rules(own_only=True))
    batch["verdicts"] = kept
    file.write_text(json.dumps(batch, indent=1) + "\n", "utf-8")


# -- the page -----------------------------------------------------------------------------------------


def wilson(right: int, judged: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, by Wilson's formula."""
    z, share = 1.96, right / judged
    middle = share + z * z / (2 * judged)
    spread = z * math.sqrt(share * (1 - share) / judged + z * z / (4 * judged * judged))
    return max(0.0, (middle - spread) / (1 + z * z / judged)), min(1.0, (middle + spread) / (1 + z * z / judged))


def share(right: int, judged: int) -> str:
    low, high = wilson(right, judged)
    return f"{right / judged:.0%} ({low:.0%}-{high:.0%})"


def is_counted(item: dict[str, Any], batch: dict[str, Any]) -> bool:
    """True for a finding of a rule that was on by default then, without the frequent ones and MPG000."""
    return item["code"] not in (*FREQUENT, "MPG000") and not is_preview(item["code"], batch)


def is_preview(code: str, batch: dict[str, Any]) -> bool:
    rule = rules(own_only=True).get(code)
    if rule is None:
        return code in WERE_PREVIEW
    return rule.preview and batch["date"] >= PREVIEW_SINCE.get(code, "")


def table(seeded: dict[str, Seeded]) -> Iterator[str]:
    """Yield the table of the last lots in docs/evidence.md.

    seeded: the mistakes that were found, and all, for each lot.
    """
    yield (
        "| lot (date, commit) | repositories | without a finding | judged | true | accepted | seeded mistakes found"
        f" | of {', '.join(code.removeprefix('MPG') for code in HEADLINE)} |"
    )
    yield "| --- | --: | --: | --: | --: | --: | --: | --: |"
    latest = batches()[-LATEST:]
    for cells in (_sum_row(latest, seeded), *(_row(batch, seeded) for batch in reversed(latest))):
        yield f"| {' | '.join(cells)} |"


def _row(batch: dict[str, Any], seeded: dict[str, Seeded]) -> list[str]:
    """Return the cells of a lot in the table."""
    judged, true, accepted = _counts(batch)
    return [
        f"`{batch['half']}` ({batch['date']}, {batch['linter'][:7]})",
        str(batch["repositories"]),
        str(batch["without findings"]),
        *_cells(judged, true, accepted),
        *map(_found, seeded[batch["half"]]),
    ]


def _sum_row(lots: list[dict[str, Any]], seeded: dict[str, Seeded]) -> list[str]:
    """Return the cells of several lots together."""
    judged, true, accepted = (sum(each) for each in zip(*map(_counts, lots), strict=True))
    mutants = [
        [sum(each) for each in zip(*row, strict=True)]
        for row in zip(*(seeded[lot["half"]] for lot in lots), strict=True)
    ]
    return [
        f"**the last {len(lots)} together**",
        str(sum(lot["repositories"] for lot in lots)),
        str(sum(lot["without findings"] for lot in lots)),
        *_cells(judged, true, accepted),
        *map(_found, mutants),
    ]


def _counts(batch: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many findings of a lot were judged, are true (-1: nobody was asked), and were accepted."""
    counted = [each for each in batch["verdicts"] if is_counted(each, batch)]
    return len(counted), batch.get("true", -1), batch.get("accepted", sum(each["verdict"] for each in counted))


def _cells(judged: int, true: int, accepted: int) -> list[str]:
    return [str(judged), *("" if each < 0 else f"{each}: {share(each, judged)}" for each in (true, accepted))]


def _found(numbers: Iterable[int]) -> str:
    found, mutants = numbers
    return f"{found} of {mutants}: {share(found, mutants)}"


def by_rule() -> dict[str, collections.Counter[str]]:
    """Return how much each rule found in all lots, and how much of what was judged was accepted.

    What a retired rule found counts for its successor.
    """
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for batch in batches():
        for code, number in batch["findings"].items():
            counts[successor(code) or code] += collections.Counter(found=number)
        for each in batch["verdicts"]:
            counts[successor(each["code"]) or each["code"]] += collections.Counter(judged=1, right=each["verdict"])
    return counts


def measured() -> frozenset[str]:
    """Return the codes of the rules that ran on a lot."""
    found = {code for batch in batches() for code in batch["findings"]}
    return frozenset(found.union(*(batch.get("rules", ()) for batch in batches())))


def of_lot(batch: dict[str, Any]) -> Iterator[str]:
    """Yield a table of what each rule found in a lot."""
    every = rules(own_only=True)
    judged = collections.Counter(each["code"] for each in batch["verdicts"])
    right = collections.Counter(each["code"] for each in batch["verdicts"] if each["verdict"])
    yield "| rule | name | found | in repositories | judged | right | precision (95 %) |"
    yield "| --- | --- | --: | --: | --: | --: | --: |"
    for code, found in batch["findings"].items():
        name = every[code].name + (" (preview)" if is_preview(code, batch) else "") if code in every else ""
        row = (code, name, found, batch["in repositories"][code], judged[code], right[code])
        yield f"| {' | '.join(map(str, row))} | {share(right[code], judged[code]) if judged[code] else ''} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("fetch", "lint", "sample"):
        commands.add_parser(name).add_argument("folder", type=Path)
    commands.choices["lint"].add_argument("--half", choices=(*HALVES, "all"), default="open")
    commands.choices["lint"].add_argument("-o", "--output", type=Path, required=True)
    commands.choices["sample"].add_argument("found", type=Path)
    commands.choices["sample"].add_argument("codes", nargs="*")
    commands.choices["sample"].add_argument("--per-rule", type=int, default=20)
    commands.choices["sample"].add_argument("--around", type=int, default=12, help="lines before and after")
    commands.add_parser("record").add_argument("found", type=Path)
    commands.choices["record"].add_argument("verdicts", type=Path)
    commands.add_parser("rules").add_argument("lot", choices=HALVES)
    options = parser.parse_args()
    if options.command == "fetch":
        fetch(options.folder)
    elif options.command == "lint":
        options.output.write_text(json.dumps(lint(options.folder, options.half), indent=1), "utf-8")
    elif options.command == "sample":
        found = json.loads(options.found.read_text("utf-8"))
        show(options.folder, found, options.per_rule, options.codes, options.around)
    elif options.command == "record":
        judged = [json.loads(line) for line in options.verdicts.read_text("utf-8").splitlines() if line.strip()]
        record(json.loads(options.found.read_text("utf-8")), judged)
    else:
        print("\n".join(line for batch in batches() if batch["half"] == options.lot for line in of_lot(batch)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
