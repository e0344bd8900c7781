"""Right programs whose sums often have BF16 values are proven, with a check at every step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import REPOSITORY
from processes import in_fork, results, transcript

NAMES = (
    "gan_hinge", "gan_softplus", "gan_softplus_convolutions", "reward_pairs", "sums_that_cancel", "adds_in_own_buffers",
    "vocabulary_of_50304_accumulates",
)  # fmt: skip


def programs(words: list[str]) -> int:
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    import false_refusals
    from false_refusal_programs import PROGRAMS

    found = [false_refusals.check(name, PROGRAMS[name], 0, 24 / PROGRAMS[name].steps) for name in words]
    sys.stdout.write(json.dumps({"rank": 0, "found": found}) + "\n")
    return 0


def test_right_programs_are_proven_at_every_step(tmp_path: Path) -> None:
    run = in_fork(NAMES, cwd=tmp_path, program=programs)
    assert results(run), transcript(run)
    for each in results(run)[0]["found"]:
        assert not each["refused"] and each["checks"] == each["steps"] >= 20, each


def test_the_result_is_of_ten_thousand_steps_of_all_kinds() -> None:
    made = json.loads((REPOSITORY / "benchmarks" / "results" / "false_refusals.json").read_text("utf-8"))
    assert made["refused"] == 0 and made["steps"] >= 10_000 and made["checks"] >= 0.99 * made["steps"]
    assert made["programs"] >= 40 and {"GAN", "preference", "RL", "vocabulary", "two processes"} <= set(made["kinds"])
