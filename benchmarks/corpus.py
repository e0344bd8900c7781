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

from mpguard.lint.model.rule import rules

HERE = Path(__file__).parent
LIST, LOTS = HERE / "corpus.txt", HERE / "lots"
#: What the linter of a commit before the lots found in the repositories of some of them, judged by its own pages.
FIRST = LOTS / "first.json"
#: They report imports and calls that are everywhere, so they would hide what the others do.
FREQUENT = ("MPG302", "MPG305")
#: Rules that became preview rules after they had been judged: the batches before that day count them, as they did then.
PREVIEW_SINCE = {"MPG704": "2026-11-25", **dict.fromkeys(("MPG108", "MPG301", "MPG309", "MPG511"), "2026-11-26")}
#: The answers of a reader to a finding; lots of which a reader gave only one have `verdict` alone.
ANSWERS = {
    "true": "what the message says is so in the code as it is written",
    "verdict": "a maintainer of the code would accept the remark, by the definition on the rule's page",
    "runs": "the place is reached, too, in the program as it was committed: no unrelated fault stops it before",
}
#: As docs/evidence.md names them.
NAMED_ANSWERS = {
    "true": ANSWERS["true"],
    "accepted": ANSWERS["verdict"] + "; code and settings that nobody can run or choose count against it, and versions"
    " that the project rules out; a fault elsewhere does not",
}
#: The rules that are the reason to run the linter.
HEADLINE = ("MPG101", "MPG201", "MPG401")
#: The lots that the table of rules counts by themselves.
LATEST = 10
SEED = 15
#: The sets of repositories, and the headings of their batches.
HEADINGS = {
    "open": "The open half",
    "held-out": "The half that was held out",
    "fresh": "Repositories that were chosen after the rules were done",
    "latest": "Repositories that were in no list before",
    "unseen": "Repositories of which nothing was read before the rules were frozen",
    "second": "More of these, after the rules were fixed",
    "wide": "120 repositories, a larger lot of which nothing was read before",
    "wide2": "97 more, after the rules were fixed because of these",
    "wide3": "54 more, after the rules were fixed because of those",
    "wide4": "86 more, closed before the rules were changed again",
    "wide5": "The other 85 of the same list",
    "wide6": "97 more, after the rules were fixed because of those two",
    "wide7": "114 more, closed before the rules were changed because of those",
    "wide8": "The other 110 of that list",
    "wide9": "119 more, closed before the rules were changed because of all lots before",
    "wide10": "125 more, closed while the rules were changed by someone who had not seen them",
    "wide11": "122 more, half of them libraries, closed while the rules were changed by others",
    "wide12": "The other 122 of that list",
    "wide13": "120 more, closed while the rules were changed by others",
    "wide14": "The other 120 of that list",
    "wide15": "123 more, closed before the rules were changed because of all lots before",
    "wide16": "The other 123 of that list",
    "wide17": "115 more, closed before the rules were changed because of all lots before",
    "wide18": "The other 116 of that list",
    "wide19": "122 more, closed before the rules were changed because of those two",
    "wide20": "98 more, closed before the rules were changed because of all lots before",
    "wide21": "99 more of that list, after the rules were changed because of the first",
    "wide22": "The last 79 of that list, after the rules were changed because of these two",
    "wide23": "86 more, closed before the rules were changed because of the last of these",
    "wide24": "55 more, closed before the rules were changed because of all lots before",
    "wide25": "The other 73 of that list, after the rules were changed because of the first",
    "wide26": "80 more, closed before the rules were changed because of those two",
    "wide27": "The other 53 of that list, after the rules were changed because of the first",
    "wide28": "90 more, closed before the rules were changed because of the last of these",
    "wide29": "46 more, closed before the rules were changed because of that lot",
    "wide30": "45 more, closed before the rules were changed because of all of these",
    "wide31": "25 more, closed before the rules were changed because of the last of these",
    "wide32": "69 more, closed before the rules were changed because of all of these",
    "wide33": "65 more, closed before the rules were changed because of all of these, or of the one before",
    "wide34": "70 more, closed before the rules were changed because of these",
    "wide35": "70 more, closed before the rules were changed because of these, or of the one before",
    "wide36": "68 more, closed before the rules were changed because of these",
    "wide37": "63 more, closed before the rules were changed because of these, or of the one before",
    "wide38": "158 that earlier lots had left out, closed before the rules were changed because of these",
    "wide39": "78 for images, sound, robots and science, closed before the rules were changed because of these",
    "wide40": "84 for language, ranking and competitions, closed before the rules were changed because of these two",
    "wide41": "148 of all fields, closed before the rules were changed because of these",
    "wide42": "88 of all fields, closed before the rules were changed because of these",
    "wide43": "146 of all fields, with lesser-known names, closed before the rules were changed because of these",
    "wide44": "114 more of that kind, closed before the rules were changed because of these, or of the one before",
    "wide45": "81 that train larger models, closed before the rules were changed because of any of these",
    "wide46": "127 of language, sound and images, closed before the rules were changed because of these",
    "wide47": "152 of language, sound, images and science, closed before the rules were changed because of that one",
    "all": "All",
}
HALVES = tuple(name for name in HEADINGS if name != "all")

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
    return [json.loads(file.read_text("utf-8")) for file in files if file.exists()]


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
    if file.exists() and (remark := json.loads(file.read_text("utf-8")).get("remark")):
        batch["remark"] = remark
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
    return rule is None or (rule.preview and batch["date"] >= PREVIEW_SINCE.get(code, ""))


