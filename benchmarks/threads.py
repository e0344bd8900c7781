"""Count how many precision problems from public threads the linter reports, or a launch catches.

    python benchmarks/threads.py lint           # the findings in each case, as JSON lines
    python benchmarks/threads.py lint NAME      # those of one case
    python benchmarks/threads.py launch [NAME]  # runs benchmarks/thread_programs, stock and under mpguard, on a CPU
    python benchmarks/threads.py page           # the section of docs/evidence.md

A case is a folder of tests/lint/threads: the program and the configs of one thread, written anew and reduced to what
matters, and case.json:

- url, title, reported (what the user saw), mistake, where (its lines), fix, command, versions;
- first: the codes of the default rules whose message named the mistake before any rule was changed because of it;
- codes: those that report it today (tests/lint/test_threads.py checks them);
- launch: what `mpguard launch` said when it refused the program or reported its mistake, or null;
- scope: why no tool that reads files or watches dtypes can know it, or null.

A case counts as caught if the message names the mistake of the thread: a finding about something else does not count.

A folder of benchmarks/thread_programs is a case that runs: the same mistake at the same place, through the same
library, with a tiny model. mp.yaml has the precision that the user meant, and program.json:

- arguments: those of train.py; processes: how many, more than one are started by torchrun, as the guides of mpguard
  say; torchrun: True if one process is started so too;
- outcome: `refused` (mpguard ends the run, and says what differs), `refused otherwise` (it ends the run because of
  something else, so that the mistake comes up later), `reported` (a line is about the mistake), `enforced` (the run has
  the precision that was meant, and says so), `silent` (the proof holds, and the mistake has its effect), or `not
  applicable` (the libraries of today refuse the program themselves);
- first: the outcome before mpguard was changed because of the program; `not explained`: it died as without mpguard, and
  no line named the mistake;
- message: words of that line. The outcome in the result file is `changed` where no line has them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mpguard.lint.model.finding import Finding
from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import collect

CASES = Path(__file__).resolve().parent.parent / "tests" / "lint" / "threads"
PROGRAMS = Path(__file__).resolve().parent / "thread_programs"
RESULTS = Path(__file__).resolve().parent / "results" / "threads_launch.json"
#: The outcomes that report the mistake, or take its effect away.
CAUGHT = ("refused", "reported", "enforced")
#: Stands for a free port in a command.
PORT = "PORT"
LIBRARIES = (
    "mpguard",
    "torch",
    "accelerate",
    "transformers",
    "deepspeed",
    "lightning",
    "peft",
    "diffusers",
    "open_clip_torch",
)


def cases() -> dict[str, dict[str, Any]]:
    """Return case.json of each case, by the name of its folder."""
    return {path.parent.name: json.loads(path.read_text("utf-8")) for path in sorted(CASES.glob("*/case.json"))}


def findings(name: str, selectors: Selectors) -> list[Finding]:
    """Return what the linter reports in a copy of a case that is a project of its own: tests are judged differently."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        shutil.copytree(CASES / name, project, ignore=shutil.ignore_patterns("case.json"))
        (project / ".git").mkdir()
        reports = Engine(rules(own_only=True), Options(selectors)).run(collect([str(project)]).targets)
        for report in reports:
            assert not report.defects, report.defects[0].traceback
        return [
            dataclasses.replace(finding, path=str(Path(finding.path).relative_to(project)))
            for report in reports
            for finding in report.findings
        ]


def launched(name: str, show: bool) -> dict[str, Any]:
    """Return what a program of `PROGRAMS` does by itself, and under mpguard. show: print both outputs to stderr."""
    program = json.loads((PROGRAMS / name / "program.json").read_text("utf-8"))
    processes = program.get("processes", 1)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port"]
    script = ["train.py", *program.get("arguments", ())]
    if program.get("torchrun", processes > 1):
        stock, launch = (
            [*torchrun, PORT, *script],
            [*torchrun, PORT, "-m", "mpguard.run", "--config", "mp.yaml", *script],
        )
    else:
        stock, launch = script, ["-m", "mpguard", "launch", "--config", "mp.yaml", *script]
    codes, output = [], ""
    for words in (stock, launch):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / name
            shutil.copytree(PROGRAMS / name, place)
            settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "MASTER_PORT": port}
            ended = subprocess.run(
                [sys.executable, *(port if word is PORT else word for word in words)],
                cwd=place,
                env={**os.environ, **settings},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                timeout=600,
            )
        codes.append(ended.returncode)
        output = ended.stdout
        if show:
            print(f"-- {name}: {' '.join(words)}\n{output}-- exit {ended.returncode}", file=sys.stderr)
    told = [line for line in output.splitlines() if program["message"] and program["message"] in line]
    silent = not program["message"] and codes[1] == 0
    return {
        "stock": codes[0],
        "launch": codes[1],
        "first": program["first"],
        "outcome": program["outcome"] if told or silent or program["outcome"] == "not applicable" else "changed",
        "message": " ".join(told[0].split()) if told else None,
    }


