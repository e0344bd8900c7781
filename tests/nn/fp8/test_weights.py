"""Parameters kept in FP8: exact masters, checkpoints, what is refused; with fake_te_weights.py for Transformer Engine.

On a GPU: tests/gpu/test_fp8_params_te.py. Runs that are resumed, framework by framework: test_resume.py.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import fake_te_weights
import torch
from paths import PROGRAMS
from processes import on_ranks, results, transcript
from torch import nn

import mpguard
from mpguard.nn.fp8 import convert as conversion
from mpguard.nn.fp8.weights import EXACT, exact_of, without_masters
from mpguard.policy import hardware
from mpguard.runtime.guard import Guard
from mpguard.runtime.patches import fp8_conversion
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks.fp8 import _weights as compare_weights
from mpguard.runtime.proof.fp8 import Fp8Layers
from mpguard.runtime.proof.verdict import Verdict

pytestmark = pytest.mark.filterwarnings("ignore:.*(padded to|on padding).*:mpguard.MpguardWarning")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_library", fake_te_weights.te)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.lm_head = nn.Linear(32, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        y: torch.Tensor = self.lm_head(x)
        return y


def model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(net(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(net: nn.Module, lr: float = 1e-3) -> fake_te_weights.Adam:
    return fake_te_weights.Adam(net.parameters(), lr=lr, master_weights=True)


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_masters_are_the_weights_bit_for_bit_and_the_copies_are_freed() -> None:
    net = model()
    before, optimizer = state(net), adam(net, lr=0.0)
    objects = {name: id(own) for name, own in net.named_parameters()}
    done = mpguard.convert(net, fake_te_weights.CURRENT)
    assert len(done.converted) == 8 and str(done).startswith("8 of 9 Linear layers in FP8 (te tensorwise, weights too)")
    assert {name: id(own) for name, own in net.named_parameters()} == objects
    assert same(state(net), before), "before the first step what is saved is exact too"
    train(net, optimizer, 1)
    weights = {name: own for name, own in net.named_parameters() if exact_of(own)}
    assert len(weights) == 8
    for name, own in weights.items():
        master = optimizer.state[own]["master_param"]
        assert torch.equal(master, before[name]) and exact_of(own).value is master
        assert not torch.equal(own.dequantize(), before[name])
    assert same(state(net), before)


def test_by_itself_the_optimizer_would_begin_with_rounded_masters() -> None:
    """The control: what is lost without."""
    net = model()
    before = state(net)
    mpguard.convert(net, fake_te_weights.CURRENT)
    weight = net.layers[0][0].weight
    optimizer = adam(net)
    optimizer.initialize_state(weight, False)
    assert not torch.equal(optimizer.state[weight]["master_param"], before["layers.0.0.weight"])


def test_gradients_hooks_and_attributes_of_a_weight_stay() -> None:
    net = model()
    weight, seen = net.layers[0][0].weight, []
    weight.note = "mine"
    weight.register_hook(lambda _: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    gradient = weight.grad = torch.ones_like(weight)
    frozen = net.layers[1][0].weight.requires_grad_(False)
    mpguard.convert(net, fake_te_weights.CURRENT)
    assert weight is net.layers[0][0].weight and isinstance(weight, nn.Parameter)
    assert isinstance(weight, fake_te_weights.Rounded)
    assert weight.note == "mine" and weight.grad is gradient and not frozen.requires_grad
    optimizer = adam(net)
    train(net, optimizer, 1)
    assert seen == ["hook", "after"]
    mpguard.revert(net)
    assert type(weight) is nn.Parameter and vars(weight) == {"note": "mine"} and not frozen.requires_grad
    train(net, optimizer, 1)
    assert seen == ["hook", "after"] * 2


def test_revert_gives_the_plain_model_with_exact_weights() -> None:
    net = model()
    attributes = {name: set(vars(module)) for name, module in net.named_modules()}
    mpguard.convert(net, fake_te_weights.CURRENT)
    optimizer = adam(net)
    train(net, optimizer)
    exact, copied = state(net), copy.deepcopy(net)
    train(net, optimizer)
    assert same(state(copied), exact), "a copy has exact weights of its own"
    train(copied, adam(copied))
    exact = state(net)
    mpguard.revert(net)
    assert same(state(net), exact) and {type(own) for own in net.parameters()} == {nn.Parameter}
    assert {name: set(vars(module)) for name, module in net.named_modules()} == attributes
    train(net, torch.optim.SGD(net.parameters()))


def test_a_checkpoint_is_the_plain_models_and_can_be_loaded_into_either() -> None:
    net = model()
    mpguard.convert(net, fake_te_weights.CURRENT)
    optimizer = adam(net)
    train(net, optimizer)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    plain, other = model(1), model(2)
    plain.load_state_dict(saved)
    mpguard.convert(other, fake_te_weights.CURRENT)
    for assign in (False, True):
        other.load_state_dict(saved, assign=assign)
        assert same(state(other), state(plain)) and isinstance(other.layers[0][0].weight, fake_te_weights.Rounded)
    late = adam(other)
    late.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, late) == train(net, optimizer) and same(state(other), state(net))


def test_weights_that_are_loaded_reach_the_masters_that_are_there() -> None:
    net = model()
    mpguard.convert(net, fake_te_weights.CURRENT)
    optimizer = adam(net, lr=0.0)
    train(net, optimizer, 1)
    net.load_state_dict(model(3).state_dict())
    train(net, optimizer, 1)
    assert same(state(net), state(model(3)))
    half = {name: value.bfloat16() for name, value in net.state_dict().items()}
    net.load_state_dict(half)
    assert torch.equal(net.state_dict()["layers.0.0.weight"], model(3).layers[0][0].weight), (
        "no digits are lost to fewer"
    )


def test_masters_of_old_are_not_believed() -> None:
    """FusedAdam makes masters of FP32 parameters too, and never updates them: a model that is converted in between."""
    net = model()
    optimizer = adam(net)
    train(net, optimizer)
    assert not torch.equal(optimizer.state[net.layers[0][0].weight]["master_param"], net.layers[0][0].weight)
    exact = state(net)
    mpguard.convert(net, fake_te_weights.CURRENT)
    optimizer.param_groups[0]["lr"] = 0.0
    train(net, optimizer, 1)
    assert same(state(net), exact)


@pytest.mark.parametrize("masters", [None, False, torch.float16])
def test_optimizers_without_masters_change_nothing(masters: Any) -> None:
    net = model()
    mpguard.convert(net, fake_te_weights.CURRENT)
    before = state(net)
    optimizer: Any = torch.optim.AdamW(net.parameters()) if masters is None else adam(net)
    if masters is False:
        optimizer.master_weights = False
    elif masters is not None:
        optimizer.master_weight_dtype = masters
    with pytest.raises(mpguard.NotInForce, match=r"FP32 master weights.*FusedAdam\(.*master_weights=True\)"):
        train(net, optimizer)
    assert same(state(net), before)


def test_remainders_are_no_masters() -> None:
    optimizer = adam(model())
    assert without_masters(optimizer) is None
    optimizer.store_param_remainders = True
    assert "store_param_remainders=False" in str(without_masters(optimizer))


def test_tied_weights_stay_tied_and_what_others_multiply_stays_exact() -> None:
    net = model()
    net.layers[1][0].weight = net.layers[0][0].weight
    net.lm_head.weight = net.embedding.weight
    done = mpguard.convert(net, fake_te_weights.CURRENT.replace(fp8_head=True))
    assert net.layers[1][0].weight is net.layers[0][0].weight and len(done.converted) == 8
    assert dict(done.skipped) == {"lm_head": "shares its weight with embedding, which is not FP8"}
    assert type(net.embedding.weight) is nn.Parameter
    train(net, adam(net))
    saved = net.state_dict()
    assert saved["layers.0.0.weight"].data_ptr() == saved["layers.1.0.weight"].data_ptr()
    mpguard.revert(net)
    assert net.layers[1][0].weight is net.layers[0][0].weight


def test_the_ends_stay_in_bf16() -> None:
    net = model()
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    done = mpguard.convert(net, fake_te_weights.CURRENT.replace(**ends))
    assert len(done.converted) == 4
    kinds = [type(block[0].weight) for block in net.layers]
    assert kinds == [nn.Parameter, fake_te_weights.Rounded, fake_te_weights.Rounded, nn.Parameter]


def test_a_weight_that_is_in_use_is_refused_and_the_model_is_as_it_was() -> None:
    net = model()
    before = [(name, type(module), set(vars(module))) for name, module in net.named_modules()]
    loss = net.layers[2](torch.randn(16, 32)).sum()  # of an earlier step, and still there
    with pytest.raises(mpguard.PolicyError, match=r"layers\.2\.[02]: its weight is in use.*Convert before DDP"):
        mpguard.convert(net, fake_te_weights.CURRENT)
    assert [(name, type(module), set(vars(module))) for name, module in net.named_modules()] == before
    assert {type(own) for own in net.parameters()} == {nn.Parameter}
    del loss
    assert mpguard.convert(net, fake_te_weights.CURRENT).converted


def test_a_weight_that_something_has_replaced_is_refused_at_the_forward_pass() -> None:
    net = model()
    mpguard.convert(net, fake_te_weights.CURRENT)
    net.layers[0][0].weight = nn.Parameter(torch.zeros(64, 32))
    with pytest.raises(mpguard.NotInForce, match=r"layers\.0\.0: its weight was kept in FP8 and has been replaced"):
        net(torch.zeros(2, 8, dtype=torch.long))
    with torch.no_grad():
        net(torch.zeros(2, 8, dtype=torch.long))


def test_a_warning_where_weights_without_exact_values_are_saved() -> None:
    """As in a model that was pickled whole."""
    net = model()
    mpguard.convert(net, fake_te_weights.CURRENT)
    weight = net.layers[0][0].weight
    delattr(weight, EXACT)
    with pytest.warns(mpguard.MpguardWarning, match=r"layers\.0\.0: the saved weight is rounded to FP8"):
        saved = net.state_dict()
    assert torch.equal(saved["layers.0.0.weight"], weight.dequantize())


def test_meta_and_sharded_weights_are_refused() -> None:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(mpguard.NotInForce, match="on the meta device"):
        mpguard.convert(net, fake_te_weights.CURRENT)
    net = model()
    net.layers[3][2].weight.data = torch.empty(0)  # as ZeRO-3 leaves it
    with pytest.raises(mpguard.NotInForce, match=r"layers\.3\.2: its weight is sharded"):
        mpguard.convert(net, fake_te_weights.CURRENT)
    assert {type(own) for own in net.parameters()} == {nn.Parameter}


def test_without_transformer_engine_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(hardware, "detect", lambda: hardware.named("h100"))
    libraries = {"torchao": "0.18.0"}
    there = hardware.named("h100")
    monkeypatch.setattr(hardware, "detect", lambda: there.__class__(**{**vars(there), "libraries": libraries}))
    with pytest.raises(mpguard.NotInForce, match="Transformer Engine's, which is not installed"):
        mpguard.convert(model(), mpguard.Policy(bf16=True, fp8="hybrid", fp8_param=True))


@pytest.mark.parametrize(
    ("changes", "ok", "message"),
    [
        ({}, True, "2 of 2 kept in FP8 (Float8CurrentScalingQuantizer), masters fp32"),
        ({"inexact": ["1"], "masters": {"fp32": 1}}, False, "masters fp32; not made from exact weights: 1"),
        ({"masters": {"fp16": 2}}, False, "masters fp16"),
        ({"kept": {"Float8CurrentScalingQuantizer": 1}}, False, "1 of 2 kept in FP8"),
        ({"kept": {"Float8Quantizer": 2}}, False, "(Float8Quantizer)"),
        ({"kept": {}, "masters": {}}, False, "in high precision"),
    ],
)
def test_the_proof_checks_the_storage_of_the_weights(changes: dict[str, Any], ok: bool, message: str) -> None:
    """The quantizer is that of the recipe, all layers have it, masters are FP32 and were made from exact weights."""
    facts = {"kept": {"Float8CurrentScalingQuantizer": 2}, "masters": {"fp32": 2}, **changes}
    (row,) = compare_weights(Fp8Layers("te", ["0", "1"], **facts), Plan(fake_te_weights.CURRENT))
    assert row.verdict is Verdict.of(ok) and message in row.found and row.asked.startswith("all kept in FP8")


def test_weights_in_fp8_without_fp8_param_are_reported() -> None:
    plain = Plan(fake_te_weights.CURRENT.replace(fp8_param=False))
    (row,) = compare_weights(Fp8Layers("te", ["0"], kept={"Float8Quantizer": 1}, inexact=["0"]), plain)
    assert row.verdict is Verdict.WRONG and row.asked == "in high precision"
    assert compare_weights(Fp8Layers("te", ["0"]), plain) == []


def test_the_guard_refuses_an_optimizer_without_masters_as_it_is_made() -> None:
    net = model()
    before = state(net)
    refused = r"AdamW has no FP32 master weights.*To go without: mpguard_overrides: {fp8_param: null}"
    with pytest.raises(mpguard.NotInForce, match=refused):
        fp8_conversion.convert(Guard(Plan(fake_te_weights.CURRENT)), torch.optim.AdamW(net.parameters()))
    assert {type(own) for own in net.parameters()} == {nn.Parameter} and same(state(net), before)
    fp8_conversion.convert(Guard(Plan(fake_te_weights.CURRENT)), adam(net))
    assert sum(exact_of(own) is not None for own in net.parameters()) == 8


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "DeepSpeed"])
def test_the_guard_refuses_engines_that_cannot_keep_them(strategy: str) -> None:
    with pytest.raises(mpguard.NotInForce, match=f"not supported under {strategy} with fp8_recipe tensorwise"):
        fp8_conversion.keeps_fp8_weights(Guard(Plan(fake_te_weights.CURRENT)), strategy)
    for policy in (fake_te_weights.CURRENT.replace(fp8_param=False), fake_te_weights.CURRENT.replace(fp8_param="auto")):
        assert not fp8_conversion.keeps_fp8_weights(Guard(Plan(policy)), strategy)
    assert not fp8_conversion.keeps_fp8_weights(Guard(Plan(fake_te_weights.CURRENT, enforce="warn")), strategy)


@pytest.mark.parametrize("order", ["convert", "guard"])
def test_ranks_that_begin_with_weights_of_their_own_train_one_model(order: str, tmp_path: Path) -> None:
    """DDP gives them those of the first rank exactly; under the guard DDP comes before the optimizer."""
    run = on_ranks(PROGRAMS / "fp8_weights_ddp.py", "fake_te", order, cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    one, other = sorted(results(run), key=lambda each: each["rank"])
    assert one["own"] != other["own"] and one["begun"] == other["begun"] == one["own"]
    assert one["ended"] == other["ended"] and one["rounded"] == other["rounded"]
    assert one["losses"][-1] < 0.7 * one["losses"][0]
    if order == "guard":
        assert "2 of 2 kept in FP8 (Float8CurrentScalingQuantizer), masters fp32" in run.stderr
        assert "proven in force on all 2 ranks" in run.stderr
