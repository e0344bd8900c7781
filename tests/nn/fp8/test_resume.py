"""Checkpoints of converted models: the keys are the user's own, and a resumed run continues bit for bit.

Each framework really trains, saves, and loads into a model that began with other weights (programs/resume.py), on
one process and on two with gloo; with torchao's layers in software, and with delayed scaling (fake_delayed_scaling.py),
where the history of past steps decides the scales. Transformer Engine's own history: tests/gpu/test_resume_te.py.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import fake_delayed_scaling
import torch
from limits import seconds
from paths import PROGRAMS
from processes import in_fork, on_ranks, results, run_python, transcript
from torch import nn

import mpguard
from mpguard.nn.fp8 import convert as conversion
from mpguard.nn.fp8.amax_history import KEY, PENDING, store_pending
from mpguard.policy.policy import Policy
from mpguard.runtime import checkpoints

ALONE = ("plain", "early", "forgetful", "safetensors", "accelerate", "trainer", "accelerate-zero2")
#: The engines under which parameters are kept in FP8.
KEPT_IN_FP8 = ("plain", "early", "safetensors", "ddp", "accelerate", "trainer")
SPREAD = ("ddp", "accelerate", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "zero3-init")

pytestmark = pytest.mark.filterwarnings("ignore:.*(padded to|on padding).*:mpguard.MpguardWarning")


@pytest.mark.parametrize("kind", ["torchao", "delayed"])
def test_resumed_runs_continue_bit_for_bit(tmp_path: Path, kind: str) -> None:
    words = (PROGRAMS / "resume.py", kind)
    alone = in_fork([*words, *ALONE], cwd=tmp_path, timeout=seconds(300), program=run_python)
    assert alone.returncode == 0, transcript(alone)
    spread = on_ranks(*words, *SPREAD, cwd=tmp_path, timeout=seconds(300), ACCELERATE_USE_CPU="true")
    assert spread.returncode == 0, transcript(spread)
    found = {each["engine"]: each for each in results(alone)}
    assert found.keys() == set(ALONE)
    if kind == "delayed":
        assert_history_was_lost(found.pop("forgetful"))
    for each in found.values():
        check(each)
    ranks = results(spread)
    assert len(ranks) == 2 * len(SPREAD)
    for engine in SPREAD:
        first, second = (each for each in ranks if each["engine"] == engine)
        check(first)
        check(second)
        assert first["digest"] == second["digest"], engine


def test_runs_whose_parameters_are_kept_in_fp8_continue_bit_for_bit(tmp_path: Path) -> None:
    """What is saved is exact, so the FP8 weights and the masters of the resumed run are those of the other."""
    words = (PROGRAMS / "resume.py", "fake_te")
    alone, spread = ([each for each in names if each in KEPT_IN_FP8] for names in (ALONE, SPREAD))
    one = in_fork([*words, *alone], cwd=tmp_path, timeout=seconds(300), program=run_python)
    assert one.returncode == 0, transcript(one)
    two = on_ranks(*words, *spread, cwd=tmp_path, timeout=seconds(300), ACCELERATE_USE_CPU="true")
    assert two.returncode == 0, transcript(two)
    found = [*results(one), *results(two)]
    assert {each["engine"] for each in found} == set(KEPT_IN_FP8)
    for each in found:
        check(each)
    for engine in KEPT_IN_FP8:
        digests = {each["digest"] for each in found if each["engine"] == engine}
        assert len(digests) <= 2 - (engine == "ddp"), engine


def check(found: dict[str, Any]) -> None:
    assert found["error"] is None, found["error"]
    assert found["fp8"] == 2 and found["keys"], "FP8 layers, and the keys of the plain model"
    assert found["resumed"] == found["straight"] and len(found["straight"]) == 3
    assert found["equal"], "all weights, bit for bit"
    assert len({*found["start"], *found["straight"]}) == 6, "and it trained"
    assert found["messages"] == []


def assert_history_was_lost(found: dict[str, Any]) -> None:
    """The control: with delayed scaling, and weights saved as bare tensors in a custom training loop."""
    assert found["resumed"] != found["straight"] and not found["equal"] and found["keys"]
    (warning,) = found["messages"]
    assert warning.startswith("layers.0.1 and 1 more: the optimizer comes from a checkpoint, the FP8 history")
    assert "mpguard.load_fp8_state_dict" in warning


# -- the history by itself -------------------------------------------------------------------------


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    monkeypatch.setattr(conversion, "_library", fake_delayed_scaling.te_or_torchao)
    return fresh()


def fresh(policy: Policy = fake_delayed_scaling.POLICY) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    mpguard.convert(net, policy)
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        net(torch.full((16, 32), 1.0 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_is_no_key_of_the_state_dict_and_plain_models_pass_over_it(converted: nn.Module) -> None:
    plain = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    assert KEY not in converted.state_dict()._metadata["0"], "nothing to save before the first step"
    train(converted, torch.optim.SGD(converted.parameters(), lr=0.1))
    file = io.BytesIO()
    torch.save(converted.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert list(saved) == list(plain.state_dict())
    assert {value.device.type for value in saved._metadata["1.0"][KEY].values()} == {"cpu"}
    plain.load_state_dict(saved, strict=True)
    assert torch.equal(plain[0].weight, converted[0].weight)


def test_what_is_saved_does_not_move_on_with_the_model(converted: nn.Module) -> None:
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    train(converted, optimizer)
    saved = mpguard.fp8_state_dict(converted)
    before = {name: tensor.clone() for name, tensor in saved["0"].items()}
    train(converted, optimizer)
    assert all(torch.equal(saved["0"][name], before[name]) for name in before)
    assert not torch.equal(mpguard.fp8_state_dict(converted)["0"]["amax_history_fwd"], before["amax_history_fwd"])


def test_the_names_are_the_same_through_wrappers(converted: nn.Module) -> None:
    saved = mpguard.fp8_state_dict(converted)
    assert list(saved) == ["0", "1.0"]

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))

    wrapped = Wrapper()
    mpguard.convert(wrapped, fake_delayed_scaling.POLICY)
    mpguard.load_fp8_state_dict(wrapped, saved)


def test_a_history_of_other_layers_is_refused_and_nothing_is_changed(converted: nn.Module) -> None:
    train(converted, torch.optim.SGD(converted.parameters(), lr=0.1))
    saved = mpguard.fp8_state_dict(converted)
    other = fresh()
    state = {"0": saved["0"], "elsewhere": saved["1.0"]}
    with pytest.raises(mpguard.PolicyError, match=r"it has no 1\.0 and also elsewhere"):
        mpguard.load_fp8_state_dict(other, state)
    assert not other[0].history()["amax_history_fwd"].any()


def test_a_resumed_run_with_more_layers_in_fp8_names_those_without_a_history(
    converted: nn.Module, tmp_path: Path
) -> None:
    """As from a checkpoint of accelerate: the layer that had no history goes on without one."""
    optimizer = torch.optim.AdamW(converted.parameters())
    other = fresh(fake_delayed_scaling.POLICY.replace(fp8_exclude=("1.*",)))
    train(other, torch.optim.AdamW(other.parameters()))
    checkpoints.save([other], tmp_path)
    train(other, resumed := torch.optim.AdamW(other.parameters()))
    optimizer.load_state_dict(resumed.state_dict())
    checkpoints.load([converted], tmp_path)
    ours, theirs = mpguard.fp8_state_dict(converted), torch.load(tmp_path / "mpguard_fp8_0.bin")[0]
    assert all(torch.equal(ours["0"][name], theirs["0"][name]) for name in theirs["0"])
    with pytest.warns(mpguard.MpguardWarning, match=r"^1\.0: the optimizer comes from a checkpoint"):
        train(converted, optimizer, 1)


def test_no_file_is_written_for_checkpoints_without_a_history(tmp_path: Path) -> None:
    net = fresh(Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True))
    checkpoints.save([net], tmp_path / "new")
    checkpoints.load([net], tmp_path)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("length", [2, 9])
def test_another_length_is_cut_or_filled_up(converted: nn.Module, length: int) -> None:
    train(converted, torch.optim.SGD(converted.parameters(), lr=0.1), 4)
    other = fresh(fake_delayed_scaling.POLICY.replace(fp8_amax_history_len=length))
    other.load_state_dict(converted.state_dict())
    ours, theirs = converted[0].history()["amax_history_fwd"], other[0].history()["amax_history_fwd"]
    rows = min(length, fake_delayed_scaling.LENGTH)
    assert torch.equal(theirs[:rows], ours[:rows]) and not theirs[rows:].any()


def test_a_history_means_nothing_to_another_recipe(converted: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    train(converted, torch.optim.SGD(converted.parameters(), lr=0.1))
    monkeypatch.undo()
    other = fresh(Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True))
    other.load_state_dict(converted.state_dict(), strict=True)
    assert mpguard.fp8_state_dict(other) == {}


def test_what_was_loaded_before_the_conversion_is_kept_for_it(converted: nn.Module) -> None:
    train(converted, torch.optim.SGD(converted.parameters(), lr=0.1))
    other = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    store_pending(other, converted.state_dict())
    mpguard.convert(other, fake_delayed_scaling.POLICY)
    assert PENDING not in vars(other[0])
    ours, theirs = mpguard.fp8_state_dict(converted), mpguard.fp8_state_dict(other)
    assert all(torch.equal(ours[layer][name], theirs[layer][name]) for layer in ours for name in ours[layer])


def test_a_new_run_and_a_reverted_model_get_no_warning(converted: nn.Module) -> None:
    optimizer = torch.optim.AdamW(converted.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(converted, optimizer, 3)
        mpguard.revert(converted)
        train(converted, optimizer, 1)


def test_a_converted_model_of_transformers_is_saved_and_loaded_without_mpguard(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    mpguard.convert(net, Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True))
    tokens = torch.randint(0, 64, (2, 16))
    net(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    plain, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours, theirs = net.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert type(plain.model.layers[0].mlp.up_proj) is nn.Linear
