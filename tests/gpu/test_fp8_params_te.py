"""Parameters kept in FP8 by Transformer Engine: exact masters, checkpoints, what is refused. For `pytest tests/gpu`.

tests/nn/fp8/test_weights.py has what goes without a GPU; benchmarks/gpu_matrix.py has each framework.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import PROGRAMS
from processes import command, results, torchrun, transcript
from te_models import POLICIES, TE, Model, fp8_share, model, train
from torch import nn

import mpguard
from mpguard.nn.fp8.weights import exact_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::mpguard.MpguardWarning")]

te = pytest.importorskip("transformer_engine.pytorch")

KINDS = {"delayed": "Float8Tensor", "tensorwise": "Float8Tensor", "blockwise": "Float8BlockwiseQTensor"}


def policy(name: str) -> mpguard.Policy:
    return POLICIES[name].replace(fp8_param=True)


def adam(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    from transformer_engine.pytorch.optimizers import FusedAdam

    made: torch.optim.Optimizer = FusedAdam(net.parameters(), **{"lr": 1e-3, "master_weights": True, **options})
    return made


def kept(net: nn.Module) -> dict[str, Any]:
    return {name: own for name, own in net.named_parameters() if exact_of(own) is not None}


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", TE)
@pytest.mark.parametrize("early", [True, False])
def test_masters_are_the_weights_bit_for_bit(name: str, early: bool) -> None:
    """The optimizer before or after. Rate zero: after a step the masters are still what they began as."""
    net = model()
    before = state(net)
    objects = {name: id(own) for name, own in net.named_parameters()}
    optimizer = adam(net, lr=0.0) if early else None
    done = mpguard.convert(net, policy(name))
    optimizer = optimizer or adam(net, lr=0.0)
    assert len(done.converted) == 8 and len(kept(net)) == 8
    assert {type(own).__name__ for own in kept(net).values()} == {KINDS[name]}
    assert {key: id(own) for key, own in net.named_parameters()} == objects
    assert same(state(net), before), "what is saved before the first step is exact"
    assert all(exact_of(own).value.device.type == "cpu" for own in kept(net).values())
    train(net, optimizer, 1)
    for key, own in kept(net).items():
        master = optimizer.state[own]["master_param"]
        assert master.dtype is torch.float32 and torch.equal(master.cpu(), before[key])
        assert not torch.equal(own.dequantize().cpu(), before[key]), "the FP8 weight is rounded"
        assert exact_of(own).value is master, "and the copy is freed"


@pytest.mark.parametrize("name", TE)
def test_trains_as_layers_that_quantize_exact_weights_do(name: str) -> None:
    """All matmuls are FP8, every parameter changes; delayed scaling's backward passes read no weights of old (S31)."""
    reference = model()
    mpguard.convert(reference, POLICIES[name])
    expected = train(reference, adam(reference), 100)
    net = model()
    before = state(net)
    mpguard.convert(net, policy(name))
    optimizer = adam(net)
    losses = train(net, optimizer, 100)
    gaps = [abs(a - b) / b for a, b in zip(losses[:20], expected[:20], strict=True)]
    assert losses[-1] < 0.5 * losses[0] and max(gaps) < 0.005, gaps
    assert not any(torch.equal(value, before[key]) for key, value in state(net).items())
    assert fp8_share(net, optimizer)[0] >= 24
    for own in kept(net).values():
        transposed = getattr(own, "_transpose", None)
        valid = transposed is not None and not own._transpose_invalid
        assert not valid or torch.equal(transposed, own._data.t())


@pytest.mark.parametrize("name", TE)
def test_a_checkpoint_is_that_of_the_plain_model_and_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    net = model()
    mpguard.convert(net, policy(name))
    optimizer = adam(net)
    train(net, optimizer, 5)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    saved = torch.load(tmp_path / "both.pt", weights_only=True)
    plain = Model()
    assert [(k, v.shape, v.dtype) for k, v in saved["model"].items()] == [
        (k, v.shape, v.dtype) for k, v in plain.state_dict().items()
    ]
    plain.load_state_dict(saved["model"])
    masters = {key: optimizer.state[own]["master_param"].cpu() for key, own in kept(net).items()}
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in masters.items())
    straight = train(net, optimizer, 5)
    torch.manual_seed(9)
    again = Model().cuda()
    mpguard.convert(again, policy(name))
    other = adam(again)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(again, other, 5) == straight and same(state(again), state(net))


