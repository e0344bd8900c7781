"""What the linter finds in published packages, and how much of it is right.

    python benchmarks/evidence.py fetch FOLDER            # downloads and unpacks what evidence_packages.txt lists
    python benchmarks/evidence.py list FOLDER [CODE ...]  # each finding with its source line, and its verdict
    python benchmarks/evidence.py check FOLDER            # 1 if a finding has no verdict, or a verdict no finding

The packages are fixed by version and SHA-256. Nothing of them is built, imported or run. A verdict was
given by a person: `{"package", "file", "line", "code", "verdict", "why"}`, true if the author of the code would
have to agree with the finding by the rule's own definition. `list --preview` shows preview rules too;
they have no verdicts here and do not count.

evidence_unseen.json has batches of other packages, each judged once, with the rules as they were at its commit. It is
not updated: what the rules got wrong there is the figure. labels.json has the mistakes that a reader labelled in other
repositories, with the code that found each at two commits. shown: the authors of the rules saw it between these.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mpguard.lint.model.retired import successor
from mpguard.lint.model.rule import EngineRule, rules

HERE = Path(__file__).parent
PACKAGES, VERDICTS, UNSEEN = HERE / "evidence_packages.txt", HERE / "evidence.json", HERE / "evidence_unseen.json"
LABELS = HERE / "labels.json"
INDEX = "https://pypi.org/simple/"
#: So frequent that it would dominate the figures; judged by a sample.
FREQUENT = "MPG302"
FINDINGS = HERE.parent / "docs" / "findings.md"
_TEST = "[test](../tests/lint/rules/test_reproduced.py)"
#: Why a rule is on by default that was right less than twice in public code: what neither S-numbers nor threads show.
_KEPT = {
    "MPG102": _TEST,
    "MPG120": "sentence-transformers#3773, trl#5329",
    "MPG317": "ultralytics#23682, nanoGPT#698",
    "MPG401": "one of the three that mpguard was made for",
    "MPG417": _TEST,
    "MPG506": _TEST,
    "MPG528": "trl#6774, OpenRLHF#1155",
    "MPG529": _TEST,
    "MPG603": _TEST,
    "MPG617": _TEST,
    "MPG618": _TEST,
    "MPG865": "what `mpguard apply` would change",
}

Key = tuple[str, str, int, str]


class Package(NamedTuple):
    name: str
    file: str
    sha256: str


def packages() -> list[Package]:
    lines = (line.split() for line in PACKAGES.read_text().splitlines() if not line.startswith("#"))
    return [Package(*line) for line in lines]


# -- fetch --------------------------------------------------------------------------------------------


def fetch(folder: Path) -> None:
    """Download and unpack the packages that are missing. Raise ValueError if a file is not the one that was judged."""
    for package in packages():
        target = folder / package.name
        if target.exists():
            continue
        print(package.file, file=sys.stderr, flush=True)
        data = downloaded(package)
        if hashlib.sha256(data).hexdigest() != package.sha256:
            raise ValueError(f"{package.file}: its SHA-256 is not that of {PACKAGES.name}")
        unpacked = folder / f"{package.name}.part"
        shutil.rmtree(unpacked, ignore_errors=True)
        unpack(package.file, data, unpacked)
        unpacked.rename(target)


def downloaded(package: Package) -> bytes:
    page_url = f"{INDEX}{re.sub(r'[-_.]+', '-', package.name).lower()}/"
    with urllib.request.urlopen(page_url, timeout=60) as page:
        links = re.findall(r'href="([^"#]+)', page.read().decode())
    for link in links:
        url = urllib.parse.urljoin(page_url, html.unescape(link))
        if urllib.parse.unquote(url.rsplit("/", 1)[-1]) == package.file:
            with urllib.request.urlopen(url, timeout=600) as file:
                return bytes(file.read())
    raise ValueError(f"{package.file}: not on {page_url} any more")


def unpack(name: str, data: bytes, folder: Path) -> None:
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".archive")
    archive.write_bytes(data)
    try:
        if name.endswith(".tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        else:
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder)
    finally:
        archive.unlink()


# -- findings and verdicts ----------------------------------------------------------------------------


def findings(folder: Path, codes: Iterable[str] = (), preview: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the findings in all packages, with `package` and `file`. Raise SystemExit if the linter failed."""
    mpguard = Path(sysconfig.get_path("scripts")) / "mpguard"
    command = [mpguard, "lint", "--format", "json", "--no-cache", "."]
    command += ["--select", ",".join(codes)] * bool(codes) + ["--preview"] * preview
    for package in packages():
        run = subprocess.run(command, cwd=folder / package.name, capture_output=True, text=True, check=False)
        if run.returncode not in (0, 1):
            raise SystemExit(f"{package.name}: the linter failed: {run.stderr}")
        for finding in json.loads(run.stdout)["findings"]:
            yield {**finding, "package": package.name, "file": Path(finding["path"]).as_posix()}


