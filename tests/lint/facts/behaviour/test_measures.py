"""What a file does only to measure, or to evaluate."""

from __future__ import annotations

import textwrap

import pytest
from lint_facts import facts_of

TIMED = """
import time
import torch

def benchmark(model, optimizer):
    x = torch.randn(8, 8)
    for _ in range(100):
        start = time.time()
        model(x).sum().backward()
        optimizer.step()
        print("throughput", 1 / (time.time() - start))
"""


def test_a_timed_loop_over_one_synthetic_batch_only_measures() -> None:
    assert facts_of(TIMED).measures.only_measures


def test_a_loop_over_data_trains() -> None:
    code = TIMED.replace("    for _ in range(100):", "    for x in DataLoader(data):")
    assert not facts_of(code).measures.only_measures


@pytest.mark.parametrize(
    ("code", "probes"),
    [
        ("out.backward(torch.ones_like(out))", True),
        ("for x in loader:\n    loss.backward()\n    pdb.set_trace()", True),
        ("for x in loader:\n    loss.backward()", False),
        ("", False),
    ],
)
def test_gradients_that_are_only_inspected(code: str, probes: bool) -> None:
    assert facts_of(f"import pdb\nimport torch\n{code}\n").measures.only_probes_gradients is probes


@pytest.mark.parametrize(("use", "evaluates"), [("evaluate", True), ("predict", True), ("train", False), ("x", False)])
def test_a_trainer_that_evaluates(use: str, evaluates: bool) -> None:
    code = f"""
    from transformers import Trainer
    trainer = Trainer(model, args)
    trainer.{use}()
    """
    facts = facts_of(textwrap.dedent(code))
    assert facts.measures.only_evaluates(facts.calls["Trainer"][0]) is evaluates
