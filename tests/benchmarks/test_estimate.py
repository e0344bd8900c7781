"""The committed measurements of benchmarks/estimate.py, against what is estimated now."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from paths import REPOSITORY
from processes import in_fork, run_python, transcript

from mpguard.estimate import estimate
from mpguard.estimate.estimate import CONTEXT

_spec = importlib.util.spec_from_file_location("benchmark_of_estimate", REPOSITORY / "benchmarks" / "estimate.py")
assert _spec is not None and _spec.loader is not None
benchmark = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = benchmark  # its dataclasses look for their module
_spec.loader.exec_module(benchmark)

RESULTS = [REPOSITORY / "benchmarks/results" / name for name in ("estimate.json", "estimate_adapters.json")]
MEASURED = {name: case for path in RESULTS for name, case in json.loads(path.read_text("utf-8"))["cases"].items()}


@pytest.mark.parametrize("name", benchmark.CASES)
def test_peaks_are_those_that_were_measured(name: str) -> None:
    case, measured = benchmark.CASES[name], MEASURED[name]["measured"]
    error = estimate(benchmark.request_of(case, case.config())).allocated / measured - 1
    assert abs(error) <= case.tolerance, f"{100 * error:.1f} % of {measured:,} bytes"


def test_the_context_and_the_fragments_are_those_that_were_measured() -> None:
    plain = [case for case in MEASURED.values() if case["strategy"] == "single"]
    most = max(case["context_bytes"] for case in plain)
    assert most <= CONTEXT <= 1.05 * most
    limited = {name: case["trains_at"] for name, case in MEASURED.items() if "trains_at" in case}
    enough, too_little = [], []
    for name, trains_at in limited.items():
        found = estimate(benchmark.request_of(benchmark.CASES[name], benchmark.CASES[name].config()))
        counted = round((found.needed - found.per_gpu["context"]) / found.allocated, 4)
        enough += [name] if trains_at is not None and trains_at <= counted else []
        lost = [share for share in benchmark.SHARES if trains_at is None or share < trains_at]
        too_little += [name] if lost[-1] >= counted else []
    assert len(limited) == 25 and len(enough) == 25
    assert too_little == [], "what is counted for fragments was shown to be too little"


RELEASED = """
import contextlib, gc, sys, weakref
sys.path.insert(0, sys.argv[1])
import estimate as benchmark
import torch

benchmark._one_process()
made = torch.optim.AdamW.__init__
optimizers = weakref.WeakSet()

def noted(self, *args, **kwargs):
    optimizers.add(self)
    made(self, *args, **kwargs)

torch.optim.AdamW.__init__ = noted
for name in ("llama-zero2", "llama-fsdp2"):
    case, config = benchmark.small(benchmark.CASES[name])
    with contextlib.ExitStack() as ending:
        step = benchmark.stepper(case, config, "cpu", ending)
        step()
        during = len(optimizers)
        del step
    gc.collect()
    print("KEPT", name, during, len(optimizers))
"""


def test_a_run_of_the_benchmark_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """The next one is limited to a share of the estimate, which must be its own."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    run = in_fork(["-c", RELEASED, REPOSITORY / "benchmarks"], cwd=tmp_path, program=run_python)
    found = [line for line in run.stdout.splitlines() if line.startswith("KEPT")]
    assert found == ["KEPT llama-zero2 1 0", "KEPT llama-fsdp2 1 0"], transcript(run)


STEPPED = """
import contextlib, sys
sys.path[:0] = sys.argv[1:3]
import deepspeed, torch
import estimate as benchmark
from memory import Memory
import mpguard
from mpguard.estimate import estimate

engines, made = [], deepspeed.initialize

def initialize(**more):
    more["config"]["zero_optimization"]["reduce_bucket_size"] = 100_000
    found = made(**more)
    engines.append(found[0])
    return found

deepspeed.initialize = initialize
benchmark._one_process()
case, config = benchmark.small(benchmark.CASES["llama-zero2"])
policy = mpguard.recipe(case.recipe).decided()
with contextlib.ExitStack() as ending:
    step = benchmark.stepper(case, config, "cpu", ending)
    step()
    engine, = engines
    inner = engine.optimizer
    engine.backward(engine(**benchmark.batch_of(case, config, policy, "cpu")).loss)
    gradients = [each for group in inner.averaged_gradients.values() for each in group]
    states = [each for state in inner.optimizer.state.values() for each in state.values()]
    for group in inner.optimizer.param_groups:
        group["foreach"] = True  # as on a GPU
    known = [*gradients, *states, *inner.bit16_groups_flat, *inner.single_partition_of_fp32_groups]
    with Memory(known) as memory:
        engine.step()
kept = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in known}
found = estimate(benchmark.request_of(case, config)).moments["step"]
print("HELD", sum(kept.values()) + memory.peak, sum(found.values()) - 2 * 32 * 1024**2)
"""


def test_what_zero2_holds_in_the_step_of_one_process(tmp_path: Path) -> None:
    """Weights, gradients, masters and states, and the roots of the second moments; no second copy of the gradients."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    words = ["-c", STEPPED, REPOSITORY / "benchmarks", REPOSITORY / "tests" / "support"]
    run = in_fork(words, cwd=tmp_path, program=run_python)
    line = next((line for line in run.stdout.splitlines() if line.startswith("HELD")), None)
    assert line is not None, transcript(run)
    held, expected = map(int, line.split()[1:])
    assert abs(held / expected - 1) < 0.01, (held, expected)
