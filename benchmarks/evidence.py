"""What the linter finds in published packages, and how much of it is right.

    python benchmarks/evidence.py fetch FOLDER            # downloads and unpacks what evidence_packages.txt lists
    python benchmarks/evidence.py list FOLDER [CODE ...]  # each finding with its source line, and its verdict
    python benchmarks/evidence.py check FOLDER            # 1 if a finding has no verdict, or a verdict no finding
    python benchmarks/evidence.py page > docs/evidence.md # the precision of each rule, from the two JSON files

The packages are fixed by version and SHA-256. Nothing of them is built, imported or run. A verdict was
given by a person: `{"package", "file", "line", "code", "verdict", "why"}`, true if the author of the code would
have to agree with the finding by the rule's own definition. `list --preview` shows preview rules too;
they have no verdicts here and do not count.

evidence_unseen.json has batches of other packages, each judged once, with the rules as they were at its commit. It is
not updated: what the rules got wrong there is the figure.
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

from mpguard.lint.model.rule import rules

HERE = Path(__file__).parent
PACKAGES, VERDICTS, UNSEEN = HERE / "evidence_packages.txt", HERE / "evidence.json", HERE / "evidence_unseen.json"
INDEX = "https://pypi.org/simple/"
#: So frequent that it would dominate the figures; judged by a sample.
FREQUENT = "MPG302"

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


def unseen() -> tuple[str, ...]:
    """Return a paragraph for each batch of packages that no rule had been changed for, the latest first."""
    batches = json.loads(UNSEEN.read_text())["batches"]
    note = (
        "The packages of each were fixed by SHA-256, in three lots, each lot before its findings were read, and linted"
        " before any rule was changed because of them. The later the batch, the better it describes the rules as they"
        f" are ([benchmarks/{UNSEEN.name}](../benchmarks/{UNSEEN.name}))."
    )
    return (*(line for batch in reversed(batches) for line in (_batch(batch), "")), note)


def _batch(data: dict[str, Any]) -> str:
    judged = [verdict for verdict in data["verdicts"] if verdict["code"] != FREQUENT]
    frequent = [verdict["verdict"] for verdict in data["verdicts"] if verdict["code"] == FREQUENT]
    right = sum(verdict["verdict"] for verdict in judged)
    whole: dict[tuple[str, str], bool] = {}
    for verdict in judged:
        of = verdict["package"], verdict["code"]
        whole[of] = whole.get(of, True) and verdict["verdict"]
    return (
        f"**On {len(data['packages'])} packages that no rule had been changed for: {right} right,"
        f" {len(judged) - right} wrong, precision {right / len(judged):.1%}**"
        f" ({sum(whole.values())} of {len(whole)} where each rule counts once in a package; {FREQUENT}:"
        f" {sum(frequent)} of {len(frequent)} drawn at random), on {data['date']} with commit"
        f" {data['mpguard commit'][:7]}; rules fixed since: {', '.join(data['fixed since'])}."
    )


def page() -> str:
    """Return docs/evidence.md, which depends on the two JSON files, the packages and the rules only."""
    right: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    for verdict in verdicts().values():
        (right if verdict["verdict"] else wrong)[verdict["code"]] += 1
    rows = [("rule", "name", "right", "wrong", "precision"), ("---", "---", "--:", "--:", "--:")]
    silent = []
    for code, rule in rules(own_only=True).items():
        true, false = right[code], wrong[code]
        if true + false:
            rows.append((code, rule.name, str(true), str(false), f"{true / (true + false):.0%}"))
        elif not rule.preview:
            silent.append(f"{code} ({rule.name})")
    true, false = (sum(counter.values()) - counter[FREQUENT] for counter in (right, wrong))
    preview = [f"{code} ({rule.name})" for code, rule in rules(own_only=True).items() if rule.preview]
    return "\n".join((
        "# Evidence: the rules on code that their authors had not seen",
        "",
        "## Published packages",
        "",
        f"Every finding of the default rules in {len(packages())} published packages was read and judged"
        f" ([benchmarks/evidence.json](../benchmarks/evidence.json); {FREQUENT} by a sample). The packages are fixed in"
        " [benchmarks/evidence_packages.txt](../benchmarks/evidence_packages.txt);"
        " `python benchmarks/evidence.py` repeats the measurement.",
        "",
        f"**Without {FREQUENT}: {true} right, {false} wrong, precision {true / (true + false):.1%}.**",
        "",
        *unseen(),
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "Rules were fixed because of these findings, so the table describes them on these packages, not on others.",
        "",
        f"No finding in these packages, so tested by examples and seeded mistakes only: {', '.join(silent)}.",
        "",
        f"Preview, off by default and not judged here: {', '.join(preview)}.",
        "",
        *_program("corpus").section(_program("seeded").by_lot()),
        "",
        *_program("seeded").section(),
        "",
        *_program("threads").section(),
    )) + "\n"  # fmt: skip


def of_rule(code: str) -> str:
    """Return the section of a rule's page: what was found and judged of it in all packages and repositories."""
    everything, batches, seeded = _results()
    judged = [each["verdict"] for each in everything if each["code"] == code]
    mutants = [row for row in seeded if code in row["rules"]]
    everywhere = "[published packages and public repositories](../evidence.md)"
    if judged:
        said = f"Of its findings in {everywhere} {len(judged)} were judged, {sum(judged)} of them right."
    elif any(code in batch["findings"] for batch in batches):
        said = f"It has findings in {everywhere}; none of them was judged."
    else:
        said = f"It reported nothing in {everywhere}: what it looks for was not found there."
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
    commands.add_parser("page")
    options = parser.parse_args()
    if options.command == "fetch":
        fetch(options.folder)
    elif options.command == "list":
        show(options.folder, options.codes, options.preview)
    elif options.command == "check":
        return check(options.folder)
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