def section(seeded: dict[str, Seeded]) -> Iterator[str]:
    """Yield the lines of docs/evidence.md about the repositories.

    seeded: the mistakes that were found, and all, for each lot.
    """
    listed = repositories()
    is_open = sum(each.half == "open" for each in listed)
    later = sum(bool(each.later) for each in listed)
    found = {code for batch in batches() for code in batch["findings"]}
    silent = [code for code, rule in rules(own_only=True).items() if code not in found and not rule.preview]
    yield from (
        "## Public repositories",
        "",
        f"{len(listed)} public repositories with training code, each at one commit"
        " ([benchmarks/corpus.txt](../benchmarks/corpus.txt)), are linted by `python benchmarks/corpus.py`, in lots:"
        f" {is_open} repositories of which rules may be changed, {len(listed) - is_open - later} that were held out,"
        f" and {later} that were added later. Each lot was listed by names and closed before anything of it was"
        " linted, and these are its first numbers: the rules were changed because of it only afterwards. Of each"
        " default rule up to 20 findings were drawn by a seed and judged by readers who did not write it"
        " ([benchmarks/lots/](../benchmarks/lots) has each finding, its answers and the reason). Intervals are 95 %,"
        " by Wilson's formula.",
        "",
        *(f"- *{name}*: {text}." for name, text in NAMED_ANSWERS.items()),
        "",
        "The readers of the lots before `wide18` gave one answer, by a measure that differed a little from lot to lot;"
        " it is in the column of accepted ones, as is that of `wide18` to `wide20`, whose readers were also asked"
        f" whether the statement is true. MPG000, {' and '.join(FREQUENT)}, whose findings are the most frequent, are"
        " left out here.",
        "",
        _compared(),
        "",
        "| lot (date, commit) | repositories | without a finding | judged | true | accepted | seeded mistakes found"
        f" | of {', '.join(code.removeprefix('MPG') for code in HEADLINE)} |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    )
    latest = batches()[-LATEST:]
    for cells in (_sum_row(latest, seeded), *(_row(batch, seeded) for batch in reversed(batches()))):
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _rules_table()
    yield ""
    yield f"Default rules without a finding in any of them: {', '.join(silent)}."
    yield ""
    yield "What the readers said of the lots, the latest first:"
    yield ""
    for batch in reversed(batches()):
        if "remark" in batch:
            yield f"- `{batch['half']}`, {HEADINGS[batch['half']]}: {batch['remark']}"


def _compared() -> str:
    """Return what readers said of an earlier linter, and how often they said something else of the same finding."""
    first = json.loads(FIRST.read_text("utf-8"))
    counted = [each for each in first["verdicts"] if is_counted(each, first)]
    answers = verdicts()
    both = [(each, answers[key(each)]) for each in first["verdicts"] if key(each) in answers]
    differ = [sum(old[name] != new[name] for old, new in both) for name in ("true", "verdict")]
    stricter = sum(old["verdict"] and not new["verdict"] for old, new in both)

    def told(judged: list[dict[str, Any]]) -> str:
        true, accepted = (sum(each[name] for each in judged) for name in ("true", "verdict"))
        return f"{true} of {len(judged)} true ({true / len(judged):.0%}), {accepted} accepted"

    return (
        f"The linter as it was before all lots (commit {first['linter'][:7]}) was run on the repositories of"
        f" `{first['of'][0]}` to `{first['of'][-1]}`, too, and what it found was judged in the same way, by the pages"
        f" of its rules: {told(counted)}; with the frequent rules {told(first['verdicts'])}"
        f" ([benchmarks/lots/{FIRST.name}](../benchmarks/lots/{FIRST.name})). Of the {len(both)} findings that were"
        f" judged in the lots, too, {differ[0]} got another first answer, and {differ[1]} another second one:"
        f" {stricter} were accepted by the old page, and are not by today's, which names more that the rule leaves out."
        " The share of accepted ones of two commits is of two definitions, that of true ones is of one."
    )


def _row(batch: dict[str, Any], seeded: dict[str, Seeded]) -> list[str]:
    """Return the cells of a lot in the table of all lots."""
    judged, true, accepted = _counts(batch)
    return [
        f"`{batch['half']}` ({batch['date']}, {batch['linter'][:7]})",
        str(batch["repositories"]),
        str(batch.get("without findings", "")),
        *_cells(judged, true, accepted),
        *(map(_found, seeded[batch["half"]]) if batch["half"] in seeded else ("", "")),
    ]


def _sum_row(lots: list[dict[str, Any]], seeded: dict[str, Seeded]) -> list[str]:
    """Return the cells of several lots together; the first answer has to be there for each."""
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


def _rules_table() -> Iterator[str]:
    """Yield a table of what each rule found in all lots, and how much of what was judged was accepted."""
    every = rules(own_only=True)
    latest = {batch["half"] for batch in batches()[-LATEST:]}
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for batch in batches():
        for code, number in batch["findings"].items():
            counts[code] += collections.Counter(found=number, within=batch["in repositories"][code])
        for each in batch["verdicts"]:
            counts[each["code"]] += collections.Counter(judged=1, accepted=each["verdict"])
            if batch["half"] in latest:
                counts[each["code"]] += collections.Counter(last=1, accepted_last=each["verdict"])
    yield "| rule | name | found | in repositories | judged | right | share (95 %) | of the last lots | right |"
    yield "| --- | --- | --: | --: | --: | --: | --: | --: | --: |"
    for code, count in sorted(counts.items()):
        name = every[code].name + (" (preview)" if every[code].preview else "") if code in every else "(removed)"
        judged = share(count["accepted"], count["judged"]) if count["judged"] else ""
        numbers = (count["found"], count["within"], count["judged"], count["accepted"])
        last = (count["last"], count["accepted_last"])
        yield f"| {code} | {name} | {' | '.join(map(str, numbers))} | {judged} | {' | '.join(map(str, last))} |"
    yield ""
    yield (
        f"The last two columns are of the last {LATEST} lots. *Right* is *accepted* since `wide42`. In most lots before"
        " a fault elsewhere that stops the program before the place counted against a finding, too, so that fewer are"
        " right here than are accepted above."
    )


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
