"""The advice of the watch follows the dtype that computed; zero gradients and weights that do not move are events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import in_fork, mp_yaml, run_python, transcript

Events = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Events:
    run = in_fork([PROGRAMS / "watch_advice.py"], cwd=tmp_path_factory.mktemp("advice"), program=run_python)
    assert run.returncode == 0 and "its own code failed" not in run.stderr, transcript(run)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"kind"')]
    return {line["kind"]: line["found"] for line in lines}


def test_an_overflow_is_named_by_the_dtype_that_computed(events: Events) -> None:
    event = events["overflow of FP16 autocast"][0]
    computed = event["value"]["computed"]
    assert (event["event"], event["module"], event["step"]) == ("nonfinite", "0", 7)
    assert (computed["dtype"], computed["weights"], computed["tried"]) == ("float16", "float32", True)
    assert computed["largest"] > 65504, "in FP32 the results are finite, and over what FP16 holds"
    assert "compute `0` in FP32" in event["suggestion"] and "train in BF16" in event["suggestion"]
    assert not events["the same batch in BF16"]


@pytest.mark.parametrize("kind", ["log of 0 in FP32", "log of 0 in FP16 autocast", "0/0 in BF16 autocast"])
def test_what_fp32_does_not_mend_gets_an_epsilon(kind: str, events: Events) -> None:
    event = events[kind][0]
    assert (event["event"], event["module"], event["step"]) == ("nonfinite", "2", 1)
    assert event["value"]["computed"]["largest"] is None
    assert "an epsilon or a bound helps, another dtype does not" in event["suggestion"]


def test_gradients_that_are_all_zero(events: Events) -> None:
    (event,) = events["all gradients are zero"]
    assert (event["event"], event["step"], event["value"]["loss_scale"]) == ("zero_gradients", 5, 2.0)
    assert "raise the loss scale, which is 2" in event["suggestion"]
    (event,) = [each for each in events["all gradients are zero in FP32"] if each["event"] == "zero_gradients"]
    assert event["suggestion"].startswith("check for a loss that is detached")


def test_values_near_the_end_of_fp32_were_large_before(events: Events) -> None:
    """No epsilon helps where a module got them: the batch, the initialization, or a learning rate made them."""
    event = events["weights that were not initialized"][0]
    assert (event["module"], event["step"]) == ("2", 1)
    assert event["suggestion"].startswith("the weights of `2` are up to 3e+38: check the batch and the initialization")
    event = events["a weight that is NaN from the start"][0]
    assert (event["module"], event["value"]["phase"]) == ("2", "weights")
    assert "not finite before the first step: check their initialization" in event["suggestion"]
    event = events["a batch of 1e30"][0]
    assert event["step"] == 7 and "are up to" in event["suggestion"] and "neither an epsilon" in event["suggestion"]


def test_a_loss_scale_that_begins_too_high_settles(events: Events) -> None:
    (event,) = [each for each in events["a loss scale that begins too high"] if each["event"] == "loss_scale_collapse"]
    assert event["value"]["loss_scale"] > 65536 and "began too high" in event["suggestion"]


def test_code_between_calls_is_named_by_the_module_around_it(events: Events) -> None:
    """Attention's own matmul overflows: its layer `out` gets NaN, and does not make it."""
    event = events["overflow of attention in FP16"][0]
    assert (event["module"], event["value"]["before"], event["value"]["computed"]["dtype"]) == ("2", "out", "float16")
    assert event["value"]["computed"]["largest"] is not None and "compute `2` in FP32" in event["suggestion"]
    event = events["rows that are all masked"][0]
    assert (event["module"], event["value"]["before"]) == ("2", "out")
    assert "a softmax over rows that are all masked" in event["suggestion"]


def test_buffers_that_are_not_finite(events: Events) -> None:
    event = events["NaN in a buffer"][0]
    assert (event["module"], event["value"]["buffers"]) == ("2", ["running_var"])
    assert event["suggestion"].startswith("running_var of `2` took NaN")