@pytest.mark.parametrize("name", TE)
def test_revert_gives_plain_layers_with_exact_weights(name: str) -> None:
    net = model()
    before = state(net)
    attributes = {key: set(vars(module)) for key, module in net.named_modules()}
    objects = {key: id(own) for key, own in net.named_parameters()}
    mpguard.convert(net, policy(name))
    mpguard.revert(net)
    assert same(state(net), before)
    mpguard.convert(net, policy(name))
    optimizer = adam(net)
    train(net, optimizer, 3)
    exact, copied = state(net), copy.deepcopy(net)
    mpguard.revert(net)
    assert same(state(net), exact) and {type(own) for own in net.parameters()} == {nn.Parameter}
    assert {key: id(own) for key, own in net.named_parameters()} == objects
    assert {key: set(vars(module)) for key, module in net.named_modules()} == attributes
    assert not any(vars(own) for own in net.parameters())
    assert train(net, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    assert same(state(copied), exact), "a copy has exact weights of its own"
    assert len(kept(copied)) == 8 and train(copied, adam(copied), 2)


def test_weights_of_old_take_no_memory() -> None:
    net = nn.Sequential(nn.Linear(4096, 4096, bias=False)).cuda()
    before = torch.cuda.memory_allocated()
    mpguard.convert(net, policy("tensorwise"))
    assert torch.cuda.memory_allocated() - before < -0.4 * 4096 * 4096 * 4


@pytest.mark.parametrize("name", TE)
def test_optimizers_without_masters_change_nothing(name: str) -> None:
    net = model()
    mpguard.convert(net, policy(name))
    before = state(net)
    for optimizer in (torch.optim.AdamW(net.parameters()), adam(net, master_weights=False)):
        with pytest.raises(mpguard.NotInForce, match="FP32 master"):
            train(net, optimizer, 1)
    with pytest.raises(mpguard.NotInForce, match="master_weights=True"):
        train(net, adam(net, master_weight_dtype=torch.float16), 1)
    assert same(state(net), before)


@pytest.mark.parametrize("name", TE)
def test_loaded_weights_reach_the_masters_of_a_running_model(name: str) -> None:
    net = model()
    mpguard.convert(net, policy(name))
    optimizer = adam(net, lr=0.0)
    train(net, optimizer, 1)
    torch.manual_seed(5)
    other = Model().state_dict()
    net.load_state_dict(other)
    train(net, optimizer, 1)
    assert same(state(net), {key: value.cpu() for key, value in other.items()})


@pytest.mark.parametrize("name", TE)
def test_ddp_begins_with_exact_weights(name: str, one_rank: None) -> None:
    """Block-wise weights too, which DDP cannot copy by itself; convert before or after is one thing."""
    net = model()
    before = state(net)
    mpguard.convert(net, policy(name))
    spread = nn.parallel.DistributedDataParallel(net)
    assert same(state(net), before)
    alone = model()
    mpguard.convert(alone, policy(name))
    assert train(spread, adam(spread), 10) == train(alone, adam(alone), 10)
    with pytest.raises(mpguard.PolicyError, match="in use by DDP"):
        mpguard.revert(net)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("order", ["convert", "guard"])
@pytest.mark.parametrize("name", TE)
def test_ranks_that_begin_with_weights_of_their_own_train_one_model(name: str, order: str, tmp_path: Path) -> None:
    run = torchrun(PROGRAMS / "fp8_weights_ddp.py", name, order, cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    first, second = results(run)
    assert first["own"] != second["own"] and first["begun"] == second["begun"] in (first["own"], second["own"])
    assert first["ended"] == second["ended"] and first["rounded"] == second["rounded"]
    assert first["losses"][-1] < 0.7 * first["losses"][0]


def test_converting_below_ddp_is_refused_and_changes_nothing(one_rank: None) -> None:
    net = model()
    spread = nn.parallel.DistributedDataParallel(net)
    with pytest.raises(mpguard.PolicyError, match="Convert before DDP"):
        mpguard.convert(net, policy("tensorwise"))
    assert {type(each) for each in net.modules()} == {type(each) for each in Model().modules()}
    assert train(spread, torch.optim.AdamW(spread.parameters()), 1)


@pytest.mark.parametrize("name", TE)
def test_fsdp2_is_refused_at_the_first_forward_pass(name: str, one_rank: None) -> None:
    from torch.distributed.fsdp import fully_shard

    net = model()
    mpguard.convert(net, policy(name))
    fully_shard(net, mesh=torch.distributed.init_device_mesh("cuda", (1,)))
    with pytest.raises(mpguard.NotInForce, match="has been replaced, by FSDP"):
        train(net, adam(net), 1)


def test_what_cannot_keep_them_is_refused_by_the_guard_before_training(tmp_path: Path) -> None:
    run = command(Path(sys.executable).name, PROGRAMS / "fp8_weights_refused.py", cwd=tmp_path, DS_ACCELERATOR="cuda")
    found = {each["attempt"]: each for each in results(run)}
    reasons = {
        "adamw": "AdamW has no FP32 master weights", "no masters": "FusedAdam was created without FP32 master weights",
        **{name: f"not supported under {name} with fp8_recipe tensorwise (te)" for name in ("fsdp1", "fsdp2")},
        "deepspeed": "not supported under DeepSpeed", "accelerate": "not supported under fsdp2",
    }  # fmt: skip
    assert found.keys() == reasons.keys(), transcript(run)
    for name, reason in reasons.items():
        message = found[name]["message"]
        assert reason in message and "mpguard_overrides: {fp8_param: null}" in message, found
        assert found[name]["plain"], found


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_ddp_with_other_options(options: dict[str, bool], one_rank: None) -> None:
    net, alone = model(), model()
    for each in (net, alone):
        mpguard.convert(each, policy("tensorwise"))
    spread = nn.parallel.DistributedDataParallel(net, **options)
    assert train(spread, adam(spread), 5) == train(alone, adam(alone), 5)


def test_a_model_of_transformers_is_saved_and_loaded_without_mpguard(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).cuda()
    assert len(mpguard.convert(net, policy("delayed")).converted) == 14
    optimizer, tokens = adam(net), torch.randint(0, 64, (2, 16), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        net(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    net.save_pretrained(tmp_path)
    plain, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    exact = state(net)
    assert all(torch.equal(value, exact[key]) for key, value in plain.state_dict().items())
    assert all(torch.equal(optimizer.state[own]["master_param"].cpu(), exact[key]) for key, own in kept(net).items())


def test_a_run_that_was_converted_in_between_goes_on_exactly() -> None:
    """FusedAdam has masters of FP32 parameters too, which it never updates."""
    net = model()
    optimizer = adam(net)
    train(net, optimizer, 3)
    before = state(net)
    mpguard.convert(net, policy("blockwise"))
    assert same(state(net), before)
    optimizer.param_groups[0]["lr"] = 0.0
    train(net, optimizer, 1)
    assert same(state(net), before)


def test_a_model_on_the_cpu_is_moved_later() -> None:
    torch.manual_seed(0)
    net, other = Model(), model()
    for each in (net, other):
        mpguard.convert(each, policy("delayed"))
    net.cuda()
    assert train(net, adam(net), 5) == train(other, adam(other), 5)


def test_both_ends_odd_rows_and_tied_weights() -> None:
    net = model()
    net.layers[1].up.weight = net.layers[2].up.weight
    named = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(fp8_param=True)
    done = mpguard.convert(net, named)
    assert len(done.converted) == 4 and len(kept(net)) == 3
    assert net.layers[1].up.weight is net.layers[2].up.weight
    optimizer = adam(net)
    assert train(net, optimizer, 20, rows=61)[-1] < 5
    saved = net.state_dict()
    assert saved["layers.1.up.weight"].data_ptr() == saved["layers.2.up.weight"].data_ptr()
    mpguard.revert(net)
    assert net.layers[1].up.weight is net.layers[2].up.weight and torch.equal(
        saved["layers.1.up.weight"], net.layers[1].up.weight
    )


def test_gradients_accumulate_clip_and_compile() -> None:
    net, compiled = model(), model()
    for each in (net, compiled):
        mpguard.convert(each, policy("tensorwise"))
    optimizer, tokens = adam(net), torch.randint(0, 128, (8, 64), device="cuda")
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(tokens).float().square().mean()
        loss.backward()
    assert torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).isfinite()
    assert all(own.grad.dtype is torch.float32 and type(own.grad) is torch.Tensor for own in kept(net).values())
    optimizer.step()
    losses = train(torch.compile(compiled), adam(compiled), 10)
    assert losses[-1] < losses[0]
