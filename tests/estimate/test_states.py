"""Parameters, gradients, master weights and optimizer states: to the byte what the libraries keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from limits import seconds
from paths import PROGRAMS
from processes import on_ranks, transcript

import mpguard
from mpguard.estimate import ModelConfig, Request, estimate, read_model
from mpguard.estimate.optimizers import OPTIMIZERS, Owned

#: No size is a multiple of the number of processes, so padding counts.
TINY = {
    "model_type": "llama", "hidden_size": 66, "intermediate_size": 163, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 517, "use_cache": False,
}  # fmt: skip

STRATEGIES = ("fsdp2", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
STATES = ("parameters", "gradients", "master_weights", "optimizer")


def expected(config: ModelConfig, recipe: str, reduced: str = "fp32", **more: Any) -> dict[str, int]:
    policy = mpguard.recipe(recipe).replace(grad_reduce_in_fp32=reduced == "fp32")
    found = estimate(Request(config, policy, batch=2, length=16, **more)).per_gpu
    return {name: found[name] for name in STATES}


def test_sharded_states_are_those_of_fsdp2_and_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    kinds = (("bf16_mixed", "fp32"), ("bf16_mixed", "bf16"), ("fp32", "fp32"))  # DeepSpeed has no FP16 on the CPU
    cases = [(recipe, strategy, reduced) for recipe, reduced in kinds for strategy in STRATEGIES]
    words = [":".join(case) for case in cases]
    run = on_ranks(PROGRAMS / "estimated_states.py", path, *words, cwd=tmp_path, timeout=seconds(240))
    line = next((line for line in run.stdout.splitlines() if line.startswith("FOUND")), None)
    assert line is not None, transcript(run)
    config = read_model(str(path))
    assert json.loads(line.removeprefix("FOUND")) == {
        ":".join(case): expected(config, case[0], reduced=case[2], strategy=case[1], gpus=2) for case in cases
    }


def test_masters_in_the_optimizer() -> None:
    from mpguard.nn import master_weights

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    made = torch.optim.AdamW(model.parameters())
    master_weights.keep(made)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    made.step()
    policy = mpguard.recipe("bf16_mixed").replace(master_weights="optimizer")
    found = estimate(Request(ModelConfig(TINY, "tiny"), policy, batch=2, length=16)).per_gpu
    masters = [master_weights.master_of(each) for each in model.parameters()]
    assert {name: found[name] for name in STATES[:3]} == {
        "parameters": sum(each.nbytes for each in model.parameters()),
        "gradients": sum(each.grad.nbytes for each in model.parameters() if each.grad is not None),
        "master_weights": sum(each.value.nbytes for each in masters if each is not None),
    }


@pytest.mark.parametrize("recipe", ["fp32", "bf16_mixed", "bf16_full"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_states_of_one_process_are_those_of_torch(recipe: str, optimizer: str) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).to(
        mpguard.recipe(recipe).master_dtype.torch
    )
    made = {
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
        "sgd": lambda: torch.optim.SGD(model.parameters(), momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters()),
    }[optimizer]()
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    made.step()
    assert expected(ModelConfig(TINY, "tiny"), recipe, optimizer=optimizer) == {
        "parameters": sum(each.nbytes for each in model.parameters()),
        "gradients": sum(each.grad.nbytes for each in model.parameters()),
        "master_weights": 0,
        "optimizer": sum(
            each.nbytes for state in made.state.values() for name, each in state.items() if name != "step"
        ),
    }


def test_muon_has_one_state_for_matrices() -> None:
    weight = torch.nn.Parameter(torch.ones(24, 16))
    made = torch.optim.Muon([weight])
    weight.grad = torch.ones_like(weight)
    made.step()
    states = [each for state in made.state.values() for name, each in state.items() if name != "step"]
    assert OPTIMIZERS["muon"].state(Owned((24, 16), 4, "linear")) == sum(each.nbytes for each in states)
    assert OPTIMIZERS["muon"].state(Owned((24, 16), 4, "embedding")) == 2 * 24 * 16 * 4  # AdamW


@pytest.mark.parametrize("shape", [(64, 64), (100, 64), (16, 16), (4096,)])
def test_eight_bit_states_are_those_of_torchao(shape: tuple[int, ...]) -> None:
    optim = pytest.importorskip("torchao.optim")
    made = optim.AdamW8bit([torch.nn.Parameter(torch.ones(shape))])
    states = [made._new_buffer(made.param_groups[0]["params"][0], signed) for signed in (True, False)]
    parts = [part for state in states for part in ((state.codes, state.scale) if hasattr(state, "codes") else (state,))]
    found = OPTIMIZERS["adamw8bit"].state(Owned(shape, 4, "linear"))
    assert found == sum(each.nbytes for each in parts)


def test_what_adamw_needs_while_it_steps() -> None:
    """All tensors in one call, as torch does on GPUs: the roots of the second moments are alive at once."""
    from memory import Memory

    weights = [torch.nn.Parameter(torch.ones(size)) for size in ((64, 64), (512,), (33, 8))]
    made = torch.optim.AdamW(weights, foreach=True)
    for each in weights:
        each.grad = torch.ones_like(each)
    made.step()
    known = [*weights, *(each.grad for each in weights), *(t for state in made.state.values() for t in state.values())]
    with Memory(known) as memory:
        made.step()
    expected_step = OPTIMIZERS["adamw"].step([Owned(tuple(each.shape), 4, "linear") for each in weights])
    assert abs(memory.peak - expected_step) < 64  # the step counters
