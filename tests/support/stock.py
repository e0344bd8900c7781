"""What the stock tests share: the libraries as they are, started by what a user would start, without mpguard.

A stock half that no longer holds is good news. Its message says what may go then: `fixed_upstream(7)`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from paths import REPOSITORY, TESTS
from processes import Program, in_fork, mp_yaml

ROOT = REPOSITORY
PROGRAMS = TESTS / "stock" / "programs"
ENVIRONMENT = PROGRAMS / "environment.py"

#: What mpguard has for each finding: places in its code (`module:name`), and rules. A test holds that they exist.
OURS: Mapping[int, tuple[str, ...]] = {
    1: ("mpguard.runtime.patches.fp8_conversion:convert", "mpguard_plugins.accelerate:_te", "MPG806"),
    2: ("mpguard.runtime.patches.fp8_conversion:convert", "mpguard_plugins.accelerate:_te", "MPG810"),
    3: ("mpguard.runtime.patches.fp8_conversion:convert", "mpguard_plugins.accelerate:_te", "MPG809"),
    4: ("MPG407", "MPG809"),
    5: ("mpguard.document.schemas.accelerate:FP8", "mpguard_plugins.accelerate:accelerate", "MPG801"),
    6: ("MPG801",),
    7: (
        "mpguard.runtime.launch.preflight:_conflicting_keys",
        "mpguard_plugins.accelerate:accelerate",
        "mpguard.document.schemas.accelerate:ARGUMENTS",
        "MPG804",
    ),
    8: (
        "mpguard.runtime.launch.preflight:_deepspeed_file",
        "mpguard.runtime.patches.deepspeed:_deepspeed_initialize",
        "MPG824",
    ),
    9: (
        "mpguard.runtime.launch.preflight:_deepspeed_file",
        "mpguard.runtime.patches.deepspeed:_deepspeed_initialize",
        "MPG861",
    ),
    10: ("mpguard.runtime.launch.preflight:_hardware", "MPG814"),
    11: ("mpguard.runtime.patches.accelerate:_accelerator", "MPG863"),
    12: (
        "mpguard.runtime.patches.accelerate:_fsdp_plugin",
        "mpguard.runtime.launch.preflight:_conflicting_keys",
        "MPG864",
    ),
    13: ("mpguard.runtime.patches.accelerate:_fsdp_plugin", "mpguard.runtime.patches.torch:_mixed_precision"),
    14: ("mpguard.nn.fp8.filters:reasons",),
    15: ("mpguard.nn.fp8.filters:reasons", "MPG409"),
    16: ("mpguard_plugins.torchao:Float8Filter", "MPG409"),
    17: ("mpguard.targets.capabilities:fp8_weights", "mpguard_plugins.accelerate:_fp8", "MPG413", "MPG812"),
    18: ("mpguard_plugins.deepspeed:deepspeed", "MPG823", "MPG825"),
    19: ("mpguard.nn.compile:choice", "MPG402"),
    20: ("mpguard.runtime.plan:refuse_config_after_script", "mpguard.runtime.launch.startup_hook:install", "MPG866"),
    21: ("mpguard.runtime.launch.launcher:prepare", "mpguard.runtime.activation:check_start"),
    22: ("mpguard.runtime.launch.preflight:_engine",),
    23: ("mpguard.runtime.launch.preflight:_engine", "MPG811"),
    24: ("mpguard.runtime.plan:Plan.environment",),
    25: ("mpguard_plugins.accelerate:beside_deepspeed_file", "mpguard.runtime.launch.launcher:_flags", "MPG861"),
    26: ("mpguard.runtime.exit_hooks:drain_gloo_threads",),
    27: ("MPG801", "MPG807"),
    28: ("MPG802", "MPG809"),
    29: ("MPG826",),
    30: ("mpguard.nn.grouped_mm:lowered",),
    31: ("mpguard.nn.fp8.weights:_stepped",),
    32: ("mpguard.runtime.patches.torch:_reason_for_orig_params",),
}


def fixed_upstream(number: int) -> str:
    """Why a stock half failed, and what to do about it."""
    return f"upstream has mended S{number}: remove {', '.join(OURS[number])} and docs/findings.md's line"


# -- the stock side ------------------------------------------------------------------------------


def launcher(words: list[str]) -> int:
    """`accelerate launch WORDS`, for `in_fork`."""
    from accelerate.commands.launch import main

    sys.argv = ["accelerate-launch", *words]
    main()
    return 0


def script(words: list[str]) -> int:
    """`python WORDS`, for `in_fork`."""
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
    return 0


class Launched(NamedTuple):
    """What `accelerate launch` did: its status and words, and what each worker had in its environment, by rank."""

    status: int
    workers: list[dict[str, str]]
    arguments: list[list[str]]
    said: str


def launched(
    folder: Path, *flags: object, config: Path | None = None, after: tuple[object, ...] = (),
    program: Program = launcher,
) -> Launched:  # fmt: skip
    """A launcher with a script that prints its environment; the launcher is forked, the workers are real."""
    words = [*(("--config_file", config) if config else ()), *flags, ENVIRONMENT, *after]
    run = in_fork(words, cwd=folder, program=program)
    lines = sorted(
        (json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"rank"')), key=lambda x: x["rank"]
    )
    said = f"status {run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    return Launched(run.returncode, [x["environment"] for x in lines], [x["arguments"] for x in lines], said)


def config(folder: Path, name: str = "stock.yaml", **keys: str | int | None) -> Path:
    """A YAML of accelerate's own, without a key of mpguard's: BF16 in one process on the CPU, with keys changed."""
    return mp_yaml(folder, name, recipe=None, **keys)


@contextlib.contextmanager
def clean_accelerate(**variables: str) -> Iterator[None]:
    """accelerate in this process as in a new one, with these variables and none of an outer run's."""
    from accelerate.state import AcceleratorState

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    with mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
        AcceleratorState._reset_state(True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)


# -- mpguard's side ------------------------------------------------------------------------------


class Told(NamedTuple):
    status: int
    out: str
    err: str


def mpguard(*words: object) -> Told:
    """`mpguard WORDS` in this process."""
    from mpguard.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return Told(status, out.getvalue(), err.getvalue())


def mpguard_launch(words: list[str]) -> int:
    """`mpguard launch WORDS`, for `in_fork`."""
    from mpguard.cli import main

    return main(["launch", *words])


def linted(*paths: Path, select: str = "MPG") -> set[tuple[str, int]]:
    """Code and line of each finding of `mpguard lint`."""
    told = mpguard("lint", "--format", "json", "--select", select, *paths)
    assert told.status in (0, 1), told
    data: Any = json.loads(told.out)
    return {(each["code"], each["line"]) for each in data["findings"]}


def numbers(text: str) -> set[int]:
    """The S-numbers in a text."""
    return {int(found) for found in re.findall(r"\bS(\d{1,2})\b", text)}
