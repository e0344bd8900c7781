"""Transformer Engine's layers in the place of `nn.Linear`: for `pytest tests/gpu` on a machine that has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from te_models import ALL, POLICIES, TE, Block, Model, fp8_share, model, train
from torch import nn

import mpguard
from mpguard.policy import hardware
from mpguard.policy.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::mpguard.MpguardWarning")]

te = pytest.importorskip("transformer_engine.pytorch")


@pytest.mark.parametrize("name", ALL)
def test_a_converted_model_trains_as_in_bf16(name: str) -> None:
    """100 steps; the optimizer was built before; every parameter changes, the kernels are FP8."""
    policy = POLICIES[name]
    plain = model()
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), 100)
    net = model()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    done = mpguard.convert(net, policy)
    assert len(done.converted) == 8 and dict(done.skipped) == {"lm_head": "fp8_exclude"}
    losses = train(net, optimizer, 100)
    assert [key for key, value in net.state_dict().items() if torch.equal(value, before[key])] == []
    assert list(net.state_dict()) == list(before)
    gaps = [abs(a - b) / b for a, b in zip(losses[:20], reference[:20], strict=True)]
    assert losses[-1] < 0.5 * losses[0] and sum(gaps) / 20 < 0.02, gaps
    fp8, products = fp8_share(net, optimizer)
    print(f"{name}: {fp8} of {products} matrix kernels FP8, loss {losses[-1]:.4f}, BF16 {reference[-1]:.4f}")
    assert fp8 >= 24


@pytest.mark.parametrize("name", ALL)
def test_odd_rows_are_carried(name: str) -> None:
    net = model()
    mpguard.convert(net, POLICIES[name])
    losses = train(net, torch.optim.AdamW(net.parameters(), lr=1e-3), 20, rows=61)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", TE)
def test_revert_gives_back_plain_layers(name: str) -> None:
    net = model()
    attributes = {key: set(vars(module)) for key, module in net.named_modules()}
    held = {key: id(each) for key, each in net.named_parameters()}
    mpguard.convert(net, POLICIES[name])
    assert all(isinstance(layer.up, te.Linear) and isinstance(layer.up, nn.Linear) for layer in net.layers)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    copied = copy.deepcopy(net)
    train(copied, torch.optim.SGD(copied.parameters(), lr=0.1), 1)
    mpguard.revert(net)
    assert {type(module) for module in net.modules()} == {type(module) for module in Model().modules()}
    assert {key: id(each) for key, each in net.named_parameters()} == held
    assert {key: set(vars(module)) for key, module in net.named_modules()} == attributes
    assert not net._forward_hooks and not net._forward_pre_hooks
    net.load_state_dict(copied.state_dict(), strict=True)
    assert train(net, torch.optim.SGD(net.parameters(), lr=0.1), 1)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_activation_checkpoints_compute_in_fp8_again(name: str) -> None:
    from torch.utils.checkpoint import checkpoint

    block = Block(256).cuda()
    mpguard.convert(block, POLICIES[name])
    inputs = torch.randn(64, 256, device="cuda")
    gradients = []
    for checkpointed in (False, True):
        x = inputs.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            result = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        result.float().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_delayed_scaling_is_the_same_with_activation_checkpoints(reentrant: bool) -> None:
    """Losses, weights and histories of ten steps; the control is that the model has the same without them twice."""
    from torch.utils.checkpoint import checkpoint

    found = []
    for checkpointed in (False, False, True):
        net = model()
        mpguard.convert(net, POLICIES["delayed"])
        for layer in net.layers if checkpointed else ():
            plain = layer.forward
            layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=reentrant)
        losses = train(net, torch.optim.SGD(net.parameters(), lr=0.1), 10)
        history = [each for layer in mpguard.fp8_state_dict(net).values() for each in layer.values()]
        found.append([torch.tensor(losses), *(each.detach() for each in net.parameters()), *history])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_delayed_scaling_outside_the_model_is_refused() -> None:
    net = model()
    mpguard.convert(net, POLICIES["delayed"])
    with pytest.raises(mpguard.NotInForce, match="outside the forward pass"):
        net.layers[0](torch.randn(16, 256, device="cuda"))
    with torch.no_grad():
        assert net.layers[0](torch.randn(16, 256, device="cuda")).isfinite().all()


def test_delayed_scaling_has_a_history() -> None:
    net = model()
    mpguard.convert(net, POLICIES["delayed"])
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 3)
    history: Any = net.layers[0].up.fp8_meta["scaling_fwd"].amax_history
    assert history.shape[0] == 16 and (history[:, 0] > 0).sum() == 3


def test_inputs_on_the_cpu_are_refused() -> None:
    layer = nn.Linear(32, 32)
    mpguard.convert(layer, POLICIES["tensorwise"])
    with pytest.raises(mpguard.NotInForce, match="its input is on cpu"):
        layer(torch.randn(16, 32))


def test_meta_models_are_filled_later() -> None:
    with torch.device("meta"):
        net = Model()
    mpguard.convert(net, POLICIES["tensorwise"])
    net.to_empty(device="cuda")
    net.load_state_dict(model().state_dict())
    assert train(net, torch.optim.AdamW(net.parameters(), lr=1e-3), 10)[-1] > 0


def test_mxfp8_on_hopper_is_refused() -> None:
    policy = Policy(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", backend="te")
    if hardware.detect().refuses(policy) is None:
        pytest.skip("MXFP8 runs here")
    net = model()
    with pytest.raises(mpguard.NotInForce, match="does not run here"):
        mpguard.convert(net, policy)
    assert type(net.layers[0].up) is nn.Linear


def test_the_recipe_of_megatron_bridge_with_both_ends_in_bf16() -> None:
    net = model()
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(backend="te")
    done = mpguard.convert(net, policy)
    assert done.backend == "te" and len(done.converted) == 4
    assert type(net.layers[0].up) is nn.Linear and type(net.layers[3].down) is nn.Linear
    assert train(net, torch.optim.AdamW(net.parameters(), lr=1e-3), 20)[-1] < 5


@pytest.mark.filterwarnings("ignore::mpguard.MpguardWarning")
@pytest.mark.parametrize("lead", [(61,), (3, 7), (2, 3, 5), (0,), (2, 0), ()], ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "torchao", "rowwise"])
def test_padded_rows_give_what_a_multiple_would(name: str, lead: tuple[int, ...]) -> None:
    """Outputs and gradients are those of a batch in which the rest of the rows is zero."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 128).cuda()
    mpguard.convert(layer, POLICIES[name].replace(compile=False))  # compiled, a graph of other rows rounds otherwise
    inputs = torch.randn(*lead, 256, device="cuda", requires_grad=True)
    rows = inputs.numel() // 256
    whole = torch.zeros(-(-max(rows, 1) // 16) * 16, 256, device="cuda")
    whole[:rows] = inputs.detach().reshape(-1, 256)
    whole.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        output = layer(inputs)
    assert output.shape == (*lead, 128)
    (output.float() * 2).sum().backward()
    weight, bias = layer.weight.grad.clone(), layer.bias.grad.clone()
    layer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        expected = layer(whole)
    (expected[:rows].float() * 2).sum().backward()
    assert torch.equal(output.reshape(-1, 128), expected[:rows])
    assert torch.equal(inputs.grad.reshape(-1, 256), whole.grad[:rows])
    assert torch.equal(weight, layer.weight.grad) and torch.equal(bias, layer.bias.grad)


def test_delayed_scaling_carries_rows_of_any_number_and_none() -> None:
    """Zeros do not enter the history: it is that of the rows alone."""
    layers = [nn.Linear(256, 128).cuda() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    inputs = torch.randn(61, 256, device="cuda")
    for layer, rows in zip(layers, (inputs, torch.cat([inputs, torch.zeros(3, 256, device="cuda")])), strict=True):
        mpguard.convert(layer, POLICIES["delayed"])
        with torch.autocast("cuda", torch.bfloat16):
            layer(rows)[:61].float().sum().backward()
    ours, theirs = (mpguard.fp8_state_dict(layer)[""] for layer in layers)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.autocast("cuda", torch.bfloat16):
        nothing = layers[0](inputs[:0])
    assert nothing.shape == (0, 128)
    nothing.float().sum().backward()
    assert not layers[0].weight.grad.isnan().any()
