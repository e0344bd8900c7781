"""The watch names the module in which a fault was planted: forward, backward, compiled, on one rank only."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import in_fork, ranks_in_fork, run_python, transcript

PROGRAM = PROGRAMS / "watch_faults.py"

#: Faults in the order of the program, with the module and the phase that the watch must name.
SINGLE = {
    "forward: divides by zero": ("blocks.2.fault", "forward"),
    "forward: exponential overflows": ("blocks.2.fault", "forward"),
    "forward: logarithm of a negative number": ("blocks.2.fault", "forward"),
    "forward: square root of a negative number": ("blocks.2.fault", "forward"),
    "forward: overflows FP16": ("blocks.2.fault", "forward"),
    "forward: softmax of a masked row": ("blocks.2.fault", "forward"),
    "forward: by chance": ("blocks.2.fault", "forward"),
    "backward: square root of zero": ("blocks.2.fault", "backward"),
    "backward: masked logarithm": ("blocks.2.fault", "backward"),
    "backward: own function": ("blocks.2.fault", "backward"),
    "backward: arc cosine of one": ("blocks.2.fault", "backward"),
    "backward: power of zero": ("blocks.2.fault", "backward"),
    "backward: norm of zero": ("blocks.2.fault", "backward"),
    "compiled, forward": ("blocks.1.fault", "forward"),
    "compiled, backward": ("blocks.1.fault", "backward"),
    "compiled in place, forward": ("blocks.3.fault", "forward"),
    "checkpointed, forward": ("blocks.0.fault", "forward"),
    "checkpointed, backward": ("blocks.0.fault", "backward"),
    "micro-batches, forward": ("blocks.2.fault", "forward"),
    "BF16, backward": ("blocks.2.fault", "backward"),
    "the weights": ("blocks.1.up", "weights"),
    "the batch": ("the batch", "input"),
    "the loss function, forward": ("the loss function", "forward"),
    "the loss function, backward": ("the loss function", "backward"),
}


def found(run: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, Any]]]:
    assert run.returncode == 0, transcript(run)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"rank"')]
    return {line["kind"]: line["found"] for line in lines}


def test_the_first_bad_module_is_named(tmp_path: Path) -> None:
    run = in_fork([PROGRAM], cwd=tmp_path, program=run_python)
    events = found(run)
    named = {
        kind: [(each["module"], each["value"]["phase"]) for each in own if each["step"] == 4]
        for kind, own in events.items()
    }
    assert named == {kind: [expected] for kind, expected in SINGLE.items()}
    assert all(event["suggestion"] for own in events.values() for event in own)
    (zero,) = events["forward: divides by zero"]
    (inputs,) = zero["value"]["inputs"]
    assert inputs["shape"] == [8, 16] and inputs["min"] < 0 < inputs["max"], "the inputs' ranges"
    assert "`blocks.2.fault` in the forward pass, from inputs: float32 [8, 16] in [" in run.stderr
    assert "its own code failed" not in run.stderr


def test_a_fault_of_one_rank_is_named_by_that_rank(tmp_path: Path) -> None:
    """After the reduction all ranks have bad gradients; only one of them has made them."""
    ranks = [found(run) for run in ranks_in_fork([PROGRAM], cwd=tmp_path, program=run_python)]
    for own in ranks:  # a replay that would wait for the other rank is refused
        (event,) = own["a collective in the model"]
        assert event["module"] is None and "`allreduce_` would wait" in event["value"]["reason"], event
    for own in (0, 1):
        for phase in ("forward", "backward"):
            (event,) = ranks[own][f"rank {own}, {phase}"]
            assert (event["module"], event["value"]["phase"], event["rank"]) == ("blocks.1.fault", phase, own)
            for other in ranks[1 - own][f"rank {own}, {phase}"]:
                assert other["module"] is None and "another rank made it" in other["value"]["reason"]
