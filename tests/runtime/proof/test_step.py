"""What belongs to a step next to its products: reductions, coverage, accumulation, optimizer states, TF32.

The programs are in tests/programs/step_cases.py; all of one process, and all of two, share a start.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from limits import seconds
from paths import PROGRAMS
from processes import in_fork, ranks_in_fork, results, transcript
from shared import made_once
from torch import nn

from mpguard.runtime.proof import collectives, gradients, optimizer_state, reductions, tf32
from mpguard.runtime.proof.checks.common import format_names
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.reductions import Fingerprint

#: From the number of processes to what each of them has proven.
Proven = Callable[[int], list[dict[str, Any]]]


def programs(words: list[str]) -> int:
    sys.path.insert(0, str(PROGRAMS))
    import step_cases

    return int(step_cases.main(words))


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Proven:
    """Return what each rank of so many processes has proven, by the name of the program."""
    folder, limit = tmp_path_factory.mktemp("step"), seconds(180)

    def run(processes: int) -> list[dict[str, Any]]:
        if processes == 1:
            runs = [in_fork([], cwd=folder, program=programs, timeout=limit)]
        else:
            runs = ranks_in_fork([], cwd=folder, program=programs, timeout=limit)
        assert all(results(run) for run in runs), "\n".join(map(transcript, runs))
        return [results(run)[0]["cases"] for run in runs]

    @functools.cache
    def found(processes: int) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = made_once(tmp_path_factory, f"step_{processes}", lambda: run(processes))
        return made

    return found


RIGHT = {
    1: (
        "accumulates", "accumulates_the_same_batch", "own_buffers_in_fp32", "masters_add_in_fp32", "states_in_fp32",
        "steps_every_fifth_time", "steps_once_when_created", "steps_once_late", "another_optimizer_steps",
        "clears_gradients_in_its_step", "updates_by_hand", "updates_by_hand_every_fourth_time",
        "updates_by_returned_gradients", "updates_two_models_in_turn", "replaces_its_weights", "functional",
        "functional_for_each_sample",
        "functional_with_second_derivatives", "a_temperature_is_fitted_by_lbfgs",
        "fp32", "tf32_in_cudnn", "tf32_in_cublas", "switches_of_both_kinds", "returned_gradients_in_fp32",
        "gradients_that_overflowed_are_thrown_away", "a_backbone_collects_gradients_in_bf16",
        "a_temperature_in_fp64_has_an_optimizer",
        "weights_from_a_checkpoint_in_bf16", "weights_from_zeros", "rounded_weights_that_are_loaded",
        "momentum_that_begins_again", "throws_away_the_gradients_of_a_first_pass",
        "projects_the_gradients_of_two_tasks", "clips_by_hand", "a_hook_bounds", "weights_whose_memory_is_replaced",
        "weights_that_are_bounded_and_normalized", "divides_by_the_ranks_that_it_would_have", "unscales_and_clips",
        "estimates_gradients", "penalizes_gradients_in_fp32",
    ),
    2: (
        "ddp", "ddp_on_the_same_data", "ddp_compresses_as_asked", "by_hand_in_fp32",
        "by_hand_with_a_bias_of_one_element", "ddp_accumulates",
        "flat_in_fp32_and_a_metric_in_bf16", "tensor_parallel", "ddp_ignores_a_weight_of_each_rank",
        "head_outside_reduced_by_hand", "a_part_outside_for_which_ranks_exchange_activations",
        "a_part_outside_of_a_sharded_classifier", "ddp_clears_gradients_in_its_step", "ddp_updates_by_hand",
        "ddp_with_an_optimizer_of_a_shard_on_each_rank", "steps_once_late_on_two_ranks", "steps_once_late_with_fsdp2",
        "pipeline_by_hand", "pipeline_of_torch",
        "fsdp1", "fsdp2", "fsdp2_with_a_unit_in_fp32_that_is_allowed", "zero1", "zero2", "zero3",
        "reduces_sums_of_three_passes_in_one_tensor", "zero3_by_hand", "shards_in_hooks",
        "sequence_parallel_by_hand",
    ),
}  # fmt: skip

WRONG = {
    1: {
        "own_buffers_in_bf16": "accumulation: rounded to bf16",
        "own_buffers_in_fp16": "accumulation: rounded to fp16",
        "masters_behind_bf16_sums": "accumulation: bf16, 7 passes",
        "returned_gradients_in_bf16": "accumulation: rounded to bf16",
        "a_hook_rounds": "accumulation: rounded to bf16 in a hook of the backward pass: `",
        "rounds_each_pass": "accumulation: rounded to bf16 between two backward passes: `",
        "rounds_each_pass_to_fp16": "accumulation: rounded to fp16 between two backward passes: `",
        "rounds_before_clipping": "gradients: fp32, rounded to bf16 before clipping: `",
        "rounds_at_the_step": "gradients: fp32, rounded to fp16 before the step: `",
        "rounds_one_matrix_at_the_step": "gradients: fp32, rounded to bf16 before the step: `2.weight`[",
        "rounds_and_scales_at_the_step": "gradients: fp32, rounded to bf16 before the step: `",
        "rounds_and_clips_by_hand": "gradients: fp32, rounded to fp16 before the step: `",
        "clips_in_bf16": "gradients: fp32, rounded to bf16 in a multiplication before the step: `",
        "gradients_on_a_grid": "gradients: fp32, put on a grid of int8 before the step: `",
        "weights_on_a_grid_for_each_row": "optimizer: AdamW, weights fp32 put on a grid of int8",
        "weights_on_a_grid_of_one_scale": "optimizer: AdamW, weights fp32 put on a grid of int8",
        "weights_on_a_coarse_grid": "optimizer: AdamW, weights fp32 put on a grid of int4",
        "weights_on_a_grid_of_groups": "optimizer: AdamW, weights fp32 put on a grid of int8",
        "divides_by_the_scale_too": "gradients: fp32, divided twice by the loss scale (65536), by the script",
        "multiplies_by_one_over_the_scale_too": "gradients: fp32, divided twice by the loss scale (65536), by the",
        "a_hook_divides_by_the_scale_too": "gradients: fp32, divided twice by the loss scale (65536), by the script",
        "divides_by_the_scale_after_unscaling": "gradients: fp32, divided twice by the loss scale (65536), by the",
        "states_rounded_to_fp16_between_steps": "optimizer: SGD, weights fp32, states fp32 rounded to fp16",
        "weights_rounded_in_each_step": "optimizer: Rounding, weights fp32 rounded to bf16",
        "weights_rounded_between_steps": "optimizer: SGD, weights fp32 rounded to bf16",
        "states_in_an_attribute": "optimizer: Momentum, weights fp32, states bf16",
        "states_in_a_dataclass": "optimizer: Boxed, weights fp32, states bf16",
        "states_rounded_between_steps": "optimizer: AdamW, weights fp32, states fp32 rounded to bf16",
        "states_in_slots": "optimizer: Nested, weights fp32, states bf16",
        "steps_every_fifth_time_in_fp32": "compute: fp32",
        "steps_once_when_created_in_fp32": "compute: fp32",
        "steps_once_late_in_fp32": "compute: fp32",
        "another_optimizer_steps_in_fp32": "compute: fp32",
        "states_in_bf16_around_another_optimizer": "states fp32 50 %, bf16 50 %",
        "clears_gradients_in_its_step_in_fp32": "compute: fp32",
        "updates_by_hand_in_fp32": "compute: fp32",
        "updates_by_returned_gradients_in_fp32": "compute: fp32",
        "updates_weights_in_bf16_by_returned_gradients": "optimizer: the script's own update, weights bf16",
        "updates_two_models_in_turn_one_in_fp32": "compute: fp32",
        "functional_in_fp32": "compute: fp32",
        "estimates_gradients_in_fp32": "no backward pass was seen, and the calls of the model without one ran in fp32",
        "updates_by_hand_and_forgets": "not proven: the run computed gradients without an optimizer of torch",
        "tf32_by_the_new_names": "tf32: none: the model is on the CPU",
        "bf16_in_onednn": "tf32: off; oneDNN matmuls in bf16",
    },
    2: {
        "states_rounded_under_zero3": "states fp32 rounded to bf16",
        "states_rounded_in_a_redundancy_optimizer": "RedundancyOptimizer, weights fp32, states fp32 rounded to bf16",
        "ddp_rounds_after_the_reduction": "rounded to bf16 in a communication hook of DDP, after the reduction: `",
        "ddp_compresses_in_cpp": "reduction: fp16 (the collective)",
        "ddp_compresses_in_a_hook": "reduction: bf16 (the collective)",
        "by_hand_in_bf16": "reduction: bf16 by the script",
        "flat_in_bf16_and_a_metric_in_fp32": "reduction: bf16 (the collective)",
        "gathered_in_bf16": "reduction: bf16 by the script",
        "only_a_metric": "engine: no wrapper around the model",
        "never_synchronized": "not proven: reduction could not be observed",
        "rounded_after_the_reduction": "gradients: fp32, rounded to bf16 before the step: `0.weight`",
        "rounds_before_its_own_reduction": "gradients: fp32, rounded to bf16 before the reduction: `",
        "rounds_a_flat_copy_before_its_reduction": "gradients: fp32, rounded to fp16 before the reduction: `",
        "fsdp2_rounds_at_the_step": "gradients: fp32, rounded to bf16 before the step: `",
        "fsdp2_rounds_each_pass": "accumulation: rounded to bf16 between two backward passes: `",
        "fsdp1_rounds_at_the_step": "gradients: fp32, rounded to bf16 before the step: `",
        "tensor_parallel_without_the_patch": "reduction: bf16 over tp",
        "ddp_ignores_a_weight": "coverage: the gradients of 2.weight are not reduced",
        "head_outside": "coverage: the gradients of Linear.weight, Linear.bias are not reduced",
        "head_outside_that_each_rank_initializes": "coverage: the gradients of Linear.weight, Linear.bias are not",
        "fsdp2_ignores_a_weight": "coverage: the gradients of 2.weight are not reduced",
        "fsdp1_ignores_a_weight": "coverage: the gradients of 2.weight are not reduced",
        "fsdp1_adds_in_bf16": "accumulation: bf16 80 %",
        "fsdp1_multiplies_in_numpy": "compute could not be observed",
        "steps_once_late_on_two_ranks_in_fp32": "compute: fp32",
        "pipeline_in_fp32": "compute: fp32",
        "gossip_of_weights": "engine: no wrapper around the model",
        "gossip_of_weights_in_one_tensor": "engine: no wrapper around the model",
        "copies_that_send_activations": "reduction: the gradients differ between ranks",
        "zero3_by_hand_in_bf16": "reduction: bf16",
        "shards_in_hooks_in_bf16": "reduction: bf16",
        "shards_in_hooks_without_a_reduction": "the gradients differ between ranks",
        "sequence_parallel_with_a_norm_of_each_rank": "reduction: the gradients differ between ranks",
        "zero3_by_hand_without_a_reduction": "coverage: the gradients of",
        "steps_once_late_without_a_reduction": "reduction: the gradients differ between ranks",
    },
}


@pytest.mark.parametrize(("processes", "name"), [(count, name) for count, names in RIGHT.items() for name in names])
def test_right_programs_are_proven(proven: Proven, processes: int, name: str) -> None:
    for cases in proven(processes):
        assert (cases[name]["verdict"], cases[name]["failures"]) == ("in force", []), cases[name]


@pytest.mark.parametrize(
    ("processes", "name", "message"),
    [(count, name, message) for count, cases in WRONG.items() for name, message in cases.items()],
)
def test_wrong_programs_are_refused_with_the_right_row(proven: Proven, processes: int, name: str, message: str) -> None:
    for cases in proven(processes):
        assert cases[name]["verdict"] != "in force", cases[name]
        assert any(message in failure for failure in cases[name]["failures"]), cases[name]


def test_every_program_is_right_or_wrong(proven: Proven) -> None:
    for processes in (1, 2):
        assert set(proven(processes)[0]) == {*RIGHT[processes], *WRONG[processes]}


def test_rows_show_more_than_one_engine_and_dimension(proven: Proven) -> None:
    cases = proven(2)[0]
    assert cases["tensor_parallel"]["rows"]["reduction"].startswith("fp32 over tp (the collective)")
    assert "coverage" not in cases["by_hand_with_a_bias_of_one_element"]["rows"]
    assert "by the script" in cases["head_outside_reduced_by_hand"]["rows"]["coverage"]
    assert cases["ddp_ignores_a_weight_of_each_rank"]["rows"]["coverage"].startswith(
        "1.09 k by DDP, no reduction seen of 2.weight"
    )
    assert "coverage" not in cases["ddp"]["rows"] and "accumulation" not in cases["ddp"]["rows"]
    for name in ("zero1", "zero2", "zero3", "ddp_accumulates"):
        assert cases[name]["rows"]["accumulation"].startswith("fp32, "), cases[name]["rows"]


# -- which tensors hold gradients ----------------------------------------------------------------


def with_gradients(*sizes: int) -> list[nn.Parameter]:
    own = [nn.Parameter(torch.randn(size, 4)) for size in sizes]
    for each in own:
        each.grad = torch.randn_like(each)
    return own


def recorded(own: list[nn.Parameter], tensor: torch.Tensor) -> set[int]:
    watch = gradients.Gradients([torch.optim.SGD(own, lr=0.1)])
    watch.record_collective(collectives.Collective("allreduce_", [tensor], "0", "script"))
    return watch.reduced


def test_a_tensor_of_the_script_holds_gradients_if_its_values_do() -> None:
    a, b, c = own = with_gradients(8, 16, 8)
    flat = torch.cat([each.grad.flatten() for each in own])
    assert recorded(own, flat.bfloat16() / 2) == {id(a), id(b), id(c)}
    assert recorded(own, torch.cat([flat, torch.zeros(100)])) == {id(a), id(b), id(c)}, "padded"
    assert recorded(own, torch.cat([each.grad.flatten() for each in reversed(own)])) == {id(a), id(b), id(c)}
    assert recorded(own, c.grad.half()) == {id(c)}, "of two parameters of one size"
    assert recorded(own, b.grad) == {id(b)}
    assert recorded(own, torch.randn_like(flat)) == recorded(own, torch.randn(8, 4)) == set(), "metrics"


def test_collectives_are_recorded_between_start_and_stop_only() -> None:
    listener = collectives.CollectiveListener(lambda _: None)
    listener.start()
    assert "BackendSelect: registered" in torch._C._dispatch_dump_table("c10d::allreduce_")
    listener.stop()
    assert "BackendSelect: fallthrough" in torch._C._dispatch_dump_table("c10d::allreduce_")


# -- between ranks -------------------------------------------------------------------------------


def test_a_gradient_that_differs_is_named() -> None:
    one = Fingerprint({"body.weight": (1e6, 3.0), "head.weight": (1.0, 0.5)})
    other = Fingerprint({"body.weight": (1e6, 3.0), "head.weight": (1.1, 0.5)})
    assert reductions.compare_ranks([one, Fingerprint(dict(one.gradients))]) == []
    (found,) = reductions.compare_ranks([one, other])
    assert "differ between ranks after the step (head.weight: norm 1 on rank 0, 1.1 on rank 1)" in found.text


def test_a_fingerprint_needs_no_copy_of_the_gradients() -> None:
    own = nn.Parameter(torch.zeros(5 * reductions.CHUNK))
    own.grad = torch.ones_like(own)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ((square, total),) = reductions._sums([own]).values()
    assert square == total == 5 * reductions.CHUNK
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= 8 * reductions.CHUNK + 1024, "a part in FP64 at a time"


#: Gradients of all kinds: dtypes, an empty one, a scalar, a transposed and an expanded one, one with an infinity.
MANY = [
    torch.linspace(-3, 5, 96).reshape(12, 8), torch.linspace(-1, 2, 40, dtype=torch.bfloat16),
    torch.linspace(-2, 1, 24, dtype=torch.float16).reshape(2, 3, 4), torch.empty(0), torch.empty(3, 0),
    torch.tensor(-2.5), torch.linspace(0, 1, 30).reshape(5, 6).t(), torch.tensor([[1.5]]).expand(4, 7),
    torch.tensor([1.0, float("inf")]), torch.linspace(-1, 1, 64, dtype=torch.bfloat16).reshape(8, 8)[:, :3],
]  # fmt: skip


@pytest.mark.parametrize("error", [None, RuntimeError, NotImplementedError, AttributeError])
@pytest.mark.parametrize("chunk", [reductions.CHUNK_ON_GPU, 7])
def test_sums_on_a_gpu_are_those_on_a_cpu_also_if_the_kernel_for_many_tensors_fails(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None, chunk: int
) -> None:
    """The code for a GPU is plain torch, which runs here: its kernel for many tensors has a CPU form of its own."""

    def fails(*_: object, **__: object) -> None:
        raise error("not implemented for this dtype") if error else AssertionError

    if error is AttributeError:
        monkeypatch.delattr(torch, "_foreach_norm")
    elif error is not None:
        monkeypatch.setattr(torch, "_foreach_norm", fails)
    monkeypatch.setattr(reductions, "CHUNK_ON_GPU", chunk)
    torch.testing.assert_close(reductions._sums_on_gpu(MANY), reductions._sums_on_cpu(MANY), rtol=1e-12, atol=1e-12)
    assert bool(reductions._norms_at_once(MANY)) == (error is None)


def test_a_rank_whose_kernel_fails_agrees_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = [torch.randn(300, 70, generator=torch.Generator().manual_seed(0))]

    def of_rank() -> Fingerprint:
        ((square, added),) = reductions._sums_on_gpu(gradient).tolist()
        return Fingerprint({"body.weight": (square**0.5, added)})

    one = of_rank()
    monkeypatch.delattr(torch, "_foreach_norm")
    monkeypatch.setattr(reductions, "CHUNK_ON_GPU", 700)
    assert reductions.compare_ranks([one, of_rank()]) == []


def test_sums_on_a_gpu_copy_a_part_of_a_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernel for many tensors, whose form on a CPU copies each tensor."""
    monkeypatch.setattr(reductions, "CHUNK_ON_GPU", 1 << 14)
    monkeypatch.delattr(torch, "_foreach_norm")
    gradients = [torch.ones(1 << 10, 1 << 8), torch.ones(1 << 18, dtype=torch.bfloat16)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        sums = reductions._sums_on_gpu(gradients)
    assert sums.flatten().tolist() == pytest.approx([1 << 18] * 4)
    assert max(event.cpu_memory_usage for event in profile.events()) <= 8 * (1 << 14) + 1024


# -- states, switches, names ---------------------------------------------------------------------


def test_states_are_those_that_the_optimizer_keeps() -> None:
    """Not its copy of the model's weights, nor a buffer of another size in which it communicates."""
    model = nn.Linear(16, 16)
    copies = [own.detach().bfloat16() for own in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.copies, optimizer.buffer, optimizer.model = copies, torch.zeros(99).half(), model.bfloat16()  # type: ignore[attr-defined]
    own = list(model.parameters())
    assert optimizer_state.state_dtypes(optimizer, own, copies) == {}
    optimizer.momentum = {"all": [torch.zeros(16, 16).bfloat16()]}  # type: ignore[attr-defined]
    assert optimizer_state.state_dtypes(optimizer, own, copies)["bf16"] == 256


def test_tf32_is_compared_for_each_library() -> None:
    on = dict.fromkeys(tf32.CUDA, "tf32")
    off = dict.fromkeys(tf32.CUDA, "ieee")
    assert tf32.compare(on, True) == ("on", True) and tf32.compare(off, False) == ("off", True)
    assert tf32.compare({**on, "oneDNN matmuls": "bf16"}, True) == ("on; oneDNN matmuls in bf16", False)
    assert tf32.compare({**on, "oneDNN matmuls": "tf32"}, True) == ("on", True)
    assert tf32.compare({**off, "cuDNN convolutions": "tf32"}, False) == (
        "cuBLAS off, cuDNN convolutions on, cuDNN RNNs off",
        False,
    )
    assert set(tf32.read("cuda")) == {*tf32.CUDA, *tf32.ONEDNN}
    assert set(tf32.read("cpu")) == {*tf32.ONEDNN}, "torch has cuDNN's on by default, and scripts set cuBLAS's"


def test_long_lists_of_names_are_cut_with_a_count() -> None:
    lora = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.default" for n in range(250)]
    assert format_names(lora) == f"{lora[0]} and 249 more"
    assert format_names(["5", "4", "lm_head", "b"], Observed(modules={"5": "Linear of Net", "4": "Linear of Net"})) == (
        "`5` (Linear of Net), `4` (Linear of Net), lm_head and 1 more"
    )


def test_a_second_listener_takes_over() -> None:
    """torch takes one kernel for an operator and dispatch key: a second registration raises, in some versions."""
    first, second = (collectives.CollectiveListener(lambda _: None) for _ in range(2))
    first.start()
    second.start()
    assert first._library is None and second._library is not None
    first.stop()  # not the one that listens
    assert collectives._listening is second
    second.stop()
    assert collectives._listening is None