def launch(names: list[str], show: bool) -> None:
    """Run the named programs, or all, and write what they did into `RESULTS`."""
    from workers import versions

    old = json.loads(RESULTS.read_text("utf-8"))["cases"] if names and RESULTS.exists() else {}
    programs = names or sorted(path.parent.name for path in PROGRAMS.glob("*/program.json"))
    for name in programs:
        old[name] = launched(name, show)
        print(json.dumps({"case": name, **old[name]}, ensure_ascii=False), flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(LIBRARIES),
        "cases": dict(sorted(old.items())),
    }
    RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


def section() -> list[str]:
    """Return the lines of docs/evidence.md about the threads."""
    everything = cases()
    scope = {name: case for name, case in everything.items() if not case["scope"]}
    ran = {path.parent.name: json.loads(path.read_text("utf-8")) for path in sorted(PROGRAMS.glob("*/program.json"))}
    caught = {when: sum(program[when] in CAUGHT for program in ran.values()) for when in ("first", "outcome")}

    def counts(names: list[str]) -> str:
        first = sum(bool(scope[name]["first"]) for name in names)
        either = sum(bool(scope[name]["first"]) or ran.get(name, {}).get("first") in CAUGHT for name in names)
        lint = sum(bool(scope[name]["codes"]) for name in names)
        today = sum(bool(scope[name]["codes"] or scope[name]["launch"]) for name in names)
        return f"the default rules reported {first}, they or `mpguard launch` {either}; today {lint} and {today}"

    later = [name for name in scope if name.startswith("c")]
    earlier = [name for name in scope if name not in later]
    return [
        "## Precision problems that users reported",
        "",
        f"{len(everything)} precision problems from public threads were rewritten as small programs and configs"
        " ([tests/lint/threads](../tests/lint/threads)), by writers who did not know the rules; "
        f"{len(scope)} of them can be known from the files or from the dtypes of a run. `python benchmarks/threads.py"
        " lint` repeats it.",
        "",
        f"**Of the first {len(earlier)} at first {counts(earlier)}.** The rules were then changed because of these."
        f" **Of {len(later)} others, collected before that and not read, at first {counts(later)}**, since the rules"
        " were changed because of them as well.",
        "",
        f"{len(ran)} of those that the default rules did not report run as tiny programs on a CPU"
        " ([benchmarks/thread_programs](../benchmarks/thread_programs)), with an mp.yaml that has the precision that"
        f" the user meant. **At first `mpguard launch` caught {caught['first']} of {len(ran)}**: it refused the run,"
        " named the mistake, or put the precision in force and proved it. mpguard was changed because of them; today it"
        f" catches {caught['outcome']} ([results](../benchmarks/results/threads_launch.json)).",
        "",
        "Two kinds are for `launch` only: a gradient norm that is BF16 because the whole run is (the code that clips"
        " it is right), and a norm of queries and keys that returns FP32 next to BF16 values (their dtypes depend on"
        " the inputs). `nn.RMSNorm` without `eps`, whose documented default follows the dtype of its input, is"
        " reported nowhere: on a CPU with torch 2.13 it makes no difference.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("lint", "launch", "page"))
    parser.add_argument("names", nargs="*", help="cases; all by default")
    parser.add_argument("--preview", action="store_true", help="preview rules too")
    parser.add_argument("--show", action="store_true", help="launch: print what the programs print")
    options = parser.parse_intermixed_args()
    if options.command == "launch":
        launch(options.names, options.show)
        return 0
    if options.command == "page":
        print("\n".join(section()))
        return 0
    for name in options.names or cases():
        for finding in findings(name, Selectors(preview=options.preview)):
            print(json.dumps({"case": name, "place": f"{finding.path}:{finding.line}", "code": finding.code,
                              "message": finding.message}))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