def key(item: dict[str, Any]) -> Key:
    return item["package"], item["file"], item["line"], item["code"]


def verdicts() -> dict[Key, dict[str, Any]]:
    return {key(verdict): verdict for verdict in json.loads(VERDICTS.read_text())}


def show(folder: Path, codes: list[str], preview: bool) -> None:
    judged = verdicts()
    for finding in findings(folder, codes, preview):
        lines = (folder / finding["package"] / finding["file"]).read_text("utf-8", "replace").splitlines()
        source = lines[finding["line"] - 1].strip() if finding["line"] <= len(lines) else ""
        verdict = judged.get(key(finding))
        judgement = "unjudged" if verdict is None else f"{str(verdict['verdict']).lower()}: {verdict['why']}"
        print(f"{finding['package']}/{finding['file']}:{finding['line']} {finding['code']} {finding['message']}")
        print(f"    {source}\n    [{judgement}]")


def check(folder: Path) -> int:
    judged = verdicts()
    found = {key(finding) for finding in findings(folder)}
    for each in sorted(found - set(judged)):
        if each[3] != FREQUENT:
            print("no verdict:", *each)
    for each in sorted(set(judged) - found):
        print("no such finding any more:", *each)
    return int(bool({each for each in found if each[3] != FREQUENT} ^ {each for each in judged if each[3] != FREQUENT}))


# -- the page -----------------------------------------------------------------------------------------


def unseen() -> str:
    """Return sentences about each batch of packages that no rule had been changed for, the latest first."""
    return " ".join(_batch(batch) for batch in reversed(json.loads(UNSEEN.read_text())["batches"]))


def _batch(data: dict[str, Any]) -> str:
    judged = [verdict["verdict"] for verdict in data["verdicts"] if verdict["code"] != FREQUENT]
    return (
        f"On {len(data['packages'])} packages that no rule had been changed for ({data['date']}, commit"
        f" {data['mpguard commit'][:7]}) {sum(judged)} of {len(judged)} were right."
    )


def labelled() -> str:
    """Return sentences about the mistakes that a reader labelled, and how many of them were found."""
    data = json.loads(LABELS.read_text())
    sure = [each for each in data["labels"] if each["sure"] != "debatable"]
    shown, kept = ([each for each in sure if each["shown"] == side] for side in (True, False))

    def found(labels: list[dict[str, Any]], when: str) -> int:
        return sum(each[when] is not None for each in labels)

    first, last = (f"{found(sure, when)} ({100 * found(sure, when) / len(sure):.0f} %)" for when in ("first", "last"))
    return (
        f"A reader who had not seen the rules labelled {data['repositories']} repositories that were new to them,"
        f" before they were linted ({data['date']}): {len(data['labels'])} mistakes that cost something, {len(sure)}"
        f" of them certain or likely. The linter found {first} of these at first, and {last} after the authors of the"
        f" rules had seen about half of the labels: {found(shown, 'last')} of {len(shown)} there"
        f" ({found(shown, 'first')} at first), {found(kept, 'last')} of {len(kept)} among the others"
        f" ({found(kept, 'first')} at first). Left out are mostly losses, log-probabilities and distances in 16 bits,"
        " and BF16 weights that reach the optimizer through classes of the project. A clean report says little about"
        " numerics."
    )