@pytest.mark.parametrize(
    ("kind", "phase", "advice"),
    [
        ("a loss in FP16", "forward", "compute the loss in FP32"),
        ("the gradient of a norm of zeros", "backward", "check it for sqrt(0), a norm of zeros"),
        ("NaN in the targets", "forward", "NaN in the targets; an epsilon helps, another dtype does not"),
    ],
)
def test_a_loss_outside_of_the_model(kind: str, phase: str, advice: str, events: Events) -> None:
    event = events[kind][0]
    assert (event["event"], event["step"], event["module"]) == ("nonfinite", 1, "the loss function")
    assert event["value"]["phase"] == phase and advice in event["suggestion"]


def test_gradients_that_are_finite_and_whose_norm_is_not(events: Events) -> None:
    event = events["gradients whose squares overflow"][0]
    assert (event["event"], event["module"]) == ("nonfinite", None)
    assert "too large for the sum of their squares" in event["value"]["reason"]
    assert event["suggestion"].startswith("lower the learning rate")


def test_a_loss_that_explodes_in_the_first_steps(events: Events) -> None:
    (event,) = [each for each in events["a loss that explodes"] if each["event"] == "loss_divergence"]
    assert event["step"] == 25 and event["value"]["now"] > 1000 * event["value"]["best"]


def test_modules_whose_gradients_are_all_zero(events: Events) -> None:
    (event,) = [each for each in events["modules whose gradients are zero"] if each["event"] == "zero_gradients"]
    assert (event["step"], event["value"]["modules"]) == (20, ["0", "2.0"])
    assert event["suggestion"].startswith("check for ReLUs or gates")


def test_gradients_below_fp16_without_a_loss_scale(events: Events) -> None:
    (event,) = events["subnormal without a scaler"]
    assert event["event"] == "underflow" and event["value"]["format"] == "fp16"
    assert event["suggestion"].startswith("scale the loss (torch.amp.GradScaler)")


def test_weights_that_do_not_move(events: Events) -> None:
    (event,) = events["weights that do not move"]
    assert event["event"] == "stuck_weights" and event["value"]["share"] > 0.9 and event["step"] == 10
    assert "in FP32" in event["suggestion"]
    for clean in ("weights that move in BF16", "a learning rate of 0", "clean"):
        assert not events[clean], clean


@pytest.mark.parametrize("keywords", [False, True])
def test_nan_from_the_first_step_of_a_launched_run_is_replayed(keywords: bool, tmp_path: Path) -> None:
    """The models of a launched run are known from the first optimizer step; its batch is kept before."""
    program = [PROGRAMS / "watch_first_step.py", *(["--keywords"] if keywords else [])]
    run = in_fork(["--config", mp_yaml(tmp_path, fp8_config="{mpguard_recipe: bf16_mixed}"), *program], cwd=tmp_path)
    printed = transcript(run)
    assert "step 1: the loss is not finite: the first NaN is made by `norm` in the forward pass" in printed
    assert "6 of 6 not finite" in printed and "its own code failed" not in printed
    assert "frozen parts" not in printed, "the replay is no part of the step"


def test_an_fp32_part_of_a_model_inside_of_autocast_is_named(tmp_path: Path) -> None:
    """A VAE whose weights are FP32 on purpose: autocast computes it in FP16 all the same."""
    program = [PROGRAMS / "watch_first_step.py", "--vae"]
    run = in_fork(["--config", mp_yaml(tmp_path, fp8_config="{mpguard_recipe: fp16_mixed}"), *program], cwd=tmp_path)
    printed = transcript(run)
    assert "the first Inf is made by `VAE.conv_in` in the forward pass" in printed
    assert (
        "computed in FP16 by autocast, though its weights are FP32" in printed and "over the 65504 of FP16" in printed
    )
