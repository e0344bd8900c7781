"""Gradients that the script reduces by hand, and engines whose process group is not all ranks: two processes with gloo.

The programs are in tests/programs/reduction_cases.py, and share a start.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from limits import seconds
from paths import PROGRAMS
from processes import ranks_in_fork, results, transcript
from shared import made_once

Cases = dict[str, dict[str, Any]]


def programs(words: list[str]) -> int:
    sys.path.insert(0, str(PROGRAMS))
    import reduction_cases

    return int(reduction_cases.main(words))


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> list[Cases]:
    """Return what each of two ranks has proven, by the name of the program."""

    def run() -> list[Cases]:
        folder = tmp_path_factory.mktemp("reductions")
        runs = ranks_in_fork([], cwd=folder, program=programs, timeout=seconds(180))
        assert all(results(run) for run in runs), "\n".join(map(transcript, runs))
        return [results(run)[0]["cases"] for run in runs]

    made: list[Cases] = made_once(tmp_path_factory, "reductions", run)
    return made


RIGHT = (
    "reduced_in_hooks_of_the_backward_pass",
    "own_zero1", "own_zero1_with_a_buffer_that_is_gone", "own_zero1_divided_before", "own_zero1_of_lists",
    "ddp_over_a_group_of_all_ranks", "ddp_over_one_rank_for_an_ensemble", "ddp_over_one_rank_reduced_by_the_script",
    "ddp_over_one_rank_in_a_pipeline", "a_probe_on_rank_0", "a_probe_on_rank_1", "a_probe_for_which_no_rank_waits",
    "main_gradients_reduced_each", "main_gradients_added_up_in_hooks", "own_zero1_of_a_flat_sum",
    "own_zero1_of_whole_parameters", "tensor_parallel_by_hand", "a_bias_of_one_element_is_reduced",
    "parallel_layers_between_whole_ones", "parallel_layers_and_whole_ones_with_an_optimizer_each",
)  # fmt: skip

WRONG = {
    "own_zero1_in_bf16": "reduction: bf16 (the collective)",
    "own_zero1_in_fp32": "compute: fp32",
    "own_zero1_that_does_not_reduce": "reduction: the gradients differ between ranks",
    "own_zero1_that_throws_the_sum_away": "reduction: the gradients differ between ranks",
    "ddp_over_one_rank": "the process group of the wrapper has 1 of 2 ranks",
    "a_second_model_on_both_ranks_that_is_not_reduced": "reduction: the gradients differ between ranks",
    "fsdp2_over_one_rank": "not proven: reduction could not be observed",
    "main_gradients_reduced_in_bf16": "reduction: bf16 (the collective)",
    "main_gradients_added_up_in_bf16": "accumulation: rounded to bf16 in the sum of the script",
    "main_gradients_reduced_and_thrown_away": "reduction: the gradients differ between ranks",
    "models_of_their_own_that_exchange_gradients_of_activations": "reduction: the gradients differ between ranks",
    "parallel_layers_between_whole_ones_that_are_not_reduced": "coverage: the gradients of 0.weight",
    "gradients_sent_as_bytes": "the script exchanges integers (",
    "models_of_their_own": "engine: no wrapper around the model",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_proven(proven: list[Cases], name: str) -> None:
    for cases in proven:
        assert (cases[name]["verdict"], cases[name]["failures"]) == ("in force", []), cases[name]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_refused_with_the_right_row(proven: list[Cases], name: str) -> None:
    for cases in proven:
        assert cases[name]["verdict"] != "in force", cases[name]
        assert any(WRONG[name] in failure for failure in cases[name]["failures"]), cases[name]


def test_every_program_is_right_or_wrong(proven: list[Cases]) -> None:
    assert set(proven[0]) == {*RIGHT, *WRONG, "a_probe_on_rank_0_in_fp32"}


def test_what_one_rank_trains_alone_must_be_in_the_policys_dtype(proven: list[Cases]) -> None:
    found = proven[0]["a_probe_on_rank_0_in_fp32"]
    assert found["verdict"] == "not in force" and any("compute: fp32" in each for each in found["failures"]), found


def test_gradients_that_are_the_same_on_all_ranks_are_not_called_unsynchronized(proven: list[Cases]) -> None:
    (failure,) = proven[0]["gradients_sent_as_bytes"]["failures"]
    assert failure.startswith("not proven: reduction could not be observed") and "The gradients are the same" in failure


def test_rows_name_what_reduces(proven: list[Cases]) -> None:
    assert proven[0]["own_zero1"]["rows"]["engine"].startswith("gradients reduced by the script itself")
    assert proven[0]["tensor_parallel_by_hand"]["rows"]["engine"].startswith("tensor parallel, by the script")
    assert proven[0]["ddp_over_one_rank_for_an_ensemble"]["rows"]["reduction"].startswith("fp32 over 1 of 2 ranks")


def test_no_value_is_read_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the capture. The ranks then compare no gradients after this step."""
    import torch

    from mpguard.runtime.proof import observe, samples
    from mpguard.runtime.proof.recorder import Recorder

    def read(tensor: torch.Tensor, *_: object) -> NoReturn:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    seen = observe.Observed(world_size=2)
    monkeypatch.setattr(samples, "is_capturing", lambda: True)
    for name in ("tolist", "item", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    observe._add_fingerprint(seen, Recorder(), optimizer, [model])
    assert seen.fingerprint is None and seen.alone == ["weight", "bias"]