def page() -> str:
    """Return docs/evidence.md: what is measured and how, the last figures, and where the data are."""
    corpus, seeded = _program("corpus"), _program("seeded")
    judged = [each["verdict"] for each in verdicts().values() if each["code"] != FREQUENT]
    headline = ", ".join(corpus.HEADLINE)
    return "\n".join((
        "# Evidence: the rules on code that their authors had not seen",
        "",
        "Five things are measured: what the default rules find in public repositories, how many mistakes that a reader"
        " saw, or that were put into right programs, they see, what they find in published packages, and how many"
        " problems of users they, or a launch, would have caught. [Rule by rule](evidence_rules.md) has the figures of"
        " each rule.",
        "",
        "## Public repositories",
        "",
        f"{len(corpus.repositories()):,} public repositories with training code, each at one commit"
        " ([benchmarks/corpus.txt](../benchmarks/corpus.txt)), were linted in lots. A lot was listed by names and"
        " closed before anything of it was linted, and its numbers are its first ones: rules were changed because of it"
        " only afterwards. Up to 20 findings of each default rule were drawn by a seed and judged by readers who did"
        f" not write the rule; MPG000, {' and '.join(corpus.FREQUENT)}, the most frequent, are left out. Intervals are"
        " 95 %, by Wilson's formula.",
        "",
        *(f"- *{name.replace('verdict', 'accepted')}*: {text}." for name, text in corpus.ANSWERS.items()),
        "",
        *corpus.table(seeded.by_lot()),
        "",
        "Most findings that are true and not accepted are in code, options or versions that the project cannot run. No"
        " further lots are planned.",
        "",
        "These figures are of the linter at the commits of the table. Rules were retired since"
        " ([list](rules/README.md#retired-codes)); what a retired rule found counts for its successor."
        " Findings in programs that an unrelated fault stops before, which were left out, are reported since.",
        "",
        "## Mistakes that a reader sees",
        "",
        labelled(),
        "",
        "## Seeded mistakes",
        "",
        "One mistake at a time is put into a program or a config of these repositories in which the default rules"
        " report nothing, and a finding of a rule that has to see it is looked for. The table above has the sums of"
        f" each lot; these are the mistakes that {headline} have to see.",
        "",
        *seeded.headline(),
        "",
        "## Published packages",
        "",
        f"{len(packages())} packages, fixed by version and SHA-256, were linted, and each finding was read and judged"
        f" ({FREQUENT} by a sample): {sum(judged)} of {len(judged)} are right, after the rules were fixed because of"
        f" them. {unseen()}",
        "",
        *_program("threads").section(),
        "",
        "## The data, and how to repeat it",
        "",
        "| measurement | command | data |",
        "| --- | --- | --- |",
        "| repositories | `python benchmarks/corpus.py fetch FOLDER`, then `lint`, `sample`, `record` |"
        " [corpus.txt](../benchmarks/corpus.txt), [lots/](../benchmarks/lots): each verdict with its place; the last"
        f" {corpus.LATEST} with the reason |",
        f"| labelled mistakes | `mpguard lint .` at each commit | [{LABELS.name}](../benchmarks/{LABELS.name}) |",
        "| seeded mistakes | `python benchmarks/seeded.py` | [seeded.json](../benchmarks/seeded.json), with each that"
        " was missed |",
        f"| packages | `python benchmarks/evidence.py fetch FOLDER`, then `check FOLDER` |"
        f" [{PACKAGES.name}](../benchmarks/{PACKAGES.name}), [{VERDICTS.name}](../benchmarks/{VERDICTS.name}),"
        f" [{UNSEEN.name}](../benchmarks/{UNSEEN.name}) |",
        "| threads | `python benchmarks/threads.py lint`, `launch` | [tests/lint/threads](../tests/lint/threads),"
        " [thread_programs](../benchmarks/thread_programs),"
        " [threads_launch.json](../benchmarks/results/threads_launch.json) |",
    )) + "\n"  # fmt: skip


