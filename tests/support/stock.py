"""Shared by the stock tests: the libraries without mpguard, started as a user would start them.

If an assertion about stock behaviour fails, the library was fixed. Its message, `fixed_upstream(7)`, lists what to
remove.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from paths import REPOSITORY, TESTS
from processes import Program, in_fork, mp_yaml

pytest.importorskip("accelerate", reason="the real library runs here")

ROOT = REPOSITORY
PROGRAMS = TESTS / "stock" / "programs"
ENVIRONMENT = PROGRAMS / "environment.py"

#: What mpguard has for each finding: places in its code (`module:name`), and rules. A test checks that they exist.
OURS: Mapping[int, tuple[str, ...]] = {
    1: ("mpguard.runtime.patches.fp8_conversion:convert", "mpguard_plugins.accelerate:_te", "MPG806"),
    2: ("mpguard.runtime.patches.fp8_conversion:convert", "mpguard_plugins.accelerate:_te", "MPG809"),
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
        "mpguard.runtime.patches.deepspeed_engine:_deepspeed_initialize",
        "MPG824",
    ),
    9: (
        "mpguard.runtime.launch.preflight:_deepspeed_file",
        "mpguard.runtime.patches.deepspeed_engine:_deepspeed_initialize",
        "MPG861",
    ),
    10: ("mpguard.runtime.launch.preflight:_hardware", "MPG408"),
    11: ("mpguard.runtime.patches.accelerate_plugins:_accelerator", "MPG863"),
    12: (
        "mpguard.runtime.patches.accelerate_plugins:_fsdp_plugin",
        "mpguard.runtime.launch.preflight:_conflicting_keys",
        "MPG864",
    ),
    13: (
        "mpguard.runtime.patches.accelerate_plugins:_fsdp_plugin",
        "mpguard.runtime.patches.torch_fsdp_dtypes:_mixed_precision",
    ),
    14: ("mpguard.nn.fp8.filters:reasons",),
    15: ("mpguard.nn.fp8.filters:reasons", "MPG409"),
    16: ("mpguard_plugins.torchao:Float8Filter", "MPG409"),
    17: ("mpguard.targets.capabilities:fp8_weights", "mpguard_plugins.accelerate:_fp8", "MPG413"),
    18: ("mpguard_plugins.deepspeed:deepspeed", "MPG823", "MPG821"),
    19: ("mpguard.nn.compile:choice", "MPG402"),
    20: ("mpguard.runtime.plan:refuse_config_after_script", "mpguard.runtime.launch.startup_hook:install", "MPG866"),
    21: ("mpguard.runtime.launch.launcher:prepare", "mpguard.runtime.activation:check_start"),
    22: ("mpguard.runtime.launch.preflight:_engine",),
    23: ("mpguard.runtime.launch.preflight:_engine", "MPG811"),
    24: ("mpguard.runtime.plan:Plan.environment",),
    25: ("mpguard_plugins.accelerate:adapted", "mpguard.runtime.launch.launcher:_flags", "MPG861"),
    26: ("mpguard.runtime.exit_hooks:drain_gloo_threads",),
    27: ("MPG801", "MPG401"),
    28: ("MPG802", "MPG813"),
    29: ("MPG826",),
    30: ("mpguard.nn.grouped_mm:autocast_grouped_mm",),
    31: ("mpguard.nn.fp8.weights:_stepped",),
    32: ("mpguard.runtime.patches.torch_fsdp_dtypes:_reason_for_orig_params",),
    33: ("mpguard.nn.rnn:register", "MPG314"),
    34: ("mpguard.runtime.patches.accelerate_plugins:_enable_fp16_on_cpu",),
    35: ("mpguard.runtime.patches.torch_compiled_recording:_compiled_backward",),
    36: ("mpguard.runtime.patches.torch_fsdp_gradients:_take_gradient",),
    37: ("mpguard.runtime.proof.checks.gradients:accumulation",),
    38: ("mpguard.nn.attention",),
    39: ("mpguard.runtime.patches.torch_optimizer_conversion:_drop_stale_copies", "MPG315"),
    40: ("mpguard.nn.fp8.torchao_mxfp8:AutocastMXFP8Linear",),
}


def fixed_upstream(number: int) -> str:
    """Return why an assertion about stock behaviour failed, and what to remove."""
    return f"upstream has fixed S{number}: remove {', '.join(OURS[number])} and docs/findings.md's line"


# -- the stock side ------------------------------------------------------------------------------


def launcher(words: list[str]) -> int:
    """Run `accelerate launch WORDS`, for `in_fork`."""
    from accelerate.commands.launch import main

    sys.argv = ["accelerate-launch", *words]
    main()
    return 0


class Launched(NamedTuple):
    """The result of `accelerate launch`: its status and output; environment and arguments of each worker, by rank."""

    status: int
    workers: list[dict[str, str]]
    arguments: list[list[str]]
    output: str


def launched(
    folder: Path, *flags: object, config: Path | None = None, after: tuple[object, ...] = (),
    program: Program = launcher,
) -> Launched:  # fmt: skip
    """Run a launcher in a fork, with a script that prints its environment; the workers are real processes."""
    words = [*(("--config_file", config) if config else ()), *flags, ENVIRONMENT, *after]
    run = in_fork(words, cwd=folder, program=program)
    lines = sorted(
        (json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"rank"')), key=lambda x: x["rank"]
    )
    output = f"status {run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    return Launched(run.returncode, [x["environment"] for x in lines], [x["arguments"] for x in lines], output)


def config(folder: Path, name: str = "stock.yaml", **keys: str | int | None) -> Path:
    """Write a config of accelerate without keys of mpguard: BF16 in one process on the CPU, with some keys changed."""
    return mp_yaml(folder, name, recipe=None, **keys)


@contextlib.contextmanager
def clean_accelerate(**variables: str) -> Iterator[None]:
    """Reset accelerate in this process, with these variables and without those of an outer run."""
    from accelerate.state import AcceleratorState

    other = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    with mock.patch.dict(os.environ, {**other, **variables}, clear=True):
        AcceleratorState._reset_state(True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)


# -- mpguard's side ------------------------------------------------------------------------------


class CommandResult(NamedTuple):
    """Status and output of a command of mpguard."""

    status: int
    out: str
    err: str


def mpguard(*words: object) -> CommandResult:
    """Run `mpguard WORDS` in this process."""
    from mpguard.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return CommandResult(status, out.getvalue(), err.getvalue())


def mpguard_launch(words: list[str]) -> int:
    """Run `mpguard launch WORDS`, for `in_fork`."""
    from mpguard.cli import main

    return main(["launch", *words])


def linted(*paths: Path, select: str = "MPG") -> set[tuple[str, int]]:
    """Return code and line of each finding of `mpguard lint`."""
    result = mpguard("lint", "--format", "json", "--select", select, *paths)
    assert result.status in (0, 1), result
    data: Any = json.loads(result.out)
    return {(each["code"], each["line"]) for each in data["findings"]}


def numbers(text: str) -> set[int]:
    """Return the S-numbers in a text."""
    return {int(found) for found in re.findall(r"\bS(\d{1,2})\b", text)}