def rules_page() -> str:
    """Return docs/evidence_rules.md: what each rule found, and how much of what was judged was right."""
    corpus = _program("corpus")
    counts = corpus.by_rule()
    for each in verdicts().values():
        counts[successor(each["code"]) or each["code"]] += collections.Counter(package=1, right_there=each["verdict"])
    own = rules(own_only=True)
    silent = [code for code in own if code not in counts and code in corpus.measured()]
    unmeasured = [code for code in own if code not in counts and code not in corpus.measured()]
    rows = [
        f"| {code} | {own[code].name}{' (preview)' if own[code].preview else ''} |"
        f" {' | '.join(str(count[name]) for name in ('found', 'judged', 'right', 'package', 'right_there'))} |"
        for code, count in sorted(counts.items())
        if code in own
    ]
    return "\n".join((
        "# Evidence, rule by rule",
        "",
        "What each rule found in all lots of [repositories](evidence.md#public-repositories), how much of what was"
        " judged there was accepted, and the same of the findings in published packages. The early lots are those of"
        " early rules: most of what was wrong was fixed, so the shares are lower than those of the last lots. Preview"
        " rules are off by default.",
        "",
        "| rule | name | found | judged | accepted | judged in packages | right |",
        "| --- | --- | --: | --: | --: | --: | --: |",
        *rows,
        "",
        f"Ran and reported nothing: {', '.join(silent)}.",
        "",
        "Default rules that were right less than twice in public code, and what they rest on: what the libraries do"
        " ([S-numbers](findings.md)), the public threads whose mistake they find (the numbers of"
        " [tests/lint/threads](../tests/lint/threads)), a test of the failure, or another reason: "
        + "; ".join(f"{code} {', '.join(reasons)}" for code, reasons in places().items())
        + ".",
        "",
        f"Not measured yet, newer than the last lot: {', '.join(unmeasured)}.",
    )) + "\n"  # fmt: skip


def places() -> dict[str, list[str]]:
    """Return the default rules that were right less than twice in public code, and why each is on by default.

    A test reproduces the failure that it names (its S-number in docs/findings.md, or a test), or it finds the mistake
    of a public thread; `_KEPT` has the others.
    """
    counts = _program("corpus").by_rule()
    for each in verdicts().values():
        counts[successor(each["code"]) or each["code"]] += collections.Counter(right_there=each["verdict"])
    found: dict[str, list[str]] = {
        code: []
        for code, rule in rules(own_only=True).items()
        if not (rule.preview or issubclass(rule, EngineRule))
        and counts[code]["right"] + counts[code]["right_there"] < 2
    }
    for row in FINDINGS.read_text("utf-8").splitlines():
        if number := re.match(r"\| (S\d+) \|", row):
            for code in found.keys() & set(re.findall(r"MPG\d{3}", row)):
                found[code].append(number[1])
    for name, case in sorted(_program("threads").cases().items()):
        for code in found.keys() & set(case["codes"]):
            found[code].append(name.partition("-")[0])
    for code, reason in _KEPT.items():
        found[code].append(reason)
    return found


def of_rule(code: str) -> str:
    """Return the section of a rule's page: what was found and judged of it in all packages and repositories."""
    everything, batches, seeded = _results()
    judged = [each["verdict"] for each in everything if successor(each["code"]) == code]
    mutants = [row for row in seeded if code in map(successor, row["rules"])]
    everywhere = "[published packages and public repositories](../evidence.md)"
    if judged:
        said = f"Of its findings in {everywhere} {len(judged)} were judged, {sum(judged)} of them right."
    elif any(code in map(successor, batch["findings"]) for batch in batches):
        said = f"It has findings in {everywhere}; none of them was judged."
    elif code in _program("corpus").measured():
        said = f"It reported nothing in {everywhere}: what it looks for was not found there."
    else:
        said = "Not measured yet: it is newer than the last measurement on public code."
    if mutants:
        said += " Mistakes that were seeded into real programs show how much of them it sees."
    elif not judged:
        said += " It is tested by its examples only."
    return f"## Evidence\n{said}\n"


@functools.cache
def _results() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all verdicts, the batches of repositories, and the results of each kind of seeded mistake."""
    corpus, seeded = _program("corpus"), _program("seeded")
    rows = [row for batch in seeded.batches() for row in batch["kinds"].values()]
    return [*verdicts().values(), *corpus.verdicts().values()], corpus.batches(), rows


@functools.cache
def _program(name: str) -> ModuleType:
    """Return another program of this folder, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("fetch", "list", "check"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        if name == "list":
            command.add_argument("codes", nargs="*")
            command.add_argument("--preview", action="store_true", help="preview rules too")
    options = parser.parse_args()
    if options.command == "fetch":
        fetch(options.folder)
    elif options.command == "list":
        show(options.folder, options.codes, options.preview)
    else:
        return check(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
